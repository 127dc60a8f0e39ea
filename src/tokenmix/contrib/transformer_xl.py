"""Transformer-XL's relative attention (Dai et al. 2019, arXiv 1901.02860), over all keys or with a segment memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.heads import by_head
from ..functional.layout.masks import allowed, zero_masked
from ..functional.layout.positions import Positions
from ..functional.sums.nonfinite import clean, marks
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs
from ..mixers.cost import MixingCost
from ..mixers.parts.history import append_tokens, empty_history, join_rings, keep_newest
from ..mixers.parts.shared import add_projections, ring_chunk
from ..mixers.segments import Segmented
from .parts.lines import attend_lines
from .parts.relative import by_position, largest_relative, sinusoid


@exact
def transformer_xl(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relative: Tensor,
    content: Tensor,
    place: Tensor,
    *,
    heads: int,
    memory: int | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    positions: Positions | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s softmax_s([(q_t + u) . k_s + (q_t + v) . W_r R_{t-s}] / sqrt(e)) v_s in each head.

    Dai et al. 2019, Sec. 3.3.

    Args:
        q: (B, T, D); k, v: (B, S, D); D = heads * e.
        relative: W_r (D, 2n), on the sinusoid R_d = [sin(d w_i), cos(d w_i)] of n frequencies w_i = 10000^(-i/n), which
            is defined for any distance.
        content, place: u and v of the paper (D,), one vector of width e per head.
        memory: keys with |t - s| < memory are attended; with ``causal`` the last ``memory`` positions, t's own
            included. None: all.
        positions: (B, T), or a pair (B, T) of the queries and (B, S) of the keys, if they are not the indices.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where a query has nothing to attend. Time O(T S D), with a memory O(T memory
        D); with ``positions`` O(T S D heads), which needs no table of distances.
    """
    _check(q, k, v, relative, content, place, heads, memory, backend)
    if 0 in (q.shape[1], k.shape[1]):
        return torch.zeros_like(q)
    dtype, wide = q.dtype, sum_dtype(q)
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    own, met = marks(q), marks(k, v)[:, None].to(wide)
    q, k, v, relative, u, b = (a.to(wide) for a in (clean(q), clean(k), clean(v), relative, content, place))
    scale = (q.shape[-1] // heads) ** -0.5
    asked, located, kh, vh = (by_head(a, heads) for a in ((q + u) * scale, (q + b) * scale, k, v))
    T, S = q.shape[1], k.shape[1]
    if positions is None and attn_mask is None and memory is not None and S == T > memory:
        y = _in_blocks(asked, located, kh, vh, met, relative, memory, causal, key_mask)
    else:
        ok = allowed(q.shape[0], T, S, causal=causal, key_mask=key_mask, attn_mask=attn_mask, device=q.device)
        rows, cols = _rows_and_cols(positions, T, S, q.device)
        if memory is not None:
            ok = ok & ((rows[:, :, None] - cols[:, None, :]).abs() < memory)
        located = (
            _by_distance(located, relative, T, 0, causal)
            if positions is None and S == T
            else by_position(located, rows, cols, relative)
        )
        y = attend_lines(asked @ kh.transpose(-1, -2) + located, ok[:, None], vh, met)
    return (y.transpose(1, 2).flatten(2) + own).to(dtype)


def _by_distance(located: Tensor, relative: Tensor, W: int, first: int, causal: bool) -> Tensor:
    """Compute (q_i + v) . r_{i - j - first} of queries (..., H, L, e) and keys j < W: (..., H, L, W).

    Uses the shift of the paper's appendix B. The products with all distances are laid out from the farthest past to the
    farthest future, 0 in place of the future when ``causal``, in rows of L + W. Read as rows of L + W - 1, each starts
    one further on: query i's with its distance to key 0.
    """
    L = located.shape[-2]
    least = 0 if causal else 1 - W - first
    distances = torch.arange(L - 1 - first, least - 1, -1, device=located.device)
    # (distances, H, e)
    r = (sinusoid(distances, relative.shape[1]).to(relative.dtype) @ relative.T).unflatten(-1, (-1, located.shape[-1]))
    table = F.pad(located @ r.permute(1, 2, 0), (0, W + first + least))
    flat = table.flatten(-2)[..., L - 1 : L - 1 + L * (L + W - 1)]
    return flat.unflatten(-1, (L, L + W - 1))[..., :W]


def _in_blocks(
    asked: Tensor,
    located: Tensor,
    k: Tensor,
    v: Tensor,
    met: Tensor,
    relative: Tensor,
    memory: int,
    causal: bool,
    key_mask: Tensor | None,
) -> Tensor:
    """Attend to the sliding memory in blocks of ``memory`` queries (B, H, T, e).

    Each block attends its own block, the one before and, unless causal, the one after.
    """
    T, N = asked.shape[-2], -(-asked.shape[-2] // memory)
    after = 0 if causal else memory
    valid = torch.ones(1, T, dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    asked, located = (
        F.pad(a, (0, 0, 0, N * memory - T)).unflatten(2, (N, memory)).transpose(1, 2) for a in (asked, located)
    )
    k, v, met = (
        _neighbours(F.pad(a, (0, 0, memory, N * memory - T + after)), memory, N).transpose(1, 2) for a in (k, v, met)
    )
    valid = _neighbours(F.pad(valid[:, None, :, None], (0, 0, memory, N * memory - T + after)), memory, N)[
        :, 0, :, None, None, :, 0
    ]
    i, j = torch.arange(memory, device=k.device)[:, None], torch.arange(k.shape[-2], device=k.device) - memory
    near = ((i - j) < memory) & ((j <= i) if causal else (j - i) < memory)
    logits = asked @ k.transpose(-1, -2) + _by_distance(located, relative, k.shape[-2], -memory, causal)
    return attend_lines(logits, valid & near, v, met).transpose(1, 2).flatten(2, 3)[:, :, :T]


def _neighbours(a: Tensor, size: int, N: int) -> Tensor:
    """Arrange padded keys (B, H, S, C) as the windows of N blocks, (B, H, N, W, C): W is two blocks or three."""
    blocks = a.unflatten(2, (-1, size))
    return torch.cat([blocks[:, :, i : i + N] for i in range(blocks.shape[2] - N + 1)], 3)


def _rows_and_cols(positions: Positions | None, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions of the queries (B or 1, T) and of the keys (B or 1, S)."""
    if positions is None:
        return torch.arange(T, device=device)[None], torch.arange(S, device=device)[None]
    return positions if isinstance(positions, tuple) else (positions, positions)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relative: Tensor,
    content: Tensor,
    place: Tensor,
    heads: int,
    memory: int | None,
    backend: Backend,
) -> None:
    choose("transformer_xl", backend, q)
    D = q.shape[-1]
    if q.ndim != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2] or heads < 1 or D % heads:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v))
        raise MixerError(
            f"transformer_xl: expects q (B, T, D) and k, v (B, S, D) with heads={heads} dividing D, got {shapes}."
        )
    if (
        relative.ndim != 2
        or relative.shape[0] != D
        or relative.shape[1] % 2
        or content.shape != (D,)
        or place.shape != (D,)
    ):
        shapes = ", ".join(str(tuple(a.shape)) for a in (relative, content, place))
        raise MixerError(
            f"transformer_xl: expects relative ({D}, even), content ({D},) and place ({D},), got {shapes}."
        )
    if memory is not None and memory < 1:
        raise MixerError(f"transformer_xl: memory={memory} must be at least 1 (the token itself), or None for all.")


class TransformerXL(Segmented):
    """Transformer-XL: y_t = W_o [sum_s softmax_s([(q_t + u) . k_s + (q_t + v) . W_r R_{t-s}] / sqrt(e)) v_s].

    In each of ``heads`` heads. Dai et al. 2019, arXiv:1901.02860, Sec. 3.3. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim; e = dim / heads.
        memory: number of positions that are attended: the last ``memory`` ones, t's own included, or |t - s| < memory
            without ``causal``. None (default): all.

    Parameters: the four projections, W_r (``relative``), u (``content``) and v (``place``). Time O(T^2 D), or O(T
    memory D). The streaming state is the segment memory: keys and values of the last memory - 1 tokens. A training loop
    that passes segment after segment to ``extend`` and detaches the state in between runs the paper's recurrence.

    Deviations: the memory slides with each token, in streams as in one pass, so that results do not depend on where
    segments are cut.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        about=About(
            "Dai et al. 2019, arXiv 1901.02860", "memory", "T^2 D, or T memory D", "T^2 heads, or T memory heads"
        ),
        knows_positions=True,
        form=transformer_xl,
        carries=QKVO,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        memory: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.memory = heads, memory
        if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory < 1):
            self.refuse(
                f"memory must be a positive integer, which counts the token itself, or None for all, got {memory!r}"
            )
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.relative = nn.Parameter(torch.empty(dim, dim + dim % 2))
        self.content, self.place = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.uniform_(self.relative, -(self.dim**-0.5), self.dim**-0.5)  # as in torch's Linear
        for bias in (self.content, self.place):
            nn.init.normal_(bias, std=0.02)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``transformer_xl`` for this input: (positional, keyword).

        Only differences of positions matter.
        """
        x = inputs.x
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.relative, self.content, self.place
        options = {"heads": self.heads, "memory": self.memory, "positions": inputs.positions}
        return args, {**options, "causal": self.causal, "key_mask": inputs.key_mask, "attn_mask": inputs.attn_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        D, M, n = self.dim, self.memory, self.relative.shape[1]
        if M is None or M >= T:
            flops = 4 * T * T * D + 2 * (2 * T - 1) * (T + n) * D
            counted, pairs = flops, T * T
        else:
            N = -(-T // M)
            flops, counted, pairs = (
                2 * N * M * D * (2 * 3 * M + 4 * M - 1) + 2 * (4 * M - 1) * n * D,
                None,
                N * M * 3 * M,
            )
        state = (8 * D + 9) * (T if M is None else M - 1) + 8
        return MixingCost(flops, counted, activations=4 * (9 * T * D + pairs * self.heads), state=state)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, k, _, relative, content, place = args
        return largest_relative(q, k, relative, content, place, options["heads"])

    def empty_state(self, batch_size, *, device, dtype):
        return empty_history(
            batch_size, self.dim, 0 if self.memory is None else self.memory - 1, device=device, dtype=dtype
        )

    def narrow_capabilities(self, can):
        return replace(can, segments=self.memory is not None)

    @property
    def halo(self):
        return (self.memory or 1) - 1

    @property
    def only_halo(self):
        return True

    def join_states(self, earlier, later, fade):
        return join_rings(earlier, later)[0]

    def mix_chunk(self, x, state, *, positions, key_mask):
        return ring_chunk(self, x, state, positions=positions, key_mask=key_mask, ring=self.memory is not None)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        state, q = append_tokens(state, valid, positions, keys=self.k_proj(x), values=self.v_proj(x)), self.q_proj(x)
        learned = self.relative, self.content, self.place
        options = {
            "heads": self.heads,
            "memory": self.memory,
            "positions": (positions, state.positions),
            "causal": True,
            "key_mask": state.valid,
        }
        y = transformer_xl(q, state.keys.to(q.dtype), state.values.to(q.dtype), *learned, **options)
        return y, state if self.memory is None else keep_newest(state, self.memory - 1, holes=holes)
