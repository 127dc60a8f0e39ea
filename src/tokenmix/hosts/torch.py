"""Put a mixer where ``torch.nn`` expects ``nn.MultiheadAttention``: the same signature, masks and pair of outputs.

Shapes: N batch, L queries, S keys, E features. True in torch's masks means "not attended", the opposite of ours.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.heads import by_head
from ..mixers import MIXERS, Inputs, Mixer, build_mixer, mixer_options
from ..mixers.attention import Attention
from ..mixers.registration import load_mixer
from ..models.effective_attention import values_attention
from ..types import Options, Spec


class NoWeights:
    """Stand in for the attention weights that ``nn.TransformerEncoder`` looks up.

    In eval mode torch's encoder and its layers bypass ``self_attn`` and compute softmax attention from its
    ``in_proj_weight``, ``in_proj_bias`` and ``out_proj``, unless one of these overrides torch functions. This class
    declares that it does, so ``forward`` is always called.
    """

    weight = bias = None
    _why = "needs softmax attention's joint weights, which a mixer has not; its projections are parameters of .mixer"

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        _refuse(f"{torch.overrides.resolve_name(func) or func.__name__} {cls._why}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"MultiheadMixer: .{name} {self._why}.")


class MultiheadMixer(nn.Module):
    """Replace ``nn.MultiheadAttention`` by any mixer.

    It works inside ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer``. Arguments, masks and outputs
    are those of ``nn.MultiheadAttention``, with these deviations: causality is fixed at construction, as in every
    mixer; ``need_weights`` is None by default, which returns weights for softmax attention, as torch does, and none
    for other mixers; a query with nothing to attend gives ``out_proj(0)``, not NaN.

    Args:
        embed_dim: E.
        num_heads: the mixer's ``heads``, if it has that option and the spec does not set it.
        dropout: must be 0, because mixers need not have weights to drop.
        bias: False builds the mixer with ``qkv_bias=False`` and ``out_bias=False``, if it has these options and the
            spec does not set them.
        add_bias_kv, add_zero_attn, kdim, vdim: only torch's defaults; keys and values have E features.
        batch_first: (N, L, E) instead of (L, N, E).
        device, dtype: of the parameters.
        mixer: a name of ``MIXERS``, or a spec, ``{"name": "aft_local", "window": 32, "max_len": 512}``.
        causal: query t attends keys 0..t only, whether or not a call passes the causal ``attn_mask``.

    Raises:
        MixerError: for arguments that the mixer cannot honour.
    """

    in_proj_weight = out_proj = NoWeights()
    bias_k = bias_v = q_proj_weight = k_proj_weight = v_proj_weight = None
    merge_masks = nn.MultiheadAttention.merge_masks
    add_zero_attn = False
    _qkv_same_embed_dim = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mixer: str | Spec = "attention",
        causal: bool = False,
    ):
        super().__init__()
        if dropout:
            why = "would drop attention weights, which a mixer need not have"
            _refuse(f"dropout={dropout} {why}; give dropout=0.0 and put nn.Dropout after the layer")
        if add_bias_kv or add_zero_attn:
            _refuse("add_bias_kv and add_zero_attn change softmax attention's keys; leave them False")
        if (kdim or embed_dim, vdim or embed_dim) != (embed_dim, embed_dim):
            got = f"got kdim={kdim}, vdim={vdim}"
            _refuse(f"keys and values have embed_dim={embed_dim} features, {got}; project them beforehand")
        if not isinstance(num_heads, int) or num_heads < 1 or embed_dim % num_heads:
            _refuse(f"num_heads={num_heads!r} must divide embed_dim={embed_dim}")
        with nullcontext() if device is None else torch.device(device):
            self.mixer: Mixer = build_mixer(dim=embed_dim, causal=causal, **_complete(mixer, num_heads, bias)).to(
                dtype=dtype
            )
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.dropout, self.batch_first, self.has_bias = dropout, batch_first, bool(bias)

    @property
    def in_proj_bias(self) -> NoWeights | None:
        """Return None if the input projections have no bias, as in torch."""
        own = [p for p in (getattr(self.mixer, n, None) for n in ("q_proj", "k_proj", "v_proj")) if p is not None]
        biased = any(getattr(p, "bias", None) is not None for p in own) if own else self.has_bias
        return NoWeights() if biased else None

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which would stop somewhere in the mixer."""
        _refuse("cannot be scripted, because a mixer is Python; torch.jit.trace and torch.export take it")

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention, *, causal: bool = False) -> MultiheadMixer:
        """Build the same function from softmax attention, with copies of its weights.

        Its dropout of attention weights in training is not carried over.
        """
        if not isinstance(attention, nn.MultiheadAttention):
            _refuse(f"from_torch takes an nn.MultiheadAttention, got {type(attention).__name__}")
        if not attention._qkv_same_embed_dim or attention.bias_k is not None or attention.add_zero_attn:
            _refuse("from_torch takes attention with kdim = vdim = embed_dim, without add_bias_kv and add_zero_attn")
        joint, bias = attention.in_proj_weight, attention.in_proj_bias is not None
        options: Options = {
            "bias": bias,
            "batch_first": attention.batch_first,
            "device": joint.device,
            "dtype": joint.dtype,
        }
        made = cls(attention.embed_dim, attention.num_heads, **options, causal=causal)
        made.load_state_dict(attention.state_dict())
        return made.train(attention.training)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Load as torch does; if the mixer is softmax attention, weights of ``nn.MultiheadAttention`` load too."""
        if isinstance(self.mixer, Attention):
            for kind in ("weight", "bias"):
                joint, out = (
                    state_dict.pop(f"{prefix}{name}", None) for name in (f"in_proj_{kind}", f"out_proj.{kind}")
                )
                thirds = () if joint is None else joint.chunk(3)
                state_dict |= {
                    f"{prefix}mixer.{part}_proj.{kind}": third for part, third in zip("qkv", thirds, strict=False)
                }
                state_dict |= {} if out is None else {f"{prefix}mixer.out_proj.{kind}": out}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _reset_parameters(self) -> None:
        """Initialise again, under the name that ``nn.MultiheadAttention`` uses."""
        self.mixer.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix query with itself (``key is query``), or with the one tensor given as key and value.

        Args:
            query: (L, N, E), (N, L, E) with ``batch_first``, or (L, E). key and value likewise, of length S.
            key_padding_mask: (N, S), or (S,) for unbatched inputs; bool, True = not attended, or float, 0 and -inf.
            need_weights: return the weights too, (N, L, S), or (N, num_heads, L, S) with
                ``average_attn_weights=False``. Those of softmax attention have gradients; those of a mixer whose output
                is a sum over values do not, and are found exactly at the cost of S calls. Other mixers refuse.
            attn_mask: (L, S) or (N * num_heads, L, S), the same for all heads of a row; bool or float as above. A mixer
                built with ``causal=True`` that weighs no pairs takes the causal mask only, which changes nothing.
            is_causal: declares that ``attn_mask`` is the causal one; with ``causal=True`` the mask may then be omitted.

        Returns:
            The output, shaped like query, and the weights or None.
        """
        self._check_inputs(query, key, value)
        batched = query.ndim == 3
        x, context = self._rows(query), None if _same_tensor(query, key) else self._rows(key)
        T, S, B = x.shape[1], x.shape[1] if context is None else context.shape[1], x.shape[0]
        keep = None if key_padding_mask is None else self._key_mask(key_padding_mask, (B, S), batched)
        pairs = self._pair_mask(attn_mask, (B, T, S), is_causal)
        y = self.mixer(x, context, key_mask=keep, attn_mask=pairs)
        wanted = isinstance(self.mixer, Attention) if need_weights is None else need_weights
        weights = self._weights(x, context, keep, pairs, average_attn_weights) if wanted else None
        if not batched:
            return y[0], None if weights is None else weights[0]
        return y if self.batch_first else y.transpose(0, 1), weights

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested or key.is_nested or value.is_nested:
            _refuse(
                "takes no nested tensors; nn.TransformerEncoder makes them in evaluation: build it with "
                "enable_nested_tensor=False, or set its use_nested_tensor to False; elsewhere pass padded tensors and "
                "a key_padding_mask"
            )
        if not _same_tensor(key, value):
            hint = (
                "trace a module that gives it one"
                if torch.jit.is_tracing()
                else "add positions to it beforehand, to all or to none"
            )
            _refuse(f"takes one tensor as key and value, got two; a mixer reads both from one context: {hint}")
        if query.ndim not in (2, 3) or key.ndim != query.ndim:
            shapes = f"{tuple(query.shape)} and {tuple(key.shape)}"
            _refuse(f"expects query and key of 3 axes, or 2 for one sequence, got shapes {shapes}")

    def _rows(self, x: Tensor) -> Tensor:
        """Bring any of torch's layouts to (N, T, E)."""
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _key_mask(self, mask: Tensor, shape: tuple[int, int], batched: bool) -> Tensor:
        wanted = shape if batched else shape[1:]
        if tuple(mask.shape) != wanted:
            _refuse(f"expects a key_padding_mask of shape {wanted}, got {tuple(mask.shape)}")
        return _as_allowed_pairs(mask, "key_padding_mask").view(shape)

    def _pair_mask(self, mask: Tensor | None, shape: tuple[int, int, int], is_causal: bool) -> Tensor | None:
        """Return the attn_mask as the mixer takes it; None without one, or if the mixer applies it anyway."""
        name, able, causal = type(self.mixer).__name__, self.mixer.capabilities.attn_mask, self.mixer.causal
        if mask is None:
            if is_causal and not causal:
                why = "is_causal=True without an attn_mask needs a mixer built with causal=True"
                _refuse(f"{why}, {name} was built with causal=False")
            return None
        allowed = self._merge_head_masks(_as_allowed_pairs(mask, "attn_mask"), shape)
        if causal and shape[1] == shape[2]:
            order = torch.ones(shape[1:], dtype=torch.bool, device=mask.device).tril()
            same = (allowed == order).all()
            if is_causal or not able:
                only = f"{name} was built with causal=True and takes the causal attn_mask only, got another"
                _require(same, f"{only}; {_who_weighs_pairs()}")
                return None
            return None if not torch.compiler.is_compiling() and bool(same) else allowed
        if able:
            return allowed
        instead = (
            "build it with causal=True for the causal mask" if self.mixer.facts.causal else "it has no causal form"
        )
        why = f"{name} weighs no pairs of tokens and takes no attn_mask"
        _require(allowed.all(), f"{why}; {instead}, use key_padding_mask for padding; {_who_weighs_pairs()}")
        return None

    def _merge_head_masks(self, allowed: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Reduce a mask that may have one map per head to (L, S) or (N, L, S)."""
        B, T, S = shape
        if tuple(allowed.shape) == (T, S):
            return allowed
        if tuple(allowed.shape) != (B * self.num_heads, T, S):
            wanted = f"{(T, S)} or {(B * self.num_heads, T, S)}"
            _refuse(f"expects an attn_mask of shape {wanted}, got {tuple(allowed.shape)}")
        maps = allowed.view(B, self.num_heads, T, S)
        why = "the heads of an attn_mask must agree; a mixer takes one mask per row of the batch"
        _require((maps == maps[:, :1]).all(), why)
        return maps[:, 0]

    def _weights(
        self, x: Tensor, context: Tensor | None, keep: Tensor | None, pairs: Tensor | None, average: bool
    ) -> Tensor:
        """Return the weights, (N, L, S) or (N, heads, L, S)."""
        if isinstance(self.mixer, Attention):
            found = _softmax_weights(self.mixer, x, context, keep, pairs)
        else:
            found = torch.stack([self._row_weights(x, context, keep, pairs, i) for i in range(x.shape[0])])
        if average:
            return found.mean(1)
        if found.shape[1] != self.num_heads:
            groups = f"{found.shape[1]} maps, one per head or channel of its own, not {self.num_heads}"
            _refuse(f"{type(self.mixer).__name__} has {groups}; ask for their mean with average_attn_weights=True")
        return found

    def _row_weights(
        self, x: Tensor, context: Tensor | None, keep: Tensor | None, pairs: Tensor | None, i: int
    ) -> Tensor:
        """Return the weights of row i of the batch, (groups, L, S)."""
        given: Options = {"key_mask": None if keep is None else keep[i : i + 1]}
        given["attn_mask"] = pairs if pairs is None or pairs.ndim == 2 else pairs[i : i + 1]
        found = values_attention(self.mixer, x[i : i + 1], None if context is None else context[i : i + 1], **given)
        if found is None:
            why = f"the output of {type(self.mixer).__name__} is not a sum over values, so it has no attention weights"
            _refuse(f"{why}; call with need_weights=False")
        return found


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether two arguments are one tensor, or identical views of one.

    Traced and compiled programs run on other tensors, so they decide by object identity alone.
    """
    if a is b or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return a is b
    if a.is_inference() and b.is_inference():
        same = a.data_ptr() == b.data_ptr()
    else:  # the same memory is not enough: a gradient could reach one and not the other
        same = a._is_view() and b._is_view() and a._base is b._base and a.requires_grad == b.requires_grad
    return same and (a.dtype, a.shape, a.stride(), a.storage_offset()) == (
        b.dtype,
        b.shape,
        b.stride(),
        b.storage_offset(),
    )


def _refuse(why: str) -> NoReturn:
    raise MixerError(f"MultiheadMixer: {why}.")


def _require(holds: Tensor, why: str) -> None:
    """Refuse if a condition on values fails. Compiled code asserts it at run time; exported code skips it."""
    if torch.compiler.is_exporting() or holds.is_meta:
        return
    if torch.compiler.is_compiling():
        torch._assert_async(holds, f"MultiheadMixer: {why}.")
    elif not bool(holds):
        _refuse(why)


def _complete(mixer: str | Spec, num_heads: int, bias: bool) -> Spec:
    """Fill in ``nn.MultiheadAttention``'s heads and biases for options of the mixer that the spec leaves open."""
    spec = {"name": mixer} if isinstance(mixer, str) else mixer
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        _refuse(f'mixer must be a name or a spec like {{"name": "aft_local", "window": 32}}, got {mixer!r}')
    for taken, ours in (("causal", "causal"), ("dim", "embed_dim")):
        if taken in spec:
            _refuse(f"takes {ours} as an argument of its own; leave {taken!r} out of the spec {spec!r}")
    known = mixer_options(cls) if (cls := load_mixer(spec["name"])) is not None else {}
    wanted: Options = {"heads": num_heads} if bias else {"heads": num_heads, "qkv_bias": False, "out_bias": False}
    return {name: value for name, value in wanted.items() if name in known} | spec


def _as_allowed_pairs(mask: Tensor, name: str) -> Tensor:
    """Return a mask of torch as booleans, True = may be attended."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        _refuse(f"expects {name} of bool, True = not attended, or of floats 0 and -inf, got {mask.dtype}")
    allowed = mask == 0
    only = f"{name} holds numbers other than 0 and -inf; a bias on the logits is not a mask, give a bool one"
    _require((allowed | (mask == float("-inf"))).all(), only)
    return allowed


def _who_weighs_pairs() -> str:
    return f"these take any attn_mask: {', '.join(name for name, cls in MIXERS.items() if cls.facts.attn_mask)}"


def _softmax_weights(
    mixer: Attention, x: Tensor, context: Tensor | None, keep: Tensor | None, pairs: Tensor | None
) -> Tensor:
    """Compute softmax_s(scale q_t . k_s), (N, heads, L, S); rows of zeros where nothing may be attended."""
    (q, k, _), options = mixer.functional_args(Inputs(x, context, key_mask=keep, attn_mask=pairs))
    q, k = (by_head(p, n) for p, n in ((q, mixer.heads), (k, mixer.kv_heads)))
    logits = (q * (q.shape[-1] ** -0.5 if mixer.scale is None else mixer.scale)) @ k.repeat_interleave(
        mixer.heads // mixer.kv_heads, 1
    ).mT
    allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device)
    allowed = allowed.tril() if mixer.causal else allowed
    if pairs is not None:
        allowed = allowed & (pairs if pairs.ndim == 2 else pairs[:, None])
    if keep is not None:
        allowed = allowed & keep[:, None, None]
    lowest = torch.finfo(logits.dtype).min
    return logits.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0.0)
