"""Promises on which tokens may influence which: causality, masks, padding, positions.

No mixer may waive causality or masking.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..types import Options
from . import inputs
from .report import NotApplicable, differs, fail, same
from .subject import Subject, allowed_pairs
from .tolerances import INFLUENCE, REACH

SIZES = (1.0, 1e4)


def future_cannot_reach_past(s: Subject) -> None:
    """Later tokens never change earlier outputs, and earlier outputs have no gradient to them."""
    mixer = _causal(s)
    T, masks = s.length, inputs.key_masks(s.length) if hasattr(mixer, "capabilities") else {}
    for dtype in (torch.float64, torch.float32):
        mixer = s.build(dtype=dtype)
        for p in sorted({1, T // 2, T - 1}):
            for size in SIZES:
                _compare_past(s, mixer, p, size, dtype, None)
            _compare_past(s, mixer, p, 1e4, dtype, masks.get("mixed"))
    past_gradients(s)


def past_reaches_present(s: Subject) -> None:
    """Each output depends on its own token and on the tokens before it."""
    mixer, x = _causal(s), s.x()
    for p in range(1, s.length):
        for what, tokens in (("the present token does", slice(p, p + 1)), ("the tokens before do", slice(0, p))):
            changed = x.clone()
            changed[:, tokens] = s.x(stream=4)[:, tokens]
            differs(
                s.call(mixer, changed)[:, p],
                s.call(mixer, x)[:, p],
                f"{what} not reach output {p}",
                by=REACH,
                seed=s.seed,
                x=x,
            )


def token_before_reaches(s: Subject) -> None:
    """Each output depends on the token directly before it.

    A mixer that selects what it attends declares an exception.
    """
    mixer, x = _causal(s), s.x()
    for p in range(1, s.length):
        changed = x.clone()
        changed[:, p - 1] = s.x(stream=4)[:, p]
        differs(
            s.call(mixer, changed)[:, p],
            s.call(mixer, x)[:, p],
            f"the token before does not reach output {p}",
            by=REACH,
            seed=s.seed,
            x=x,
        )


def _causal(s: Subject):
    mixer = s.build()
    if not getattr(mixer, "causal", s.options.get("causal", False)):
        raise NotApplicable("built with causal=False")
    return mixer


def _compare_past(s: Subject, mixer, p: int, size: float, dtype: torch.dtype, mask: Tensor | None) -> None:
    x = s.x(dtype=dtype)
    other = x.clone()
    other[:, p:] = size * s.x(stream=3, dtype=dtype)[:, p:]
    given = {} if mask is None else {"key_mask": mask}
    shown: Options = {
        "dtype": dtype,
        "future": f"tokens from {p} on, size {size:g}",
        "seed": s.seed,
        "x": x,
        **given,
    }
    same(
        s.call(mixer, other, **given)[:, :p],
        s.call(mixer, x, **given)[:, :p],
        f"the future reaches outputs before {p}",
        tol=INFLUENCE,
        start=0,
        **shown,
    )


def past_gradients(s: Subject) -> None:
    """The gradient of earlier outputs with regard to later tokens is exactly zero."""
    mixer, p = s.build(), s.length // 2
    x = s.x().requires_grad_()
    (grad,) = torch.autograd.grad(s.call(mixer, x)[:, :p].square().sum(), x)
    if bool((grad[:, p:] != 0).any()):
        fail(
            f"outputs before {p} have a gradient of {float(grad[:, p:].abs().max()):.3g} to tokens from {p} on",
            seed=s.seed,
            x=x,
        )


def masked_keys_have_no_influence(s: Subject) -> None:
    """The contents of masked tokens, at the left, at the right or in between, change no output."""
    for dtype in (torch.float64, torch.float32):
        mixer = s.build(dtype=dtype)
        for name, mask in inputs.key_masks(s.length).items():
            x = s.x(dtype=dtype)
            clean = s.call(mixer, x, key_mask=mask)
            for size in SIZES:
                other = torch.where(mask[..., None], x, size * s.x(stream=3, dtype=dtype))
                shown: Options = {
                    "mask": name,
                    "dtype": dtype,
                    "size of masked tokens": size,
                    "seed": s.seed,
                    "key_mask": mask,
                }
                same(
                    s.call(mixer, other, key_mask=mask),
                    clean,
                    "masked keys reach the output",
                    tol=INFLUENCE,
                    live=mask,
                    start=0,
                    **shown,
                )
        full = s.call(mixer, s.x(dtype=dtype))
        if bool(torch.equal(full, s.call(mixer, s.x(dtype=dtype), key_mask=inputs.key_masks(s.length)["holes"]))):
            fail("key_mask changes nothing at all", seed=s.seed)
        _masked_context(s, dtype)


def _masked_context(s: Subject, dtype: torch.dtype) -> None:
    mixer = s.build(dtype=dtype)
    if not mixer.capabilities.context:
        return
    S = s.context_length(mixer)
    context, x = s.x(length=S, stream=1, dtype=dtype), s.x(dtype=dtype)
    for name, mask in inputs.key_masks(S).items():
        other = torch.where(mask[..., None], context, 1e4 * s.x(length=S, stream=3, dtype=dtype))
        got, want = s.call(mixer, x, other, key_mask=mask), s.call(mixer, x, context, key_mask=mask)
        same(
            got,
            want,
            "masked keys of a context reach the output",
            tol=INFLUENCE,
            start=0,
            mask=name,
            dtype=dtype,
            seed=s.seed,
            key_mask=mask,
        )


def padded_equals_shorter(s: Subject) -> None:
    """A row padded at the right or at the left gives the numbers of the shorter row alone."""
    mixer, T = s.build(), s.length
    if s.grid is not None:
        return _fewer_lines(s)
    for row, n in enumerate((T - T // 3, T // 2)):
        alone = s.call(mixer, s.x(1, n, stream=5 + row))
        for side in ("right", "left"):
            x = 3.0 * s.x(stream=3)
            kept = slice(0, n) if side == "right" else slice(T - n, T)
            mask = torch.ones(2, T, dtype=torch.bool)
            mask[row] = False
            mask[row, kept] = True
            x[row, kept] = s.x(1, n, stream=5 + row)[0]
            got = s.call(mixer, x, key_mask=mask)[row, kept]
            same(got, alone[0], f"padding at the {side} changes a row", seed=s.seed, key_mask=mask)
    if mixer.capabilities.context:
        _padded_context(s, mixer)
    return None


def _padded_context(s: Subject, mixer) -> None:
    S = s.context_length(mixer)
    n, x = S - 2, s.x(1)
    short = s.x(1, n, stream=6)
    for side in ("right", "left"):
        kept = slice(0, n) if side == "right" else slice(S - n, S)
        context, mask = s.x(1, S, stream=3), torch.zeros(1, S, dtype=torch.bool)
        context[:, kept], mask[:, kept] = short, True
        got, want = s.call(mixer, x, context, key_mask=mask), s.call(mixer, x, short)
        same(got, want, f"padding of a context at the {side} changes the output", seed=s.seed, key_mask=mask)


def _fewer_lines(s: Subject) -> None:
    """Check that a grid whose last lines are masked equals the smaller grid."""
    assert s.grid is not None
    mixer, T = s.build(), s.length
    line = (T - s.prefix) // s.grid[0]
    for lines in range(1, s.grid[0]):
        n, small = s.prefix + lines * line, (lines, *s.grid[1:])
        mask = (torch.arange(T) < n).expand(2, T)
        got = s.call(mixer, s.x(), key_mask=mask)[:, :n]
        same(
            got,
            s.call(mixer, s.x()[:, :n], grid=small),
            f"masking the grid down to {small} is not the grid {small}",
            seed=s.seed,
            key_mask=mask,
        )


def subset_equals_masked(s: Subject) -> None:
    """A subset of the tokens with their positions gives what the full sequence gives with the others masked."""
    mixer, T = s.build(), s.length
    x, every = s.x(), torch.arange(s.length).expand(2, T)
    same(
        s.call(mixer, x, positions=every),
        s.call(mixer, x),
        "positions 0..T-1 are not the default",
        start=0,
        seed=s.seed,
    )
    for n in (T // 2, T - 1, 1):
        for seed in (0, 1):
            index = inputs.increasing_positions(2, n, T, seed=seed)
            mask = torch.zeros(2, T, dtype=torch.bool).scatter(1, index, True)
            part = x.gather(1, index[..., None].expand(-1, -1, s.dim))
            want = s.call(mixer, x, key_mask=mask, positions=every).gather(1, index[..., None].expand(-1, -1, s.dim))
            same(
                s.call(mixer, part, positions=index),
                want,
                "a subset with its positions is not the full sequence masked",
                positions=index,
                seed=s.seed,
            )


def attn_mask_equals_causal(s: Subject) -> None:
    """A lower-triangular attn_mask gives the causal form, and one with equal rows gives the key_mask."""
    T = s.length
    if not s.build().capabilities.attn_mask:
        raise NotApplicable("does not weigh pairs; refusing attn_mask is part of refuses_what_it_cannot")
    x, lower = s.x(), allowed_pairs(1, T, T, causal=True)[0]
    try:
        mixer = s.build(causal=False)
    except MixerError:  # its options are for causal mixers alone
        mixer = s.build()
    forms = [mixer]
    if s.grid is None and s.cls.facts.causal:  # type: ignore[attr-defined]  # elsewhere there is no causal form to compare with
        causal = s.build(causal=True)
        causal.load_state_dict(mixer.state_dict())
        forms.append(causal)
        for mask in (lower, lower.expand(2, T, T)):
            same(
                s.call(mixer, x, attn_mask=mask),
                s.call(causal, x),
                "attn_mask lower-triangular is not the causal form",
                start=0,
                seed=s.seed,
                attn_mask=lower,
            )
    keys = inputs.key_masks(T)["right"]
    for m in forms:
        got = s.call(m, x, attn_mask=keys[:, None].expand(2, T, T))
        same(
            got,
            s.call(m, x, key_mask=keys),
            "attn_mask with equal rows is not the key_mask",
            live=keys,
            start=0,
            seed=s.seed,
            key_mask=keys,
        )
