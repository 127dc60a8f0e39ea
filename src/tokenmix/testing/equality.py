"""Promises on values and derivatives: the reference, adversarial keys, nothing to attend, numerical gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from .. import functional
from ..mixers import Mixer
from ..types import Options
from . import inputs
from .measure import Measure, adversarial_cases, cast, derive, with_argument
from .report import NotApplicable, fail, finite, same
from .subject import Subject, allowed_pairs, freeze, gradients, is_mixer, leaf_names, roles, structural, valid_queries

LONG, LONG_GRID = 150, 72
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scenarios(s: Subject, mixer: Mixer) -> Iterator[tuple[str, Options]]:
    """Yield calls that together use every argument this mixer takes: a name and the keyword arguments of forward beside
    x.
    """
    T, can = s.length, mixer.capabilities
    yield "plain", {}
    for name, mask in inputs.key_masks(T).items():
        yield f"key_mask {name}", {"key_mask": mask}
    yield "positions", {"positions": inputs.increasing_positions(2, T, s.limit(mixer), seed=s.seed)}
    if can.attn_mask:
        yield "attn_mask of one row", {"attn_mask": inputs.pair_mask(1, T, T, seed=s.seed)[0]}
        yield (
            "attn_mask and key_mask",
            {"attn_mask": inputs.pair_mask(2, T, T, seed=s.seed), "key_mask": inputs.key_masks(T)["mixed"]},
        )
    if can.context:
        S = s.context_length(mixer)
        context = s.x(length=S, stream=1)
        yield "context", {"context": context}
        yield "context with key_mask", {"context": context, "key_mask": inputs.key_masks(S)["mixed"]}
        at = {"context": context, "positions": inputs.increasing_positions(2, T, s.limit(mixer), seed=s.seed)}
        yield "context with positions", at
        yield "context with positions and key_mask", {**at, "key_mask": inputs.key_masks(S)["mixed"]}
        if can.attn_mask:
            yield "context with attn_mask", {"context": context, "attn_mask": inputs.pair_mask(2, T, S, seed=s.seed)}


def reference_value(s: Subject, args: tuple, options: Options) -> Tensor:
    """Compute the reference on arguments of the functional form, with all its masks combined into one."""
    assert s.reference is not None
    keys = {"causal": False, "key_mask": None, "attn_mask": None} | {
        k: v for k, v in options.items() if k in ("causal", "key_mask", "attn_mask")
    }
    mask = allowed_pairs(args[0].shape[0], args[0].shape[1], args[roles(s.reference).keys].shape[1], **keys)
    more = structural(options)
    if "causal_taps" in inspect.signature(s.reference).parameters:
        more["causal_taps"] = keys["causal"]
    return s.reference(*args, mask=None if bool(mask.all()) else mask, **more)


def needs_reference(s: Subject) -> None:
    """Fail for a row of the library without a reference; mixers from outside may go without."""
    if s.reference is None:
        if s.cls.__module__.startswith("tokenmix."):
            fail("has no function of its name in tokenmix.reference")
        raise NotApplicable("no reference was given")


def equals_reference(s: Subject) -> None:
    """Forward and all gradients, of inputs and parameters, equal the float64 reference."""
    needs_reference(s)
    mixer = s.build()
    bound = hasattr(mixer, "functional_args")
    calls = scenarios(s, mixer) if is_mixer(s.cls) else iter([("plain", {})])
    for name, given in calls:
        if not bound and set(given) - {"key_mask"}:
            continue
        x = s.x().requires_grad_()
        leaves = {"x": x, **{n: p for n, p in mixer.named_parameters() if p.requires_grad}}
        if given.get("context") is not None:
            leaves["context"] = given["context"].requires_grad_()
        got = s.call(mixer, x, **given)
        want = _through_reference(s, mixer, x, given) if bound else _plain_reference(s, mixer, x, given)
        shown = {"scenario": name, "seed": s.seed, "x": x, **given}
        live = valid_queries(got, given)
        finite(got, "the output", start=0, **shown)
        same(got, want, "the output is not the reference's", live=live, start=0, **shown)
        weight = inputs.noise(*got.shape, seed=s.seed + 5) * live[..., None]
        ours, theirs = (gradients((y * weight).sum(), leaves) for y in (got, want))
        scale = max(float(g.abs().max()) for g in theirs.values())
        for leaf in leaves:
            what = f"the gradient of {leaf} is not the reference's"
            same(ours[leaf], theirs[leaf], what, scale=scale, of="the largest gradient", **shown)


def _through_reference(s: Subject, mixer: Mixer, x: Tensor, given: Options) -> Tensor:
    args, options = s.args(mixer, x, **given)
    return mixer.out_proj(reference_value(s, args, options))


def _plain_reference(s: Subject, mixer: Mixer, x: Tensor, given: Options) -> Tensor:
    assert s.reference is not None
    causal = bool(getattr(mixer, "causal", s.options.get("causal", False)))
    return s.reference(
        mixer, x, allowed_pairs(x.shape[0], x.shape[1], x.shape[1], causal=causal, key_mask=given.get("key_mask"))
    )


def longer_case(s: Subject) -> tuple[tuple, Options]:
    """Build a mixer and the arguments of its functional form for a longer sequence, in float64 without a graph."""
    if s.functional is None or not hasattr(s.cls, "functional_args"):
        raise NotApplicable("has no functional form to measure (functional=...)")
    grid, length = s.grid, LONG_GRID if s.cls.facts.grid else LONG  # type: ignore[attr-defined]  # references on grids loop over pairs
    if grid is not None:
        while torch.Size(grid).numel() < LONG_GRID:
            grid = (*grid[:-1], grid[-1] + 1) if grid[-1] <= min(grid) else (*(n + 1 for n in grid[:-1]), grid[-1])
        length = s.prefix + torch.Size(grid).numel()
    mixer = s.build(**s.options_for_length(length))
    place: Options = {} if grid is None else {"grid": grid}
    with torch.no_grad():
        args, options = s.args(mixer, s.x(1, length), **place)
    return args, options | s.cls.facts.conditioned  # type: ignore[attr-defined]  # as above


def accurate_on_adversarial_keys(s: Subject) -> None:
    """float32 output and gradients are within 1e-5 of the reference for keys in +-100, spikes, ramps and |w| to 60."""
    needs_reference(s)
    args, options = longer_case(s)
    of = roles(s.functional)  # type: ignore[arg-type]  # _long has refused None
    measure = Measure(s.functional, partial(reference_value, s), of, s.cls.largest_logit)  # type: ignore[arg-type, attr-defined]  # as above, so a Mixer
    names = list(inspect.signature(s.functional).parameters)  # type: ignore[arg-type]  # as above
    for name, case, given in adversarial_cases(args, options, of, seed=s.seed):
        found = measure.compare(case, given)
        shown = {"case": name, "seed": s.seed, **{names[at]: found.args[at] for at in (0, of.keys)}}
        for part in found.parts:
            start = 0 if part.what == "output" and part.got.ndim == 3 else None
            more: Options = {"tol": found.tolerance, "scale": part.scale, "of": part.of, "start": start}
            same(part.got, part.want, f"float32 {part.what}", **more, **shown)


def finite_at_large_keys(s: Subject) -> None:
    """Output and gradients are finite for keys of 1e4 in float32, bfloat16 and float16 wherever the exact ones fit the
    dtype.
    """
    if s.functional is not None and hasattr(s.cls, "functional_args"):
        args, options = longer_case(s)
        at = roles(s.functional).keys
        for name, keys in inputs.adversarial_keys(tuple(args[at].shape), size=1e4, seed=s.seed).items():
            for dtype in DTYPES:
                case = cast(with_argument(args, at, keys), dtype)
                for what, value in _fitting_values(partial(s.functional, **options), case, dtype):
                    finite(value, f"{what} in {dtype}", case=f"keys {name}, size 1e4", seed=s.seed, k=case[at])
    finite_at_large_inputs(s)


def _fitting_values(form: Callable[..., Tensor], case: tuple, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the output and the gradients by name, without elements whose exact value is too large for the dtype.

    Such elements are replaced by 0 only where the value as computed holds anything that is not finite.
    """
    names = leaf_names(form, case)
    got, grads = derive(lambda a: form(*a), case)
    values = [got, *grads]
    exact: list[Tensor | None] = [None] * len(values)
    if not all(bool(v.isfinite().all()) for v in values):
        want, wanted = derive(lambda a: form(*a), cast(case, torch.float64))
        exact = [want, *wanted]
    for i, (value, true) in enumerate(zip(values, exact, strict=True)):
        if true is not None:
            value = torch.where(true.isfinite() & (true.abs() >= torch.finfo(dtype).max / 2), 0.0, value)
        yield "output" if i == 0 else f"gradient of {names[i - 1]}", value


def finite_at_large_inputs(s: Subject) -> None:
    """The layer is finite on inputs of up to 1e4 in every float dtype wherever all that its projections read and write
    fits.

    The dtypes are float32, bfloat16 and float16.
    """
    exact, shape = s.build(), tuple(s.x().shape)
    for dtype in DTYPES:
        mixer = s.build(dtype=dtype)
        for name, make in inputs.KEYS.items():
            for size in (1e4, 1e3, 100.0, 10.0):
                x = make(shape, s.seed, size)
                if _largest(s, exact, x) < torch.finfo(dtype).max / 2:
                    y = s.call(mixer, x.to(dtype))
                    finite(
                        y if isinstance(y, Tensor) else y[0],
                        f"output in {dtype}",
                        x=f"{name}, size {size:.0f}",
                        seed=s.seed,
                    )
                    break


def _largest(s: Subject, mixer: nn.Module, x: Tensor) -> float:
    """Return the largest magnitude in the input and at the inputs and outputs of every Linear and of out_proj."""
    seen = [float(x.abs().max())]

    def note_largest(_: nn.Module, read: tuple, wrote: Tensor) -> None:
        if read:  # otherwise it only returns its weights
            seen.extend(float(t.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in (*read, wrote))

    hooks = [
        m.register_forward_hook(note_largest)
        for name, m in mixer.named_modules()
        if isinstance(m, nn.Linear) or name == "out_proj"
    ]
    with torch.no_grad():
        s.call(mixer, x)
    for hook in hooks:
        hook.remove()
    return max(seen)


def nothing_to_attend(s: Subject) -> None:
    """A query with nothing to attend gives exactly 0 in the functional form, and masked keys receive no gradient.

    All outputs and gradients are finite, and the gradients of masked tokens are 0.
    """
    for dtype in (torch.float64, torch.float32):
        mixer = s.build(dtype=dtype)
        causal, T = mixer.causal, s.length
        mask = torch.ones(2, T, dtype=torch.bool)
        mask[0], mask[1, : T // 3] = False, False
        x = torch.where(mask[..., None], s.x(), 1e4 * s.x(stream=2)).to(dtype).requires_grad_()
        empty = ~allowed_pairs(2, T, T, causal=causal, key_mask=mask).any(-1)
        shown: Options = {"seed": s.seed, "key_mask": mask, "x": x}
        out = s.call(mixer, x, key_mask=mask)
        if s.functional is not None and hasattr(mixer, "functional_args"):
            args, options = s.args(mixer, x, key_mask=mask)
            y = s.functional(*args, **options)
            if bool((y[empty] != 0).any()):
                found = float(y[empty].abs().max())
                fail(f"the functional form gives {found:.3g} where there is nothing to attend, not 0", **shown)
        finite(out, f"output in {dtype}", start=0, **shown)
        leaves = {"x": x, **dict(mixer.named_parameters())}
        weight = inputs.noise(*out.shape, seed=s.seed + 5, dtype=dtype) * (mask | ~mask.any(1, keepdim=True))[..., None]
        for name, grad in gradients((out * weight).sum(), leaves).items():
            finite(grad, f"gradient of {name} in {dtype}", **shown)
            if name == "x" and bool((grad[~mask] != 0).any()):
                fail(f"masked tokens receive a gradient of up to {float(grad[~mask].abs().max()):.3g}", **shown)


def pairs_with_nothing_to_attend(s: Subject) -> None:
    """A valid query left with nothing by an attn_mask or a context gives exactly out_proj(0), in streams too."""
    mixer = s.build()
    can = mixer.capabilities
    if not hasattr(mixer, "out_proj") or not (can.attn_mask or can.context):
        raise NotApplicable("takes neither attn_mask nor context")
    x, S = s.x(), s.context_length(mixer)
    zero = torch.zeros(1, getattr(mixer.out_proj, "in_features", s.dim), dtype=x.dtype)
    want, context = mixer.out_proj(zero), s.x(length=S, stream=1)
    hidden = torch.zeros(2, S, dtype=torch.bool)
    calls: dict[str, tuple[Callable[[], Tensor], Any]] = {}
    if can.attn_mask:
        mask = inputs.pair_mask(2, s.length, s.length, seed=s.seed)
        calls["an attn_mask whose row is empty"] = lambda: s.call(mixer, x, attn_mask=mask)[0, :1], mask[0]
        if s.functional is not None and hasattr(mixer, "functional_args"):
            args, options = s.args(mixer, x, attn_mask=mask)
            if bool((s.functional(*args, **options)[0, 0] != 0).any()):
                what = "the functional form is not 0 for a query whose attn_mask row is empty"
                fail(what, attn_mask=mask[0], seed=s.seed)
    if can.context:
        calls["a context of length 0"] = lambda: s.call(mixer, x, x[:, :0]), None
        calls["a context that is masked"] = lambda: s.call(mixer, x, context, key_mask=hidden), None
        if s.cls.facts.streaming:  # type: ignore[attr-defined]  # only a Mixer has capabilities
            empty = mixer.init_state(2, context=x[:, :0])
            masked = mixer.init_state(2, context=context, context_mask=hidden)
            calls["a stream over a context of length 0"] = lambda: mixer.extend(x, empty)[0], None
            calls["a stream over a context that is masked"] = lambda: mixer.extend(x, masked)[0], None
    for what, (call, shown) in calls.items():
        out = call()
        same(out, want.expand_as(out), f"over {what} the output is not out_proj(0)", scale=1.0, seed=s.seed, mask=shown)


def every_parameter_learns(s: Subject) -> None:
    """Every parameter that requires a gradient receives one, and forward does not replace parameters."""
    mixer = s.build()
    before = dict(mixer.named_parameters())
    if not before:
        raise NotApplicable("has no parameters")
    y = s.call(mixer, s.x())
    y = y if isinstance(y, Tensor) else y[0]
    after = dict(mixer.named_parameters())
    for name in before:
        if after.get(name) is not before[name]:
            fail(
                f"forward replaces the parameter {name}: the optimiser keeps the old one, which never learns",
                seed=s.seed,
            )
    wanted = {n: p for n, p in before.items() if p.requires_grad}
    grads = torch.autograd.grad((y * inputs.noise(*y.shape, seed=3)).sum(), list(wanted.values()), allow_unused=True)
    for name, grad in zip(wanted, grads, strict=True):
        if grad is None:
            fail(f"the parameter {name} receives no gradient", seed=s.seed)


def differentiable_twice(s: Subject) -> None:
    """First and second derivatives of the eager form pass gradcheck and gradgradcheck in float64.

    They are taken with regard to inputs and parameters, with and without a mask.
    """
    mixer = s.build()
    T = s.length if s.grid is not None else min(6, s.length)
    names = [n for n, p in mixer.named_parameters() if p.requires_grad]
    values = tuple(p.detach().clone().requires_grad_() for n, p in mixer.named_parameters() if p.requires_grad)
    masks = [None] if not is_mixer(s.cls) else [None, inputs.key_masks(T)["mixed"]]
    for mask in masks:
        given = s.place() if mask is None else {"key_mask": mask, **s.place()}

        def run(x: Tensor, *parameters: Tensor, given: Options = given) -> Tensor:
            return torch.func.functional_call(mixer, dict(zip(names, parameters, strict=True)), (x,), given)

        point = (s.x(2, T).requires_grad_(), *values)
        with functional.use_backend("eager"), freeze(mixer):
            for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
                try:  # atomic additions of a GPU round in any order
                    check(run, point, fast_mode=True, nondet_tol=1e-9 if point[0].is_cuda else 0.0)
                except GradcheckError as error:
                    fail(f"{check.__name__}: {' '.join(str(error).split())[:200]}", seed=s.seed, key_mask=mask)
