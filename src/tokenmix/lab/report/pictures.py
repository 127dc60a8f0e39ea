"""What a mixer attends: its effective attention, exact where the output is linear in the values, else the Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import Mixer
from ...models import Block
from ...models.effective_attention import repeat_batch, values_attention
from ...types import Options
from .figures import Picture, heat_map

SHOWN = 48
LAYERS = 6
COPIES = 64  # features differentiated at a time
PREFIX = 8  # outputs differentiated over the same prefix


class Effective(NamedTuple):
    """Effective attention: weights (G, T, S), how much source s adds to output t. ``kind`` says how they were computed.

    "values": y_t = sum_s weights[g, t, s] v_s before the output projection, for every channel of group g (a head, or
    one channel), exactly.
    "jacobian": the Frobenius norm of d y_t / d x_s, one group, for mixers that are not a sum over values.
    """

    weights: Tensor
    kind: str


def effective_attention(mixer: Mixer, x: Tensor, context: Tensor | None = None, **given: object) -> Effective:
    """Compute the effective attention of a mixer on one sequence x (1, T, D), over itself or over ``context`` (1, S,
    D).

    Softmax attention gives its own weights, head by head; AFT's rows sum to the gate; those of Hydra and others need
    not sum to anything.

    Raises:
        MixerError: x holds more than one sequence.
    """
    if x.ndim != 3 or x.shape[0] != 1:
        raise MixerError(f"effective_attention: expects one sequence (1, T, {mixer.dim}), got {tuple(x.shape)}.")
    found = values_attention(mixer, x, context, **given)
    return (
        Effective(_by_jacobian(mixer, x, context, given)[None], "jacobian")
        if found is None
        else Effective(found, "values")
    )


def _by_jacobian(mixer: Mixer, x: Tensor, context: Tensor | None, given: Options) -> Tensor:
    """Compute the norms (T, S) of the derivative of each output with regard to each source.

    Each row of a batch of copies differentiates another feature, so that the kernels serve. A streaming mixer gives the
    same outputs for the first tokens alone, so its early outputs are differentiated over those, which saves half.
    """
    T, source = x.shape[1], (x if context is None else context).detach()
    squares = source.new_zeros(T, source.shape[1])
    by_prefix = context is None and not given and mixer.capabilities.streaming
    step = PREFIX if by_prefix else max(T, 1)
    for first in range(0, T, step):
        last = min(first + step, T)
        read = source[:, :last] if by_prefix else source
        for features in torch.arange(mixer.dim, device=x.device).split(COPIES):
            n = len(features)
            copies = read.repeat(n, 1, 1).requires_grad_()
            same = {name: repeat_batch(value, n) for name, value in given.items()}
            y = mixer(copies, **same) if context is None else mixer(repeat_batch(x, n), copies, **same)
            asked = y.gather(2, features[:, None, None].expand(n, y.shape[1], 1)).sum(0)
            for t in range(first, last):
                (grad,) = torch.autograd.grad(asked[t, 0], copies, retain_graph=True)
                squares[t, : read.shape[1]] += grad.square().sum((0, 2))
    return squares.sqrt()


def attention_pictures(
    name: str, model: nn.Module, text: bytes, tell: Callable[[str], None] = lambda what: None
) -> list[Picture]:
    """Draw the mean effective attention on the first bytes of a text, for at most six layers of a language model.

    The layers are spread evenly. ``tell`` is called with a line of progress before each.
    """
    blocks: list[Block] = list(getattr(model, "blocks", []))
    layers = sorted(
        {round(j * (len(blocks) - 1) / max(1, min(LAYERS, len(blocks)) - 1)) for j in range(min(LAYERS, len(blocks)))}
    )
    tokens = torch.tensor(list(text[: min(SHOWN, getattr(model, "max_len", None) or SHOWN)]))[None]
    found = []
    for layer, x in _mixer_inputs(model, blocks, tokens).items():
        if layer in layers:
            tell(f"effective attention of layer {layer}")
            found.append(_picture(name, layer, blocks[layer].mixer, x))
    return found


def _mixer_inputs(model: nn.Module, blocks: list[Block], tokens: Tensor) -> dict[int, Tensor]:
    """Return the input of each layer's mixer when the model reads the tokens."""
    seen: dict[int, Tensor] = {}

    def look(layer: int) -> Callable[[nn.Module, tuple], None]:
        def hook(_: nn.Module, args: tuple) -> None:
            seen[layer] = args[0].detach()

        return hook

    hooks = [block.mixer.register_forward_pre_hook(look(i)) for i, block in enumerate(blocks)]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def _picture(name: str, layer: int, mixer: Mixer, x: Tensor) -> Picture:
    weights, kind = effective_attention(mixer, x)
    mean = weights.mean(0)
    what = (
        f"mean of {len(weights)} {'head' if len(weights) == getattr(mixer, 'heads', 0) else 'channel'}s"
        if kind == "values"
        else "norm of the Jacobian"
    )
    size = f"{float(mean.min()):.3g} to {float(mean.max()):.3g}"
    alt = f"Heat map of the effective attention of layer {layer} of {name}, {what}, "
    alt += f"queries down, sources across; values from {size}."
    caption = f"{name}, layer {layer}: {what}, {size}"
    return heat_map(mean, title=f"{name}, layer {layer}", x="source", y="output", alt=alt, caption=caption)
