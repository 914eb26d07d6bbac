"""Errors of this package."""

__all__ = ["ContainerError", "PlanError", "StreamError"]


class PlanError(ValueError):
    """A buffer, a lifetime or a plan that cannot be right; raised before anything is compiled."""


class StreamError(PlanError):
    """A kernel that does not take and release the slots of a stream as they were planned."""


class ContainerError(ValueError):
    """A container on disk that cannot be written, or is not what its reader expects."""
