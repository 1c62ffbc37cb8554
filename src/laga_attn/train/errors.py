"""The one exception that the command line shows as a single line."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(ValueError):
    """Something that the user asked for cannot be done; the message names it, the rule and the fix."""
