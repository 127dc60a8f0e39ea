"""Metrics of your own: the share of right answers, and a running mean over the steps."""

import torch
from own_data import VALID, batch, model
from torch.nn.functional import cross_entropy as nats

from tokenmix.lab.train import TrainConfig, train


@torch.no_grad()
def accuracy(step, model):
    """A function is called at every evaluation, in evaluation mode, and its numbers join the line."""
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in VALID)
    return {"accuracy": right / sum(len(y) for _, y in VALID)}


class WeightNorm:
    """An object has the methods on_step, on_evaluate or both; with a state_dict it survives a kill."""

    mean = 0.0

    def on_step(self, step, model):
        self.mean += 0.1 * (float(model[0].weight.norm()) - self.mean)

    def on_evaluate(self, step, model):
        return {"weight_norm": self.mean}

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


if __name__ == "__main__":
    loop, metrics = TrainConfig(steps=100, eval_every=20, save_every=10, threads=1), [accuracy, WeightNorm()]
    train(loop, "runs/own_metric", resume=True, model=model, batches=batch, valid=VALID, loss=nats, callbacks=metrics)
