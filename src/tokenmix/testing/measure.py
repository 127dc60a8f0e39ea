"""Adversarial cases of a functional form, its derivatives, and the errors of both against an exact float64 form.

The promise ``accurate_on_adversarial_keys`` and the gate of ``tokenmix bench`` both measure with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..system.machine import torch_threads
from ..types import Options
from . import inputs
from .subject import Roles, leaf_names
from .tolerances import ADVERSARIAL, BY_DTYPE, LOGIT_EPS

SIZE, BIAS = 100.0, 60.0
"""The largest size of adversarial keys and of adversarial log-weights."""
LOST = 1e-32
"""Gradients below it are compared as if they had this size: of a smaller float32 number, digits are lost, or all of it
where its reciprocal is too large, as in sigmoid(-100).
"""
TOLERANCE = {**BY_DTYPE, torch.float32: ADVERSARIAL}
"""The tolerance of the errors by dtype, before the part that grows with the logits.

Half precision rounds its output.
"""

Arguments = tuple[Any, ...]


def leaves_of(args: object) -> list[Tensor]:
    """Return the floating point tensors among arguments, those in tuples and lists included."""
    if isinstance(args, Tensor):
        return [args] if args.is_floating_point() else []
    return [leaf for a in args for leaf in leaves_of(a)] if isinstance(args, (tuple, list)) else []


def cast(value: object, dtype: torch.dtype, device: str | None = None) -> Any:
    """Return a copy rounded to ``dtype`` on ``device``, tuples included, with its floating point tensors as leaves."""
    if isinstance(value, tuple):
        return tuple(cast(v, dtype, device) for v in value)
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device, dtype).clone().requires_grad_() if value.is_floating_point() else value.to(device)


def with_argument(args: Arguments, at: int, value: object) -> Arguments:
    """Return the arguments with number ``at`` replaced."""
    return (*args[:at], value, *args[at + 1 :])


def adversarial_cases(
    args: Arguments, options: Options, of: Roles, *, seed: int = 0, masked: bool = True
) -> Iterator[tuple[str, Arguments, Options]]:
    """Yield the name, arguments and options of every adversarial call of a functional form.

    Every pattern of keys comes with the log-weights as they are; every other pattern, again with log-weights up to
    ``BIAS``. The last case has a key mask.

    Args:
        args, options: an ordinary call, whose other arguments stay.
        of: the roles of the arguments.
        masked: whether the form takes a key mask.
    """
    shape = tuple(args[of.keys].shape)
    biases = [b for b in of.biases if b < len(args) and args[b] is not None]
    for i, (name, keys) in enumerate(inputs.adversarial_keys(shape, size=SIZE, seed=seed).items()):
        case = with_argument(args, of.keys, keys)
        yield f"keys {name}, size {SIZE:g}", case, options
        if biases and i % 2 == 0:
            for b in biases:
                case = with_argument(case, b, inputs.big_bias((case[b],), size=BIAS, seed=seed)[0])
            yield f"keys {name}, size {SIZE:g}, |w| to {BIAS:g}", case, options
    if masked:
        hidden = inputs.key_masks(shape[1])["mixed"][:1].to(args[of.keys].device)
        keys = inputs.KEYS["uniform"](shape, seed, SIZE)
        yield (
            f"keys uniform with key_mask, size {SIZE:g}",
            with_argument(args, of.keys, keys),
            {**options, "key_mask": hidden},
        )


def derive(
    run: Callable[[Arguments], Tensor], args: Arguments, *, backward: bool = True, live: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Compute the output and, with ``backward``, the gradients of a fixed weighted sum of it by every leaf.

    Args:
        live: (B, T), the queries whose outputs are specified; 0 takes the place of the others. None: all.
    """
    if not backward:
        with torch.no_grad():
            return _zero_masked_rows(run(args), live), []
    y, leaves = _zero_masked_rows(run(args), live), leaves_of(args)
    weight = inputs.noise(*y.shape, seed=9).to(y)
    grads = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return y.detach(), [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, grads, strict=True)]


def _zero_masked_rows(y: Tensor, live: Tensor | None) -> Tensor:
    return y if live is None else torch.where(live[..., None], y, 0.0)


def largest(error: Tensor) -> float:
    """Return the largest magnitude: infinity where anything is not finite, 0 for a tensor without elements."""
    if not error.numel():
        return 0.0
    return float(error.abs().max()) if bool(error.isfinite().all()) else float("inf")


class MeasuredPart(NamedTuple):
    """The output or the gradient of one argument: computed, exact, and the size that its error is relative to."""

    what: str
    got: Tensor
    want: Tensor
    scale: float | Tensor
    of: str

    @property
    def error(self) -> float:
        """The largest relative error; infinite where anything computed is not finite."""
        return largest((self.got.double() - self.want) / self.scale)


class Comparison(NamedTuple):
    """One case: the arguments as they were rounded, the parts that were compared, and their common tolerance."""

    args: Arguments
    parts: list[MeasuredPart]
    tolerance: float


@dataclass(frozen=True)
class Measure:
    """The error of a functional form in ``dtype`` on ``device`` against an exact form in float64.

    The error of the output is relative to the exact form on |v|, which is sum(weight |v|) for each query. The error of
    a gradient is relative to its largest element. Gradients of logits cancel, so theirs is relative to the gradient of
    the values (of the keys, where a form has no values) times the largest value, where that is larger.

    Args:
        run: f(*args, **options), the form that is judged.
        exact: g(args, options), the same function on float64 arguments.
        of: the roles of the arguments of both.
        largest_logit: h(args, options), which widens the tolerance by ``LOGIT_EPS`` for each unit.
        backward: whether gradients are compared too.
        signed: whether weights have both signs; the output's error is then relative to the largest sum of all queries.
    """

    run: Callable[..., Tensor]
    exact: Callable[[Arguments, Options], Tensor]
    of: Roles
    largest_logit: Callable[[Arguments, Options], float]
    dtype: torch.dtype = torch.float32
    device: str | None = None
    backward: bool = True
    signed: bool = False

    def compare(self, case: Arguments, options: Options) -> Comparison:
        """Compare the output and the gradients on one case."""
        args = cast(case, self.dtype, self.device)
        true = cast(args, torch.float64)
        live = options.get("key_mask")  # these calls mix a sequence with itself
        got, grads = derive(lambda a: self.run(*a, **options), args, backward=self.backward, live=live)
        with torch_threads(1):  # in many small operations threads only wait for each other
            want, wanted = derive(lambda a: self.exact(a, options), true, backward=self.backward, live=live)
            unit = self._unit(true, options)
        parts = [MeasuredPart("output", got, want, unit, "sum(weight |v|)")]
        parts += self._gradients(true, grads, wanted)
        return Comparison(args, parts, TOLERANCE[self.dtype] + LOGIT_EPS * self.largest_logit(true, options))

    def _unit(self, true: Arguments, options: Options) -> Tensor:
        """Return the size that the output's error is relative to: sum(weight |v|), or 1 where the dtype rounds that
        itself.
        """
        at = self.of.values
        with torch.no_grad():
            sizes = true if at is None else with_argument(true, at, true[at].abs())
            unit = self.exact(sizes, options).abs().amax(-1, keepdim=True)
        unit = unit.amax() if self.signed else unit
        return torch.where(unit > self._tiny, unit, 1.0)

    def _gradients(self, true: Arguments, grads: list[Tensor], wanted: list[Tensor]) -> Iterator[MeasuredPart]:
        if not wanted:
            return
        against = self.of.keys if self.of.values is None else self.of.values
        smallest = max(self._tiny, LOST)
        floor = max(largest(wanted[against]) * largest(leaves_of(true)[against].detach()), smallest)
        for i, (name, got, want) in enumerate(zip(leaf_names(self.run, true), grads, wanted, strict=True)):
            if want.numel():  # factors of rank 0 have none
                scale = max(largest(want), smallest if i == against else floor)
                yield MeasuredPart(f"gradient of {name}", got, want, scale, "the largest gradient")

    @property
    def _tiny(self) -> float:
        """The smallest normal number of the dtype."""
        return torch.finfo(self.dtype).tiny
