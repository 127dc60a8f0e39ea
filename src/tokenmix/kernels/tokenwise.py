"""What a block does to each token alone: RMS norm, rotary positions and the gate of a SwiGLU.

In plain torch each is a chain of operations that read and write every feature several times; the C kernels pass over
memory once. torch has a fused RMS norm on GPUs only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import choose, steps
from .cpu.rms_norm import forward as rms_step
from .operator import Operator


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-5, backend: str = "auto") -> Tensor:
    """Divide each token by its root mean square: y_i = w_i x_i / sqrt(mean_j x_j^2 + eps).

    Zhang and Sennrich 2019, arXiv 1910.07467, Eq. 4. The kernel sums squares in float64, so that no square overflows.

    Args:
        x: (..., D).
        weight: (D,); None: 1.
        eps: added to the mean square.
        backend: "auto", "eager" or "cpu".

    Raises:
        MixerError: if the backend was requested by name and does not support the call.
    """
    if backend == "auto" and weight is not None and weight.shape == x.shape[-1:] and steps((x, weight), ()):
        return rms_step(x, weight, eps=float(eps), save=False)[0]  # past the dispatcher, which costs as much again
    lacks = None
    if weight is not None and weight.shape != x.shape[-1:]:
        lacks = f"its kernel takes a weight of x's last dimension {x.shape[-1]}, got {tuple(weight.shape)}"
    where = choose("rms_norm", backend, x, weight, on=rms_kernel.on, lacks=lacks)
    return _eager_rms(x, weight, eps) if where == "eager" else rms_kernel(x, weight, float(eps))


def _eager_rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


rms_kernel = Operator("rms_norm", "x(*,D) weight?(D)", "float eps", saves=("inverse",), eager=_eager_rms, on=("cpu",))
"""Normalise the last dimension of x by its root mean square."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str = "auto") -> Tensor:
    """Turn pairs (a, b) of each head's features to (a cos - b sin, b cos + a sin).

    Su et al. 2021, arXiv 2104.09864, Eq. 34.

    Args:
        x: (B, T, H, e); the first 2 m features of each head are turned, the rest stay.
        cos, sin: (B or 1, T, m), without gradients.
        interleaved: whether a pair lies side by side (2 i, 2 i + 1) instead of m apart (i, i + m).
        backend: "auto", "eager" or "cpu".

    Raises:
        MixerError: if the backend was requested by name and does not support the call.
    """
    lacks = None if cos.dtype == torch.float32 else f"its kernel takes cos and sin in float32, got {cos.dtype}"
    if cos.device != x.device:
        lacks = f"its kernel takes cos and sin on the device of x, {x.device}, got {cos.device}"
    where = choose("rotate", backend, x, on=rotate_kernel.on, lacks=lacks)
    return _eager_rotate(x, cos, sin, interleaved) if where == "eager" else rotate_kernel(x, cos, sin, interleaved)


def _eager_rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width, cos, sin = 2 * cos.shape[-1], cos[:, :, None], sin[:, :, None]
    turning, still = x[..., :width].to(cos.dtype), x[..., width:]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x.dtype)
    return torch.cat([turned, still], -1) if still.shape[-1] else turned


rotate_kernel = Operator(
    "rotate",
    "x(B,T,H,e) cos!(C,T,m):float32 sin!(C,T,m):float32",
    "bool interleaved",
    saves=(),
    eager=_eager_rotate,
    fits=lambda at, _: at["C"] in (1, at["B"]) and 2 * at["m"] <= at["e"],
    on=("cpu",),
)
"""Turn pairs of features by given angles."""


def silu_gate(gate: Tensor, x: Tensor, *, backend: str = "auto") -> Tensor:
    """Multiply x by silu(gate) = gate / (1 + e^-gate), as between the matrices of a SwiGLU.

    Shazeer 2020, arXiv 2002.05202, Eq. 5.

    Args:
        gate, x: tensors of one shape.
        backend: "auto", "eager" or "cpu".

    Raises:
        MixerError: if the backend was requested by name and does not support the call.
    """
    lacks = None if gate.shape == x.shape else f"its kernel takes one shape, got {tuple(gate.shape)}, {tuple(x.shape)}"
    where = choose("silu_gate", backend, gate, x, on=gate_kernel.on, lacks=lacks)
    return _eager_gate(gate, x) if where == "eager" else gate_kernel(gate, x)


def _eager_gate(gate: Tensor, x: Tensor) -> Tensor:
    return F.silu(gate) * x


gate_kernel = Operator("silu_gate", "gate(*) x(*)", "", saves=(), eager=_eager_gate, on=("cpu",))
"""Multiply by silu of a gate."""
