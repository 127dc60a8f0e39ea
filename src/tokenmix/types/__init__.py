"""Names of plain types that many modules share."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Options", "Record", "Spec"]

Options: TypeAlias = dict[str, Any]
"""Options by name: the keyword arguments of a constructor or a function."""
Spec: TypeAlias = dict[str, Any]
"""A mixer as configs write it: its name under "name", its options beside it."""
Record: TypeAlias = dict[str, Any]
"""An object of JSON: a line of metrics, a result, the facts of a run."""
