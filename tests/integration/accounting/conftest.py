"""The benchmark is no package: its modules are imported from the root of the workspace."""

import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
