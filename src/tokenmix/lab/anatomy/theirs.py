"""ViTs of timm and transformers as subjects of an anatomy: attention modules that ``find_attention`` knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...errors import MixerError
from ...functional.layout.heads import by_head
from ...hosts.surgery.probe import Proofs
from ...hosts.surgery.sites import Site, find_attention
from ..report.maps import evaluate_without_gradients
from .subject import ProbedModel, Projected, prefix_names

SUPPORTED = ("timm", "vit", "dinov2", "clip")


@dataclass
class TheirViT(ProbedModel):
    """A ViT of timm or transformers, whose last attention is followed through its projections."""

    site: Site = field(kw_only=True)

    def run(self, images: Tensor) -> tuple[Tensor, Projected]:
        """Return the tokens of timm's ``forward_features`` or the ``last_hidden_state``, and what the last attention's
        projections give, before any norm of queries and keys.
        """
        module: Any = self.model.get_submodule(self.site.name)
        parts = tuple(dict.fromkeys(name.removesuffix(".weight") for name in self.site.traits.weights[:3]))
        seen: dict[str, Tensor] = {}

        def note(name: str, _: nn.Module, args: tuple, y: Tensor) -> None:
            seen[name] = y.detach()

        hooks = [module.get_submodule(name).register_forward_hook(partial(note, name)) for name in parts]
        try:
            tokens = self._read_tokens(images)
        finally:
            for hook in hooks:
                hook.remove()
        return tokens, Projected(*(seen[parts[0]].chunk(3, -1) if len(parts) == 1 else (seen[name] for name in parts)))

    def attention(self, images: Tensor) -> tuple[Tensor, str]:
        """Return softmax(q k^T scale) of the last layer, the mean over heads."""
        module: Any = self.model.get_submodule(self.site.name)
        with evaluate_without_gradients(self.model):
            _, found = self.run(images)
            q, k = (by_head(p, self.site.heads) for p in (found.queries, found.keys) if p is not None)
            if self.site.family == "timm":
                q, k = module.q_norm(q), module.k_norm(k)
            inner: Any = module.get_submodule(self.site.traits.parts[0])
            scale = inner.scale if self.site.family == "timm" else inner.scaling
            return (scale * q.double() @ k.double().mT).softmax(-1).mean(1), "softmax"

    def _read_tokens(self, images: Tensor) -> Tensor:
        try:
            if self.site.family == "timm":
                tokens: Tensor = self.model.forward_features(images)
                return tokens
            return self.model.base_model(pixel_values=images).last_hidden_state  # type: ignore[no-any-return]
        except (AssertionError, RuntimeError, ValueError) as why:
            raise MixerError(
                f"look tokens: {self.name} cannot read images of {images.shape[2]} x {images.shape[3]} "
                + f"({' '.join(str(why).split())[:160].rstrip('.')}); leave out --image-size."
            ) from None


def their_vit(
    name: str, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], notes: list[str]
) -> TheirViT:
    """Make a subject of a ViT of timm or transformers.

    Raises:
        MixerError: the model is no ViT whose attention is known, as a convolutional network, a text model or a pyramid.
    """
    sites = find_attention(model)
    blocks = [_block(model, site.name) for site in sites]
    patches = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == m.stride and m.groups == 1]
    odd = [s for s in sites if s.grid is None or s.causal or s.cross or s.family not in SUPPORTED]
    if not sites or odd or None in blocks or len(patches) != 1:
        raise MixerError(
            f"look tokens: {name}: {type(model).__name__} is not a supported Vision Transformer; supported are ViT, "
            + "DeiT, DINOv2 and similar models of tokenmix, timm and transformers."
        )
    site, (patch,) = sites[-1], patches
    try:
        Proofs(model).prove(site)
    except MixerError as why:
        raise MixerError(f"look tokens: {name}: {site.name}: {str(why).rstrip('.')}.") from None
    assert site.grid is not None
    side = patch.kernel_size
    size = site.grid[0] * side[0], site.grid[1] * side[1]
    library = "timm" if site.family == "timm" else "transformers"
    kind = f"a {type(model).__name__} of {library} with softmax attention"
    names = _timm_names(model) if library == "timm" else _their_names(model.config, site.prefix)
    found = [block for block in blocks if block is not None]
    return TheirViT(name, model.eval(), patch, found, names, size, mean, std, kind, notes, site=site)


def _block(model: nn.Module, name: str) -> nn.Module | None:
    """Return the layer that an attention module is in: the outermost item of a list of modules around it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[: depth - 1])), (nn.ModuleList, nn.Sequential)):
            return model.get_submodule(".".join(parts[:depth]))
    return None


def _timm_names(model: nn.Module) -> tuple[str, ...]:
    registers = int(getattr(model, "num_reg_tokens", 0) or 0)
    others = int(getattr(model, "num_prefix_tokens", 0)) - registers
    return prefix_names(["[CLS]", "[DIST]"][:others], registers)


def _their_names(config: object, prefix: int) -> tuple[str, ...]:
    registers = int(getattr(config, "num_register_tokens", 0))
    return prefix_names(["[CLS]", "[DIST]"][: prefix - registers], registers)
