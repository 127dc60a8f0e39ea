"""The transformer block around any mixer: norm, mixer, residual; norm, MLP, residual.

A block of a decoder has a second mixer between the two, from its tokens to those of the encoder.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import MIXERS, Mixer, State, build_mixer, mixer_options
from ..mixers.registration import load_mixer
from ..mixers.state import register_state
from ..system.properties import named_errors
from ..types import Options, Spec
from .layers import MLP, DropPath, MLPKind, NormType, build_norm, check_layer_kinds, init_linear

NORMS = ("pre", "post")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@register_state
class CrossState(NamedTuple):
    """The state of a block of a decoder: that of its own mixer, and that of its cross mixer over the context."""

    own: State
    cross: State


@named_errors
class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)).

    With ``norm="post"`` it is norm(x + mixer(x)), then norm(x + mlp(x)). With ``cross`` a second mixer stands between
    the two, from x to a context: x + cross(norm(x), context).

    Args:
        dim: features per token, D.
        spec: the mixer as JSON, ``{"name": "aft_local", "window": 32}``. Its ``max_len`` (and on a ``grid`` its
            ``ndim`` and ``grid_size``) is filled in if the mixer has this option and the spec does not give it.
        causal: whether the mixer is causal.
        max_len: length of the longest sequence.
        grid: sizes of the token grid that the model is built for, if its tokens lie on one.
        mlp_ratio: hidden width of the MLP as a multiple of ``dim``; 0: there is none, as in Mamba-2.
        mlp: "gelu", "swiglu" or "relu2"; see ``MLP``.
        mlp_bias: whether its layers have biases.
        norm: "pre" or "post".
        norm_type: "layer" or "rms".
        norm_eps: epsilon of the norms.
        dropout: dropout of each branch's output.
        drop_path: probability of leaving out a branch in training, drawn for each row.
        cross: the mixer over the context as JSON, for a decoder; None: the block reads no context.
    """

    def __init__(
        self,
        dim: int,
        spec: Spec,
        *,
        causal: bool,
        max_len: int,
        grid: tuple[int, ...] | None = None,
        mlp_ratio: float = 4.0,
        mlp: MLPKind = "gelu",
        mlp_bias: bool = True,
        norm: str = "pre",
        norm_type: NormType = "layer",
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        cross: Spec | None = None,
    ):
        super().__init__()
        if norm not in NORMS:
            raise MixerError(f"Block: norm={norm!r} is unknown; choose 'pre' or 'post'.")
        check_layer_kinds("Block", norm_type, mlp)
        spec = complete_spec(spec, max_len, grid)
        check_form("Block", spec["name"], causal=causal)
        window = spec.get("window")
        if grid is None and isinstance(window, int) and window > max_len:
            warnings.warn(
                f"{spec['name']}: window={window} is larger than max_len={max_len}, so all tokens lie inside of it.",
                stacklevel=2,
            )
        self.pre = norm == "pre"
        self.mixer_norm = build_norm(norm_type, dim, norm_eps)
        self.mlp_norm = build_norm(norm_type, dim, norm_eps) if mlp_ratio else None
        self.mixer: Mixer = build_mixer(dim=dim, causal=causal, **spec)
        self.on_grid = (
            grid is not None and self.mixer.capabilities.grid and getattr(self.mixer, "ndim", len(grid)) == len(grid)
        )
        self.mlp = MLP(dim, mlp_ratio, mlp, bias=mlp_bias) if mlp_ratio else None
        self.dropout = nn.Dropout(dropout) if not drop_path else nn.Sequential(nn.Dropout(dropout), DropPath(drop_path))
        self.cross: Mixer | None = None
        if cross is not None:
            self.cross = build_cross_mixer(dim, cross, max_len)
            self.cross_norm = build_norm(norm_type, dim, norm_eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **given: object,
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D).

        Args:
            context: (B, S, D), read by the cross mixer; without it that mixer is left out.
            context_mask: (B, S) bool, True = this token of the context may be attended.
            cu_seqlens: (n + 1,) int32, cumulative lengths of the sequences that the tokens of all rows, one row after
                the other, form; each is mixed with itself only, and ``given`` must be empty. None: each row is one.
            given: goes to the mixer: key_mask, positions and, if it mixes the grid of its tokens, grid and prefix. The
                cross mixer is given the positions.
        """
        given = self.for_mixer(given)
        read = self.branch_input(x, self.mixer_norm)
        if cu_seqlens is None:
            mixed = self.mixer(read, **given)
        else:
            mixed = self.mixer.forward_packed(read.flatten(0, 1), cu_seqlens).view_as(read)
        x = self.add_branch(x, mixed, self.mixer_norm)
        if self.cross is not None and context is not None:
            asked = self.branch_input(x, self.cross_norm)
            crossed = self.cross(asked, context, key_mask=context_mask, positions=given.get("positions"))
            x = self.add_branch(x, crossed, self.cross_norm)
        return self.after_mixing(x)

    def for_mixer(self, given: dict[str, object]) -> dict[str, object]:
        """Return the arguments that the mixer takes: grid and prefix only if it supports grids."""
        return given if self.on_grid else {k: v for k, v in given.items() if k not in ("grid", "prefix")}

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        device: torch.device | None = None,
    ) -> State:
        """Return the state before the first token, in which a cross mixer has read the whole context."""
        own = self.mixer.init_state(batch_size, device=device)
        if self.cross is None:
            return own
        return CrossState(own, self.cross.init_state(batch_size, context=context, context_mask=context_mask))

    def extend(self, x: Tensor, state: State, **given: Tensor | None) -> tuple[Tensor, State]:
        """Process the next chunk (B, L, D) from the mixer's state; return the chunk's outputs and the new state.

        ``given`` holds key_mask and positions of the chunk.
        """
        if self.cross is None:
            mixed, state = self.mixer.extend(self.branch_input(x, self.mixer_norm), state, **given)
            return self.after_mixing(self.add_branch(x, mixed, self.mixer_norm)), state
        mixed, own = self.mixer.extend(self.branch_input(x, self.mixer_norm), state.own, **given)
        x = self.add_branch(x, mixed, self.mixer_norm)
        asked = self.branch_input(x, self.cross_norm)
        crossed, cross = self.cross.extend(asked, state.cross, positions=given.get("positions"))
        return self.after_mixing(self.add_branch(x, crossed, self.cross_norm)), CrossState(own, cross)

    @property
    def streams(self) -> bool:
        """Return whether this block can continue from a state."""
        return self.mixer.capabilities.streaming and (self.cross is None or self.cross.capabilities.keeps_context)

    def after_mixing(self, x: Tensor) -> Tensor:
        """Apply the MLP's half of the block, if there is one."""
        if self.mlp is None or self.mlp_norm is None:
            return x
        return self.add_branch(x, self.mlp(self.branch_input(x, self.mlp_norm)), self.mlp_norm)

    def branch_input(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of a branch, from the residual stream."""
        return norm(x) if self.pre else x

    def add_branch(self, x: Tensor, branch: Tensor, norm: nn.Module) -> Tensor:
        """Return the residual stream with a branch's output added."""
        return x + self.dropout(branch) if self.pre else norm(x + self.dropout(branch))

    def reset_parameters(self, std: float = 0.02, residual_std: float | None = None) -> None:
        """Re-initialise norms, mixer and MLP.

        Projections and MLP are drawn from N(0, std), those that write to the residual stream from N(0, residual_std);
        biases are 0.
        """
        residual_std = std if residual_std is None else residual_std
        self.mixer_norm.reset_parameters()
        reset_mixer(self.mixer, std, residual_std)
        if self.mlp is not None and self.mlp_norm is not None:
            self.mlp_norm.reset_parameters()
            self.mlp.reset_parameters(std, residual_std)
        if self.cross is not None:
            self.cross_norm.reset_parameters()
            reset_mixer(self.cross, std, residual_std)


def check_form(who: str, name: object, *, causal: bool) -> None:
    """Refuse a mixer without the form, causal or bidirectional, that a model needs; unknown names pass."""
    cls = load_mixer(name)
    if cls is not None and causal not in cls.facts.causal_forms():
        needs = "no causal form, which this model needs"
        lacks = needs if causal else "only a causal form, and the tokens of this model see both sides"
        raise MixerError(f"{who}: {name} has {lacks}; `tokenmix list` says what each mixer can.")


def build_cross_mixer(dim: int, spec: Spec, max_len: int) -> Mixer:
    """Build the mixer of a decoder over its context, of which ``max_len`` tokens can be read.

    Raises:
        MixerError: if it mixes a sequence with itself only.
    """
    spec = complete_spec(spec, max_len)
    cls = load_mixer(spec["name"])
    if cls is not None and not cls.facts.context:
        able = ", ".join(name for name, each in MIXERS.items() if each.facts.context)
        raise MixerError(
            f"Block: {spec['name']} mixes a sequence with itself and cannot be a cross mixer; choose among {able}."
        )
    if cls is not None and "max_context_len" in mixer_options(cls):
        spec = {"max_context_len": max_len} | spec
    return build_mixer(dim=dim, causal=False, **spec)


def reset_mixer(mixer: Mixer, std: float, residual_std: float) -> None:
    """Re-initialise a mixer, with its projections as in ``Block.reset_parameters``."""
    mixer.reset_parameters()
    for name, child in mixer.named_children():
        if name in PROJECTIONS and isinstance(child, nn.Linear):
            init_linear(child, residual_std if name == "out_proj" else std)
    mixer.start_copies()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the block, and back in its former mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def cycle_specs(mixers: tuple[Spec, ...], layers: int | None) -> list[Spec]:
    """Return one mixer spec per layer, repeating the specs cyclically."""
    return [mixers[i % len(mixers)] for i in range(layers or len(mixers))]


def complete_spec(spec: Spec, max_len: int, grid: tuple[int, ...] | None = None) -> Spec:
    """Return the spec with the model's ``max_len`` and, on a grid, its ``ndim`` and ``grid_size``.

    They are filled in if the mixer has this option and the spec does not give it.
    """
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise MixerError(
            f'a mixer spec is an object with a name, like {{"name": "attention", "heads": 4}}; got {spec!r}.'
        )
    for taken in ("causal", "dim"):
        if taken in spec:
            raise MixerError(f"the model sets {taken!r} of every mixer; leave it out of the spec {spec!r}.")
    cls = load_mixer(spec["name"])
    if cls is None:
        return dict(spec)
    open_ones: Options = {"max_len": max_len}
    if grid is not None and cls.facts.grid:
        open_ones["ndim"] = len(grid)
        if "grid_size" in mixer_options(cls) and spec.get("window") is None:
            open_ones |= {"grid_size": list(grid), "max_len": None}  # a position on a grid has two coordinates, not one
    return {name: value for name, value in open_ones.items() if name in mixer_options(cls)} | spec
