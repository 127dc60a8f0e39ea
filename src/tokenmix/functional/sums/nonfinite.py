"""NaN and infinity beside masks: a sum over allowed pairs is a product with zeros, and zero times NaN is NaN.

That holds for the sums and for their gradients. Each form therefore mixes finite numbers only, and what is not finite
is put back at the very end: a row that may attend a non-finite token, or whose query is one, becomes NaN. What is put
back is data without a gradient, added last, so rows out of reach keep their numbers and their gradients.

A mark is 0 or NaN. Shapes: B batch, T queries, S keys.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from math import isfinite
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import is_exporting, is_intercepted
from ...kernels.recording import recorder
from ...types import Options
from ..layout.masks import zero_masked

Whole = TypeVar("Whole", bound=tuple[Tensor, ...])
Given = ParamSpec("Given")


def nothing_to_hide(*tensors: Tensor) -> bool:
    """Return whether a form may take its arguments as they are.

    On the CPU the sums of the arguments decide. Exported and traced programs always take them as they are.
    """
    if is_exporting():
        return True
    if (plan := recorder()) is not None:
        plan.check_finite(*tensors)
        return True
    if is_intercepted() or not all(a.is_cpu for a in tensors):
        return False
    return all(
        isfinite(float(a.detach().sum(dtype=torch.float64 if a.dtype == torch.float64 else torch.float32)))
        for a in tensors
    )


def clean(a: Tensor) -> Tensor:
    """Return a with 0 in place of every non-finite number."""
    free = not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_exporting()
    if free and torch._C._get_tracing_state() is None:  # a trace serves with gradients and without
        return torch.nan_to_num(a, 0.0, 0.0, 0.0)  # one pass instead of five; would store all of a for backward
    return torch.where(a.detach().isfinite(), a, 0.0)


def marks(*tensors: Tensor) -> Tensor:
    """Return NaN for tokens with a non-finite feature, else 0: (..., T, 1), outside the graph."""
    first, *rest = ((a.detach() * 0.0).sum(-1, keepdim=True) for a in tensors)
    return sum(rest, first)


def each_mark(*tensors: Tensor) -> Tensor:
    """Return the marks feature by feature, (..., T, D); a tensor with fewer features has one mark per head."""
    width = max(a.shape[-1] for a in tensors)
    first, *rest = ((a.detach() * 0.0).repeat_interleave(width // a.shape[-1], -1) for a in tensors)
    return sum(rest, first)


def over_pairs(ok: Tensor, mark: Tensor) -> Tensor:
    """Propagate marks (..., S, C) of keys to the queries that may attend them, ok (..., T, S): (..., T, C)."""
    if mark.shape[-1] == 1:
        return torch.where((ok & mark.isnan().mT).any(-1, keepdim=True), float("nan"), 0.0)
    return torch.where(ok.to(torch.float32) @ mark.isnan().to(torch.float32) > 0, float("nan"), 0.0)


def over_keys(mark: Tensor, queries: int, *, causal: bool = False, attn_mask: Tensor | None = None) -> Tensor:
    """Propagate marks (B, S, C) to queries that may attend all keys: (B, T or 1, C).

    The last of ``causal`` queries sees every key.
    """
    S = mark.shape[1]
    if attn_mask is not None:
        ok = (
            attn_mask & torch.ones(queries, S, dtype=torch.bool, device=mark.device).tril(S - queries)
            if causal
            else attn_mask
        )
        return over_pairs(ok, mark)
    return mark.cumsum(1)[:, S - queries :] if causal else mark.sum(1, keepdim=True)


def over_window(mark: Tensor, low: int, high: int) -> Tensor:
    """Propagate marks (B, T, C) to queries that attend keys t + low .. t + high: (B, T, C)."""
    T = mark.shape[1]
    count = F.pad(mark.isnan().cumsum(1), (0, 0, 1, 0))
    ends = torch.arange(T, device=mark.device)
    first, last = (ends + low).clamp(0, T), (ends + high + 1).clamp(0, T)
    return torch.where(count[:, last] > count[:, first], float("nan"), 0.0)


def add_nan_mask(y: Tensor, mark: Tensor) -> Tensor:
    """Add marks (B, T or 1, C or 1) to outputs y (B, T, C).

    Gradients that a loss requests of a marked row are NaN, even where the loss is linear in it.
    """
    if y.requires_grad and not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None:
        # a gradient that is not needed is None for some versions of torch
        y.register_hook(lambda g: None if g is None else torch.where(mark.isnan() & (g != 0), float("nan"), g))
    return y + mark.to(y.dtype)


def propagate_nonfinite(
    form: Callable[..., Tensor],
    q: Tensor | None,
    *keys: Tensor,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    each: bool = False,
    reach: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Call form(*keys), or form(q, *keys), (B, T, .), hiding non-finite numbers from it and putting them back.

    Args:
        q: (B, T, .), a query that is not also a key. None: there is no such argument.
        each: features are independent, so each has a mark of its own.
        reach: maps the marks of the keys to those each query meets. Default: a query may attend every key that the
            masks allow.
    """
    given = keys if q is None else (q, *keys)
    if nothing_to_hide(*given):
        return form(*given)
    y = form(*map(clean, given))  # first, because the form checks its arguments
    return add_nan_mask(y, _nan_mask(y, q, keys, causal, key_mask, attn_mask, each, reach))


def _nan_mask(
    y: Tensor,
    q: Tensor | None,
    keys: tuple[Tensor, ...],
    causal: bool,
    key_mask: Tensor | None,
    attn_mask: Tensor | None,
    each: bool,
    reach: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the marks to put back."""
    mark_of = each_mark if each else marks
    if not keys:
        assert q is not None
        return mark_of(q)
    mark = mark_of(*(zero_masked(a, key_mask) for a in keys))
    met = over_keys(mark, y.shape[1], causal=causal, attn_mask=attn_mask) if reach is None else reach(mark)
    return met if q is None else met + mark_of(q)


def guard_nonfinite(
    *keys: str, asks: str | None = None
) -> Callable[[Callable[Given, Tensor]], Callable[Given, Tensor]]:
    """Decorate a functional form with ``propagate_nonfinite``.

    Args:
        keys: names of the arguments that are keys.
        asks: name of the argument that is only a query.
    """

    def mark_up(form: Callable[Given, Tensor]) -> Callable[Given, Tensor]:
        names = list(inspect.signature(form).parameters)
        named = keys if asks is None else (asks, *keys)

        @functools.wraps(form)
        def guarded_form(*args: Given.args, **options: Given.kwargs) -> Tensor:
            given: Options = dict(zip(names[: len(args)], args, strict=True)) | options
            q = None if asks is None else given[asks]
            masks: Options = {name: given.get(name) for name in ("key_mask", "attn_mask")}
            call = functools.partial(_call_form, form, named, given)
            return propagate_nonfinite(
                call, q, *(given[name] for name in keys), causal=bool(given.get("causal")), **masks
            )

        return guarded_form

    return mark_up


def _call_form(form: Callable[..., Tensor], named: tuple[str, ...], given: Options, *values: Tensor) -> Tensor:
    """Call the form with replaced values for some of its arguments."""
    return form(**{**given, **dict(zip(named, values, strict=True))})


def propagate_nonfinite_chunk(
    form: Callable[..., tuple[Tensor, Whole]],
    q: Tensor | None,
    *keys: Tensor,
    key_mask: Tensor | None,
    each: bool = False,
    reach: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Whole]:
    """Apply ``propagate_nonfinite`` to new tokens of a stream.

    The form returns the outputs and the sums after them, which stay non-finite once a non-finite token was added.

    Args:
        each: the sums too are (B, D), feature by feature.
        reach: as in ``propagate_nonfinite``.
    """
    given = keys if q is None else (q, *keys)
    if nothing_to_hide(*given):
        return form(*given)
    y, after = form(*map(clean, given))
    last = (each_mark if each else marks)(*(zero_masked(a, key_mask) for a in keys)).sum(1)
    spoiled = (
        a + last.view(a.shape[0], *[1] * (a.ndim - 2), last.shape[-1]).to(a.dtype) if a.is_floating_point() else a
        for a in after
    )
    return add_nan_mask(y, _nan_mask(y, q, keys, True, key_mask, None, each, reach)), tuple(spoiled)  # type: ignore[return-value]  # as many tensors as ``form`` gave
