"""Video: which way does a shape move? Any mixer between the patches of a clip, on a grid of time, rows and columns.

    python examples/video.py aft_conv

Clips are drawn on the fly: one disc or square on noise moves in one of 8 directions and comes back at the opposite
border. No frame alone shows which way. A run that was stopped goes on.
"""

import argparse
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import nn

from tokenmix.lab.report.runs import read_run
from tokenmix.lab.train import OptimConfig, OwnData, OwnModel, RunConfig, TrainConfig, train
from tokenmix.models.blocks import Block

CLIP, PATCH, DIM, LAYERS = (8, 24, 24), (2, 6, 6), 48, 2  # frames, height, width
GRID = tuple(n // p for n, p in zip(CLIP, PATCH, strict=True))
WAYS = torch.tensor([(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if y or x])
MIXERS = {
    "attention": {"name": "attention", "heads": 3},
    "hydra": {"name": "hydra"},
    "aft_conv": {"name": "aft_conv", "heads": 12, "kernel_size": 3},
}


def clips(seed, count):
    """Draw clips (count, 1, frames, height, width) and the number of the direction of each, (count,)."""
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = CLIP
    way = torch.randint(len(WAYS), (count,), generator=generator)
    start = torch.rand(count, 1, 2, generator=generator) * torch.tensor([height, width])
    speed = 1 + torch.rand(count, 1, 1, generator=generator)  # pixels a frame
    radius = 3 + 2 * torch.rand(count, 1, 1, 1, generator=generator)
    at = start + WAYS[way][:, None] * speed * torch.arange(frames)[:, None]
    down, across = (
        ((torch.arange(n) - at[..., i, None]) % n).view(count, frames, *(n if i == j else 1 for j in (0, 1)))
        for i, n in enumerate((height, width))
    )
    down, across = (torch.minimum(d, n - d) for d, n in ((down, height), (across, width)))  # around the borders
    disc = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    inside = torch.where(disc, (down**2 + across**2).sqrt(), torch.maximum(down, across)) < radius
    noise = torch.randn(count, *CLIP, generator=generator)
    return (2 * inside + 0.5 * noise)[:, None], way


class VideoTransformer(nn.Module):
    """Patches of (t, y, x), learned positions, blocks of one mixer on that grid, the mean over all tokens, a head."""

    def __init__(self, mixer):
        super().__init__()
        self.patch = nn.Conv3d(1, DIM, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(prod(GRID), DIM))
        options = {"causal": False, "max_len": prod(GRID), "grid": GRID}
        self.blocks = nn.ModuleList(Block(DIM, MIXERS[mixer], **options) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, len(WAYS))

    def forward(self, x):
        x = self.patch(x).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x, grid=GRID)
        return self.head(self.norm(x).mean(1))


VALID = [clips(-1 - i, 100) for i in range(10)]


@torch.no_grad()
def accuracy(step, model):
    """Return the share of right answers on 1,000 clips that are not trained on."""
    return {"accuracy": torch.cat([model(x).argmax(1) == way for x, way in VALID]).float().mean().item()}


def run(mixer, out, steps=400):
    """Train on new clips in every step; return the line of the last evaluation."""
    loop = TrainConfig(steps=steps, eval_every=steps, save_every=steps, threads=1, device="cpu")
    config = RunConfig(OwnModel(), OwnData(), OptimConfig(lr=3e-3, warmup=min(50, steps)), loop)
    own = {"model": partial(VideoTransformer, mixer), "batches": partial(clips, count=32), "valid": VALID}
    train(config, out, resume=True, loss=F.cross_entropy, callbacks=[accuracy], **own)
    return read_run(out).evals[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixer", choices=MIXERS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="runs/video")
    given = parser.parse_args()
    line = run(given.mixer, f"{given.out}/{given.mixer}", given.steps)
    print(f"{given.mixer}: {100 * line['accuracy']:.1f} % of 1,000 clips right")
