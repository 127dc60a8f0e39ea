"""The Synthesizer (Tay et al. 2020) as written.

Each head's logits over all N positions, then the columns of the keys' positions, then softmax(B) G(X).
"""

from __future__ import annotations

import torch
from torch import Tensor


def synthesizer_dense(q, v, dense, *, rectify: bool = True, positions=None, added=None, mask=None) -> Tensor:
    """Use the logits B_i = W2 relu(W1 x_i + b1) + b2, with q = W1 x + b1."""
    return _mix_table(_dense(q, dense, rectify), v, positions, mask, added)


def synthesizer_random(v, w, *, positions=None, added=None, mask=None) -> Tensor:
    """Use the logits B = R."""
    return _mix_table(_random(v, w, positions), v, positions, mask, added)


def synthesizer_factorized_dense(
    q, v, factorized_dense, *, rectify: bool = True, positions=None, added=None, mask=None
) -> Tensor:
    """Use the logits C_i[j] = A_i[j mod a] * B_i[j div a], A = F_A(x_i) and B = F_B(x_i)."""
    return _mix_table(_factorized_dense(q, factorized_dense, rectify), v, positions, mask, added)


def synthesizer_factorized_random(v, w, *, positions=None, added=None, mask=None) -> Tensor:
    """Use the logits B = R1 R2^T."""
    return _mix_table(_random(v, w[0] @ w[1].transpose(1, 2), positions), v, positions, mask, added)


def synthesizer_mixture(
    q,
    k,
    v,
    alpha,
    dense,
    random,
    factorized_dense,
    factorized_random,
    *,
    parts,
    heads: int,
    join="softmax",
    scale=None,
    positions=None,
    added=None,
    mask=None,
) -> Tensor:
    """Use the logits B = sum_i alpha_i S_i, the alpha_i from a softmax.

    Or (1 - a) Q K^T + a S with a = sigmoid(alpha), or the plain sum. The alpha_i of all heads, or of each: (H, parts).
    """
    total, where = torch.zeros((), dtype=v.dtype), _key_positions(v, positions)
    for i, part in enumerate(parts):
        factor = torch.softmax(alpha, -1)[..., i] if join == "softmax" else torch.ones(())
        if join == "gated":
            factor = 1 - torch.sigmoid(alpha[..., 0]) if part == "attention" else torch.sigmoid(alpha[..., 0])
        if part == "attention":
            logits = _attention(q, k, heads, scale)
        elif part == "dense":
            logits = _by_key(_dense(q, dense, True), where)
        elif part == "factorized_dense":
            logits = _by_key(_factorized_dense(q, factorized_dense, True), where)
        else:
            logits = _by_key(
                _random(
                    v,
                    random[0] if part == "random" else factorized_random[0] @ factorized_random[1].transpose(1, 2),
                    positions,
                ),
                where,
            )
        total = total + (factor[:, None, None] if factor.ndim else factor) * logits
    return _weigh_values(total, v, mask, added)


def _dense(q: Tensor, dense, rectify: bool) -> Tensor:
    """Return (B, H, T, N): one row per token, one column per position."""
    e = dense[0].shape[1]
    rows = []
    for h in range(q.shape[-1] // e):
        g = h if dense[0].shape[0] > 1 else 0
        hidden = q[..., h * e : (h + 1) * e]
        row = (hidden.clamp_min(0) if rectify else hidden) @ dense[0][g]
        rows.append(row + dense[1][g] if len(dense) > 1 else row)
    return torch.stack(rows, 1)


def _factorized_dense(q: Tensor, tables, rectify: bool) -> Tensor:
    """Return (B, H, T, a b), column by column."""
    A, B = _dense(q, tables[::2], rectify), _dense(q, tables[1::2], rectify)
    a, b = A.shape[-1], B.shape[-1]
    return torch.stack([A[..., j % a] * B[..., j // a] for j in range(a * b)], -1)


def _random(v: Tensor, table: Tensor, positions) -> Tensor:
    """Return (B, H, T, N): the row of each token's position."""
    return torch.stack([table[:, row] for row in _key_positions(v, positions)])


def _attention(q: Tensor, k: Tensor, heads: int, scale) -> Tensor:
    """Return (B, H, T, S): Q K^T / sqrt(e)."""
    e = q.shape[-1] // heads
    parts = [q[..., h * e : (h + 1) * e] @ k[..., h * e : (h + 1) * e].transpose(1, 2) for h in range(heads)]
    return torch.stack(parts, 1) * (e**-0.5 if scale is None else scale)


def _key_positions(v: Tensor, positions) -> Tensor:
    return torch.arange(v.shape[1]).expand(v.shape[:2]) if positions is None else positions


def _by_key(logits: Tensor, where: Tensor) -> Tensor:
    """Return the columns of the keys' positions, one batch row at a time."""
    return torch.stack([logits[b][..., where[b]] for b in range(logits.shape[0])])


def _mix_table(logits: Tensor, v: Tensor, positions, mask, added) -> Tensor:
    return _weigh_values(_by_key(logits, _key_positions(v, positions)), v, mask, added)


def _weigh_values(logits: Tensor, v: Tensor, mask, added) -> Tensor:
    """Compute softmax(B + added) G(X), head by head; a query that may attend nothing gives 0."""
    logits = logits if added is None else logits + added
    H = logits.shape[1]
    e, outputs = v.shape[-1] // H, []
    for h in range(H):
        B = logits[:, h] if mask is None else logits[:, h].masked_fill(~mask, float("-inf"))
        weights = torch.softmax(B, -1)
        if mask is not None:
            weights = torch.where(mask.any(-1, keepdim=True), weights, 0.0)
        outputs.append(weights @ v[..., h * e : (h + 1) * e])
    return torch.cat(outputs, -1)
