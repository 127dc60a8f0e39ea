"""Warn about public names and options before they are removed."""

from __future__ import annotations

import warnings


def warn_deprecated(old: str, new: str, *, removed_in: str) -> None:
    """Warn in one line that ``old`` will be removed in that version, and say what takes its place.

    Call this first in what is deprecated: the warning names the line that called that.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in tokenmix {removed_in}; use {new}.",
        DeprecationWarning,
        stacklevel=3,
    )
