"""Rectified flow: straight paths from images to noise, their velocity, and the way back by a solver.

Flow matching (Lipman et al. 2023, arXiv 2210.02747) along the straight paths of rectified flow (Liu et al. 2023, arXiv
2209.03003). Shapes: B images of any shape; x images, e noise from N(0, 1), t times in [0, 1]: images at 0, noise at 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.precision import at_least_float32
from .sampling import FiniteSteps

Solver = Literal["euler", "heun"]
SOLVERS = get_args(Solver)
Velocity = Callable[[Tensor, Tensor], Tensor]
"""A function of images (B, ...) and their times (B,) that returns velocities (B, ...)."""


def add_noise(images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Return the point x_t = (1 - t) x + t e of each path; x and e are (B, ...), t is (B,)."""
    t = time.view(-1, *[1] * (images.ndim - 1)).to(images.dtype)
    return (1 - t) * images + t * noise


def path_velocity(images: Tensor, noise: Tensor) -> Tensor:
    """Return dx_t/dt = e - x, the same at all times of a path."""
    return noise - images


def squared_errors(predicted: Tensor, velocity: Tensor) -> Tensor:
    """Compute the mean squared error of each image's velocity, (B, ...) to (B,), at least in float32.

    The loss of flow matching is their mean: E over x, e and t of |v(x_t, t) - (e - x)|^2 per number of an image.
    """
    return (at_least_float32(predicted) - velocity).square().flatten(1).mean(1)


def guide_velocity(with_class: Tensor, without: Tensor, weight: float) -> Tensor:
    """Return v_none + weight (v_class - v_none), classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598).

    Weight 1 is the class's own velocity, 0 that of all images; theirs is counted from the class's own, weight - 1.
    """
    return without + weight * (with_class - without)


def check_solver(steps: int, solver: str) -> None:
    """Refuse an unknown solver, and a number of steps that is not an integer of at least 1."""
    if solver not in SOLVERS:
        raise MixerError(f"solve_flow: solver={solver!r} is unknown; choose 'euler' or 'heun'.")
    if not isinstance(steps, int) or steps < 1:
        raise MixerError(f"solve_flow: the number of steps must be an integer of at least 1, got {steps!r}.")


def solve_flow(velocity: Velocity, noise: Tensor, *, steps: int = 50, solver: Solver = "heun") -> Tensor:
    """Follow dx/dt = v(x, t) from noise at t = 1 to images at t = 0, in equal steps of h = 1 / steps.

    euler: x - h v(x, t), with an error of O(h). heun: the mean of the velocities at both ends of an Euler step, with an
    error of O(h^2) and two evaluations of v in a step.

    Args:
        velocity: v, called with x (B, ...) and t (B,).
        noise: (B, ...), x at t = 1.
        steps: number of steps, at least 1.
        solver: "euler" or "heun".

    Raises:
        MixerError: for an unknown solver or fewer steps than 1, and if a velocity is NaN or infinite.
    """
    check_solver(steps, solver)
    x, h, checks = noise, 1 / steps, FiniteSteps("solve_flow", "velocities of step {step}")
    for i in range(steps):
        start, end = (torch.full_like(x.flatten(1)[:, 0], 1 - (i + j) * h) for j in (0, 1))
        slope = velocity(x, start)
        if solver == "heun":
            slope = (slope + velocity(x - h * slope, end)) / 2
        x = x - h * checks.values(slope)
    checks.finish()
    return x
