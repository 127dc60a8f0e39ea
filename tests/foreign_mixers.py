"""Mixers from outside the library: correct ones, and small ones with the defects of public implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.mixers import Facts, Inputs, Mixer
from tokenmix.mixers.base import register_state


def wide(x: Tensor) -> Tensor:
    """Convert to float32 or better: sums in float16 overflow."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Mean(nn.Module):
    """A correct plain module: the causal mean of the values, gated."""

    def __init__(self, dim: int, causal: bool = True):
        super().__init__()
        self.causal = causal
        self.value, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        keep = torch.ones_like(x[..., 0], dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
        v = torch.where(keep[..., None], wide(self.value(x)), 0.0)
        n = keep.to(v.dtype)[..., None]
        num, den = (v.cumsum(1), n.cumsum(1)) if self.causal else (v.sum(1, keepdim=True), n.sum(1, keepdim=True))
        return torch.sigmoid(self.gate(x)) * (num / den.clamp_min(1.0)).to(x.dtype)


def mean_reference(mixer: nn.Module, x: Tensor, allowed: Tensor) -> Tensor:
    """Compute the same from the pairs that may be attended."""
    weights = allowed.double() / allowed.double().sum(-1, keepdim=True).clamp_min(1.0)
    return torch.sigmoid(mixer.gate(x)) * (weights @ mixer.value(x))


class BareExponential(Mean):
    """exp(K) without a maximum: it overflows at keys of 89 and divides 0 by 0 at -110."""

    def __init__(self, dim: int, causal: bool = False):
        super().__init__(dim, causal)
        self.key = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        e = torch.exp(self.key(x))
        num, den = (
            ((e * self.value(x)).cumsum(1), e.cumsum(1))
            if self.causal
            else ((e * self.value(x)).sum(1, keepdim=True), e.sum(1, keepdim=True))
        )
        return torch.sigmoid(self.gate(x)) * num / den


class GlobalMaximum(BareExponential):
    """One maximum over all of time in a causal form: a large future key makes the past vanish."""

    def forward(self, x: Tensor) -> Tensor:
        k = self.key(x)
        e = torch.exp(k - k.amax(1, keepdim=True))
        return torch.sigmoid(self.gate(x)) * (e * self.value(x)).cumsum(1) / (e.cumsum(1) + 1e-20)


class Leak(Mean):
    """A module that says causal=True and normalises over all of time."""

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x).cumsum(1) / (1 + self.value(x).abs().sum(1, keepdim=True))


class MaskIgnored(Mean):
    """A module that takes a mask and ignores it."""

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class MaskOnKeysOnly(Mean):
    """A module that zeroes masked values but still counts them, so padding changes the mean."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = torch.zeros_like(x[..., 0], dtype=torch.bool) if mask is None else ~mask
        v = self.value(x)
        return v.masked_fill(hidden[..., None], 0.0).cumsum(1) / (1 + v.abs().cumsum(1))


class ReplacedParameter(Mean):
    """A module that replaces its bias in each forward, so the optimiser's copy never learns."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        self.bias = nn.Parameter(self.bias.detach().clone())
        return super().forward(x) + self.bias


class Untrained(Mean):
    """A module with a bias that forward never reads."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.bias = nn.Parameter(torch.zeros(dim))


class ZeroDivision(Mean):
    """A module that divides by a norm without an eps, so a zero token makes every row NaN."""

    def forward(self, x: Tensor) -> Tensor:
        k = x / x.norm(dim=-1, keepdim=True)
        return (k * self.value(x)).cumsum(1)


class OverTheBatch(Mean):
    """A module that sums over the batch as well as over time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.value(x).mean((0, 1))


class HiddenTensor(Mean):
    """A module with a learned table as a plain tensor: not in the state_dict, not moved."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.table = torch.randn(dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table.to(x.dtype)


class OneMemoryTwice(Mean):
    """A module with two parameters over one storage, which a step of the optimiser moves twice."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.gate.weight = nn.Parameter(self.value.weight.data)


class FixedLength(Mean):
    """A module that works only at the length it was built for."""

    def __init__(self, dim: int, seq_len: int = 10):
        super().__init__(dim)
        self.w = nn.Parameter(torch.randn(seq_len, seq_len))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.tril().softmax(-1).tril() @ self.value(x)


class NoSecondDerivative(Mean):
    """A module that detaches in its backward what a second derivative needs."""

    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(super().forward(x))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0].detach() * grad


class Branches(Mean):
    """A module with Python that looks at values, which breaks a compiled graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if float(x.sum()) > 0 else 2.0)


@register_state
class MeanState(NamedTuple):
    """Sum of the values and number of tokens so far."""

    total: Tensor
    count: Tensor


class MeanMixer(Mixer):
    """A Mixer from outside that keeps the contract: the mean of the values it may attend."""

    facts = Facts(causal=True, streaming=True)

    def __init__(self, dim: int, *, causal: bool = False):
        super().__init__(dim, causal=causal)
        self.q_proj, self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def mix(self, inputs):
        x = inputs.x
        v, n = self.values(x, inputs.key_mask)
        total, count = (v.cumsum(1), n.cumsum(1)) if self.causal else (v.sum(1, keepdim=True), n.sum(1, keepdim=True))
        return self.finish(x, total, count)

    def values(self, x, key_mask):
        """Return the values that count, and 1 for each."""
        live = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask
        v = torch.where(live[..., None], wide(self.v_proj(x)), 0.0)
        return v, live[..., None].to(v.dtype)

    def finish(self, x, total, count):
        """Return the gated mean, projected."""
        return self.out_proj(torch.sigmoid(self.q_proj(x)) * (total / count.clamp_min(1.0)).to(x.dtype))

    def empty_state(self, batch_size, *, device, dtype):
        dtype = torch.promote_types(dtype, torch.float32)
        return MeanState(
            torch.zeros(batch_size, self.dim, device=device, dtype=dtype),
            torch.zeros(batch_size, 1, device=device, dtype=dtype),
        )

    def mix_chunk(self, x, state, *, positions, key_mask):
        v, n = self.values(x, key_mask)
        total, count = state.total[:, None] + v.cumsum(1), state.count[:, None] + n.cumsum(1)
        return self.finish(x, total, count), MeanState(total[:, -1], count[:, -1])


def mean_mixer_reference(mixer: MeanMixer, x: Tensor, allowed: Tensor) -> Tensor:
    """Compute the mean over the allowed pairs."""
    weights = allowed.double() / allowed.double().sum(-1, keepdim=True).clamp_min(1.0)
    return F.linear(
        torch.sigmoid(mixer.q_proj(x)) * (weights @ mixer.v_proj(x)), mixer.out_proj.weight, mixer.out_proj.bias
    )


class WrongCounter(MeanMixer):
    """A mixer whose stream counts padding."""

    def mix_chunk(self, x, state, *, positions, key_mask):
        y, after = super().mix_chunk(x, state, positions=positions, key_mask=key_mask)
        return y, after._replace(count=state.count + x.shape[1])


class Forgetful(MeanMixer):
    """A mixer whose stream is re-initialised with each chunk."""

    def mix_chunk(self, x, state, *, positions, key_mask):
        return super().mix_chunk(
            x, self.empty_state(len(x), device=x.device, dtype=x.dtype), positions=positions, key_mask=key_mask
        )


class Excused(Forgetful):
    """A mixer that declares what it cannot do."""

    facts = Facts(
        waivers=dict.fromkeys(
            ("streaming_equals_parallel", "rows_at_different_positions", "reorder_picks_rows", "state_is_a_value"),
            "keeps no past",
        )
    )


class ExcusedLeak(MeanMixer):
    """A mixer that declares an exception no mixer may have."""

    facts = Facts(waivers={"future_cannot_reach_past": "it is faster so"})

    def mix(self, inputs):
        return super().mix(inputs) + inputs.x.mean(1, keepdim=True)


class Silent(MeanMixer):
    """A mixer that declares a capability it lacks."""

    facts = Facts(attn_mask=True)


class NotJson(MeanMixer):
    """A mixer with a positional option."""

    def __init__(self, dim: int, causal: bool = False):
        super().__init__(dim, causal=causal)


class Narrow(MeanMixer):
    """A mixer that sums in float32 whatever its input is."""

    def mix(self, inputs: Inputs):
        return super().mix(inputs).float().to(inputs.x.dtype)


class Crashes(MeanMixer):
    """A mixer that raises where it streams."""

    def mix_chunk(self, x, state, *, positions, key_mask):
        return x @ x.new_ones(3, 3), state  # the wrong size


class Unannotated(MeanMixer):
    """A right mixer whose options have no annotations."""

    def __init__(self, dim, *, causal=False, scale=1.0):
        super().__init__(dim, causal=causal)
        self.scale = scale


class HidesByMask(Mean):
    """A right module whose ``mask`` is True where a token is hidden."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask)


class InHeads(MeanMixer):
    """A right mixer that views its features by head."""

    def finish(self, x, total, count):
        mean = (total / count.clamp_min(1.0)).to(x.dtype).expand_as(x).unflatten(-1, (2, -1))
        return self.out_proj(torch.sigmoid(self.q_proj(x)) * mean.flatten(-2))


class OnlyCausal(MeanMixer):
    """A right mixer that has a causal form only."""

    def __init__(self, dim: int, *, causal: bool = True):
        super().__init__(dim, causal=causal)
        if not causal:
            self.refuse("has only a causal form; build it with causal=True")


class SaysOnlyCausal(MeanMixer):
    """A mixer that states ``causal_only`` and can be built with causal=False all the same."""

    facts = Facts(causal_only=True)

    def __init__(self, dim: int, *, causal: bool = True):
        super().__init__(dim, causal=True)


class CannotBuild(MeanMixer):
    """A mixer whose constructor raises."""

    def __init__(self, dim: int, *, causal: bool = False):
        super().__init__(dim, causal=causal)
        self.half = nn.Linear(dim, dim // 0)  # what the error points at
