"""Layer-wise distillation: a student's mixers learn to produce the outputs of the teacher's on the same input.

The layers' term is attention transfer as in LoLCATs (Zhang et al. 2024, arXiv 2410.10254); that of the logits is from
Hinton et al. 2015 (arXiv 1503.02531).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...models import ViT
from ...types import Options


class Trace(NamedTuple):
    """Hold one forward pass.

    Attributes:
        inputs: the input of each block, (B, T, D).
        outputs: the output of each block's mixer, (B, T, D).
        given: the keyword arguments of each block.
        logits: (B, classes).
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    given: list[Options]
    logits: Tensor


def layer_outputs(model: ViT, images: Tensor) -> Trace:
    """Run a model of blocks (a ViT) and record each block's input and its mixer's output, before the residual sum."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    given: list[Options] = []

    def enter(block: nn.Module, args: tuple[Tensor, ...], options: Options) -> None:
        inputs.append(args[0])
        given.append(options)

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in model.blocks]
    handles += [block.mixer.register_forward_hook(lambda mixer, args, y: outputs.append(y)) for block in model.blocks]
    try:
        logits = model(images)
    finally:
        for handle in handles:
            handle.remove()
    return Trace(inputs, outputs, given, logits)


def distill_loss(
    student: Any,
    teacher: Any,
    images: Tensor,
    *,
    layers: Sequence[int] | None = None,
    logits_weight: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Compute mean_l mean|m_l(x_l) - m'_l(x_l)|^2 + logits_weight tau^2 KL(softmax(z' / tau) || softmax(z / tau)), a
    scalar.

    m_l is layer l of the student, its norm and its mixer; primes denote the teacher. x_l is the input of the teacher's
    layer l, for both models, so that each layer learns on its own. A student without class token and registers is
    compared on the patches only. z are the logits of complete forward passes. Dropout and drop path do not act in the
    layers' terms. Gradients reach the student only.

    Args:
        layers: layers to compare, negative indices counting from the end; None: all; (): none.
        logits_weight: 0 skips the student's own forward pass.

    Raises:
        MixerError: if the teacher is in training mode, or if layers, width, patches, tokens or classes of the two
            models do not match.
    """
    if teacher.training:
        raise MixerError(
            "distill_loss: the teacher is in training mode, so its outputs would be random; call teacher.eval() first."
        )
    if not temperature > 0 or logits_weight < 0:
        raise MixerError(
            f"distill_loss: temperature must be positive and logits_weight >= 0, got {temperature} and {logits_weight}."
        )
    count = len(teacher.blocks)
    chosen = range(count) if layers is None else [_layer(i, count) for i in layers]
    cut = _tokens_to_cut(student, teacher)
    with torch.no_grad():
        trace = layer_outputs(teacher, images)
    terms = [_layer_loss(student, trace, i, cut) for i in chosen]
    loss = torch.stack(terms).mean() if terms else trace.logits.new_zeros(())
    return (
        loss if logits_weight == 0 else loss + logits_weight * _softened_kl(student(images), trace.logits, temperature)
    )


def _layer(i: int, count: int) -> int:
    if not -count <= i < count:
        raise MixerError(f"distill_loss: layers must be in -{count}..{count - 1}, got {i}.")
    return i % count


def _tokens_to_cut(student: ViT, teacher: ViT) -> int:
    """Count the teacher's tokens before the patches that the student lacks; refuse models that cannot be compared."""
    mine, theirs = student.config, teacher.config
    for name in ("layers", "dim", "patch", "image_size"):
        if getattr(mine, name) != getattr(theirs, name):
            raise MixerError(
                f"distill_loss: the student has {name}={getattr(mine, name)}, the teacher {getattr(theirs, name)}; "
                + "they must be equal."
            )
    if mine.prefix not in (0, theirs.prefix) or (
        mine.prefix and (mine.pool, mine.registers) != (theirs.pool, theirs.registers)
    ):
        raise MixerError(
            f"distill_loss: the student has {mine.prefix} tokens before the patches, the teacher {theirs.prefix}; "
            + "give the student the same ones, or none."
        )
    return theirs.prefix - mine.prefix


def _layer_loss(student: ViT, trace: Trace, i: int, cut: int) -> Tensor:
    """Compute the mean squared error between both mixers of layer i on the teacher's input from token ``cut`` on."""
    block, x, wanted = student.blocks[i], trace.inputs[i][:, cut:], trace.outputs[i][:, cut:]
    given = {**trace.given[i], "prefix": student.config.prefix} if block.on_grid else {}
    return F.mse_loss(block.mixer(block.mixer_norm(x), **given), wanted)


def _softened_kl(logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    if logits.shape != wanted.shape:
        raise MixerError(
            f"distill_loss: the student's logits are {tuple(logits.shape)}, the teacher's {tuple(wanted.shape)}; "
            + "set logits_weight=0."
        )
    mine, theirs = (F.log_softmax(z / temperature, -1) for z in (logits, wanted))
    return temperature**2 * F.kl_div(mine, theirs, log_target=True, reduction="batchmean")
