"""Beyond Self-attention: External attention, its segmentation head and EAMLP."""

from __future__ import annotations

from . import identities
from .claim import Claim, Measure, Number, Paper
from .counts import complexity, layer, millions, option, parameters
from .rows import timed, trained

SECOND_HAND, OFFICIAL = "second-hand", "official code"
OFFICIAL_COUNTS = {
    "eamlp_7": "6,146,638",
    "eamlp_10": "8,540,110",
    "eamlp_12": "10,135,758",
    "eamlp_14": "29,877,070",
    "eamlp_19": "54,559,054",
    "eamlp_24": "89,456,590",
}
"""Parameters of the official code, fixed positions included, by the names of our models."""


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (*equations(), *counts(), *trained_claims())


def equations() -> tuple[Claim, ...]:
    """Return the equations, each against the library's form."""
    return (
        Claim(
            "External attention",
            "Tokens read a small memory that is learned and the same for all inputs, in place of one another. The "
            "cost is linear in the tokens.",
            (
                Number("our form against the equation", "equal", measure=identities.external),
                Number("grows as", "T d", measure=complexity("external")),
                Number("slots by default", "64", measure=option("external", "slots")),
            ),
            "A = Norm(F M_k^T), Y = A M_v",
            "functional.external.external",
        ),
        Claim(
            "Normalisation",
            "First a softmax over the tokens in each slot, then each token's weights divided by their sum over the "
            "slots, so that the weights of a token sum to 1.",
            (Number("sums of the rows against 1", "equal", measure=identities.external_rows),),
            "a_ts = softmax_t(F M_k^T), a_ts / sum_s a_ts",
            "functional.external.weights",
        ),
        Claim(
            "Multi-head",
            "The multi-head form widens the tokens four times; all heads share one pair of memories of 64 slots. The "
            "formula is that of the official code, at 384 features and 6 heads.",
            (
                Number(
                    "d 4d + 4d + (e S + S) + (S e + e) + 4d d + d",
                    f"{per_layer(384, 64):,}",
                    measure=multihead(384, 6),
                    source=OFFICIAL,
                    derived=True,
                ),
            ),
            code="mixers.external.ExternalMultihead",
        ),
    )


def per_layer(dim: int, width: int, slots: int = 64) -> int:
    """Compute the official formula for the parameters of a multi-head layer."""
    return 8 * dim * dim + 5 * dim + 2 * width * slots + slots + width


def multihead(dim: int, heads: int) -> Measure:
    """Count the parameters of our multi-head layer."""
    return lambda: layer("external_multihead", dim, heads=heads)


def counts() -> tuple[Claim, ...]:
    """Return the counts of EAMLP."""
    return (
        Claim(
            "EAMLP, official code",
            "External attention in the shell of T2T-ViT; the counts are those of the official code when built, with "
            "its table of fixed positions.",
            tuple(Number(name, count, "", parameters(name), OFFICIAL) for name, count in OFFICIAL_COUNTS.items()),
            code="models.eamlp.EAMLP",
        ),
        Claim(
            "EAMLP, printed sizes",
            "Parameters of EAMLP-14 and EAMLP-19 in millions.",
            (
                Number("eamlp_14", "30", "M", millions("eamlp_14"), SECOND_HAND),
                Number("eamlp_19", "55", "M", millions("eamlp_19"), SECOND_HAND),
            ),
            code="models.named.eamlp",
        ),
    )


def trained_claims() -> tuple[Claim, ...]:
    """Return the claims that need training."""
    return (
        Claim(
            "EAMLP on ImageNet",
            "Top-1 at 224, and of EAMLP-7 at 384.",
            (
                *trained({"EAMLP-14": "78.9", "EAMLP-19": "79.4"}, "%", source=SECOND_HAND),
                *trained({"EAMLP-7 at 384": "71.7"}, "%", source=OFFICIAL),
            ),
            code="models.eamlp.EAMLP",
        ),
        Claim(
            "EAMLP, speed",
            "Images per second of EAMLP-14 and EAMLP-19.",
            timed({"EAMLP-14": "711", "EAMLP-19": "464"}, "img/s", source=SECOND_HAND),
            code="models.eamlp.EAMLP",
        ),
        Claim(
            "Segmentation",
            "External attention between two 1 x 1 convolutions on a backbone's features segments as well as "
            "self-attention; the numbers are not at hand.",
            trained({"accuracies": "not at hand"}),
            code="models.segmentation.Segmenter",
            small="dense.md#measured",
        ),
        Claim(
            "Generation",
            "External attention in a generator of images (a GAN) helps; the numbers are not at hand. "
            "Here it stands in a diffusion transformer, not in a GAN.",
            trained({"scores": "not at hand"}),
            code="lab.recipes.image_diffusion",
            small="generation.md#measured",
        ),
        Claim(
            "Point clouds",
            "External attention classifies and segments point clouds as well as self-attention; the numbers are not at "
            "hand.",
            trained({"accuracies": "not at hand"}),
            code="models.points.PointClassifier",
            small="points.md#measured",
        ),
        Claim(
            "Detection",
            "External attention helps detection too; the numbers are not at hand.",
            trained({"accuracies": "not at hand"}, built=False),
        ),
    )


PAPER = Paper(
    "external",
    "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks",
    "Guo et al. 2021",
    "2105.02358",
    state,
)
