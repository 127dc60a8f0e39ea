"""A task of your own: how many different letters does a sequence hold? docs/own-task.md explains it."""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tokenmix.lab.recipes import Recipe, Row
from tokenmix.lab.train import Constant, OptimConfig, RunConfig, Task, TaskData, TrainConfig, register_task
from tokenmix.models import EncoderConfig, evaluation_mode


@dataclass(frozen=True)
class Letters(TaskData):
    length: int = 32
    held_out: int = 256


@dataclass(frozen=True)
class CountScore:
    mean_error: float
    seconds: float

    def text(self):
        return f"wrong by {self.mean_error:.3f} letters on average"


@register_task
class CountLetters(Task):
    config, models, metric, unit = Letters, ("encoder",), "mean_error", "sequences"

    def batch(self, step):
        return self.draw(self.train.batch_size, self.train.seed, step)

    def draw(self, n, *seed):
        letters = torch.randint(26, (n, self.data.length), generator=self.generator(*seed))
        return letters, F.one_hot(letters, 26).amax(1).sum(1).float()

    def loss(self, outputs, targets):
        return F.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1].exp())

    def evaluate(self, model, split):
        began, (letters, counts) = time.perf_counter(), self.draw(self.data.held_out, len(split), -1)
        with evaluation_mode(model), torch.no_grad():
            said = model(letters.to(next(model.parameters()).device))[:, 0].cpu()
        return CountScore(float((said - counts).abs().mean()), time.perf_counter() - began)

    def constant(self):
        return Constant(torch.stack([self.batch(0)[1].mean(), torch.zeros(())]), 0)


def build(row, size):
    model = EncoderConfig(row.dim, row.seq_len, row.mixers, row.layers, vocab=26, classes=2)
    loop = TrainConfig(steps=200, batch_size=32, eval_every=50, save_every=50)
    return RunConfig(model, Letters(row.seq_len), OptimConfig(lr=3e-3, warmup=20), loop)


ROWS = {name: Row(name, ({"name": name},), layers=2, dim=32, seq_len=32) for name in ("aft_simple", "attention")}
RECIPE = Recipe("count_letters", "how many different letters a sequence holds", ROWS, "aft_simple", build)
