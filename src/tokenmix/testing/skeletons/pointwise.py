"""A mixer whose features are apart, both ways, with a state of constant size: the mean of the values."""

from __future__ import annotations

REFERENCE = '''"""NAME as in its paper."""

from __future__ import annotations

import torch
from torch import Tensor


def NAME(v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Compute y_t = sum_s v_s / n_t over the n_t keys s that t may attend; 0 where there is none."""
    B, T, _ = v.shape
    mask = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask
    y = torch.zeros_like(v)
    for b in range(B):
        for t in range(T):
            if mask[b, t].any():
                y[b, t] = v[b, mask[b, t]].mean(0)
    return y
'''

MIXER = '''"""NAME: the mean of the values that a token may attend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..functional.layout.masks import zero_masked
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer, register_state
from ..mixers.cost import MixingCost


def NAME(
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s v_s / n_t over the n_t keys s that t may attend.

    Args:
        v: values (B, T, D).
        causal: whether t attends s <= t only.
        key_mask: (B, T) bool, True = this key may be attended.

    Returns:
        (B, T, D) in v's dtype; 0 where there is nothing to attend. Time and memory O(T D).
    """
    choose("NAME", backend, v)
    total, count = sums(v, key_mask)
    total, count = (a.cumsum(1) if causal else a.sum(1, keepdim=True) for a in (total, count))
    return (total / count.clamp_min(1.0)).to(v.dtype).expand_as(v)


def sums(v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what each token adds to the sum of the values and to their number.

    Both are float32 or better, and 0 where the token is masked.
    """
    v = at_least_float32(zero_masked(v, key_mask))
    return v, v.new_ones(()).expand(*v.shape[:2], 1) if key_mask is None else key_mask[..., None].to(v.dtype)


@register_state
class CLASSState(NamedTuple):
    """The sum of the values so far, ``total`` (B, D), and their number, ``keys`` (B, 1). The size is constant."""

    total: Tensor
    keys: Tensor


class CLASS(Mixer):
    """y_t = W_o [sum_s v_s / n_t], the mean of the values that t may attend.

    Authors year, Eq. n. Maps (B, T, D) to (B, T, D).

    Args:
        qkv_bias: whether v_proj has a bias, True by default.
        out_bias: whether out_proj has a bias, True by default.

    Parameters: v_proj, out_proj. Time and memory O(T D). The streaming state is D + 1 numbers.

    Deviations: none yet.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        about=About("Authors year", "pooling", "T D", "T D", idea="the mean of the values"),
        form=NAME,
        carries=("v_proj", "out_proj"),
    )

    def __init__(self, dim: int, *, causal: bool = False, qkv_bias: bool = True, out_bias: bool = True):
        super().__init__(dim, causal=causal)
        self.v_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``NAME`` for this input."""
        return (self.v_proj(inputs.x),), {"causal": self.causal, "key_mask": inputs.key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return MixingCost(flops=2 * T * self.dim, counted=0, activations=6 * T * self.dim, state=4 * self.dim + 4)

    def empty_state(self, batch_size, *, device, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        zeros = (torch.zeros(batch_size, n, device=device, dtype=wide) for n in (self.dim, 1))
        return CLASSState(*zeros)

    def mix_chunk(self, x, state, *, positions, key_mask):
        v = self.v_proj(x)
        added = sums(v, key_mask)
        total, keys = (past[:, None] + new.to(past.dtype).cumsum(1) for past, new in zip(state, added, strict=True))
        y = (total / keys.clamp_min(1.0)).to(v.dtype)
        return self.out_proj(y), CLASSState(total[:, -1], keys[:, -1])
'''

PAGE = """# TITLE

Row `NAME`. Authors year, "Title".

## Equation

```math
y_t = \\frac{1}{n_t} \\sum_s v_s
```

over the $n_t$ keys $s$ that $t$ may attend.

## Cost

Time and memory O(T D). The streaming state is the sum of the values so far and their number.

## Options

| option | default | meaning |
|---|---|---|
| `qkv_bias`, `out_bias` | True | whether the projections have biases |

## Example

```python
>>> import torch, tokenmix
>>> tokenmix.build_mixer("NAME", dim=32, causal=True)(torch.randn(2, 20, 32)).shape
torch.Size([2, 20, 32])

```

## Deviations and notes

- None yet.
"""
