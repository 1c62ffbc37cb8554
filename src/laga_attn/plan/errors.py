"""Errors that are shown to the user without a traceback."""

from __future__ import annotations

__all__ = ["PlanError"]


class PlanError(ValueError):
    """A request that cannot be planned, in one line that says what would be valid."""
