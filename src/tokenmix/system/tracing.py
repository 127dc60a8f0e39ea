"""Tell torch.compile about a function, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")


def keep_result(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Let torch.compile call a function while it traces, and keep the result.

    It does what ``torch.compiler.assume_constant_result`` does, which imports the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the mark that torch's own decorator sets
    return function
