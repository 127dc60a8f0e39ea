"""Models to start from and to learn from: the weights of a run, or of a directory written by ``tokenmix convert``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models import MAE, Encoder, Pyramid, ResNet, Segmenter, ViT
from ...models.model import load_weights
from ...models.saved import load_model
from .config import RunConfig


def start_from(model: nn.Module, path: Path | str) -> None:
    """Copy the weights of another model of the same shapes into this one.

    An encoder with classes may start from one that predicts tokens, and a ViT from the encoder of a masked autoencoder;
    the classifier then keeps its own weights. The backbone of a segmentation model may start from a classifier, resized
    to its image size; the head keeps its own.
    """
    source, _ = load_model(path)
    if isinstance(model, Segmenter) and isinstance(source, (Pyramid, ResNet, ViT)):
        source.resize(model.config.image_size)
        load_weights(model.backbone, _as_backbone(source.state_dict(), model.backbone), Path(path))
        return
    state = source.state_dict()
    if isinstance(model, ViT) and isinstance(source, MAE):
        state = _of_encoder(model, source.encoder, Path(path))
    elif (
        isinstance(model, Encoder)
        and isinstance(source, Encoder)
        and model.config.classes
        and not source.config.classes
    ):
        state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        state |= {name: tensor for name, tensor in model.state_dict().items() if name.startswith("classifier.")}
    load_weights(model, state, Path(path))


def _of_encoder(model: ViT, encoder: ViT, where: Path) -> dict[str, Tensor]:
    """Return the weights of a pretrained encoder with the model's own head; refuse an encoder of another shape."""
    own, state = model.state_dict(), encoder.state_dict()
    state |= {name: tensor for name, tensor in own.items() if name.startswith("head.")}
    if {name: tensor.shape for name, tensor in own.items()} == {name: tensor.shape for name, tensor in state.items()}:
        return state
    there, here = encoder.config.to_json(), model.config.to_json()
    free = ("classes", "dropout", "drop_path", "init_std", "norm_eps")
    unlike = [name for name in here if name not in free and here[name] != there[name]]
    said = ", ".join(f"model.{name}={there[name]!r} (not {here[name]!r})" for name in unlike)
    raise MixerError(f"{where}: the encoder that was trained there does not fit the model: it has {said}.")


def _as_backbone(state: dict[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """Return a classifier's weights without its head, and without its class token if the backbone has none."""
    wanted = backbone.state_dict()
    found = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    for name in [name for name in found if name.split(".")[-1] == "class_token" and name not in wanted]:
        del found[name]
        table = name.removesuffix("class_token") + "positions"
        if table in found:
            found[table] = found[table][1:]  # the first row is that of the token
    return found


Extra = Callable[[Tensor], tuple[float, Tensor]]


def extra_losses(config: RunConfig, model: nn.Module, device: torch.device) -> dict[str, Extra]:
    """Return the losses beside the task's own, by name; each gives its weight and its value on a batch of inputs."""
    found: dict[str, Extra] = {}
    if config.optim.one_hot:
        from .sparsity import one_hot_penalty

        found["one_hot"] = lambda inputs: (config.optim.one_hot, one_hot_penalty(model))
    if config.train.teacher is not None:
        from .teacher_loss import distill_loss

        teacher = load_model(config.train.teacher)[0].to(device).requires_grad_(False)
        found["distill"] = lambda inputs: (
            config.train.distill,
            distill_loss(model, teacher, inputs, logits_weight=0.0),
        )
    return found
