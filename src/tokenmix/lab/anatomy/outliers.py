"""Which patches are outliers, and how much they resemble their neighbours (Darcet et al. 2024, arXiv 2309.16588)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...errors import MixerError
from ..report.norms import Norms, outlier_cutoff, share_above
from .subject import ProbedModel, read


class Outliers(NamedTuple):
    """The patches whose norm after the last layer is above a cutoff.

    Attributes:
        cutoff: the norm.
        rule: how it was chosen, in words.
        mask: (B, H, W) bool.
        by_layer: (layers + 1,) share of patches above the cutoff before the first block and after each.
    """

    cutoff: float
    rule: str
    mask: Tensor
    by_layer: Tensor

    @property
    def share(self) -> float:
        """Return the share of patches that are outliers."""
        return float(self.mask.double().mean())


def find_outliers(norms: Norms, *, cutoff: float | None = None, top: float | None = None) -> Outliers:
    """Mark the patches with norms above a cutoff after the last layer.

    By default the cutoff is Q3 + 3 (Q3 - Q1), Tukey's far fence; the paper chose 150 for DINOv2 ViT-g by hand.

    Args:
        cutoff: a norm to use instead.
        top: percent of the patches, those with the largest norms, to compare with the others where no norm stands out.

    Raises:
        MixerError: both are given, ``cutoff`` is negative, or ``top`` is not between 0 and 50.
    """
    last = norms.patches[-1]
    if cutoff is not None and top is not None:
        raise MixerError("look tokens: --cutoff and --top exclude each other; give one of them.")
    if cutoff is not None and not 0 <= cutoff < float("inf"):
        raise MixerError(f"look tokens: --cutoff is a norm, at least 0, got {cutoff}.")
    if top is not None and not 0 < top < 50:
        raise MixerError(f"look tokens: --top is a percentage between 0 and 50, got {top}.")
    rule = "the upper quartile plus three times the interquartile range"
    if cutoff is not None:
        rule = "as given"
    elif top is not None:
        count = min(max(1, round(top / 100 * last.numel())), last.numel() - 1)
        cutoff = float(last.flatten().sort().values[-count - 1])
        rule = f"chosen so that {top:g} % of the patches lie above it, whether they stand out or not"
    else:
        cutoff = outlier_cutoff(last)
    return Outliers(cutoff, rule, last > cutoff, share_above(norms.patches, cutoff))


class StepNorms(NamedTuple):
    """The norms of patches at one step of training, before the first layer and after each.

    Attributes:
        median, largest: by layer.
        outliers: share of patches above the fence of ``find_outliers`` after the last layer, at this step.
    """

    median: list[float]
    largest: list[float]
    outliers: float


def norms_by_step(
    subject: ProbedModel, images: Tensor, tell: Callable[[str], None] = lambda line: None
) -> dict[int, StepNorms]:
    """Measure the norms of patches at each step of training that the model's run has kept, if it kept more than one."""
    found = {}
    for step, then in subject.at_steps():
        tell(f"look tokens: reading {len(images)} images at step {step:,}")
        norms = read(then, images, 0).norms
        layers = norms.patches.flatten(1)
        at_end = find_outliers(norms)
        found[step] = StepNorms(layers.median(1).values.tolist(), layers.amax(1).tolist(), at_end.share)
    return found if len(found) > 1 else {}


class Redundancy(NamedTuple):
    """The cosine similarity of patches with their neighbours at the patch embedding: each (B, H, W), and the means.

    A mean is None where there is no such patch.
    """

    similarity: Tensor
    outliers: float | None
    others: float | None


def redundancy(similarity: Tensor, mask: Tensor) -> Redundancy:
    """Compare outliers with other patches before the first layer: s_i = mean over its 4 neighbours j of cos(x_i, x_j).

    ``similarity`` (B, H, W) is ``report.norms.patch_similarity`` of the embedded patches x, without positions; ``mask``
    (B, H, W) marks the outliers. An outlier of the paper resembles its neighbours, so that what it held can be dropped.
    """
    return Redundancy(similarity, mean_of(similarity[mask]), mean_of(similarity[~mask]))


def mean_of(values: Tensor) -> float | None:
    """Return the mean of finite values, or None if there are none."""
    known = values[values.isfinite()]
    return float(known.double().mean()) if known.numel() else None
