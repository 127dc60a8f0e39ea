"""Mixtures of Synthesizers and attention, whose logits are combined before one softmax (Tay et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import synthesizer as synth
from ..functional.layout.checks import check_name
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer
from ..mixers.cost import MixingCost
from ..mixers.parts import synthesizer as parts_of
from ..mixers.parts.options import at_least, check_numbers, check_positive
from ..mixers.parts.shared import largest_added
from ..mixers.parts.synthesizer import Part, SynthesizerKeysState
from ..mixers.parts.weights_on_call import child_weights

PARTS = ("attention", *synth.LOGITS)


class SynthesizerMixture(Mixer):
    """Mixture of Synthesizers: y_t = W_o [sum_s softmax_s(sum_i a_i S_i)_s v_s] in each head.

    The S_i are any of the synthetic logits and those of attention. Tay et al. 2020, arXiv:2005.00743. Maps (B, T, D) to
    (B, T, D).

    Args:
        parts: names of the S_i, any of "attention", "dense", "random", "factorized_dense", "factorized_random"; by
            default "random" and "attention", the paper's best.
        join: "softmax" (default, the paper's): a = softmax(alpha), alpha starts at 0; "gated": 1 - a for attention and
            a = sigmoid(alpha) for all others ("plus alpha" of the official code); "plus": the plain sum.
        alpha_per_head: learn an alpha in each head. False, as in the official code: one for the layer.
        scale: factor on the logits of attention only. None: 1 / sqrt(head width); the official code uses 1.
        rank: of "factorized_random", 8 by default.
        factor: of "factorized_dense". None: about sqrt(max_len).
        init_std: of "random" and "factorized_random", 0.02 by default.
        max_len, heads, head_dim, share_heads, bias, pair_bias: as in the single forms.

    Parameters: q_proj if attention or a dense form takes part (they share it: the queries are the hidden layer before
    the relu, as in the official code), k_proj if attention does, v_proj, out_proj, alpha, and the tables of each part
    under its name. The streaming state is the history of values, and of keys with attention.

    Raises:
        MixerError: if an option is out of its range, if a part is unknown or repeated, or if a sequence is longer than
            ``max_len``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        page="synthesizer",
        about=About(
            "Tay et al. 2020, arXiv 2005.00743",
            "synthetic",
            "T^2 D",
            "T^2 H",
            idea="logits of several Synthesizers and of dot products, with learned weights",
        ),
        form="synthesizer_mixture",
        carries=QKVO,
    )

    def __init__(
        self,
        dim: int,
        *,
        max_len: int,
        causal: bool = False,
        parts: Sequence[str] = ("random", "attention"),
        join: str = "softmax",
        alpha_per_head: bool = False,
        heads: int = 8,
        head_dim: int | None = None,
        scale: float | None = None,
        rank: int = 8,
        factor: int | None = None,
        init_std: float = 0.02,
        share_heads: bool = False,
        bias: bool = True,
        pair_bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        self._check_parts(parts, join)
        check_numbers(self, scale=0.0 if scale is None else scale)
        self.parts, self.join, self.heads, self.scale = tuple(parts), join, heads, scale
        width, factor = (
            parts_of.head_width(self, heads, head_dim),
            parts_of.near_root(max_len) if factor is None else factor,
        )
        at_least(self, 1, rank=rank, factor=factor)
        check_positive(self, init_std=init_std)
        self.inner = heads * width
        needs_q, needs_k = set(self.parts) - {"random", "factorized_random"}, "attention" in self.parts
        self.register_module("q_proj", nn.Linear(dim, self.inner, bias=qkv_bias) if needs_q else None)
        self.register_module("k_proj", nn.Linear(dim, self.inner, bias=qkv_bias) if needs_k else None)
        self.v_proj = nn.Linear(dim, self.inner, bias=qkv_bias)
        self.out_proj = nn.Linear(self.inner, dim, bias=out_bias)
        dense, random = {"width": width, "max_len": max_len, "bias": bias}, {"max_len": max_len, "init_std": init_std}
        self._add("dense", parts_of.DenseTables, share_heads, **dense)
        self._add("random", parts_of.RandomTable, share_heads, **random)
        self._add("factorized_dense", parts_of.FactorizedDenseTables, share_heads, **dense, factor=factor)
        self._add("factorized_random", parts_of.FactorizedRandomTables, share_heads, **random, rank=rank)
        self.pair_bias = parts_of.build_pair_bias(self, pair_bias, heads)
        count = synth.alphas(self.parts, join)
        if alpha_per_head and not count:
            self.refuse("join='plus' learns no alpha, got alpha_per_head=True; use join='softmax' or 'gated'")
        shape = (heads, count) if alpha_per_head else (count,)
        self.alpha = nn.Parameter(torch.empty(shape)) if count else None
        self.init_parameters()

    def _add(self, name: str, kind: type[Part], shared: bool, **options: Any) -> None:
        self.register_module(name, kind(self.heads, shared, **options) if name in self.parts else None)

    def _check_parts(self, parts: Any, join: Any) -> None:
        if (
            not isinstance(parts, (list, tuple))
            or not parts
            or any(part not in PARTS or parts.count(part) > 1 for part in parts)
        ):
            self.refuse(f"parts must be a list of some of {', '.join(PARTS)}, each once, got {parts!r}")
        check_name(type(self).__name__, "join", join, synth.JOINS)
        if join == "gated" and ("attention" not in parts or len(parts) < 2):
            self.refuse(f"join='gated' needs attention and another part, got parts={parts!r}; use join='softmax'")

    def init_parameters(self) -> None:
        """Start with equal weights."""
        if self.alpha is not None:
            nn.init.zeros_(self.alpha)

    def part_weights(self) -> list[dict[str, float]] | None:
        """Return the learned a_i by part, of each head, or in one entry those that all heads share.

        None where nothing is learned (``join="plus"``).
        """
        if self.alpha is None:
            return None
        weights = torch.stack(synth.part_weights(self.alpha.detach(), self.parts, self.join), -1)
        return [dict(zip(self.parts, own, strict=True)) for own in weights.reshape(-1, len(self.parts)).tolist()]

    def _tables(self, x: Tensor) -> dict[str, synth.Tables]:
        parts: Any = self._modules  # torch.compile does not support a name bound in the comprehension
        return {name: () if parts[name] is None else child_weights(self, parts[name], x) for name in synth.LOGITS}

    def _weights(self, x: Tensor) -> Tensor:
        return x.new_zeros(0) if self.alpha is None else self.alpha

    def options_of_length(self) -> dict[str, Any]:
        dense: Any = self._modules["factorized_dense"]
        return {} if dense is None else {"factor": dense.factor}

    def resize(self, max_len: int) -> None:
        """Interpolate every table to ``max_len`` positions."""
        parts_of.resize_part(self, [self._modules[name] for name in synth.LOGITS if name in self.parts], max_len)  # type: ignore[misc]  # none of these is None

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.synthesizer_mixture`` for this input: (positional, keyword)."""
        x, key_mask = inputs.x, inputs.key_mask
        v = self.v_proj(x)
        q = x if self.q_proj is None else self.q_proj(x)
        k = v if self.k_proj is None else self.k_proj(x)
        options: dict[str, Any] = {
            "parts": self.parts,
            "heads": self.heads,
            "join": self.join,
            "scale": self.scale,
            "positions": parts_of.explicit_positions(x, inputs.positions, key_mask),
        }
        args = q, k, v, self._weights(x), *self._tables(x).values()
        options |= parts_of.pair_logits(self.pair_bias, x, options["positions"])
        return args, {**options, "causal": self.causal, "key_mask": key_mask, "attn_mask": inputs.attn_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        D, one = self.inner, self.heads * T * T
        made: list[Any] = [self._modules[name] for name in synth.LOGITS if name in self.parts]
        products = 2 * T * T * D * (2 if "attention" in self.parts else 1) + sum(part.flops(T)[1] for part in made)
        aside = sum(part.flops(T)[0] - part.flops(T)[1] for part in made)
        joins = 2 * one * len(self.parts)
        kept = sum(part.kept_numbers(T) for part in made)
        if self.alpha is not None:  # the gradient of alpha needs the logits of each part
            fresh = {"dense": one, "attention": one, "factorized_dense": one, "factorized_random": one, "random": 0}
            kept += sum(fresh[part] for part in self.parts)
        streams = 4 * D * (2 if "attention" in self.parts else 1) + 9
        linear = (self.dim + 3 * D + (2 * D if "attention" in self.parts else 0)) * T
        cost = MixingCost(
            flops=products + aside + joins,
            counted=products,
            activations=4 * (one + kept + linear),
            state=streams * T + 8,
        )
        return parts_of.with_pairs(cost, self.pair_bias, self.heads, T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        detached: list[Any] = [tuple(b.detach() for b in a) if isinstance(a, tuple) else a.detach() for a in args]
        q, k, _, alpha, *tables = detached
        how = {"join": "plus", "heads": options["heads"], "scale": options["scale"]}
        named, n = dict(zip(synth.LOGITS, tables, strict=True)), q.shape[1]
        return largest_added(options, 0) + sum(
            float(synth.mixture_logits(q, k, alpha, named, n, n, parts=[part], **how).abs().max())
            for part in options["parts"]
        )

    def empty_state(self, batch_size, *, device, dtype):
        state = parts_of.empty_history(batch_size, self.inner, device=device, dtype=dtype)
        return SynthesizerKeysState(state.values.clone(), *state) if "attention" in self.parts else state

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, state = parts_of.remember(self, x, state, positions, key_mask)
        q = x if self.q_proj is None else self.q_proj(x)
        keys = torch.where(state.valid[..., None], state.keys, 0.0).to(q.dtype) if "attention" in self.parts else q
        how = {"parts": self.parts, "join": self.join, "heads": self.heads, "scale": self.scale}
        logits = synth.mixture_logits(
            q, keys, self._weights(x), self._tables(x), query_positions, state.positions, **how
        )
        return parts_of.read(self, x, state, logits, query_positions), state
