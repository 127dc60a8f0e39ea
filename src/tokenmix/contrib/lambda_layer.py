"""The lambda layer (Bello 2021, arXiv:2102.08602), over the full context or a window.

The context becomes one small linear map per query, by content and position.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional import aft_chunk as chunk
from ..functional.sums.nonfinite import guard_nonfinite
from ..functional.sums.softmax import FLOOR, MASKED_KEY, merge_heads, prefix_sums, ratio_of, split_heads64
from ..functional.sums.taps import (
    centre_of,
    check_odd,
    grid_weights,
    pair_weights,
    slide,
    weigh_values,
    zero_masked_values,
)
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import About, Arguments, Facts, Inputs, chunk_positions, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts.history import append_tokens, join_rings, keep_newest
from ..mixers.parts.options import at_least, check_heads, one_of
from ..mixers.parts.shared import check_positions, has_holes, in_pieces, valid_mask
from ..mixers.parts.token_norm import TokenBatchNorm
from ..mixers.segments import Segmented
from ..positions.grid import replacing_parameter


@exact
@guard_nonfinite("k", "v", asks="q")
def lambda_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    embedding: Tensor,
    *,
    heads: int,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_n = (lambda^c + lambda^p_n)^T q_n (Bello 2021, Eq. 1 and 2).

    lambda^c = sum_m softmax_m(K)_m v_m^T, lambda^p_n = sum_m E_{m - n} v_m^T.

    Args:
        q: (B, T, heads * w), w the key width; every head applies the same lambdas (multi-query lambdas).
        k: (B, T, w), one key for all heads; softmax is over tokens, feature by feature.
        v: (B, T, c), c = D / heads.
        embedding: E (s, w). Row j belongs to the key j - s // 2 positions after the query (causal: j - (s - 1));
            further keys have no position lambda. On a grid E (a, b, w), a and b odd: entry i, j belongs to the cell i -
            a // 2 lines and j - b // 2 columns away.
        grid: (H, W) of the tokens after the first ``prefix``, whose position lambdas are 0 to and from all.
        positions: (B, T); distances are measured in positions. On a grid, flat indices.

    Returns:
        (B, T, heads * c) in q's dtype. Content: time O(T w (c + D)), causal O(T w D). Position: no lambda^p is built;
        (q_n . E_{m - n}) weighs v_m instead, in O(T s (w heads + D)) for a window shorter than the sequence, else
        O(T^2 (w heads + D)).
    """
    _check(q, k, v, embedding, heads, causal, backend)
    if (embedding.ndim == 3) != (grid is not None) or (grid is not None and (causal or len(grid) != 2)):
        given = f"{tuple(embedding.shape)}, grid={grid}, causal={causal}"
        raise MixerError(
            f"lambda_layer: embeddings (a, b, w) need a grid (H, W) and causal=False, and vice versa; got {given}."
        )
    qh, vz = at_least_float32(q).unflatten(-1, (heads, -1)), zero_masked_values(v, key_mask)
    content = content_causal(k, v, key_mask) if causal else content_full(k, vz, key_mask)[:, None]
    y = qh @ content.to(qh.dtype)
    y = y + _positions(qh, vz[:, :, None], embedding.to(qh.dtype), grid, prefix, positions, causal)
    return y.flatten(2).to(q.dtype)


def _positions(
    q: Tensor, v: Tensor, E: Tensor, grid: tuple[int, ...] | None, prefix: int, positions: Tensor | None, causal: bool
) -> Tensor:
    """Apply lambda^p_n to q_n (B, T, heads, w): the values (B, T, 1, c) weighed by q_n . E."""
    T = q.shape[1]
    at = torch.arange(T, device=q.device).expand(q.shape[:2]) if positions is None else positions
    if grid is not None:
        return weigh_values(grid_weights(q @ E.flatten(0, 1).T, at, grid, prefix, (E.shape[0], E.shape[1])), v)
    if positions is None:
        E = _rows_in_reach(E, T, causal)
    taps, centre = q @ E.T, centre_of(E.shape[0], causal)
    if positions is None and E.shape[0] < T:
        return slide(taps, v, centre)
    return weigh_values(pair_weights(taps, at, at, centre, causal=causal), v)


def content_full(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Compute lambda^c (B, w, c) of all valid tokens in float64; 0 if there are none. v is 0 at masked tokens."""
    kd = k.double() if key_mask is None else torch.where(key_mask[..., None], k.double(), MASKED_KEY)
    if k.shape[1] == 0:
        return kd.new_zeros(k.shape[0], k.shape[-1], v.shape[-1])
    e = torch.exp(kd - kd.detach().amax(1, keepdim=True).clamp_min(FLOOR))
    den = e.sum(1)[..., None]
    return (e.transpose(1, 2) @ v.double()) / torch.where(den > 0, den, 1.0)


def content_causal(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Compute lambda^c_n (B, T, w, c) of tokens up to n, each under its own running maximum, in float64."""
    if k.shape[1] == 0:
        return k.new_zeros(k.shape[0], 0, k.shape[-1], v.shape[-1], dtype=torch.float64)
    ratio = merge_heads(ratio_of(prefix_sums(*split_heads64(k, per_key(v, k.shape[-1]), key_mask, 1))))
    return ratio.unflatten(-1, (-1, k.shape[-1])).transpose(-1, -2)


@exact
def per_key(v: Tensor, width: int) -> Tensor:
    """Repeat each value for each key feature, (B, T, c * w).

    This is the layout in which ``sums.softmax`` takes several values for one key.
    """
    return v[..., None].expand(*v.shape, width).flatten(-2)


def _rows_in_reach(E: Tensor, T: int, causal: bool) -> Tensor:
    """Keep only the rows of E that a distance within T tokens can reach."""
    beyond = max(0, E.shape[0] - T) if causal else max(0, E.shape[0] - (2 * T - 1)) // 2
    return E[beyond:] if causal else E[beyond : E.shape[0] - beyond]


def _check(q: Tensor, k: Tensor, v: Tensor, embedding: Tensor, heads: int, causal: bool, backend: Backend) -> None:
    choose("lambda_layer", backend, q)
    w = embedding.shape[-1]
    if q.shape[-1] != heads * w or k.shape[-1] != w:
        given = f"k {k.shape[-1]} and q {q.shape[-1]}"
        raise MixerError(f"lambda_layer: embeddings of width {w} need k {w} and q {heads} x {w} wide, got {given}.")
    if q.shape[:2] != v.shape[:2] or k.shape[:2] != v.shape[:2]:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v))
        raise MixerError(f"lambda_layer: q, k and v must have the same length, got {shapes}.")
    for size in embedding.shape[:-1]:
        check_odd("lambda_layer", size, causal)


@register_state
class LambdaState(NamedTuple):
    """The values that later position lambdas may weight, and the sums of the content lambda.

    values (B, S, c), valid, positions (B, S): S = window - 1 with a window, otherwise every value so far. m, den (B, w)
    and num (B, c * w): sums of the content lambda, in float64. position (B,): the next one.
    """

    values: Tensor
    valid: Tensor
    positions: Tensor
    m: Tensor
    num: Tensor
    den: Tensor
    position: Tensor


class Lambda(Segmented):
    """The lambda layer: y_n = W_o (lambda^c + lambda^p_n)^T q_n.

    lambda^c = sum_m softmax_m(k)_m v_m^T, lambda^p_n = sum_m E_{m - n} v_m^T. Bello 2021, arXiv:2102.08602, Eq. 1 and
    2. Maps (B, T, D) to (B, T, D).

    Args:
        max_len: for full context, the longest sequence in tokens, with an embedding for each relative position. None
            with ``window`` or ``grid_size``.
        heads: number of queries per token, 4 by default; must divide dim. Values have dim / heads features, and all
            heads share keys, values and lambdas.
        key_width: w, the number of features of queries and keys, 16 by default. Embeddings E start as N(0, 1 / w).
        grid_size: [H, W], the largest grid of an image: full context with an embedding for each relative cell; the
            actual grid is given at call time. None (default): sequences.
        window: number of tokens that a position lambda covers (a lambda convolution), odd unless causal; the content
            lambda stays global. None (default): full context.
        norm: BatchNorm on queries and keys ("qk", default, as in AFT's baseline), on queries and values ("qv", the
            paper's), or None.

    In train mode BatchNorm takes its statistics from all valid tokens of the batch, so rows influence each other, and
    later tokens earlier ones; in eval mode they do not.

    Parameters: q_proj, k_proj, v_proj, out_proj, embedding (E), norms. Time O(T^2 (w H + D)), or O(T r (w H + D)) with
    a window of r tokens.

    Deviations: the causal form is ours: a prefix softmax for the content, and embeddings of the past only for
    positions.

    Raises:
        MixerError: if an option is out of its range, if none of max_len, window and grid_size is given, or if the grid
            exceeds ``grid_size``.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        grid=True,
        knows_positions=True,
        form=lambda_layer,
        page="lambda",
        about=About(
            "Bello 2021, arXiv 2102.08602",
            "low rank",
            "T^2 (w H + D), window r: T r (w H + D)",
            "T^2 H, window r: T r H",
        ),
        carries=("out_proj",),
    )

    def __init__(
        self,
        dim: int,
        *,
        max_len: int | None,
        causal: bool = False,
        heads: int = 4,
        key_width: int = 16,
        window: int | None = None,
        grid_size: list[int] | None = None,
        norm: str | None = "qk",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len if window is None and grid_size is None else None)
        self.heads, self.key_width, self.window, self.grid_size, self.norm = heads, key_width, window, grid_size, norm
        self._check_options(max_len)
        self.q_proj = nn.Linear(dim, heads * key_width, bias=qkv_bias)
        self.k_proj = nn.Linear(dim, key_width, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, dim // heads, bias=qkv_bias)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)
        widths = {"q": heads * key_width, "k": key_width, "v": dim // heads}
        self.norms = nn.ModuleDict({name: TokenBatchNorm(widths[name]) for name in norm or ""})
        self.embedding = nn.Parameter(torch.empty(*self._sizes(max_len), key_width))
        self.init_parameters()

    def _check_options(self, max_len: int | None) -> None:
        check_heads(self, self.heads)
        at_least(self, 1, key_width=self.key_width)
        at_least(self, 1, **{name: n for name, n in (("max_len", max_len), ("window", self.window)) if n is not None})
        one_of(self, ("qk", "qv", None), norm=self.norm)
        if self.grid_size is not None:
            if (
                self.window is not None
                or self.causal
                or not isinstance(self.grid_size, list | tuple)
                or len(self.grid_size) != 2
            ):
                self.refuse(
                    f"grid_size must be two sizes [H, W], without window and causal=True, got {self.grid_size!r}"
                )
            at_least(self, 1, **{f"grid_size[{i}]": n for i, n in enumerate(self.grid_size)})
        if self.window is None and self.grid_size is None and self.max_len is None:
            self.refuse("needs max_len for full context, window for a lambda convolution, or grid_size for images")
        if self.window is not None and self.window % 2 == 0 and not self.causal:
            self.refuse(f"window must be positive, and odd unless causal=True, got {self.window!r}")

    def _sizes(self, max_len: int | None) -> tuple[int, ...]:
        """Return the number of relative positions with an embedding along each axis."""
        if self.grid_size is not None:
            return tuple(2 * n - 1 for n in self.grid_size)
        if self.window is not None:
            return (self.window,)
        assert max_len is not None
        return (max_len if self.causal else 2 * max_len - 1,)

    def narrow_capabilities(self, can):
        """Return the features of this instance: a grid if ``grid_size`` was given, segments within a window."""
        return replace(can, grid=self.grid_size is not None, segments=self.window is not None)

    def init_parameters(self) -> None:
        nn.init.normal_(self.embedding, std=self.key_width**-0.5)

    def reset_parameters(self) -> None:
        for child in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, *self.norms.values()):
            child.reset_parameters()  # type: ignore[operator]  # Linear or TokenBatchNorm
        self.init_parameters()

    def resize(self, max_len: int) -> None:
        """Change the longest sequence of the full context to ``max_len`` tokens.

        Rows of E for new distances are initialised; those for distances beyond ``max_len`` are dropped.
        """
        if self.max_len is None:
            self.refuse("has no parameters per position; nothing to resize")
        if not isinstance(max_len, int) or max_len < 1:
            self.refuse(f"resize needs a positive length, got {max_len!r}")
        old, more = self.embedding.detach(), max_len - self.max_len
        self.max_len = self.max_context_len = max_len
        self.embedding = replacing_parameter(self.embedding, old.new_empty(*self._sizes(max_len), self.key_width))
        self.init_parameters()
        with torch.no_grad():
            if more >= 0:
                self.embedding[more : more + old.shape[0]] = old
            else:
                self.embedding.copy_(old[-more : -more + self.embedding.shape[0]])

    def _project_inputs(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, ...]:
        found = {"q": self.q_proj(x), "k": self.k_proj(x), "v": self.v_proj(x)}
        return tuple(self.norms[name](a, key_mask) if name in self.norms else a for name, a in found.items())

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``lambda_layer`` for this input: (positional, keyword)."""
        key_mask, grid = inputs.key_mask, inputs.grid
        if (grid is None) != (self.grid_size is None) or (grid is not None and len(grid) != 2):
            self.refuse(
                f"was built with grid_size={self.grid_size}, got grid={grid}; grid and grid_size need each other"
            )
        if (
            grid is not None
            and self.grid_size is not None
            and any(n > most for n, most in zip(grid, self.grid_size, strict=True))
        ):
            self.refuse(f"was built with grid_size={self.grid_size}, got the larger grid={tuple(grid)}")
        options = {
            "heads": self.heads,
            "grid": grid,
            "prefix": inputs.prefix,
            "positions": inputs.positions,
            "causal": self.causal,
            "key_mask": key_mask,
        }
        return (*self._project_inputs(inputs.x, key_mask), self.embedding), options

    def mixing_cost(self, T: int) -> MixingCost:
        w, c, H, D = self.key_width, self.dim // self.heads, self.heads, self.dim
        local = self.window is not None and self.window < T
        rows = (
            prod(self._sizes(self.max_len))
            if self.grid_size
            else min(*self._sizes(self.max_len), T if self.causal else 2 * T - 1)
        )
        content = 2 * T * w * c + 2 * T * w * D
        logits, values = 2 * T * rows * w * H, 2 * T * D * (rows if local else T)
        counted = None if self.causal else content + logits + (0 if local else values)
        pairs = H * T * rows + (0 if local else (H + 2) * T * T)
        kept = 4 * (pairs + T * (3 * w * H + 8 * w + 8 * c + 2 * D))
        kept_values = self.window - 1 if self.window is not None else T
        return MixingCost(content + logits + values, counted, kept, kept_values * (4 * c + 9) + 8 * w * (2 + c) + 8)

    def empty_state(self, batch_size, *, device, dtype):
        c, S = self.dim // self.heads, 0 if self.window is None else self.window - 1
        positions = torch.zeros(batch_size, S, dtype=torch.long, device=device)
        values = torch.zeros(batch_size, S, c, device=device, dtype=dtype)
        sums = chunk.empty_past(batch_size, self.key_width, c * self.key_width, device=device)
        return LambdaState(values, positions.bool(), positions, *sums, positions.new_zeros(batch_size))

    def join_states(self, earlier, later, fade):
        m, num, den = chunk.merge_past(earlier[3:6], later[3:6])
        return join_rings(earlier, later)[0]._replace(m=m, num=num, den=den)

    def mix_chunk(self, x, state, *, positions, key_mask):
        if self.window is not None:
            check_positions(self, positions, key_mask, rising=True, past=(state.valid, state.positions))
        query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
        self.check_range(query_positions)
        holes = self.window is not None and has_holes(state.valid, key_mask)
        y, state = in_pieces(partial(self._mix_piece, holes=holes), x, state, query_positions, valid_mask(x, key_mask))
        return self.out_proj(y), state._replace(position=next_position)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        q, k, v = self._project_inputs(x, valid)
        past, spread = (state.m, state.num, state.den), per_key(v.double(), self.key_width)
        content, past = chunk.aft_simple_chunk(spread, k, spread, past, key_mask=valid, gate=None)
        state = append_tokens(state, valid, positions, values=v)
        qh = at_least_float32(q).unflatten(-1, (self.heads, -1))
        vz = zero_masked_values(state.values.to(torch.promote_types(qh.dtype, state.values.dtype)), state.valid).to(
            qh.dtype
        )
        E = self.embedding.to(qh.dtype)
        weights = pair_weights(qh @ E.T, positions, state.positions, centre_of(E.shape[0], True), causal=True)
        y = qh @ content.unflatten(-1, (-1, self.key_width)).transpose(-1, -2).to(qh.dtype) + weigh_values(
            weights, vz[:, :, None]
        )
        state = state if self.window is None else keep_newest(state, self.window - 1, holes=holes)
        m, num, den = past
        return y.flatten(2).to(x.dtype), state._replace(m=m, num=num, den=den)
