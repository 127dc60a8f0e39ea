"""Take a model back from transformers: our own model with the same weights, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models import EncoderConfig, LMConfig, Seq2SeqConfig, build_model
from ...models.layers import hidden_width
from ...types import Options, Spec
from .configuration import TokenMixConfig
from .export import NAMES, PAIR_NAMES, check_equal, sample_for
from .heads import TokenMixForMaskedLM, TokenMixForSequenceClassification
from .images import TokenMixForImageClassification
from .modeling import TokenMixForCausalLM, TokenMixPreTrainedModel
from .seq2seq import TokenMixForSeq2SeqLM

CLASSES: tuple[type[TokenMixPreTrainedModel], ...] = (
    TokenMixForCausalLM,
    TokenMixForMaskedLM,
    TokenMixForSequenceClassification,
    TokenMixForSeq2SeqLM,
    TokenMixForImageClassification,
)
"""The classes that have a counterpart here."""
MLPS = {(False, "gelu"): "gelu", (False, "relu2"): "relu2", (True, "silu"): "swiglu", (True, "swish"): "swiglu"}
NORM_EPS = 1e-5
RATIO = 4.0


def from_transformers(model: nn.Module | Path | str) -> nn.Module:
    """Convert a model of transformers that is one of ours to our own, with the same weights and logits, in eval mode.

    A TokenMixForCausalLM becomes an ``LM``, a TokenMixForSeq2SeqLM a ``Seq2Seq``, a TokenMixForMaskedLM and a
    TokenMixForSequenceClassification an ``Encoder``, and a TokenMixForImageClassification a ``ViT``. Dtype and device
    stay. Dropout before a classifier (``classifier_dropout``) and stochastic depth of models of text, which act in
    training only, are left behind. ``to_transformers`` is the way there.

    Args:
        model: the model, or a folder that ``save_pretrained``, ``export_run`` or a Trainer has written.

    Raises:
        MixerError: for a model that is not ours, and for one that holds what ours has not.
    """
    theirs = _load_folder(Path(model)) if isinstance(model, (str, Path)) else model
    if not isinstance(theirs, CLASSES):
        raise MixerError(
            f"from_transformers: a {type(theirs).__name__} has no counterpart here; {_supported_classes()}."
        )
    state = theirs.state_dict()
    if isinstance(theirs, TokenMixForImageClassification):
        config: Any = theirs.config.vit()
        weights = {name.removeprefix("vit."): tensor for name, tensor in state.items()}
    elif isinstance(theirs, TokenMixForSeq2SeqLM):
        config = _pair_config(theirs)
        weights = _pair_weights(state, config)
    else:
        config = _text_config(theirs)
        weights = _text_weights(state, config)
    with torch.random.fork_rng():
        ours = build_model(config)
    _fill(ours, weights, type(theirs).__name__)
    check_equal("from_transformers", ours, theirs, sample_for(ours))
    return ours.eval()


def _supported_classes() -> str:
    return f"{', '.join(each.__name__ for each in CLASSES[:-1])} and {CLASSES[-1].__name__} have"


def _load_folder(folder: Path) -> TokenMixPreTrainedModel:
    """Load a folder as the class that its config names."""
    if not (folder / "config.json").is_file():
        hub = "load a model of the hub with transformers and give the model"
        raise MixerError(f"from_transformers: {folder} is no folder with a config.json; {hub}.")
    named = json.loads((folder / "config.json").read_text()).get("architectures") or ["model of no named class"]
    TokenMixConfig.get_config_dict(folder)  # refuses other families
    cls = next((each for each in CLASSES if each.__name__ == named[0]), None)
    if cls is None:
        raise MixerError(
            f"from_transformers: {folder} holds a {named[0]}, which has no counterpart here; {_supported_classes()}."
        )
    return cls.from_pretrained(folder)


def _text_config(theirs: Any) -> LMConfig | EncoderConfig:
    """Return the config of our language model or encoder."""
    config, who = theirs.config, type(theirs).__name__
    given = _common_fields(config, who) | {"mixers": _specs(config), "layers": config.num_hidden_layers}
    head = getattr(theirs, "lm_head", None)
    given["tied"] = head is None or head.weight is theirs.model.embed_tokens.weight
    if isinstance(theirs, TokenMixForCausalLM):
        return LMConfig(**given, logit_cap=config.final_logit_softcapping)
    if config.is_causal:
        raise MixerError(f"from_transformers: this {who} is causal, is_causal=True; an Encoder sees both sides.")
    if isinstance(theirs, TokenMixForMaskedLM):
        return EncoderConfig(**given)
    pools = {None: "mean", "mean": "mean", "cls": "first"}
    if config.classifier_pooling not in pools:
        asked = f"classifier_pooling={config.classifier_pooling!r}"
        raise MixerError(f"from_transformers: this {who} has {asked}; an Encoder pools 'mean' or 'cls'.")
    if theirs.num_labels < 2:
        raise MixerError(
            f"from_transformers: this {who} has num_labels=1, a number; an Encoder has at least 2 classes."
        )
    return EncoderConfig(**given, classes=theirs.num_labels, pool=pools[config.classifier_pooling])


def _pair_config(theirs: TokenMixForSeq2SeqLM) -> Seq2SeqConfig:
    """Return the config of our encoder-decoder."""
    config, who = theirs.config, type(theirs).__name__
    ids = (config.decoder_start_token_id, config.bos_token_id, config.pad_token_id)
    start, end = next((token for token in ids if token is not None), None), config.eos_token_id
    if not isinstance(start, int) or not isinstance(end, int):
        found = f"decoder_start_token_id={start} and eos_token_id={end}"
        raise MixerError(f"from_transformers: this {who} has {found}; a Seq2Seq needs one token for each: set them.")
    encoder, decoder = theirs.encoder.config, theirs.decoder.config
    return Seq2SeqConfig(
        **_common_fields(config, who),
        mixers=_specs(decoder),
        layers=decoder.num_hidden_layers,
        encoder_mixers=_specs(encoder),
        encoder_layers=encoder.num_hidden_layers,
        cross_mixers=_specs(decoder, "cross_mixers"),
        tied=theirs.lm_head.weight is theirs.decoder.embed_tokens.weight,
        start=start,
        end=end,
    )


def _common_fields(config: TokenMixConfig, who: str) -> Options:
    """Return the fields that models of text have in common."""
    mlp = MLPS.get((config.gated_mlp, config.hidden_act))
    if mlp is None:
        got = f"hidden_act={config.hidden_act!r} with gated_mlp={config.gated_mlp}"
        only = "MLPs here are 'gelu', 'relu2', or gated 'silu'"
        raise MixerError(f"from_transformers: this {who} has {got}; {only}.")
    if config.layer_norm_eps != NORM_EPS:
        got = f"layer_norm_eps={config.layer_norm_eps}"
        raise MixerError(f"from_transformers: this {who} has {got}; models of text here have {NORM_EPS}.")
    return {
        "dim": config.hidden_size,
        "max_len": config.max_position_embeddings,
        "vocab": config.vocab_size,
        "mlp_ratio": _ratio(config, mlp, who),
        "mlp": mlp,
        "mlp_bias": config.mlp_bias,
        "norm": config.norm,
        "norm_type": config.norm_type,
        "positions": config.positions,
        "dropout": config.hidden_dropout_prob,
        "init_std": config.initializer_range,
    }


def _ratio(config: TokenMixConfig, mlp: str, who: str) -> float:
    """Return the ratio that gives an MLP of ours the hidden width of theirs."""
    dim, width = config.hidden_size, config.intermediate_size or int(RATIO * config.hidden_size)
    exact = width / dim * (1.5 if mlp == "swiglu" else 1.0)
    for ratio in (RATIO, exact, exact + 0.5 / dim, exact - 0.5 / dim):  # the half guards against rounding
        if hidden_width(dim, ratio, mlp) == width:
            return ratio
    got = f"a gated MLP of intermediate_size={width}"
    raise MixerError(f"from_transformers: this {who} has {got}; the width of ours is a multiple of 8.")


def _specs(config: TokenMixConfig, field: str = "mixers") -> tuple[Spec, ...]:
    """Return the mixer specs, completed by fields of the config."""
    listed: list[Spec] = getattr(config, field)
    return tuple(config.specs(field)[: len(listed)])


def _text_weights(state: dict[str, Tensor], config: LMConfig | EncoderConfig) -> dict[str, Tensor]:
    """Return the weights of a language model or an encoder under our names."""
    found = {_our_name(name, NAMES): tensor for name, tensor in state.items()}
    if config.tied:
        found.pop("head.weight", None)
    return found


def _pair_weights(state: dict[str, Tensor], config: Seq2SeqConfig) -> dict[str, Tensor]:
    """Return the weights of an encoder-decoder under our names; its two embeddings must be one."""
    state = dict(state)
    source, target = state.pop("encoder.embed_tokens.weight"), state.pop("decoder.embed_tokens.weight")
    if not torch.equal(source, target):
        apart = "encoder and decoder embed tokens differently; a Seq2Seq has one embedding for both"
        raise MixerError(f"from_transformers: in this TokenMixForSeq2SeqLM {apart}.")
    found = {_our_name(name, PAIR_NAMES): tensor for name, tensor in state.items()} | {"embed.weight": target}
    if config.tied:
        found.pop("head.weight")
    return found


def _our_name(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in names:
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name


def _fill(ours: nn.Module, weights: dict[str, Tensor], who: str) -> None:
    """Load these weights into our model, in their dtype and on their device; the error names a mismatch."""
    own = ours.state_dict()
    more, less = sorted(weights.keys() - own.keys()), sorted(own.keys() - weights.keys())
    if more or less:
        what = f"holds {more[0]}, which a {type(ours).__name__} has not" if more else f"lacks {less[0]}"
        hint = "merge adapters (merge_and_unload) and undo other changes of its modules"
        raise MixerError(f"from_transformers: this {who} {what}; {hint}.")
    odd = next((name for name, tensor in weights.items() if tensor.shape != own[name].shape), None)
    if odd is not None:
        shapes = f"{tuple(weights[odd].shape)}, where its config says {tuple(own[odd].shape)}"
        raise MixerError(f"from_transformers: {odd} of this {who} has shape {shapes}.")
    dtypes = sorted({str(tensor.dtype) for tensor in weights.values() if tensor.is_floating_point()})
    if len(dtypes) > 1:
        raise MixerError(
            f"from_transformers: this {who} holds weights of {' and '.join(dtypes)}; cast it to one dtype."
        )
    like = next(tensor for tensor in weights.values() if tensor.is_floating_point())
    ours.to(like.device, like.dtype)
    ours.load_state_dict(weights)
