"""Transformer-XL's relative attention with segment memory (Dai et al. 2019, arXiv 1901.02860) as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from .base import QKVO, About, Arguments, Mixer
from .cost import MixingCost
from .parts.history import empty_history, join_rings, joined, newest
from .parts.shared import add_projections, largest_relative, ring_chunk


class TransformerXL(Mixer):
    """Transformer-XL: y_t = W_o [sum_s softmax_s([(q_t + u) . k_s + (q_t + v) . W_r R_{t-s}] / sqrt(e)) v_s].

    In each of ``heads`` heads. Dai et al. 2019, arXiv:1901.02860, Sec. 3.3. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim; e = dim / heads.
        memory: number of positions that are attended: the last ``memory`` ones, t's own included, or |t - s| < memory
            without ``causal``. None (default): all.

    Parameters: the four projections, W_r (``relative``), u (``content``) and v (``place``). Time O(T^2 D), or O(T
    memory D). The streaming state is the segment memory: keys and values of the last memory - 1 tokens. A training loop
    that passes segment after segment to ``extend`` and detaches the state in between runs the paper's recurrence.

    Deviations: the memory slides with each token, in streams as in one pass, so that results do not depend on where
    segments are cut.

    Raises:
        MixerError: if an option is out of its range.
    """

    supports_causal = supports_streaming = supports_attn_mask = True
    supports_segments = True
    about = About("Dai et al. 2019, arXiv 1901.02860", "memory", "T^2 D, or T memory D", "T^2 heads, or T memory heads")
    knows_positions = True
    form = "transformer_xl"
    carries = QKVO

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        memory: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.memory = heads, memory
        if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory < 1):
            self.refuse(
                f"memory must be a positive integer, which counts the token itself, or None for all, got {memory!r}"
            )
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.relative = nn.Parameter(torch.empty(dim, dim + dim % 2))
        self.content, self.place = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.uniform_(self.relative, -(self.dim**-0.5), self.dim**-0.5)  # as in torch's Linear
        for bias in (self.content, self.place):
            nn.init.normal_(bias, std=0.02)

    def functional_args(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Arguments:
        """Return the arguments of ``functional.transformer_xl`` for this input: (positional, keyword).

        Only differences of positions matter.
        """
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.relative, self.content, self.place
        options = {"heads": self.heads, "memory": self.memory, "positions": positions}
        return args, {**options, "causal": self.causal, "key_mask": key_mask, "attn_mask": attn_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        D, M, n = self.dim, self.memory, self.relative.shape[1]
        if M is None or M >= T:
            flops = 4 * T * T * D + 2 * (2 * T - 1) * (T + n) * D
            counted, pairs = flops, T * T
        else:
            N = -(-T // M)
            flops, counted, pairs = (
                2 * N * M * D * (2 * 3 * M + 4 * M - 1) + 2 * (4 * M - 1) * n * D,
                None,
                N * M * 3 * M,
            )
        state = (8 * D + 9) * (T if M is None else M - 1) + 8
        return MixingCost(flops, counted, activations=4 * (9 * T * D + pairs * self.heads), state=state)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, k, _, relative, content, place = args
        return largest_relative(q, k, relative, content, place, options["heads"])

    def empty_state(self, batch_size, *, device, dtype):
        return empty_history(
            batch_size, self.dim, 0 if self.memory is None else self.memory - 1, device=device, dtype=dtype
        )

    @property
    def has_segments(self):
        return super().has_segments and self.memory is not None

    @property
    def halo(self):
        return (self.memory or 1) - 1

    @property
    def only_halo(self):
        return True

    def join_states(self, earlier, later, fade):
        return join_rings(earlier, later)[0]

    def mix_chunk(self, x, state, *, positions, key_mask):
        return ring_chunk(self, x, state, positions=positions, key_mask=key_mask, ring=self.memory is not None)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        state, q = joined(state, valid, positions, keys=self.k_proj(x), values=self.v_proj(x)), self.q_proj(x)
        learned = self.relative, self.content, self.place
        options = {
            "heads": self.heads,
            "memory": self.memory,
            "positions": (positions, state.positions),
            "causal": True,
            "key_mask": state.valid,
        }
        y = functional.transformer_xl(q, state.keys.to(q.dtype), state.values.to(q.dtype), *learned, **options)
        return y, state if self.memory is None else newest(state, self.memory - 1, holes=holes)
