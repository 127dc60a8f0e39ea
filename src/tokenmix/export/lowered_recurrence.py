"""Write gated linear recurrences as ONNX's standard operator LinearAttention, which exists from opset 27 on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..functional.recurrence import FORGET
from .writer import Writer


def write_recurrence(
    w: Writer,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    decay: Any,
    beta: Any,
    past: Any,
    flags: Any,
    ends: Any,
    *,
    delta: int,
    scale: float,
) -> ir.Value:
    """Write ``functional.recurrence``: outputs and states in one row.

    A masked token is one that writes, forgets and reads nothing. Heads of keys that several values share are repeated,
    as the operator shares keys among queries only.
    """
    heads = _heads(v)
    q, k, v = (_pack(w, a, heads // _heads(a)) for a in (q, k, v))
    decay = None if decay is None else w.Reshape(decay, [0, 0, -1])
    if flags is not None:
        kind = w.Cast(w.Unsqueeze(flags, [2]), to=int(ir.DataType.INT64))
        live, starts = w.Equal(w.Mod(kind, np.array(2)), np.array(1)), w.Greater(kind, np.array(1))
        kept = w.Where(starts, FORGET, 0.0 if decay is None else decay)
        decay = w.Expand(kept, w.shapes(1, 1, heads)) if decay is None else kept
        q, k, v, decay = (w.Where(live, a, 0.0) for a in (q, k, v, decay))
    if delta and beta is None:
        beta = w.Expand(1.0, w.shapes(w.size(v, 0), w.size(v, 1), 1))
    rule = ("gated_" if decay is not None else "") + "delta" if delta else "linear" if decay is None else "gated"
    sizes = {"q_num_heads": heads, "kv_num_heads": heads}
    y, state = w.two_of("LinearAttention", q, k, v, past, decay, beta, update_rule=rule, scale=scale, **sizes)
    return w.Concat(w.Reshape(y, [-1]), w.Reshape(state, [-1]), axis=0)


def _heads(a: ir.Value) -> int:
    assert a.shape is not None
    heads = a.shape[2]
    assert isinstance(heads, int)
    return heads


def _pack(w: Writer, a: ir.Value, times: int) -> ir.Value:
    """Return (B, T, heads, c) as (B, T, heads times c), each head repeated."""
    if times > 1:
        a = w.Expand(w.Unsqueeze(a, [3]), [1, 1, 1, times, 1])
    return w.Reshape(a, [0, 0, -1])
