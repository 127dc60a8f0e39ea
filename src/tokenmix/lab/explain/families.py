"""What the page tells of each family of mixers other than attention, and the family's own numbers for one text.

A subclass of a mixer of a family gets the text of that family.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from math import inf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contrib import DynamicConv, LightConv
from ...contrib.synthesizer_mixture import SynthesizerMixture
from ...functional import synthesizer as synth
from ...functional.linear import LOG_FEATURES
from ...functional.sums.gates import GATES
from ...functional.sums.kernel_attention import MAPS
from ...mixers import Mixer
from ...mixers.aft import AFTFull, AFTLocal, AFTSimple
from ...mixers.aft_conv import AFTConv
from ...mixers.aft_forget import AFTForget
from ...mixers.aft_pairs import AFTPairs
from ...mixers.aft_reach import AFTReach
from ...mixers.external import SlotMemory
from ...mixers.hydra import Hydra
from ...mixers.linear import LinearAttention
from ...mixers.parts.weights_on_call import child_weights
from ...mixers.synthesizer import (
    SynthesizerDense,
    SynthesizerFactorizedDense,
    SynthesizerFactorizedRandom,
    SynthesizerRandom,
)
from ...types import Options

Ends = tuple[Tensor, Tensor | None]
"""What a mixer reads: x (1, T, D), and a context (1, S, D) or None."""


class Table(NamedTuple):
    """Numbers of a family, (rows, columns), or (H, rows, columns), of which the page shows the chosen head.

    Attributes:
        name: key of its heading among the words of the page.
        rows: "asking" (one for each word that asks), "asked", "heads" or "one".
        pairs: whether columns are the words that are asked; else they are features, slots or taps.
    """

    name: str
    rows: str
    numbers: Tensor
    pairs: bool = False


class Family(NamedTuple):
    """A family of mixers on the page.

    Attributes:
        key: of its text, ``family_KEY``, among the words of the page.
        given: what the text has in braces.
        tables: its own numbers.
    """

    key: str
    given: Mapping[str, object] = {}
    tables: tuple[Table, ...] = ()


@singledispatch
def family(mixer: Mixer, ends: Ends, args: tuple[Any, ...], options: Options) -> Family:
    """Return what the page tells of a mixer.

    Args:
        ends: what the mixer reads.
        args, options: those of its functional form for that; empty if it has none.
    """
    kind = mixer.facts.about.kind
    if kind in ("fixed pattern", "learned pattern"):
        return Family("pattern")
    return Family("kernel") if kind == "kernel" else Family("other")


def _gate(mixer: Any, q: Tensor) -> tuple[dict[str, str | float], tuple[Table, ...]]:
    """Return the smallest and the largest gate of the words, and all of them."""
    if mixer.gate is None:
        return {"gate": "1", "lowest": 1.0, "highest": 1.0}, ()
    gate = GATES[mixer.gate](q[0].float())
    given = {"gate": mixer.gate, "lowest": float(gate.min()), "highest": float(gate.max())}
    return given, (Table("table_gate", "asking", gate),)


@family.register
def _(mixer: AFTSimple, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    given, tables = _gate(mixer, args[0])
    return Family("aft_simple", given, tables)


@family.register(AFTFull)
@family.register(AFTLocal)
def _(mixer: AFTFull | AFTLocal, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    x, context = ends
    given, tables = _gate(mixer, args[0])
    T, S = x.shape[1], (x if context is None else context).shape[1]
    rows, cols = (torch.arange(n, device=x.device)[None] for n in (T, S))
    bias = mixer.pair_log_weights(rows, cols)[0].float()
    near = bias[bias.isfinite()]
    given |= {"least": float(near.min()), "most": float(near.max())}
    window = getattr(mixer, "window", None)
    tables += (Table("table_bias", "asking", bias, pairs=True),)
    if window is None:
        return Family("aft_full", given, tables)
    return Family("aft_window" if mixer.outside == "none" else "aft_local", given | {"window": window}, tables)


@family.register
def _(mixer: AFTConv, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    if mixer.filters != "exp" or not mixer.divide:
        return Family("other")  # the words tell of exp(w) and of a ratio
    given, tables = _gate(mixer, args[0])
    taps = mixer.kernel(ends[0]).flatten(1)
    given |= {"heads": mixer.heads, "taps": taps.shape[1], "least": float(taps.min()), "most": float(taps.max())}
    return Family("aft_conv", given, (*tables, Table("table_taps", "heads", taps)))


@family.register
def _(mixer: AFTForget, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    given, tables = _gate(mixer, args[0])
    decay = args[3][0].float().expand(ends[0].shape[1], -1)
    lives = [_half_life(float(rate)) for rate in decay.mean(0)]
    given |= {"short": _tokens(min(lives)), "long": _tokens(max(lives))}
    return Family("aft_forget", given, (*tables, Table("table_keep", "asking", decay.exp())))


@family.register
def _(mixer: AFTReach, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    given, tables = _gate(mixer, args[0])
    reach = args[3][0].float().softmax(-1).transpose(0, 1)
    short, long = mixer.half_lives
    given |= {"reaches": mixer.reaches, "short": _tokens(short), "long": _tokens(long)}
    return Family("aft_reach", given, (*tables, Table("table_reach", "asking", reach)))


@family.register
def _(mixer: AFTPairs, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    given, tables = _gate(mixer, args[0])
    return Family("aft_pairs", given | {"rank": mixer.rank}, tables)


@family.register
def _(mixer: LinearAttention, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    q, k = (LOG_FEATURES[mixer.feature](_by_head(a, mixer.heads).float()).exp() for a in args[:2])
    size = mixer.dim // mixer.heads
    given = {"feature": mixer.feature, "heads": mixer.heads, "memory": size * size}
    return Family("linear", given, (Table("table_phi_q", "asking", q), Table("table_phi_k", "asked", k)))


@family.register
def _(mixer: Hydra, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    maps, given = mixer.feature.split("/"), {"feature": mixer.feature, "size": mixer.dim}
    if maps[-1] == "softmax":  # a ratio of sums, as in AFT-simple
        return Family("hydra", given)
    q, k, v = (a[0].double() for a in args[:3])
    q, k = MAPS[maps[0]](q, mixer.eps), MAPS[maps[-1]](k, mixer.eps)
    added, count = (k * v).cumsum(0), torch.arange(1, len(k) + 1, device=k.device, dtype=k.dtype)[:, None]
    if maps[-1] == "mean" or mixer.normalise:
        added = added / count
    total = Table("table_total", "asking", added) if mixer.causal else Table("table_total", "one", added[-1:])
    return Family("hydra", given, (Table("table_phi_q", "asking", q), Table("table_phi_k", "asked", k), total))


@family.register
def _(mixer: SlotMemory, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    x = ends[0]
    if mixer.causal:  # the normalisation of a word knows the words up to it
        read = torch.stack([mixer.slot_weights(x[:, : t + 1])[0, -1] for t in range(x.shape[1])], 1)
    else:
        read = mixer.slot_weights(x)[0].transpose(0, 1)
    used = len(read.mean(0).argmax(-1).unique())
    given = {"slots": read.shape[-1], "used": used}
    return Family("external", given, (Table("table_slots", "asking", read),))


@family.register
def _(mixer: SynthesizerDense, ends: Ends, args: tuple[Any, ...], options: Options) -> Family:
    T = ends[0].shape[1]
    logits = synth.dense_logits(args[0], args[2], T, T, rectify=options["rectify"])
    return _synthesizer("synthesizer_dense", mixer.heads, logits, options)


@family.register
def _(mixer: SynthesizerFactorizedDense, ends: Ends, args: tuple[Any, ...], options: Options) -> Family:
    T = ends[0].shape[1]
    return _synthesizer(
        "synthesizer_dense", mixer.heads, synth.factorized_dense_logits(args[0], args[2], T, T), options
    )


@family.register
def _(mixer: SynthesizerRandom, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    key = "synthesizer_random" if mixer.logits.trainable else "synthesizer_fixed"
    T = ends[0].shape[1]
    return _synthesizer(key, mixer.heads, synth.random_logits(ends[0], args[1:2], T, T), options)


@family.register
def _(mixer: SynthesizerFactorizedRandom, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    T = ends[0].shape[1]
    logits = synth.factorized_random_logits(ends[0], child_weights(mixer, mixer.logits, ends[0]), T, T)
    return _synthesizer("synthesizer_random", mixer.heads, logits, options)


@family.register
def _(mixer: SynthesizerMixture, ends: Ends, args: tuple[Any, ...], options: Options) -> Family:
    q, k, _, alpha, *tables = args
    T, how = ends[0].shape[1], {name: options[name] for name in ("parts", "join", "heads", "scale")}
    logits = synth.mixture_logits(q, k, alpha, dict(zip(synth.LOGITS, tables, strict=True)), T, T, **how)
    made = _synthesizer("synthesizer_mixture", mixer.heads, logits, options)
    shares = ", ".join(f"{part} × {share}" for part, share in _shares(mixer))
    return made._replace(given={**made.given, "parts": shares})


@family.register
def _(mixer: LightConv, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    taps = args[1].float().softmax(-1)
    return Family("lightconv", {"taps": mixer.kernel_size, "heads": mixer.heads}, (Table("table_taps", "heads", taps),))


@family.register
def _(mixer: DynamicConv, ends: Ends, args: tuple[Tensor, ...], options: Options) -> Family:
    taps = args[1][0].float().softmax(-1).transpose(0, 1)
    given = {"taps": mixer.kernel_size, "heads": mixer.heads}
    return Family("dynamicconv", given, (Table("table_taps", "asking", taps),))


def _by_head(a: Tensor, heads: int) -> Tensor:
    return a[0].unflatten(-1, (heads, -1)).transpose(0, 1)


def _synthesizer(key: str, heads: int, logits: Tensor, options: Options) -> Family:
    """Return a Synthesizer and its logits (H, T, S), to which a bias of positions may be added."""
    logits = (logits[0] if logits.ndim == 4 else logits) + options.get("added", torch.zeros(1, 1, 1, 1))[0]
    table = Table("table_logits", "asking", logits.expand(heads, -1, -1), pairs=True)
    return Family(key, {"heads": heads}, (table,))


def _shares(mixer: SynthesizerMixture) -> list[tuple[str, str]]:
    """Write the factor of each part of a mixture, with those of all heads where each has its own."""
    heads = mixer.part_weights() or [dict.fromkeys(mixer.parts, 1.0)]
    return [(part, " / ".join(f"{own[part]:.2f}" for own in heads)) for part in mixer.parts]


def _half_life(decay: float) -> float:
    """Return after how many words a sum with this log-decay per word has halved."""
    return -log(2.0) / decay if decay < 0 else inf


def _tokens(count: float) -> str:
    return "∞" if count == inf else f"{count:,.1f}" if count < 100 else f"{count:,.0f}"
