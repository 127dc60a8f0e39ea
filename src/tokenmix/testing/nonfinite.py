"""Promises on NaN and infinity.

What may be attended makes a row non-finite or counts exactly; what may not leaves rows and gradients unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..mixers import Mixer
from ..types import Options
from .report import NotApplicable, fail, same
from .streaming import stream
from .subject import Subject, freeze, gradients, leaf_names
from .tolerances import INFLUENCE, REACH

BAD = {"NaN": float("nan"), "+inf": float("inf")}
MADE_FROM_KEYS = ("k_proj", "v_proj")


def non_finite_is_honest(s: Subject) -> None:
    """A token of NaN or +inf makes each row that may attend it non-finite or leaves it unchanged, and reaches no other
    row.

    Rows that may not attend it keep their numbers, in a stream as well.
    """
    mixer, x, p = s.build(), s.x(), s.length // 2
    causal, can = mixer.causal, mixer.capabilities
    clean, moved = s.call(mixer, x), s.call(mixer, _with_token(x, p, s.x(stream=3)))
    for name, value in BAD.items():
        bad = _with_token(x, p, value)
        got = s.call(mixer, bad)
        _compare_bad_token(s, got, clean, moved, p if causal else 0, token=p, holds=name)
        if can.streaming and name == "NaN":
            _streams_alike(s, mixer, bad, got)
    _check_masked_token(s, mixer, x, p)
    if can.attn_mask:
        _pairs(s, mixer, x, p)
    if can.context:
        _context(s, mixer, x)
    _check_nan_layer(s, x)


def _with_token(x: Tensor, p: int, value: Tensor | float) -> Tensor:
    """Return x with token p of row 0 replaced."""
    changed = x.clone()
    changed[0, p] = value[0, p] if isinstance(value, Tensor) else value
    return changed


def _compare_bad_token(s: Subject, got: Tensor, clean: Tensor, moved: Tensor, first: int, **shown: Any) -> None:
    """Compare the outputs with a bad token in row 0, which outputs from ``first`` on may attend.

    ``moved`` are the outputs where the token holds other finite numbers.
    """
    shown["seed"] = s.seed
    same(got[1:], clean[1:], "a non-finite token reaches another row of the batch", tol=INFLUENCE, **shown)
    same(got[0, :first], clean[0, :first], "a non-finite token reaches outputs before it", tol=INFLUENCE, **shown)
    survived = got[0].isfinite().all(-1)
    survived[:first] = False
    scale = float(clean.detach().abs().max())
    for want in (clean, moved):
        same(
            got[0][survived],
            want[0][survived],
            "a non-finite token gives plausible numbers where it is attended",
            tol=INFLUENCE,
            scale=scale,
            **shown,
        )


def _streams_alike(s: Subject, mixer: Mixer, bad: Tensor, want: Tensor) -> None:
    T = s.length
    for cuts in ((T // 2 - 1, 3, T - T // 2 - 2), (1, T - 1), (1,) * T):
        got, _ = stream(mixer, bad, cuts)
        mine, theirs = (a.isfinite().all(-1) for a in (got, want))
        if not torch.equal(mine, theirs):
            fail(
                "a stream and the full form differ in which rows are finite",
                stream=mine,
                full=theirs,
                cuts=cuts,
                seed=s.seed,
            )
        same(
            got[mine],
            want[mine],
            "finite rows of a stream with a non-finite token are not the full form's",
            cuts=cuts,
            seed=s.seed,
        )


def _check_masked_token(s: Subject, mixer: Mixer, x: Tensor, p: int) -> None:
    """Check that a masked token of NaN leaves every unmasked row unchanged."""
    keep = torch.ones(2, s.length, dtype=torch.bool)
    keep[0, p] = False
    got, want = (s.call(mixer, a, key_mask=keep)[keep] for a in (_with_token(x, p, BAD["NaN"]), x))
    same(got, want, "a masked token of NaN reaches the output", tol=INFLUENCE, token=p, seed=s.seed)


def _pairs(s: Subject, mixer: Mixer, x: Tensor, p: int) -> None:
    """Check a NaN token that attn_mask hides from the even rows.

    Those rows stay unchanged, its own excepted; rows that may attend it become non-finite.
    """
    T = s.length
    ok = torch.ones(T, T, dtype=torch.bool)
    hidden = torch.arange(T) % 2 == 0
    ok[hidden, p] = False
    got, want, moved = (
        s.call(mixer, a, attn_mask=ok) for a in (_with_token(x, p, BAD["NaN"]), x, _with_token(x, p, s.x(stream=3)))
    )
    hidden[p] = False
    same(
        got[:, hidden],
        want[:, hidden],
        "a token of NaN that attn_mask hides reaches the output",
        tol=INFLUENCE,
        token=p,
        seed=s.seed,
    )
    index = (~hidden).nonzero()[:, 0]
    _compare_bad_token(
        s,
        got[:, index],
        want[:, index],
        moved[:, index],
        int((index < p).sum()) if mixer.causal else 0,
        token=p,
        attn_mask=ok,
    )


def _context(s: Subject, mixer: Mixer, x: Tensor) -> None:
    """Check a token of a context, masked and not."""
    S = s.context_length(mixer)
    context, p = s.x(length=S, stream=1), S // 2
    keep = torch.ones(2, S, dtype=torch.bool)
    keep[0, p] = False
    bad, moved = (_with_token(context, p, value) for value in (BAD["NaN"], s.x(length=S, stream=3)))
    clean = s.call(mixer, x, context)
    _compare_bad_token(s, s.call(mixer, x, bad), clean, s.call(mixer, x, moved), 0, token=p, context=context)
    got, want = (s.call(mixer, x, a, key_mask=keep) for a in (bad, context))
    same(got, want, "a masked token of NaN of a context reaches the output", tol=INFLUENCE, token=p, seed=s.seed)


def _check_nan_layer(s: Subject, x: Tensor) -> None:
    """Check that a layer whose map to keys or to values is NaN gives no finite row and no finite gradients."""
    for name in MADE_FROM_KEYS:
        mixer = s.build()
        layer = getattr(mixer, name, None)
        if layer is None:
            continue
        with torch.no_grad():
            clean = s.call(mixer, x)
            layer.weight.neg_()
            reads = (s.call(mixer, x) - clean).abs().amax(-1) > REACH * clean.abs().max()
            layer.weight.fill_(BAD["NaN"])
        leaves = {n: a for n, a in mixer.named_parameters() if a.requires_grad}
        y = s.call(mixer, x)
        finite = y.isfinite().all(-1) & reads
        if bool(finite.any()):
            fail(
                f"with {name}.weight NaN {int(finite.sum())} of the {int(reads.sum())} rows that read it are finite",
                seed=s.seed,
            )
        if all(bool(g.isfinite().all()) for g in gradients(y.square().sum(), leaves).values()):
            fail(f"with {name}.weight NaN every gradient is finite", seed=s.seed)


def gradients_of_non_finite_are_honest(s: Subject) -> None:
    """A loss over rows that may not attend a NaN or +inf token keeps its gradients, and one over rows that may has none
    finite.

    The gradients are those with regard to every argument of the functional form.
    """
    mixer, x, p = s.build(), s.x(), s.length // 2
    if s.functional is None or not hasattr(mixer, "functional_args"):
        raise NotApplicable("has no functional form to measure (functional=...)")
    for name, batch, tokens, mask in _out_of_reach(s, mixer.causal, p):
        args, options = s.args(mixer, x, key_mask=mask)
        moved, _ = s.args(mixer, _with_token(x, p, s.x(stream=3)), key_mask=mask)
        want: dict[str, Tensor] = {}
        for which, value in ({"": None} | BAD).items():
            leaves, built = _leaves_of(s.functional, args, moved, value)
            with freeze(mixer):
                y = s.functional(*built, **options)
            got = gradients(y[batch][:, tokens].square().sum(), leaves, keep_graph=True)
            want = want or got
            for leaf in want:
                shown: Options = {"token": p, "loss over": name, "seed": s.seed}
                scale = max(float(want[leaf].abs().max()), 1e-3) if want[leaf].numel() else 1.0
                asked = leaves[leaf].isfinite()  # at the bad numbers themselves 0 times NaN is allowed
                same(
                    got[leaf][asked],
                    want[leaf][asked],
                    f"a token of {which} reaches the gradient of {leaf}",
                    tol=10 * INFLUENCE,
                    scale=scale,
                    **shown,
                )
            if (
                which
                and mask is None
                and all(bool(g.isfinite().all()) for g in gradients(y.square().sum(), leaves, keep_graph=True).values())
            ):
                fail(f"a token of {which} is answered with finite gradients", token=p, seed=s.seed)


def _out_of_reach(s: Subject, causal: bool, p: int) -> Iterator[tuple[str, slice, slice | Tensor, Tensor | None]]:
    """Yield the tokens that may not attend to token p of row 0.

    Each is a name, rows of the batch, tokens, and the key mask under which that holds.
    """
    yield "the other row", slice(1, 2), slice(None), None
    if causal:
        yield "the past", slice(0, 1), slice(0, p), None
    keep = torch.ones(2, s.length, dtype=torch.bool)
    keep[0, p] = False
    yield "the valid tokens", slice(0, 1), keep[0], keep


def _leaves_of(
    form: Callable[..., Tensor], args: tuple, moved: tuple, value: float | None
) -> tuple[dict[str, Tensor], tuple]:
    """Return the floating point arguments of a form as leaves by name, and the arguments made of them.

    They hold ``value`` wherever they depend on the bad token.
    """
    flat, spec = pytree.tree_flatten(args)
    leaves: dict[str, Tensor] = {}
    built: list[object] = []
    names = iter(leaf_names(form, args))
    for a, b in zip(flat, pytree.tree_leaves(moved), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            a = a.detach().clone()
            if value is not None:
                a[a != b.detach()] = value
            a = leaves[next(names)] = a.requires_grad_()
        built.append(a)
    return leaves, pytree.tree_unflatten(built, spec)
