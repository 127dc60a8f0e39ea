"""ViTs of this library with any mixer, as subjects of an anatomy."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...mixers import Inputs
from ...models import ViT
from ...system.checkpoint import list_steps
from ...types import Options
from ..report.maps import Layer, look_into
from ..report.pictures import effective_attention
from .subject import ProbedModel, Projected, prefix_names


@dataclass
class OurViT(ProbedModel):
    """A ViT of this library: the mixers say themselves what their queries, keys and values are.

    Args:
        run_dir: the run directory whose checkpoints can be read; None: there is none.
    """

    run_dir: Path | None = None

    def at_steps(self) -> Iterator[tuple[int, ProbedModel]]:
        """Load the model at each checkpoint of its run."""
        from ..train import load_run

        if self.run_dir is None:
            return
        for step in list_steps(self.run_dir / "checkpoints"):
            model, _ = load_run(self.run_dir, step=step)
            assert isinstance(model, ViT)
            yield step, replace(our_vit(self.name, model, self.mean, self.std), image_size=self.image_size)

    def run(self, images: Tensor) -> tuple[Tensor, Projected]:
        """Return the normalised tokens, and q, k and v of the last mixer's functional form, where it has one of each
        per token.
        """
        seen: list[tuple[Tensor, Options]] = []
        mixer: Any = self.model.blocks[-1].mixer
        hook = mixer.register_forward_pre_hook(lambda _, args, given: seen.append((args[0], given)), with_kwargs=True)
        try:
            tokens: Tensor = self.model.forward_features(images)
        finally:
            hook.remove()
        form, ((x, given),) = mixer.facts.functional_form(), seen
        if form is None:
            return tokens, Projected()
        args, _ = mixer.functional_args(Inputs(x, None, **_complete_options(given)))
        found = dict(zip(inspect.signature(form).parameters, args, strict=False))
        return tokens, Projected(*(_per_token(found.get(name), x) for name in ("q", "k", "v")))

    def attention(self, images: Tensor) -> tuple[Tensor, str]:
        """Return the mean size of the effective weights over heads or channels, image by image."""
        layer, maps, kind = look_into(self.model, images)[-1], [], "values"
        for b in range(len(images)):
            weights, kind = _effective(layer, b)
            maps.append(weights.detach().double().abs().mean(0))
        return torch.stack(maps), kind


def our_vit(
    name: str, model: ViT, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None
) -> OurViT:
    """Make a subject of a ViT; means and deviations that are not given are those of its default."""
    from ..data.augment import moments

    config = model.config
    mean, std = moments("look tokens", config.channels, mean, std)
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


def _complete_options(given: Options) -> Options:
    return {"positions": None, "key_mask": None, "attn_mask": None, "grid": None, "prefix": 0, **given}


def _per_token(found: object, x: Tensor) -> Tensor | None:
    """Return an argument that has one vector for each token of x, else None."""
    return found if isinstance(found, Tensor) and found.ndim == 3 and found.shape[:2] == x.shape[:2] else None
