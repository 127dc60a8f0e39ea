"""A window and global tokens, as layers: Longformer (Beltagy et al. 2020) and ETC (Ainslie et al. 2020)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer, chunk_positions, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts import history
from ..mixers.parts.history import empty_history
from ..mixers.parts.options import at_least
from ..mixers.parts.patterns import BlockCost, bias_options, build_distance_bias, explicit, kept_bytes
from ..mixers.parts.shared import add_projections, check_positions, largest_added, largest_dot, valid_mask
from .patterns_longformer_forms import longformer, longformer_chunk


@register_state
class GlobalHistoryState(NamedTuple):
    """The history of keys and values, and the global keys and values of positions 0..g-1.

    The first fields are those of ``HistoryState``. global_keys, global_values (B, g, D); global_valid (B, g) bool, True
    = the token has arrived and may be attended.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor
    global_keys: Tensor
    global_values: Tensor
    global_valid: Tensor


def add_global_projections(mixer: Mixer, *, qkv_bias: bool) -> None:
    """Add the projections for the global tokens' own rows."""
    for name in ("q_global", "k_global", "v_global"):
        mixer.register_module(name, nn.Linear(mixer.dim, mixer.dim, bias=qkv_bias))


def global_args(mixer, x: Tensor) -> tuple[Tensor, ...]:
    """Return the six projections of x, in the order of ``longformer``."""
    return tuple(
        mixer.get_submodule(name)(x) for name in ("q_proj", "k_proj", "v_proj", "q_global", "k_global", "v_global")
    )


def global_cost(mixer, T: int, reach: int, dilations: list[int], g: int) -> MixingCost:
    """Compute the cost of the windows, the columns of the global tokens, and their rows."""
    counts, D, g = BlockCost(T), mixer.dim, min(g, T)
    windows = [counts.count_dilated(reach, d) for d in dilations]
    flops = sum(4 * D // mixer.heads * w.pairs for w in windows) + 4 * D * 2 * g * T
    kept = kept_bytes(D, mixer.heads, T, [counts.mean(windows), *([counts.count_shared(g)] if g else [])], rows=g)
    biased = 0 if mixer.bias is None else sum(w.pairs for w in windows) + mixer.heads * 2 * g * T
    return MixingCost(
        flops=flops + biased, counted=flops, activations=kept, state=(8 * D + 9) * T + 8 + g * (8 * D + 1)
    )


class Longformer(Mixer):
    """Longformer: a dilated sliding window, and global tokens that attend and are attended everywhere.

    Beltagy et al. 2020, arXiv:2004.05150. Maps (B, T, D) to (B, T, D).

    Args:
        window: w of the paper, even, 128 by default: w / 2 positions on each side, only those before when causal.
        dilation: d, the step between the positions of the window, 1 by default; one number for all heads, or one for
            each.
        global_tokens: g, 1 by default: the tokens at positions 0..g-1 are global. Their rows have projections of their
            own, which start equal to the others (Sec. 5).
        heads: number of heads, 8 by default; must divide dim.
        bias: None (default), or a function of the distance that is added to the logits: {"name": "alibi", "t5",
            "kerple" or "sandwich"} with the options of the class in ``tokenmix.positions``.

    In the causal form every token attends the global ones before it, and a global row attends only what comes before.

    Parameters: q_proj, k_proj, v_proj, q_global, k_global, v_global, out_proj. Time and memory O(T (w + g) D). The
    streaming state is the history of keys and values.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        fixed_when_traced=True,
        form=longformer,
        page="patterns",
        about=About("Beltagy et al. 2020, arXiv 2004.05150", "fixed pattern", "T (w + g) D", "T (w + g) H"),
        carries=QKVO,
        copies={"q_global": "q_proj", "k_global": "k_proj", "v_global": "v_proj"},  # Sec. 5
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        window: int = 128,
        dilation: int | list[int] = 1,
        global_tokens: int = 1,
        heads: int = 8,
        bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.window, self.dilation, self.global_tokens, self.heads = window, dilation, global_tokens, heads
        at_least(self, 0, window=window, global_tokens=global_tokens)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = build_distance_bias(self, bias, heads)
        if window % 2:
            self.refuse(f"window={window} must be even; half of it lies on each side")
        self.dilations = list(dilation) if isinstance(dilation, list | tuple) else [dilation] * heads
        if len(self.dilations) != heads:
            self.refuse(f"dilation={dilation!r} must be one integer or one for each of the {heads} heads")
        for d in self.dilations:
            at_least(self, 1, dilation=d)
        add_global_projections(self, qkv_bias=qkv_bias)
        self.init_parameters()

    def init_parameters(self):
        self.start_copies()

    def start_copies(self):
        """Make the global projections equal to the others, as in the paper."""
        with torch.no_grad():
            for name in "qkv":
                theirs, own = self.get_submodule(f"{name}_proj"), self.get_submodule(f"{name}_global")
                for mine, other in zip(own.parameters(), theirs.parameters(), strict=True):
                    mine.copy_(other)

    def _pattern(self):
        return {"reach": self.window // 2, "dilation": self.dilations, "heads": self.heads}

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``longformer`` for this input: (positional, keyword)."""
        x, positions, key_mask, attn_mask = inputs.x, inputs.positions, inputs.key_mask, inputs.attn_mask
        check_positions(self, positions, key_mask)
        positions = explicit(x, positions, key_mask, attn_mask)
        options = {
            **self._pattern(),
            **bias_options(self.bias, x),
            "global_tokens": self.global_tokens,
            "positions": positions,
        }
        return global_args(self, x), {**options, "causal": self.causal, "key_mask": key_mask, "attn_mask": attn_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return global_cost(self, T, self.window // 2, self.dilations, self.global_tokens)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        dots = (largest_dot(args[i], args[i + 1], options["heads"]) for i in (0, 3))
        return max(dots) + largest_added(options, args[0].shape[1])

    def empty_state(self, batch_size, *, device, dtype):
        slots = torch.zeros(batch_size, self.global_tokens, self.dim, device=device, dtype=dtype)
        there = torch.zeros(slots.shape[:2], device=device, dtype=torch.bool)
        return GlobalHistoryState(
            *empty_history(batch_size, self.dim, device=device, dtype=dtype), slots, slots.clone(), there
        )

    def state_lengths(self):
        return dict.fromkeys(("global_keys", "global_values", "global_valid"), "")

    def mix_chunk(self, x, state, *, positions, key_mask):
        check_positions(self, positions, key_mask, rising=True, past=(state.valid, state.positions))
        query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
        q, k, v, qg, kg, vg = global_args(self, x)
        pattern = {**self._pattern(), **bias_options(self.bias, x)}
        valid, first = valid_mask(x, key_mask), state.keys.shape[1] == 0 and positions is None
        slots = self._fill_slots(state[5:], kg, vg, query_positions, valid)
        state = (
            history.append_tokens(state, valid, query_positions, keys=k, values=v)
            ._replace(position=next_position)
            ._replace(**dict(zip(state._fields[5:], slots, strict=True)))
        )
        if first:
            y = longformer(
                q, k, v, qg, kg, vg, **pattern, global_tokens=self.global_tokens, causal=True, key_mask=key_mask
            )
        else:
            keys, values, kg, vg = (a.to(q.dtype) for a in (*state[:2], *slots[:2]))
            query_and_key_positions = query_positions, state.positions
            y = longformer_chunk(
                q,
                keys,
                values,
                qg,
                kg,
                vg,
                query_and_key_positions,
                **pattern,
                key_mask=state.valid,
                global_mask=slots[2],
            )
        return self.out_proj(y), state

    def _fill_slots(
        self, slots: tuple[Tensor, ...], kg: Tensor, vg: Tensor, positions: Tensor, valid: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the slots with the global tokens of a chunk put in the slots of their positions."""
        mine = (positions[:, None, :] == torch.arange(self.global_tokens, device=positions.device)[:, None]) & valid[
            :, None, :
        ]
        there, which = mine.any(-1), mine.long().argmax(-1)[..., None]
        new = (
            a.gather(1, which.expand(-1, -1, a.shape[-1])) for a in (kg, vg)
        )  # a product with the mask would spread NaN
        keys, values = (
            torch.where(there[..., None], a.to(old.dtype), old) for a, old in zip(new, slots[:2], strict=True)
        )
        return keys, values, slots[2] | there


class ETC(Mixer):
    """Extended Transformer Construction: global tokens in front, and a radius around each long token.

    Ainslie et al. 2020, arXiv:2004.08483. Maps (B, T, D) to (B, T, D).

    Args:
        radius: r, 64 by default: long-to-long attention covers |t - s| <= radius.
        global_tokens: n_g, 16 by default: the first n_g positions are the global input; its rows (g2g, g2l) attend
            everything, with projections of their own.
        heads: number of heads, 8 by default; must divide dim.
        bias: None (default), or a function of the distance that is added to the logits: {"name": "alibi", "t5",
            "kerple" or "sandwich"} with the options of the class in ``tokenmix.positions``.

    Long rows attend global keys (l2g) and those within the radius (l2l) in one softmax. There is no causal form: the
    global tokens summarise the whole input, and every long token reads them.

    Parameters: q_proj, k_proj, v_proj, q_global, k_global, v_global, out_proj. Time and memory O(T (r + n_g) D).

    Raises:
        MixerError: if an option is out of its range, or with ``causal=True``.
    """

    facts = Facts(
        attn_mask=True,
        form=longformer,
        page="patterns",
        about=About("Ainslie et al. 2020, arXiv 2004.08483", "fixed pattern", "T (r + n_g) D", "T (r + n_g) H"),
        carries=QKVO,
        copies={"q_global": "q_proj", "k_global": "k_proj", "v_global": "v_proj"},
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        radius: int = 64,
        global_tokens: int = 16,
        heads: int = 8,
        bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.radius, self.global_tokens, self.heads = radius, global_tokens, heads
        at_least(self, 0, radius=radius)
        at_least(self, 1, global_tokens=global_tokens)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = build_distance_bias(self, bias, heads)
        add_global_projections(self, qkv_bias=qkv_bias)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``longformer`` for this input: (positional, keyword)."""
        x, positions, key_mask, attn_mask = inputs.x, inputs.positions, inputs.key_mask, inputs.attn_mask
        check_positions(self, positions, key_mask)
        positions = explicit(x, positions, key_mask, attn_mask)
        options = {
            "reach": self.radius,
            "dilation": 1,
            "global_tokens": self.global_tokens,
            "heads": self.heads,
            "positions": positions,
            **bias_options(self.bias, x),
        }
        return global_args(self, x), {**options, "key_mask": key_mask, "attn_mask": attn_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return global_cost(self, T, self.radius, [1] * self.heads, self.global_tokens)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        dots = (largest_dot(args[i], args[i + 1], options["heads"]) for i in (0, 3))
        return max(dots) + largest_added(options, args[0].shape[1])
