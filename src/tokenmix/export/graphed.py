"""Decode with one CUDA graph: a token costs what its kernels cost, without Python or launch overhead."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ..mixers import Mixer, State
from ..models import LM, ImageDensity
from ..system.cuda_graph import capture_graph
from .inputs import Step, silence_exporters

DEVICE = "cuda"


class GraphedDecoder:
    """Run ``model.extend`` for one token per row as a CUDA graph, captured once and replayed.

    It replaces the model wherever ``extend`` is called, and is the ``decoder=`` of ``LM.generate``. The numbers are
    those of ``extend``. Logits and state are held in the decoder's own memory, which its next step overwrites; a
    state from elsewhere, such as ``prefill`` or a reordered one, is copied in. Token ids are not checked against the
    vocabulary.

    Args:
        model: an ``LM``, an ``ImageDensity`` or a mixer on a CUDA device, in eval mode, whose state has a fixed size.
        batch_size: rows of every step.

    Raises:
        MixerError: for a model on another device or in training mode, or whose state grows with each token, as that
            of softmax attention does.
    """

    def __init__(self, model: LM | ImageDensity | Mixer, batch_size: int = 1):
        _check(model, batch_size)
        self.model = model
        self._left: int | None = None  # tokens left before max_len
        with torch.no_grad():
            fresh = model.init_state(batch_size)
            self._token = _token(model, batch_size)
            _refuse_growth(model, self._token, fresh)
            leaves, tree = pytree.tree_flatten(fresh)
            self._leaves = [leaf.clone() for leaf in leaves]
            self.state = pytree.tree_unflatten(self._leaves, tree)
            with silence_exporters():
                self._program = torch.export.export(Step(model), (self._token, self.state)).module()
            self._replay = capture_graph(self._step)
        self._load(fresh)

    @torch.no_grad()
    def extend(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Process the next token of each row (B, 1), or features (B, 1, D) for a mixer, after a state.

        Returns:
            The logits or outputs, and the new state.

        Raises:
            MixerError: for another shape, and beyond the model's ``max_len``.
        """
        if tokens.shape != self._token.shape:
            wanted, got = tuple(self._token.shape), tuple(tokens.shape)
            raise MixerError(f"GraphedDecoder: was built for tokens of shape {wanted}, got {got}.")
        if state is not self.state:
            self._load(state)
        if self._left is not None:
            if self._left < 1:
                limit = f"max_len={self.model.max_len}"
                raise MixerError(
                    f"GraphedDecoder: the model was built with {limit} and has read as many tokens; stop here."
                )
            self._left -= 1
        self._token.copy_(tokens)
        return self._replay(), self.state

    def _load(self, state: State) -> None:
        """Copy a state into the decoder's memory."""
        leaves = pytree.tree_leaves(state)
        found, wanted = ([tuple(leaf.shape) for leaf in each] for each in (leaves, self._leaves))
        if found != wanted:
            rows = len(self._token)
            raise MixerError(f"GraphedDecoder: was built for a state of {rows} rows with shapes {wanted}, got {found}.")
        for own, leaf in zip(self._leaves, leaves, strict=True):
            own.copy_(leaf)
        self._left = None if self.model.max_len is None else self.model.max_len - int(self.state.position.max())

    def _step(self) -> Tensor:
        """Compute one step and overwrite the old state; the graph captures this function."""
        result, new = self._program(self._token, self.state)
        held = {leaf.untyped_storage().data_ptr() for leaf in self._leaves}
        apart = [
            leaf.clone() if leaf.untyped_storage().data_ptr() in held else leaf for leaf in pytree.tree_leaves(new)
        ]
        for own, leaf in zip(self._leaves, apart, strict=True):
            own.copy_(leaf)
        return result


def _check(model: LM | ImageDensity | Mixer, batch_size: int) -> None:
    if not isinstance(model, (LM, ImageDensity, Mixer)) or (
        isinstance(model, Mixer) and not model.capabilities.streaming
    ):
        kind = type(model).__name__
        raise MixerError(f"GraphedDecoder: expects an LM, an ImageDensity or a streaming mixer, got {kind}.")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise MixerError(f"GraphedDecoder: batch_size must be an integer >= 1, got {batch_size!r}.")
    device = next((p.device.type for p in model.parameters()), "cpu")
    if device != DEVICE:
        raise MixerError(
            f"GraphedDecoder: the model is on {device!r}; CUDA graphs need {DEVICE!r}. Call model.extend there."
        )
    if model.training:
        raise MixerError("GraphedDecoder: the model is in training mode; call model.eval().")


def _token(model: LM | ImageDensity | Mixer, rows: int) -> Tensor:
    like = next(model.parameters())
    if isinstance(model, Mixer):
        return like.new_zeros(rows, 1, model.dim)
    return torch.zeros(rows, 1, dtype=torch.long, device=like.device)


def _refuse_growth(model: LM | ImageDensity | Mixer, token: Tensor, fresh: State) -> None:
    """Refuse a state that grows, because a CUDA graph has fixed sizes."""
    _, after = model.extend(token, fresh)
    whose = [(type(model).__name__, fresh, after)]
    if not isinstance(model, Mixer):
        whose = [
            (type(model.blocks[i % len(model.blocks)].mixer).__name__, *states)
            for i, states in enumerate(zip(fresh.layers, after.layers, strict=True))
        ]
    for who, before, now in whose:
        shapes = [[tuple(leaf.shape) for leaf in pytree.tree_leaves(state)] for state in (before, now)]
        if shapes[0] != shapes[1]:
            grows = f"the state of {who} grows with each token"
            raise MixerError(f"GraphedDecoder: {grows}, and a CUDA graph has fixed sizes; see `tokenmix list`.")
