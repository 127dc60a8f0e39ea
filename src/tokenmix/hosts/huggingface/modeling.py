"""Build models of any mixers for transformers: the trunk, and the causal language model for ``generate()``.

transformers reads class annotations at run time, so this file has no ``from __future__ import annotations``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from ...errors import MixerError
from ...models import ViT
from ...models.layers import build_norm, cap_logits
from ...positions import LearnedPositions, SinusoidalPositions
from ...system.properties import named_errors
from ...types import Options
from ..cache_names import returned_cache
from .cache import TokenMixStateLayer, input_cache, name_cache_output, state_layers
from .configuration import TokenMixConfig
from .generation import FiniteGenerationMixin
from .initialization import refuse_missing_weights, refuse_options, reinitialize
from .layers import TokenMixLayer
from .masks import ChunkPositions, chunk_mask, place_tokens


class TokenMixPreTrainedModel(PreTrainedModel):
    """Base of all our models: initialisation, and the attributes that transformers expects of a model family."""

    config: TokenMixConfig
    config_class = TokenMixConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TokenMixLayer", "TokenMixImageLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": TokenMixLayer}

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: object, *args: object, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load as transformers does, but refuse a folder that lacks weights, which transformers would draw at random.

        Args:
            ignore_mismatched_sizes: True: initialise each parameter that the folder lacks or holds in another shape,
                and print transformers' report.

        Raises:
            MixerError: for a folder that lacks any weight except those of a new head.
        """
        refuse_options(cls.__name__, kwargs)
        load: Any = super().from_pretrained
        model, info = load(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        if not kwargs.get("ignore_mismatched_sizes"):
            refuse_missing_weights(model, info["missing_keys"], pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Register a class derived from ours as transformers does, which copies the class's file into saved folders."""
        if cls.__module__.startswith(f"{__package__}."):
            known = "the Auto classes know it once tokenmix.hosts.huggingface is imported"
            raise MixerError(f"{cls.__name__}: {known}; its code does not fit in a folder.")
        super().register_for_auto_class(auto_class)

    def _initialize_weights(self, module: nn.Module, *args: object, **kwargs: object) -> None:
        # called as for transformers' own families: for others it skips modules without parameters of their own
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, TokenMixLayer):
            reinitialize(module, lambda: module.reset_parameters(std, std / (2 * self.config.num_hidden_layers) ** 0.5))
        elif isinstance(module, (ViT, LearnedPositions)):
            reinitialize(module, module.reset_parameters)
        elif not getattr(module, "initialized_by_owner", False):
            super()._init_weights(module)


@named_errors
class TokenMixModel(TokenMixPreTrainedModel):
    """Embedding, positions, layers and last norm: token ids to features.

    Causal if ``config.is_causal``, else every token sees both sides. With ``cross_mixers`` in the config it is a
    decoder over ``encoder_hidden_states``.

    Args:
        config: a ``TokenMixConfig``.
    """

    def __init__(self, config: TokenMixConfig):
        if config.is_encoder_decoder:
            both = "the config is of an encoder and a decoder, is_encoder_decoder=True"
            raise MixerError(f"TokenMixModel: {both}; build TokenMixForSeq2SeqLM.")
        super().__init__(config.but(is_causal=bool(config.is_causal)))
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        length, std = config.max_position_embeddings, config.initializer_range
        self.positions: LearnedPositions | SinusoidalPositions | None = None
        if config.positions == "learned":
            self.positions = LearnedPositions(config.hidden_size, max_len=length, init_std=std)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers: Any = nn.ModuleList(TokenMixLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = (
            build_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
            if config.norm == "pre"
            else nn.Identity()
        )
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Map input_ids (B, L) to last_hidden_state (B, L, D).

        Args:
            attention_mask: (B, tokens in the cache + L), 1 = valid; padding on the left or on the right.
            position_ids: (B, L), rising along each row; default: index minus that of the row's first valid token.
            cache: what an earlier call returned, or ``DynamicCache(config=model.config)``.
            use_cache: return a cache; default ``config.use_cache`` if the model is causal and not in training.
            past_key_values: the name of ``cache`` before transformers 5.24.
        """
        self._refuse_unknown(input_ids, inputs_embeds, kwargs)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(use_cache, input_cache(type(self).__name__, cache, past_key_values))
        kept = self._layer_states(cache)
        chunk = self._chunk_positions(x, attention_mask, position_ids, kept)
        if self.positions is not None:
            x = x + self.positions(chunk.at).to(x.dtype)
        given: Options = {"chunk": chunk}
        x = self.dropout(x)
        context_mask = self._context_mask(encoder_hidden_states, encoder_attention_mask)
        if encoder_hidden_states is not None:
            # otherwise positions are indices
            explicit = kept is not None or chunk.key_mask is not None or chunk.positions is not None
            given["cross_positions"] = chunk.at if explicit else None
        for i, layer in enumerate(self.layers):
            x = layer(
                x, encoder_hidden_states, context_mask, past_key_values=None if kept is None else kept[i], **given
            )
        if kept is not None:
            kept[0][0].advance(chunk.place)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **name_cache_output(cache))

    def _refuse_unknown(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, given: Options) -> None:
        who = type(self).__name__
        if (input_ids is None) == (inputs_embeds is None):
            raise MixerError(f"{who}: needs either input_ids or inputs_embeds.")
        if given.get("output_attentions"):
            raise MixerError(f"{who}: mixers have no attention weights to return; leave out output_attentions.")
        kinds = given.get("token_type_ids")
        if isinstance(kinds, Tensor) and bool(kinds.any()):
            raise MixerError(f"{who}: has no token types; leave out token_type_ids, or give zeros.")

    def _cache(self, asked: bool | None, past: Cache | None) -> Cache | None:
        """Return the cache to fill: the caller's, a new one if one is wanted, or None."""
        config = self.config
        if (asked or past is not None) and not self.streams:
            raise MixerError(f"{type(self).__name__}: {self._why_not_streaming()}; pass use_cache=False.")
        wanted = asked if asked is not None else config.use_cache and self.streams and not self.training
        if self.gradient_checkpointing and self.training:
            return None
        if past is not None or not wanted:
            return past
        own = DynamicCache(config=config)
        return own if config.cross_mixers is None else EncoderDecoderCache(own, DynamicCache(config=config))

    @property
    def streams(self) -> bool:
        """Return whether every layer can continue from a state, and so use a cache."""
        return all(layer.streams for layer in self.layers)

    def _why_not_streaming(self) -> str:
        if not self.config.is_causal:
            return "is not causal and keeps no cache"
        i, layer = next((i, layer) for i, layer in enumerate(self.layers) if not layer.streams)
        lacking = layer.mixer if not layer.mixer.capabilities.streaming else layer.cross
        return f"{type(lacking).__name__} of layer {i} has no streaming form, so there is no cache to use"

    def _layer_states(self, cache: Cache | None) -> list[tuple[TokenMixStateLayer, ...]] | None:
        """Return each layer's state in a cache, with that of its cross mixer."""
        if cache is None:
            return None
        n, who = len(self.layers), type(self).__name__
        if isinstance(cache, EncoderDecoderCache) != (self.config.cross_mixers is not None):
            wanted = "an EncoderDecoderCache of two caches" if self.config.cross_mixers is not None else "one cache"
            made = f"{wanted}, DynamicCache(config=model.config), as cache"
            raise MixerError(f"{who}: expects {made}; got {type(cache).__name__}.")
        if isinstance(cache, EncoderDecoderCache):
            own, other = (state_layers(c, n, who) for c in (cache.self_attention_cache, cache.cross_attention_cache))
            return list(zip(own, other, strict=True))
        return [(layer, layer) for layer in state_layers(cache, n, who)]

    def _chunk_positions(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        kept: list[tuple[TokenMixStateLayer, ...]] | None,
    ) -> ChunkPositions:
        who, start, seen = type(self).__name__, None, 0
        if kept is not None:
            first = kept[0][0]
            start, seen = first.place, first.seen
            if start is not None and start.last.shape[0] != x.shape[0]:
                held = f"the cache holds {start.last.shape[0]} rows, got {x.shape[0]}"
                raise MixerError(f"{who}: {held}; cache.batch_select_indices picks some of them.")
        chunk = place_tokens(x, start, chunk_mask(attention_mask, x, seen, who), position_ids, who)
        limit = self.positions.max_len if self.positions is not None else None
        if (
            limit is not None
            and not torch.compiler.is_compiling()
            and chunk.at.numel()
            and int(chunk.at.max()) >= limit
        ):
            got = f"got a token at position {int(chunk.at.max())}"
            raise MixerError(f"{who}: was built with max_position_embeddings={limit}, {got}; stop before it.")
        return chunk

    def _context_mask(self, context: Tensor | None, mask: Tensor | None) -> Tensor | None:
        if (context is None) != (self.config.cross_mixers is None):
            what = "has no cross_mixers to read encoder_hidden_states with"
            what = "needs encoder_hidden_states, because it has cross_mixers" if context is None else what
            raise MixerError(f"{type(self).__name__}: {what}.")
        return None if context is None else chunk_mask(mask, context, 0, f"{type(self).__name__}, the encoder's")


class TokenMixForCausalLM(TokenMixPreTrainedModel, FiniteGenerationMixin):
    """A causal language model for ``generate()``: greedy, sampling and beams.

    Most mixers have a state of constant size.

    Args:
        config: a ``TokenMixConfig`` whose ``is_causal`` is True or None.

    Raises:
        MixerError: if a mixer has no causal form, or the config says is_causal=False.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TokenMixConfig):
        if config.is_causal is False:
            both = "the config says is_causal=False, a model whose tokens see both sides"
            raise MixerError(f"TokenMixForCausalLM: {both}; it cannot generate text.")
        super().__init__(config.but(is_causal=True))
        self.model = TokenMixModel(self.config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if not self.model.streams:
            # generate() reads the whole text at each step, unless told otherwise
            self.config.use_cache = self.generation_config.use_cache = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Map input_ids (B, L) to logits (B, L, vocab), row t from tokens 0..t; shift ``labels`` and return the loss.

        Args:
            logits_to_keep: compute only the last N logits, or those at these indices; 0: all. Other arguments as in
                ``TokenMixModel``.
        """
        cache = input_cache(type(self).__name__, cache, past_key_values)
        options = {"cache": cache, "inputs_embeds": inputs_embeds, "use_cache": use_cache}
        loss_options = {name: kwargs.pop(name) for name in ("num_items_in_batch", "shift_labels") if name in kwargs}
        out = self.model(input_ids, attention_mask, position_ids, **options, **kwargs)
        logits = cap_logits(
            self.lm_head(select_tokens(out.last_hidden_state, logits_to_keep)), self.config.final_logit_softcapping
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss_options)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states, **name_cache_output(returned_cache(out))
        )


def select_tokens(x: Tensor, keep: int | Tensor) -> Tensor:
    """Select (B, T, D) at the last ``keep`` tokens, 0: all, or at these indices."""
    return x[:, slice(-keep or None, None) if isinstance(keep, int) else keep]
