"""Results of checking promises: one result per promise, the comparisons that fail by name, and the error that carries
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from .tolerances import BY_DTYPE

SHOWN = 5
"""How many of the inputs that break a promise are printed; ``--verbose`` prints all."""
NARROW = (1e-9, 1e-6)
"""The errors, relative to max|want|, that float32 inside a computation in float64 leaves."""
HINT = "; an error near 1e-8 is float32 inside float64, as from a tensor made without dtype="
_found: ContextVar[list[str] | None] = ContextVar("_found", default=None)
KEPT, BROKEN, CRASHED, WAIVED, NOT_APPLICABLE = "kept", "broken", "crashed", "waived", "not applicable"


class Broken(AssertionError):
    """A promise failed by comparison; the message holds the offending input."""


class NotApplicable(Exception):
    """The promise does not concern this mixer; the message says why."""


class ContractError(AssertionError):
    """At least one promise is broken. ``report`` holds every result."""

    def __init__(self, report: Report):
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Result:
    """One promise: its name, its status, and the reason for any status but kept.

    Args:
        others: what else was found, after the reason: one message for each further input that breaks the promise.
        where: the innermost line of the code under test, if it raised.
        trace: the whole traceback, if it raised.
    """

    promise: str
    status: str
    reason: str = ""
    others: tuple[str, ...] = ()
    where: str = ""
    trace: str = ""

    def text(self, *, verbose: bool = False) -> str:
        """Return the result as lines: at most ``SHOWN`` inputs that break the promise and a count, or all of them.

        Args:
            verbose: whether all of them are shown, and the traceback where the code under test raised.
        """
        word = {KEPT: "pass", BROKEN: "FAIL", CRASHED: "FAIL", WAIVED: "waived", NOT_APPLICABLE: "n.a."}[self.status]
        reason = "raised " + self.reason if self.status == CRASHED else self.reason
        lines = [f"{word}  {self.promise}" + (f": {reason}" if reason else "")]
        shown = self.others if verbose else self.others[: SHOWN - 1]
        lines += [f"      also: {other}" for other in shown]
        if len(self.others) > len(shown):
            lines.append(f"      and {len(self.others) - len(shown)} more; {len(self.others) + 1} inputs break it")
        if self.where:
            lines.append(f"      at {self.where}")
        if verbose and self.trace:
            lines += [f"      {line}" for line in self.trace.rstrip().splitlines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


@dataclass
class Report:
    """Every promise's result for one mixer built with one set of options."""

    subject: str
    results: list[Result] = field(default_factory=list)

    @property
    def failures(self) -> list[Result]:
        """The promises that were broken, by comparison or by an exception."""
        return [r for r in self.results if r.status in (BROKEN, CRASHED)]

    def status(self, promise: str) -> str:
        """Return the status of one promise."""
        return next(r.status for r in self.results if r.promise == promise)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON: of each promise its name, status and first reason."""
        results = [{"promise": r.promise, "status": r.status, "reason": r.reason} for r in self.results]
        return {"subject": self.subject, "results": results}

    def text(self, *, verbose: bool = False) -> str:
        """Return the report as lines; ``verbose`` as in ``Result.text``."""
        return "\n".join([self.subject, *(r.text(verbose=verbose) for r in self.results)])

    def __str__(self) -> str:
        return self.text()


def show(value: Any) -> str:
    """Format an input compactly: masks as 0/1 strings, small integer tensors in full, numbers as shape and range."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.dtype == torch.bool and value.numel() <= 400:
        rows = value.reshape(-1, value.shape[-1]) if value.ndim else value.reshape(1, 1)
        return "/".join("".join("1" if b else "0" for b in row) for row in rows.tolist())
    if not value.is_floating_point() and value.numel() <= 64:
        return str(value.tolist())
    kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value.numel() == 0 or not value.is_floating_point():
        return kind
    low, high = value.detach().double().aminmax()
    return f"{kind} in [{low:.3g}, {high:.3g}]"


@contextmanager
def collecting(found: list[str] | None) -> Iterator[None]:
    """Within, comparisons that fail add their message to ``found`` and go on, so that every input is compared.

    With None the first one raises ``Broken``, as it does without this context.
    """
    token = _found.set(found)
    try:
        yield
    finally:
        _found.reset(token)


def fail(what: str, **inputs: Any) -> NoReturn:
    """Raise ``Broken`` with the offending inputs in short form."""
    raise Broken(_message(what, inputs))


def _message(what: str, inputs: dict[str, Any]) -> str:
    given = "; ".join(f"{name}={show(value)}" for name, value in inputs.items() if value is not None)
    return what + (f" [{given}]" if given else "")


def _break(what: str, inputs: dict[str, Any]) -> None:
    """Note a failed comparison where failures are collected, and raise ``Broken`` elsewhere."""
    found = _found.get()
    if found is None:
        fail(what, **inputs)
    found.append(_message(what, inputs))


def same(
    got: Tensor, want: Tensor, what: str, *, tol: float | None = None, scale: float | None = None, **inputs: Any
) -> None:
    """Fail unless max|got - want| <= tol * scale; inside ``collecting``, note the failure and go on.

    By default tol is the tolerance of got's dtype (0 for integers) and scale is max|want|.
    """
    if got.shape != want.shape:
        return _break(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}", inputs)
    if got.numel() == 0:
        return None
    tol = BY_DTYPE.get(got.dtype, 0.0) if tol is None else tol
    a, b = got.detach().double(), want.detach().double()
    if not bool(a.isfinite().all()):
        return _break(f"{what}: {int((~a.isfinite()).sum())} of {a.numel()} numbers are not finite", inputs)
    scale = float(b.abs().max()) if scale is None else scale
    error = (a - b).abs()
    if float(error.max()) <= tol * scale:
        return None
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    ratio = float(error.max()) / scale if scale else float("inf")
    numbers = "{}, expected {}".format(*_apart(float(a[at]), float(b[at])))
    exact = got.dtype == torch.float64 and tol == BY_DTYPE[torch.float64]
    hint = HINT if exact and NARROW[0] < ratio < NARROW[1] else ""
    return _break(f"{what}: off by {ratio:.2e} (allowed {tol:.0e}) at {at}: {numbers}{hint}", inputs)


def _apart(a: float, b: float) -> tuple[str, str]:
    """Return two numbers with six digits, or with as many as tell them apart: ten, or all."""
    for digits in (6, 10):
        texts = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return repr(a), repr(b)


def finite(value: Tensor, what: str, **inputs: Any) -> None:
    """Fail unless every number is finite."""
    bad = ~value.detach().isfinite()
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        _break(f"{what}: {int(bad.sum())} of {bad.numel()} numbers are not finite, first at {at}", inputs)


def differs(got: Tensor, other: Tensor, what: str, *, by: float, **inputs: Any) -> None:
    """Fail unless every row of the batch differs by more than ``by``, relative to max|other|."""
    gap = (got.detach() - other.detach()).double().abs().flatten(1).amax(
        1
    ) / other.detach().double().abs().max().clamp_min(1e-30)
    if bool((gap <= by).any()):
        _break(f"{what}: changed by {float(gap.min()):.1e} only", inputs)
