"""Muon with the matrices of one shape updated together, as a few batched products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...system.read_shards import is_sharded, take_share
from ...types import Options


class Muon(torch.optim.Muon):
    """Update matrices with orthogonalised momentum (Jordan et al. 2024), as ``torch.optim.Muon`` does.

    B <- m B + (1 - m) g; U = g + m (B - g); p <- p - lr wd p - lr sqrt(max(1, rows / columns)) NS(U / |U|). NS is five
    steps of X <- a X + (b A + c A^2) X with A = X X^T. Options and state are those of ``torch.optim.Muon``.

    A sharded matrix is gathered for its products, which every rank computes.

    Deviations: the matrices of one shape are stacked and multiplied together, which pays for the many small ones of a
    model on a CPU; and on a CPU the products are in float32, not bfloat16, which few CPUs multiply fast.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """Make one update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stacks: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stacks.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
            for parameters in stacks.values():
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: Options) -> None:
        """Update parameters of one shape. What is not the product of matrices is done on this rank's parts."""
        lr, momentum = float(group["lr"]), group["momentum"]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        grads = [_part(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]  # step left out None
        buffers = [_part(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        stack = torch.stack([_gather_whole(u, like) for u, like in zip(updates, parameters, strict=True)])
        directions = orthogonalize(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = parameters[0].shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * max(rows, columns) ** 0.5
        else:
            ratio = max(1.0, rows / columns) ** 0.5
        parts = [_part(parameter) for parameter in parameters]
        moves = directions.to(parameters[0].dtype).unbind(0)
        torch._foreach_mul_(parts, 1 - lr * group["weight_decay"])
        own = [_part(take_share(move, like)) for move, like in zip(moves, parameters, strict=True)]
        torch._foreach_add_(parts, own, alpha=-lr * ratio)


def _part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return, attr-defined]  # a DTensor


def _gather_whole(part: Tensor, like: Tensor) -> Tensor:
    """Return the whole of a tensor that is sharded as ``like`` is; ``part`` itself if that is not."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def orthogonalize(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return matrices (n, rows, columns) with their singular values pushed towards 1, by Newton-Schulz steps."""
    a, b, c = coefficients
    tall = stack.shape[1] > stack.shape[2]
    dtype = stack.dtype if stack.dtype == torch.float64 else torch.float32
    x = (stack.mT if tall else stack).to(torch.bfloat16 if stack.is_cuda else dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
