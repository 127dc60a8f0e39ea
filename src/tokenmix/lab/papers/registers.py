"""Vision Transformers Need Registers: learnable tokens that take over what outlier patches did."""

from __future__ import annotations

from .claim import Claim, Measure, Number, Paper
from .counts import held, named, tokens
from .rows import trained

SECOND_HAND, OFFICIAL = "second-hand", "official weights"
ADDED = {"deit_tiny": 192, "deit_small": 384, "deit_base": 768}


def added(name: str) -> Measure:
    """Count the parameters that four registers add to a named DeiT."""
    return lambda: held(named(f"{name}_registers")) - held(named(name))


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (*built(), *tokens_hold(), *unbuilt())


def built() -> tuple[Claim, ...]:
    """Return the claims about registers in a ViT, and about outliers."""
    return (
        Claim(
            "Registers",
            "N learnable tokens, four by default, join the patches without positions and are dropped at the output.",
            (
                *(
                    Number(f"parameters added to {name}, 4 d", f"{4 * dim:,}", "", added(name), derived=True)
                    for name, dim in ADDED.items()
                ),
                Number(
                    "tokens at 224, patches of 14, class token and 4 registers",
                    "261",
                    measure=tokens("deit_small_registers", 224, patch=14),
                    source=OFFICIAL,
                    derived=True,
                ),
            ),
            code="models.vit.ViT",
        ),
        Claim(
            "Outliers",
            "Large models trained for long have a few patches whose output norm is several times the others': beyond "
            "150 where most lie between 0 and 100 (DINOv2 ViT-g). They appear in the middle layers, after a third of "
            "training, and only in the large sizes of DINOv2.",
            trained(
                {
                    "patches beyond 150": "2.37",
                    "norms of the others": "0 to 100",
                    "from layer, of 40": "15",
                    "DINO ViT-B/16, outliers": "none",
                }
            ),
            code="lab.anatomy.outliers.find_outliers",
            small="anatomy.md#small-models-trained-here",
        ),
        Claim(
            "Number of registers",
            "One register removes the outliers; dense tasks have a best number, ImageNet gains with more (0, 1, 2, 4, "
            "8, 16 on DINOv2 ViT-L/14).",
            trained({"registers that suffice": "1"}),
            code="models.vit.ViT",
        ),
    )


def tokens_hold() -> tuple[Claim, ...]:
    """Return the claims about what single tokens hold, which `tokenmix look tokens` measures."""
    return (
        Claim(
            "Redundancy",
            "Outlier patches resemble their four neighbours right after the patch embedding more than other patches.",
            trained({"similarity; the numbers are not at hand": "a direction"}),
            code="lab.anatomy.outliers.redundancy",
        ),
        Claim(
            "What outliers hold",
            "A linear probe finds position and pixels worse in outlier patches than in others, and the class of the "
            "image, by logistic regression from one random token, better.",
            trained({"probes; the numbers are not at hand": "a direction"}),
            code="lab.anatomy.probes",
        ),
        Claim(
            "Attention maps",
            "With registers, the maps of the class token and of the registers are smooth; without, outliers show.",
            trained({"smoothness": "a direction"}),
            code="lab.anatomy.looks.token_looks",
        ),
        Claim(
            "Table 3",
            "With registers, objects are found in the features without labels (LOST, CorLoc on VOC07 / VOC12 / "
            "COCO20k), but not with OpenCLIP.",
            (
                *trained(
                    {
                        "DeiT-III": "11.7 / 13.1 / 10.7",
                        "DeiT-III + registers": "27.1 / 32.7 / 25.1",
                        "OpenCLIP": "38.8 / 44.3 / 31.0",
                        "OpenCLIP + registers": "37.1 / 42.0 / 27.9",
                        "DINOv2, VOC12 / COCO20k": "40.2 / 26.9",
                        "DINOv2 + registers, VOC12 / COCO20k": "60.0 / 42.0",
                        "DINO, VOC07": "61.9",
                    },
                    "%",
                    source=SECOND_HAND,
                ),
                *trained({"DINOv2, VOC07": "35.3", "DINOv2 + registers, VOC07": "55.4"}, "%"),
            ),
            code="lab.anatomy.lost.discover",
        ),
    )


def unbuilt() -> tuple[Claim, ...]:
    """Return the tables of models and tasks that the library does not train."""
    return (
        Claim(
            "Table 2a",
            "With registers, frozen features are as good or better: ImageNet top-1 / ADE20k mIoU / NYUd rmse.",
            trained(
                {
                    "DeiT-III": "84.7 / 38.9 / 0.511",
                    "DeiT-III + registers": "84.7 / 39.1 / 0.512",
                    "OpenCLIP": "78.2 / 26.6 / 0.702",
                    "OpenCLIP + registers": "78.1 / 26.7 / 0.661",
                    "DINOv2": "84.3 / 46.6 / 0.378",
                    "DINOv2 + registers": "84.8 / 47.9 / 0.366",
                    "OpenCLIP zero-shot, without and with": "59.9 / 60.1",
                },
                source=SECOND_HAND,
                built=False,
            ),
        ),
        Claim(
            "Released weights",
            "k-NN / linear top-1 on ImageNet, without and with registers. A second table of the same source differs "
            "by up to 0.2.",
            trained(
                {
                    "S": "79.0 / 81.1, 79.1 / 80.9",
                    "B": "82.1 / 84.5, 82.0 / 84.6",
                    "L": "83.5 / 86.3, 83.8 / 86.7",
                    "g": "83.5 / 86.5, 83.7 / 87.1",
                },
                "%",
                source=OFFICIAL,
                built=False,
            ),
        ),
    )


PAPER = Paper("registers", "Vision Transformers Need Registers", "Darcet et al. 2024", "2309.16588", state)
