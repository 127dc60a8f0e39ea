"""Mixers for comparison only: softmax attention, and others, with the parts that AFT-forget has.

Without them a gain of AFT-forget might be that of its parts, which help attention too. A sweep loads this file by its
field "modules". They neither stream nor export; training is all that they are for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix import build_mixer, register_mixer
from tokenmix.mixers import Facts, Inputs, Mixer, mixer_options
from tokenmix.mixers.parts.short_conv import ShortConv
from tokenmix.mixers.table import MIXERS
from tokenmix.positions.rotary import RotaryPositions


class Convolved(Mixer):
    """Another mixer behind a short convolution of its input.

    Args:
        then: spec of the mixer.
        max_len: filled in where that mixer needs it.
    """

    facts = Facts(causal=True, knows_positions=True)

    def __init__(self, dim: int, *, then: dict[str, Any], causal: bool = False, max_len: int | None = None):
        super().__init__(dim, causal=causal, max_len=max_len)
        longest = {"max_len": max_len} if "max_len" in mixer_options(MIXERS[then["name"]]) else {}
        self.conv = ShortConv(dim, 4, causal=causal)
        self.then = build_mixer(dim=dim, causal=causal, **longest | then)

    def mix(self, inputs: Inputs) -> Tensor:
        """Convolve, then mix."""
        x = self.conv(inputs.x, positions=inputs.positions, key_mask=inputs.key_mask)
        return self.then(**inputs._replace(x=x)._asdict())


class AttentionWithParts(Mixer):
    """Softmax attention with normalised queries and keys, and any of the parts of AFT-forget.

    Args:
        heads: number of heads.
        rotary: rotary positions.
        base: base of their frequencies.
        conv: a convolution of 4 tokens over queries, keys and values.
        forget: a forget gate per head, added to the logits (FoX, Lin et al. 2025, arXiv 2503.02130, Eq. 4).
        norm: RMS norm of each head's output.
        gate: a sigmoid gate of the output.
    """

    facts = Facts(causal=True, knows_positions=True)

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        causal: bool = False,
        rotary: bool = True,
        base: float = 100.0,
        conv: bool = True,
        forget: bool = False,
        norm: bool = False,
        gate: bool = False,
    ):
        super().__init__(dim, causal=causal)
        if not causal:
            self.refuse("has no bidirectional form; build it with causal=True")
        self.heads, self.norm = heads, norm
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(dim, dim))
        self.rotary = RotaryPositions(dim // heads, base=base) if rotary else None
        self.conv = ShortConv(3 * dim, 4, causal=causal) if conv else None
        self.f_proj = nn.Linear(dim, heads, bias=False) if forget else None
        self.open = nn.Parameter(torch.linspace(0.0, 6.0, heads)) if forget else None
        self.g_proj = nn.Linear(dim, dim) if gate else None
        self.init_parameters()

    def init_parameters(self) -> None:
        for layer in (self.f_proj, self.g_proj):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)
        if self.open is not None:
            with torch.no_grad():
                self.open.copy_(torch.linspace(0.0, 6.0, self.heads))

    def mix(self, inputs: Inputs) -> Tensor:
        """Attend."""
        x = inputs.x
        if inputs.key_mask is not None or inputs.positions is not None:
            self.refuse("attends every token before a query and takes neither a key_mask nor positions")
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        qkv = qkv if self.conv is None else self.conv(qkv)
        q, k, v = (a.unflatten(-1, (self.heads, -1)) for a in qkv.chunk(3, -1))
        q, k = (F.rms_norm(a, a.shape[-1:]).flatten(2) for a in (q, k))
        if self.rotary is not None:
            q, k = self.rotary(torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1), q, k)
        q, k = (a.unflatten(-1, (self.heads, -1)) for a in (q, k))
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        bias = None
        if self.f_proj is not None:
            past = F.logsigmoid(self.f_proj(x) + self.open).transpose(1, 2).cumsum(-1)
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            bias = (past[..., :, None] - past[..., None, :]).masked_fill(later, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None).transpose(1, 2)
        y = (F.rms_norm(y, y.shape[-1:], eps=1e-6) if self.norm else y).flatten(2)
        return self.out_proj(y if self.g_proj is None else torch.sigmoid(self.g_proj(x)) * y)


register_mixer("convolved", Convolved)
register_mixer("attention_with_parts", AttentionWithParts)
