"""Softmax multi-head attention, the baseline of every comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.attention import ROWS, attention_by_head
from ..functional.layout.heads import by_head
from ..functional.layout.masks import valid_mask, zero_masked
from ..functional.sums.fused_attention import attention_sums
from ..functional.sums.softmax import Sums
from ..kernels.backend import is_intercepted
from ..kernels.recording import Recorder
from ..positions import ContentPositions, LearnedPositions, RotaryPositions, XPositions, build_logit_bias
from ..positions.checks import choose_class
from .base import QKVO, About, Arguments, Capabilities, Facts, Inputs, chunk_positions, register_state, token_positions
from .cost import MixingCost
from .key_blocks import KeyBlock, KeyBlocks
from .parts.log_weights import content_log_weights, log_weights
from .parts.options import at_least, check_positive, one_of
from .parts.shared import largest_dot
from .parts.token_norm import RMSNorm

NORMS: dict[str, Any] = {"layer": nn.LayerNorm, "rms": RMSNorm}


@register_state
class AttentionState(NamedTuple):
    """Every key and value so far.

    keys, values (B, kv_heads, S, e), 0 where they may not be attended; valid (B, S) bool, True = may be attended;
    position (B,), the next one.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    position: Tensor


@register_state
class BiasedAttentionState(NamedTuple):
    """The same with the position of every key, positions (B, S), on which a bias or a decay depends."""

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


@register_state
class ReservedState(NamedTuple):
    """An ``AttentionState`` in memory for more tokens, which a plan fills: see ``Attention.reserve``.

    keys, values (B, kv_heads, most, e); valid (B, most); number (1,), how many tokens are in it; position (B,).
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    number: Tensor
    position: Tensor

    def first(self, n: int) -> AttentionState:
        """Return the state of the first n tokens, a view."""
        return AttentionState(self.keys[:, :, :n], self.values[:, :, :n], self.valid[:, :n], self.position)


class Attention(KeyBlocks):
    """Multi-head softmax attention (Vaswani et al. 2017), with grouped keys (Ainslie et al. 2023).

    y_t = W_o [softmax_s(q_t . k_s / sqrt(e)) v_s] in each of ``heads`` heads of width e = ``head_dim``; the heads share
    ``kv_heads`` keys and values. Vaswani et al., arXiv:1706.03762. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of query heads, 8 by default; must divide dim unless head_dim is given.
        kv_heads: number of key and value heads; must divide heads. None: heads.
        head_dim: number of features per head. None: dim / heads.
        positions: None (default): no position embedding. {"name": "learned"}: a learned vector per position is added to
            the input of the query and key projections. {"name": "rotary"} with options of ``RotaryPositions``: queries
            and keys are rotated by angles that grow with their positions. Over a context, each side uses its own
            positions. {"name": "xpos"} with options of ``XPositions``: rotary positions that fade with the distance;
            causal mixers only.
        bias: None (default), or a term that is added to the logits, with the options of its class in
            ``tokenmix.positions``. Of the positions alone: {"name": "alibi", "t5", "kerple", "sandwich" or "fire"}. Of
            the query and the keys too, as they are before rotation: "shaw", "cope" (causal mixers only) or "cape".
        max_len: number of learned positions; required for them and ignored otherwise.
        qk_norm: normalisation of queries and keys in each head, before they are rotated; it bounds the logits. "layer"
            (Dehghani et al. 2023, arXiv 2302.05442) or "rms" (Qwen3, Yang et al. 2025, arXiv 2505.09388); the heads
            share the weights, e of each kind. None (default): no normalisation.
        norm_eps: added to the variance in these norms, 1e-6 by default.
        scale: factor on the logits. None: 1 / sqrt(e).

    Parameters: q_proj, k_proj, v_proj, out_proj; q_norm and k_norm with ``qk_norm``; the table of learned positions;
    those of the bias. Time O(T^2 D), memory O(T D). The streaming state is the history of keys and values.

    Raises:
        MixerError: if an option is out of its range or the position spec is unknown.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        attn_mask=True,
        about=About(
            "Vaswani et al. 2017, arXiv 1706.03762",
            "attention",
            "T^2 D",
            "T D",
            idea="softmax of dot products, with heads and grouped keys",
            tier="core",
        ),
        form="attention",
        carries=(*QKVO, "q_norm", "k_norm"),
        knows_positions=True,
        modern_options={"positions": {"name": "rotary"}, "qk_norm": "rms"},
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        positions: dict[str, Any] | None = None,
        bias: dict[str, Any] | None = None,
        max_len: int | None = None,
        scale: float | None = None,
        qk_norm: str | None = None,
        norm_eps: float = 1e-6,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        learned = isinstance(positions, dict) and positions.get("name") == "learned"
        super().__init__(dim, causal=causal, max_len=max_len if learned else None)
        at_least(self, 1, heads=heads, kv_heads=heads if kv_heads is None else kv_heads)
        check_positive(self, scale=1.0 if scale is None else scale)
        one_of(self, (None, *NORMS), qk_norm=qk_norm)
        check_positive(self, norm_eps=norm_eps)
        self.heads, self.kv_heads, self.scale = heads, kv_heads or heads, scale
        if head_dim is None and dim % heads:
            self.refuse(f"heads={heads} must divide dim={dim}, or head_dim must be given")
        if heads % self.kv_heads:
            self.refuse(f"kv_heads={kv_heads} must divide heads={heads}")
        self.head_dim = dim // heads if head_dim is None else head_dim
        at_least(self, 1, head_dim=self.head_dim)
        wide, narrow = self.head_dim * heads, self.head_dim * self.kv_heads
        self.q_proj = nn.Linear(dim, wide, bias=qkv_bias)
        self.k_proj = nn.Linear(dim, narrow, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, narrow, bias=qkv_bias)
        self.out_proj = nn.Linear(wide, dim, bias=out_bias)
        self.q_norm, self.k_norm = (
            None if qk_norm is None else NORMS[qk_norm](self.head_dim, eps=norm_eps) for _ in "qk"
        )
        self.positions = None if positions is None else self._build_positions(positions)
        if bias is None:
            self.bias = None
        else:
            self.bias = build_logit_bias(bias, heads, self.head_dim, causal=causal, owner=type(self).__name__)

    def _build_positions(self, spec: dict[str, Any]) -> LearnedPositions | RotaryPositions:
        kinds: dict[str, Any] = {"learned": LearnedPositions, "rotary": RotaryPositions, "xpos": XPositions}
        who, sizes = type(self).__name__, ("dim", "head_dim", "max_len")
        kind, options = choose_class(spec, kinds, sizes, who=who, option="positions", others=" or None")
        if kind is LearnedPositions and self.max_len is None:
            self.refuse("learned positions need max_len, the number of positions")
        if kind is XPositions and not self.causal:
            self.refuse("positions that fade with the distance (xpos) grow towards the future; they need causal=True")
        try:
            learned = kind is LearnedPositions
            given = {"dim": self.dim, "max_len": self.max_len} if learned else {"head_dim": self.head_dim}
            return kind(**given, **options)
        except MixerError as why:
            self.refuse(f"positions={spec!r} with dim={self.dim} and head_dim={self.head_dim}: {str(why).rstrip('.')}")

    def resize(self, max_len: int) -> None:
        """Interpolate the table of learned positions to ``max_len`` positions."""
        if not isinstance(self.positions, LearnedPositions):
            self.refuse("has no parameters per position; nothing to resize")
        self.positions.resize(max_len)
        self.max_len = self.max_context_len = max_len

    def _with_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.positions(positions).to(x.dtype) if isinstance(self.positions, LearnedPositions) else x

    def _queries(self, x: Tensor) -> Tensor:
        return self._normalise_heads(self.q_norm, self.q_proj(x))

    def _keys(self, x: Tensor) -> Tensor:
        return self._normalise_heads(self.k_norm, self.k_proj(x))

    def _normalise_heads(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        return x if norm is None else norm(x.unflatten(-1, (-1, self.head_dim))).flatten(-2)

    def _rotate_tensors(self, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.positions(positions, *tensors) if isinstance(self.positions, RotaryPositions) else tensors

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.attention`` for this input: (positional, keyword)."""
        x, context, positions, key_mask = inputs.x, inputs.context, inputs.positions, inputs.key_mask
        keys = inputs.keys
        query_positions = (
            positions if positions is not None else token_positions(x, key_mask if context is None else None)
        )
        key_positions = query_positions if context is None else token_positions(keys, key_mask)
        q, k = (
            self._queries(self._with_positions(x, query_positions)),
            self._keys(self._with_positions(keys, key_positions)),
        )
        masks: dict[str, Any] = {"key_mask": key_mask, "attn_mask": inputs.attn_mask}
        w: tuple[Any, ...] = ()
        if self.bias is not None:
            both = by_head(q, self.heads), by_head(k, self.kv_heads)
            plain = positions is None and key_mask is None
            w = (self._log_weights(*both, query_positions, key_positions, plain=plain, **masks),)
        q, k = (
            self._rotate_tensors(query_positions, q, k)
            if key_positions is query_positions
            else (*self._rotate_tensors(query_positions, q), *self._rotate_tensors(key_positions, k))
        )
        if isinstance(self.positions, XPositions):
            both = by_head(q, self.heads), by_head(k, self.kv_heads)
            both = self._decay_heads(*both, query_positions, key_positions, key_mask)
            q, k = (a.transpose(1, 2).flatten(2) for a in both)
        args = (q, k, self.v_proj(keys), *w)
        options = {"heads": self.heads, "kv_heads": self.kv_heads, "scale": self.scale}
        return args, {**options, "causal": self.causal, **masks}

    def _log_weights(self, q: Tensor, k: Tensor, rows: Tensor, cols: Tensor, *, plain: bool, **masks: Any) -> Any:
        """Return the bias of the logits of queries and keys by head, as an argument of a functional form.

        A bias that reads queries and keys reads them before they are rotated: turned ones would tell it where a token
        stands.
        """
        if isinstance(self.bias, ContentPositions):
            options = {"scale": self.scale, "causal": self.causal, **masks}
            return content_log_weights(self.bias, q, k, rows, cols, **options)
        return None if self.bias is None else log_weights(self.bias, rows, cols, plain=plain, dtype=q.dtype)

    def _decay_heads(
        self, q: Tensor, k: Tensor, rows: Tensor, cols: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys by head with the decay of xPOS, counted from the middle of the queries.

        Keys far behind the queries fade to 0; those of ``valid`` (B, S) that stand far ahead of them are refused.
        """
        assert isinstance(self.positions, XPositions)
        if rows.shape[1] == 0:
            return q, k
        first, last = rows.amin(1), rows.amax(1)
        cols = cols if valid is None else torch.where(valid, cols, first[:, None])
        span, most = rows.shape[1], self.positions.longest(q.dtype)
        if not is_intercepted() and rows.stride(0) and len(rows):  # not the indices, so there may be gaps
            span = max(span, int((torch.maximum(last, cols.amax(1)) - first).max()) + 1)
        if span > most:
            kind = str(q.dtype).removeprefix("torch.")
            self.refuse(f"the decay of xpos in {kind} spans at most {most:,} positions in one call, got {span:,}")
        middle = torch.div(first + last, 2, rounding_mode="floor")
        fade = self.positions.decay_features
        return fade(q, rows, middle, key=False), fade(k, cols, middle, key=True)

    def mixing_cost(self, T: int) -> MixingCost:
        wide, width = self.q_proj.out_features, self.k_proj.out_features
        counted = 4 * T * T * wide
        turning = self.positions.rotary_dim if isinstance(self.positions, RotaryPositions) else 0
        # the fused kernel keeps its inputs and its output, not the T x T weights
        kept = 4 * (2 * wide + 4 * width) * T + 4 * wide * T + 4 * turning * T
        normed = 0 if self.q_norm is None else wide + width
        kept += 4 * normed * T  # the inputs of the norms
        flops = counted + 3 * turning * (self.heads + self.kv_heads) * T + 5 * normed * T
        state = (8 * width + 1) * T + 8
        if isinstance(self.positions, XPositions):
            flops += (wide + width) * T
            kept += 8 * (wide + width) * T
        if self.bias is not None:  # the weights of at most ROWS queries are kept
            products = self.bias.pair_products() * T * T
            products += self.bias.row_products() * T if isinstance(self.bias, ContentPositions) else 0
            counted += products
            flops += products + self.bias.pair_flops() * T * T
            kept += (8 * self.heads + 4 * self.bias.pair_kept()) * min(T, ROWS) * T
        if self._keeps_positions:
            state += 8 * T
        return MixingCost(flops=flops, counted=counted, activations=kept, state=state)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        dot = largest_dot(args[0], args[1], options["heads"], options["kv_heads"], options["scale"])
        if len(args) < 4:
            return dot
        w, T = args[3], args[0].shape[1]
        pieces = [w] if isinstance(w, Tensor) else [w(start, min(start + ROWS, T)) for start in range(0, T, ROWS)]
        return dot + max(float(piece.detach().abs().max()) for piece in pieces)

    def narrow_capabilities(self, can: Capabilities) -> Capabilities:
        return replace(can, key_blocks=not isinstance(self.bias, ContentPositions))

    def block_keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        (keys,) = self._rotate_tensors(positions, self._keys(self._with_positions(x, positions)))
        return keys, self.v_proj(x)

    def block_queries(self, x: Tensor, positions: Tensor) -> Tensor:
        (queries,) = self._rotate_tensors(positions, self._queries(self._with_positions(x, positions)))
        return queries

    def block_sums(self, queries: Tensor, positions: Tensor, block: KeyBlock, *, causal: bool) -> Sums:
        q, v = by_head(queries, self.heads), by_head(block.values, self.kv_heads)
        k, ok = by_head(block.keys, self.kv_heads), block.valid[:, None, None]
        w = self._log_weights(q, k, positions, block.positions, plain=False, key_mask=block.valid)
        if isinstance(self.positions, XPositions):
            q, k = self._decay_heads(q, k, positions, block.positions, block.valid)
        if causal:
            ok = ok & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return attention_sums(q, k, v, ok, self.scale, w)

    @property
    def _keeps_positions(self) -> bool:
        """Return whether the state holds the position of every key."""
        return self.bias is not None or isinstance(self.positions, XPositions)

    def _state(self, keys: Tensor, values: Tensor, valid: Tensor, positions: Tensor, position: Tensor) -> Any:
        if not self._keeps_positions:
            return AttentionState(keys, values, valid, position)
        return BiasedAttentionState(keys, values, valid, positions, position)

    @property
    def _keeps_unturned(self) -> bool:
        """Return whether the state holds keys before their rotation, because the bias reads them so."""
        return isinstance(self.bias, ContentPositions) and isinstance(self.positions, RotaryPositions)

    def _rotate_by_head(self, positions: Tensor, a: Tensor) -> Tensor:
        """Rotate queries or keys by head (B, heads, S, e)."""
        (turned,) = self._rotate_tensors(positions, a.transpose(1, 2).flatten(2))
        return by_head(turned, a.shape[1])

    def empty_state(self, batch_size, *, device, dtype):
        keys = torch.zeros(batch_size, self.kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        none = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        return self._state(keys, keys.clone(), none.bool(), none, none.new_zeros(batch_size))

    def context_state(self, context, context_mask):
        positions = token_positions(context, context_mask)
        keys = self._keys(self._with_positions(context, positions))
        if not self._keeps_unturned:
            (keys,) = self._rotate_tensors(positions, keys)
        keys, values = self._to_keep(keys, self.v_proj(context), context_mask)
        valid = valid_mask(context, context_mask)
        first = torch.zeros(valid.shape[0], dtype=torch.long, device=valid.device)
        return self._state(keys.contiguous(), values.contiguous(), valid, positions.contiguous(), first)

    def _to_keep(self, keys: Tensor, values: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys and values as a state holds them: by head, and 0 where they are masked."""
        return by_head(zero_masked(keys, key_mask), self.kv_heads), by_head(
            zero_masked(values, key_mask), self.kv_heads
        )

    def reserve(self, state: AttentionState, most: int) -> ReservedState | None:
        """Return a state in memory for ``most`` tokens, which a plan fills in place; None if keys need more than that.

        They do where logits have a bias, or where the state holds positions.
        """
        if self._keeps_positions or not self.causal or self.head_dim != state.keys.shape[3]:
            return None
        rows, heads, n, width = state.keys.shape
        keys, values = (a.new_zeros(rows, heads, most, width) for a in (state.keys, state.values))
        valid, number = state.valid.new_zeros(rows, most), state.position.new_full((1,), n)
        keys[:, :, :n], values[:, :, :n], valid[:, :n] = state.keys, state.values, state.valid
        return ReservedState(keys, values, valid, number, state.position.clone())

    def mix_reserved(self, x: Tensor, state: ReservedState, plan: Recorder) -> tuple[Tensor, ReservedState]:
        """Plan the step of one token x (B, 1, D) over a reserved state."""
        at, wide = state.position[:, None], (1, -1, self.head_dim)
        if isinstance(self.positions, LearnedPositions):
            self.check_range(at)
        inputs = self._with_positions(x, at)
        q, k = self._rotate_tensors(at, self._queries(inputs), self._keys(inputs))
        q, k, v = (
            a.unflatten(-1, wide[1:]) for a in (q, k.to(state.keys.dtype), self.v_proj(x).to(state.values.dtype))
        )
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        y = plan.attend(q, k, v, (state.keys, state.values, state.valid, state.number), scale)
        return self.out_proj(y.flatten(2)), state._replace(number=state.number + 1, position=state.position + 1)

    def mix_chunk(self, x, state, *, positions, key_mask):
        query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
        if isinstance(self.positions, LearnedPositions):
            self.check_range(query_positions)
        inputs = self._with_positions(x, query_positions)
        keys, values, valid, fresh = state.keys, state.values, state.valid, state.valid.shape[1] == 0
        at, late = state.positions if self._keeps_positions else query_positions, self._keeps_unturned
        q = self._queries(inputs)
        if self.causal:
            k = self._keys(inputs)
            q, k = (q, k) if late else self._rotate_tensors(query_positions, q, k)
            new = self._to_keep(k, self.v_proj(x), key_mask)
            keys, values = (torch.cat([old, a.to(old.dtype)], 2) for old, a in zip((keys, values), new, strict=True))
            valid = torch.cat([valid, valid_mask(x, key_mask)], 1)
            at = torch.cat([at, query_positions], 1) if self._keeps_positions else at
        elif not late:
            (q,) = self._rotate_tensors(query_positions, q)
        # the first chunk needs no mask, and without one it runs fused
        mask = None if self.causal and key_mask is None and fresh else valid
        q, seen = by_head(q, self.heads), keys.to(q.dtype)
        w = self._log_weights(q, seen, query_positions, at, plain=False, key_mask=mask)
        if late:
            q, seen = self._rotate_by_head(query_positions, q), self._rotate_by_head(at, seen)
        if isinstance(self.positions, XPositions):
            q, seen = self._decay_heads(q, seen, query_positions, at, mask)
        y = attention_by_head(q, seen, values.to(q.dtype), w, scale=self.scale, causal=self.causal, key_mask=mask)
        return self.out_proj(y), self._state(keys, values, valid, at, next_position)
