"""A mixer that weighs pairs of tokens, both ways and over a context, with a growing state: softmax attention."""

from __future__ import annotations

REFERENCE = '''"""NAME as in its paper."""

from __future__ import annotations

import torch
from torch import Tensor


def NAME(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute y_t = sum_s w_ts v_s in each head, w_ts = softmax over s of q_t . k_s / sqrt(e); 0 without a key."""
    qh, kh, vh = (a.unflatten(-1, (heads, -1)).transpose(1, 2) for a in (q, k, v))
    logits = qh @ kh.mT / qh.shape[-1] ** 0.5
    mask = torch.ones_like(logits[:, 0], dtype=torch.bool) if mask is None else mask
    weights = logits.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    y = torch.where(mask.any(-1)[:, None, :, None], weights.nan_to_num() @ vh, 0.0)
    return y.transpose(1, 2).flatten(2)
'''

MIXER = '''"""NAME: softmax of dot products, in heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.layout.checks import check_qkv
from ..functional.layout.heads import by_head, join_heads
from ..functional.layout.masks import allowed, zero_masked
from ..functional.sums.nonfinite import guard_nonfinite
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts.shared import add_projections, largest_dot, valid_mask


@exact
@guard_nonfinite("k", "v", asks="q")
def NAME(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s w_ts v_s in each head, where w_ts is the softmax over s of q_t . k_s / sqrt(e).

    Args:
        q: queries (B, T, H e).
        k, v: keys and values (B, S, H e).
        heads: number of heads H.
        causal: whether the last query sees every key, and each before it one key less.
        key_mask: (B, S) bool, True = this key may be attended.
        attn_mask: (T, S) or (B, T, S) bool, True = this pair may.

    Returns:
        (B, T, H e) in q's dtype; 0 where there is nothing to attend. Time and memory O(T S).
    """
    choose("NAME", backend, q, k, v)
    check_qkv("NAME", q, k, v, heads, False, key_mask)
    masks = {"key_mask": key_mask, "attn_mask": attn_mask, "device": q.device}
    ok = allowed(len(q), q.shape[1], k.shape[1], causal=causal, **masks)[:, None]
    qh, kh, vh = (by_head(at_least_float32(a), heads) for a in (q, zero_masked(k, key_mask), zero_masked(v, key_mask)))
    logits = (qh * qh.shape[-1] ** -0.5) @ kh.mT
    weights = torch.where(ok, logits, torch.finfo(logits.dtype).min).softmax(-1)
    y = torch.where(ok.any(-1, keepdim=True), weights @ vh, 0.0)
    return join_heads(y).to(q.dtype)


@register_state
class CLASSState(NamedTuple):
    """The ``keys`` and ``values`` (B, S, D) of all tokens so far, and which are ``valid`` (B, S). It grows."""

    keys: Tensor
    values: Tensor
    valid: Tensor


class CLASS(Mixer):
    """y_t = W_o [sum_s w_ts v_s] in each head, where w_ts is the softmax over s of q_t . k_s / sqrt(e).

    Authors year, Eq. n. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim. Each has e = dim / heads features.
        qkv_bias: whether q_proj, k_proj and v_proj have biases, True by default.
        out_bias: whether out_proj has a bias, True by default.

    Parameters: q_proj, k_proj, v_proj, out_proj. Time O(T^2 D). The streaming state holds every key and value.

    Deviations: none yet.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        attn_mask=True,
        about=About("Authors year", "attention", "T^2 D", "T^2 H", idea="softmax of dot products"),
        form=NAME,
        carries=QKVO,
    )

    def __init__(self, dim: int, *, causal: bool = False, heads: int = 8, qkv_bias: bool = True, out_bias: bool = True):
        super().__init__(dim, causal=causal)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.heads = heads

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``NAME`` for this input."""
        keys = inputs.keys
        options = {"heads": self.heads, "causal": self.causal}
        options |= {"key_mask": inputs.key_mask, "attn_mask": inputs.attn_mask}
        return (self.q_proj(inputs.x), self.k_proj(keys), self.v_proj(keys)), options

    def mixing_cost(self, T: int) -> MixingCost:
        products = 4 * T * T * self.dim
        kept = 4 * self.heads * T * T + 24 * T * self.dim
        return MixingCost(flops=products, counted=products, activations=kept, state=(8 * self.dim + 1) * T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return largest_dot(args[0], args[1], options["heads"])

    def empty_state(self, batch_size, *, device, dtype):
        keys, values = (torch.zeros(batch_size, 0, self.dim, device=device, dtype=dtype) for _ in "kv")
        valid = torch.zeros(batch_size, 0, device=device, dtype=torch.bool)
        return CLASSState(keys, values, valid)

    def context_state(self, context, context_mask):
        valid = valid_mask(context, context_mask).clone()
        return CLASSState(self.k_proj(context), self.v_proj(context), valid)

    def mix_chunk(self, x, state, *, positions, key_mask):
        q = self.q_proj(x)
        if self.causal:
            new = self.k_proj(x), self.v_proj(x), valid_mask(x, key_mask)
            joined = (torch.cat([a, b.to(a.dtype)], 1) for a, b in zip(state, new, strict=True))
            state = CLASSState(*joined)
        keys, values = (a.to(q.dtype) for a in (state.keys, state.values))
        options = {"heads": self.heads, "causal": self.causal, "key_mask": state.valid}
        return self.out_proj(NAME(q, keys, values, **options)), state
'''

PAGE = """# TITLE

Row `NAME`. Authors year, "Title".

## Equation

```math
y_t = \\sum_s w_{ts} v_s, \\quad w_{ts} = \\operatorname{softmax}_s (q_t \\cdot k_s / \\sqrt{e})
```

in each head, over the keys $s$ that $t$ may attend.

## Cost

Time O(T² D), memory O(T² H). The streaming state holds every key and value.

## Options

| option | default | meaning |
|---|---|---|
| `heads` | 8 | number of heads; must divide dim |
| `qkv_bias`, `out_bias` | True | whether the projections have biases |

## Example

```python
>>> import torch, tokenmix
>>> tokenmix.build_mixer("NAME", dim=32, causal=True, heads=4)(torch.randn(2, 20, 32)).shape
torch.Size([2, 20, 32])

```

## Deviations and notes

- None yet.
"""
