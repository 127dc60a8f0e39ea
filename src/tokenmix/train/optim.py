"""AdamW with the paper's parameter groups, and learning rates as pure functions of the step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn

from ..mixers import Mixer
from ..mixers.parts.token_norm import TokenBatchNorm
from ..models import Block
from .config import OptimConfig

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Layers that any model has, inside its mixers or outside.
SHARED = (nn.Linear, *CONVOLUTIONS, nn.LayerNorm, nn.RMSNorm, TokenBatchNorm)


def learning_rate(step: int, config: OptimConfig, steps: int | None) -> float:
    """Compute the learning rate of update number ``step``, counted from 0; its highest value is ``config.lr``.

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


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float = 1.0, mixer_lr: float = 1.0
) -> list[dict]:
    """Group the parameters by weight decay and learning rate.

    Only the weights of linear layers and convolutions decay; biases, norms, embeddings, position biases and everything
    else that a mixer owns do not. ``scale`` of a group multiplies its rate. It is layer_decay to the power of the
    number of layers above (for embeddings, all layers), times mixer_lr for what a mixer owns.
    """
    maps = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, *CONVOLUTIONS))}
    owned = {id(p) for m in model.modules() if isinstance(m, Mixer) for p in own_parameters(m)}
    found: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        above = _layers_above(model, name) if layer_decay < 1 else 0
        scale = layer_decay**above * (mixer_lr if id(parameter) in owned else 1.0)
        found.setdefault((scale, id(parameter) in maps), []).append(parameter)
    groups = sorted(found.items(), key=lambda item: (-item[0][0], not item[0][1]))
    return [
        {"params": some, "weight_decay": weight_decay if decays else 0.0, "scale": scale}
        for (scale, decays), some in groups
    ]


def own_parameters(mixer: Mixer) -> list[nn.Parameter]:
    """List the parameters that are specific to this mixer, those of its child modules included.

    These are position biases, tables, filters, gains and memories, but no projections and no norms.
    """
    return [p for m in mixer.modules() if not isinstance(m, SHARED) for p in m.parameters(recurse=False)]


def _layers_above(model: nn.Module, name: str) -> int:
    """Count the blocks between a parameter and the head: 0 for head and last norm, one more than all for embeddings."""
    names = [n for n, m in model.named_modules() if isinstance(m, Block)]
    for i, block in enumerate(names):
        if name.startswith(block + "."):
            return len(names) - i
    return 0 if name.split(".")[0] in ("head", "norm") else len(names) + 1


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Build AdamW over ``parameter_groups``; the loop sets their rates before every step."""
    groups = parameter_groups(model, config.weight_decay, config.layer_decay, config.mixer_lr)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True)


class Average:
    """An exponential moving average of a model's parameters and buffers in float32 (Polyak and Juditsky 1992).

    Early on, the decay is lower: (1 + step) / (10 + step), if that is below ``decay``.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.mean = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after update number ``step``, counted from 0, to the average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, tensor in self.model.state_dict().items():
            mean = self.mean[name]
            mean.lerp_(tensor.to(mean.dtype), 1 - decay) if mean.is_floating_point() else mean.copy_(tensor)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the model hold the average inside the block."""
        own = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self.mean)
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average under the parameters' names."""
        return self.mean

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore an average."""
        for name, tensor in tensors.items():
            self.mean[name].copy_(tensor)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimiser's state under the parameters' names."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {f"{names[id(p)]}|{key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Restore that state, on the devices of the parameters."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, field = key.rsplit("|", 1)
        optimizer.state[parameters[name]][field] = value.to(parameters[name].device)
