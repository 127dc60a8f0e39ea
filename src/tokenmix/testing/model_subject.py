"""The whole model under test: what it is called with, and what of its output is compared."""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import MixerError
from ..system.calls import name_tensors
from . import inputs
from .loading import one_line, place_of
from .report import NotApplicable, same
from .tolerances import BY_DTYPE

Kind = Literal["decoder", "encoder", "encoder-decoder", "images"]
CACHES = ("cache", "past_key_values", "cache_params", "state")
"""What models of transformers call their cache, in arguments and in outputs, the newest name first."""
MASKED = ("the pad token", "another token")
"""What stands at masked places of an input."""


@dataclass(frozen=True)
class ModelSubject:
    """A copy of a model in eval mode, with the size of its inputs.

    Tokens are ids (B, T). An encoder-decoder reads its source by ``read``; everything else is about the tokens of its
    decoder, after a fixed source.
    """

    model: Any
    kind: Kind
    title: str
    size: tuple[int, ...] = ()
    seed: int = 0
    tolerance: float = BY_DTYPE[torch.float64]

    @cached_property
    def takes(self) -> frozenset[str]:
        """The names of the arguments of the model's forward."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @property
    def takes_any(self) -> bool:
        """Whether forward takes keywords that it does not name."""
        kinds = (p.kind for p in inspect.signature(self.model.forward).parameters.values())
        return inspect.Parameter.VAR_KEYWORD in kinds

    @property
    def pad(self) -> int | None:
        """The id of the model's pad token."""
        found = getattr(self.model.config, "pad_token_id", None)
        return found if isinstance(found, int) and 0 <= found < self.vocabulary else None

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def draw(self, rows: int, length: int, *, stream: int = 0) -> Tensor:
        """Draw ids (rows, length), none of which is the pad token."""
        generator = torch.Generator().manual_seed(1000 * stream + self.seed + length)
        ids = inputs.draw_tensor(torch.randint, self.vocabulary - 1, (rows, length), generator=generator)
        return ids if self.pad is None else ids + (ids >= self.pad).long()

    def images(self, rows: int, *, stream: int = 0) -> Tensor:
        """Draw images (rows, channels, height, width)."""
        return inputs.noise(rows, *self.size, seed=1000 * stream + self.seed, dtype=self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def call(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
        *,
        use_cache: bool = False,
        **more: Any,
    ) -> Any:
        """Call the model with what of this its forward takes, without gradients unless it is told otherwise.

        Args:
            mask: (B, tokens in the cache + T), True = may be attended.
        """
        given: dict[str, Any] = {"use_cache": use_cache} if self.takes_any or "use_cache" in self.takes else {}
        if self.kind == "encoder-decoder":
            source = self.draw(1, 5, stream=9).expand(ids.shape[0], -1)
            given |= {"input_ids": source, "decoder_input_ids": ids}
            given |= {} if mask is None else {"decoder_attention_mask": mask.long()}
        else:
            given |= {"input_ids": ids}
            given |= {} if mask is None else {"attention_mask": mask.long()}
        if positions is not None and "position_ids" in self.takes:
            given["position_ids"] = positions
        if cache is not None:
            given[self.cache_name] = cache
        return self.model(**given, **more)

    def step(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Any:
        """Call the model with the next tokens of a stream, with what its ``prepare_inputs_for_generation`` chooses.

        Some models, such as Mamba, take the mask for the first tokens alone.
        """
        first = {"is_first_iteration": cache is None, "cache": cache, "use_cache": True}
        with torch.no_grad():
            if mask is not None and self.kind == "decoder" and cache is not None:
                given = {"attention_mask": mask.long(), "position_ids": positions}
                chosen = self.model.prepare_inputs_for_generation(ids, **given, **first)
                mask = None if chosen.get("attention_mask") is None else mask
            return self.call(ids, mask, positions, cache, use_cache=True)

    @property
    def cache_name(self) -> str:
        """The name of the argument that takes the cache."""
        name = next((name for name in CACHES if name in self.takes), None)
        if self.kind in ("encoder", "images") or name is None:
            raise NotApplicable("it has no cache")
        return name

    def cache_of(self, out: Any) -> Any:
        """Return the cache of an output."""
        found = [out[name] for name in CACHES if name in out and out[name] is not None]
        if not found:
            raise NotApplicable("it returns no cache")
        return found[0]

    def outputs(self, *args: Any, **more: Any) -> Tensor:
        """Return the logits (B, T, V), or hidden states, of a call with ids, or with images."""
        with torch.no_grad():
            if self.kind == "images":
                return first_tensor(self.model(*args))
            return first_tensor(self.call(*args, **more))

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the outputs of padded ids: of the live tokens one after the other, or of a fixed target.

        Returns:
            (B, T, V), row by row the outputs of its live tokens first; the other places are zero.
        """
        if self.kind == "encoder-decoder":
            target = self.draw(1, 4, stream=8).expand(ids.shape[0], -1)
            with torch.no_grad():
                return first_tensor(self.model(input_ids=ids, attention_mask=mask.long(), decoder_input_ids=target))
        y = self.outputs(ids, mask, positions_of(mask))
        first = torch.argsort(~mask, dim=1, stable=True)[..., None].expand_as(y)
        count = torch.arange(mask.shape[1])[None, :, None] < mask.sum(1)[:, None, None]
        return torch.where(count, y.gather(1, first), 0.0)

    def same(self, got: Tensor, want: Tensor, what: str, **given: Any) -> None:
        """Compare two outputs with the tolerance of the model's arithmetic."""
        same(got, want, what, **{"tol": self.tolerance, **given})

    def copy_to(self, dtype: torch.dtype) -> ModelSubject:
        """Return the subject with a copy of its model in another dtype."""
        tolerance = max(self.tolerance, BY_DTYPE[dtype])
        return replace(self, model=copy.deepcopy(self.model).to(dtype), tolerance=tolerance)


def positions_of(mask: Tensor) -> Tensor:
    """Return the positions that transformers' ``generate`` gives to a mask (B, T): of live tokens, their number."""
    return (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)


def first_tensor(out: Any) -> Tensor:
    """Return the logits of an output, or its first tensor."""
    return next(iter(name_tensors(out).values()))


def perturb_model(model: nn.Module, *, seed: int) -> nn.Module:
    """Add noise to every parameter, in place, of a size that suits any width: 0.6 / sqrt(inputs), 0.2 to vectors."""
    generator = torch.Generator().manual_seed(seed + 77)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                size = 0.2 if p.ndim < 2 else 0.6 / (p[0].numel() if p.ndim != 3 else p.shape[-1]) ** 0.5
                p.add_(inputs.draw_tensor(torch.randn, p.shape, generator=generator).to(p), alpha=size)
    return model


class _Narrowest(TorchDispatchMode):
    """Note the narrowest floating point dtype of what is computed from the numbers of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.found = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.ndim > 2:
            self.found = min(self.found, out.dtype, key=lambda dtype: torch.finfo(dtype).bits)
        return out


def arithmetic(s: ModelSubject) -> torch.dtype:
    """Return the narrowest dtype in which a model computes: many compute norms and softmax in float32 in any case."""
    with _Narrowest() as seen:
        if s.kind == "images":
            s.outputs(s.images(1))
        else:
            ids = s.draw(1, 3)
            s.outputs(ids)
            with suppress(Exception):  # whatever a stream raises is what its promises are about
                s.step(ids, None, torch.arange(3)[None], None)
    return seen.found


def model_subject(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    perturb: bool = False,
    title: str | None = None,
) -> ModelSubject:
    """Build the subject of a model of transformers or timm, which is copied.

    Args:
        dtype: by default float64, or float32 if the model does not run in float64.

    Raises:
        MixerError: for any other model, and for one that does not run on three tokens or one image.
    """
    size = _image_size(model)
    if not hasattr(model, "config") and size is None:
        known = "a model of transformers, or of timm"
        raise MixerError(f"check: {type(model).__name__} is not {known}; check_mixer takes layers on (B, T, D).")
    what, errors = title or type(model).__name__, []
    for chosen in (torch.float64, torch.float32) if dtype is None else (dtype,):
        copied = copy.deepcopy(model).to(chosen).eval()
        s = _describe(perturb_model(copied, seed=seed) if perturb else copied, what, size or (), seed, perturb)
        try:
            return replace(s, tolerance=BY_DTYPE[arithmetic(s)])
        except Exception as why:  # whatever the model raises
            errors.append(f"{type(why).__name__}: {one_line(why)}{place_of(why)}")
    raise MixerError(f"check: {what} does not run on {'one image' if size else 'three tokens'}: {errors[-1]}")


def _image_size(model: Any) -> tuple[int, ...] | None:
    """Return the size (channels, height, width) of the images of a model of timm, None for any other model."""
    size = (getattr(model, "default_cfg", None) or {}).get("input_size")
    sides = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return None if size is None else (size[0], *(sides or size[1:]))


def _describe(model: Any, what: str, size: tuple[int, ...], seed: int, perturb: bool) -> ModelSubject:
    """Say what a model reads."""
    kind: Kind = "images"
    if not size:
        decodes = model.can_generate() if hasattr(model, "can_generate") else False
        kind = "encoder-decoder" if model.config.is_encoder_decoder else "decoder" if decodes else "encoder"
        if "input_ids" not in inspect.signature(model.forward).parameters:
            raise MixerError(f"check: {what} takes no input_ids; models of tokens are checked, and images of timm.")
    s = ModelSubject(model, kind, what, size, seed)
    weights = "random weights" if perturb else "its own weights"
    return replace(s, title=f"{what}, {kind}, {weights}, {str(s.dtype)[6:]}, seed={seed}")
