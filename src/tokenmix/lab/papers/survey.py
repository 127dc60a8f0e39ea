"""Efficient Transformers: a survey. Table 1 row by row, for the mixers that the library has."""

from __future__ import annotations

from typing import Any

from . import identities
from .claim import Claim, Measure, Number, Paper
from .counts import Options, decodes, growth, root
from .rows import trained

OTHER_FORM = "our causal form is another than the published one: what would look ahead is counted from the past"
SECOND_HAND = "second-hand"


def fixed(T: int) -> dict[str, Any]:
    """Return no options: those of the class stay the same at every length."""
    return {}


def whole_length(T: int) -> dict[str, Any]:
    """Return the longest length, for mixers with parameters per position."""
    return {"max_len": T}


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (*patterns(), *learned(), *memories(), *sums(), *unbuilt(), *scores())


def row(
    model: str,
    says: str,
    mixer: str,
    code: str,
    printed: tuple[str, str, str],
    *,
    options: Options = fixed,
    equation: str = "",
    more: tuple[Number, ...] = (),
    why: str = "",
    unmeasured: str = "",
) -> Claim:
    """Return the claim of one row of Table 1.

    Args:
        model: the method.
        printed: its complexity as printed, how that grows in N alone, and whether it decodes.
        options: options that grow with N as the survey assumes.
        why: reason for another answer about decoding.
        unmeasured: reason for growth that our formula does not show.
    """
    cost, growing, decoding = printed
    measure: Measure | None = None if unmeasured else growth(mixer, options)
    numbers = (
        Number(f"grows in N as (printed: {cost})", growing, measure=measure, why=unmeasured),
        Number("decodes", decoding, measure=decodes(mixer), why=why),
        *more,
    )
    return Claim(f"Table 1, {model}", says, numbers, equation, code)


def patterns() -> tuple[Claim, ...]:
    """Return the rows of fixed patterns."""
    stride = "half of the heads look at the own stretch of l tokens, the other half at every l-th token, l near sqrt N"
    return (
        row(
            "Memory Compressed",
            "Keys and values are shortened by a strided convolution; layers alternate with local blocks.",
            "memory_compressed",
            "contrib.memory_compressed_forms.memory_compressed",
            ("N_c^2", "N^2", "yes"),
        ),
        row(
            "Image Transformer",
            "A block of queries attends itself and the m pixels before it.",
            "image_local",
            "contrib.image_local.image_local",
            ("N m", "N", "yes"),
        ),
        row(
            "Sparse Transformer",
            f"In its strided form {stride}.",
            "strided",
            "contrib.patterns.strided",
            ("N sqrt N", "N sqrt N", "yes"),
            options=lambda T: {"stride": root(T)},
        ),
        row(
            "Axial",
            "Tokens on a grid attend along their row, then along their column.",
            "axial",
            "contrib.axial.axial",
            ("N sqrt N", "N sqrt N", "yes"),
            options=lambda T: {"width": root(T)},
        ),
        row(
            "Longformer",
            "A window of k tokens, dilated in some heads, and m tokens that attend all and that all attend.",
            "longformer",
            "contrib.patterns_longformer_forms.longformer",
            ("n (k + m)", "N", "yes"),
            options=lambda T: {"window": 32},
        ),
        row(
            "ETC",
            "A few global tokens beside a local radius; four blocks of pairs, three of them full.",
            "etc",
            "contrib.patterns_longformer.ETC",
            ("N_g^2 + N N_g", "N", "no"),
        ),
        row(
            "BigBird",
            "Blocks attend global blocks, those of a window, and some at random.",
            "bigbird",
            "contrib.patterns_bigbird.bigbird",
            ("N", "N", "no"),
            why=OTHER_FORM,
        ),
    )


def learned() -> tuple[Claim, ...]:
    """Return the rows of learned patterns."""
    sorts = "our formula counts no sorting, from which the logarithm comes"
    return (
        row(
            "Reformer",
            "Queries, which are the keys too, are hashed; tokens of one bucket attend one another in chunks.",
            "reformer",
            "contrib.reformer.reformer",
            ("N log N", "N log N", "yes"),
            equation="h(x) = argmax [x R; -x R]",
            unmeasured=sorts,
        ),
        row(
            "Routing",
            "Tokens attend those of their cluster; about sqrt N clusters of sqrt N tokens.",
            "routing",
            "contrib.routing.routing",
            ("N sqrt N", "N sqrt N", "yes"),
            options=lambda T: {"clusters": root(T), "window": root(T)},
        ),
        row(
            "Sinkhorn",
            "A soft permutation of blocks, made by Sinkhorn's normalisation, brings each block a distant one.",
            "sinkhorn",
            "contrib.sinkhorn_forms.sinkhorn",
            ("B^2", "B^2", "yes"),
            equation="S = Sinkhorn(F(sums of blocks))",
            unmeasured="B is no number of tokens",
        ),
    )


def memories() -> tuple[Claim, ...]:
    """Return the rows of memories and recurrence."""
    unroll = "with the memory of fixed length that our mixer has, it grows as N"
    equivariant = Number("outputs of permuted tokens", "equal", measure=identities.set_equivariance)
    return (
        row(
            "Set Transformer",
            "k learned points attend the tokens, which the tokens attend. Their order is not seen.",
            "set",
            "contrib.set.induced_set",
            ("k N", "N", "no"),
            equation="ISAB(X) = MAB(X, MAB(I, X))",
            more=(equivariant,),
        ),
        row(
            "Transformer-XL",
            "Tokens attend the segment before theirs too, by relative positions.",
            "transformer_xl",
            "contrib.transformer_xl.transformer_xl",
            ("N^2", "N^2", "yes"),
        ),
        row(
            "Compressive",
            "What leaves Transformer-XL's memory is compressed into a second one.",
            "compressive",
            "contrib.compressive_forms.compressive",
            ("N^2", "N^2", "yes"),
            unmeasured=unroll,
        ),
        row(
            "Nystromformer",
            "The matrix of weights is approximated from k landmarks.",
            "nystrom",
            "contrib.nystrom.nystrom",
            ("k N", "N", "no"),
        ),
    )


def sums() -> tuple[Claim, ...]:
    """Return the rows of kernels, low rank and synthetic weights."""
    recurrence = Number("causal form against the recurrence", "equal", measure=identities.linear_recurrence)
    return (
        row(
            "Synthesizer",
            "Weights without products of queries and keys.",
            "synthesizer_dense",
            "functional.synthesizer.synthesizer_dense",
            ("N^2", "N^2", "yes"),
            options=whole_length,
        ),
        row(
            "Performer",
            "Random features whose products estimate the softmax's weights.",
            "performer",
            "functional.performer.performer",
            ("N", "N", "yes"),
            equation="phi(x) = exp(-|x|^2 / 2) / sqrt(M) [exp(w_1 x), .., exp(w_M x)]",
        ),
        row(
            "Linformer",
            "Keys and values are projected along the sequence to k rows.",
            "linformer",
            "contrib.linformer.linformer",
            ("N", "N", "no"),
            options=whole_length,
            equation="softmax(Q (E K)^T / sqrt d) (F V)",
        ),
        row(
            "Linear Transformers",
            "A feature map in place of the softmax makes causal attention a recurrence.",
            "linear",
            "functional.linear.linear_attention",
            ("N", "N", "yes"),
            equation="S_i = S_i-1 + phi(K_i) V_i^T, Z_i = Z_i-1 + phi(K_i), Y_i = phi(Q_i)^T S_i / phi(Q_i)^T Z_i",
            more=(recurrence,),
        ),
        row(
            "Random Feature Attention",
            "Random sines and cosines as the feature map, with an optional gate that forgets.",
            "rfa",
            "functional.rfa.rfa",
            ("N", "N", "yes"),
        ),
    )


def unbuilt() -> tuple[Claim, ...]:
    """Return the rows that the library has no mixer for."""
    rows = {
        "Funnel": "N^2, decodes",
        "Long-Short": "k N, decodes",
        "Poolingformer": "N, does not decode",
        "Perceiver": "k N, decodes",
        "Clusterformer": "N log N, does not decode",
        "Luna": "k N, decodes",
        "TokenLearner": "k^2, does not decode",
        "seven sparse models (experts and others)": "N^2, decode",
    }
    return (Claim("Table 1, other rows", "Methods without a mixer here.", trained(rows, built=False)),)


def scores() -> tuple[Claim, ...]:
    """Return the scores of other sources on these mixers."""
    lra = {
        "Local": "15.82 / 52.98 / 53.39 / 41.46 / 66.63 / 46.06",
        "Linear": "16.13 / 65.90 / 53.09 / 42.34 / 75.30 / 50.55",
        "Reformer": "37.27 / 56.10 / 53.40 / 38.07 / 68.50 / 50.67",
        "Sparse": "17.07 / 63.58 / 59.59 / 44.24 / 71.71 / 51.24",
        "Sinkhorn": "33.67 / 61.20 / 53.83 / 41.23 / 67.45 / 51.29",
        "Linformer": "35.70 / 53.94 / 52.27 / 38.56 / 76.34 / 51.36",
        "Performer": "18.01 / 65.40 / 53.82 / 42.77 / 77.05 / 51.41",
        "Synthesizer": "36.99 / 61.68 / 54.67 / 41.61 / 69.45 / 52.88",
        "Longformer": "35.63 / 62.85 / 56.89 / 42.22 / 69.71 / 53.46",
        "Transformer": "36.37 / 64.27 / 57.46 / 42.44 / 71.40 / 54.39",
        "BigBird": "36.05 / 64.02 / 59.29 / 40.83 / 74.87 / 55.01",
    }
    others = {
        "Sinkhorn, LM1B perplexity, base / mixture / Transformer": "40.79 / 40.11 / 41.57",
        "Routing, WikiText-103 perplexity": "15.8",
        "Routing, enwik8 bits": "0.99",
        "Routing, ImageNet-64 bits": "3.43",
        "Reformer of 12 layers, enwik8 bits": "1.05",
        "Linear Transformer / softmax, MNIST bits/dim": "0.644 / 0.621",
        "Linear Transformer, sampling of CIFAR-10, times faster": "4,462",
        "RFA / softmax, WikiText-103 perplexity": "25.0 / 26.2",
    }
    return (
        Claim(
            "Long Range Arena",
            "Accuracy on ListOps, text, retrieval, image, path, and the mean.",
            trained(lra, "%", source="Long Range Arena, its table", built=False),
        ),
        Claim(
            "Scores of the single papers",
            "As noted elsewhere.",
            trained(others, source=SECOND_HAND),
            code="mixers.table",
        ),
    )


PAPER = Paper("survey", "Efficient Transformers: A Survey", "Tay et al. 2022", "2009.06732", state)
