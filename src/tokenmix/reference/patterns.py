"""Softmax attention over fixed patterns as written: the pairs that count, spelled out, and a softmax over them.

Positions default to the index minus the index of a row's first key; queries before it attend nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIX, LAST = (0x2C1B3C6D, 0x297A2D39), 2**31 - 1


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, heads: int, pairs: list[Tensor], mask: Tensor | None, w: Tensor | None = None
) -> Tensor:
    """Compute softmax(q k^T / sqrt(e) + w) v head by head over that head's pairs (B, T, S) and the mask; none gives 0.

    w is (heads, B, T, S).
    """
    e, outputs = q.shape[-1] // heads, []
    for h in range(heads):
        c = slice(h * e, (h + 1) * e)
        ok = pairs[h] if mask is None else pairs[h] & mask
        logits = q[..., c] @ k[..., c].transpose(-1, -2) / e**0.5
        logits = logits if w is None else logits + w[h]
        weights = logits.masked_fill(~ok, float("-inf")).softmax(-1)
        outputs.append(torch.where(ok.any(-1, keepdim=True), weights, 0.0) @ v[..., c])
    return torch.cat(outputs, -1)


def _positions(q: Tensor, k: Tensor, positions, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return positions of queries (B, T, 1) and keys (B, 1, S)."""
    if positions is None:
        index = torch.arange(k.shape[1]).expand(k.shape[:2])
        positions = index if mask is None else index - (mask.any(1).cumsum(1) == 0).sum(1, keepdim=True)
    t, s = positions if isinstance(positions, tuple) else (positions, positions)
    return t[:, :, None], s[:, None, :]


def local(
    q, k, v, w=None, *, window: int, heads: int, outside: str = "none", positions=None, mask: Tensor | None = None
) -> Tensor:
    """Attend with logits q_t . k_s / sqrt(e) + w where |t - s| < window; w is taps (heads, n), window - 1 first.

    Outside there is no pair, or ("pool") the logit 0.
    """
    B, T, S, e = q.shape[0], q.shape[1], k.shape[1], q.shape[-1] // heads
    t, s = _positions(q, k, positions if positions is not None else torch.arange(T).expand(B, T), mask)
    near = ((t - s).abs() < window).expand(B, T, S)
    taps = torch.zeros(heads, 2 * window - 1) if w is None else w
    added = taps[:, (window - 1 - (t - s)).clamp(0, taps.shape[1] - 1)]
    if outside == "none":
        return _softmax(q, k, v, heads, [near] * heads, mask, added)
    ok, outputs = torch.ones(B, T, S, dtype=torch.bool) if mask is None else mask, []
    for h in range(heads):
        c = slice(h * e, (h + 1) * e)
        logits = torch.where(near, q[..., c] @ k[..., c].transpose(-1, -2) / e**0.5 + added[h], 0.0)
        weights = logits.masked_fill(~ok, float("-inf")).softmax(-1)
        outputs.append(torch.where(ok.any(-1, keepdim=True), weights, 0.0) @ v[..., c])
    return torch.cat(outputs, -1)


def _halves(one: Tensor, two: Tensor, heads: int, merged: bool) -> list[Tensor]:
    return [one | two] * heads if merged else [one if h < heads // 2 else two for h in range(heads)]


def _added_logits(added, far: Tensor) -> Tensor | None:
    """Return what a bias by distance adds to the logits at distances t - s, (heads, B, T, S)."""
    return None if added is None else added(far)


def strided(q, k, v, *, stride: int, heads: int, merged: bool = False, positions=None, added=None, mask=None) -> Tensor:
    """Attend as in Child et al. 2019, Sec. 4.2: A1 = {s: t - l <= s <= t}, A2 = {s: (t - s) mod l = 0}, mirrored."""
    t, s = _positions(q, k, positions if positions is not None else torch.arange(k.shape[1]).expand(k.shape[:2]), mask)
    return _softmax(
        q,
        k,
        v,
        heads,
        _halves((t - s).abs() <= stride, (t - s) % stride == 0, heads, merged),
        mask,
        _added_logits(added, t - s),
    )


def fixed(
    q, k, v, *, stride: int, columns: int, heads: int, merged: bool = False, positions=None, added=None, mask=None
) -> Tensor:
    """Attend as in Child et al. 2019, Sec. 4.2.

    A1 = {s: floor(s / l) = floor(t / l)}, A2 = {s: s mod l in {l - c, ..., l - 1}}.
    """
    t, s = _positions(q, k, positions, mask)
    own, column = (s // stride == t // stride) & (t >= 0), (s % stride >= stride - columns) & (t >= 0)
    return _softmax(q, k, v, heads, _halves(own, column, heads, merged), mask, _added_logits(added, t - s))


def longformer(
    q,
    k,
    v,
    q_global,
    k_global,
    v_global,
    *,
    reach: int,
    dilation,
    global_tokens: int,
    heads: int,
    positions=None,
    added=None,
    mask=None,
) -> Tensor:
    """Attend as in Beltagy et al. 2020, Sec. 3.1: dilated window and global keys for all rows.

    The rows of global tokens attend everything, with weights of their own.
    """
    t, s = _positions(q, k, positions, mask)
    shared, pairs = (s < global_tokens) & (t >= 0), []
    for d in dilation if isinstance(dilation, list) else [dilation] * heads:
        pairs.append((((t - s).abs() <= reach * d) & ((t - s) % d == 0) & (t >= 0)) | shared)
    w = _added_logits(added, t - s)
    y = _softmax(q, k, v, heads, pairs, mask, w)
    own = _softmax(q_global, k_global, v_global, heads, [(t >= 0).expand_as(shared)] * heads, mask, w)
    return torch.where((t >= 0) & (t < global_tokens), own, y)


def bigbird(
    q,
    k,
    v,
    *,
    block,
    window_blocks,
    random_blocks,
    global_blocks,
    seed,
    heads,
    positions=None,
    added=None,
    mask: Tensor | None = None,
    causal_taps: bool = False,
) -> Tensor:
    """Attend as in Zaheer et al. 2020, Sec. 2 and Appendix D: window, global and random blocks.

    Global blocks attend everything.
    """
    t, s = _positions(q, k, positions, mask)
    valid, w = torch.ones(s.shape, dtype=torch.bool) if mask is None else mask.any(1, keepdim=True), window_blocks // 2
    pairs = torch.zeros(heads, q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool)
    for b in range(q.shape[0]):
        key_positions = s[b % s.shape[0], 0]
        length = int(torch.where(valid[b % valid.shape[0], 0], key_positions, -1).max()) + 1
        for h, row in ((h, row) for h in range(heads) for row in range(q.shape[1])):
            position = int(t[b % t.shape[0], row, 0])
            if position >= 0:
                i, end = position // block, position // block + 1 if causal_taps else -(-length // block)
                blocks = [
                    *range(global_blocks),
                    *range(i - w, i + w + 1),
                    *_random(i, end, w, global_blocks, h, random_blocks, seed),
                ]
                pairs[h, b, row] = (
                    True if i < global_blocks else torch.isin(key_positions // block, torch.tensor(blocks))
                )
    return _softmax(q, k, v, heads, list(pairs), mask, _added_logits(added, t - s))


def _random(i: int, end: int, window: int, first: int, head: int, count: int, seed: int) -> list[int]:
    """Draw one block from each of ``count`` stretches by a hash.

    The stretches cover the blocks that are neither global nor in the window.
    """
    blocks, chosen = [j for j in range(first, end) if abs(i - j) > window], []
    for slot in range(count):
        stretch = blocks[len(blocks) * slot // count : len(blocks) * (slot + 1) // count]
        number = (i * 7919 + head * 104729 + slot * 1299709 + seed * 15485863) & LAST
        for shift, factor in zip((15, 12), MIX, strict=True):
            number = ((number ^ number >> shift) * factor) & LAST
        chosen += stretch[((number ^ number >> 15) * len(stretch)) >> 31 :][:1]
    return chosen
