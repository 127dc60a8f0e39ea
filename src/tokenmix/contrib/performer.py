"""Performer (Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv 2009.14794) as a layer."""

from __future__ import annotations

from math import ceil, log

import torch
from torch import Tensor

from .. import functional
from ..functional.performer import check_feature, log_keys, log_queries, orthogonal_features, performer_chunk
from ..functional.sums import features as sums
from ..kernels.recompute import Passes, is_recomputing
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs
from ..mixers.cost import MixingCost
from ..mixers.parts.feature_state import KernelState, kernel_cost, over_context
from ..mixers.parts.options import at_least
from ..mixers.parts.shared import add_projections
from ..mixers.segments import Segmented


class Performer(Segmented):
    """Performer: linear attention with random features that estimate softmax attention (FAVOR+).

    E[phi(q) . phi(k)] = exp(q . k / sqrt(e)). Choromanski et al. 2021, arXiv:2009.14794. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim. Each draws its own projection.
        num_features: M, the number of random features per head. None: ceil(e ln e), at least e, with e = dim / heads.
        feature: "softmax" (default): positive features of the softmax kernel; "relu": generalised attention, which
            estimates another kernel.
        eps: added to "relu" features to keep them positive, 1e-3 by default.
        orthogonal: True (default): the projections in a block of e features are orthogonal.
        redraw_interval: in train mode, redraw the projections after every ``redraw_interval`` forward passes. None
            (default): never. Under torch.compile nothing is redrawn; call ``redraw()``.

    The projection (H, M, e) and the number of forward passes are buffers, kept in checkpoints. In train mode redrawing
    makes the output depend on the number of earlier forward passes; it never lets rows influence each other.

    Parameters: q_proj, k_proj, v_proj, out_proj. Time O(T M D). The streaming state is heads x M x (e + 2) numbers and
    depends on the projection: do not redraw while streaming.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        about=About(
            "Choromanski et al. 2021, arXiv 2009.14794",
            "kernel",
            "T M D",
            "T H M",
            idea="softmax by orthogonal positive random features (FAVOR+)",
        ),
        form="performer",
        carries=QKVO,
    )
    projection: Tensor
    forwards: Tensor

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        num_features: int | None = None,
        feature: str = "softmax",
        eps: float = 1e-3,
        orthogonal: bool = True,
        redraw_interval: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        check_feature(type(self).__name__, feature, eps)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.heads = heads
        e = dim // heads
        self.num_features = max(e, ceil(e * log(e))) if num_features is None else num_features
        at_least(
            self, 1, num_features=self.num_features, redraw_interval=1 if redraw_interval is None else redraw_interval
        )
        self.feature, self.eps, self.orthogonal, self.redraw_interval = feature, eps, orthogonal, redraw_interval
        self._passes = Passes()
        self.register_buffer("projection", torch.empty(heads, self.num_features, e))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.init_parameters()

    def init_parameters(self) -> None:
        """Draw the projections from torch's CPU generator, whatever the device."""
        with torch.no_grad():
            self.projection.copy_(self._draw_features())
            self.forwards.zero_()

    def _draw_features(self) -> Tensor:
        return orthogonal_features(self.heads, self.num_features, self.dim // self.heads, orthogonal=self.orthogonal)

    def redraw(self) -> None:
        """Draw new projections, into a new tensor so that a pending backward pass keeps the old one."""
        self.projection = self._draw_features().to(self.projection)

    def _count(self) -> None:
        if (
            self.training
            and self.redraw_interval is not None
            and not torch.compiler.is_compiling()
            and not self.forwards.is_meta
            and not is_recomputing()
        ):
            if int(self.forwards) and int(self.forwards) % self.redraw_interval == 0:
                self.redraw()
            self.forwards += 1

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.performer`` for this input: (positional, keyword)."""
        keys = inputs.keys
        args = self.q_proj(inputs.x), self.k_proj(keys), self.v_proj(keys), self.projection
        return args, {
            "heads": self.heads,
            "feature": self.feature,
            "eps": self.eps,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mix(self, inputs: Inputs) -> Tensor:
        self._count()
        (q, k, v, projection), options = self.functional_args(inputs)
        if self.training and self.redraw_interval is not None:
            projection = self._passes.first(type(self).__name__, inputs.x, projection)
        return self.out_proj(functional.performer(q, k, v, projection, **options))

    def mixing_cost(self, T: int) -> MixingCost:
        return kernel_cost(T, self.dim, self.heads, self.num_features, drawn=True)

    def _map_keys(self, x, key_mask):
        return log_keys(self.k_proj(x), self.v_proj(x), self.projection, self.feature, self.eps, key_mask)

    def empty_state(self, batch_size, *, device, dtype):
        return KernelState(
            *sums.empty_features(batch_size, self.heads, self.num_features, self.dim // self.heads, device=device)
        )

    def context_state(self, context, context_mask):
        return KernelState(*sums.absorb(*self._map_keys(context, context_mask)))

    def mix_chunk(self, x, state, *, positions, key_mask):
        q = self.q_proj(x)
        if not self.causal:
            return self.out_proj(over_context(q, log_queries(q, self.projection, self.feature, self.eps), state)), state
        options = {"feature": self.feature, "eps": self.eps, "key_mask": key_mask}
        y, past = performer_chunk(q, self.k_proj(x), self.v_proj(x), state, self.projection, **options)
        return self.out_proj(y), KernelState(*past)
