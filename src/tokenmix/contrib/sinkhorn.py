"""The Sinkhorn layer (Tay et al. 2020, arXiv:2002.11296).

Local attention, and one block chosen by a soft permutation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.layout.masks import valid_mask
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer, chunk_positions, register_state, token_positions
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least
from ..mixers.parts.shared import add_projections, check_positions, largest_dot
from .sinkhorn_forms import lay_out, permutation, prepare_heads, sinkhorn, sinkhorn_chunk


@register_state
class SinkhornState(NamedTuple):
    """Every token so far.

    queries (the permutation is computed from their sums), keys, values (B, S, D); valid (B, S) bool, True = may be
    attended; positions (B, S); position (B,), the next one. ``opened`` (B, n) matters by its length only: explicit
    positions may have opened n blocks beyond S / block + 1.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    opened: Tensor
    position: Tensor


class Sinkhorn(Mixer):
    """Sparse Sinkhorn attention: each block attends itself and one block that is sorted to it.

    y_t = W_o [sum_s softmax_s(q_t . k_s / sqrt(e)) v_s] in each head, over the keys of t's block i and those of (P
    K)_i. P is a soft permutation of blocks from ``iterations`` of Sinkhorn normalisation of R_ij = mean(Q_i)^T A
    mean(K_j) / (sqrt(e) temperature). A, e x e per head, starts as the identity. Tay et al. 2020, arXiv:2002.11296.
    Maps (B, T, D) to (B, T, D). In the causal form P brings completed earlier blocks only, and its row i is computed
    from those alone. Each row is cut into blocks by its own positions.

    Args:
        heads: number of heads, 8 by default; must divide dim.
        block: b, tokens per block, 16 by default.
        iterations: number of Sinkhorn normalisations, each of rows and then of columns; 5 by default.
        temperature: divisor of R, 0.75 by default.
        gumbel: True: add Gumbel noise to R in train mode, as the paper does. Default False.
        sortcut: number of sorted blocks; every query then attends the first ``sortcut`` of them and nothing else;
            causal=False only. None (default): off.

    Parameters: q_proj, k_proj, v_proj, out_proj, sorting (A). The streaming state is the history of queries, keys and
    values.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        fixed_when_traced="causal",
        about=About(
            "Tay et al. 2020, arXiv 2002.11296",
            "learned pattern",
            "T block D + (T / block)^2 (block D + iterations heads)",
            "T (block heads + D)",
        ),
        form=sinkhorn,
        carries=QKVO,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        block: int = 16,
        iterations: int = 5,
        temperature: float = 0.75,
        gumbel: bool = False,
        sortcut: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.block, self.iterations, self.temperature, self.gumbel, self.sortcut = (
            heads,
            block,
            iterations,
            temperature,
            gumbel,
            sortcut,
        )
        at_least(self, 1, block=block, **({} if sortcut is None else {"sortcut": sortcut}))
        at_least(self, 0, iterations=iterations)
        if (
            not isinstance(temperature, int | float)
            or isinstance(temperature, bool)
            or not 0 < temperature < float("inf")
        ):
            self.refuse(f"temperature must be a positive number, got {temperature!r}")
        if sortcut is not None and causal:
            self.refuse(f"sortcut={sortcut} shows every query the whole sequence; use causal=False or no sortcut")
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.sorting = nn.Parameter(torch.empty(heads, dim // heads, dim // heads))
        self.init_parameters()

    def init_parameters(self) -> None:
        """Set A to the identity, which sorts by the dot products of means."""
        with torch.no_grad():
            self.sorting.copy_(
                torch.eye(self.sorting.shape[-1], dtype=self.sorting.dtype, device=self.sorting.device).expand_as(
                    self.sorting
                )
            )

    def _shape(self) -> dict:
        return {
            "heads": self.heads,
            "block": self.block,
            "iterations": self.iterations,
            "temperature": self.temperature,
        }

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``sinkhorn`` for this input: (positional, keyword)."""
        x, positions, key_mask = inputs.x, inputs.positions, inputs.key_mask
        check_positions(self, positions, key_mask, rising=True)
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.sorting
        more = {"positions": positions} if positions is not None else {}
        return args, {**self._shape(), "sortcut": self.sortcut, **more, "causal": self.causal, "key_mask": key_mask}

    def mix(self, inputs: Inputs) -> Tensor:
        args, options = self.functional_args(inputs)
        return self.out_proj(sinkhorn(*args, gumbel=self.gumbel and self.training, **options))

    def mixing_cost(self, T: int) -> MixingCost:
        D, H, b = self.dim, self.heads, self.block
        N = -(-T // b)
        L = N * b
        keys = 2 * b if self.sortcut is None else min(self.sortcut, N) * b
        sort = 2 * N * D * D // H + 2 * N * N * D
        flops = sort + 4 * N * N * b * D + 4 * L * keys * D
        # N x N numbers in float64 for each iteration
        steps = 2 + 5 * (N - 1).bit_length() if self.causal else 2
        kept = L * (9 * H * keys + 4 * D * 11) + 8 * H * N * N * (steps * self.iterations + 2)
        return MixingCost(flops, None, kept, (12 * D + 1 + 8) * T + 8)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, k, v, sorting = args
        valid = valid_mask(q, options.get("key_mask"))
        layout = lay_out(
            token_positions(q, options.get("key_mask")),
            valid,
            block=options["block"],
            count=-(-q.shape[1] // options["block"]),
        )
        qs, ks, _ = (layout.arrange(a) for a in prepare_heads(q, k, v, valid, options["heads"]))
        shape = {n: options[n] for n in ("iterations", "temperature", "causal")}
        P, _ = permutation(qs, ks, sorting, layout.there, gumbel=False, **shape)
        moved = layout.take(torch.einsum("bhij,bhjue->bhiue", P.to(ks.dtype), ks)).transpose(1, 2).flatten(2)
        return max(largest_dot(q, k, options["heads"]), largest_dot(q, moved, options["heads"]))

    def empty_state(self, batch_size, *, device, dtype):
        keys = torch.zeros(batch_size, 0, self.dim, device=device, dtype=dtype)
        none = torch.zeros(batch_size, 0, device=device, dtype=torch.bool)
        place = torch.zeros(batch_size, 0, device=device, dtype=torch.long)
        return SinkhornState(
            keys,
            keys.clone(),
            keys.clone(),
            none,
            place,
            none.clone(),
            torch.zeros(batch_size, device=device, dtype=torch.long),
        )

    def state_lengths(self):
        return {"opened": "blocks opened"}

    def mix_chunk(self, x, state, *, positions, key_mask):
        check_positions(self, positions, key_mask, rising=True, past=(state.valid, state.positions))
        query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
        (q, k, v, sorting), options = self.functional_args(Inputs(x, positions=positions, key_mask=key_mask))
        past = state[:5]
        new = *(a.to(state.keys.dtype) for a in (q, k, v)), valid_mask(x, key_mask), query_positions.long()
        history = [torch.cat(pair, 1) for pair in zip(past, new, strict=True)]
        opened = (
            state.opened
            if positions is None
            else torch.cat([state.opened, state.opened.new_zeros(x.shape[0], x.shape[1] + 1)], 1)
        )
        after = SinkhornState(*history, opened, next_position)
        if state.keys.shape[1] == 0:
            return self.out_proj(sinkhorn(q, k, v, sorting, **options)), after
        queries, keys, values, key_valid, key_positions = history
        count = -(-keys.shape[1] // self.block) + 1 + opened.shape[1]
        projected = (a.to(q.dtype) for a in (queries, keys, values))
        y = sinkhorn_chunk(*projected, sorting, key_valid, key_positions, last=x.shape[1], count=count, **self._shape())
        return self.out_proj(y.to(v.dtype)), after
