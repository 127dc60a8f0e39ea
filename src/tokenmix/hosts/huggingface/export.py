"""Convert models of ours to models of transformers with the same weights and logits."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import MIXERS, mixer_options
from ...models import LM, Encoder, EncoderConfig, LMConfig, Seq2Seq, Seq2SeqConfig, ViT, ViTConfig
from ...models.blocks import evaluation_mode
from ...models.layers import hidden_width
from ...types import Options, Spec
from .configuration import TokenMixConfig
from .heads import TokenMixForMaskedLM, TokenMixForSequenceClassification
from .images import TokenMixForImageClassification
from .modeling import TokenMixForCausalLM, TokenMixPreTrainedModel
from .seq2seq import TokenMixForSeq2SeqLM

NAMES = (
    ("embed.", "model.embed_tokens."),
    ("positions.", "model.positions."),
    ("blocks.", "model.layers."),
    ("norm.", "model.norm."),
    ("head.", "lm_head."),
    ("classifier.", "score."),
)
PAIR_NAMES = (
    ("encoder.blocks.", "encoder.layers."),
    ("encoder.", "encoder."),
    ("positions.", "decoder.positions."),
    ("blocks.", "decoder.layers."),
    ("norm.", "decoder.norm."),
    ("head.", "lm_head."),
)
"""The names of an encoder-decoder's weights, but for the embedding, which transformers holds twice."""
TextConfig = LMConfig | EncoderConfig | Seq2SeqConfig
SAME_LOGITS = 1e-6
"""The most by which the logits of a converted model may differ, relative to the largest."""


def to_transformers(model: nn.Module) -> Any:
    """Convert a model of ours to one of transformers with the same weights and logits, in eval mode.

    An ``LM`` becomes a TokenMixForCausalLM, a ``Seq2Seq`` a TokenMixForSeq2SeqLM, an ``Encoder`` a TokenMixForMaskedLM
    or, with classes, a TokenMixForSequenceClassification, and a ``ViT`` a TokenMixForImageClassification.
    """
    if isinstance(model, LM):
        new: TokenMixPreTrainedModel = TokenMixForCausalLM(lm_config(model.config))
        state = {_their_name(name): tensor for name, tensor in model.state_dict().items()}
        state.setdefault("lm_head.weight", model.embed.weight.detach())
    elif isinstance(model, Encoder):
        cls = TokenMixForSequenceClassification if model.config.classes else TokenMixForMaskedLM
        new = cls(encoder_config(model.config))
        state = {_their_name(name): tensor for name, tensor in model.state_dict().items()}
        if not model.config.classes:
            state.setdefault("lm_head.weight", model.embed.weight.detach())
    elif isinstance(model, Seq2Seq):
        new = TokenMixForSeq2SeqLM(seq2seq_config(model.config))
        state = _pair_weights(model)
    elif isinstance(model, ViT):
        if not model.config.classes:
            headless = "this ViT has no head, classes=0"
            raise MixerError(f"export: {headless}; a model of features has no exported counterpart.")
        new = TokenMixForImageClassification(vit_config(model.config))
        state = {f"vit.{name}": tensor for name, tensor in model.state_dict().items()}
    else:
        able = "a language model (kind 'lm'), an 'encoder', an encoder-decoder ('seq2seq') or a 'vit' has"
        raise MixerError(f"export: {type(model).__name__} has no counterpart in transformers; {able}.")
    new.load_state_dict(state)
    new.eval()
    check_equal("export", model, new, sample_for(model))
    return new


@torch.no_grad()
def check_equal(who: str, ours: nn.Module, theirs: nn.Module, sample: tuple[Tensor, ...]) -> None:
    """Raise an error, in the name of ``who``, if the logits of a converted model differ from the original's."""
    with evaluation_mode(ours), evaluation_mode(theirs):
        wanted = ours(*sample)
        if isinstance(ours, Seq2Seq):
            got = theirs(sample[0], decoder_input_ids=sample[1], use_cache=False).logits
        else:
            got = (theirs(*sample, use_cache=False) if isinstance(ours, LM) else theirs(*sample)).logits
    off = float((wanted - got).abs().max()) / max(float(wanted.abs().max()), 1.0)
    if not off <= SAME_LOGITS:
        apart = f"the new model's logits differ from the old one's by {off:.1e}"
        raise MixerError(f"{who}: {apart}; nothing was written.")


def sample_for(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the arguments of one forward pass of a model of ours, on its device and in its dtype."""
    weight = next(model.parameters())
    if isinstance(model, ViT):
        shape = 1, model.config.channels, *model.config.image_size
        return (
            torch.linspace(-1, 1, prod(shape), dtype=torch.float32, device=weight.device)
            .to(weight.dtype)
            .reshape(shape),
        )
    tokens = tokens_for(model).to(weight.device)
    return (tokens, tokens) if isinstance(model, Seq2Seq) else (tokens,)


def tokens_for(model: Any) -> Tensor:
    """Return a few tokens (1, T) that a model can read."""
    return torch.arange(min(8, model.max_len or 8), device="cpu")[None] % model.vocab


def _pair_weights(model: Seq2Seq) -> dict[str, Tensor]:
    """Return an encoder-decoder's weights under transformers' names; the scale of the embedding becomes part of it."""
    config, state = model.config, model.state_dict()
    table = state.pop("embed.weight")
    scaled = table if config.embed_scale == 1 else table * config.embed_scale
    found = {"encoder.embed_tokens.weight": scaled, "decoder.embed_tokens.weight": scaled, "lm_head.weight": table}
    for name, tensor in state.items():
        ours, theirs = next(pair for pair in PAIR_NAMES if name.startswith(pair[0]))
        found[theirs + name[len(ours) :]] = tensor
    return found


def encoder_config(config: EncoderConfig) -> TokenMixConfig:
    """Return the transformers config of the same text encoder."""
    labels: Options = {"num_labels": config.classes} if config.classes else {}
    return TokenMixConfig(
        **_text(config),
        is_causal=False,
        classifier_pooling="cls" if config.pool == "first" else "mean",
        tie_word_embeddings=config.tied and not config.classes,
        **labels,
    )


def seq2seq_config(config: Seq2SeqConfig) -> TokenMixConfig:
    """Return the transformers config of the same encoder-decoder.

    A head that shares an embedding with a scale is a copy there, since transformers has no such scale.
    """
    specs: Options = {
        "encoder_mixers": _fill_heads(config.encoder_mixers or config.mixers),
        "cross_mixers": _fill_heads(config.cross_mixers),
    }
    return TokenMixConfig(
        **_text(config),
        **specs,
        encoder_layers=len(config.encoder_specs()),
        tie_word_embeddings=config.tied and config.embed_scale == 1,
        decoder_start_token_id=config.start,
        bos_token_id=config.start,
        eos_token_id=config.end,
    )


def lm_config(config: LMConfig) -> TokenMixConfig:
    """Return the transformers config of the same language model."""
    return TokenMixConfig(**_text(config), is_causal=True, tie_word_embeddings=config.tied)


def _text(config: TextConfig) -> Options:
    """Return the fields that models of text have in common."""
    looped = getattr(config, "loop", None) is not None
    if looped or isinstance(config.positions, dict):
        what = "loop" if looped else f"positions={config.positions!r}"
        raise MixerError(f"export: models for transformers have no {what}; keep the model as tokenmix's own.")
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        **_block(config),
        "num_hidden_layers": len(config.specs()),
        **_mixer_specs(config),
        "norm": config.norm,
        "final_logit_softcapping": config.logit_cap,
        "positions": config.positions,
        "max_position_embeddings": config.max_len,
        "initializer_range": config.init_std,
        "hidden_dropout_prob": config.dropout,
    }


def vit_config(config: ViTConfig) -> TokenMixConfig:
    """Return the transformers config of the same Vision Transformer."""
    labels: Options = {"num_labels": config.classes}  # transformers stores it as names of labels
    return TokenMixConfig(
        hidden_size=config.dim,
        **_block(config),
        num_hidden_layers=config.layers,
        **_mixer_specs(config),
        layer_norm_eps=config.norm_eps,
        positions=config.positions,
        is_causal=False,
        initializer_range=config.init_std,
        hidden_dropout_prob=config.dropout,
        drop_path_rate=config.drop_path,
        classifier_pooling="cls" if config.pool == "class" else "mean",
        image_size=list(config.image_size),
        patch_size=config.patch,
        num_channels=config.channels,
        num_register_tokens=config.registers,
        stem=config.stem,
        **labels,
    )


def _block(config: TextConfig | ViTConfig) -> Options:
    """Return the fields of norms and MLPs."""
    return {
        "norm_type": config.norm_type,
        "intermediate_size": hidden_width(config.dim, config.mlp_ratio, config.mlp),
        "hidden_act": "silu" if config.mlp == "swiglu" else config.mlp,
        "gated_mlp": config.mlp == "swiglu",
        "mlp_bias": getattr(config, "mlp_bias", True),
    }


def _mixer_specs(config: TextConfig | ViTConfig) -> Options:
    """Return the mixers, each with its number of heads filled in, and the heads of the first."""
    specs = _fill_heads(config.mixers)
    heads = next((spec["heads"] for spec in specs if isinstance(spec.get("heads"), int)), 1)
    return {"mixers": specs, "num_attention_heads": heads}


def _fill_heads(mixers: tuple[Spec, ...]) -> list[Spec]:
    """Return mixer specs with the number of heads that they have by default."""
    specs = []
    for spec in mixers:
        default = mixer_options(MIXERS[spec["name"]]).get("heads")
        specs.append(({"heads": default} if default is not None else {}) | spec)
    return specs


def _their_name(name: str) -> str:
    ours, theirs = next(pair for pair in NAMES if name.startswith(pair[0]))
    return theirs + name[len(ours) :]
