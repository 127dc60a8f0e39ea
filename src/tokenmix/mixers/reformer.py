"""The Reformer layer (Kitaev et al. 2020, arXiv:2001.04451): LSH attention with shared queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..functional.reformer import hash_buckets, reformer_chunk
from .base import About, Arguments, Mixer, register_state
from .cost import MixingCost
from .parts.decisions import check_seed, decide, draw_directions, frozen, project_wide
from .parts.hands_out import ReadLinear
from .parts.options import at_least, check_heads, true_or_false


@register_state
class ReformerState(NamedTuple):
    """Every token so far.

    keys (queries at once) and values (B, S, D); buckets (B, S, heads * rounds); valid (B, S) bool, True = may be
    attended.
    """

    keys: Tensor
    values: Tensor
    buckets: Tensor
    valid: Tensor


class Reformer(Mixer):
    """LSH attention: a token attends those that hash to its bucket, in its chunk and the one before.

    y_t = W_o [sum_s softmax_s(q_t . k_s / sqrt(e)) v_s] in each head, k_s = q_s / |q_s|, over the s that share a bucket
    with t in some round; t itself only if there is nothing else. Kitaev et al. 2020, arXiv:2001.04451. Maps (B, T, D)
    to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim.
        buckets: number of buckets, even, 8 by default.
        chunk: m, tokens per chunk, 16 by default.
        rounds: number of hash rounds, 2 by default.
        seed: seed of the rotations. None (default): they are drawn from torch's generator.
        paper_form: True: the published chunks, cut from the sort of all tokens by (bucket, time) across bucket borders.
            This form LOOKS AHEAD, also with causal=True: how later tokens hash moves the borders, and so changes which
            keys an earlier query attends. It does not stream. Default False.

    The rotations (rounds, heads, e, buckets / 2) are a persistent buffer. Reversible residuals, the other half of the
    paper, belong to a model and not to a mixer.

    Parameters: q_proj (queries and keys), v_proj, out_proj. Time O(T log T + rounds T chunk D). The streaming state is
    the history of tokens.

    Deviations: by default, chunks are counted inside each bucket by the number of earlier tokens in it, so that the
    keys of a query depend on its past only and the mixer streams.

    Raises:
        MixerError: if an option is out of its range.
    """

    rotations: Tensor

    supports_causal = supports_streaming = True
    about = About(
        "Kitaev et al. 2020, arXiv 2001.04451",
        "learned pattern",
        "T log T + rounds T chunk D",
        "rounds T (chunk heads + D)",
    )
    form = "reformer"
    carries = ("v_proj", "out_proj")  # queries and keys are one projection
    waivers = {
        "token_before_reaches": "a token attends only those in its buckets",
        "past_reaches_present": "beside at most one other token in its buckets, a token has fixed weights",
    }

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        buckets: int = 8,
        chunk: int = 16,
        rounds: int = 2,
        seed: int | None = None,
        paper_form: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.buckets, self.chunk, self.rounds, self.seed, self.paper_form = (
            heads,
            buckets,
            chunk,
            rounds,
            seed,
            paper_form,
        )
        check_heads(self, heads)
        at_least(self, 1, chunk=chunk, rounds=rounds)
        at_least(self, 2, buckets=buckets)
        check_seed(self, seed)
        true_or_false(self, paper_form=paper_form)
        if buckets % 2:
            self.refuse(f"buckets={buckets} must be even: a hash is the largest of [xR; -xR]")
        self.q_proj = ReadLinear(dim, dim, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)
        self.register_buffer("rotations", torch.empty(rounds, heads, dim // heads, buckets // 2))
        self._decided: list[Tensor] | None = None
        self.init_parameters()

    def init_parameters(self) -> None:
        """Draw the rotations."""
        draw_directions(self.rotations, self.seed)

    def frozen(self):
        """Return a context in which tokens stay in the buckets of the first call."""
        return frozen(self)

    @property
    def capabilities(self):
        """Return the features of this instance.

        The published form does not stream, as later tokens change earlier outputs.
        """
        can = super().capabilities
        return type(can)(**{**vars(can), "streaming": can.streaming and not self.paper_form})

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
        """Return the arguments of ``functional.reformer`` for this input: (positional, keyword)."""
        args = project_wide(self, x), self.v_proj(x), self.rotations
        return args, {
            "heads": self.heads,
            "chunk": self.chunk,
            "paper_form": self.paper_form,
            "causal": self.causal,
            "key_mask": key_mask,
        }

    def mix(self, x: Tensor, context: Tensor | None, **given: Any) -> Tensor:
        (q, v, rotations), options = self.functional_args(x, context, **given)
        return self.out_proj(functional.reformer(q, v, rotations, buckets=self._buckets(q), **options))

    def _buckets(self, q: Tensor) -> Tensor:
        return decide(self, lambda: hash_buckets(q, self.rotations, heads=self.heads))

    def mixing_cost(self, T: int) -> MixingCost:
        D, H, R, m, n = self.dim, self.heads, self.rounds, self.chunk, self.buckets
        beside = 2 if self.paper_form else 3 + (not self.causal)  # blocks each block is compared with
        flops = R * (2 * T * D * n // 2 + 4 * T * beside * m * D)
        # weights and their mask; each key beside each of its blocks
        kept = T * (9 * R * H * beside * m + 4 * D * (R * (2 * beside + 2) + 7))
        return MixingCost(flops, None, kept, (8 * D + 4 * H * R + 1) * T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q = args[0].detach().unflatten(-1, (options["heads"], -1))
        return float(q.norm(dim=-1).max()) * q.shape[-1] ** -0.5

    def empty_state(self, batch_size, *, device, dtype):
        if self.paper_form:
            self.refuse("paper_form=True looks ahead and cannot stream; build it with paper_form=False")
        keys = torch.zeros(batch_size, 0, self.dim, device=device, dtype=dtype)
        buckets = torch.zeros(batch_size, 0, self.heads * self.rounds, device=device, dtype=torch.int32)
        return ReformerState(keys, keys.clone(), buckets, torch.zeros(batch_size, 0, device=device, dtype=torch.bool))

    def mix_chunk(self, x, state, *, positions, key_mask):
        (q, v, rotations), options = self.functional_args(x, key_mask=key_mask)
        now, valid = (
            self._buckets(q),
            torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask,
        )
        new = q.to(state.keys.dtype), v.to(state.values.dtype), now.flatten(1, 2).transpose(1, 2).to(torch.int32), valid
        after = ReformerState(*(torch.cat(pair, 1) for pair in zip(state, new, strict=True)))
        if state.keys.shape[1] == 0:
            return self.out_proj(functional.reformer(q, v, rotations, buckets=now, **options)), after
        buckets = after.buckets.long().transpose(1, 2).unflatten(1, (self.heads, self.rounds))
        seen = after.keys.to(q.dtype), after.values.to(q.dtype), buckets, after.valid
        y = reformer_chunk(q, *seen, heads=self.heads, chunk=self.chunk, count=self.buckets)
        return self.out_proj(y.to(v.dtype)), after
