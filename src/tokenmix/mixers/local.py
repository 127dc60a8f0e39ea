"""Softmax attention in a sliding window, and a form that pools the tokens outside of it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import functional
from ..functional.layout.positions import last_valid
from ..functional.local import local_chunk
from ..functional.sums.window import LOCAL_OUTSIDES, LocalOutside
from .base import QKVO, About, Arguments, Facts, Inputs, chunk_positions, register_state, token_positions
from .cost import MixingCost
from .parts.history import HistoryState, empty_history, join_rings, keep_newest
from .parts.options import at_least
from .parts.patterns import BlockCost, build_distance_bias, kept_bytes
from .parts.shared import add_projections, check_positions, has_holes, in_pieces, largest_dot, valid_mask
from .segments import Segmented


@register_state
class LocalState(NamedTuple):
    """The last R = window - 1 tokens, and the sum over all older values. The size is constant.

    keys, values (B, R, D), valid, positions (B, R): the last tokens. far_values (B, D) and far_count (B,): the sum and
    the number of the older values, in float64; 0 with ``outside="none"``. position (B,): the next one.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    far_values: Tensor
    far_count: Tensor
    position: Tensor


class Local(Segmented):
    """Local attention: y_t = W_o [softmax over |t - s| < window of (q_t . k_s / sqrt(e)) v_s] in each head.

    Luong et al. 2015, arXiv:1508.04025, for the window; Beltagy et al. 2020, arXiv:2004.05150. Maps (B, T, D) to (B, T,
    D).

    Args:
        window: a row attends 2 window - 1 tokens, or window when causal, the same ones as in ``aft_local``. Default
            128.
        heads: number of heads, 8 by default; must divide dim.
        outside: "none" (default): tokens outside of the window are not attended. "pool": they count with logit 0, as
            with AFT-local's bias, so that the output is (sum_in e^{q.k} v + sum_out v) / (sum_in e^{q.k} + n_out).
        bias: None (default), or a function of the distance that is added to the logits inside of the window: {"name":
            "alibi", "t5", "kerple" or "sandwich"} with the options of the class in ``tokenmix.positions``.

    Parameters: q_proj, k_proj, v_proj, out_proj, and those of the bias. Time and memory O(T window D). The streaming
    state is the last window - 1 tokens, and with "pool" one vector of D numbers.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        attn_mask=True,
        about=About(
            "Luong et al. 2015, arXiv 1508.04025 (the window); Beltagy et al. 2020, arXiv 2004.05150",
            "fixed pattern",
            "T w D",
            "T w H + T D",
            idea="softmax inside a window; the rest is left out or pooled",
            tier="core",
        ),
        form="local",
        carries=QKVO,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        window: int = 128,
        heads: int = 8,
        outside: LocalOutside = "none",
        bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.window, self.heads, self.outside = window, heads, outside
        at_least(self, 1, window=window)
        if outside not in LOCAL_OUTSIDES:
            self.refuse(f"outside must be 'none' or 'pool', got {outside!r}")
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = build_distance_bias(self, bias, heads)

    def _taps(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the bias of the logits by distance as arguments of the functional form, () without a bias."""
        if self.bias is None:
            return ()
        many = self.window if self.causal else 2 * self.window - 1
        return (self.bias.taps(self.window - 1, many, x.dtype, x.device),)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.local`` for this input: (positional, keyword)."""
        x, context, positions, key_mask = inputs.x, inputs.context, inputs.positions, inputs.key_mask
        keys, query_and_key_positions = (
            (x, positions)
            if context is None
            else (context, self._query_and_key_positions(x, context, positions, key_mask))
        )
        options = {
            "window": self.window,
            "heads": self.heads,
            "outside": self.outside,
            "positions": query_and_key_positions,
        }
        return (self.q_proj(x), self.k_proj(keys), self.v_proj(keys), *self._taps(x)), {
            **options,
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": inputs.attn_mask,
        }

    def _query_and_key_positions(self, x, context, positions, key_mask):
        return token_positions(x, None) if positions is None else positions, token_positions(context, key_mask)

    def mixing_cost(self, T: int) -> MixingCost:
        D, R = self.dim, self.window - 1
        pairs = BlockCost(T).band(R, R)
        flops = 4 * D * pairs.pairs + (4 * D * T if self.outside == "pool" else 0)
        flops += 0 if self.bias is None else self.heads * pairs.pairs
        kept = kept_bytes(D, self.heads, T, [pairs], pools=2 if self.outside == "pool" else 0)
        return MixingCost(
            flops=flops, counted=4 * D * pairs.pairs, activations=kept, state=R * (8 * D + 9) + 8 * D + 16
        )

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        dot = largest_dot(args[0], args[1], options["heads"])
        return dot if len(args) < 4 else dot + float(args[3].detach().abs().max())

    def empty_state(self, batch_size, *, device, dtype):
        if not self.causal:
            return empty_history(batch_size, self.dim, device=device, dtype=dtype)
        keys = torch.zeros(batch_size, self.window - 1, self.dim, device=device, dtype=dtype)
        positions = torch.zeros(keys.shape[:2], dtype=torch.long, device=device)
        far = torch.zeros(batch_size, self.dim, device=device, dtype=torch.float64)
        return LocalState(
            keys,
            keys.clone(),
            positions.bool(),
            positions,
            far,
            far.new_zeros(batch_size),
            positions.new_zeros(batch_size),
        )

    def context_state(self, context, context_mask):
        positions = token_positions(context, context_mask)
        return HistoryState(
            self.k_proj(context),
            self.v_proj(context),
            valid_mask(context, context_mask),
            positions,
            positions.new_zeros(positions.shape[0]),
        )

    @property
    def halo(self):
        return 0 if self.outside == "pool" else self.window - 1

    @property
    def only_halo(self):
        return self.outside != "pool"

    def join_states(self, earlier, later, fade):
        ring, both, left = join_rings(earlier, later)
        if self.outside != "pool":
            return ring
        gone = torch.where(left[..., None], both.values, 0.0).double().sum(1)
        return ring._replace(
            far_values=earlier.far_values + later.far_values + gone,
            far_count=earlier.far_count + later.far_count + left.sum(1),
        )

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
        w = self._taps(x)
        if not self.causal:
            options = {
                "window": self.window,
                "heads": self.heads,
                "outside": self.outside,
                "positions": (query_positions, state.positions),
            }
            return self.out_proj(
                functional.local(self.q_proj(x), state.keys, state.values, *w, key_mask=state.valid, **options)
            ), state._replace(position=next_position)
        check_positions(self, positions, key_mask, rising=True, past=(state.valid, state.positions))
        y, state = in_pieces(
            partial(self._mix_piece, w=w[0] if w else None, holes=has_holes(state.valid, key_mask)),
            x,
            state,
            query_positions,
            valid_mask(x, key_mask),
        )
        return self.out_proj(y), state._replace(position=next_position)

    def _mix_piece(self, x, state, positions, valid, *, w=None, holes=False):
        """Mix new tokens with the ring and each other; tokens that leave the ring are added to the sums."""
        new = self.k_proj(x).to(state.keys.dtype), self.v_proj(x).to(state.values.dtype), valid, positions
        keys, values, key_valid, key_positions = (torch.cat(pair, 1) for pair in zip(state[:4], new, strict=True))
        q, far, options = (
            self.q_proj(x),
            state[4:6],
            {"window": self.window, "heads": self.heads, "outside": self.outside},
        )
        y = local_chunk(
            q, keys.to(q.dtype), values.to(q.dtype), w, (positions, key_positions), far, key_mask=key_valid, **options
        )
        n = x.shape[1]
        ring = keep_newest(
            LocalState(keys, values, key_valid, key_positions, *far, state.position), self.window - 1, holes=holes
        )
        if self.outside == "pool":
            left = last_valid(key_valid, self.window - 1)[2] if holes else key_valid[:, :n]
            gone = torch.where(left[..., None], values[:, : left.shape[1]], 0.0).double().sum(1)
            ring = ring._replace(far_values=far[0] + gone, far_count=far[1] + left.sum(1))
        return y, ring
