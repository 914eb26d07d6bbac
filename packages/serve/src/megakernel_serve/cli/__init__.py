"""The command line. Its modules import jax only once the arguments are known to be good."""

from megakernel_serve.cli.main import execute, main

__all__ = ["execute", "main"]
