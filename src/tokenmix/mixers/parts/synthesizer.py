"""Parts of the Synthesizer layers: the tables of their logits, their projections, and streaming over a history."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import functional
from ...functional.synthesizer import Tables, with_added
from ...positions import PairPositions, build_pair_positions
from ...positions.grid import replacing_parameter
from ..base import Mixer, chunk_positions, register_state, token_positions
from ..cost import MixingCost
from .options import at_least
from .shared import valid_mask
from .weights_on_call import WeightsOnCall


class DenseTables(WeightsOnCall):
    """W2 (G, e, N) and b2 (G, N) of the dense form; G is the number of heads, or 1 if they share.

    W2 starts uniform within 1 / sqrt(e), as in torch's Linear; b2 starts at 0.
    """

    def __init__(self, heads: int, shared: bool, width: int, max_len: int, *, bias: bool):
        super().__init__()
        G = 1 if shared else heads
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(G, width, max_len))
        self.bias = nn.Parameter(torch.empty(G, max_len)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W2 again and set b2 to 0."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def weights_on_call(self) -> Tables:
        """Return the tables as ``functional.synthesizer_dense`` takes them."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def resize(self, max_len: int) -> None:
        """Interpolate along positions."""
        self.weight = replacing_parameter(self.weight, _interpolate_table(self.weight, max_len))
        if self.bias is not None:
            self.bias = replacing_parameter(self.bias, _interpolate_table(self.bias[None], max_len)[0])

    def flops(self, T: int) -> tuple[int, int]:
        """Compute the FLOPs of the logits of T tokens: all of them, and those in matrix products."""
        n = 2 * T * self.heads * self.weight.shape[1] * T
        return n, n

    def kept_numbers(self, T: int) -> int:
        """Count the numbers kept for the backward pass, without the logits."""
        return 2 * T * self.heads * self.weight.shape[1]

    def logit_size(self, T: int) -> int:
        """Count the logits."""
        return self.heads * T * T


class RandomTable(WeightsOnCall):
    """R (G, N, N) ~ N(0, init_std): a parameter, or a buffer that is saved but not trained."""

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
        """Draw R again, also where it is a buffer."""
        nn.init.normal_(self.weight, std=self.init_std)

    def weights_on_call(self) -> Tables:
        """Return the table as ``functional.random_logits`` takes it."""
        return (self.weight,)

    def resize(self, max_len: int) -> None:
        """Interpolate along the positions of queries and of keys."""
        table = _interpolate_table(_interpolate_table(self.weight, max_len).mT, max_len).mT
        if self.trainable:
            self.weight = replacing_parameter(self.weight, table)
        else:
            self.weight = table.contiguous()

    def flops(self, T: int) -> tuple[int, int]:
        """Return 0 and 0: the logits are looked up."""
        return 0, 0

    def kept_numbers(self, T: int) -> int:
        """Return 0: the table is a parameter."""
        return 0

    def logit_size(self, T: int) -> int:
        """Count the logits."""
        return self.weight.shape[0] * T * T


class FactorizedDenseTables(WeightsOnCall):
    """W_A (G, e, a) and W_B (G, e, b) with biases b_A and b_B; a = factor, b = ceil(N / a).

    They start like W2 and b2 of the dense form.
    """

    def __init__(self, heads: int, shared: bool, width: int, max_len: int, *, factor: int, bias: bool):
        super().__init__()
        G, b = 1 if shared else heads, -(-max_len // factor)
        self.heads, self.factor = heads, factor
        self.weight_a, self.weight_b = (
            nn.Parameter(torch.empty(G, width, factor)),
            nn.Parameter(torch.empty(G, width, b)),
        )
        self.bias_a, self.bias_b = (nn.Parameter(torch.empty(G, n)) if bias else None for n in (factor, b))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W_A and W_B again and set the biases to 0."""
        for weight, bias in ((self.weight_a, self.bias_a), (self.weight_b, self.bias_b)):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
            if bias is not None:
                nn.init.zeros_(bias)

    def weights_on_call(self) -> Tables:
        """Return the tables as ``functional.synthesizer_factorized_dense`` takes them."""
        if self.bias_a is None or self.bias_b is None:
            return self.weight_a, self.weight_b
        return self.weight_a, self.weight_b, self.bias_a, self.bias_b

    def resize(self, max_len: int) -> None:
        """Keep a, and interpolate B along its b = ceil(max_len / a) steps of a positions each."""
        b = -(-max_len // self.factor)
        self.weight_b = replacing_parameter(self.weight_b, _interpolate_table(self.weight_b, b))
        if self.bias_b is not None:
            self.bias_b = replacing_parameter(self.bias_b, _interpolate_table(self.bias_b[None], b)[0])

    def flops(self, T: int) -> tuple[int, int]:
        """Compute the FLOPs of the logits of T tokens: all of them, and those in matrix products.

        The product of the two factors is element-wise.
        """
        maps = 2 * T * self.heads * self.weight_a.shape[1] * (self.factor + -(-T // self.factor))
        return maps + self.logit_size(T), maps

    def kept_numbers(self, T: int) -> int:
        """Count the numbers kept for the backward pass, without the logits."""
        return T * self.heads * (2 * self.weight_a.shape[1] + self.factor + -(-T // self.factor))

    def logit_size(self, T: int) -> int:
        """Count the logits."""
        return self.heads * T * T


class FactorizedRandomTables(WeightsOnCall):
    """R1 and R2 (G, N, k), normal.

    Their deviation is such that the entries of R = R1 R2^T have standard deviation init_std.
    """

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

    def weights_on_call(self) -> Tables:
        """Return the factors as ``functional.synthesizer_factorized_random`` takes them."""
        return self.r1, self.r2

    def resize(self, max_len: int) -> None:
        """Interpolate both factors along positions."""
        self.r1, self.r2 = (
            replacing_parameter(factor, _interpolate_table(factor.mT, max_len).mT) for factor in (self.r1, self.r2)
        )

    def flops(self, T: int) -> tuple[int, int]:
        """Compute the FLOPs of R1 R2^T, once for the whole batch."""
        n = 2 * T * T * self.r1.shape[0] * self.r1.shape[-1]
        return n, n

    def kept_numbers(self, T: int) -> int:
        """Return 0: the factors are parameters."""
        return 0

    def logit_size(self, T: int) -> int:
        """Count the logits."""
        return self.r1.shape[0] * T * T


Part = DenseTables | RandomTable | FactorizedDenseTables | FactorizedRandomTables


def _interpolate_table(table: Tensor, length: int) -> Tensor:
    """Interpolate (G, e, N) linearly to (G, e, length), so that position i moves to i * length / N."""
    return F.interpolate(table.detach(), size=length, mode="linear", align_corners=False).contiguous()


@register_state
class SynthesizerState(NamedTuple):
    """Every value so far.

    values (B, S, D); valid (B, S) bool, True = may be attended; positions (B, S); position (B,), the next one.
    """

    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


@register_state
class SynthesizerKeysState(NamedTuple):
    """Every key (B, S, D) and value so far, for mixtures with attention; otherwise like ``SynthesizerState``."""

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


def head_width(mixer: Mixer, heads: int, head_dim: int | None) -> int:
    """Return the number of features per head, by default dim / heads; refuse sizes that do not fit together."""
    at_least(mixer, 1, max_len=mixer.max_len, heads=heads, head_dim=1 if head_dim is None else head_dim)
    if head_dim is None and mixer.dim % heads:
        mixer.refuse(f"heads={heads} must divide dim={mixer.dim}, or head_dim must be given")
    return mixer.dim // heads if head_dim is None else head_dim


def near_root(max_len: int) -> int:
    """Return the integer nearest to sqrt(max_len)."""
    return max(1, round(max_len**0.5))


def resize_part(mixer: Mixer, parts: list[Part], max_len: int) -> None:
    """Interpolate every table to ``max_len`` positions."""
    if not isinstance(max_len, int) or isinstance(max_len, bool) or max_len < 1:
        mixer.refuse(f"resize needs a positive integer max_len, got {max_len!r}")
    for part in parts:
        part.resize(max_len)
    mixer.max_len = mixer.max_context_len = max_len


def explicit_positions(x: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Return the positions of tokens; None where they are the indices, which is cheapest."""
    return positions if positions is not None or key_mask is None else token_positions(x, key_mask)


def build_pair_bias(mixer: Mixer, spec: dict[str, Any] | None, heads: int) -> PairPositions | None:
    """Build the bias that ``pair_bias`` specifies."""
    return None if spec is None else build_pair_positions(spec, heads, owner=type(mixer).__name__, option="pair_bias")


def pair_logits(bias: PairPositions | None, x: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
    """Return the bias of the logits of x over itself as arguments of a functional form, empty without a bias."""
    if bias is None:
        return {}
    if positions is None:
        return {"added": bias((0, x.shape[1]), x.shape[1], x.dtype, x.device)}
    return {"added": bias(positions, positions, x.dtype)}


def with_pairs(cost: MixingCost, bias: PairPositions | None, heads: int, T: int) -> MixingCost:
    """Return a cost with that of a bias for T x T pairs."""
    if bias is None:
        return cost
    assert cost.counted is not None
    products = bias.pair_products() * T * T
    return cost._replace(
        flops=cost.flops + products + bias.pair_flops() * T * T,
        counted=cost.counted + products,
        activations=cost.activations + 4 * (heads + bias.pair_kept()) * T * T,
    )


def empty_history(batch_size: int, width: int, *, device: Any, dtype: torch.dtype) -> SynthesizerState:
    """Return the state of a mixer before the first token."""
    positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
    values = torch.zeros(batch_size, 0, width, device=device, dtype=dtype)
    return SynthesizerState(
        values, positions.bool(), positions, torch.zeros(batch_size, dtype=torch.long, device=device)
    )


def remember(
    mixer: Mixer, x: Tensor, state: Any, positions: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Any]:
    """Append the tokens of a chunk to the state.

    Returns:
        The positions (B, L) of the chunk, and the state with its values, and its keys where the state has keys.
    """
    query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
    mixer.check_range(query_positions)
    new = {"values": mixer.get_submodule("v_proj")(x), "valid": valid_mask(x, key_mask), "positions": query_positions}
    if isinstance(state, SynthesizerKeysState):
        new["keys"] = mixer.get_submodule("k_proj")(x)
    grown = {name: torch.cat([getattr(state, name), a.to(getattr(state, name).dtype)], 1) for name, a in new.items()}
    return query_positions, state._replace(position=next_position, **grown)


def read(mixer: Any, x: Tensor, state: Any, logits: Tensor, positions: Tensor) -> Tensor:
    """Return the outputs of the chunk's queries at ``positions`` over the whole history, which ends with the chunk."""
    if mixer.pair_bias is not None:
        logits = with_added(logits, mixer.pair_bias(positions, state.positions, x.dtype))
    values = state.values.to(x.dtype)
    return mixer.out_proj(functional.synthesize(logits, values, causal=True, key_mask=state.valid))
