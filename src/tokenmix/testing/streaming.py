"""Promises on states: streaming in chunks of any length equals the parallel form, and states are values.

States can be reordered, measured and merged.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ..mixers import Mixer, State, merge, reorder, state_bytes
from ..types import Options
from . import inputs
from .report import NotApplicable, fail, finite, same
from .subject import Subject, gradients


def _build_streaming(s: Subject) -> Mixer:
    mixer = s.build()
    if not mixer.capabilities.streaming:
        raise NotApplicable("does not stream a sequence; refusing is part of refuses_what_it_cannot")
    return mixer


def _cuts(T: int) -> list[tuple[int, ...]]:
    a = max(1, T // 3)
    return [(T,), (1,) * T, (a, 1, T - a - 1), (1, T - 1), (T - 1, 1), (2,) * (T // 2) + (1,) * (T % 2)]


def stream(
    mixer: Mixer, x: Tensor, cuts: tuple[int, ...], state: State = None, **given: Tensor | None
) -> tuple[Tensor, State]:
    """Feed x in chunks of the given lengths, with the per-token arguments cut the same way."""
    state = mixer.init_state(x.shape[0]) if state is None else state
    outputs, at = [], 0
    for n in cuts:
        chunk = {k: v[:, at : at + n] for k, v in given.items() if v is not None}
        y, state = mixer.extend(x[:, at : at + n], state, **chunk)
        outputs.append(y)
        at += n
    return torch.cat(outputs, 1), state


def streaming_equals_parallel(s: Subject) -> None:
    """``extend`` in chunks of any length gives forward's numbers, with padding, holes and explicit positions too."""
    mixer, x, T = _build_streaming(s), s.x(), s.length
    masks = inputs.key_masks(T)
    late = torch.ones(2, T, dtype=torch.bool)
    late[0, : T // 2], late[1, : T - 1] = False, False
    given: list[Options] = [
        {},
        *({"key_mask": m} for m in (masks["left"], masks["holes"], masks["mixed"], late)),
    ]
    given += [
        {"key_mask": m, "positions": (m.cumsum(1) - 1).clamp_min(0)} for m in (masks["holes"], masks["mixed"])
    ]  # counted without the masked tokens
    given.append({"positions": inputs.increasing_positions(2, T, s.limit(mixer), seed=s.seed)})
    for each in given:
        live = each.get("key_mask", torch.ones(2, T, dtype=torch.bool))
        want = mixer(x, **each)
        for cuts in _cuts(T):
            got, _ = stream(mixer, x, cuts, **each)
            shown: Options = {"cuts": cuts, "seed": s.seed, **each}
            finite(got, "the output of a stream", start=0, **shown)
            same(got, want, "streaming is not the parallel form", live=live, start=0, **shown)
    _long_stream(s)


def _long_stream(s: Subject) -> None:
    """Check chunks and sequences longer than any block, to reveal errors in dropped tokens."""
    T = 530
    mixer = s.build(**s.options_for_length(T))
    x = s.x(1, T)
    want = mixer(x)
    for cuts in ((T,), (1,) * 40 + (T - 40,), (70, 3, 67, T - 140)):
        got, _ = stream(mixer, x, cuts)
        same(
            got,
            want,
            f"streaming {T} tokens is not the parallel form",
            start=0,
            cuts=cuts if len(cuts) < 9 else f"40 x 1, {T - 40}",
            seed=s.seed,
        )


def gradients_stream(s: Subject) -> None:
    """The gradients through a stream, with regard to x and every parameter, are those of the parallel form."""
    mixer, T = _build_streaming(s), s.length
    leaves = {"x": s.x().requires_grad_(), **{n: p for n, p in mixer.named_parameters() if p.requires_grad}}
    holes = inputs.key_masks(T)["holes"]
    forms: list[tuple[dict[str, Tensor], tuple[int, ...]]] = [
        ({}, (1,) * T),
        ({"key_mask": holes}, (T // 3, 1, T - T // 3 - 1)),
    ]
    for given, cuts in forms:
        live = given.get("key_mask", torch.ones_like(holes))
        weight = inputs.noise(2, T, s.dim, seed=s.seed + 5, dtype=leaves["x"].dtype) * live[..., None]
        want = gradients((mixer(leaves["x"], **given) * weight).sum(), leaves)
        scale = max(float(g.abs().max()) for g in want.values())
        got = gradients((stream(mixer, leaves["x"], cuts, **given)[0] * weight).sum(), leaves)
        for leaf in leaves:
            shown: Options = {"cuts": cuts, "seed": s.seed, **given}
            same(
                got[leaf],
                want[leaf],
                f"the gradient of {leaf} through a stream is not the parallel form's",
                scale=scale,
                of="the largest gradient",
                **shown,
            )


def rows_at_different_positions(s: Subject) -> None:
    """Rows of one state may have seen different numbers of tokens."""
    mixer, x, T = _build_streaming(s), s.x(), s.length
    a, b = max(1, T // 4), T // 2
    _, first = mixer.extend(x[:1, :a], mixer.init_state(1))
    _, second = mixer.extend(x[1:, :b], mixer.init_state(1))
    n = T - b
    tail = torch.cat([x[:1, a : a + n], x[1:, b:]])
    want = torch.cat([mixer(x[:1])[:, a : a + n], mixer(x[1:])[:, b:]])
    for cuts in ((n,), (1,) * n):
        got, _ = stream(mixer, tail, cuts, pytree.tree_map(_join_rows, first, second))
        same(got, want, f"rows at {a} and {b} do not continue as they would alone", cuts=cuts, seed=s.seed)


def _join_rows(a: Tensor, b: Tensor) -> Tensor:
    """Join two rows in one batch; a shorter history is padded in front with zeros, which in ``live`` means masked."""
    sizes = [max(pair) for pair in zip(a.shape[1:], b.shape[1:], strict=True)]
    return torch.cat([_led_by_zeros(t, sizes) for t in (a, b)])


def _led_by_zeros(t: Tensor, sizes: list[int]) -> Tensor:
    padded = t.new_zeros(len(t), *sizes)
    behind = (slice(None), *(slice(size - have, None) for size, have in zip(sizes, t.shape[1:], strict=True)))
    padded[behind] = t
    return padded


def state_is_a_value(s: Subject) -> None:
    """``extend`` does not change the state it is given, so one state can be continued twice."""
    mixer, x = _build_streaming(s), s.x()
    half = s.length // 2
    _, state = mixer.extend(x[:, :half], mixer.init_state(2))
    before = pytree.tree_map(torch.clone, state)
    mixer.extend(3 * s.x(stream=3)[:, half:], state)
    for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(state), strict=True):
        if not torch.equal(old, new):
            fail("extend writes to the state it was given", seed=s.seed)
    same(
        mixer.extend(x[:, half:], state)[0],
        mixer(x)[:, half:],
        "a second continuation of a state is not the parallel form",
        start=half,
        seed=s.seed,
    )
    for field in pytree.tree_leaves(state):
        if field.shape[0] != 2:
            fail(f"a state tensor has shape {tuple(field.shape)}; states are batch first", seed=s.seed)


def _fresh_in_half_precision(s: Subject, mixer: Mixer, x: Tensor) -> None:
    """Check a state without tokens, with padding first and without gradients, as generation has it."""
    mask = inputs.key_masks(s.length)["left"]
    for kept in (torch.float16, torch.bfloat16):
        fresh = mixer.init_state(2)
        other = pytree.tree_map(lambda a, kept=kept: a.to(kept) if a.is_floating_point() else a, fresh)
        with torch.no_grad():
            got, want = (stream(mixer, x, (1, s.length - 1), each, key_mask=mask)[0] for each in (other, fresh))
        same(got, want, f"a state of no tokens, kept in {kept}, does not begin as one", tol=0.0, seed=s.seed)


def states_take_other_floats(s: Subject) -> None:
    """A state kept in another float type continues as from the same numbers in its own types.

    After one chunk the state has its own types again. A state before the first token may be kept so too.
    """
    mixer, x, half = s.build(dtype=torch.float32), s.x(dtype=torch.float32), s.length // 2
    if mixer.capabilities.streaming:
        _fresh_in_half_precision(s, mixer, x)
        _, state = mixer.extend(x[:, :half], mixer.init_state(2))
    elif mixer.capabilities.keeps_context:
        state = mixer.init_state(2, context=x)
    else:
        raise NotApplicable("has no streaming state")
    for kept in (torch.bfloat16, torch.float64):
        other = pytree.tree_map(lambda a, kept=kept: a.to(kept) if a.is_floating_point() else a, state)
        own = pytree.tree_map(lambda a, b: b.to(a.dtype), state, other)
        (got, after), (want, expected) = (mixer.extend(x[:, half:], each) for each in (other, own))
        same(got, want, f"a state kept in {kept} does not go on as its numbers do", tol=0.0, seed=s.seed)
        if [a.dtype for a in after] != [a.dtype for a in expected]:
            found, own_types = ([a.dtype for a in each] for each in (after, expected))
            fail(f"after a state in {kept} the next one holds {found}, not {own_types}", seed=s.seed)


def reorder_picks_rows(s: Subject) -> None:
    """``reorder(state, index)`` continues as those rows would, with repetition and for fewer or more rows."""
    mixer, x = _build_streaming(s), s.x(3)
    half, mask = s.length // 2, torch.ones(3, s.length, dtype=torch.bool)
    mask[1, :2] = False
    forms: list[Options] = [{}, {"key_mask": mask}]
    for rows in ([2, 1, 0], [2, 2, 0], [1], [0, 1, 2, 1]):
        for given in forms:
            index = torch.tensor(rows)
            _, state = stream(mixer, x[:, :half], (half,), **{k: v[:, :half] for k, v in given.items()})
            want = mixer(x, **given)[:, half:]
            got, _ = mixer.extend(x[index, half:], reorder(state, index))
            same(
                got,
                want[index],
                "a reordered state does not continue as its rows would",
                start=half,
                index=index,
                seed=s.seed,
                **given,
            )


def state_bytes_counts(s: Subject) -> None:
    """``state_bytes`` is the memory of the state's tensors and grows with the number of rows."""
    mixer, x = _build_streaming(s), s.x(4)
    sizes = []
    for rows in (2, 4):
        _, state = mixer.extend(x[:rows, :3], mixer.init_state(rows))
        counted = sum(t.nelement() * torch.empty(0, dtype=t.dtype).element_size() for t in state)
        if state_bytes(state) != counted:
            fail(f"state_bytes says {state_bytes(state)}, its tensors hold {counted}")
        sizes.append(counted)
    if sizes[1] != 2 * sizes[0]:
        fail(f"a state of 4 rows takes {sizes[1]} bytes and one of 2 rows {sizes[0]}")


def merge_joins_stretches(s: Subject) -> None:
    """``merge(earlier, later)`` is the state after both parts of a sequence; states that are no sum are refused."""
    mixer, x, T = _build_streaming(s), s.x(), s.length
    a, b = max(1, T // 3), 2 * T // 3
    empty = mixer.init_state(2)
    _, earlier = mixer.extend(x[:, :a], empty)
    _, later = mixer.extend(x[:, a:b], empty)
    if not hasattr(earlier, "merge_with"):
        try:
            merge(earlier, later)
        except MixerError as error:
            raise NotApplicable("its state is not a sum; merge refuses it") from error
        fail("merge of states that cannot be merged does not raise MixerError")
    want = mixer(x)[:, b:]
    nested = merge(merge(empty, earlier), merge(later, empty))
    for state in (merge(earlier, later), nested):
        same(
            mixer.extend(x[:, b:], state)[0],
            want,
            "a merged state does not continue as the whole sequence",
            start=b,
            cuts=(a, b - a, T - b),
            seed=s.seed,
        )


def context_streams(s: Subject) -> None:
    """``extend`` over a context in chunks of any length equals forward(x, context), with the context's mask."""
    mixer = s.build()
    if not mixer.capabilities.context or not mixer.facts.streaming:
        raise NotApplicable("does not stream queries over a context")
    x, S = s.x(), s.context_length(mixer)
    context = s.x(length=S, stream=1)
    for mask in (None, *inputs.key_masks(S).values()):
        want = s.call(mixer, x, context, key_mask=mask)
        for cuts in _cuts(s.length):
            got, _ = stream(mixer, x, cuts, mixer.init_state(2, context=context, context_mask=mask))
            same(
                got,
                want,
                "streaming over a context is not the parallel form",
                start=0,
                cuts=cuts,
                seed=s.seed,
                context_mask=mask,
            )
    places = inputs.increasing_positions(2, s.length, s.limit(mixer), seed=s.seed)
    got, _ = stream(mixer, x, _cuts(s.length)[2], mixer.init_state(2, context=context), positions=places)
    same(
        got,
        s.call(mixer, x, context, positions=places),
        "streaming over a context ignores positions",
        start=0,
        seed=s.seed,
        positions=places,
    )


def context_of_itself(s: Subject) -> None:
    """A context equal to the sequence gives self-mixing."""
    mixer = s.build()
    if not mixer.capabilities.context:
        raise NotApplicable("takes no context")
    x = s.x()
    same(s.call(mixer, x, x.clone()), s.call(mixer, x), "a context equal to x is not self-mixing", start=0, seed=s.seed)
    keys = inputs.key_masks(s.length)["right"]
    got, want = s.call(mixer, x, x.clone(), key_mask=keys), s.call(mixer, x, key_mask=keys)
    shown: Options = {"key_mask": keys, "seed": s.seed}
    same(got, want, "a masked context equal to x is not self-mixing", live=keys, start=0, **shown)
