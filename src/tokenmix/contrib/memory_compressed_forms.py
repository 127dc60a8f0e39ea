"""Memory-compressed attention (Liu et al. 2018, section 4.2.3) as functions.

Attention runs inside blocks, or over keys and values shortened by a strided convolution.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..functional.attention import attention, finite_attention
from ..functional.layout.heads import by_head
from ..functional.layout.masks import valid_mask, zero_masked
from ..functional.layout.positions import back_to_place, drop_padding, first_true
from ..functional.sums.nonfinite import propagate_nonfinite
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact, sum_dtype
from .parts.cells import cells_of, patches, strided_conv, sum_cells, taps_of

Conv = tuple[Tensor, ...]  # (W_k, W_v, b_k, b_v): (D, D, b) and (D,)


@exact
def memory_compressed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: Conv = (),
    *,
    heads: int,
    block: int,
    mode: str = "compressed",
    causal: bool = False,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend from each token to few keys. Block j holds the positions j b .. j b + b - 1 of the row.

    mode "local": y_t attends the tokens of its own block; causal: those up to t. mode "compressed": y_t attends one key
    and one value for each block, W_k * k + b_k and W_v * v + b_v, a convolution with
        kernel = stride = b in which missing tokens are 0. causal: one for each block before its own, and the individual
        tokens of its own block up to t.

    Args:
        q, k, v: (B, T, D).
        conv: (W_k, W_v, b_k, b_v) with weights (D, D, b); empty in mode "local".
        positions: (B, T), increasing in the causal form. Default: index minus the index of the row's first True key.

    A block without a valid token is not attended; with nothing to attend, and before the row's first token, the result
    is 0. The convolutions are summed in float64. Time O(T b D), or O(T D (D + T / b)) compressed; with explicit
    positions O(T^2 D).
    """
    _check(q, k, v, conv, heads, block, mode)
    if q.shape[1] == 0:
        return torch.zeros_like(q)
    if positions is not None:
        return _attend_pairs(
            q,
            k,
            v,
            conv,
            heads=heads,
            block=block,
            causal=causal,
            positions=positions,
            key_mask=key_mask,
            backend=backend,
        )
    valid, T = key_mask, q.shape[1]
    if key_mask is not None:
        valid, q, k, v = drop_padding(key_mask, q, k, v)
    k, v = zero_masked(k, valid), zero_masked(v, valid)
    if mode == "local":
        y = _blockwise(q, k, v, heads=heads, block=min(block, T), causal=causal, valid=valid, backend=backend)
    else:
        form = partial(_attend_blocks, conv=conv, heads=heads, causal=causal, valid=valid, backend=backend)
        y = propagate_nonfinite(form, q, k, v, causal=causal)
    if key_mask is None:
        return y
    return back_to_place(y, first_true(key_mask)[:, 0])


def _blockwise(
    q: Tensor, k: Tensor, v: Tensor, *, heads: int, block: int, causal: bool, valid: Tensor | None, backend: Backend
) -> Tensor:
    """Attend with every block as a separate row."""
    B, T, _ = q.shape
    extra = -T % block
    if extra and valid is None:
        valid = torch.ones(B, T, dtype=torch.bool, device=q.device)
    cut = [patches(a, (T,), block).flatten(0, 1) for a in (q, k, v)]
    mask = None if valid is None else F.pad(valid, (0, extra)).view(-1, block)
    y = attention(*cut, heads=heads, causal=causal, key_mask=mask, backend=backend)
    return y.view(B, T + extra, y.shape[-1])[:, :T]


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, conv: Conv, heads: int, causal: bool, valid: Tensor | None, backend: Backend
) -> Tensor:
    """Attend to keys and values of blocks; in the causal form also to the block's own tokens, under one softmax."""
    T = q.shape[1]
    size = conv[0].shape[-1]
    keys, values = (
        strided_conv(patches(a, (T,), size), w, b).to(sum_dtype(q))
        for a, w, b in zip((k, v), conv[:2], conv[2:], strict=True)
    )
    some = None if valid is None else patches(valid[..., None].to(q.dtype), (T,), size).amax((-2, -1)) > 0
    if not causal:
        return finite_attention(at_least_float32(q), keys, values, heads=heads, key_mask=some, backend=backend).to(
            q.dtype
        )
    own = [patches(a, (T,), size) for a in (q, k, v)]
    near = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()[None, None]
    if valid is not None:
        near = near & patches(valid[..., None].to(q.dtype), (T,), size).mT.bool()
    far = torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool, device=q.device).tril(-1)[None, :, None]
    far = (far if some is None else far & some[:, None, None]).expand(-1, -1, size, -1)
    y = _joint(own, (keys, values), near.expand(far.shape[0], far.shape[1], -1, -1), far, heads)
    return y.flatten(1, 2)[:, :T].to(q.dtype)


def _joint(own: list[Tensor], cells: tuple[Tensor, Tensor], near: Tensor, far: Tensor, heads: int) -> Tensor:
    """Apply one softmax over the tokens of the own block and over cells.

    own = q, k, v (B, n, b, D) where ``near`` allows, cells (B, n, D) where ``far`` does.
    """
    # (B, heads, n, b, e)
    q, k, v = (a.to(cells[0].dtype).unflatten(-1, (heads, -1)).movedim(-2, 1) for a in own)
    keys, values = (by_head(a, heads) for a in cells)
    q = q * q.shape[-1] ** -0.5
    ahead = (q.flatten(2, 3) @ keys.mT).unflatten(2, q.shape[2:4])
    keep = torch.cat([far, near], -1)
    some = keep.any(-1, keepdim=True)
    logits = torch.cat([ahead, q @ k.mT], -1).masked_fill(~(keep | ~some)[:, None], float("-inf"))
    on_cells, on_own = torch.where(some[:, None], logits.softmax(-1), 0.0).split([keys.shape[2], k.shape[3]], -1)
    y = (on_cells.flatten(2, 3) @ values).unflatten(2, q.shape[2:4]) + on_own @ v
    return y.movedim(1, -2).flatten(-2)


def _attend_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: Conv,
    *,
    heads: int,
    block: int,
    causal: bool,
    positions: Tensor,
    key_mask: Tensor | None,
    backend: Backend,
) -> Tensor:
    """Handle tokens at arbitrary positions by comparing pairs."""
    valid = valid_mask(k, key_mask)
    k, v = zero_masked(k, valid), zero_masked(v, valid)
    if not conv:
        cell = cells_of(positions, block)[0]
        near = cell[:, :, None] == cell[:, None]
        return attention(q, k, v, heads=heads, causal=causal, key_mask=key_mask, attn_mask=near, backend=backend)
    if causal:
        nothing = Slots(k[:, :0], v[:, :0], valid[:, :0], positions[:, :0])
        return over_slots(q, nothing, (k, v, valid, positions), conv, heads=heads, block=block, backend=backend)
    cell, tap = cells_of(positions, block)
    last, keys, values = sum_cells(cell, valid, *(taps_of(a, tap, w) for a, w in zip((k, v), conv[:2], strict=True)))
    keys, values = (keys + conv[2].double()).to(sum_dtype(q)), (values + conv[3].double()).to(sum_dtype(q))
    return attention(at_least_float32(q), keys, values, heads=heads, key_mask=last, backend=backend).to(q.dtype)


class Slots(NamedTuple):
    """Hold the sums over the tokens of blocks, without bias (B, n, D).

    Also which blocks hold a valid token (B, n), and the number of each block (B, n).
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    cells: Tensor


@exact
def over_slots(
    q: Tensor,
    slots: Slots,
    recent: tuple[Tensor, ...],
    conv: Conv,
    *,
    heads: int,
    block: int,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the causal compressed form for the last L tokens of ``recent``, after the blocks in ``slots``.

    q holds the queries of these tokens; recent = (keys, values, valid, positions). The last slot may belong to a block
    that continues among the recent tokens, and these include all of each query's own block.
    """
    k, v, valid, positions = recent
    L, P, dtype = q.shape[1], k.shape[1], sum_dtype(q)
    k, v = zero_masked(k, valid), zero_masked(v, valid)
    cell, tap = cells_of(positions, block)
    parts = (
        torch.cat([s[:, -1:].double(), taps_of(a, tap, w)], 1)
        for s, a, w in zip(slots[:2], (k, v), conv[:2], strict=True)
    )
    last, *sums = sum_cells(
        torch.cat([slots.cells[:, -1:], cell], 1), torch.cat([slots.valid[:, -1:], valid], 1), *parts
    )
    far = [
        torch.cat([s[:, :-1].double(), new], 1) + b.double()
        for s, new, b in zip(slots[:2], sums, conv[2:], strict=True)
    ]
    n = far[0].shape[1]
    mine = cell[:, P - L :, None]
    far_ok = torch.cat([slots.valid[:, :-1], last], 1)[:, None] & (torch.cat([slots.cells, cell], 1)[:, None] != mine)
    near_ok = valid[:, None] & (cell[:, None] == mine)
    index = torch.cat([torch.full((n - P,), -1, device=q.device), torch.arange(P, device=q.device).repeat(2)])
    ok = torch.cat([far_ok, near_ok], -1) & (index <= torch.arange(P - L, P, device=q.device)[:, None])
    keys, values = torch.cat([far[0].to(dtype), k.to(dtype)], 1), torch.cat([far[1].to(dtype), v.to(dtype)], 1)
    return attention(q.to(dtype), keys, values, heads=heads, attn_mask=ok, backend=backend).to(q.dtype)


def fold_slots(slots: Slots, old: tuple[Tensor, ...], conv: Conv, *, block: int, step: int) -> Slots:
    """Return the slots after ``old`` tokens were added: one more slot for every ``step`` tokens.

    old = (keys, values, valid, positions). ``step`` is the block where positions increase by 1, so that ``step`` tokens
    reach at most one new block, and 1 where they may jump.
    """
    k, v, valid, positions = old
    cell, tap = cells_of(positions, block)
    cell, valid = torch.cat([slots.cells[:, -1:], cell], 1), torch.cat([slots.valid[:, -1:], valid], 1)
    parts = (zero_masked(a, old[2]) for a in (k, v))
    joined = [
        torch.cat([s[:, -1:].double(), taps_of(a, tap, w)], 1)
        for s, a, w in zip(slots[:2], parts, conv[:2], strict=True)
    ]
    label = cell[:, ::step]
    member = (label[:, :, None] == cell[:, None]) & valid[:, None]
    unique = ~(label[:, :, None] == label[:, None]).triu(1).any(-1)
    new = *((member.double() @ a).to(k.dtype) for a in joined), member.any(-1) & unique, label
    return Slots(*(torch.cat([a[:, :-1], b], 1) for a, b in zip(slots, new, strict=True)))


def _check(q: Tensor, k: Tensor, v: Tensor, conv: Conv, heads: int, block: int, mode: str) -> None:
    D = q.shape[-1]
    if mode not in ("local", "compressed"):
        raise MixerError(f"memory_compressed: mode={mode!r}; choose 'local' or 'compressed'.")
    if D % heads or block < 1 or k.shape != q.shape or v.shape != q.shape:
        given = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, heads={heads}, block={block}"
        raise MixerError(
            f"memory_compressed: expects q, k, v of one shape, heads that divide D, block >= 1; got {given}."
        )
    if len(conv) != (4 if mode == "compressed" else 0) or any(w.shape != (D, D, block) for w in conv[:2]):
        wanted = f"two weights {(D, D, block)} and two biases" if mode == "compressed" else "no conv"
        raise MixerError(
            f"memory_compressed: mode={mode!r} takes {wanted}, got shapes {[tuple(a.shape) for a in conv]}."
        )
