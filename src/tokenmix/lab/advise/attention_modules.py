"""The attention of a model: softmax attention in known hosts and in our models, and the parts a replacement keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...hosts.surgery import find_attention
from ...hosts.surgery.sites import unknown_hint
from ...mixers import MIXERS, Mixer
from ...mixers.attention import Attention
from ...types import Options


@dataclass(frozen=True)
class AttentionModule:
    """One attention module: its dotted name, the module, its family (of ``FAMILIES``, or "tokenmix"), and its shape."""

    name: str
    module: Any
    family: str
    dim: int
    heads: int
    causal: bool
    cross: bool = False

    def list_kept_modules(self) -> list[nn.Module]:
        """Return the modules inside that hold weights and mix no tokens: projections, norms.

        A replacement keeps them or has its own.
        """
        return [
            m
            for m in self.module.modules()
            if next(m.children(), None) is None and next(m.parameters(), None) is not None and m is not self.module
        ]


def modules_of(model: nn.Module, where: str) -> list[AttentionModule]:
    """Return every attention module of a model.

    Raises:
        MixerError: there is none; the message names what the model has instead.
    """
    found = [
        AttentionModule(s.name, model.get_submodule(s.name), s.family, s.dim, s.heads, s.causal, s.cross)
        for s in find_attention(model)
    ]
    own: Any = [(name, m) for name, m in model.named_modules() if type(m) is Attention]
    found += [AttentionModule(name, m, "tokenmix", m.dim, m.heads, m.causal) for name, m in own]
    if found:
        return found
    mixers = {cls: name for name, cls in MIXERS.items()}
    ours = ", ".join(
        dict.fromkeys(mixers.get(type(m), type(m).__name__) for m in model.modules() if isinstance(m, Mixer))
    )
    if ours:
        raise MixerError(f"advise: {where}: has no softmax attention to replace; its layers mix by {ours}.")
    raise MixerError(f"advise: {where}: {type(model).__name__} has no attention of a known family{unknown_hint(model)}")


def torch_projections(module: Any, seen: tuple[Any, ...], named: Options) -> Callable[[], Tensor]:
    """Return a call that computes what ``nn.MultiheadAttention`` does to each token alone, on the inputs it saw.

    It has no modules for these projections that could be timed.
    """
    inputs: list[Any] = [
        named.get(name, seen[i] if i < len(seen) else None) for i, name in enumerate(("query", "key", "value"))
    ]
    whole, out = module.in_proj_weight, module.out_proj
    weights = (
        [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight] if whole is None else list(whole.chunk(3))
    )
    same = whole is not None and inputs[0] is inputs[1] is inputs[2]
    linear = F.linear

    def call() -> Tensor:
        if same:
            mixed = linear(inputs[0], whole, module.in_proj_bias)[..., : module.embed_dim]
        else:
            mixed = [linear(x, weight) for x, weight in zip(inputs, weights, strict=True)][0]
        return linear(mixed, out.weight, out.bias)

    return call
