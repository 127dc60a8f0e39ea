"""Nyström attention (Xiong et al. 2021, "Nyströmformer", arXiv:2102.03902, Eqs. 13 to 15).

Softmax attention through m landmarks. Bidirectional only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.heads import by_head
from ..functional.layout.masks import zero_masked
from ..functional.layout.positions import default_positions
from ..functional.sums.nonfinite import guard_nonfinite
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least
from ..mixers.parts.shared import add_projections, check_positions, largest_dot


@exact
@guard_nonfinite("q", "k", "v")
def nystrom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    taps: Tensor,
    *,
    heads: int,
    landmarks: int,
    iterations: int = 6,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y = softmax(Q K~^T) Z softmax(Q~ K^T) V (+ taps * V) in each head of width e, with scale 1 / sqrt(e).

    Z is near the pseudo-inverse of A = softmax(Q~ K~^T). Q~ and K~ are the means of queries and keys over m segments:
    in a row whose last valid token stands at position L - 1, segment j holds the positions p with j L <= p m < (j + 1)
    L. A segment without a valid token is left out. Z starts as A^T / (|A|_1 |A|_inf), matrix by matrix, and each of
    ``iterations`` steps is Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4.

    Args:
        q, k, v: (B, T, D).
        taps: (heads, s) of a depthwise convolution of V along positions, s odd; tap j weighs position t + j - s // 2.
            s = 0: none.
        positions: (B, T). Default: index minus the index of the row's first True key.

    All but the convolution is float64, because Z may be large and amplifies the rounding of its neighbours. With no
    valid token the result is exactly 0. Time O(T m D + iterations m^3 heads), with explicit positions and taps O(T^2
    D).
    """
    choose("nystrom", backend, q)
    if q.shape[-1] % heads or k.shape != q.shape or v.shape != q.shape:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v))
        raise MixerError(f"nystrom: heads={heads} must divide D, and q, k and v must have one shape, got {shapes}.")
    if taps.ndim != 2 or taps.shape[0] != heads or (taps.shape[1] % 2 == 0 and taps.shape[1] != 0):
        raise MixerError(f"nystrom: taps must be ({heads}, s) with s odd or 0, got {tuple(taps.shape)}.")
    B, T, _ = q.shape
    if T == 0:
        return torch.zeros_like(q)
    qh, kh, vh = (by_head(a.double(), heads) for a in (q, zero_masked(k, key_mask), zero_masked(v, key_mask)))
    qh = qh * qh.shape[-1] ** -0.5
    member = segments(B, T, landmarks, positions, key_mask, q.device)[:, None]
    mean = member.double() / member.sum(-1, keepdim=True).clamp_min(1)
    some = member.any(-1)  # (1 or B, 1, m): the segments that hold a valid token
    valid_q = qh if key_mask is None else torch.where(key_mask[:, None, :, None], qh, 0.0)
    q_mean, k_mean = mean @ valid_q, mean @ kh
    rows = _softmax(qh @ k_mean.mT, some[:, :, None])
    core = _softmax(q_mean @ k_mean.mT, some[:, :, None]) * some[..., None]
    columns = _softmax(q_mean @ kh.mT, None if key_mask is None else key_mask[:, None, None]) * some[..., None]
    y = rows @ (inverse(core, iterations) @ (columns @ vh))
    if taps.shape[1]:
        y = y + convolve_values(vh.to(sum_dtype(q)), taps.to(sum_dtype(q)), positions)
    if key_mask is not None:
        y = torch.where(key_mask.any(1)[:, None, None, None], y, 0.0)
    return y.transpose(1, 2).flatten(2).to(q.dtype)


def segments(B: int, T: int, m: int, positions: Tensor | None, key_mask: Tensor | None, device: torch.device) -> Tensor:
    """Return which valid tokens lie in which segment, bool (1 or B, m, T).

    The inequalities are multiplied out, because j <= p m / L < j + 1 would round.
    """
    edge = torch.arange(m, device=device)[:, None]
    if positions is None and key_mask is None:
        position, end = torch.arange(T, device=device)[None, None], torch.full((1, 1, 1), T, device=device)
    else:
        position = (default_positions(B, T, key_mask, device) if positions is None else positions.long())[:, None]
        shown = position if key_mask is None else torch.where(key_mask[:, None], position, -1)
        end = shown.amax(-1, keepdim=True) + 1
    inside = (edge * end <= position * m) & (position * m < (edge + 1) * end)
    return inside if key_mask is None else inside & key_mask[:, None]


def inverse(a: Tensor, iterations: int) -> Tensor:
    """Compute the pseudo-inverse of a (.., m, m) by the paper's third-order iteration. Zero rows and columns remain."""
    norm = a.sum(-2).amax(-1) * a.sum(-1).amax(-1)  # all entries are positive
    z = a.mT / torch.where(norm > 0, norm, 1.0)[..., None, None]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def convolve_values(v: Tensor, taps: Tensor, positions: Tensor | None) -> Tensor:
    """Compute sum_j taps_j v_(t + j - s // 2), zero outside: v (B, H, T, e), taps (H, s)."""
    (B, H, T, e), s = v.shape, taps.shape[1]
    if positions is None:
        flat = v.permute(0, 1, 3, 2).reshape(B, H * e, T)
        y = F.conv1d(flat, taps.repeat_interleave(e, 0)[:, None], padding=s // 2, groups=H * e)
        return y.reshape(B, H, e, T).transpose(-1, -2)
    tap = positions[:, None].long() - positions[:, :, None].long() + s // 2
    w = torch.where((tap >= 0) & (tap < s), taps[:, tap.clamp(0, s - 1)], 0.0).transpose(0, 1)
    return w @ v


def _softmax(logits: Tensor, keep: Tensor | None) -> Tensor:
    """Apply softmax along the last axis over the entries that ``keep`` allows; 0 if it allows no entry."""
    if keep is None:
        return logits.softmax(-1)
    return torch.where(keep, logits.masked_fill(~(keep | ~keep.any(-1, keepdim=True)), float("-inf")).softmax(-1), 0.0)


class Nystrom(Mixer):
    """Nyström attention: y_t = W_o [softmax(q_t K~^T) A^+ softmax(Q~ K^T) V] in each head.

    Q~ and K~ are ``landmarks`` segment means and A = softmax(Q~ K~^T). Xiong et al. 2021, arXiv:2102.03902, Eqs. 13,
    14. Maps (B, T, D) to (B, T, D). There is no causal form: a landmark is the mean of a segment of the whole sequence,
    and A^+ combines every landmark with every other.

    Args:
        landmarks: m, the number of segments of a row, 64 by default; each row is cut by its own length. With m >= T it
            approaches softmax attention.
        heads: number of heads, 8 by default; must divide dim.
        iterations: number of steps of the iterative pseudo-inverse, 6 by default.
        conv_kernel: number of taps, odd, of a depthwise convolution of V that is added, one filter per head (33 in the
            paper's code). None (default): no convolution.

    Everything between the projections is computed in float64.

    Parameters: q_proj, k_proj, v_proj, out_proj, taps (heads, conv_kernel). Time O(T m D + m^3 H).

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        about=About("Xiong et al. 2021, arXiv 2102.03902", "low rank", "T m D + m^3 H", "T (m H + D)"),
        form=nystrom,
        carries=QKVO,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        landmarks: int = 64,
        heads: int = 8,
        iterations: int = 6,
        conv_kernel: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.landmarks, self.heads, self.iterations, self.conv_kernel = landmarks, heads, iterations, conv_kernel
        at_least(self, 1, landmarks=landmarks)
        at_least(self, 0, iterations=iterations)
        if conv_kernel is not None and (
            not isinstance(conv_kernel, int) or isinstance(conv_kernel, bool) or conv_kernel < 1 or conv_kernel % 2 == 0
        ):
            self.refuse(f"conv_kernel must be odd and positive, or None, got {conv_kernel!r}")
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.taps = None if conv_kernel is None else nn.Parameter(torch.empty(heads, conv_kernel))
        self.init_parameters()

    def init_parameters(self) -> None:
        if self.taps is not None:
            nn.init.uniform_(self.taps, -(self.taps.shape[1] ** -0.5), self.taps.shape[1] ** -0.5)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``nystrom`` for this input: (positional, keyword)."""
        x, positions, key_mask = inputs.x, inputs.positions, inputs.key_mask
        check_positions(self, positions, key_mask)
        taps = x.new_zeros(self.heads, 0) if self.taps is None else self.taps
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), taps
        options = {
            "heads": self.heads,
            "landmarks": self.landmarks,
            "iterations": self.iterations,
            "positions": positions,
        }
        return args, {**options, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        D, m, H = self.dim, self.landmarks, self.heads
        skip = 2 * T * D * (self.conv_kernel or 0)
        flops = 12 * T * m * D + 4 * m * m * D + 8 * self.iterations * m**3 * H + skip
        kept = 8 * (2 * T * m * H + 5 * T * D + (2 + 6 * self.iterations) * m * m * H)
        return MixingCost(flops=flops, counted=flops, activations=kept + 4 * 3 * T * D)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return largest_dot(args[0], args[1], options["heads"])
