"""Errors of this package."""

__all__ = ["CollectiveError", "ExchangeError", "TopologyError", "TuningError"]


class TopologyError(ValueError):
    """Devices, a name or counts that do not make a topology; the message says what would."""


class CollectiveError(ValueError):
    """A collective that cannot be built from its sizes; the message says what would be right."""


class TuningError(RuntimeError):
    """Measuring was asked for where there is nothing to measure."""


class ExchangeError(AssertionError):
    """A kernel under test raced, or left a semaphore that is not zero."""
