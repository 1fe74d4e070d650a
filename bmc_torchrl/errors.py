"""What went wrong, for users: each message names what was given and what to do."""

from __future__ import annotations

__all__ = ["ResultsError", "SettingsError"]


class ResultsError(ValueError):
    """A results or published file that cannot be used; the message names the file and the fix."""


class SettingsError(ValueError):
    """Settings that cannot be run; the message names the setting and the fix."""
