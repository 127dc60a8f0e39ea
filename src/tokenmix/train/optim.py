"""AdamW with the paper's parameter groups, and learning rates as pure functions of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import OptimConfig


def learning_rate(step: int, config: OptimConfig, steps: int | None) -> float:
    """The rate of the update number ``step``, counted from 0; ``config.lr`` is its highest value.

    vaswani: lr * min((step+1) / warmup, sqrt(warmup / (step+1))) (Vaswani et al. 2017, Sec. 5.3).
    cosine, linear: warm-up, then down to ``min_lr_ratio * lr`` at the last step. constant: warm-up, then lr.
    """
    n, warmup = step + 1, max(config.warmup, 1)
    if config.schedule == "vaswani":
        return config.lr * min(n / warmup, math.sqrt(warmup / n))
    if n <= config.warmup:
        return config.lr * n / warmup
    if config.schedule == "constant" or steps is None:
        return config.lr
    done = min((n - config.warmup) / max(steps - config.warmup, 1), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: the weights of linear layers decay; biases, norms, embeddings, position biases and whatever else a mixer owns do not."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    decayed = [p for p in model.parameters() if id(p) in linear]
    others = [p for p in model.parameters() if id(p) not in linear]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over those groups; the loop sets its rate before every step."""
    return torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state under the parameters' names."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {f"{names[id(p)]}|{key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put those tensors back, on the parameters' devices."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, field = key.rsplit("|", 1)
        optimizer.state[parameters[name]][field] = value.to(parameters[name].device)
