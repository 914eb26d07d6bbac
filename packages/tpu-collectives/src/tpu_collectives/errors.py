"""Errors of this package."""

__all__ = ["TopologyError"]


class TopologyError(ValueError):
    """Devices, a name or counts that do not make a topology; the message says what would."""
