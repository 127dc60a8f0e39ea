"""Pyramid Vision Transformer: spatial reduction attention in four stages."""

from __future__ import annotations

from . import identities
from .claim import Claim, Measure, Number, Paper, stated
from .counts import giga_macs, millions, named, parameters
from .rows import of_recipe, trained

SECOND_HAND, OFFICIAL = "second-hand", "official code"
SIZES = ("tiny", "small", "medium", "large")
EXACT = {"pvt_tiny": "13,229,288", "pvt_small": "24,485,864", "pvt_medium": "44,208,104", "pvt_large": "61,369,320"}
MILLIONS = {"pvt_tiny": "13.2", "pvt_small": "24.5", "pvt_medium": "44.2", "pvt_large": "61.4"}
GIGA = {"pvt_tiny": "1.933", "pvt_small": "3.816", "pvt_medium": "6.659", "pvt_large": "9.814"}


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (
        Claim(
            "Spatial reduction attention",
            "Keys and values are made from a map that a strided convolution has reduced R times along each side, and "
            "a norm. Scores and their use then cost R^2 times fewer multiply-accumulates.",
            (
                Number("our form against the equation", "equal", measure=identities.reduced_attention),
                Number(
                    "2 (HW) (HW / R^2) C at 56 x 56, R = 8, C = 64", "19,668,992", measure=stated(pairs), derived=True
                ),
            ),
            "SRA(Q, K, V) = attention(Q, Norm(reduce(K)), Norm(reduce(V)))",
            "contrib.spatial_reduction.spatial_reduction",
        ),
        Claim(
            "Stages",
            "Maps of 56, 28, 14 and 7 patches a side at 224; the class token enters in the last stage, which has 50 "
            "tokens.",
            (
                *(Number(f"patches a side, stage {i + 1}", str(n), "", side(i), OFFICIAL) for i, n in enumerate(SIDES)),
                Number("tokens of stage 4", "50", "", stated(last_tokens), OFFICIAL),
            ),
            code="models.pyramid.Pyramid",
        ),
        Claim(
            "Parameters",
            "The four sizes, printed in millions, and to the digit as the official code builds them.",
            (
                *(Number(name, printed, "M", millions(name)) for name, printed in MILLIONS.items()),
                *(Number(f"{name}, exact", exact, "", parameters(name), OFFICIAL) for name, exact in EXACT.items()),
            ),
            code="models.named.pvt",
        ),
        Claim(
            "Multiply-accumulates",
            "Of one image of 224 x 224, in billions.",
            (
                Number("pvt_tiny, printed", "1.9", "G", giga_macs("pvt_tiny"), SECOND_HAND),
                *(Number(name, printed, "G", giga_macs(name), OFFICIAL) for name, printed in GIGA.items()),
            ),
            code="models.macs.macs",
        ),
        Claim(
            "ImageNet",
            "Top-1 of the four sizes with DeiT's training.",
            (
                *of_recipe("pvt_imagenet", "", ("top1",), "%", "{:.1f}"),
                *trained({"released weights of small, top-1 / top-5": "79.764 / 94.950"}, "%", source=OFFICIAL),
            ),
            code="lab.recipes.pvt_imagenet",
            command="tokenmix train pvt_imagenet --out runs/pvt --row tiny --train.steps 100",
        ),
        Claim(
            "Detection",
            "As a backbone of RetinaNet it finds more than a ResNet-50 (AP).",
            (
                *trained({"PVT": "40.4", "ResNet-50": "36.3"}, "AP", built=False),
                *trained({"PVT-tiny, trained once over": "36.6"}, "AP", source=SECOND_HAND, built=False),
            ),
        ),
    )


SIDES = (56, 28, 14, 7)


def side(stage: int) -> Measure:
    """Return the patches along one side in a stage of PVT-tiny at 224."""
    return stated(lambda: 224 // named("pvt_tiny").config.strides[stage])


def last_tokens() -> int:
    """Count the tokens of the last stage of PVT-tiny at 224."""
    model = named("pvt_tiny")
    return int(model.stages[-1].prefix + (224 // model.config.strides[-1]) ** 2)


def pairs() -> int:
    """Count the multiply-accumulates between queries and reduced keys, and with values, in stage 1 at 224."""
    from ...mixers import build_mixer
    from .counts import on_meta

    mixer = on_meta(build_mixer, "spatial_reduction", 64, heads=1, ratio=8, ndim=2)
    T = 56 * 56
    return int(
        mixer.cost(T).mixing // 2 - T * 64 * 64
    )  # the convolution reads each cell once for each pair of features


PAPER = Paper(
    "pvt",
    "Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions",
    "Wang et al. 2021",
    "2102.12122",
    state,
)
