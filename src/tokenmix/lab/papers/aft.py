"""An Attention Free Transformer: equations, complexity and counts. Its trained tables are in ``aft_tables.py``."""

from __future__ import annotations

from typing import Any

from . import identities
from .aft_tables import trained_claims
from .claim import Claim, Measure, Number, Paper
from .counts import complexity, growth, held, layer, millions, on_meta, tokens

ROUNDED = "every consistent reading of the layer gives 5.95M to 5.96M, which rounds to 6.0"
TABLE_7 = (
    ("deit_tiny", "5.7", ""),
    ("deit_small", "22.1", ""),
    ("lambda_tiny", "4.8", ""),
    (
        "lambda_small",
        "17.7",
        "17.6M with keys of width 16, BatchNorm on queries and keys and no bias on them; the paper names the code "
        "that it used, and no more",
    ),
    ("aft_full_tiny", "6.3", ""),
    ("aft_full_small", "22.6", ""),
    ("aft_conv_tiny_k11_h32", "5.4", ""),
    ("aft_conv_tiny_k11_h192", "5.9", ROUNDED),
    ("aft_conv_small_k11_h16", "20.3", ""),
    ("aft_conv_small_k11_h384", "22.5", ""),
    ("aft_conv_small_k15_h384", "23.0", ""),
)
TABLE_8 = (
    ("deit_base_384", "86.9", ""),
    (
        "aft_conv_base384_k25_h32",
        "79.7",
        "79.85M with filters of 25 x 25 and the readings that fit Table 7; 79.7 would fit filters of 11 or 15",
    ),
)


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (*equations(), table_1(), *counted(), *trained_claims())


def equations() -> tuple[Claim, ...]:
    """Return the equations of Section 3, each against the library's form."""
    form = "our form against the equation"
    return (
        Claim(
            "Eq. 2",
            "AFT-full: each feature of an output is a mean of that feature over all tokens, with weights exp(key + "
            "bias of the pair), gated by the sigmoid of the query.",
            (Number(form, "equal", measure=identities.aft_full),),
            "Y_t = sig(Q_t) . sum_t' exp(K_t' + w_tt') . V_t' / sum_t' exp(K_t' + w_tt')",
            "functional.aft.aft_full",
        ),
        Claim(
            "Eq. 3",
            "Each feature has its own weights over the tokens, so AFT is attention with as many heads as features. "
            "Before the gate the weights of a row are positive and sum to 1.",
            (Number("outputs outside of the range of the values", "0", measure=identities.aft_rows),),
            "Y_t^i = <a_t^i, V^i>",
            "mixers.aft.AFTFull",
        ),
        Claim(
            "Eq. 4",
            "AFT-local keeps the bias inside a window of |t - t'| < s; outside it is 0, so that every token still "
            "reaches every other.",
            (
                Number(form, "equal", measure=identities.aft_local),
                Number("window as long as the sequence: AFT-full", "equal", measure=identities.aft_local_widest),
                Number("window 0: AFT-simple", "equal", measure=identities.aft_local_zero),
            ),
            "w_tt' = w_tt' if |t - t'| < s else 0",
            "functional.aft.aft_local",
        ),
        Claim(
            "Eq. 5",
            "AFT-simple has no bias: one softmax of the keys over time, whose mean of the values all queries gate.",
            (Number(form, "equal", measure=identities.aft_simple),),
            "Y_t = sig(Q_t) . sum_t' softmax_t'(K)_t' . V_t'",
            "functional.aft.aft_simple",
        ),
        Claim(
            "Eq. 6",
            "AFT-conv has one filter of log-weights per head and one key per head; the mean over all tokens stays. "
            "gamma and beta of the filters begin at 0, so that it begins as AFT-simple.",
            (
                Number(form, "equal", measure=identities.aft_conv),
                Number("a fresh layer: AFT-simple of its keys", "equal", measure=identities.aft_conv_start),
            ),
            "Y_t^i = sig(Q_t^i) . [conv(e^K V, e^w - 1)_t + sum e^K V] / [conv(e^K, e^w - 1)_t + sum e^K]",
            "functional.aft_conv.aft_conv",
        ),
    )


def table_1() -> Claim:
    """Return the table of complexities, for the mixers that the library has."""

    def full(T: int) -> dict[str, Any]:
        return {"max_len": T, "rank": 8}

    def window(T: int) -> dict[str, Any]:
        return {**full(T), "window": 32}

    def taps(T: int) -> dict[str, Any]:
        return {"kernel_size": 11, "heads": 8, "ndim": 1}

    one: dict[str, Any] = {"heads": 1}
    sorts = "our formula counts no sorting, from which the logarithm comes"
    fused = "our softmax calls torch's fused attention, which keeps no T x T weights"
    eager = "our formula is that of the eager form, which keeps T x T weights; the kernels keep none"
    rows: tuple[tuple[str, str, Measure | None, str], ...] = (
        ("Transformer, time", "T^2 d", complexity("attention", width=one), ""),
        ("Reformer, time", "T log T d", None, sorts),
        ("Linear Transformer, time", "T d^2", complexity("linear", width=one), ""),
        ("Performer, time", "T d^2 log d", complexity("performer", width=one), ""),
        ("AFT-simple, time", "T d", complexity("aft_simple"), ""),
        ("AFT-full, time", "T^2 d", complexity("aft_full", full), ""),
        ("AFT-local, window fixed, time", "T d", complexity("aft_local", window), ""),
        ("AFT-conv, taps fixed, time", "T d", complexity("aft_conv", taps), ""),
        ("Transformer, space", "T^2", None, fused),
        ("AFT-simple, space", "T", growth("aft_simple", by="T", of="activations"), ""),
        ("AFT-full, space", "T", None, eager),
        ("AFT-local, space", "T", growth("aft_local", window, by="T", of="activations"), ""),
        ("AFT-conv, space", "T", growth("aft_conv", taps, by="T", of="activations"), ""),
    )
    return Claim(
        "Table 1",
        "AFT needs time and memory that are linear in the length and in the width, but for AFT-full's time. Ours is "
        "how each mixer's own cost formula grows; one head where the paper counts none.",
        tuple(Number(name, printed, measure=measure, why=why) for name, printed, measure, why in rows),
        code="mixers.cost.Cost",
    )


def counted() -> tuple[Claim, ...]:
    """Return the counts of parameters that the paper prints."""
    return (
        Claim(
            "Table 3, parameters",
            "Factors of rank 64 in place of a bias for each of 3,072 x 3,072 pairs shrink a layer's mixing from 9.6M "
            "to 0.6M parameters. Counted are the bias and the projections of queries, keys and values; with the "
            "output projection it would be 9.7M and 0.7M.",
            (
                Number("a bias for each pair", "9.6", "M", per_layer(None)),
                Number("factors of rank 64", "0.6", "M", per_layer(64)),
            ),
            "w_tt' = u_t . v_t'",
            "mixers.aft.AFTLocal",
        ),
        Claim(
            "Table 7, parameters",
            "DeiT's shell with AFT-full (class token, positions, factors of rank 128) or AFT-conv (mean of the "
            "patches, no class token, no positions). Queries, keys and values without bias reproduce most counts.",
            tuple(Number(name, printed, "M", millions(name), why=why) for name, printed, why in TABLE_7),
            code="models.named.aft_conv",
        ),
        Claim(
            "Table 8, parameters",
            "DeiT-base at 384 and AFT-conv with filters of 25 x 25 and 32 heads in it.",
            tuple(Number(name, printed, "M", millions(name), why=why) for name, printed, why in TABLE_8),
            code="models.named.aft_conv",
        ),
        Claim(
            "Section 5.3, tokens",
            "AFT-full in a ViT has a bias for each pair of a class token and the patches of 16 x 16.",
            (
                Number(
                    "1 + (H / 16) / (W / 16) at 224",
                    "2",
                    measure=tokens("aft_full_tiny", 224),
                    why="a misprint: the number of patches is the product of the two, not their ratio",
                ),
            ),
            "T = 1 + (H / 16) (W / 16)",
            "models.vit.ViT",
        ),
    )


def per_layer(rank: int | None) -> Measure:
    """Count the parameters of an AFT-local layer of 256 features over 3,072 tokens, in millions.

    They are its bias and the projections of queries, keys and values, without their biases.
    """

    def count() -> float:
        options = {"window": 256, "rank": rank, "max_len": 3072, "causal": True}
        every = layer("aft_local", 256, **options, qkv_bias=False, out_bias=False)
        return (every - outer(256)) / 1e6

    return count


def outer(dim: int) -> int:
    """Count the parameters of a mixer's output projection."""
    from torch import nn

    return held(on_meta(nn.Linear, dim, dim, bias=False))


PAPER = Paper("aft", "An Attention Free Transformer", "Zhai et al. 2021", "2105.14103", state)
