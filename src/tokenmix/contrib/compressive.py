"""Compressive Transformer attention (Rae et al. 2020, arXiv 1911.05507) as a layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.layout.positions import fill_from_last_valid, gather_tokens, last_valid
from ..kernels.precision import sum_dtype
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer, register_state, token_positions
from ..mixers.cost import MixingCost
from ..mixers.parts.aux_losses import add_aux_loss
from ..mixers.parts.options import at_least, one_of
from ..mixers.parts.shared import add_projections, check_positions, ring_chunk, row_starts, valid_mask
from ..mixers.parts.weights_on_call import child_weights
from . import compressive_forms as form
from .compressive_forms import compressive
from .parts.relative import largest_relative


@register_state
class CompressiveState(NamedTuple):
    """The recent R = memory + rate - 2 tokens and the compressed memory. The size is constant.

    keys, values, inputs (B, R, D), valid, positions (B, R): the recent tokens. slot_keys, slot_values (B, n_cm, D), ids
    (B, n_cm): compressed groups and their numbers, -1 for none. gone (B,): the last group of which a token has left the
    recent ones. position (B,): the next one.
    """

    keys: Tensor
    values: Tensor
    inputs: Tensor
    valid: Tensor
    positions: Tensor
    slot_keys: Tensor
    slot_values: Tensor
    ids: Tensor
    gone: Tensor
    position: Tensor


class Compressive(Mixer):
    """Relative attention over recent tokens and over compressed groups of older ones.

    Rae et al. 2020, arXiv:1911.05507, Sec. 3, with Transformer-XL's relative positions. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim.
        memory: n_m, the number of positions that are attended token by token, t's own included; 32 by default. It is
            the minimum: groups are compressed as a whole.
        compressed: n_cm, the number of groups before them that are attended as one key and value each; 32 by default.
        rate: c, positions per group, 4 by default. Groups are positions j c .. j c + c - 1, wherever a stream is cut.
        pool: compression function f on the inputs of the layer: "mean" (default), "max" or "conv" (learned, kernel and
            stride c).

    It attends n_m + c n_cm positions back with a state of constant size. Inside of ``aux_losses()``, forward adds
    "compressive", the attention reconstruction loss; its gradient reaches f only.

    Parameters: the four projections; relative (W_r), content (u), place (v) of the relative positions; squeeze and
    squeeze_bias with ``pool="conv"``. Time O(T (n_m + c + n_cm) D).

    Deviations: the bidirectional form, with compressed groups on both sides, is ours.

    Raises:
        MixerError: if an option is out of its range, or if explicit positions do not rise along the row.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        about=About(
            "Rae et al. 2020, arXiv 1911.05507", "memory", "T (n_m + c + n_cm) D heads", "T heads (n_m + c + n_cm)"
        ),
        knows_positions=True,
        form=compressive,
        carries=QKVO,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        memory: int = 32,
        compressed: int = 32,
        rate: int = 4,
        pool: str = "mean",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        at_least(self, 1, memory=memory, compressed=compressed, rate=rate)
        one_of(self, form.POOLS, pool=pool)
        self.heads, self.sizes = heads, form.Sizes(memory, compressed, rate, pool)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias, read=("k_proj", "v_proj"))
        self.relative = nn.Parameter(torch.empty(dim, dim + dim % 2))
        self.content, self.place = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.squeeze = nn.Parameter(torch.empty(dim, dim, rate)) if pool == "conv" else None
        self.squeeze_bias = nn.Parameter(torch.empty(dim)) if pool == "conv" else None
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.uniform_(self.relative, -(self.dim**-0.5), self.dim**-0.5)
        for bias in (self.content, self.place):
            nn.init.normal_(bias, std=0.02)
        if self.squeeze is not None and self.squeeze_bias is not None:
            bound = (self.dim * self.sizes.rate) ** -0.5  # as in torch's Conv1d
            nn.init.uniform_(self.squeeze, -bound, bound)
            nn.init.uniform_(self.squeeze_bias, -bound, bound)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return W_k, b_k, W_v and b_v."""
        maps = [child_weights(self, self.get_submodule(name), x) for name in ("k_proj", "v_proj")]
        return tuple(a for weight, *bias in maps for a in (weight, bias[0] if bias else x.new_zeros(self.dim)))

    def _squeeze(self) -> tuple[Tensor, ...]:
        return () if self.squeeze is None or self.squeeze_bias is None else (self.squeeze, self.squeeze_bias)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``compressive`` for this input: (positional, keyword)."""
        x, positions, key_mask = inputs.x, inputs.positions, inputs.key_mask
        check_positions(self, positions, key_mask, rising=True)
        learned = self._project(x), self.relative, self.content, self.place, self._squeeze()
        options = {
            "heads": self.heads,
            **self.sizes._asdict(),
            "positions": positions,
            "starts": row_starts(key_mask, positions),
        }
        return (self.q_proj(x), self.k_proj(x), self.v_proj(x), x, *learned), {
            **options,
            "causal": self.causal,
            "key_mask": key_mask,
        }

    def mix(self, inputs: Inputs) -> Tensor:
        args, options = self.functional_args(inputs)
        add_aux_loss("compressive", lambda: self._loss(inputs.x, inputs.positions, inputs.key_mask))
        return self.out_proj(compressive(*args, **options))

    def _loss(self, x: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> Tensor:
        """Compute the attention reconstruction loss, with everything but f detached."""
        x, valid = x.detach(), valid_mask(x, key_mask)
        positions = token_positions(x, key_mask) if positions is None else positions
        q, k, v = (self.get_submodule(name)(x).detach() for name in ("q_proj", "k_proj", "v_proj"))
        k, v, kept = (torch.where(valid[..., None], a, 0.0) for a in (k, v, x))
        slots = form.compress(
            form.group_tokens(kept, valid, self.sizes.rate, positions),
            tuple(a.detach() for a in self._project(x)),
            self._squeeze(),
            self.sizes.pool,
        )
        return form.reconstruction_loss(q, k, v, slots, valid, positions, self.heads, self.sizes, self.causal)

    def mixing_cost(self, T: int) -> MixingCost:
        D, (memory, many, rate, _) = self.dim, self.sizes
        tall, reach = -(-memory // rate) * rate, -(-(memory + rate - 2) // rate) * rate
        keys = tall + reach + many + tall // rate + (0 if self.causal else reach + many + reach // rate)
        blocks = -(-T // tall)
        pairs, slots = blocks * tall * keys, -(-T // rate)
        each = 2 * slots * D * D * (2 + (rate if self.squeeze is not None else 0)) + 2 * T * D * self.relative.shape[1]
        flops = 4 * pairs * D + 2 * pairs * self.heads * self.relative.shape[1] + each
        kept = 4 * (8 * T * D + 2 * blocks * keys * D + 4 * T * D * self.heads + pairs * self.heads)
        return MixingCost(flops, None, activations=kept, state=(12 * D + 9) * self._ring + (8 * D + 8) * many + 16)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, k, relative, content, place = *args[:2], *args[5:8]
        return largest_relative(q, k, relative, content, place, options["heads"])

    @property
    def _ring(self) -> int:
        return self.sizes.memory + self.sizes.rate - 2

    def empty_state(self, batch_size, *, device, dtype):
        keys = torch.zeros(batch_size, self._ring, self.dim, device=device, dtype=dtype)
        slots = torch.zeros(batch_size, self.sizes.compressed, self.dim, device=device, dtype=dtype)
        positions = torch.zeros(batch_size, self._ring, dtype=torch.long, device=device)
        position = torch.zeros(batch_size, dtype=torch.long, device=device)
        ids = torch.full(slots.shape[:2], -1, dtype=torch.long, device=device)
        return CompressiveState(
            keys,
            keys.clone(),
            keys.clone(),
            positions.bool(),
            positions,
            slots,
            slots.clone(),
            ids,
            position - 1,
            position,
        )

    def mix_chunk(self, x, state, *, positions, key_mask):
        return ring_chunk(self, x, state, positions=positions, key_mask=key_mask)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        q, L, wide = self.q_proj(x), x.shape[1], sum_dtype(x)
        new, old = (self.k_proj(x), self.v_proj(x), x), (state.keys, state.values, state.inputs)
        keys, values, inputs = (
            torch.cat([a, torch.where(valid[..., None], b, 0.0).to(a.dtype)], 1) for a, b in zip(old, new, strict=True)
        )
        key_valid, key_positions = torch.cat([state.valid, valid], 1), torch.cat([state.positions, positions], 1)
        groups = form.group_tokens(
            inputs.to(wide), key_valid, self.sizes.rate, fill_from_last_valid(key_positions, key_valid)
        )
        maps = (tuple(a.to(wide) for a in part) for part in (self._project(x), self._squeeze()))
        fresh = form.compress(groups, *maps, self.sizes.pool)
        # older groups lack tokens here; they are in the slots already
        fresh = fresh._replace(there=fresh.there & (fresh.ids > state.gone[:, None]))
        kept = state.slot_keys, state.slot_values, state.ids, state.ids >= 0
        slots = form.Slots(*(torch.cat([a, b.to(a.dtype)], 1) for a, b in zip(kept, fresh, strict=True)))
        ok = (
            torch.ones(L, keys.shape[1], dtype=torch.bool, device=x.device).tril(keys.shape[1] - L) & key_valid[:, None]
        )
        learned = tuple(a.to(wide) for a in (self.relative, self.content, self.place))
        wide_slots = slots._replace(keys=slots.keys.to(wide), values=slots.values.to(wide))
        y = form.over_memories(
            q.to(wide),
            keys.to(wide),
            values.to(wide),
            wide_slots,
            learned,
            ok,
            positions,
            key_positions,
            self.heads,
            self.sizes,
            True,
        ).to(q.dtype)
        return y, self._state_after((keys, values, inputs, key_valid, key_positions), slots, state, L, holes)

    def _state_after(self, recent, slots, state, L, holes):
        """Return the state after all recent tokens but the last R valid ones have left.

        Of the groups that they belong to, the last n_cm are kept.
        """
        group = torch.div(recent[4], self.sizes.rate, rounding_mode="floor")
        if holes:
            index, there, leaving = last_valid(recent[3], self._ring)
            recent = *(gather_tokens(a, index) for a in recent[:3]), there, gather_tokens(recent[4], index)
        else:
            group, leaving, recent = group[:, :L], recent[3][:, :L], tuple(a[:, L:] for a in recent)
        gone = torch.maximum(state.gone, torch.where(leaving, group, -1).amax(1))
        left = torch.where(slots.there & (slots.ids <= gone[:, None]), slots.ids, -1)
        ids, order = left.sort(1)
        ids, order = ids[:, -self.sizes.compressed :], order[:, -self.sizes.compressed :, None].expand(-1, -1, self.dim)
        return CompressiveState(
            *recent, slots.keys.gather(1, order), slots.values.gather(1, order), ids, gone, state.position
        )
