"""ViTs of this library with any mixer, as subjects of an anatomy."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models import ViT
from ..report.maps import Layer, look_into, reading
from ..report.pictures import effective_attention
from .subject import Projected, Subject, prefix_names


@dataclass
class OurViT(Subject):
    """A ViT of this library: the mixers say themselves what their queries, keys and values are."""

    def output(self, images: Tensor) -> Tensor:
        """Map images to the normalised tokens (B, T, D)."""
        tokens: Tensor = self.model.forward_features(images)
        return tokens

    def projected(self, images: Tensor) -> Projected:
        """Return the arguments q, k and v of the last mixer's functional form, where it has one of each per token."""
        mixer, x, given = look_into(self.model, images)[-1]
        form = mixer.functional_form()
        if form is None:
            return Projected()
        with reading(self.model):
            args, _ = mixer.functional_args(x, None, **_full(given))
        found = dict(zip(inspect.signature(form).parameters, args, strict=False))
        return Projected(*(_per_token(found.get(name), x) for name in ("q", "k", "v")))

    def attention(self, images: Tensor) -> tuple[Tensor, str]:
        """Return the mean size of the effective weights over heads or channels, image by image."""
        layer, maps, kind = look_into(self.model, images)[-1], [], "values"
        for b in range(len(images)):
            weights, kind = _effective(layer, b)
            maps.append(weights.detach().double().abs().mean(0))
        return torch.stack(maps), kind


def our_vit(name: str, model: ViT, mean: Any = None, std: Any = None) -> OurViT:
    """Make a subject of a ViT; means and deviations that are not given are those of its default."""
    from ..data.augment import moments

    config = model.config
    mean, std = moments("anatomy", config.channels, mean, std)
    mixers = ", ".join(dict.fromkeys(str(spec["name"]) for spec in config.specs()))
    return OurViT(
        name,
        model.eval(),
        model.patch,
        list(model.blocks),
        prefix_names(["[CLS]"] if config.pool == "class" else [], config.registers),
        (config.image_size[0], config.image_size[1]),
        mean,
        std,
        f"a ViT of tokenmix with {mixers}",
    )


def _effective(layer: Layer, b: int) -> tuple[Tensor, str]:
    given = {
        key: value[b : b + 1] if isinstance(value, Tensor) and value.shape[:1] == layer.x.shape[:1] else value
        for key, value in layer.given.items()
    }
    with torch.enable_grad():  # the derivative of mixers that are no sum over values
        found = effective_attention(layer.mixer, layer.x[b : b + 1], **given)
    return found.weights, found.kind


def _full(given: dict[str, Any]) -> dict[str, Any]:
    return {"positions": None, "key_mask": None, "attn_mask": None, "grid": None, "prefix": 0, **given}


def _per_token(found: Any, x: Tensor) -> Tensor | None:
    """Return an argument that has one vector for each token of x, else None."""
    return found if isinstance(found, Tensor) and found.ndim == 3 and found.shape[:2] == x.shape[:2] else None
