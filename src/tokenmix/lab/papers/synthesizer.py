"""Synthesizer: rethinking self-attention; with the counts of an independent replication in T5's shell."""

from __future__ import annotations

from typing import Any

from . import identities
from .claim import TOO_LARGE, Claim, Measure, Number, Paper, Trial, stated
from .counts import layer, on_meta
from .rows import timed, trained

SECOND_HAND, NARANG = "second-hand", "Narang et al. 2021, a replication"
VANILLA: dict[str, Any] = {"heads": 12, "qkv_bias": False, "out_bias": False, "bias": {"name": "t5"}}
T5 = {"max_len": 512, "heads": 8, "head_dim": 128, "qkv_bias": False, "out_bias": False}
WMT = {"max_len": 256, "heads": 8, "qkv_bias": False, "out_bias": False}
SHARED: dict[str, Any] = {"share_heads": True, "bias": False}
PLUS: dict[str, Any] = {"join": "plus", "scale": 1.0}
GATED: dict[str, Any] = {"join": "gated", "scale": 1.0}
T5_ROWS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("random", "synthesizer_random", {}, "254"),
    ("random plus", "synthesizer_mixture", {"parts": ["attention", "random"], **PLUS}, "292"),
    ("random plus alpha", "synthesizer_mixture", {"parts": ["attention", "random"], **GATED}, "292"),
    ("dense", "synthesizer_dense", SHARED, "224"),
    ("dense plus", "synthesizer_mixture", {"parts": ["attention", "dense"], **SHARED, **PLUS}, "243"),
    ("dense plus alpha", "synthesizer_mixture", {"parts": ["attention", "dense"], **SHARED, **GATED}, "243"),
    ("factorized random", "synthesizer_factorized_random", {"rank": 16}, "207"),
)
"""Rows of Narang et al.: name, mixer, its options in T5-base, millions of parameters as printed."""
LEAVES = "beside 67M, the second layer of the dense form adds 1.6M and both layers 4.7M, which is 68.6M or 71.7M"
RANDOM_DENSE = "a random table adds 6.3M to the 62M of the dense form, 69M"
WMT_ROWS: tuple[tuple[str, str, dict[str, Any], str, str], ...] = (
    ("fixed random", "synthesizer_random", {"trainable": False}, "61", ""),
    ("random", "synthesizer_random", {}, "67", ""),
    ("dense", "synthesizer_dense", {"hidden": 0, "bias": False}, "62", ""),
    ("random + vanilla", "synthesizer_mixture", {"parts": ["random", "attention"]}, "73", ""),
    ("dense + vanilla", "synthesizer_mixture", {"parts": ["dense", "attention"], "bias": False}, "74", LEAVES),
)
"""Rows of the table on WMT'14: name, mixer, its options, millions of parameters as printed, reason."""


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (*equations(), table_1(), *counts(), *translation(), *pretraining(), *transfer())


def in_t5(name: str, **options: Any) -> Measure:
    """Count T5-base with a mixer in its 24 self-attention layers, in millions, by building it.

    Tied embeddings, 12 encoder and 12 decoder layers, RMS norms, no biases; attention over the source has 12 heads of
    64. Relative biases, 32 for each head, are those of the mixer, in each layer and not in the first of a stack only.
    """

    def count() -> float:
        from ...models import Seq2Seq, Seq2SeqConfig

        across = {"name": "attention", "heads": 12, "qkv_bias": False, "out_bias": False}
        config = Seq2SeqConfig(
            dim=768,
            max_len=512,
            layers=12,
            vocab=32_128,
            mixers=({"name": name, **options},),
            cross_mixers=(across,),
            norm_type="rms",
            mlp_bias=False,
            positions=None,
        )
        return sum(p.numel() for p in on_meta(Seq2Seq, config).parameters()) / 1e6

    return count


def trained_in_wmt(name: str, options: dict[str, Any]) -> Measure:
    """Count the base Transformer of 67M with a mixer in its 12 self-attention layers, in millions."""

    def count() -> float:
        vanilla = layer("attention", 512, qkv_bias=False, out_bias=False)
        return 67.0 + 12 * (layer(name, 512, **WMT, **options) - vanilla) / 1e6

    return count


def logits(name: str, dim: int, length: int, **options: Any) -> Measure:
    """Count what a mixer holds beside the projections of values and outputs."""
    bare = {"max_len": length, "qkv_bias": False, "out_bias": False}
    return lambda: layer(name, dim, **bare, **options) - 2 * dim * dim


def equations() -> tuple[Claim, ...]:
    """Return the forms, each against the library's."""
    form = "our form against the equation"
    return (
        Claim(
            "Dense",
            "Each token alone says, by a small network, how much it attends to each position; no other token is asked.",
            (
                Number(form, "equal", measure=identities.dense),
                Number("logits of a token when all others change", "equal", measure=identities.dense_rows),
            ),
            "B_i = W2 relu(W1 x_i), Y = softmax(B) G(X)",
            "functional.synthesizer.synthesizer_dense",
        ),
        Claim(
            "Random",
            "The weights are the same for every input: a learned table, or one that stays as it was drawn.",
            (Number(form, "equal", measure=identities.random),),
            "B = R, Y = softmax(R) G(X)",
            "functional.synthesizer.synthesizer_random",
        ),
        Claim(
            "Factorised random",
            "The table is a product of two thin ones, 8 columns each in the paper.",
            (Number(form, "equal", measure=identities.factorized_random),),
            "R = R1 R2^T",
            "functional.synthesizer.synthesizer_factorized_random",
        ),
        Claim(
            "Factorised dense",
            "Two small networks give a and b logits, a b = N; one is tiled, the other repeated, and the two are "
            "multiplied.",
            (
                Number(
                    "d^2 + d (a + b), d = 1,024, N = 32, a = 8", "1,060,864", measure=factorized_logits(), derived=True
                ),
            ),
            "B_i[j] = A_i[j mod a] B_i[j div a]",
            "functional.synthesizer.factorized_dense_logits",
        ),
        Claim(
            "Mixture",
            "Logits of several forms are joined with learned weights that sum to 1, before the softmax.",
            (
                Number(form, "equal", measure=identities.mixture),
                Number("weight of the gate at the start", "0.5", "", stated(identities.gate_at_start), "official code"),
            ),
            "Y = softmax(sum_i alpha_i S_i(X)) G(X)",
            "functional.synthesizer.mixture_logits",
        ),
    )


def factorized_logits() -> Measure:
    """Count the logits' parameters of the factorised dense form at 1,024 features and 32 positions."""
    return logits("synthesizer_factorized_dense", 1024, 32, heads=1, factor=8, bias=False)


def table_1() -> Claim:
    """Return the formulas of parameters."""
    one: dict[str, Any] = {"heads": 8, "share_heads": True}
    rows: tuple[tuple[str, str, Measure], ...] = (
        ("dense, d^2 + d N", "1,081,344", logits("synthesizer_dense", 1024, 32, heads=1, bias=False)),
        ("random, N^2", "1,024", logits("synthesizer_random", 1024, 32, **one)),
        ("factorised random, 2 N k", "512", logits("synthesizer_factorized_random", 1024, 32, rank=8, **one)),
        ("dot product, 2 d^2", "2,097,152", dot_product),
    )
    return Claim(
        "Parameters of the logits",
        "What each form holds beside the projections of values and outputs, at d = 1,024, N = 32, k = 8 and one set of "
        "tables for all heads.",
        tuple(Number(name, printed, "", measure, SECOND_HAND, derived=True) for name, printed, measure in rows),
        code="mixers.synthesizer.SynthesizerDense",
    )


def dot_product() -> int:
    """Count the queries' and keys' projections of 1,024 features."""
    return layer("attention", 1024, qkv_bias=False, out_bias=False) - 2 * 1024 * 1024


def counts() -> tuple[Claim, ...]:
    """Return the counts in two shells."""
    both = Number("random + dense", "67", "M", random_and_dense, SECOND_HAND, RANDOM_DENSE)
    return (
        Claim(
            "WMT'14, parameters",
            "The base Transformer of 67M with a Synthesizer in its 12 self-attention layers, 8 heads, N = 256.",
            (
                *(
                    Number(name, printed, "M", trained_in_wmt(mixer, options), SECOND_HAND, why)
                    for name, mixer, options, printed, why in WMT_ROWS
                ),
                both,
            ),
            code="mixers.synthesizer_mixture.SynthesizerMixture",
        ),
        Claim(
            "T5-base, parameters",
            "T5-base with a Synthesizer in its 24 self-attention layers, 8 heads of 128, N = 512; the dense map is "
            "shared by all heads.",
            (
                Number("vanilla", "223", "M", in_t5("attention", **VANILLA), NARANG),
                *(
                    Number(name, printed, "M", in_t5(mixer, **T5, **options), NARANG)
                    for name, mixer, options, printed in T5_ROWS
                ),
                *trained({"DynamicConv": "257", "LightConv": "224"}, "M", source=NARANG),
            ),
            code="mixers.synthesizer.SynthesizerRandom",
        ),
    )


def random_and_dense() -> float:
    """Count the base Transformer of 67M with random and dense logits in its self-attention, in millions.

    The dense map reads the values' width, as in the row of the dense form alone.
    """
    dense = layer("synthesizer_dense", 512, **WMT, hidden=0, bias=False)
    table = layer("synthesizer_random", 512, **WMT) - 2 * 512 * 512
    return 67.0 + 12 * (dense + table - layer("attention", 512, qkv_bias=False, out_bias=False)) / 1e6


def translation() -> tuple[Claim, ...]:
    """Return the claims about translation and language modelling."""
    bleu = {
        "Transformer, as first reported": "27.30 / 38.10",
        "Transformer": "27.67 / 41.57",
        "fixed random": "23.89 / 38.31",
        "random": "27.27 / 41.12",
        "dense": "27.43 / 41.39",
        "random + dense": "27.68 / 41.57",
        "random + vanilla": "28.47 / 41.85",
    }
    ours = {"Transformer": "38.21", "random": "40.60", "dense": "40.88 or 42.40", "random + vanilla": "40.05"}
    return (
        Claim(
            "WMT'14",
            "Learned random weights come within half a point of attention in translation, and a mixture with "
            "attention is better than it (BLEU, English to German / French).",
            trained(bleu, "BLEU", source=SECOND_HAND),
            code="mixers.synthesizer.SynthesizerRandom",
            small="encoder-decoders.md#scores",
            trials=(
                Trial("translation", "synthesizer_random", "worse", "attention"),
                Trial("translation", "random_vanilla", "better", "attention"),
                Trial("translation", "synthesizer_fixed", "worse", "synthesizer_random"),
                Trial("translation", "synthesizer_dense", "better", "synthesizer_random"),
            ),
        ),
        Claim(
            "LM1B",
            "In language modelling, Synthesizers alone are behind attention and dense with attention is ahead. Two "
            "copies of the table disagree about the dense row.",
            trained({**ours, "dense + vanilla": "37.27"}, "perplexity", source=SECOND_HAND),
            code="mixers.synthesizer.SynthesizerDense",
            small="quality.md#further-rows-one-seed",
            trials=(Trial("enwik8_modern_one_seed", "synthesizer_dense", "worse", "attention"),),
        ),
        Claim(
            "LM1B, parameters",
            "Millions of parameters. Language models with both mixers are built, but the shell that is counted is not "
            "described where the table was found.",
            trained({"Transformer": "70", "dense": "53"}, "M", source=SECOND_HAND),
            code="models.lm.LM",
        ),
        Claim(
            "Replication, TaraSPande",
            "BLEU on WMT English to German, perplexity on LM1B and ROUGE-L on CNN/DM of a small training.",
            trained(
                {
                    "vanilla": "27.01 / 38.85 / 19.64",
                    "dense": "23.06 / 35.96 / 15.34",
                    "random": "21.09 / 37.53 / 18.00",
                },
                source="synthesizer by TaraSPande, a replication",
            ),
            code="mixers.synthesizer.SynthesizerRandom",
        ),
    )


def pretraining() -> tuple[Claim, ...]:
    """Return the claims about T5 and what follows it."""
    quality = {
        "Transformer": "1.865",
        "DynamicConv": "2.040",
        "LightConv": "1.972",
        "random": "1.972",
        "random + vanilla": "1.849",
    }
    steps = {"Transformer": "3.90", "DynamicConv": "2.65", "random": "4.26"}
    better = "the second-hand rows 2.040 and 1.972 give 3.3 %"
    return (
        Claim(
            "C4",
            "In masked language modelling on C4 in T5-base, random weights are better than DynamicConv, and a mixture "
            "with attention better than attention (log perplexity).",
            (
                *trained(quality, "log ppl", source=SECOND_HAND),
                Number("random better than DynamicConv by", "3.5", "%", why=better, without=TOO_LARGE),
            ),
            code="mixers.synthesizer.SynthesizerRandom",
            small="text.md#scores",
            trials=(Trial("masked_sst2", "synthesizer_random", "worse", "attention"),),
        ),
        Claim(
            "C4, speed",
            "Random weights train 60 % faster than DynamicConv.",
            (
                *timed(steps, "steps/s", source=SECOND_HAND),
                Number("random faster than DynamicConv by", "about 60", "%", why="the rows above give 60.8 %"),
            ),
            code="mixers.synthesizer.SynthesizerRandom",
            small="encoder-decoders.md#speed",
        ),
    )


def transfer() -> tuple[Claim, ...]:
    """Return the claims about tasks after pretraining, and their replication."""
    glue = {
        "T5-base": "83.5 / 70.3",
        "random, GLUE": "75.1",
        "DynamicConv, GLUE": "69.4",
        "random + vanilla": "84.1 / 72.2",
    }
    final = {
        "vanilla": "2.182 / 1.838",
        "dense": "2.334 / 1.962",
        "dense plus": "2.191 / 1.840",
        "dense plus alpha": "2.180 / 1.828",
        "factorized random": "2.341 / 1.968",
        "random": "2.326 / 2.009",
        "random plus": "2.189 / 1.842",
        "random plus alpha": "2.186 / 1.828",
        "DynamicConv": "2.403 / 2.047",
        "LightConv": "2.370 / 1.989",
    }
    score = {
        "vanilla": "71.66",
        "dense": "61.03",
        "dense plus": "73.98",
        "dense plus alpha": "74.25",
        "factorized random": "62.78",
        "random": "54.27",
        "random plus": "73.32",
        "random plus alpha": "75.24",
        "DynamicConv": "58.30",
        "LightConv": "63.07",
    }
    return (
        Claim(
            "GLUE and SuperGLUE",
            "Alone, Synthesizers lose clearly on pairs of sentences; with attention they are better than it.",
            trained(glue, source=SECOND_HAND),
            code="lab.recipes.documents",
            small="text.md#scores",
            trials=(Trial("sentences_sst2", "synthesizer_random", "worse", "attention"),),
        ),
        Claim(
            "Dialogue, summarisation",
            "On PersonaChat the dense form alone is best; on CNN/DM dense with attention is.",
            trained({"directions": "a direction"}, source=SECOND_HAND),
            code="lab.recipes.translation",
            small="encoder-decoders.md#scores",
            trials=(Trial("docstrings", "dense_vanilla", "better", "attention"),),
        ),
        Claim(
            "Replication, Narang et al.",
            "T5-base on C4: log perplexity early / at the end. Random is behind dense, and both behind attention.",
            trained(final, "log ppl", source=NARANG),
            code="mixers.synthesizer.SynthesizerRandom",
        ),
        Claim(
            "Replication, Narang et al., SuperGLUE",
            "The same models fine-tuned.",
            trained(score, source=NARANG),
            code="lab.recipes.documents",
        ),
    )


PAPER = Paper(
    "synthesizer",
    "Synthesizer: Rethinking Self-Attention for Transformer Models",
    "Tay et al. 2020",
    "2005.00743",
    state,
)
