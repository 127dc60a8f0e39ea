"""Results of checking promises: one result per promise, the comparisons that fail by name, and the error that carries
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from ..types import Record
from .tolerances import BY_DTYPE

SHOWN = 5
"""How many of the inputs that break a promise are printed; ``--verbose`` prints all."""
NARROW = (1e-9, 1e-6)
"""The errors, relative to max|want|, that float32 inside a computation in float64 leaves."""
HINT = "; an error near 1e-8 is float32 inside float64, as from a tensor made without dtype="
_found: ContextVar[list[str] | None] = ContextVar("_found", default=None)
KEPT, BROKEN, CRASHED, WAIVED, NOT_APPLICABLE = "kept", "broken", "crashed", "waived", "not applicable"
REFUSED = "refused"
"""The code under test raised an error of its own, which the reason quotes; only whole models may."""
WORDS = {KEPT: "pass", BROKEN: "FAIL", CRASHED: "FAIL", WAIVED: "waived", NOT_APPLICABLE: "n.a.", REFUSED: "refused"}


class Broken(AssertionError):
    """A promise failed by comparison; the message holds the offending input."""


class NotApplicable(Exception):
    """The promise does not apply to this mixer; the message says why."""


class ContractError(AssertionError):
    """At least one promise is broken. ``report`` holds every result."""

    def __init__(self, report: PromiseReport):
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
        word = WORDS[self.status]
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
class PromiseReport:
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

    def as_dict(self) -> Record:
        """Return the report as plain data, for JSON: of each promise its name, status and first reason."""
        results = [{"promise": r.promise, "status": r.status, "reason": r.reason} for r in self.results]
        return {"subject": self.subject, "results": results}

    def text(self, *, verbose: bool = False) -> str:
        """Return the report as lines; ``verbose`` as in ``Result.text``."""
        return "\n".join([self.subject, *(r.text(verbose=verbose) for r in self.results)])

    def __str__(self) -> str:
        return self.text()


def show(value: object) -> str:
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
def collect_failures(found: list[str] | None) -> Iterator[None]:
    """Within, comparisons that fail add their message to ``found`` and go on, so that every input is compared.

    With None the first one raises ``Broken``, as it does without this context.
    """
    token = _found.set(found)
    try:
        yield
    finally:
        _found.reset(token)


def fail(what: str, **inputs: object) -> NoReturn:
    """Raise ``Broken`` with the offending inputs in short form."""
    raise Broken(_message(what, inputs))


def _message(what: str, inputs: dict[str, object]) -> str:
    given = "; ".join(f"{name}={show(value)}" for name, value in inputs.items() if value is not None)
    return what + (f" [{given}]" if given else "")


def _break(what: str, inputs: dict[str, object]) -> None:
    """Note a failed comparison where failures are collected, and raise ``Broken`` elsewhere."""
    found = _found.get()
    if found is None:
        fail(what, **inputs)
    found.append(_message(what, inputs))


def same(
    got: Tensor,
    want: Tensor,
    what: str,
    *,
    tol: float | None = None,
    scale: float | Tensor | None = None,
    of: str = "",
    live: Tensor | None = None,
    start: int | None = None,
    **inputs: object,
) -> None:
    """Fail unless |got - want| <= tol * scale everywhere; inside ``collect_failures``, note the failure and go on.

    Args:
        tol: by default the tolerance of got's dtype (0 for integers).
        scale: what an error is relative to, by default max|want|.
        of: the scale in words, where it is given.
        live: (B, T), the tokens that are compared; None: all.
        start: the tensors are outputs (B, T, D) of the tokens from this index on, and the first wrong one is named.
    """
    if got.shape != want.shape:
        return _break(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}", inputs)
    if got.numel() == 0:
        return None
    tol = BY_DTYPE.get(got.dtype, 0.0) if tol is None else tol
    a, b = got.detach().double(), want.detach().double()
    if live is not None:
        a, b = (torch.where(live[..., None], each, 0.0) for each in (a, b))
    bad = ~a.isfinite()
    if bool(bad.any()):
        return _break(f"{what}: {_not_finite(bad, start)}", inputs)
    unit = b.abs().max() if scale is None else torch.as_tensor(scale, dtype=torch.float64, device=a.device)
    error = (a - b).abs()
    wrong = error > tol * unit
    if not bool(wrong.any()):
        return None
    ratio = torch.where(error > 0, error / unit, 0.0)
    at = _index(ratio.argmax(), error.shape)
    off, bound = _tell_apart(float(ratio[at]), tol, "e")
    relative = f"{of or ('a given size' if scale is not None else 'max|expected|')}, {float(unit.expand_as(a)[at]):.3g}"
    said = f"{what}: off by {off} of {relative} (allowed {bound}), {_place_text(at, start)}: {_values(a, b, at)}"
    first = at if start is None else _first_wrong(wrong, ratio)
    if first != at:
        said += f"; first wrong token {_place_text(first, start)}: {_values(a, b, first)}"
    exact = got.dtype == torch.float64 and tol == BY_DTYPE[torch.float64]
    return _break(said + (HINT if exact and NARROW[0] < float(ratio[at]) < NARROW[1] else ""), inputs)


def _index(flat: Tensor, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat, shape))


def _first_wrong(wrong: Tensor, ratio: Tensor) -> tuple[int, ...]:
    """Return the place of the largest error of the first token, of any row, that is wrong (B, T, D)."""
    token = int(wrong.any(-1).any(0).nonzero()[0])
    row, feature = _index(torch.where(wrong[:, token], ratio[:, token], -1.0).argmax(), ratio[:, token].shape)
    return row, token, feature


def _place_text(at: tuple[int, ...], start: int | None) -> str:
    """Say where a number stands; of outputs from token ``start`` on, as row, token and feature."""
    return f"at {at}" if start is None else f"row {at[0]}, token {start + at[1]}, feature {at[2]}"


def _not_finite(bad: Tensor, start: int | None = None) -> str:
    at = tuple(int(i) for i in bad.nonzero()[0])
    if start is not None:  # the first in time
        at = _first_wrong(bad, bad.double())
    return f"{int(bad.sum())} of {bad.numel()} numbers are not finite, first {_place_text(at, start)}"


def _values(a: Tensor, b: Tensor, at: tuple[int, ...]) -> str:
    return "{}, expected {}".format(*_tell_apart(float(a[at]), float(b[at])))


def _tell_apart(a: float, b: float, kind: str = "g") -> tuple[str, str]:
    """Return two numbers with as many digits as tell them apart: few, ten, or all."""
    for digits in (6, 10) if kind == "g" else (2, 5, 9):
        texts = f"{a:.{digits}{kind}}", f"{b:.{digits}{kind}}"
        if texts[0] != texts[1]:
            return texts
    return repr(a), repr(b)


def finite(value: Tensor, what: str, *, start: int | None = None, **inputs: object) -> None:
    """Fail unless every number is finite; ``start`` as in ``same``."""
    bad = ~value.detach().isfinite()
    if bool(bad.any()):
        _break(f"{what}: {_not_finite(bad, start)}", inputs)


def differs(got: Tensor, other: Tensor, what: str, *, by: float, **inputs: object) -> None:
    """Fail unless every row of the batch differs by more than ``by``, relative to max|other|."""
    gap = (got.detach() - other.detach()).double().abs().flatten(1).amax(
        1
    ) / other.detach().double().abs().max().clamp_min(1e-30)
    if bool((gap <= by).any()):
        _break(f"{what}: changed by {float(gap.min()):.1e} only", inputs)
