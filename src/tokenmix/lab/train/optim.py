"""AdamW and Muon over groups of parameters by role, and learning rates as pure functions of the step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn

from ...mixers import Mixer
from ...mixers.parts.token_norm import TokenBatchNorm
from ...models import Block
from .config import OptimConfig
from .muon import Muon

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Layers that any model has, inside its mixers or outside.
SHARED = (nn.Linear, *CONVOLUTIONS, nn.LayerNorm, nn.RMSNorm, TokenBatchNorm)

POLY_POWER = 0.9
ONE_CYCLE = 0.3
"""Share of the steps in which one cycle goes up."""
ROLES = ("matrix", "map", "embedding", "vector", "mixer")
DECAYING = ("matrix", "map")


def learning_rate(step: int, config: OptimConfig, steps: int | None) -> float:
    """Compute the learning rate of update number ``step``, counted from 0; its highest value is ``config.lr``.

    vaswani: lr * min((step+1) / warmup, sqrt(warmup / (step+1))) (Vaswani et al. 2017, Sec. 5.3).
    cosine, linear, poly: warm-up, then down to ``min_lr_ratio * lr`` at the last step; of the part t that is done, poly
    leaves (1 - t)^0.9 (Chen et al. 2018, arXiv 1606.00915, Sec. 4.1). wsd: warm-up, lr, then down in the last ``decay``
    of the steps (Hu et al. 2024, arXiv 2404.06395). constant: warm-up, then lr. onecycle: from lr / 25 to lr over the
    first 30 % of the steps, then down to lr / 250,000, both by a cosine (Smith and Topin 2018, arXiv 1708.07120, as
    torch's ``OneCycleLR``).
    """
    n, warmup = step + 1, max(config.warmup, 1)
    if config.schedule == "vaswani":
        return config.lr * min(n / warmup, math.sqrt(warmup / n))
    if config.schedule == "onecycle" and steps is not None:
        return config.lr * _one_cycle(step, steps)
    if n <= config.warmup:
        return config.lr * n / warmup
    if config.schedule == "constant" or steps is None:
        return config.lr
    start = config.warmup if config.schedule != "wsd" else max(config.warmup, round(steps * (1 - config.decay)))
    done = min(max(n - start, 0) / max(steps - start, 1), 1.0)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    shape = shape**POLY_POWER if config.schedule == "poly" else shape
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def _one_cycle(step: int, steps: int) -> float:
    """Return the multiple of the highest rate at a step of one cycle."""
    top = max(ONE_CYCLE * steps - 1, 1e-9)
    done, first, last = (
        (step / top, 1 / 25, 1.0) if step <= top else ((step - top) / max(steps - 1 - top, 1e-9), 1.0, 1 / 25 / 1e4)
    )
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict]:
    """Group the parameters by role and learning rate.

    The roles are "matrix" (weights of linear layers inside blocks), "map" (weights of other linear layers and of
    convolutions), "embedding", "vector" (biases and norms) and "mixer" (what only this mixer has: position biases,
    tables, filters, gains and memories). Only matrices and maps decay. ``scale`` of a group multiplies its rate. It is
    layer_decay to the power of the number of layers above (for embeddings, all layers), times mixer_lr for the role
    "mixer".
    """
    roles = parameter_roles(model)
    found: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        above = _layers_above(model, name) if config.layer_decay < 1 else 0
        scale = config.layer_decay**above * (config.mixer_lr if roles[name] == "mixer" else 1.0)
        found.setdefault((roles[name], scale), []).append(parameter)
    order = {role: i for i, role in enumerate(ROLES)}
    groups = sorted(found.items(), key=lambda item: (order[item[0][0]], -item[0][1]))
    return [
        {"params": some, "weight_decay": config.weight_decay if role in DECAYING else 0.0, "scale": scale, "role": role}
        for (role, scale), some in groups
    ]


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Return the role of every parameter by name; see ``parameter_groups``."""
    inside = {id(m) for block in model.modules() if isinstance(block, Block) for m in block.modules()}
    owned = {id(p) for m in model.modules() if isinstance(m, Mixer) for p in own_parameters(m)}
    by_id: dict[int, str] = {}
    for module in model.modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) in owned:
                role = "mixer"
            elif isinstance(module, nn.Embedding):
                role = "embedding"
            elif kind == "weight" and isinstance(module, (nn.Linear, *CONVOLUTIONS)):
                role = "matrix" if isinstance(module, nn.Linear) and id(module) in inside else "map"
            else:
                role = "vector" if parameter.ndim < 2 else "embedding"  # tables of positions, class tokens
            by_id.setdefault(id(parameter), role)
    return {name: by_id[id(parameter)] for name, parameter in model.named_parameters()}


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
    return 0 if name.split(".")[0] in ("head", "norm", "classifier") else len(names) + 1


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Build AdamW or SGD, and with ``name="muon"`` Muon for the matrices; ``set_rates`` gives them their rates."""
    groups = parameter_groups(model, config)
    by_muon = "matrix" if config.name == "muon" else None
    matrices = [group for group in groups if group["role"] == by_muon]
    others = [group for group in groups if group["role"] != by_muon]
    betas = config.betas[0], config.betas[1]
    found: list[torch.optim.Optimizer] = []
    if config.name == "sgd":
        found.append(torch.optim.SGD(others, lr=config.lr, momentum=betas[0], nesterov=betas[0] > 0))
    elif others:
        found.append(torch.optim.AdamW(others, lr=config.lr, betas=betas, eps=config.eps, fused=True))
    if matrices:
        for group in matrices:
            group["scale"] *= config.muon_lr / config.lr
        found.append(Muon(matrices, lr=config.muon_lr, momentum=0.95))
    return found


def update(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: OptimConfig,
    step: int,
    of: int | None,
    rate: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Clip the gradients, set the rates of step ``step`` out of ``of``, change the weights and drop the gradients.

    Args:
        rate: the learning rate; None: that of the config's schedule.
        scaler: what the loss was multiplied by, in float16; a step whose gradients overflow changes nothing.
    """
    if scaler is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    if config.clip:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    set_rates(optimizers, learning_rate(step, config, of) if rate is None else rate)
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    if scaler is not None:
        scaler.update()


def set_rates(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group: its scale times ``rate``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * rate


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


def optimizer_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the optimisers' states under the parameters' names."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{names[id(p)]}|{key}": value
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizers(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, torch.Tensor]
) -> None:
    """Restore these states, on the devices of the parameters."""
    parameters = dict(model.named_parameters())
    owner = {id(p): each for each in optimizers for group in each.param_groups for p in group["params"]}
    for key, value in tensors.items():
        name, field = key.rsplit("|", 1)
        parameter = parameters[name]
        owner[id(parameter)].state[parameter][field] = value.to(parameter.device)
