"""The size of what is measured, and the least work that an exact computation of that size takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import Mixer, MixingCost
from ...mixers.cost import projection_flops
from ...models import LM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """The size of what is measured.

    ``T`` counts the tokens of the sequence, or of the context that was read before one more token is decoded.
    """

    level: str
    T: int
    batch: int = 4
    dim: int = 512
    heads: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = True
    backward: bool = False
    grid: tuple[int, ...] | None = None
    layers: int = 2
    vocab: int = 256

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Work:
    """The least work of an exact computation.

    Args:
        read, written: bytes, each tensor once in each pass.
        flops: a multiply and an add are two.
        held: the bytes between two uses of the same byte, which decide which cache can hold them.
    """

    read: float
    written: float
    flops: float
    held: float

    @property
    def bytes_moved(self) -> float:
        """All bytes read and written."""
        return self.read + self.written


def work_of(read: float, written: float, flops: float, backward: bool) -> Work:
    """Return the work of a call that reads its arguments and writes its output.

    Backward reads them again with the output's gradient, and writes theirs. It begins with what forward used last, so
    at most half of the pair lies between two uses of a byte.
    """
    held = read + written
    return Work(2 * read + written, written + read, 3 * flops, held) if backward else Work(read, written, flops, held)


def causal_share(mixer: Mixer, T: int) -> float:
    """Return the part of a mixer's formula that its causal form computes: weighing pairs, it skips those ahead."""
    weighs_pairs = "T^2" in mixer.facts.about.time or type(mixer).__name__ in ("Local", "AFTLocal")
    return (T + 1) / (2 * T) if mixer.causal and weighs_pairs else 1.0


def op_work(mixer: Mixer, leaves: list[Tensor], s: Setting) -> Work:
    """Return the work of an operation: each argument is read once and the output written once.

    Backward reads the arguments again with the output's gradient, and writes their gradients.
    """
    read = sum(float(a.numel()) * a.element_size() for a in leaves)
    wrote = float(s.batch * s.T * s.dim * leaves[0].element_size())
    flops = s.batch * mixing_cost(mixer, s.T).flops * causal_share(mixer, s.T)
    return work_of(read, wrote, flops, s.backward)


def mixing_cost(mixer: Mixer, T: int) -> MixingCost:
    """Return the cost by the mixer's formula, 0 where it has none."""
    try:
        cost: MixingCost = mixer.mixing_cost(T)
        return cost
    except MixerError:
        return MixingCost(0, None, 0)


def layer_work(layer: nn.Module, s: Setting) -> Work:
    """Return the work of the projections and the mixing: x and the parameters are read, y is written.

    Of peers only the Linear layers are counted.
    """
    weights = sum(p.numel() for p in layer.parameters()) * s.torch_dtype.itemsize
    tokens = s.batch * s.T * s.dim * s.torch_dtype.itemsize
    if isinstance(layer, Mixer):
        mixing = mixing_cost(layer, s.T)
        projections = projection_flops(layer, s.T) if mixing.projections is None else mixing.projections
        flops = s.batch * (projections + mixing.flops * causal_share(layer, s.T))
    else:
        flops = float(s.batch * projection_flops(layer, s.T))
    return work_of(float(tokens + weights), float(tokens), flops, s.backward)


def model_work(model: LM, s: Setting) -> Work:
    """Return the work of a whole model.

    It is the FLOPs of every layer and of the head, three times with backward; the parameters, with AdamW's two moments,
    are read and written once.
    """
    each = sum(layer_work(b.mixer, _plain_setting(s)).flops for b in model.blocks)
    dense = sum(
        2.0 * s.batch * s.T * p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and ("mlp" in name or "head" in name)
    )
    weights = float(sum(p.numel() for p in model.parameters()) * s.torch_dtype.itemsize)
    flops = each + dense
    return Work(4 * weights, 4 * weights, 3 * flops, weights) if s.backward else Work(weights, 0.0, flops, weights)


def _plain_setting(s: Setting) -> Setting:
    return Setting("layer", s.T, s.batch, s.dim, s.heads, s.dtype, s.device)
