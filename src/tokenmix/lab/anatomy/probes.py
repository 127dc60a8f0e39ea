"""Linear probes: what a single token tells of its position, of its pixels and of the class of its image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ..train.mask_scores import confusion_matrix, intersection_over_union
from .outliers import mean_of

STRENGTH = 1e-3
"""Weight of the penalty of a ridge regression, per token."""
CHUNK = 4096  # tokens at a time
LEAST = 8  # images below which nothing is probed
NEIGHBOURS, TEMPERATURE = 20, 0.07  # of k-NN, as in Wu et al. 2018 (arXiv 1805.01978) and DINO
ONE_CLASS = "the images to fit on are all of one class; give more"


class Linear(NamedTuple):
    """A fitted linear map: y = (x - centre) / scale @ weights + bias."""

    centre: Tensor
    scale: Tensor
    weights: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Map features (n, D) to predictions (n, K) in float64."""
        return (x.double() - self.centre) / self.scale @ self.weights + self.bias


def ridge(x: Tensor, y: Tensor, strength: float = STRENGTH, *, classes: int | None = None) -> Linear:
    """Fit W = (X^T X + strength n I)^-1 X^T Y in float64, in closed form, a few tokens at a time.

    X are the features (n, D), less their mean and divided by their standard deviation; Y the targets (n, K), less
    their mean, which is the bias. Features that are constant have no influence.

    Args:
        classes: y are integers (n,) below this number, each of which stands for a vector with one 1.
    """
    n, width = len(x), y.shape[-1] if classes is None else classes

    def target(part: Tensor) -> Tensor:
        return part.double() if classes is None else F.one_hot(part, classes).double()

    centre = torch.stack([part.double().sum(0) for part in x.split(CHUNK)]).sum(0) / n
    bias = torch.stack([target(part).sum(0) for part in y.split(CHUNK)]).sum(0) / n
    squares = torch.stack([(part.double() - centre).square().sum(0) for part in x.split(CHUNK)]).sum(0) / n
    scale = torch.where(squares > 1e-18 * squares.max(), squares.sqrt(), torch.inf)
    gram, cross = centre.new_zeros(x.shape[1], x.shape[1]), centre.new_zeros(x.shape[1], width)
    for part, these in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        standard = (part.double() - centre) / scale
        gram += standard.mT @ standard
        cross += standard.mT @ (target(these) - bias)
    gram.diagonal().add_(strength * n)
    return Linear(centre, scale, torch.linalg.solve(gram, cross), bias)


class Compared(NamedTuple):
    """A number for outliers and for the other patches; None where there is none."""

    outliers: float | None
    others: float | None


def compare_means(values: Tensor, mask: Tensor) -> Compared:
    """Return the means of values (n,) over outliers and over the others."""
    return Compared(mean_of(values[mask]), mean_of(values[~mask]))


class Probes(NamedTuple):
    """What linear probes of the patches' tokens find, on images that they were not fitted on.

    Attributes:
        position: share of tokens whose position is found exactly.
        distance: mean distance between found and true position, in patches.
        pixels: mean L2 error of the patch's pixels, as the model receives them.
        mean_pixels: the same error for the mean patch, which needs no token.
        chance: share of positions found by guessing.
    """

    position: Compared
    distance: Compared
    pixels: Compared
    mean_pixels: Compared
    chance: float


def halves(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Divide n images at random into those to fit on and those to score."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[: n // 2].sort().values, order[n // 2 :].sort().values


def position_probe(fit: Tensor, score: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Predict the position of each token with a linear map onto the H W positions, one-hot, by the largest output.

    Args:
        fit, score: tokens (B, H W, D) of images to fit on and of others to score.

    Returns:
        Whether each scored token's position is right, and the distance of the found one in patches, both (B H W,).
    """
    rows, columns = grid
    there = torch.arange(rows * columns, device=fit.device)
    probe = ridge(fit.flatten(0, 1), there.repeat(len(fit)), classes=rows * columns)
    found = torch.cat([probe(part).argmax(1) for part in score.flatten(0, 1).split(CHUNK)])
    true = there.repeat(len(score))
    down, across = found // columns - true // columns, found % columns - true % columns
    return (found == true).double(), (down.square() + across.square()).double().sqrt()


def pixel_probe(fit: Tensor, fit_pixels: Tensor, score: Tensor, score_pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Predict the pixels of each token's own patch (B, H W, C p p) linearly from its token (B, H W, D).

    Returns:
        The L2 error of each scored patch, and that of the mean patch of the images that were fitted, both (B H W,).
    """
    probe, errors, plain = ridge(fit.flatten(0, 1), fit_pixels.flatten(0, 1)), [], []
    tokens, true = score.flatten(0, 1), score_pixels.flatten(0, 1)
    for part, pixels in zip(tokens.split(CHUNK), true.split(CHUNK), strict=True):
        errors.append((probe(part) - pixels).norm(dim=1))
        plain.append((probe.bias - pixels).norm(dim=1))
    return torch.cat(errors), torch.cat(plain)


def patch_pixels(images: Tensor, side: tuple[int, int]) -> Tensor:
    """Cut images (B, C, H p, W p) into patches (B, H W, C p p)."""
    return F.unfold(images, side, stride=side).mT


def probe_tokens(tokens: Tensor, pixels: Tensor, mask: Tensor, grid: tuple[int, int], *, seed: int = 0) -> Probes | str:
    """Probe patches' tokens (B, H W, D) for positions and for pixels (B, H W, C p p).

    Half of the images are fitted, the others scored; outliers, marked in ``mask`` (B, H W), are part of both. Returns
    why nothing was probed where there are too few images.
    """
    if len(tokens) < LEAST:
        return f"{len(tokens)} images are too few for probes; give at least {LEAST}"
    fit, score = halves(len(tokens), seed)
    marked = mask[score].flatten()
    right, distance = position_probe(tokens[fit], tokens[score], grid)
    error, plain = pixel_probe(tokens[fit], pixels[fit], tokens[score], pixels[score])
    position, near, pixel, mean = (compare_means(values, marked) for values in (right, distance, error, plain))
    return Probes(position, near, pixel, mean, 1 / (grid[0] * grid[1]))


class Classified(NamedTuple):
    """How often the class of an image is found from one of its tokens.

    Attributes:
        accuracy: kind of token -> share of images classified rightly.
        chance: share of the most frequent class.
        fitted, scored: numbers of images.
    """

    accuracy: dict[str, float]
    chance: float
    fitted: int
    scored: int


def random_tokens(tokens: Tensor, mask: Tensor, seed: int = 0) -> Tensor:
    """Draw one token (B, D) of each image from those that ``mask`` (B, N) marks; each image must have one."""
    draws = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)).to(mask.device)
    return tokens[torch.arange(len(tokens), device=mask.device), draws.masked_fill(~mask, -1.0).argmax(1)]


def classify(fit: Tensor, fit_labels: Tensor, score: Tensor, score_labels: Tensor) -> float:
    """Return the accuracy of logistic regression from features (n, D) to classes, on images that it did not see."""
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        raise MixerError(
            "look tokens: classifying tokens needs scikit-learn: pip install 'tokenmix[vision]'."
        ) from None
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    model.fit(fit.double().cpu().numpy(), fit_labels.cpu().numpy())
    return float(model.score(score.double().cpu().numpy(), score_labels.cpu().numpy()))


def _explain_lack(labels: Tensor | None) -> tuple[str, int]:
    """Return why the classes of images cannot be probed, "" if they can, and how many images that takes."""
    if labels is None:
        return "the images have no labels; give a labelled set", 0
    classes = len(labels.unique())
    least = max(2 * LEAST, 4 * classes)
    few = len(labels) < least or classes < 2
    said = f"{len(labels)} images of {classes} classes are too few; {least} of at least 2 classes are needed"
    return said if few else "", least


def class_probe(
    patches: Tensor, prefix: Tensor, names: Sequence[str], mask: Tensor, labels: Tensor | None, *, seed: int = 0
) -> Classified | str:
    """Classify images from one token each: a random outlier, another random patch, each token before the patches.

    The mean of all patches is beside them. Where enough images have an outlier, all tokens are compared on these images
    alone; otherwise no outlier is, and all images are used.

    Args:
        patches: (B, H W, D); ``prefix`` (B, n, D) with ``names``.
        mask: (B, H W), the outliers.
        labels: (B,), or None.

    Returns:
        Accuracies, or why there are none.
    """
    why, least = _explain_lack(labels)
    if labels is None or why:
        return why
    having = mask.any(1) & ~mask.all(1)
    outliers = int(having.sum()) >= least and len(labels[having].unique()) > 1
    used = having if outliers else torch.ones_like(having)
    patches, prefix, mask, labels = patches[used], prefix[used], mask[used], labels[used]
    tokens = {"mean of all patches": patches.mean(1)}
    tokens |= {name: prefix[:, i] for i, name in enumerate(names)}
    if outliers:
        tokens["one outlier"] = random_tokens(patches, mask, seed)
    tokens["one other patch" if outliers else "one patch"] = random_tokens(
        patches, ~mask if outliers else torch.ones_like(mask), seed
    )
    fit, score = halves(len(labels), seed)
    if len(labels[fit].unique()) < 2:
        return ONE_CLASS
    found = {name: classify(x[fit], labels[fit], x[score], labels[score]) for name, x in tokens.items()}
    chance = float(labels[score].bincount().max() / len(score))
    return Classified(found, chance, len(fit), len(score))


class ByDepth(NamedTuple):
    """How often the class of an image is found from the tokens before the first layer and after each.

    Attributes:
        linear, nearest: kind of token -> accuracy by layer, of logistic regression and of the nearest neighbours.
        fitted, scored: numbers of images.
    """

    linear: dict[str, list[float]]
    nearest: dict[str, list[float]]
    fitted: int
    scored: int


def depth_probe(pooled: dict[str, Tensor], labels: Tensor | None, *, seed: int = 0) -> ByDepth | str:
    """Classify images from the tokens of each layer, on the half of the images that was not fitted.

    Args:
        pooled: kind of token -> (layers + 1, B, D), as in ``Reading``.
        labels: (B,), or None.

    Returns:
        Accuracies, or why there are none.
    """
    why, _ = _explain_lack(labels)
    if labels is None or why:
        return why
    fit, score = halves(len(labels), seed)
    if len(labels[fit].unique()) < 2:
        return ONE_CLASS
    linear, near = (
        {kind: [probe(x[fit], labels[fit], x[score], labels[score]) for x in layers] for kind, layers in pooled.items()}
        for probe in (classify, nearest)
    )
    return ByDepth(linear, near, len(fit), len(score))


def nearest(fit: Tensor, fit_labels: Tensor, score: Tensor, score_labels: Tensor) -> float:
    """Return the accuracy of the k nearest neighbours among features (n, D), on images that are not among them.

    Each of the k = 20 with the largest cosine c votes for its class with weight exp(c / 0.07) (Wu et al. 2018, arXiv
    1805.01978); of fewer features all vote.
    """
    known, asked = (F.normalize(x.double(), dim=-1) for x in (fit, score))
    classes, right = int(fit_labels.max()) + 1, 0
    for part, truth in zip(asked.split(CHUNK), score_labels.split(CHUNK), strict=True):
        near = (part @ known.mT).topk(min(NEIGHBOURS, len(known)), dim=1)
        votes = F.one_hot(fit_labels[near.indices], classes) * (near.values / TEMPERATURE).exp()[..., None]
        right += int((votes.sum(1).argmax(1) == truth).sum())
    return right / len(score)


def segmentation_probe(
    fit: Tensor, fit_masks: Tensor, score: Tensor, score_masks: Tensor, grid: tuple[int, int], classes: int
) -> float:
    """Return the mean IoU of a linear map from each patch's token to the classes of its pixels.

    The map is fitted in closed form to the share of each class in each patch; its outputs are interpolated to pixels,
    each of which gets the class of the largest.

    Args:
        fit, score: tokens (B, H W, D) of images to fit on and of others to score.
        fit_masks, score_masks: their classes, int64 (B, H p, W p), each below ``classes``.
        grid: (H, W).
    """
    shares = F.adaptive_avg_pool2d(F.one_hot(fit_masks, classes).movedim(-1, 1).double(), grid)
    probe = ridge(fit.flatten(0, 1), shares.flatten(2).mT.flatten(0, 1))
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=fit.device)
    for part, masks in zip(score.split(32), score_masks.split(32), strict=True):
        maps = probe(part).mT.unflatten(-1, grid)
        found = F.interpolate(maps, masks.shape[-2:], mode="bilinear").argmax(1)
        confusion += confusion_matrix(found, masks, classes)
    return float(intersection_over_union(confusion).nanmean())
