"""An optimiser and a schedule of your own: Lion (Chen et al. 2023, arXiv 2302.06675), and a rate with a triangle."""

import torch

from tokenmix.lab.train import DataConfig, RunConfig, TrainConfig, train
from tokenmix.models import LMConfig


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (b1, b2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.mul_(1 - lr * group["weight_decay"]).sub_(lr * m.lerp(p.grad, 1 - b1).sign())
                    m.lerp_(p.grad, 1 - b2)


def triangle(step):
    return max(0.0, min((step + 1) / 20, (100 - step) / 80))


if __name__ == "__main__":
    config = RunConfig(
        LMConfig(dim=32, layers=2, max_len=64, mixers=({"name": "aft_simple"},)),
        DataConfig("stdlib", seq_len=64),
        train=TrainConfig(steps=100, batch_size=8, eval_every=50, eval_bytes=4000, save_every=10, threads=1),
    )
    print(train(config, "runs/own_optimizer", resume=True, optimizer=Lion, schedule=triangle))
