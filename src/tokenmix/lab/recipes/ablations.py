"""The ablations of AFT's appendix on ImageNet-1k, in the DeiT architecture.

They are Tables 9 to 12 of arXiv 2105.14103, and the global connectivity of Sec. 5.3. The tables' numbers could not be
recovered; the text says that a window of 7 without the global sum reaches 79.9 against 80.8. The rows ``parts/`` are
ours: filters of either sign, no division, and neither of both nor a global sum.

``smoke`` has patches of one pixel, so that its 8 x 8 patches hold filters of 15 x 15, and a sixth of the width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...models import MODELS
from ..train.config import RunConfig
from .images import ImageRow, deit_training
from .recipe import Recipe

SIGNED, WHOLE = {"filters": "signed"}, {"divide": False}
SMALL, HEADS = MODELS["aft_conv_small_k11_h384"], 384
KERNEL = ("kernel_size",)
NARROW = 6
"""What the width of a model is divided by at ``smoke``."""


def conv(kernel_size: int, **options: object) -> Any:
    """Return AFT-conv small with 384 heads."""
    return replace(
        SMALL, mixers=({"name": "aft_conv", "kernel_size": kernel_size, "heads": HEADS, "qkv_bias": False, **options},)
    )


def rows() -> dict[str, ImageRow]:
    """Return every row by name."""
    found = {}
    for size in ("tiny", "small"):
        config = MODELS[f"aft_full_{size}"]
        found[f"table9/{size}_factors"] = ImageRow(f"Table 9: AFT-full {size}, factors of rank 128", config)
        plain = replace(config, mixers=({**config.mixers[0], "rank": None},))
        found[f"table9/{size}_plain"] = ImageRow(f"Table 9: AFT-full {size}, a plain table of pairs", plain)
    found["table10/reparameterised"] = ImageRow("Table 10: AFT-conv small 11, gamma and beta", conv(11), keeps=KERNEL)
    found["table10/raw"] = ImageRow("Table 10: AFT-conv small 11, raw filters", conv(11, reparam=False), keeps=KERNEL)
    for k in (3, 5, 7, 9, 11, 13, 15):
        found[f"table11/k{k}"] = ImageRow(f"Table 11: AFT-conv small, kernel {k}", conv(k), keeps=KERNEL)
    for k in (11, 15):
        found[f"table12/k{k}_query"] = ImageRow(
            f"Table 12: AFT-conv small, kernel {k}, with the query", conv(k), keeps=KERNEL
        )
        found[f"table12/k{k}_no_query"] = ImageRow(
            f"Table 12: AFT-conv small, kernel {k}, without the query", conv(k, gate=None), keeps=KERNEL
        )
    found["global/k7"] = ImageRow("Sec. 5.3: kernel 7 and the sum over all tokens", conv(7), {"top1": 80.8})
    found["global/k7_window_only"] = ImageRow(
        "Sec. 5.3: kernel 7, nothing outside the window", conv(7, outside="none"), {"top1": 79.9}
    )
    found["parts/k7_signed"] = ImageRow("Kernel 7, signed filters", conv(7, **SIGNED))
    found["parts/k7_no_division"] = ImageRow("Kernel 7, without the division", conv(7, **WHOLE))
    found["parts/k7_depthwise"] = ImageRow(
        "Kernel 7, signed, nothing outside, no division: a depthwise convolution of exp(k) v",
        conv(7, **SIGNED, **WHOLE, outside="none"),
    )
    return found


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size, with DeiT's recipe."""
    return deit_training(row, size, patch=1, dim=row.model.dim // NARROW)


RECIPE = Recipe(
    "ablations",
    "AFT's appendix: factors, reparameterisation, kernel size, query, global connectivity",
    rows(),
    "table11/k7",
    build,
    {
        "table10/reparameterised": "table11/k11",
        "table12/k11_query": "table11/k11",
        "table12/k15_query": "table11/k15",
        "global/k7": "table11/k7",
    },
)
