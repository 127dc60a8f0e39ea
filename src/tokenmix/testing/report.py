"""Results of checking promises: one result per promise, the comparisons that fail by name, and the error that carries
them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .tolerances import BY_DTYPE

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
    """One promise: its name, its status, and the reason for any status but kept."""

    promise: str
    status: str
    reason: str = ""

    def __str__(self) -> str:
        word = {KEPT: "pass", BROKEN: "FAIL", CRASHED: "FAIL", WAIVED: "waived", NOT_APPLICABLE: "n.a."}[self.status]
        text = "raised " + self.reason if self.status == CRASHED else self.reason
        return f"{word}  {self.promise}" + (f": {text}" if text else "")


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
        """Return the report as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([self.subject, *(str(r) for r in self.results)])


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


def fail(what: str, **inputs: Any) -> None:
    """Raise ``Broken`` with the offending inputs in short form."""
    given = "; ".join(f"{name}={show(value)}" for name, value in inputs.items() if value is not None)
    raise Broken(f"{what}" + (f" [{given}]" if given else ""))


def same(
    got: Tensor, want: Tensor, what: str, *, tol: float | None = None, scale: float | None = None, **inputs: Any
) -> None:
    """Fail unless max|got - want| <= tol * scale.

    By default tol is the tolerance of got's dtype (0 for integers) and scale is max|want|.
    """
    if got.shape != want.shape:
        fail(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}", **inputs)
    if got.numel() == 0:
        return
    tol = BY_DTYPE.get(got.dtype, 0.0) if tol is None else tol
    a, b = got.detach().double(), want.detach().double()
    if not bool(a.isfinite().all()):
        fail(f"{what}: {int((~a.isfinite()).sum())} of {a.numel()} numbers are not finite", **inputs)
    scale = float(b.abs().max()) if scale is None else scale
    error = (a - b).abs()
    if float(error.max()) <= tol * scale:
        return
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    ratio = float(error.max()) / scale if scale else float("inf")
    fail(
        f"{what}: off by {ratio:.2e} (allowed {tol:.0e}) at {at}: {float(a[at]):.6g}, expected {float(b[at]):.6g}",
        **inputs,
    )


def finite(value: Tensor, what: str, **inputs: Any) -> None:
    """Fail unless every number is finite."""
    bad = ~value.detach().isfinite()
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        fail(f"{what}: {int(bad.sum())} of {bad.numel()} numbers are not finite, first at {at}", **inputs)


def differs(got: Tensor, other: Tensor, what: str, *, by: float, **inputs: Any) -> None:
    """Fail unless every row of the batch differs by more than ``by``, relative to max|other|."""
    gap = (got.detach() - other.detach()).double().abs().flatten(1).amax(
        1
    ) / other.detach().double().abs().max().clamp_min(1e-30)
    if bool((gap <= by).any()):
        fail(f"{what}: changed by {float(gap.min()):.1e} only", **inputs)
