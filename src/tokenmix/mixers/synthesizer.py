"""The Synthesizer family as layers.

Tay et al. 2020, "Synthesizer: Rethinking Self-Attention for Transformer Models", arXiv:2005.00743, ICML 2021.

Positions are 0..max_len - 1: a row of the logits belongs to the position of the query, a column to that of the key.
None of these mixers takes a context: the paper keeps dot products there.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..functional import synthesizer as synth
from .base import About, Arguments, Facts, Inputs, Mixer
from .cost import MixingCost
from .parts import synthesizer as parts_of
from .parts.options import at_least, check_positive
from .parts.shared import largest_added
from .parts.synthesizer import Part
from .parts.weights_on_call import child_weights

_PAPER = "Tay et al. 2020, arXiv 2005.00743"


def _cost(mixer: Any, T: int, kept: int) -> MixingCost:
    """Compute the cost of one kind of logits: the logits, and their softmax times the values.

    Args:
        kept: further numbers that are kept for the backward pass.
    """
    part: Part = mixer.logits
    flops, counted = part.flops(T)
    cost = MixingCost(
        flops=flops + 2 * T * T * mixer.inner,
        counted=counted + 2 * T * T * mixer.inner,
        activations=4 * (part.logit_size(T) + part.kept_numbers(T) + kept),
        state=(4 * mixer.inner + 9) * T + 8,
    )
    return parts_of.with_pairs(cost, mixer.pair_bias, mixer.heads, T)


class SynthesizerDense(Mixer):
    """Dense Synthesizer: y_t = W_o [sum_s softmax_s(W2 relu(W1 x_t + b1) + b2)_s v_s] in each head.

    The token alone decides which positions it attends. Tay et al. 2020, arXiv:2005.00743. Maps (B, T, D) to (B, T, D).

    Args:
        max_len: N, the number of positions that the logits cover.
        heads: number of heads, 8 by default.
        head_dim: number of features per head. None: dim / heads.
        hidden: width of relu(W1 x + b1) in each head. None: head_dim. 0: no first layer; W2 reads the head's dim /
            heads features of x.
        share_heads: True: one W2 for all heads, as in the official code. Default False.
        bias: whether there is a b2, True by default.
        pair_bias: None (default), or a function of two positions that is added to the logits: {"name": "alibi", "t5",
            "kerple", "sandwich" or "fire"} with the options of the class in ``tokenmix.positions``.

    Parameters: q_proj (W1, b1), v_proj, out_proj, logits.weight (W2: heads, hidden, max_len) and logits.bias. Time
    O(T^2 D). The streaming state is the history of values.

    Raises:
        MixerError: if an option is out of its range, or a sequence is longer than ``max_len``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        about=About(
            _PAPER, "synthetic", "T^2 D", "T^2 H", idea="softmax of logits made from each token alone", tier="core"
        ),
        form="synthesizer_dense",
        carries=("v_proj", "out_proj"),  # its q_proj is the hidden layer of an MLP
    )

    def __init__(
        self,
        dim: int,
        *,
        max_len: int,
        causal: bool = False,
        heads: int = 8,
        head_dim: int | None = None,
        hidden: int | None = None,
        share_heads: bool = False,
        bias: bool = True,
        pair_bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        width = parts_of.head_width(self, heads, head_dim)
        at_least(self, 0, hidden=0 if hidden is None else hidden)
        if hidden == 0 and dim % heads:
            self.refuse(f"hidden=0 (no first layer) needs heads that divide dim={dim}, got heads={heads}")
        self.heads, self.inner, self.rectify = heads, heads * width, hidden != 0
        each = width if hidden is None else hidden or dim // heads
        self.register_module("q_proj", nn.Linear(dim, heads * each, bias=qkv_bias) if self.rectify else None)
        self.v_proj = nn.Linear(dim, self.inner, bias=qkv_bias)
        self.out_proj = nn.Linear(self.inner, dim, bias=out_bias)
        self.logits = parts_of.DenseTables(heads, share_heads, each, max_len, bias=bias)
        self.pair_bias = parts_of.build_pair_bias(self, pair_bias, heads)

    def resize(self, max_len: int) -> None:
        """Interpolate W2 and b2 to ``max_len`` positions."""
        parts_of.resize_part(self, [self.logits], max_len)

    def _queries(self, x):
        return x if self.q_proj is None else self.q_proj(x)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.synthesizer_dense`` for this input: (positional, keyword)."""
        x, key_mask = inputs.x, inputs.key_mask
        options: dict[str, Any] = {
            "rectify": self.rectify,
            "positions": parts_of.explicit_positions(x, inputs.positions, key_mask),
        }
        args = self._queries(x), self.v_proj(x), child_weights(self, self.logits, x)
        options |= parts_of.pair_logits(self.pair_bias, x, options["positions"])
        return args, {**options, "causal": self.causal, "key_mask": key_mask, "attn_mask": inputs.attn_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return _cost(self, T, (self.dim + 3 * self.inner) * T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, _, dense = args
        logits = synth.dense_logits(q, dense, 0, dense[0].shape[-1], rectify=options["rectify"])
        return float(logits.detach().abs().max()) + largest_added(options, 0)

    def empty_state(self, batch_size, *, device, dtype):
        return parts_of.empty_history(batch_size, self.inner, device=device, dtype=dtype)

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, state = parts_of.remember(self, x, state, positions, key_mask)
        logits = synth.dense_logits(
            self._queries(x),
            child_weights(self, self.logits, x),
            query_positions,
            state.positions,
            rectify=self.rectify,
        )
        return parts_of.read(self, x, state, logits, query_positions), state


class SynthesizerRandom(Mixer):
    """Random Synthesizer: y_t = W_o [sum_s softmax_s(R_ts) v_s] in each head.

    The weights depend on positions alone. Tay et al. 2020, arXiv:2005.00743. Maps (B, T, D) to (B, T, D).

    Args:
        max_len: N, the number of positions that R covers.
        trainable: True by default. False fixes R as it is drawn ("Fix" in the paper); it is then a buffer, saved with
            the rest, and no parameter.
        init_std: standard deviation of R at the start. None: 0.02, with which the mixer starts near the mean of the
            values; 1.0 if R is fixed, which would otherwise stay that mean.
        share_heads: True: one R for all heads. Default False.
        heads, head_dim, pair_bias: as in SynthesizerDense.

    Parameters: v_proj, out_proj, logits.weight (R: heads, max_len, max_len). Without masks the softmax is computed once
    for the whole batch. Time O(T^2 D).

    Raises:
        MixerError: if an option is out of its range, or a sequence is longer than ``max_len``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        about=About(
            _PAPER,
            "synthetic",
            "T^2 D",
            "T^2 H",
            idea="softmax of learned or fixed logits, no input in them",
            tier="core",
        ),
        knows_positions=True,
        form="synthesizer_random",
        carries=("v_proj", "out_proj"),
    )

    def __init__(
        self,
        dim: int,
        *,
        max_len: int,
        causal: bool = False,
        heads: int = 8,
        head_dim: int | None = None,
        trainable: bool = True,
        init_std: float | None = None,
        share_heads: bool = False,
        pair_bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        self.heads, self.inner = heads, heads * parts_of.head_width(self, heads, head_dim)
        init_std = (0.02 if trainable else 1.0) if init_std is None else init_std
        check_positive(self, init_std=init_std)
        self.v_proj = nn.Linear(dim, self.inner, bias=qkv_bias)
        self.out_proj = nn.Linear(self.inner, dim, bias=out_bias)
        self.logits = parts_of.RandomTable(heads, share_heads, max_len, init_std=init_std, trainable=trainable)
        self.pair_bias = parts_of.build_pair_bias(self, pair_bias, heads)

    def resize(self, max_len: int) -> None:
        """Interpolate R to ``max_len`` positions."""
        parts_of.resize_part(self, [self.logits], max_len)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.synthesizer_random`` for this input: (positional, keyword)."""
        x, key_mask = inputs.x, inputs.key_mask
        options: dict[str, Any] = {
            "positions": parts_of.explicit_positions(x, inputs.positions, key_mask),
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": inputs.attn_mask,
        }
        options |= parts_of.pair_logits(self.pair_bias, x, options["positions"])
        return (self.v_proj(x), *child_weights(self, self.logits, x)), options

    def mixing_cost(self, T: int) -> MixingCost:
        return _cost(self, T, (self.dim + 2 * self.inner) * T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return float(args[1].detach().abs().max()) + largest_added(options, 0)

    def empty_state(self, batch_size, *, device, dtype):
        return parts_of.empty_history(batch_size, self.inner, device=device, dtype=dtype)

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, state = parts_of.remember(self, x, state, positions, key_mask)
        logits = synth.random_logits(x, child_weights(self, self.logits, x), query_positions, state.positions)
        return parts_of.read(self, x, state, logits, query_positions), state


class SynthesizerFactorizedDense(Mixer):
    """Factorized dense Synthesizer: the dense form with logits C_i[j] = A_i[j mod a] B_i[j div a].

    A and B, of a and b = ceil(max_len / a) numbers, are computed from relu(W1 x + b1). Tay et al. 2020,
    arXiv:2005.00743. Maps (B, T, D) to (B, T, D).

    Args:
        factor: a. None: about sqrt(max_len). One factor is tiled and the other repeated, so that all max_len logits
            differ.
        max_len, heads, head_dim, hidden, share_heads, bias, pair_bias: as in SynthesizerDense; hidden=0 is not
            supported.

    Parameters: q_proj (W1, b1, which A and B share), v_proj, out_proj, logits.weight_a, weight_b, bias_a, bias_b. It
    has fewer parameters; time and memory stay those of a softmax over T x T logits.

    Raises:
        MixerError: if an option is out of its range, or a sequence is longer than ``max_len``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        about=About(
            _PAPER, "synthetic", "T^2 D", "T^2 H", idea="dense, each row of logits from two short ones", tier="core"
        ),
        form="synthesizer_factorized_dense",
        carries=("v_proj", "out_proj"),
    )

    def __init__(
        self,
        dim: int,
        *,
        max_len: int,
        causal: bool = False,
        heads: int = 8,
        head_dim: int | None = None,
        hidden: int | None = None,
        factor: int | None = None,
        share_heads: bool = False,
        bias: bool = True,
        pair_bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        width = parts_of.head_width(self, heads, head_dim)
        each, factor = width if hidden is None else hidden, parts_of.near_root(max_len) if factor is None else factor
        at_least(self, 1, hidden=each, factor=factor)
        self.heads, self.inner = heads, heads * width
        self.q_proj = nn.Linear(dim, heads * each, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, self.inner, bias=qkv_bias)
        self.out_proj = nn.Linear(self.inner, dim, bias=out_bias)
        self.logits = parts_of.FactorizedDenseTables(heads, share_heads, each, max_len, factor=factor, bias=bias)
        self.pair_bias = parts_of.build_pair_bias(self, pair_bias, heads)

    def options_of_length(self) -> dict[str, Any]:
        return {"factor": self.logits.factor}

    def resize(self, max_len: int) -> None:
        """Interpolate B to ``max_len`` positions; a stays."""
        parts_of.resize_part(self, [self.logits], max_len)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.synthesizer_factorized_dense`` for this input: (positional, keyword)."""
        x, key_mask = inputs.x, inputs.key_mask
        options: dict[str, Any] = {
            "positions": parts_of.explicit_positions(x, inputs.positions, key_mask),
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": inputs.attn_mask,
        }
        options |= parts_of.pair_logits(self.pair_bias, x, options["positions"])
        return (self.q_proj(x), self.v_proj(x), child_weights(self, self.logits, x)), options

    def mixing_cost(self, T: int) -> MixingCost:
        return _cost(self, T, (self.dim + 3 * self.inner) * T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, _, tables = args
        logits = synth.factorized_dense_logits(q, tables, 0, tables[0].shape[-1] * tables[1].shape[-1])
        return float(logits.detach().abs().max()) + largest_added(options, 0)

    def empty_state(self, batch_size, *, device, dtype):
        return parts_of.empty_history(batch_size, self.inner, device=device, dtype=dtype)

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, state = parts_of.remember(self, x, state, positions, key_mask)
        logits = synth.factorized_dense_logits(
            self.q_proj(x), child_weights(self, self.logits, x), query_positions, state.positions
        )
        return parts_of.read(self, x, state, logits, query_positions), state


class SynthesizerFactorizedRandom(Mixer):
    """Factorized random Synthesizer: the random form with R = R1 R2^T of rank k.

    It has 2 max_len k numbers per head. Tay et al. 2020, arXiv:2005.00743. Maps (B, T, D) to (B, T, D).

    Args:
        rank: k, 8 by default.
        init_std: standard deviation of the entries of R at the start, 0.02 by default; R1 and R2 are drawn with
            sqrt(init_std / sqrt(rank)).
        max_len, heads, head_dim, share_heads, pair_bias: as in SynthesizerRandom.

    Parameters: v_proj, out_proj, logits.r1, logits.r2 (heads, max_len, rank). Time and memory stay those of a softmax
    over T x T logits.

    Raises:
        MixerError: if an option is out of its range, or a sequence is longer than ``max_len``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        about=About(
            _PAPER, "synthetic", "T^2 D", "T^2 H", idea="random, as a product of two thin matrices", tier="core"
        ),
        knows_positions=True,
        form="synthesizer_factorized_random",
        carries=("v_proj", "out_proj"),
    )

    def __init__(
        self,
        dim: int,
        *,
        max_len: int,
        causal: bool = False,
        heads: int = 8,
        head_dim: int | None = None,
        rank: int = 8,
        init_std: float = 0.02,
        share_heads: bool = False,
        pair_bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        self.heads, self.inner = heads, heads * parts_of.head_width(self, heads, head_dim)
        at_least(self, 1, rank=rank)
        check_positive(self, init_std=init_std)
        self.v_proj = nn.Linear(dim, self.inner, bias=qkv_bias)
        self.out_proj = nn.Linear(self.inner, dim, bias=out_bias)
        self.logits = parts_of.FactorizedRandomTables(heads, share_heads, max_len, rank=rank, init_std=init_std)
        self.pair_bias = parts_of.build_pair_bias(self, pair_bias, heads)

    def resize(self, max_len: int) -> None:
        """Interpolate R1 and R2 to ``max_len`` positions."""
        parts_of.resize_part(self, [self.logits], max_len)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.synthesizer_factorized_random``: (positional, keyword)."""
        x, key_mask = inputs.x, inputs.key_mask
        options: dict[str, Any] = {
            "positions": parts_of.explicit_positions(x, inputs.positions, key_mask),
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": inputs.attn_mask,
        }
        options |= parts_of.pair_logits(self.pair_bias, x, options["positions"])
        return (self.v_proj(x), child_weights(self, self.logits, x)), options

    def mixing_cost(self, T: int) -> MixingCost:
        return _cost(self, T, (self.dim + 2 * self.inner) * T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        r1, r2 = args[1]
        return float((r1 @ r2.mT).detach().abs().max()) + largest_added(options, 0)

    def empty_state(self, batch_size, *, device, dtype):
        return parts_of.empty_history(batch_size, self.inner, device=device, dtype=dtype)

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, state = parts_of.remember(self, x, state, positions, key_mask)
        logits = synth.factorized_random_logits(
            x, child_weights(self, self.logits, x), query_positions, state.positions
        )
        return parts_of.read(self, x, state, logits, query_positions), state
