"""What the Synthesizer layers share: the tables their logits come from, their projections, and the streaming of a history."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from ... import functional as F
from ...functional.synthesizer import Tables
from ...positions.grid import regrown
from ..base import Mixer, chunk_positions, register_state, token_positions
from .hands_out import HandsOut
from .options import at_least
from .shared import alive


class DenseTables(HandsOut):
    """W2 (G, e, N), uniform within 1 / sqrt(e) as torch's Linear, and b2 (G, N), zero; G is the number of heads, or 1 for all of them."""

    def __init__(self, heads: int, shared: bool, width: int, max_len: int, *, bias: bool):
        super().__init__()
        G = 1 if shared else heads
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(G, width, max_len))
        self.bias = nn.Parameter(torch.empty(G, max_len)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W2 again."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def handed(self) -> Tables:
        """As ``functional.synthesizer_dense`` takes them."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def resize(self, max_len: int) -> None:
        """Interpolate along positions."""
        self.weight = regrown(self.weight, _stretched(self.weight, max_len))
        if self.bias is not None:
            self.bias = regrown(self.bias, _stretched(self.bias[None], max_len)[0])

    def flops(self, T: int) -> tuple[int, int]:
        """Of the logits of T tokens: all, and those in matrix products."""
        n = 2 * T * self.heads * self.weight.shape[1] * T
        return n, n

    def kept(self, T: int) -> int:
        """Numbers kept for backward beside the logits themselves."""
        return 2 * T * self.heads * self.weight.shape[1]

    def logit_size(self, T: int) -> int:
        """How many numbers the logits are."""
        return self.heads * T * T


class RandomTable(HandsOut):
    """R (G, N, N) ~ N(0, init_std): a parameter, or a buffer that is saved but never trained."""

    weight: Tensor

    def __init__(self, heads: int, shared: bool, max_len: int, *, init_std: float, trainable: bool = True):
        super().__init__()
        self.init_std, self.trainable = init_std, trainable
        self._hold(torch.empty(1 if shared else heads, max_len, max_len))
        self.reset_parameters()

    def _hold(self, table: Tensor) -> None:
        if self.trainable:
            self.weight = nn.Parameter(table)
        else:
            self.register_buffer("weight", table)

    def reset_parameters(self) -> None:
        """Draw R again, the frozen one too."""
        nn.init.normal_(self.weight, std=self.init_std)

    def handed(self) -> Tables:
        """As ``functional.random_logits`` takes them."""
        return (self.weight,)

    def resize(self, max_len: int) -> None:
        """Interpolate along the positions of queries and of keys."""
        table = _stretched(_stretched(self.weight, max_len).mT, max_len).mT
        if self.trainable:
            self.weight = regrown(self.weight, table)
        else:
            self.weight = table.contiguous()

    def flops(self, T: int) -> tuple[int, int]:
        """None: the logits are read."""
        return 0, 0

    def kept(self, T: int) -> int:
        """Nothing: the table is a parameter."""
        return 0

    def logit_size(self, T: int) -> int:
        """How many numbers the logits are."""
        return self.weight.shape[0] * T * T


class FactorizedDenseTables(HandsOut):
    """W_A (G, e, a) and W_B (G, e, b) as W2 of the dense layer, b_A and b_B zero; a = factor, b = ceil(N / a)."""

    def __init__(self, heads: int, shared: bool, width: int, max_len: int, *, factor: int, bias: bool):
        super().__init__()
        G, b = 1 if shared else heads, -(-max_len // factor)
        self.heads, self.factor = heads, factor
        self.weight_a, self.weight_b = nn.Parameter(torch.empty(G, width, factor)), nn.Parameter(torch.empty(G, width, b))
        self.bias_a, self.bias_b = (nn.Parameter(torch.empty(G, n)) if bias else None for n in (factor, b))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W_A and W_B again."""
        for weight, bias in ((self.weight_a, self.bias_a), (self.weight_b, self.bias_b)):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
            if bias is not None:
                nn.init.zeros_(bias)

    def handed(self) -> Tables:
        """As ``functional.synthesizer_factorized_dense`` takes them."""
        if self.bias_a is None or self.bias_b is None:
            return self.weight_a, self.weight_b
        return self.weight_a, self.weight_b, self.bias_a, self.bias_b

    def resize(self, max_len: int) -> None:
        """Keep a, and interpolate B along its b = ceil(max_len / a) steps of a positions each."""
        b = -(-max_len // self.factor)
        self.weight_b = regrown(self.weight_b, _stretched(self.weight_b, b))
        if self.bias_b is not None:
            self.bias_b = regrown(self.bias_b, _stretched(self.bias_b[None], b)[0])

    def flops(self, T: int) -> tuple[int, int]:
        """Of the logits of T tokens: all, and those in matrix products; the product of the two factors is element by element."""
        maps = 2 * T * self.heads * self.weight_a.shape[1] * (self.factor + -(-T // self.factor))
        return maps + self.logit_size(T), maps

    def kept(self, T: int) -> int:
        """Numbers kept for backward beside the logits themselves."""
        return T * self.heads * (2 * self.weight_a.shape[1] + self.factor + -(-T // self.factor))

    def logit_size(self, T: int) -> int:
        """How many numbers the logits are."""
        return self.heads * T * T


class FactorizedRandomTables(HandsOut):
    """R1 and R2 (G, N, k), normal, with the deviation that gives R = R1 R2^T entries of deviation init_std."""

    def __init__(self, heads: int, shared: bool, max_len: int, *, rank: int, init_std: float):
        super().__init__()
        self.init_std = init_std
        G = 1 if shared else heads
        self.r1, self.r2 = nn.Parameter(torch.empty(G, max_len, rank)), nn.Parameter(torch.empty(G, max_len, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both factors again."""
        for factor in (self.r1, self.r2):
            nn.init.normal_(factor, std=(self.init_std / factor.shape[-1] ** 0.5) ** 0.5)

    def handed(self) -> Tables:
        """As ``functional.synthesizer_factorized_random`` takes them."""
        return self.r1, self.r2

    def resize(self, max_len: int) -> None:
        """Interpolate both along positions."""
        self.r1, self.r2 = (regrown(factor, _stretched(factor.mT, max_len).mT) for factor in (self.r1, self.r2))

    def flops(self, T: int) -> tuple[int, int]:
        """Of R1 R2^T, once for the whole batch."""
        n = 2 * T * T * self.r1.shape[0] * self.r1.shape[-1]
        return n, n

    def kept(self, T: int) -> int:
        """Nothing: the factors are parameters."""
        return 0

    def logit_size(self, T: int) -> int:
        """How many numbers the logits are."""
        return self.r1.shape[0] * T * T


Part = DenseTables | RandomTable | FactorizedDenseTables | FactorizedRandomTables


def _stretched(table: Tensor, length: int) -> Tensor:
    """(G, e, N) -> (G, e, length), linearly, so that position i moves to i * length / N."""
    return TF.interpolate(table.detach(), size=length, mode="linear", align_corners=False).contiguous()


@register_state
class SynthesizerState(NamedTuple):
    """Every value so far (B, S, D), which may be attended, where each stands (B, S), and the next position (B,)."""

    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


@register_state
class SynthesizerKeysState(NamedTuple):
    """The same with keys (B, S, D), for mixtures with attention."""

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


def head_width(mixer: Mixer, heads: int, head_dim: int | None) -> int:
    """Features per head, dim / heads where nothing else is said; refuses sizes that make no sense."""
    at_least(mixer, 1, max_len=mixer.max_len, heads=heads, head_dim=1 if head_dim is None else head_dim)
    if head_dim is None and mixer.dim % heads:
        mixer.refuse(f"heads={heads} must divide dim={mixer.dim}, or head_dim must say how wide a head is")
    return mixer.dim // heads if head_dim is None else head_dim


def near_root(max_len: int) -> int:
    """The whole number nearest to sqrt(max_len)."""
    return max(1, round(max_len**0.5))


def resize_part(mixer: Mixer, parts: list[Part], max_len: int) -> None:
    """Interpolate every table to another number of positions."""
    if not isinstance(max_len, int) or isinstance(max_len, bool) or max_len < 1:
        mixer.refuse(f"resize needs a positive integer max_len, got {max_len!r}")
    for part in parts:
        part.resize(max_len)
    mixer.max_len = mixer.max_context_len = max_len


def explicit_positions(x: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Where tokens stand, or None where each stands at its index, which is cheapest."""
    return positions if positions is not None or key_mask is None else token_positions(x, key_mask)


def empty_history(batch_size: int, width: int, *, device: Any, dtype: torch.dtype) -> SynthesizerState:
    """The state of a mixer that has seen nothing."""
    positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
    values = torch.zeros(batch_size, 0, width, device=device, dtype=dtype)
    return SynthesizerState(values, positions.bool(), positions, torch.zeros(batch_size, dtype=torch.long, device=device))


def remember(mixer: Mixer, x: Tensor, state: Any, positions: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Any]:
    """Positions (B, L) of the chunk, and the state with its tokens' values, and keys where the state has some."""
    query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
    mixer.check_range(query_positions)
    new = {"values": mixer.get_submodule("v_proj")(x), "valid": alive(x, key_mask), "positions": query_positions}
    if isinstance(state, SynthesizerKeysState):
        new["keys"] = mixer.get_submodule("k_proj")(x)
    grown = {name: torch.cat([getattr(state, name), a.to(getattr(state, name).dtype)], 1) for name, a in new.items()}
    return query_positions, state._replace(position=next_position, **grown)


def read(mixer: Mixer, x: Tensor, state: Any, logits: Tensor) -> Tensor:
    """The outputs of the chunk's queries over the whole history, whose last tokens they are."""
    out_proj = mixer.get_submodule("out_proj")
    values = state.values.to(x.dtype)
    return out_proj(F.synthesize(logits, values, causal=True, key_mask=state.valid))
