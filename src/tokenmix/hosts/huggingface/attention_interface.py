"""Try mixers without parameters in any transformers model, through its registry of attention functions.

``AutoModelForCausalLM.from_pretrained(folder, attn_implementation="tokenmix_hydra")`` or
``model.set_attn_implementation("tokenmix_aft_simple")``. Keys are cached as for attention, and the choice is not saved.
To keep it, and for a state of constant size, replace the modules.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...errors import MixerError
from ...mixers import MIXERS
from ...types import Options

PLAIN = (causal_mask_function, bidirectional_mask_function)


def register_attention(mixer: str, name: str | None = None, **options: object) -> str:
    """Register a mixer without parameters, and its padding mask, as an ``attn_implementation`` of transformers.

    Importing ``tokenmix.hosts.huggingface`` registers each of these mixers without options. The model's scaling and
    attention dropout do not apply, because these forms compute no softmax over pairs.

    Args:
        mixer: one whose class sets ``only_qkv``: "hydra", "aft_simple", "multihead_linear", "linear", or your own.
        name: to register it under; default "tokenmix_" and the mixer's name.
        options: of its functional form: ``register_attention("linear", "linear_relu", feature="relu")``.

    Returns:
        The registered name.
    """
    known = candidates()
    if mixer not in known:
        near = difflib.get_close_matches(mixer, known, n=1) or known
        wanted = f"is not a mixer without parameters that takes q, k and v; choose {' or '.join(near)}"
        raise MixerError(f"register_attention: {mixer!r} {wanted}.")
    name = name or f"tokenmix_{mixer}"
    form, forms = MIXERS[mixer].facts.functional_form(), MIXERS[mixer].facts.causal_forms()
    AttentionInterface.register(name, _attend(name, form, options, both_ways=False in forms))
    AttentionMaskInterface.register(name, padding_mask)
    return name


def candidates() -> list[str]:
    """List the mixers without parameters that take q, k and v alone."""
    return [name for name, cls in MIXERS.items() if cls.facts.only_qkv]


def _attend(name: str, form: Any, options: Options, *, both_ways: bool) -> Callable[..., tuple[Tensor, None]]:
    """Make the function that transformers calls as attention: q (B, H, T, e), k and v (B, G, S, e) -> (B, T, H, e).

    Args:
        both_ways: whether the form has a bidirectional form, which one query after cached keys is computed in.
    """
    by_head = "heads" in inspect.signature(form).parameters

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        extra = [n for n in ("position_bias", "softcap", "s_aux") if kwargs.get(n) is not None]
        if extra or (attention_mask is not None and attention_mask.ndim != 2):
            what = extra[0] if extra else "a mask of pairs"
            raise MixerError(f"{name}: weighs no pairs of tokens and cannot honour {what}, which this model uses.")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        heads, T, S = query.shape[1], query.shape[2], key.shape[2]
        k, v = (_merge_heads(a.repeat_interleave(heads // a.shape[1], 1)) for a in (key, value))
        q = _merge_heads(query)
        if not (causal or both_ways):
            raise MixerError(f"{name}: has only a causal form, and attention here sees both sides.")
        if (
            causal and (T > 1 or not both_ways) and T < S
        ):  # a chunk after cached keys: its queries belong to the last T of S tokens
            q = torch.cat([q.new_zeros(q.shape[0], S - T, q.shape[2]), q], 1)
        y = form(
            q,
            k,
            v,
            causal=causal and q.shape[1] == S,
            key_mask=attention_mask,
            **({"heads": heads} if by_head else {}),
            **options,
        )
        return y[:, -T:].unflatten(-1, (heads, -1)).contiguous(), None

    return attend


def _merge_heads(x: Tensor) -> Tensor:
    """Reshape (B, H, T, e) -> (B, T, H e)."""
    return x.transpose(1, 2).flatten(2).contiguous()


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., bool] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: object,
) -> Tensor | None:
    """Return the mask that our functions take instead of a mask of pairs: (B, S) booleans, or None without padding.

    Raises:
        MixerError: if the model asks for more than causal order and padding, as sliding windows and packed rows do,
            and for static caches.
    """
    if mask_function not in PLAIN:
        more = "this model's mask holds more than causal order and padding (a window, packed rows)"
        raise MixerError(f"tokenmix's attention functions: {more}; they weigh no pairs.")
    if (
        isinstance(q_offset, Tensor)
        or kv_offset
        or (attention_mask is not None and attention_mask.shape[1] < kv_length)
    ):
        grows = "need a cache that grows, as generate() uses by default"
        raise MixerError(f"tokenmix's attention functions: {grows}; not a static or a sliding one.")
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:].bool()
    return mask if torch.compiler.is_compiling() or not bool(mask.all()) else None


for _mixer in candidates():
    register_attention(_mixer)
