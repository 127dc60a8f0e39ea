"""Export a run as a Hugging Face folder.

It holds weights, config, tokenizer or image processor, generation defaults and a model card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ...errors import MixerError
from ...mixers import MIXERS, mixer_options
from ...models import LM, LMConfig, ViT, ViTConfig
from ...models.layers import hidden_width
from ...system.files import check_out, new_folder, write_json
from ...train.rundir import RunDir
from ...train.runs import load_run, pick_step
from .card import Facts, model_card
from .configuration import TokenMixConfig
from .images import TokenMixForImageClassification
from .modeling import TokenMixForCausalLM
from .processors import CROPPED_FROM, byte_tokenizer, image_processor

NAMES = (
    ("embed.", "model.embed_tokens."),
    ("positions.", "model.positions."),
    ("blocks.", "model.layers."),
    ("norm.", "model.norm."),
    ("head.", "lm_head."),
)


def export_run(run: Path | str, out: Path | str, *, step: int | str = "last") -> Path:
    """Write a run's model to the new folder ``out``, completely or not at all.

    ``AutoModelForCausalLM`` or ``AutoModelForImageClassification`` loads it.

    Args:
        run: the directory of a language model or of a Vision Transformer.
        step: of its checkpoints: a number, "last" or "best".

    Raises:
        MixerError: for another kind of model, and if the new model's logits differ from the run's.
    """
    check_out(out, "folder")
    model, config = load_run(run, step=step)
    opened = RunDir.open(run)
    new = to_transformers(model)
    files: dict[str, Any] = {}
    own: Any = model.config
    if isinstance(new, TokenMixForImageClassification) and min(own.image_size) < CROPPED_FROM:
        files["preprocessor_config.json"] = image_processor(own, config.data)  # type: ignore[arg-type]  # of images
    as_bytes = config.data.kind == "text" and own.vocab == 256
    facts = Facts(opened, config, pick_step(opened, step), new, byte_tokens=as_bytes)
    _write(Path(out), new, facts, files)
    return Path(out)


def to_transformers(model: nn.Module) -> Any:
    """Convert our ``LM`` or ``ViT`` to a transformers model with the same weights and logits, in eval mode."""
    if isinstance(model, LM):
        new: Any = TokenMixForCausalLM(lm_config(model.config))
        state = {_renamed(name): tensor for name, tensor in model.state_dict().items()}
        state.setdefault("lm_head.weight", model.embed.weight.detach())
        sample = torch.arange(min(8, model.max_len or 8))[None] % model.vocab
    elif isinstance(model, ViT):
        if not model.config.classes:
            headless = "this ViT has no head, classes=0"
            raise MixerError(f"export: {headless}; a model of features has no exported counterpart.")
        new = TokenMixForImageClassification(vit_config(model.config))
        state = {f"vit.{name}": tensor for name, tensor in model.state_dict().items()}
        sample = torch.linspace(-1, 1, model.config.channels * model.config.image_size[0] * model.config.image_size[1])
        sample = sample.reshape(1, model.config.channels, *model.config.image_size)
    else:
        able = "a language model (kind 'lm') or a ViT ('vit') has"
        raise MixerError(f"export: a {type(model).__name__} has no counterpart in transformers; {able}.")
    new.load_state_dict(state)
    new.eval()
    _check_equal(model, new, sample)
    return new


@torch.no_grad()
def _check_equal(model: nn.Module, new: Any, sample: Tensor) -> None:
    was_training = model.training
    model.eval()
    wanted, got = model(sample), (new(sample, use_cache=False) if isinstance(model, LM) else new(sample)).logits
    model.train(was_training)
    off = float((wanted - got).abs().max()) / max(float(wanted.abs().max()), 1.0)
    if not off <= 1e-6:
        apart = f"the new model's logits differ from the old one's by {off:.1e}"
        raise MixerError(f"export: {apart}; nothing was written.")


def lm_config(config: LMConfig) -> TokenMixConfig:
    """Return the transformers config of the same language model."""
    if config.loop is not None or isinstance(config.positions, dict):
        what = "loop" if config.loop is not None else f"positions={config.positions!r}"
        raise MixerError(f"export: models for transformers have no {what}; use tokenmix's own LM.")
    return TokenMixConfig(
        vocab_size=config.vocab,
        hidden_size=config.dim,
        **_block(config),
        num_hidden_layers=len(config.specs()),
        **_mixing(config),
        norm=config.norm,
        final_logit_softcapping=config.logit_cap,
        positions=config.positions,
        is_causal=True,
        max_position_embeddings=config.max_len,
        initializer_range=config.init_std,
        hidden_dropout_prob=config.dropout,
        tie_word_embeddings=config.tied,
    )


def vit_config(config: ViTConfig) -> TokenMixConfig:
    """Return the transformers config of the same Vision Transformer."""
    labels: dict[str, Any] = {"num_labels": config.classes}  # transformers stores it as names of labels
    return TokenMixConfig(
        hidden_size=config.dim,
        **_block(config),
        num_hidden_layers=config.layers,
        **_mixing(config),
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
        **labels,
    )


def _block(config: Any) -> dict[str, Any]:
    """Return the fields of norms and MLPs."""
    return {
        "norm_type": config.norm_type,
        "intermediate_size": hidden_width(config.dim, config.mlp_ratio, config.mlp),
        "hidden_act": "silu" if config.mlp == "swiglu" else config.mlp,
        "gated_mlp": config.mlp == "swiglu",
    }


def _mixing(config: Any) -> dict[str, Any]:
    """Return the mixers, each with its number of heads filled in, and the heads of the first."""
    specs = []
    for spec in config.mixers:
        default = mixer_options(MIXERS[spec["name"]]).get("heads")
        specs.append(({"heads": default} if default is not None else {}) | spec)
    heads = next((spec["heads"] for spec in specs if isinstance(spec.get("heads"), int)), 1)
    return {"mixers": specs, "num_attention_heads": heads}


def _renamed(name: str) -> str:
    ours, theirs = next(pair for pair in NAMES if name.startswith(pair[0]))
    return theirs + name[len(ours) :]


def _write(out: Path, model: Any, facts: Facts, files: dict[str, Any]) -> None:
    """Write everything into the new folder."""
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with new_folder(out, "folder") as folder:
            model.save_pretrained(folder)
            if facts.byte_tokens:
                byte_tokenizer(facts.model.config.max_position_embeddings).save_pretrained(folder)
            for name, content in files.items():
                write_json(folder / name, content)
            (folder / "README.md").write_text(model_card(facts, out.name))
    finally:
        if bar:
            logging.enable_progress_bar()
