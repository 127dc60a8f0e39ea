"""Data of your own, in memory, with a model of your own: is there a bump in a noisy signal, and where?"""

import torch
import torch.nn.functional as F
from torch import nn

from tokenmix.lab.train import TrainConfig, train

generator = torch.Generator().manual_seed(0)
LABELS = torch.randint(8, (1000,), generator=generator)
SIGNALS = torch.randn(1000, 64, generator=generator) + 2 * F.one_hot(LABELS, 8).repeat_interleave(8, 1)


def batch(step):
    """The batch of a step must be a function of the step: then a run that was killed goes on exactly."""
    chosen = torch.randint(800, (32,), generator=torch.Generator().manual_seed(step))
    return SIGNALS[chosen], LABELS[chosen]


VALID = list(zip(SIGNALS[800:].split(100), LABELS[800:].split(100), strict=True))


def model():
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))


if __name__ == "__main__":
    loop = TrainConfig(steps=100, eval_every=50, save_every=10, threads=1)
    print(train(loop, "runs/own_data", resume=True, model=model, batches=batch, valid=VALID, loss=F.cross_entropy))
