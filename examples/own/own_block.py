"""A block of your own in a language model: mixer and MLP side by side, as in GPT-J."""

from torch import nn

import tokenmix
from tokenmix.lab.train import DataConfig, RunConfig, TrainConfig, train
from tokenmix.models import LM, LMConfig

LENGTH, DIM = 64, 32
CONFIG = LMConfig(dim=DIM, layers=2, max_len=LENGTH, mixers=({"name": "aft_local", "window": 8},))


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mixer = tokenmix.AFTLocal(DIM, window=8, causal=True, max_len=LENGTH)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, **masks):
        h = self.norm(x)
        return x + self.mixer(h, **masks) + self.mlp(h)


def model():
    found = LM(CONFIG)
    found.blocks = nn.ModuleList(Parallel() for _ in range(CONFIG.layers))
    return found


if __name__ == "__main__":
    loop = TrainConfig(steps=100, batch_size=8, eval_every=50, eval_bytes=4000, save_every=10, threads=1)
    config = RunConfig(CONFIG, DataConfig("stdlib", seq_len=LENGTH), train=loop)
    print(train(config, "runs/own_block", resume=True, model=model))
