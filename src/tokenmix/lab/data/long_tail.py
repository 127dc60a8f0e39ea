"""Long-tailed and balanced subsets of a labelled image set, and its classes by how many training images they have."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import MixerError
from .images import ImageData, ImageSplit
from .sampler import mix64, permuted_ranks

SHOTS = ("many", "medium", "few")
MANY, FEW = 100, 20  # many: more than 100 training images of a class; few: fewer than 20
LONG_TAILED = 2.0  # times the images of the smallest class that the largest has at least


def long_tail_counts(largest: int, classes: int, imbalance: float) -> list[int]:
    """Return the images of each class, n_c = floor(largest * imbalance^(-c / (classes - 1))), c = 0 .. classes - 1.

    An imbalance of 1 gives every class as many.

    Raises:
        MixerError: for fewer than two classes, or an imbalance below 1.
    """
    if classes < 2:
        raise MixerError(f"long_tail: a set with {classes} class has no tail; it needs at least 2 classes.")
    if not 1 <= imbalance < math.inf:
        raise MixerError(
            f"long_tail: the imbalance is the images of the largest class over those of the smallest, at least 1 (1: "
            f"as many of each); got {imbalance}."
        )
    return [math.floor(largest * share + 1e-9) for share in _shares(classes, imbalance)]  # 1000 * 1000^(-1/3) is 100


def _shares(classes: int, imbalance: float) -> list[float]:
    return [imbalance ** (-c / (classes - 1)) for c in range(classes)]


def class_counts(split: ImageSplit, classes: int) -> list[int]:
    """Count the images of each class in a split."""
    return torch.bincount(split.labels, minlength=classes).tolist()


def long_tailed(data: ImageData, imbalance: float, *, largest: int | None = None, seed: int = 0) -> ImageData:
    """Keep a long-tailed part of the training images; the other splits stay as they are.

    The first class keeps most and the last one fewest (``long_tail_counts``). What is kept of a class depends on the
    seed only, and of two subsets with one seed the smaller class lies in the larger. Its pixels are copied into memory.

    Args:
        imbalance: images of the largest class over those of the smallest; 1: a balanced subset.
        largest: images of the largest class; None: as many as all classes have enough images for.

    Raises:
        MixerError: in one line, for a class without images or with too few, and as ``long_tail_counts`` does.
    """
    train, classes = data.split("train"), len(data.classes)
    have = class_counts(train, classes)
    long_tail_counts(1, classes, imbalance)
    if 0 in have:
        raise MixerError(
            f"long_tail: the class {data.classes[have.index(0)]!r} of {data.name} has no training images; leave it out "
            + "of the set."
        )
    most = _largest_class(have, imbalance)
    if largest is not None and not 1 <= largest <= most:
        raise MixerError(
            f"long_tail: {data.name} has images for a largest class of 1 to {most} at an imbalance of {imbalance:g}, "
            + f"got {largest}."
        )
    wanted = long_tail_counts(most if largest is None else largest, classes, imbalance)
    if not all(wanted):
        raise MixerError(
            f"long_tail: at an imbalance of {imbalance:g} the class {data.classes[wanted.index(0)]!r} of {data.name} "
            + f"would keep none of its images; the largest class has {wanted[0]}, so choose at most {wanted[0]}."
        )
    chosen = torch.cat([_choose_images(train.labels, c, n, seed) for c, n in enumerate(wanted)]).sort().values
    kept = replace(
        train,
        labels=train.labels[chosen],
        pixels=None if train.pixels is None else train.pixels[chosen],
        files=tuple(train.files[i] for i in chosen.tolist()) if train.files else (),
    )
    print_of = hashlib.sha256(f"{data.fingerprint} {chosen.tolist()}".encode()).hexdigest()
    return replace(data, fingerprint=print_of, splits={**data.splits, "train": kept})


def _largest_class(have: list[int], imbalance: float) -> int:
    """Return the largest class for which every class has enough images."""
    shares = _shares(len(have), imbalance)
    most = min(math.ceil((n + 1) / share) for n, share in zip(have, shares, strict=True))
    while any(n < want for n, want in zip(have, long_tail_counts(most, len(have), imbalance), strict=True)):
        most -= 1
    return most


def _choose_images(labels: Tensor, c: int, n: int, seed: int) -> Tensor:
    """Return n indices of images of class c."""
    members = (labels == c).nonzero()[:, 0]
    key = mix64(mix64(seed) + c)
    return members[permuted_ranks(torch.arange(n), len(members), key)]


def shots_of(counts: list[int]) -> list[int] | None:
    """Return the place in ``SHOTS`` of each class, by its training images; None where the set is not long-tailed.

    A set is long-tailed if its largest class has at least twice the images of its smallest.
    """
    if max(counts) < LONG_TAILED * max(min(counts), 1):
        return None
    return [0 if n > MANY else 2 if n < FEW else 1 for n in counts]
