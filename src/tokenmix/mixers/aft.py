"""AFT-full, AFT-local and AFT-simple as layers.

Zhai et al. 2021, "An Attention Free Transformer", arXiv:2105.14103.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..functional import aft_chunk as chunk
from ..functional.aft_forget import aft_forget_chunk
from ..functional.layout.positions import position_gaps
from ..functional.sums.gates import Gate
from ..functional.sums.softmax import MASKED_KEY
from ..functional.sums.window import OUTSIDES, Outside
from ..kernels.precision import at_least_float32
from ..positions import PairPositions
from .base import QKVO, About, Arguments, Facts, Inputs, Kernels, chunk_positions, token_positions
from .cost import MixingCost
from .parts.aft import (
    AFTDecayState,
    AFTFullState,
    AFTSimpleState,
    DecaySegments,
    RingSegments,
    add_projections,
    empty_decay,
    empty_full,
    empty_ring,
    history_of,
    queries,
    ring_step,
)
from .parts.pair_bias import PairBias, pair_positions_of
from .parts.pair_biased import FullBlocks, PairBiased
from .parts.shared import ascend, check_positions, check_rising_after, has_holes, in_pieces, valid_mask
from .segments import Segmented

PAIRS = 1024  # tokens up to which a bidirectional bias that decays is computed as pairs, by the kernel


class AFTSimple(Segmented):
    """AFT-simple: y_t = W_o [sigma(q_t) * sum_s softmax_s(k)_s v_s], the softmax along time in each feature.

    Zhai et al. 2021, arXiv:2105.14103, Eq. 5. Maps (B, T, D) to (B, T, D).

    Args:
        gate: nonlinearity sigma of the query. "sigmoid" (default) is the paper's; others are "tanh", "relu", "silu",
            "gelu", "softplus" and "identity". None removes the query (Table 12).

    Parameters: q_proj, k_proj, v_proj, out_proj. Time and memory O(T D). The streaming state is three vectors of D
    numbers.

    Raises:
        MixerError: if ``gate`` is unknown.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        about=About(
            "Zhai et al. 2021, arXiv 2105.14103", "attention free", "T D", "T D", idea="AFT without a bias", tier="core"
        ),
        form="aft_simple",
        carries=QKVO,
        kernels=Kernels(("aft_simple",), step="simple"),
        only_qkv=True,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        gate: Gate | None = "sigmoid",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.gate = gate
        add_projections(self, key_width=dim, gate=gate, qkv_bias=qkv_bias, out_bias=out_bias)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.aft_simple`` for this input: (positional, keyword)."""
        keys = inputs.keys
        args = queries(self, inputs.x), self.k_proj(keys), self.v_proj(keys)
        return args, {"causal": self.causal, "key_mask": inputs.key_mask, "gate": self.gate}

    def mixing_cost(self, T: int) -> MixingCost:
        D = self.dim
        return MixingCost(
            flops=4 * T * D, counted=0, activations=(20 if self.gate is None else 28) * T * D, state=24 * D
        )

    def empty_state(self, batch_size, *, device, dtype):
        return AFTSimpleState(*chunk.empty_past(batch_size, self.dim, self.dim, device=device))

    def context_state(self, context, context_mask):
        empty = chunk.empty_past(context.shape[0], self.dim, self.dim, device=context.device)
        return AFTSimpleState(
            *chunk.absorb(empty, self.k_proj(context), self.v_proj(context), valid_mask(context, context_mask))
        )

    def mix_chunk(self, x, state, *, positions, key_mask):
        if not self.causal:
            return self.out_proj(chunk.read_past(queries(self, x), state, gate=self.gate)), state
        if torch.is_grad_enabled():  # pieces would save no memory
            y, state = self._mix_piece(x, state, key_mask)
        else:
            y, state = in_pieces(self._mix_piece, x, state, key_mask)
        return self.out_proj(y), state

    def _mix_piece(self, x, state, valid):
        y, sums = chunk.aft_simple_chunk(
            queries(self, x), self.k_proj(x), self.v_proj(x), state, key_mask=valid, gate=self.gate
        )
        return y, AFTSimpleState(*sums)


class AFTFull(DecaySegments, Segmented, FullBlocks):
    """AFT-full: y_t = W_o [sigma(q_t) * sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts)].

    w is a learned bias per pair of positions. Zhai et al. 2021, arXiv:2105.14103, Eq. 2. Maps (B, T, D) to (B, T, D).

    Args:
        max_len: number of query positions that the bias covers, in tokens. Required unless ``bias`` is given.
        max_context_len: number of key positions that it covers, where keys come from a context; None: ``max_len``.
        bias: None (default), or a function of positions instead of a table: {"name": "alibi", "t5", "kerple",
            "sandwich" or "fire"} with the options of the class in ``tokenmix.positions``, for one head. There is then
            no longest sequence, and ``max_len``, ``max_context_len``, ``rank`` and ``init_std`` are not used. With
            "alibi" time is O(T D), the streaming state is three vectors of D numbers, and positions must rise in a
            stream.
        rank: w = u v^T with factors of this rank and 2 max_len rank parameters. Default 64. None: a plain (max_len,
            max_len) table.
        init_std: standard deviation of the entries of u and v (or of w) at the start. The paper's N(0, 10^-2) does not
            say whether that is the variance; we take 0.01, the default, as the deviation.
        gate: as in AFTSimple.

    Parameters: q_proj, k_proj, v_proj, out_proj, bias. Time O(T^2 D), memory O(T D) with factors. The streaming state
    is the history of keys and values.

    Raises:
        MixerError: if an option is out of its range, or a sequence is longer than ``max_len``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        attn_mask=True,
        fixed_when_traced="causal",
        about=About(
            "Zhai et al. 2021, arXiv 2105.14103",
            "attention free",
            "T^2 D",
            "T D",
            idea="a weight per key and feature, with a learned bias per pair of positions",
            tier="core",
        ),
        knows_positions=True,
        form="aft_full",
        carries=QKVO,
        kernels=Kernels(("aft_full",), step="full"),
    )

    def __init__(
        self,
        dim: int,
        *,
        max_len: int | None = None,
        causal: bool = False,
        max_context_len: int | None = None,
        bias: dict[str, Any] | None = None,
        rank: int | None = 64,
        init_std: float = 0.01,
        gate: Gate | None = "sigmoid",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        self.gate = gate
        add_projections(self, key_width=dim, gate=gate, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = self.build_bias(bias, max_len, max_context_len, rank, init_std)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.aft_full`` for this input: (positional, keyword)."""
        x, key_mask = inputs.x, inputs.key_mask
        keys = inputs.keys
        w = self.weights(x, inputs.context, inputs.positions, key_mask)
        args = queries(self, x), self.k_proj(keys), self.v_proj(keys), w
        return args, {"causal": self.causal, "key_mask": key_mask, "attn_mask": inputs.attn_mask, "gate": self.gate}

    def by_recurrence(self, T: int) -> bool:
        """Return whether T tokens are mixed by decaying sums; few tokens in both directions are, as pairs, faster."""
        return self.decays and (self.causal or T > PAIRS)

    def mix(self, inputs):
        x, positions, key_mask, attn_mask = inputs.x, inputs.positions, inputs.key_mask, inputs.attn_mask
        itself = self.by_recurrence(x.shape[1]) and inputs.context is None and attn_mask is None
        if not itself or positions is not None and (torch.compiler.is_compiling() or not ascend(positions, key_mask)):
            return super().mix(inputs)
        gaps, k, v, keep = None, self.k_proj(x), self.v_proj(x), key_mask
        if positions is not None or key_mask is not None and self.causal:
            at = token_positions(x, key_mask) if positions is None else positions
            gaps = position_gaps(at, valid_mask(x, key_mask), at.new_zeros(at.shape[0]))[0]
        elif key_mask is not None:  # a masked query stands at its place between the keys on both sides of it
            at, valid = token_positions(x, key_mask), key_mask[..., None]
            gaps, keep = at.diff(dim=1, prepend=at[:, :1]), None
            k, v = torch.where(valid, at_least_float32(k), MASKED_KEY), torch.where(valid, v, 0.0)
        args = queries(self, x), k, v, self.decay(x, gaps)
        return self.out_proj(functional.aft_forget(*args, causal=self.causal, key_mask=keep, gate=self.gate))

    def mixing_cost(self, T: int) -> MixingCost:
        D, pairs = self.dim, T * T
        if self.by_recurrence(T):
            return MixingCost(flops=10 * T * D, counted=None, activations=700 * T * D, state=24 * D + 16)
        if isinstance(self.bias, PairPositions):
            counted = (4 * D + self.bias.pair_products()) * pairs
            kept = 72 * T * D + (16 + 4 * self.bias.pair_kept()) * pairs
            return MixingCost(counted + self.bias.pair_flops() * pairs, counted, kept, (8 * D + 9) * T + 8)
        flops = 4 * pairs * D + 2 * pairs * (self.bias.rank or 0)
        return MixingCost(flops=flops, counted=flops, activations=72 * T * D + 16 * pairs, state=(8 * D + 9) * T + 8)

    def empty_state(self, batch_size, *, device, dtype):
        if self.decays and self.causal:
            return empty_decay(batch_size, self.dim, device=device)
        return empty_full(batch_size, self.dim, device=device, dtype=dtype)

    def context_state(self, context, context_mask):
        return history_of(self, context, context_mask)

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
        self.check_range(query_positions)
        if not self.causal:
            w = (
                self.log_weights(query_positions, state.positions, x.dtype)
                if isinstance(self.bias, PairPositions)
                else self.bias.select(query_positions, state.positions)
            )
            y = functional.aft_full(queries(self, x), state.keys, state.values, w, key_mask=state.valid, gate=self.gate)
            return self.out_proj(y), state._replace(position=next_position)
        if self.decays:
            check_rising_after(self, positions, key_mask, state.last)
        mix_piece = self._mix_decaying if self.decays else self._mix_piece
        y, state = in_pieces(mix_piece, x, state, query_positions, valid_mask(x, key_mask))
        return self.out_proj(y), state._replace(position=next_position)

    def _mix_decaying(self, x, state, positions, valid):
        gaps, last = position_gaps(positions, valid, state.last)
        args = queries(self, x), self.k_proj(x), self.v_proj(x), self.decay(x, gaps)
        y, sums = aft_forget_chunk(*args, (state.m, state.num, state.den), key_mask=valid, gate=self.gate)
        return y, AFTDecayState(*sums, last, state.position)

    def _mix_piece(self, x, state, positions, valid):
        q, kept = queries(self, x), (state.keys, state.values, state.valid)
        new = self.k_proj(x).to(state.keys.dtype), self.v_proj(x).to(state.values.dtype), valid
        found = None
        if isinstance(self.bias, PairBias):
            keep = state.positions.shape[1] + positions.shape[1]
            found = chunk.pair_weights(*self.bias.factors_on(x.device), positions, state.positions, keep=keep)
        if found is None:
            key_positions = torch.cat([state.positions, positions], 1)
            w = self.log_weights(positions, key_positions, torch.float64)[:, None]
        else:
            w, _, key_positions = found
        y, history = chunk.aft_chunk(q, new, kept, w, gate=self.gate)
        return y, AFTFullState(*history, key_positions, state.position)


class AFTLocal(RingSegments, Segmented, PairBiased):
    """AFT-local: AFT-full with a bias that is learned for |t - s| < window and is 0 elsewhere.

    Every key still counts. Zhai et al. 2021, arXiv:2105.14103, Eq. 4. Maps (B, T, D) to (B, T, D).

    Args:
        window: s of the paper, in tokens: the bias covers 2 window - 1 positions, or window when causal. 0 is
            AFT-simple, without a bias to learn; window >= T is AFT-full.
        outside: "zero" (default) gives tokens outside of the window a bias of 0; "none" does not attend them.
        bias: as in AFTFull. One of the distance alone becomes one row of taps; "fire" makes T x T numbers. A bias that
            falls with the distance gives tokens inside the window less weight than those outside of it, unless
            ``outside="none"``.
        max_len, max_context_len, rank, init_std, gate: as in AFTFull.

    Parameters: as in AFTFull; no bias with ``window=0``. Time O(T window D). The streaming state is the last window - 1
    tokens and three vectors of D numbers.

    Raises:
        MixerError: if an option is out of its range, if ``outside="none"`` comes with ``window=0``, or if a sequence is
            longer than ``max_len``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        attn_mask=True,
        fixed_when_traced=True,
        about=About(
            "Zhai et al. 2021, arXiv 2105.14103",
            "attention free",
            "T s D",
            "T D",
            idea="AFT with the bias learned inside a window only",
            tier="core",
        ),
        knows_positions=True,
        form="aft_local",
        carries=QKVO,
        kernels=Kernels(("aft_band",), step="ring"),
    )

    def __init__(
        self,
        dim: int,
        *,
        window: int,
        max_len: int | None = None,
        causal: bool = False,
        max_context_len: int | None = None,
        bias: dict[str, Any] | None = None,
        rank: int | None = 64,
        init_std: float = 0.01,
        outside: Outside = "zero",
        gate: Gate | None = "sigmoid",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        self.window, self.outside = window, outside
        if window < 0:
            self.refuse(
                f"window must be an integer >= 0, got {window!r}; 0 is AFT-simple, window >= length is AFT-full"
            )
        if outside not in OUTSIDES or (outside == "none" and window == 0):
            self.refuse(f"outside must be 'zero', or 'none' with window >= 1, got outside={outside!r}, window={window}")
        self.gate = gate
        add_projections(self, key_width=dim, gate=gate, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = self.build_bias(bias, max_len, max_context_len, rank, init_std, empty=window == 0)
        if isinstance(self.bias, PairPositions) and window == 0:
            self.refuse(f"bias={bias!r}: window=0 has no bias")

    def pair_log_weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return w_ts like ``PairBiased``; outside of the window it is 0, or -inf with ``outside="none"``."""
        w = super().pair_log_weights(queries, keys)
        far = (keys[:, None] - queries[:, :, None]).abs() >= self.window
        return w.masked_fill(far & w.isfinite(), -torch.inf if self.outside == "none" else 0.0)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.aft_local`` for this input: (positional, keyword)."""
        x, context, positions, key_mask = inputs.x, inputs.context, inputs.positions, inputs.key_mask
        keys = inputs.keys
        w = (
            self.taps(x, self.window)
            if isinstance(self.bias, PairPositions) and self.bias.by_distance
            else self.weights(x, context, positions, key_mask)
        )
        args = queries(self, x), self.k_proj(keys), self.v_proj(keys), w
        query_and_key_positions = positions if context is None else pair_positions_of(x, context, positions, key_mask)
        options = {"window": self.window, "outside": self.outside, "positions": query_and_key_positions}
        return args, {
            **options,
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": inputs.attn_mask,
            "gate": self.gate,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        D, s = self.dim, self.window
        ring = max(s - 1, 0)
        # the band is computed in blocks of 8, 16, 32 ... tokens that hold the window
        block = 8 << max(0, (ring - 1).bit_length() - 3)
        kept = 28 if s == 0 else 64 + 24 * block if self.outside == "none" else 108
        flops, activations = 4 * T * D * max(2 * s, 1), kept * T * D + 24 * block * T
        if isinstance(self.bias, PairPositions) and not self.bias.by_distance:
            flops += (self.bias.pair_products() + self.bias.pair_flops()) * T * T
            activations += (16 + 4 * self.bias.pair_kept()) * T * T
        return MixingCost(
            flops=flops,
            counted=None,
            activations=activations,
            state=ring * (8 * D + 9) + 24 * D + 8,
        )

    def empty_state(self, batch_size, *, device, dtype):
        if not self.causal:
            return empty_full(batch_size, self.dim, device=device, dtype=dtype)
        ring = max(self.window - 1, 0)
        return empty_ring(batch_size, ring, self.dim, self.dim, device=device, dtype=dtype)

    def context_state(self, context, context_mask):
        return history_of(self, context, context_mask)

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
        self.check_range(query_positions)
        if not self.causal:
            return self.out_proj(self._read(x, state, query_positions)), state._replace(position=next_position)
        if self.window and positions is not None:
            check_positions(self, positions, key_mask, rising=True, past=(state.valid, state.positions))
        y, state = in_pieces(
            partial(self._mix_piece, holes=key_mask is not None and has_holes(state.valid, key_mask)),
            x,
            state,
            query_positions,
            valid_mask(x, key_mask),
        )
        return self.out_proj(y), state._replace(position=next_position)

    def _read(self, x, history, positions):
        """Mix queries with a context, all keys of which are in the state."""
        near = (history.positions[:, None] - positions[:, :, None]).abs() < self.window
        w = torch.where(near, self.log_weights(positions, history.positions, torch.float64), 0.0)
        mask = near if self.outside == "none" else None
        return functional.aft_full(
            queries(self, x), history.keys, history.values, w, key_mask=history.valid, attn_mask=mask, gate=self.gate
        )

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        none, found = self.outside == "none", None
        if isinstance(self.bias, PairBias):
            at = {"window": self.window, "keep": state.positions.shape[1]}
            found = chunk.pair_weights(*self.bias.factors_on(x.device), positions, state.positions, **at)
        if found is not None:
            return ring_step(self, x, state, positions, found[2], valid, *found[:2], only_near=none, holes=holes)
        key_positions = torch.cat([state.positions, positions], 1)
        near = ((key_positions[:, None] - positions[:, :, None]).abs() < self.window)[:, None]
        w = torch.where(near, self.log_weights(positions, key_positions, torch.float64)[:, None], 0.0)
        return ring_step(self, x, state, positions, key_positions, valid, w, near, only_near=none, holes=holes)
