"""AFT-conv whose filters have one tap each, so that the windowed sum is a gather.

This is the sparse variant in the appendix of the AFT paper.
"""

from __future__ import annotations

import copy
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.sums.gates import Gate, apply_gate, check_gate
from ..functional.sums.softmax import Sums, merge_heads, products, ratio_of, split_heads64
from ..mixers import Facts, Mixer
from ..mixers.aft_conv import AFTConv
from ..mixers.base import Arguments, Inputs
from ..mixers.cost import MixingCost


class OneHotConv(Mixer):
    """AFT-conv (Eq. 6) that keeps only the tap of largest magnitude of each head's filter exp(w) - 1.

    It equals AFT-conv with ``kernel()``, which is 0 except for one tap per head. It is meant for analysis: time and
    memory are O(T D) for any kernel size, but it runs in plain torch and float64; AFT-conv's C kernel with the filter
    ``kernel()`` is faster.

    Args:
        mixer: an ``AFTConv`` with outside="zero", filters="exp" and divide=True, not causal. Its projections are
            copied; of each filter, only the position and the log-weight of the kept tap are.

    Attributes:
        offset: (h, ndim) cells from a query to the key that its head weighs.
        weight: (h,) log-weight of that key, learnable.
        kept: (h,) share of the kept tap in the sum of |exp(w) - 1| over its filter; 1 if the filter was one-hot and
            nothing is lost.
    """

    facts = Facts(grid=True, about=AFTConv.facts.about._replace(time="T D"))

    def __init__(self, mixer: AFTConv):
        super().__init__(mixer.dim)
        if mixer.causal or mixer.outside != "zero":
            self.refuse(
                f"needs an AFT-conv that is not causal and has outside='zero', got causal={mixer.causal}, "
                + f"outside={mixer.outside!r}"
            )
        if mixer.filters != "exp" or not mixer.divide:
            self.refuse(
                f"needs an AFT-conv with filters='exp' and divide=True, got filters={mixer.filters!r}, "
                + f"divide={mixer.divide}"
            )
        self.heads, self.kernel_size, self.ndim, self.gate = mixer.heads, mixer.kernel_size, mixer.ndim, mixer.gate
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.register_module(
                name, copy.deepcopy(mixer.get_submodule(name)) if mixer._modules[name] is not None else None
            )
        offset, weight, kept = largest_taps(mixer.kernel().detach())
        self.register_buffer("offset", offset)
        self.register_buffer("kept", kept)
        self.weight = nn.Parameter(weight)

    offset: Tensor
    kept: Tensor

    def kernel(self) -> Tensor:
        """Return the log-weights (h, s, ...) of the AFT-conv that this equals."""
        taps = (self.offset + self.kernel_size // 2).unbind(-1)
        full = self.weight.new_zeros(self.heads, *[self.kernel_size] * self.ndim)
        return full.index_put((torch.arange(self.heads, device=full.device), *taps), self.weight)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``aft_one_hot`` for this input: (positional, keyword)."""
        x, grid = inputs.x, inputs.grid
        if len(grid or (1,)) != self.ndim:
            self.refuse(f"mixes grids of {self.ndim} dimensions, got grid={grid}")
        q = x if self.q_proj is None else self.q_proj(x)
        args = q, self.k_proj(x), self.v_proj(x), self.offset, self.weight
        return args, {
            "grid": grid,
            "prefix": inputs.prefix,
            "positions": inputs.positions,
            "key_mask": inputs.key_mask,
            "gate": self.gate,
        }

    def mix(self, inputs: Inputs) -> Tensor:
        args, options = self.functional_args(inputs)
        return self.out_proj(aft_one_hot(*args, **options))

    def mixing_cost(self, T: int) -> MixingCost:
        D, h = self.dim, self.heads
        return MixingCost(flops=8 * T * (D + h), counted=0, activations=60 * T * D + 60 * h * T, state=0)


def aft_one_hot(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor,
    weight: Tensor,
    *,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    gate: Gate | None = "sigmoid",
) -> Tensor:
    """Compute, per head, y_t = gate(q_t) * [sum_s e^{k_s} v_s + c e^{k_u} v_u] / [sum_s e^{k_s} + c e^{k_u}].

    Here c = e^w - 1 and u = t + offset. If e^w < 1, this form subtracts what it has just added. The sum over all keys
    but u is therefore computed from sums before and after u, and e^w e^{k_u} is added to it, so that all terms are
    positive.

    Args:
        q: (B, T, D).
        k: (B, T, h), as ``functional.aft_conv``.
        v: (B, T, D).
        offset: (h, axes) integers, the cells from a query to the one key of its head; a query whose key is not on the
            grid sees every key with weight 0.
        weight: (h,) log-weights w.
        grid: as ``functional.aft_conv``.
        prefix: as ``functional.aft_conv``.
        positions: as ``functional.aft_conv``; every position occurs once in a row.
        key_mask: as ``functional.aft_conv``.
        gate: as ``functional.aft_conv``.

    Returns:
        (B, T, D) in q's dtype. Time and memory are O(T D); sums are in float64.
    """
    _check(q, k, v, offset, weight, grid, gate)
    B, T, heads = *q.shape[:2], len(offset)
    if q.numel() == 0:
        return torch.zeros_like(q)
    source = sources(offset, grid or ((T - prefix,) if prefix else None), prefix, positions, T)
    m, terms = products(*split_heads64(k, v, key_mask, heads))  # (B, h, T, g + 1, 1)
    others = _sum_before(terms) + _sum_before(terms.flip(2)).flip(2)
    at = source.clamp_min(0).expand(B, heads, T)[..., None, None].expand_as(terms)
    weighed = others.gather(2, at) + torch.exp(weight.double())[:, None, None, None] * terms.gather(2, at)
    acc = torch.where((source >= 0)[..., None, None], weighed, terms.sum(2, keepdim=True))
    return apply_gate(q, merge_heads(ratio_of(Sums(m, torch.zeros_like(m), acc))), gate)


def _check(
    q: Tensor, k: Tensor, v: Tensor, offset: Tensor, weight: Tensor, grid: tuple[int, ...] | None, gate: Gate | None
) -> None:
    check_gate(gate, "aft_one_hot")
    B, T, D = q.shape
    heads, axes = offset.shape
    if (
        v.shape != q.shape
        or k.shape != (B, T, heads)
        or D % heads
        or weight.shape != (heads,)
        or len(grid or (1,)) != axes
    ):
        shapes = (
            f"v {tuple(v.shape)}, k {tuple(k.shape)}, offset {tuple(offset.shape)}, weight {tuple(weight.shape)}, grid "
            + f"{grid}"
        )
        raise MixerError(
            f"aft_one_hot: expects q and v {(B, T, D)}, k (B, T, h), offset (h, axes), weight (h,) and a grid of as "
            + f"many axes, got {shapes}."
        )


def sources(offset: Tensor, grid: tuple[int, ...] | None, prefix: int, positions: Tensor | None, T: int) -> Tensor:
    """Return the index of the token that each query's one tap falls on, (1 or B, h, T).

    It is -1 if there is none, as for prefix tokens.
    """
    device = offset.device
    position_of = torch.arange(T, device=device)[None] if positions is None else positions.long()
    if grid is None:
        wanted, inside = position_of[:, None] + offset[None], torch.ones_like(position_of, dtype=torch.bool)[:, None]
    else:
        cells = torch.tensor(list(product(*map(range, grid))), device=device)[
            (position_of - prefix).clamp_min(0)
        ]  # (1 or B, T, axes)
        target_cells = cells[:, None] + offset[None, :, None]
        inside = ((target_cells >= 0) & (target_cells < torch.tensor(grid, device=device))).all(-1) & (
            position_of >= prefix
        )[:, None]
        strides = torch.tensor([prod(grid[a + 1 :]) for a in range(len(grid))], device=device)
        wanted = prefix + (target_cells * strides).sum(-1)
    ordered, order = position_of.sort(1)
    shape = wanted.shape
    near = torch.searchsorted(ordered, wanted.flatten(1).contiguous()).clamp_max(T - 1)
    found = (ordered.gather(1, near) == wanted.flatten(1)).view(shape)
    return torch.where(found & inside, order.gather(1, near).view(shape), -1)


def _sum_before(terms: Tensor) -> Tensor:
    """Compute, along dim 2, the sum of all terms before each."""
    return torch.cat([torch.zeros_like(terms[:, :, :1]), terms[:, :, :-1].cumsum(2)], 2)


def largest_taps(kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the tap with the largest |exp(w) - 1| of each head, from log-weights (h, s, ...).

    Returns its offset from the middle (h, axes), its w (h,), and its share of the sum (h,).
    """
    extra = torch.expm1(kernel.double()).abs().flatten(1)
    best = extra.argmax(1)
    total = extra.sum(1)
    top = extra.gather(1, best[:, None])[:, 0]
    weight = kernel.flatten(1).gather(1, best[:, None])[:, 0].clone()
    taps = torch.stack(torch.unravel_index(best, kernel.shape[1:]), -1)
    return taps - kernel.shape[-1] // 2, weight, torch.where(total > 0, top / total.clamp_min(1e-300), 1.0)


def to_gather(module: nn.Module) -> nn.Module:
    """Copy an ``AFTConv``, or a model, with a ``OneHotConv`` in place of every AFT-conv.

    One tap of each head's filter remains and is read by index. ``kept`` of each layer says how much of its filters
    remains: near 1 after training with ``tokenmix.lab.train.sparsity.one_hot_penalty``.

    Raises:
        MixerError: if there is no AFT-conv, or one that is causal or has outside="none".
    """
    if isinstance(module, AFTConv):
        return OneHotConv(module).train(module.training)
    found = [name for name, part in module.named_modules() if isinstance(part, AFTConv)]
    if not found:
        raise MixerError(
            f"to_gather: {type(module).__name__} has no AFT-conv; it needs mixers like {{'name': 'aft_conv', ...}}."
        )
    module = copy.deepcopy(module)
    for name in found:
        module.set_submodule(name, to_gather(module.get_submodule(name)))
    return module
