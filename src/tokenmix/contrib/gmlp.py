"""gMLP (Liu et al. 2021, arXiv:2105.08050): projection, spatial gating unit, projection.

In the unit half the channels, mixed across tokens, gate the other half.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.sums.nonfinite import guard_nonfinite, propagate_nonfinite
from ..functional.sums.taps import zero_masked_values
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer, chunk_positions, register_state, token_positions
from ..mixers.cost import MixingCost
from ..mixers.parts.history import append_tokens
from ..mixers.parts.options import at_least
from ..mixers.parts.shared import in_pieces, valid_mask
from ..positions.grid import replacing_parameter

EPS = 1e-5


@exact
@guard_nonfinite("z")
def gmlp(
    z: Tensor,
    spatial: Tensor,
    bias: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute s(Z) = Z1 * (W norm(Z2) + b) with [Z1, Z2] = gelu(z) (Liu et al. 2021, Eq. 1 to 4).

    The norm is over channels.

    Args:
        z: (B, T, 2 f), the projected input before its gelu.
        spatial: W (T, T) or (B, T, T); w_ts weighs token s for token t. causal: only s <= t counts.
        bias: b (T,) or (B, T).
        scale, shift: (f,), of the norm.

    Returns:
        (B, T, f) in z's dtype; exactly 0 where a token has nothing to attend. Time O(T^2 f).
    """
    choose("gmlp", backend, z)
    gate, value = unit_inputs(z, scale, shift)
    value = zero_masked_values(value, key_mask)
    T = z.shape[1]
    spatial, bias = (a.to(value.dtype) for a in (spatial, bias))
    if causal:
        spatial = spatial.tril()
    y = gate * (spatial @ value + bias[..., None])
    if key_mask is not None:
        some = key_mask.cumsum(1) > 0 if causal else key_mask.any(1, keepdim=True).expand(-1, T)
        y = torch.where(some[..., None], y, 0.0)
    return y.to(z.dtype)


def unit_inputs(z: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Z1 and norm(Z2), each (B, T, f), in float32 or better.

    The norm runs in float64, because it magnifies the rounding of nearly equal channels 300 times.
    """
    gate, value = F.gelu(at_least_float32(z)).chunk(2, -1)
    wide = value.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return gate, (normed * scale.double() + shift.double()).to(value.dtype)


@register_state
class GMLPState(NamedTuple):
    """Every normalised half Z2 so far.

    values (B, S, f); valid (B, S) bool, True = there is a token that counts; positions (B, S); position (B,), the next
    one.
    """

    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


class GMLP(Mixer):
    """gMLP: y = W_o (Z1 * (W norm(Z2) + b)), [Z1, Z2] = gelu(W_v x); W and b depend on positions.

    Liu et al. 2021, arXiv:2105.08050, Eq. 1 to 4. Maps (B, T, D) to (B, T, D).

    Args:
        max_len: N, the longest sequence in tokens; W is (N, N) and b (N,).
        hidden: width of gelu(W_v x), even; each half has hidden / 2 channels. None: 6 dim, as in the paper.
        toeplitz: True: w_ts depends on s - t alone, with 2 N - 1 weights instead of N^2 (the paper's shift-invariant
            variant). Default False.

    W starts near 0 and b at 1, so that each token starts as an MLP of its own. Norm and residual belong to the block.
    In the causal form only s <= t of W counts, and the state holds every Z2 so far.

    Parameters: v_proj, out_proj, spatial (W), bias (b), scale and shift of the norm. Time O(T^2 hidden).

    Raises:
        MixerError: if an option is out of its range, or a sequence is longer than ``max_len``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        about=About("Liu et al. 2021, arXiv 2105.08050", "MLP", "T^2 F", "T F"),
        knows_positions=True,
        form=gmlp,
        waivers={
            "accurate_on_adversarial_keys": "gelu's tail; float32 errors scale with the input of gelu (test_gmlp.py)"
        },
    )

    def __init__(
        self,
        dim: int,
        *,
        max_len: int,
        causal: bool = False,
        hidden: int | None = None,
        toeplitz: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        at_least(self, 1, max_len=max_len)
        self.hidden, self.toeplitz = 6 * dim if hidden is None else hidden, toeplitz
        if not isinstance(self.hidden, int) or self.hidden < 2 or self.hidden % 2:
            self.refuse(f"hidden must be even and positive, got {hidden!r}")
        self.v_proj = nn.Linear(dim, self.hidden, bias=qkv_bias)
        self.out_proj = nn.Linear(self.hidden // 2, dim, bias=out_bias)
        self.spatial = nn.Parameter(torch.empty(2 * max_len - 1) if toeplitz else torch.empty(max_len, max_len))
        self.bias = nn.Parameter(torch.empty(max_len))
        self.scale, self.shift = (
            nn.Parameter(torch.empty(self.hidden // 2)),
            nn.Parameter(torch.empty(self.hidden // 2)),
        )
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.normal_(self.spatial, std=1e-3)
        nn.init.ones_(self.bias)
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.shift)

    def resize(self, max_len: int) -> None:
        """Change the longest sequence to ``max_len`` tokens.

        b and a full W are interpolated linearly; a Toeplitz W gains distances of weight 0, or loses the largest ones.
        """
        if not isinstance(max_len, int) or max_len < 1:
            self.refuse(f"resize needs a positive length, got {max_len!r}")
        more = max_len - self.bias.shape[0]
        with torch.no_grad():
            if self.toeplitz:
                spatial = F.pad(self.spatial, (more, more))
            else:
                spatial = F.interpolate(self.spatial[None, None], size=(max_len, max_len), mode="bilinear")[0, 0]
            bias = F.interpolate(self.bias[None, None], size=max_len, mode="linear")[0, 0]
        self.spatial = replacing_parameter(self.spatial, spatial)
        self.bias = replacing_parameter(self.bias, bias)
        self.max_len = self.max_context_len = max_len

    def between(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return w_ts for query positions (.., T) and key positions (.., S)."""
        if self.toeplitz:
            return self.spatial[cols[..., None, :] - rows[..., :, None] + self.bias.shape[0] - 1]
        return self.spatial[rows[..., :, None], cols[..., None, :]]

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``gmlp`` for this input: (positional, keyword)."""
        x, positions, key_mask = inputs.x, inputs.positions, inputs.key_mask
        T = x.shape[1]
        if positions is None and key_mask is None:
            index = torch.arange(T, device=x.device)
            spatial, bias = self.between(index, index) if self.toeplitz else self.spatial[:T, :T], self.bias[:T]
        else:
            positions = token_positions(x, key_mask) if positions is None else positions
            spatial, bias = self.between(positions, positions), self.bias[positions]
        return (self.v_proj(x), spatial, bias, self.scale, self.shift), {"causal": self.causal, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        half = self.hidden // 2
        flops = 2 * T * T * half
        return MixingCost(
            flops, flops, 4 * T * (12 * half + self.dim) + 12 * T * T * self.toeplitz, T * (4 * half + 9) + 8
        )

    def empty_state(self, batch_size, *, device, dtype):
        positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        values = torch.zeros(batch_size, 0, self.hidden // 2, device=device, dtype=dtype)
        return GMLPState(values, positions.bool(), positions, positions.new_zeros(batch_size))

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
        self.check_range(query_positions)
        y, state = in_pieces(self._mix_piece, x, state, query_positions, valid_mask(x, key_mask))
        return self.out_proj(y), state._replace(position=next_position)

    def _mix_piece(self, x, state, positions, valid):
        gate, value = unit_inputs(self.v_proj(x), self.scale, self.shift)
        state = append_tokens(state, valid, positions, values=value)
        L, S = x.shape[1], state.values.shape[1]
        history = zero_masked_values(
            state.values.to(torch.promote_types(gate.dtype, state.values.dtype)), state.valid
        ).to(gate.dtype)
        weights, bias, some = (
            self.between(positions, state.positions).to(gate.dtype).tril(S - L),
            self.bias[positions].to(gate.dtype)[..., None],
            state.valid.cumsum(1) > 0,
        )

        def form(gate: Tensor, history: Tensor) -> Tensor:
            return torch.where(some[:, S - L :, None], gate * (weights @ history + bias), 0.0).to(x.dtype)

        return propagate_nonfinite(form, gate, history, causal=True), state
