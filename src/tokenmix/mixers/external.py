"""External attention as layers.

Guo et al. 2021, "Beyond Self-attention: External Attention using Two Linear Layers", arXiv:2105.02358.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.external import (
    EPS,
    SlotSums,
    check_norm,
    empty_slots,
    external_chunk,
    merge_slots,
    over_all_tokens,
    slot_logits,
    weights,
)
from .base import About, Arguments, Facts, Inputs, Kernels, register_state
from .cost import MixingCost
from .parts.options import at_least, check_heads
from .segments import Segmented


@register_state
class ExternalState(NamedTuple):
    """The normalisation of each slot of each head over the tokens so far, in float64. The size is constant.

    m (B, heads * S): the largest logit. den (B, heads * S): the sum of exp(logit - m).
    """

    m: Tensor
    den: Tensor

    def merge_with(self, later: ExternalState) -> ExternalState:
        """Return the sums over two adjacent stretches of tokens."""
        return ExternalState(*merge_slots(SlotSums(*self), SlotSums(*later)))


def step(
    args: tuple[Tensor, ...], state: ExternalState, valid: Tensor | None, *, heads: int, norm: str, eps: float
) -> tuple[Tensor, ExternalState]:
    """Mix new projected tokens with those in the state; ``args`` as in ``functional.external``."""
    x, memory_k, memory_v, *biases = args
    bias_k, bias_v = biases or (None, None)
    y, after = external_chunk(
        x, SlotSums(*state), memory_k, memory_v, bias_k, bias_v, heads=heads, norm=norm, eps=eps, valid=valid
    )
    return y, ExternalState(*after)


def external_cost(T: int, width: int, heads: int, slots: int, *, kept: int) -> MixingCost:
    """Compute the cost of two products of every token with the slots of every head.

    Args:
        kept: numbers per token that are kept for the backward pass, without the weights.
    """
    flops = 4 * T * width * slots
    return MixingCost(
        flops=flops, counted=flops, activations=4 * T * (kept + 5 * heads * slots), state=16 * heads * slots
    )


class SlotMemory(Segmented):
    """Tokens that read a learned memory of slots; the base class of both forms of external attention."""

    facts = Facts(causal=True, streaming=True, kernels=Kernels(("external",)))
    memory_k: nn.Parameter
    memory_v: nn.Parameter | None

    @property
    def maps(self) -> dict[str, Any]:
        """Return the number of heads and the normalisation of the weights."""
        raise NotImplementedError

    def mix_chunk(self, x, state, *, positions, key_mask):
        args, _ = self.functional_args(Inputs(x))
        y, state = step(args, state, key_mask, **self.maps)
        return self.out_proj(y), state

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return largest_slot_logit(args, options)

    def slot_weights(self, x: Tensor) -> Tensor:
        """Return the weights Norm(q_t M_k^T) (B, T, heads, slots) with which tokens x (B, T, D) read the slots."""
        (q, memory_k, _, *biases), options = self.functional_args(Inputs(x))
        logits = slot_logits(q, memory_k, biases[0] if biases else None, options["heads"], None)
        level = logits.new_zeros(()) if options["norm"] == "slots" else over_all_tokens(logits, None)
        return weights(logits, level, norm=options["norm"], eps=options["eps"], valid=None)

    def slot_values(self) -> Tensor:
        """Return the values of the slots, M_v (slots, width)."""
        return self.memory_k if self.memory_v is None else self.memory_v


class External(SlotMemory):
    """External attention: y_t = W_o [Norm(q_t M_k^T) M_v], two learned memories in place of the other tokens.

    It has a single head. Guo et al. 2021, arXiv:2105.02358. Maps (B, T, D) to (B, T, D).

    Args:
        slots: S, the number of rows of the memories, 64 by default.
        tied: True: one memory for both, M_v = M_k, as in the official Jittor code. Default False.
        norm: "double" (default), the paper's: a softmax over the tokens in each slot, then l1 over the slots. "tokens":
            the first step only. "slots": a softmax over the slots, as in usual attention; tokens then do not interact.
        eps: added to the denominator of the l1 step, 1e-9 by default.

    Parameters: q_proj (the paper's first 1x1 convolution), memory_k (S, D), memory_v (S, D) unless tied, out_proj (its
    second). The memories start as N(0, 2 / slots) and N(0, 2 / dim), like the official convolutions. Time O(T S D).

    Deviations: the causal form is ours: the softmax runs over the tokens so far, and the state is two numbers per slot.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        about=About(
            "Guo et al. 2021, arXiv 2105.02358",
            "memory",
            "T S D",
            "T (S + D)",
            idea="slots of a learned memory, normalised over tokens, then over slots",
            tier="core",
        ),
        form="external",
        carries=("q_proj", "out_proj"),
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        slots: int = 64,
        tied: bool = False,
        norm: str = "double",
        eps: float = EPS,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        at_least(self, 1, slots=slots)
        check_norm(type(self).__name__, norm, eps)
        self.slots, self.norm, self.eps = slots, norm, eps
        self.q_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.memory_k = nn.Parameter(torch.empty(slots, dim))
        self.memory_v = None if tied else nn.Parameter(torch.empty(slots, dim))
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)
        self.init_parameters()

    def init_parameters(self):
        nn.init.normal_(self.memory_k, std=(2 / self.slots) ** 0.5)
        if self.memory_v is not None:
            nn.init.normal_(self.memory_v, std=(2 / self.dim) ** 0.5)

    @property
    def maps(self) -> dict[str, Any]:
        """Return the number of heads, 1, and the normalisation of the weights."""
        return {"heads": 1, "norm": self.norm, "eps": self.eps}

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.external`` for this input: (positional, keyword)."""
        args = self.q_proj(inputs.x), self.memory_k, self.memory_k if self.memory_v is None else self.memory_v
        return args, {**self.maps, "causal": self.causal, "key_mask": inputs.key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return external_cost(T, self.dim, 1, self.slots, kept=3 * self.dim)

    def empty_state(self, batch_size, *, device, dtype):
        return ExternalState(*empty_slots(batch_size, self.slots, device=device))


class ExternalMultihead(SlotMemory):
    """External attention with many heads over one pair of memories, the official form of EAMLP.

    Tokens are widened, read the memories in each head, and are narrowed again. Guo et al. 2021, arXiv:2105.02358. Maps
    (B, T, D) to (B, T, D).

    Args:
        heads: must divide dim, 8 by default; there are coef * heads heads of width e = dim / heads.
        coef: factor by which tokens are widened, 4 by default.
        slots: S, 64 by default; the official code ties it to coef, S = 256 / coef.
        norm, eps: as in External.

    Parameters: q_proj (dim -> coef dim), memory_k (S, e) with bias, memory_v (S, e) with bias, out_proj (coef dim ->
    dim). Time O(T D^2 coef + T S D coef).

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        about=About(
            "Guo et al. 2021, arXiv 2105.02358",
            "memory",
            "T S D",
            "T (S H + D)",
            idea="external attention whose heads share one memory (EAMLP)",
            tier="core",
        ),
        form="external",
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        coef: int = 4,
        slots: int = 64,
        norm: str = "double",
        eps: float = EPS,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        at_least(self, 1, slots=slots, coef=coef)
        check_norm(type(self).__name__, norm, eps)
        check_heads(self, heads)
        self.heads, self.coef, self.slots, self.norm, self.eps = coef * heads, coef, slots, norm, eps
        self.q_proj = nn.Linear(dim, coef * dim, bias=qkv_bias)
        self.memory_k, self.memory_v = (nn.Parameter(torch.empty(slots, dim // heads)) for _ in range(2))
        self.memory_k_bias, self.memory_v_bias = (nn.Parameter(torch.empty(n)) for n in (slots, dim // heads))
        self.out_proj = nn.Linear(coef * dim, dim, bias=out_bias)
        self.init_parameters()

    def init_parameters(self):
        for memory in (self.memory_k, self.memory_v):
            nn.init.trunc_normal_(memory, std=0.02)
        for bias in (self.memory_k_bias, self.memory_v_bias):
            nn.init.zeros_(bias)

    @property
    def maps(self) -> dict[str, Any]:
        """Return the number of heads and the normalisation of the weights."""
        return {"heads": self.heads, "norm": self.norm, "eps": self.eps}

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.external`` for this input: (positional, keyword)."""
        args = self.q_proj(inputs.x), self.memory_k, self.memory_v, self.memory_k_bias, self.memory_v_bias
        return args, {**self.maps, "causal": self.causal, "key_mask": inputs.key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return external_cost(T, self.coef * self.dim, self.heads, self.slots, kept=(1 + 2 * self.coef) * self.dim)

    def empty_state(self, batch_size, *, device, dtype):
        return ExternalState(*empty_slots(batch_size, self.heads * self.slots, device=device))


def largest_slot_logit(args: tuple, options: dict[str, Any]) -> float:
    """Return the largest |x_t M_k^T + b_k|."""
    x, memory_k, _, *biases = (a.detach() for a in args)
    return float(slot_logits(x, memory_k, biases[0] if biases else None, options["heads"], None).abs().max())
