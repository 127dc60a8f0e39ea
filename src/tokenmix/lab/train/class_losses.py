"""Losses of image classifiers, also those for classes of unequal size.

They take hard labels (B,) and targets (B, C) alike, with label smoothing, mixup or CutMix. y_bc is the target, z_bc the
logit, n_c the number of training images of class c, pi_c = n_c / sum n.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...system.config import nearest

CLASS_LOSSES = ("cross_entropy", "balanced_cross_entropy", "bce", "class_balanced_bce", "balanced_bce")
BALANCED = ("balanced_cross_entropy", "balanced_bce")  # those that add a bias to the logits
BETA = 0.9999  # of the effective number of images, (1 - BETA^n) / (1 - BETA)


class ClassLoss:
    """The loss of a classifier in training; predictions use the logits as they are.

    Each is a mean over the batch. With softmax: ``cross_entropy``, -sum_c y_c log softmax(z)_c, and
    ``balanced_cross_entropy``, the same of z_c + tau log pi_c. With sigmoids, summed over the classes: ``bce``,
    -sum_c [y_c log sigma(z_c) + (1 - y_c) log sigma(-z_c)]; ``class_balanced_bce``, whose terms have the weights
    w_c = (1 - 0.9999) / (1 - 0.9999^n_c), scaled so that they sum to C; ``balanced_bce`` (LiVT, arXiv 2212.02015), the
    ``bce`` of z_c + tau (log pi_c - log(1 - pi_c)).

    Args:
        counts: training images of each class.
        tau: scale of the bias.

    Raises:
        MixerError: for an unknown loss, and for counts for which it is not defined.
    """

    def __init__(self, name: str, counts: list[int], *, tau: float = 1.0):
        check_class_loss(name)
        if name not in ("cross_entropy", "bce") and min(counts) < 1:
            raise MixerError(
                f"loss {name}: class {counts.index(min(counts))} has no training images, and no logarithm of its "
                + "share; leave it out of the set, or choose cross_entropy or bce."
            )
        if name == "balanced_bce" and len(counts) < 2:
            raise MixerError("loss balanced_bce: the only class has all images, so 1 - pi is 0; choose bce.")
        self.name = name
        n = torch.tensor(counts, dtype=torch.float64)
        log_pi, log_rest = n.log() - n.sum().log(), (n.sum() - n).log() - n.sum().log()
        self.bias = tau * (log_pi if name == "balanced_cross_entropy" else log_pi - log_rest)
        weights = (1 - BETA) / -torch.expm1(n * math.log(BETA))
        self.weights = weights / weights.sum() * len(counts)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss.

        Args:
            logits: (B, C).
            targets: (B,) labels, or (B, C).
        """
        z = logits if logits.dtype == torch.float64 else logits.float()
        if self.name in BALANCED:
            z = z + self.bias.to(z)
        if self.name.endswith("cross_entropy"):
            return F.cross_entropy(z, targets)
        y = F.one_hot(targets, z.shape[1]) if targets.ndim == 1 else targets
        weight = self.weights.to(z) if self.name == "class_balanced_bce" else None
        return F.binary_cross_entropy_with_logits(z, y.to(z), weight, reduction="sum") / len(z)


def check_class_loss(name: str) -> None:
    """Refuse a loss that there is not."""
    if name not in CLASS_LOSSES:
        raise MixerError(f"config: data.loss={name!r} is unknown; {nearest(name, CLASS_LOSSES)}.")
