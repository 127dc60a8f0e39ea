"""Hydra attention and multi-head linear attention as layers.

Bolya et al. 2022, "Hydra Attention: Efficient Attention with Many Heads", arXiv:2209.07484.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..functional.sums import kernel_attention as sums
from .base import QKVO, About, Arguments, Facts, Inputs, Kernels, State, register_state
from .cost import MixingCost
from .parts.shared import add_projections
from .segments import Segmented


@register_state
class HydraState(NamedTuple):
    """Sums over all keys so far. The size is constant.

    total (B, D e): the sum of phi(k)^T v, in float64. number (B,): how many keys there were.
    """

    total: Tensor
    number: Tensor

    def merge_with(self, later: HydraState) -> HydraState:
        """Return the sums over two adjacent stretches of tokens."""
        return HydraState(*sums.merge_sums(self, later))


@register_state
class HydraSoftmaxState(NamedTuple):
    """Sums over all keys so far, for a softmax over tokens, in float64. The size is constant.

    m (B, D): the largest keys. num (B, D e): the sum of exp(k - m)^T v. den (B, D): the sum of exp(k - m).
    """

    m: Tensor
    num: Tensor
    den: Tensor

    def merge_with(self, later: HydraSoftmaxState) -> HydraSoftmaxState:
        """Return the sums over two adjacent stretches of tokens."""
        return HydraSoftmaxState(*sums.merge_sums(self, later))


def as_state(past: sums.Past) -> State:
    """Return the state that holds these sums."""
    return HydraState(*past) if len(past) == 2 else HydraSoftmaxState(*past)


def step(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, causal: bool, valid: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, State]:
    """Mix new queries with the state: with their own keys too if causal, otherwise with a completed context."""
    if not causal:
        return sums.read_sums(q, state, **options), state
    y, after = sums.extend_chunk(q, k, v, state, valid=valid, **options)
    return y, as_state(after)


def kernel_cost(T: int, dim: int, heads: int, feature: str, *, q_proj: bool = True) -> MixingCost:
    """Compute the cost of summing T outer products of e = dim / heads numbers per feature, and of reading the sums."""
    width = dim // heads
    softmax = feature.split("/")[-1] == "softmax"
    flops = 4 * T * dim * width + (2 * T * dim if softmax else 0)  # the denominators
    kept = 4 * T * dim * (9 if softmax else 7 if q_proj else 4)
    state = 8 * dim * (width + 2) if softmax else 8 * dim * width + 8
    return MixingCost(flops=flops, counted=flops if width > 1 else 0, activations=kept, state=state)


class Hydra(Segmented):
    """Hydra attention: y_t = W_o [phi(q_t) * sum_s phi(k_s) * v_s], with as many heads as features.

    One vector therefore holds all that tokens exchange. Bolya et al. 2022, arXiv:2209.07484. Maps (B, T, D) to (B, T,
    D).

    Args:
        feature: phi, or "query/key" for two maps. "cosine" (default, the paper's), "elu", "sigmoid", "tanh",
            "identity", "softmax" (of keys over the tokens, of queries over their features), "mean" (identity, with the
            sum divided by the number of keys). "sigmoid/softmax" is AFT-simple.
        normalise: True: divide the sum by the number of keys that may be attended. Default False.
        eps: added to |x|^2 in the cosine map, so that a zero token gives zeros; 1e-6 by default.

    Parameters: q_proj, k_proj, v_proj, out_proj. Time and memory O(T D). The streaming state is one vector of D
    numbers, three with softmax keys. States can be merged.

    Raises:
        MixerError: if an option is out of its range, or if ``normalise`` comes with softmax keys.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        about=About(
            "Bolya et al. 2022, arXiv 2209.07484",
            "kernel",
            "T D",
            "T D",
            idea="phi(q) times one sum of phi(k) v: attention with as many heads as features",
            tier="core",
        ),
        form="hydra",
        carries=QKVO,
        kernels=Kernels(("hydra",), step="hydra"),
        only_qkv=True,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        feature: str = "cosine",
        normalise: bool = False,
        eps: float = sums.EPS,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        sums.check_feature(type(self).__name__, feature, normalise, eps)
        self.feature, self.normalise, self.eps = feature, normalise, eps
        add_projections(self, heads=dim, qkv_bias=qkv_bias, out_bias=out_bias)

    @property
    def maps(self) -> dict[str, Any]:
        """Return the options that define phi."""
        return {"feature": self.feature, "normalise": self.normalise, "eps": self.eps}

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.hydra`` for this input: (positional, keyword)."""
        keys = inputs.keys
        return (self.q_proj(inputs.x), self.k_proj(keys), self.v_proj(keys)), {
            **self.maps,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        return kernel_cost(T, self.dim, self.dim, self.feature)

    def empty_state(self, batch_size, *, device, dtype):
        return as_state(
            sums.empty_sums(batch_size, self.dim, self.dim, softmax=self.feature.endswith("softmax"), device=device)
        )

    def context_state(self, context, context_mask):
        empty = self.empty_state(context.shape[0], device=context.device, dtype=context.dtype)
        past = sums.absorb(
            empty,
            self.k_proj(context),
            self.v_proj(context),
            context_mask,
            heads=self.dim,
            feature=self.feature,
            eps=self.eps,
        )
        return as_state(past)

    def mix_chunk(self, x, state, *, positions, key_mask):
        options = {"heads": self.dim, **self.maps}
        y, state = step(
            self.q_proj(x), self.k_proj(x), self.v_proj(x), state, causal=self.causal, valid=key_mask, options=options
        )
        return self.out_proj(y), state


class MultiheadLinear(Segmented):
    """y_t = W_o [phi(q_t) sum_s phi(k_s)^T v_s] in each of 1 to dim heads; heads = dim is Hydra.

    Bolya et al. 2022, arXiv:2209.07484. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim; e = dim / heads.
        feature, normalise, eps: as in Hydra. phi is applied to the whole token whatever the number of heads, so that
            heads = dim is Hydra.

    Parameters: q_proj, k_proj, v_proj, out_proj. Time O(T D e), memory O(T D). The streaming state is a matrix of D e
    numbers. States can be merged.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        fixed_when_traced="causal",
        about=About(
            "Bolya et al. 2022, arXiv 2209.07484",
            "kernel",
            "T D^2 / H",
            "T D + D^2 / H",
            idea="Hydra's kernels with any number of heads from 1 to D",
            tier="core",
        ),
        form="multihead_linear",
        carries=QKVO,
        signed=True,
        only_qkv=True,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        feature: str = "cosine",
        normalise: bool = False,
        eps: float = sums.EPS,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        sums.check_feature(type(self).__name__, feature, normalise, eps)
        self.heads, self.feature, self.normalise, self.eps = heads, feature, normalise, eps
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)

    @property
    def maps(self) -> dict[str, Any]:
        """Return the number of heads and the options that define phi."""
        return {"heads": self.heads, "feature": self.feature, "normalise": self.normalise, "eps": self.eps}

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.multihead_linear`` for this input: (positional, keyword)."""
        keys = inputs.keys
        return (self.q_proj(inputs.x), self.k_proj(keys), self.v_proj(keys)), {
            **self.maps,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        return kernel_cost(T, self.dim, self.heads, self.feature)

    def empty_state(self, batch_size, *, device, dtype):
        return as_state(
            sums.empty_sums(batch_size, self.dim, self.heads, softmax=self.feature.endswith("softmax"), device=device)
        )

    def context_state(self, context, context_mask):
        empty = self.empty_state(context.shape[0], device=context.device, dtype=context.dtype)
        options = {"heads": self.heads, "feature": self.feature, "eps": self.eps}
        return as_state(sums.absorb(empty, self.k_proj(context), self.v_proj(context), context_mask, **options))

    def mix_chunk(self, x, state, *, positions, key_mask):
        y, state = step(
            self.q_proj(x), self.k_proj(x), self.v_proj(x), state, causal=self.causal, valid=key_mask, options=self.maps
        )
        return self.out_proj(y), state
