"""Modules of this folder are imported by name, here and in processes that compile."""

import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
sys.path.insert(0, str(Path(__file__).parent))
