"""Reformer (Kitaev et al. 2020, arXiv:2001.04451): attention among tokens with equal hashes.

Queries and keys are shared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.heads import by_head
from ..functional.layout.masks import valid_mask
from ..functional.sums.nonfinite import guard_nonfinite, propagate_nonfinite
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least, check_heads
from ..mixers.parts.weights_on_call import ReadLinear
from .parts.buckets import Order, Sums, attend_dense, attend_sorted, bucket_codes, merge, ratio, sort_by_bucket
from .parts.decisions import check_seed, decide, draw_directions, freeze_decisions, project_wide

TINY = 1e-12  # added to a squared length, so that a zero vector is normalised to zero


def hash_buckets(q: Tensor, rotations: Tensor, *, heads: int) -> Tensor:
    """Compute h(x) = argmax([x R; -x R]) (Andoni et al. 2015), decided in float64.

    q (B, T, D), rotations (R, heads, e, n/2) -> (B, heads, R, T) in 0..n-1.
    """
    turned = by_head(q.detach().double(), heads)[:, :, None] @ rotations.detach().double().transpose(0, 1)
    return torch.cat([turned, -turned], -1).argmax(-1)


@exact
@guard_nonfinite("q", "v")
def reformer(
    q: Tensor,
    v: Tensor,
    rotations: Tensor,
    *,
    heads: int,
    chunk: int,
    paper_form: bool = False,
    buckets: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s softmax_s(q_t . k_s / sqrt(e)) v_s over the tokens P_t with the hash of t.

    Keys are shared, k_s = q_s / |q_s|; P_t holds t only if it holds nothing else. P_t is the union over the rounds of
    {s: same bucket, chunk of t minus chunk of s is 0 or 1}. A token's chunk is its rank in its bucket // ``chunk``, the
    rank counting the valid tokens of the bucket before it. With ``paper_form`` it is its place in the sort of all
    tokens by (bucket, time) // ``chunk``, as published: there the borders depend on later tokens, even if ``causal``.
    The rounds are joined by log-sum-exp; a pair counts in the first round that has it, which is the paper's division by
    N_ts.

    Args:
        q: (B, T, D), queries and keys at once.
        v: (B, T, D).
        rotations: (rounds, heads, e, n/2) for n buckets.
        buckets: (B, heads, rounds, T), used instead of the hashes.

    Masked queries, and those with nothing to attend, give 0.
    """
    choose("reformer", backend, q)
    n = 2 * rotations.shape[-1]
    if q.shape[-1] % heads or rotations.shape[1:3] != (heads, q.shape[-1] // heads):
        shape = tuple(rotations.shape)
        raise MixerError(f"reformer: heads={heads} and rotations {shape} do not fit q of width {q.shape[-1]}.")
    valid = valid_mask(q, key_mask)
    buckets = hash_buckets(q, rotations, heads=heads) if buckets is None else buckets
    qh, kh, vh = _prepare_heads(q, v, valid, heads)
    codes, order = reformer_codes(buckets, valid, chunk=chunk, count=n, paper_form=paper_form)
    before, after = (1, 0) if paper_form else (2, 0 if causal else 1)
    total: Sums | None = None
    for r in range(buckets.shape[2]):
        mine = Order(*(a[:, :, r] for a in order))
        met = attend_sorted(
            qh,
            kh,
            vh,
            codes[:, :, : r + 1],
            mine,
            size=chunk,
            before=before,
            after=after,
            reach=1,
            causal=causal,
            itself=False,
        )
        total = met if total is None else merge(total, met)
    assert total is not None
    return _ratio_or_own(total, vh, valid).to(v.dtype)


def reformer_codes(
    buckets: Tensor, valid: Tensor, *, chunk: int, count: int, paper_form: bool = False
) -> tuple[Tensor, Order]:
    """Return codes (B, H, R, T), whose difference is 0 or 1 if two tokens attend to each other, and their order."""
    there = valid[:, None, None].expand_as(buckets)
    order = sort_by_bucket(buckets, there, count)
    number = torch.div(order.place if paper_form else order.rank, chunk, rounding_mode="floor")
    return bucket_codes(buckets, number, there, buckets.shape[-1] // chunk + 3), order


@exact
def reformer_chunk(
    q: Tensor, keys: Tensor, values: Tensor, buckets: Tensor, valid: Tensor, *, heads: int, chunk: int, count: int
) -> Tensor:
    """Compute the causal strict form for the last L tokens, q (B, L, D), over all S.

    keys (B, S, D) before normalisation to length 1, buckets (B, heads, R, S).
    """
    L = q.shape[1]
    codes, _ = reformer_codes(buckets, valid, chunk=chunk, count=count)

    def form(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        qh, _, _ = _prepare_heads(q, q, valid[:, -L:], heads)
        _, kh, vh = _prepare_heads(keys, values, valid, heads)
        return _ratio_or_own(attend_dense(qh, kh, vh, codes, reach=1, itself=False), vh[:, :, -L:], valid[:, -L:])

    return propagate_nonfinite(form, q, keys, values, causal=True, key_mask=valid)


def _prepare_heads(q: Tensor, v: Tensor, valid: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries, keys of length 1 and values per head, in float32 or better, zero at masked tokens."""
    wide = sum_dtype(q)
    q, v = (torch.where(valid[..., None], a.to(wide), 0.0) for a in (q, v))
    qh = by_head(q, heads)
    return qh * qh.shape[-1] ** -0.5, qh * (qh.square().sum(-1, keepdim=True) + TINY).rsqrt(), by_head(v, heads)


def _ratio_or_own(total: Sums, own: Tensor, valid: Tensor) -> Tensor:
    """Return the ratio, the token's own value where it met nothing else, 0 where it is masked; (B, T, D)."""
    return torch.where(valid[..., None], ratio(total, own).transpose(1, 2).flatten(2), 0.0)


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

    facts = Facts(
        causal=True,
        streaming=True,
        about=About(
            "Kitaev et al. 2020, arXiv 2001.04451",
            "learned pattern",
            "T log T + rounds T chunk D",
            "rounds T (chunk heads + D)",
        ),
        form=reformer,
        carries=("v_proj", "out_proj"),  # queries and keys are one projection
        waivers={
            "token_before_reaches": "a token attends only those in its buckets",
            "past_reaches_present": "beside at most one other token in its buckets, a token has fixed weights",
        },
    )

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
        return freeze_decisions(self)

    def narrow_capabilities(self, can):
        """Return the features of this instance.

        The published form does not stream, as later tokens change earlier outputs.
        """
        return replace(can, streaming=can.streaming and not self.paper_form)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``reformer`` for this input: (positional, keyword)."""
        x = inputs.x
        args = project_wide(self, x), self.v_proj(x), self.rotations
        return args, {
            "heads": self.heads,
            "chunk": self.chunk,
            "paper_form": self.paper_form,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mix(self, inputs: Inputs) -> Tensor:
        (q, v, rotations), options = self.functional_args(inputs)
        return self.out_proj(reformer(q, v, rotations, buckets=self._buckets(q), **options))

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
        (q, v, rotations), options = self.functional_args(Inputs(x, key_mask=key_mask))
        now, valid = (
            self._buckets(q),
            torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask,
        )
        new = q.to(state.keys.dtype), v.to(state.values.dtype), now.flatten(1, 2).transpose(1, 2).to(torch.int32), valid
        after = ReformerState(*(torch.cat(pair, 1) for pair in zip(state, new, strict=True)))
        if state.keys.shape[1] == 0:
            return self.out_proj(reformer(q, v, rotations, buckets=now, **options)), after
        buckets = after.buckets.long().transpose(1, 2).unflatten(1, (self.heads, self.rounds))
        seen = after.keys.to(q.dtype), after.values.to(q.dtype), buckets, after.valid
        y = reformer_chunk(q, *seen, heads=self.heads, chunk=self.chunk, count=self.buckets)
        return self.out_proj(y.to(v.dtype)), after
