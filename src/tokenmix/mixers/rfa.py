"""Random feature attention (Peng et al. 2021, arXiv 2103.02143) as a layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.performer import orthogonal_features
from ..functional.rfa import check_feature, features, keys, over_keys, read, rfa_chunk
from ..functional.sums import features as sums
from .base import QKVO, About, Arguments, Facts, Inputs, register_state
from .cost import MixingCost
from .parts.options import at_least
from .parts.shared import add_projections
from .segments import Segmented


@register_state
class RFAState(NamedTuple):
    """Sums over all keys so far, in float64. The size is constant.

    m (B, H, 1): the scale. acc (B, H, e + 1, M' + 1): sums of (value, 1) times (features, 1).
    """

    m: Tensor
    acc: Tensor


class RFA(Segmented):
    """RFA: linear attention with trigonometric random features of unit queries and keys.

    The features estimate the kernel exp(-|sigma (q - k)|^2 / 2). Peng et al. 2021, arXiv:2103.02143. Maps (B, T, D) to
    (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim. Each draws its own projection.
        num_features: M, the number of random directions per head; "gaussian" has 2 M features (sine and cosine). None:
            e = dim / heads.
        feature: "gaussian" (default), or "arccos": max(w . x, 0), the arc-cosine kernel.
        gate: True: a recency gate g_t = sigmoid(w_g . x_t + b_g) per head, S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t
            (RFA-Gate). A query of the bidirectional form, or over a context, reads the state after all keys. Default
            False.
        eps: smallest mean weight that a denominator may have, 0.01 by default.

    Parameters: q_proj, k_proj, v_proj, out_proj, ``sigma`` (H, e), which starts at 1, and ``gate_proj`` with ``gate``.
    The projection (H, M, e) is a buffer, kept in checkpoints. Time O(T M D). The streaming state is heads x (e + 1) x
    (2 M + 1) numbers and ``heads`` scales.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        about=About(
            "Peng et al. 2021, arXiv 2103.02143",
            "kernel",
            "T M D",
            "T H M",
            idea="softmax by random Fourier features, with an optional gate",
            tier="core",
        ),
        form="rfa",
        carries=QKVO,
    )
    projection: Tensor
    k_proj: nn.Linear
    v_proj: nn.Linear
    gate_proj: nn.Linear | None

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        num_features: int | None = None,
        feature: str = "gaussian",
        gate: bool = False,
        eps: float = 0.01,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        check_feature(type(self).__name__, feature, eps)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.heads = heads
        e = dim // heads
        self.num_features = e if num_features is None else num_features
        at_least(self, 1, num_features=self.num_features)
        self.feature, self.eps = feature, eps
        self.gate_proj = nn.Linear(dim, heads) if gate else None
        self.sigma = nn.Parameter(torch.empty(heads, e))
        self.register_buffer("projection", torch.empty(heads, self.num_features, e))
        self.init_parameters()

    def init_parameters(self) -> None:
        """Set sigma to 1, and draw the projections from torch's CPU generator, whatever the device."""
        with torch.no_grad():
            self.sigma.fill_(1.0)
            self.projection.copy_(
                orthogonal_features(self.heads, self.num_features, self.dim // self.heads, orthogonal=False)
            )

    def _of_keys(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return k, v, projection, sigma and, with ``gate``, the gate."""
        given = self.k_proj(x), self.v_proj(x), self.projection, self.sigma
        return given if self.gate_proj is None else (*given, self.gate_proj(x))

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.rfa`` for this input: (positional, keyword)."""
        args = self.q_proj(inputs.x), *self._of_keys(inputs.keys)
        return args, {
            "heads": self.heads,
            "feature": self.feature,
            "eps": self.eps,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    @property
    def _widths(self) -> tuple[int, int]:
        """Return the width of a value with its 1, and the number of features."""
        return self.dim // self.heads + 1, self.num_features * (2 if self.feature == "gaussian" else 1)

    def mixing_cost(self, T: int) -> MixingCost:
        (e1, M), H, D = self._widths, self.heads, self.dim
        flops = 4 * T * D * self.num_features + 2 * T * H * e1 * (M + 1) + 2 * T * H * e1 * M
        return MixingCost(
            flops=flops,
            counted=flops,
            activations=4 * T * 2 * D + 8 * T * (5 * H * M + 6 * D),
            state=8 * H * (e1 * (M + 1) + 1),
        )

    def _map_keys(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, ...]:
        k, v, projection, sigma, *gate = self._of_keys(x)
        return keys(k, v, projection, sigma, gate[0] if gate else None, self.feature, key_mask)

    def empty_state(self, batch_size, *, device, dtype):
        e1, M = self._widths
        m, acc = sums.empty_features(batch_size, self.heads, M + 1, e1 - 1, device=device)
        return RFAState(m[..., :1], acc)

    def context_state(self, context, context_mask):
        if context.shape[1] == 0:
            return self.empty_state(context.shape[0], device=context.device, dtype=context.dtype)
        s = over_keys(*self._map_keys(context, context_mask)[:3])
        return RFAState(s.m[:, :, 0], s.acc[:, :, 0])

    def fades(self, x, valid):
        if self.gate_proj is None:
            return x.new_zeros(x.shape[0], self.heads, 1, dtype=torch.float64), None
        kept = torch.where(valid[..., None], F.logsigmoid(self.gate_proj(x).double()), 0.0)
        return kept.sum(1)[..., None], None

    def join_states(self, earlier, later, fade):
        return RFAState(*sums.merge_past((earlier.m + fade, earlier.acc), later))

    def mix_chunk(self, x, state, *, positions, key_mask):
        q = self.q_proj(x)
        if not self.causal:
            fq = features(q, self.projection, self.sigma, self.feature)
            return self.out_proj(sums.joined_heads(read(fq, sums.as_total(state), self.eps), q)), state
        k, v, projection, sigma, *gate = self._of_keys(x)
        options = {"feature": self.feature, "eps": self.eps, "key_mask": key_mask}
        y, past = rfa_chunk(q, k, v, state, projection, sigma, gate[0] if gate else None, **options)
        return self.out_proj(y), RFAState(*past)
