"""The two errors that loading a model can end with, each one sentence for the user."""

__all__ = ["CheckpointError", "ConfigError"]


class CheckpointError(ValueError):
    """A checkpoint's file, index or tensor is missing, damaged or of the wrong shape."""


class ConfigError(ValueError):
    """A configuration is unknown, changes the maths in an unsupported way, or does not divide."""
