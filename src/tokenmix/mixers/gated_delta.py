"""The delta rule with decays as a layer: DeltaNet, Gated DeltaNet and Kimi Delta Attention in one."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.gated_delta import gated_delta_chunk, read_heads
from ..functional.layout.masks import valid_mask
from ..functional.sums.gated_norm import OUTPUT_GATES, OutputGate
from ..kernels.precision import at_least_float32
from .base import QKVO, About, Facts, chunk_positions
from .cost import MixingCost
from .parts.history import join_rings
from .parts.options import at_least, check_numbers, check_positive, one_of
from .parts.recurrent import LowRank, Recurrent, log_decay, start_steps

Decay = Literal["head", "feature"]


class GatedDelta(Recurrent):
    """y_t = W_o [norm(S_t^T q_t) * gate(W_g x_t)], with S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T per head.

    Each token lets the state of a head decay, and corrects what it would answer to the token's key. With decay=None
    this is DeltaNet (Yang et al. 2024, arXiv 2406.06484), with one decay per head Gated DeltaNet (Yang et al. 2024,
    arXiv 2412.06464, Eq. 10), with one per feature Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, Eq. 1).
    Queries, keys and values pass a short convolution and silu, queries and keys a norm; b_t = sigmoid(W_b x_t), and
    log a_t = -exp(A_log) softplus(W_a x_t + dt_bias). Maps (B, T, D) to (B, T, D).

    Args:
        heads: heads of queries and keys. Default 8.
        value_heads: heads of values, so of states; a multiple of ``heads``, whose heads then serve several neighbouring
            states. Default: as many.
        head_dim: features of a query or key in each head. Default: dim / heads.
        value_dim: features of a value in each head. Default: head_dim.
        decay: "head" (default), "feature" or None.
        decay_rank: of decay="feature", the rank of W_a. Default: value_dim.
        lower_bound: of decay="feature", log a_t = lower_bound sigmoid(exp(A_log) (W_a x_t + dt_bias)) in place of the
            above, as in GLM-5. A negative number, or None (default).
        negative: b_t up to 2 instead of 1, so that I - b k k^T may reflect. Default False.
        gate: "silu" (default), "sigmoid", or None for no gate.
        gate_rank: rank of W_g; None (default): a full matrix.
        gate_bias: whether W_g has a bias. Default False.
        kernel_size: taps of the convolution, the identity at the start; 1: none. Default 4.
        eps: of the norm. Default 1e-5.
        qkv_bias, out_bias: biases of the projections of queries, keys and values, and of W_o; False by default, as in
            all public models.

    Parameters: q_proj, k_proj, v_proj, out_proj, a_proj, b_proj, g_proj, conv, A_log, dt_bias, norm (value_dim). Time
    O(T K V) per head. The streaming state is K x V numbers per head and kernel_size - 1 tokens. There is no
    bidirectional form: S_t reads the tokens in their order. A masked token changes nothing, and decays nothing.

    Deviations: public models start the convolution at random.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        about=About(
            "Yang et al. 2024, arXiv 2412.06464",
            "recurrence",
            "T K D",
            "T D",
            idea="corrects a state that decays: DeltaNet, Gated DeltaNet, KDA",
            tier="core",
        ),
        form="gated_delta",
        carries=QKVO,
    )
    chunk = staticmethod(gated_delta_chunk)

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = True,
        heads: int = 8,
        value_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        decay: Decay | None = "head",
        decay_rank: int | None = None,
        lower_bound: float | None = None,
        negative: bool = False,
        gate: OutputGate | None = "silu",
        gate_rank: int | None = None,
        gate_bias: bool = False,
        kernel_size: int = 4,
        eps: float = 1e-5,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ):
        super().__init__(dim, causal=causal)
        H = self._check_heads(heads, value_heads, head_dim)
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.decay, self.lower_bound, self.negative, self.gate, self.eps = decay, lower_bound, negative, gate, eps
        self._check_rest(decay_rank, gate_rank, gate_bias)
        keys, values = self.heads * self.head_dim, H * self.value_dim
        self.memory = H, self.head_dim, self.value_dim
        self.q_proj, self.k_proj = (nn.Linear(dim, keys, bias=qkv_bias) for _ in range(2))
        self.v_proj = nn.Linear(dim, values, bias=qkv_bias)
        self._set_up(2 * keys + values, kernel_size)
        self.b_proj = nn.Linear(dim, H, bias=False)
        rank, wide = decay_rank or self.value_dim, H * self.head_dim
        by_feature = decay == "feature"
        self.a_proj = (
            None if decay is None else LowRank(dim, rank, wide) if by_feature else nn.Linear(dim, H, bias=False)
        )
        self.A_log = None if decay is None else nn.Parameter(torch.empty(H))
        self.dt_bias = None if decay is None else nn.Parameter(torch.empty(wide if by_feature else H))
        self.g_proj: nn.Module | None = None
        if gate is not None and gate_rank is None:
            self.g_proj = nn.Linear(dim, values, bias=gate_bias)
        elif gate is not None and gate_rank is not None:
            self.g_proj = LowRank(dim, gate_rank, values, bias=gate_bias)
        self.norm = nn.Parameter(torch.empty(self.value_dim))
        self.out_proj = nn.Linear(values, dim, bias=out_bias)
        self.init_parameters()

    def _check_heads(self, heads: int, value_heads: int | None, head_dim: int | None) -> int:
        """Set the numbers of heads; return that of the values."""
        at_least(self, 1, heads=heads)
        if head_dim is None and self.dim % heads:
            self.refuse(f"heads={heads!r} must divide dim={self.dim}, or give head_dim")
        H = heads if value_heads is None else value_heads
        at_least(self, 1, value_heads=H)
        if H % heads:
            self.refuse(f"value_heads={H} must be a multiple of heads={heads}, the heads of queries and keys")
        self.heads, self.value_heads = heads, H
        return H

    def _check_rest(self, decay_rank: int | None, gate_rank: int | None, gate_bias: bool) -> None:
        """Refuse options that are out of their range, or that nothing would read."""
        at_least(self, 1, head_dim=self.head_dim, value_dim=self.value_dim)
        one_of(self, ("head", "feature", None), decay=self.decay)
        one_of(self, OUTPUT_GATES, gate=self.gate)
        check_positive(self, eps=self.eps)
        for name, value, where in (
            ("decay_rank", decay_rank, self.decay == "feature"),
            ("gate_rank", gate_rank, self.gate is not None),
        ):
            if value is not None:
                at_least(self, 1, **{name: value})
                if not where:
                    self.refuse(f"{name}={value} needs " + ("decay='feature'" if name == "decay_rank" else "a gate"))
        if gate_bias and self.gate is None:
            self.refuse("gate_bias=True needs a gate")
        if self.lower_bound is not None:
            check_numbers(self, lower_bound=self.lower_bound)
            if self.decay != "feature" or self.lower_bound >= 0:
                self.refuse(
                    f"lower_bound must be a negative number and needs decay='feature', got {self.lower_bound!r} with "
                    f"decay={self.decay!r}"
                )

    def init_parameters(self) -> None:
        with torch.no_grad():
            self.norm.fill_(1.0)
            if self.A_log is None or self.dt_bias is None:
                return
            start_steps(self.dt_bias)
            if self.lower_bound is not None:
                self.A_log.zero_()
            else:  # not from 0: log 0 is -inf, and such a head would never forget nor learn to
                self.A_log.uniform_(0.01 if self.decay == "head" else 1.0, 16.0).log_()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1), x

    def arguments(self, mixed: Tensor, rest: Tensor) -> tuple[Tensor | None, ...]:
        keys = self.heads * self.head_dim
        q, k, v = mixed.split([keys, keys, self.value_heads * self.value_dim], -1)
        beta = torch.sigmoid(at_least_float32(self.b_proj(rest))) * (2.0 if self.negative else 1.0)
        z = None if self.g_proj is None else self.g_proj(rest)
        return q, k, v, self.log_decay(rest), beta, z, self.norm

    def log_decay(self, x: Tensor) -> Tensor | None:
        """Return the log-decays of tokens x (B, T, D), (B, T, value_heads) or (B, T, value_heads head_dim), or None."""
        if self.a_proj is None or self.A_log is None or self.dt_bias is None:
            return None
        A_log = self.A_log if self.decay == "head" else self.A_log.repeat_interleave(self.head_dim)
        if self.lower_bound is None:
            return log_decay(self.a_proj(x), self.dt_bias, A_log)
        logits = at_least_float32(self.a_proj(x)) + at_least_float32(self.dt_bias)
        return self.lower_bound * torch.sigmoid(at_least_float32(A_log).exp() * logits)

    def options(self) -> dict[str, Any]:
        return {"heads": self.heads, "value_heads": self.value_heads, "norm": True, "gate": self.gate, "eps": self.eps}

    def mixing_cost(self, T: int) -> MixingCost:
        H, K, V = self.memory
        flops = 7 * T * H * K * V + 2 * T * self.width * self.kernel_size
        kept = T * H * (80 * (K + V) + 1100)
        return MixingCost(flops=flops, counted=None, activations=kept, state=self.state_size())

    def fades(self, x, valid):
        H, K, _ = self.memory
        one = torch.eye(K, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        return one.expand(x.shape[0], H, K, K), None  # of a stretch without tokens; else see ``measure_stretch``

    def chain_fades(self, earlier, later):
        return later @ earlier

    def join_states(self, earlier, later, fade):
        return join_rings(earlier, later)[0]._replace(memory=later.memory + fade.to(later.memory) @ earlier.memory)

    def measure_stretch(self, x, empty, positions, key_mask):
        """Return the state after the stretch, and the matrix by which the stretch multiplies any memory before it.

        The matrix is what becomes of the identity where nothing is written, so both are one state of wider values.
        """
        H, K, V = self.memory
        raw, rest = self.project(x)
        valid, state = valid_mask(x, key_mask), empty
        if self.conv is not None:
            raw, state = self.conv(raw, positions=positions, key_mask=valid, state=state, holes=True)
        q, k, v, decay, beta, *_ = self.arguments(F.silu(raw), rest)
        wide = F.pad(v.unflatten(-1, (H, V)), (0, K))
        past = torch.cat([state.memory, self.fades(x, valid)[0].to(state.memory)], -1)
        after = read_heads(q, k, wide, decay, beta, heads=self.heads, past=past, key_mask=valid)[1]
        state = self.own_ring(state._replace(memory=after[..., :V]), valid)
        position = chunk_positions(empty.position, x, positions, key_mask)[1]
        return state._replace(position=position), after[..., V:], None
