"""A mixer with a causal form only and a state in each head: a gated linear recurrence, token by token."""

from __future__ import annotations

REFERENCE = '''"""NAME as in its paper."""

from __future__ import annotations

import torch
from torch import Tensor


def NAME(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    *,
    heads: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute S_t = a_t S_(t-1) + k_t v_t^T and y_t = S_t^T q_t in each head; tokens outside of the mask are skipped.

    The gate is a = sigmoid(keep); queries and keys are divided by their norms.
    """
    q, k, v = (a.unflatten(-1, (heads, -1)) for a in (q, k, v))
    q, k = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (q, k))
    a = torch.sigmoid(keep)[..., None, None]
    S = q.new_zeros(*q.shape, v.shape[-1])  # (B, T, H, K, V): a state for each query t
    for s in range(q.shape[1]):
        after = a[:, None, s] * S + k[:, None, s, :, :, None] * v[:, None, s, :, None]
        S = after if mask is None else torch.where(mask[:, :, s, None, None, None], after, S)
    return (q[..., None] * S).sum(-2).flatten(2)
'''

MIXER = '''"""NAME: a gated linear recurrence in heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.checks import check_qkv
from ..functional.layout.heads import by_head, join_heads
from ..functional.layout.masks import zero_masked
from ..functional.sums.nonfinite import guard_nonfinite, propagate_nonfinite_chunk
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts.shared import add_projections


@exact
@guard_nonfinite("k", "v", "keep", asks="q")
def NAME(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    *,
    heads: int,
    causal: bool = True,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute S_t = a_t S_(t-1) + k_t v_t^T and y_t = S_t^T q_t in each head, with a_t = sigmoid(keep_t).

    Queries and keys are divided by their norms. A masked token leaves S as it is.

    Args:
        q, k: queries and keys (B, T, H K).
        v: values (B, T, H V); here V = K.
        keep: (B, T, H), the logit of the part of S that is kept.
        heads: number of heads H.
        causal: True; there is no other form.
        key_mask: (B, T) bool, True = this token is written into S.

    Returns:
        (B, T, H V) in q's dtype; 0 where there is nothing to read. Time and memory O(T K V H).
    """
    choose("NAME", backend, q, k, v, keep)
    check_qkv("NAME", q, k, v, heads, True, key_mask)
    if not causal:
        raise MixerError("NAME: has only a causal form, got causal=False.")
    size = q.shape[-1] // heads
    empty = at_least_float32(q).new_zeros(q.shape[0], heads, size, size)
    return step_through(q, k, v, keep, empty, heads=heads, key_mask=key_mask)[0]


@exact
def next_tokens(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, memory: Tensor, *, heads: int, key_mask: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor]]:
    """Compute the outputs of the next tokens of a stream after ``memory`` S (B, H, K, V), and S after them."""

    def form(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        return step_through(q, k, v, keep, memory, heads=heads, key_mask=key_mask)

    return propagate_nonfinite_chunk(form, q, k, v, keep, key_mask=key_mask)


def step_through(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, memory: Tensor, *, heads: int, key_mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor]]:
    """Compute the recurrence token by token.

    A product with the gate of a masked token would bring its NaN into the gradients of the past, even with a factor of
    0. Masked tokens are therefore replaced before the loop, and what else is not finite by those who call this.
    """
    k, v, keep = (zero_masked(at_least_float32(a), key_mask) for a in (k, v, keep))
    a = torch.sigmoid(keep)
    a = a if key_mask is None else torch.where(key_mask[..., None], a, 1.0)
    qh, kh, vh = (by_head(b, heads) for b in (at_least_float32(q), k, v))
    qh, kh = unit_norm(qh), unit_norm(kh)
    memory, outputs = memory.to(kh.dtype), [torch.zeros_like(vh[:, :, :0])]
    for t in range(q.shape[1]):
        memory = a[:, t, :, None, None] * memory + kh[:, :, t, :, None] * vh[:, :, t, None]
        outputs.append(qh[:, :, t, None] @ memory)
    return join_heads(torch.cat(outputs, 2)).to(q.dtype), (memory,)


def unit_norm(a: Tensor) -> Tensor:
    """Divide by the norm of the last axis; a vector of zeros stays as it is, and its derivatives are finite."""
    return a * (a.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@register_state
class CLASSState(NamedTuple):
    """What each head has written, ``memory`` (B, H, K, V). The size is constant."""

    memory: Tensor


class CLASS(Mixer):
    """y_t = W_o S_t^T q_t in each head, with S_t = a_t S_(t-1) + k_t v_t^T and a_t between 0 and 1.

    Authors year, Eq. n. Maps (B, T, D) to (B, T, D). Each token t gives its own a_t = sigmoid(W_a x_t + start).

    Args:
        heads: number of heads, 8 by default; must divide dim. Each has K = V = dim / heads features.
        qkv_bias: whether q_proj, k_proj and v_proj have biases, True by default.
        out_bias: whether out_proj has a bias, True by default.

    Parameters: q_proj, k_proj, v_proj, out_proj, keep_proj, start (H). Time O(T K D). The streaming state is
    heads x K x V numbers, whatever T. There is no bidirectional form: S_t reads the tokens in their order.

    Deviations: none yet.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal_only=True,
        streaming=True,
        fixed_when_traced=True,  # a trace unrolls the loop over tokens
        about=About("Authors year", "recurrence", "T K D", "T K D", idea="writes into a state and forgets"),
        form=NAME,
        carries=QKVO,
        signed=True,
    )

    def __init__(self, dim: int, *, causal: bool = True, heads: int = 8, qkv_bias: bool = True, out_bias: bool = True):
        super().__init__(dim, causal=causal)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.heads = heads
        self.keep_proj = nn.Linear(dim, heads, bias=False)
        self.start = nn.Parameter(torch.empty(heads))
        self.init_parameters()

    def init_parameters(self) -> None:
        """Let the heads keep between 73 and 99 % of their state at first; on the meta device nothing is computed."""
        with torch.no_grad():
            self.start.copy_(torch.linspace(1.0, 5.0, self.heads))

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``NAME`` for this input."""
        x = inputs.x
        keep = self.keep_proj(x) + self.start
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), keep
        return args, {"heads": self.heads, "causal": True, "key_mask": inputs.key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        size = self.dim * self.dim // self.heads  # numbers of one state
        kept = 4 * T * size + 32 * T * self.dim
        return MixingCost(flops=5 * T * size, counted=None, activations=kept, state=4 * size)

    def empty_state(self, batch_size, *, device, dtype):
        wide, size = torch.promote_types(dtype, torch.float32), self.dim // self.heads
        memory = torch.zeros(batch_size, self.heads, size, size, device=device, dtype=wide)
        return CLASSState(memory)

    def mix_chunk(self, x, state, *, positions, key_mask):
        args, _ = self.functional_args(Inputs(x))
        y, after = next_tokens(*args, state.memory, heads=self.heads, key_mask=key_mask)
        return self.out_proj(y), CLASSState(*after)
'''

PAGE = """# TITLE

Row `NAME`. Authors year, "Title".

## Equation

```math
S_t = a_t S_{t-1} + k_t v_t^\\top, \\quad y_t = S_t^\\top q_t
```

in each head, with $a_t$ between 0 and 1. Queries and keys are divided by their norms.

## Cost

Time O(T K D). The streaming state is heads x K x V numbers, whatever T. There is no bidirectional form.

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
