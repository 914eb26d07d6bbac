"""Errors of this package."""

__all__ = ["PlanError"]


class PlanError(ValueError):
    """A buffer, a lifetime or a plan that cannot be right; raised before anything is compiled."""
