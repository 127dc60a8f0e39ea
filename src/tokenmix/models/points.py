"""Point clouds: the shell of PCT (Guo et al. 2020, arXiv 2012.09688) around any mixer that does not know the order.

Its classifier does not depend on the order of the points, and the labels of its segmenter move with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import Mixer, build_mixer
from ..mixers.parts.token_norm import LBR
from ..system.config import Json
from ..types import Options, Spec
from .blocks import check_form, complete_spec, cycle_specs
from .model import Model
from .point_sampling import farthest_points, gather_points, nearest_points

POOLS = ("max_mean", "max")
PROBE_TOKENS = 1024  # of a model that takes clouds of any size
PROBE = 2.0  # standard deviation of the weights in which a mixer shows whether it knows the order


@dataclass(frozen=True)
class PointsConfig(Json):
    """What both models of point clouds have in common, as JSON; the defaults are PCT's.

    Args:
        classes: of a classifier, its classes; of a segmenter, the categories of its clouds.
        mixers: specs, one per block or fewer to be repeated: causal=False, and blind to the order of the tokens.
        layers: number of blocks; None: one for each mixer.
        dim: features of a point in the blocks.
        lift: features after the first two layers.
        neighbours: k of each stage of neighbour embedding; (): none, the paper's naive PCT.
        samples: points that each stage keeps, as many numbers as there are neighbours; 0: all.
        fuse: features after the blocks have been concatenated.
        pool: what a whole cloud is read from: "max_mean", the largest and the mean of each feature, or "max".
        hidden: widths of the layers of the head.
        dropout: rate in the head.
    """

    classes: int
    mixers: tuple[Spec, ...] = ({"name": "pct_attention"},)
    layers: int | None = 4
    dim: int = 256
    lift: int = 64
    neighbours: tuple[int, ...] = (32, 32)
    samples: tuple[int, ...] = (512, 256)
    fuse: int = 1024
    pool: str = "max_mean"
    hidden: tuple[int, ...] = (512, 256)
    dropout: float = 0.5
    kind: ClassVar[str] = "point_classifier"

    def __post_init__(self) -> None:
        for name in ("mixers", "neighbours", "samples", "hidden"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        who, sizes = type(self).__name__, (self.dim, self.lift, self.fuse, self.classes, self.layers or 1, *self.hidden)
        if min(sizes) < 1 or not self.mixers:
            raise MixerError(
                f"{who}: dim, lift, fuse, classes, layers and hidden must be positive, and mixers not empty, got "
                + f"{', '.join(map(str, sizes))} and {len(self.mixers)} mixers."
            )
        if len(self.neighbours) != len(self.samples) or min((*self.neighbours, 1)) < 1 or min((*self.samples, 0)) < 0:
            raise MixerError(
                f"{who}: neighbours must be positive and samples at least 0, as many as each other, got "
                + f"{list(self.neighbours)} and {list(self.samples)}."
            )
        if self.pool not in POOLS or not 0 <= self.dropout < 1:
            raise MixerError(
                f"{who}: pool must be one of {', '.join(POOLS)} and dropout in [0, 1), got {self.pool!r} and "
                + f"{self.dropout}."
            )

    def specs(self) -> list[Spec]:
        """Return one mixer spec per layer."""
        return cycle_specs(self.mixers, self.layers)

    def least_points(self) -> int:
        """Return how many points a cloud must have."""
        had, least = None, 1
        for k, n in zip(self.neighbours, self.samples, strict=True):
            wanted = max(k, n)
            if had is None:
                least = max(least, wanted)
            elif wanted > had:
                raise MixerError(f"{type(self).__name__}: a stage asks for {wanted} of {had} points.")
            had = n or had
        return least


@dataclass(frozen=True)
class PointClassifierConfig(PointsConfig):
    """A classifier of clouds as JSON; see ``PointsConfig``. ``kind``: "point_classifier"."""


@dataclass(frozen=True)
class PointSegmenterConfig(PointsConfig):
    """A segmenter of clouds into parts as JSON. The fields not listed here are those of ``PointsConfig``.

    Args:
        parts: labels of the points.
        category: features of the cloud's category, which the model is told; 0: it is not told.
        samples: all 0: each point keeps its place.
    """

    samples: tuple[int, ...] = (0, 0)
    parts: int = 50
    category: int = 64
    kind: ClassVar[str] = "point_segmenter"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts < 2 or self.category < 0 or any(self.samples):
            raise MixerError(
                "PointSegmenterConfig: needs parts of at least 2, category of at least 0 and samples of 0, since every "
                + f"point has a label, got {self.parts}, {self.category} and {list(self.samples)}."
            )


class NeighbourEmbedding(nn.Module):
    """PCT's sampling and grouping: max over the k neighbours q of p of LBR(LBR([F(q) - F(p), F(p)])) (Eqs. 10 to 12).

    Args:
        features: width of F.
        out_features: width of the result.
        neighbours: k.
        samples: points chosen by farthest-point sampling; 0: all.
    """

    def __init__(self, features: int, out_features: int, *, neighbours: int, samples: int):
        super().__init__()
        self.neighbours, self.samples = neighbours, samples
        self.first = LBR(2 * features, out_features, bias=False)
        self.second = LBR(out_features, out_features, bias=False)

    def forward(self, points: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map points (B, N, 3) with features x (B, N, C) to fewer points (B, M, 3) with other features."""
        if self.samples:
            chosen = farthest_points(points, self.samples)
            centres, own = gather_points(points, chosen), gather_points(x, chosen)
        else:
            centres, own = points, x
        near = gather_points(x, nearest_points(centres, points, self.neighbours))  # (B, M, k, C)
        own = own[:, :, None].expand_as(near)
        pairs = torch.cat([near - own, own], -1)
        grouped = self.second(self.first(pairs.flatten(1, 2))).unflatten(1, pairs.shape[1:3])
        return centres, grouped.amax(2)


class PointBlock(nn.Module):
    """x + relu(BatchNorm(mixer(x))); a mixer that ends in both itself, as offset attention does, is x + mixer(x)."""

    def __init__(self, dim: int, spec: Spec, tokens: int):
        super().__init__()
        self.mixer = blind_mixer(dim, spec, tokens)
        self.last = None if getattr(self.mixer, "rectified", False) else LBR(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        mixed = self.mixer(x)
        return x + (mixed if self.last is None else self.last(mixed))


def blind_mixer(dim: int, spec: Spec, tokens: int) -> Mixer:
    """Build a mixer over sets; one whose outputs do not move with its tokens is refused.

    A copy with random weights mixes ``tokens`` tokens in two orders, in float64.
    """
    spec = complete_spec(spec, tokens)
    check_form("points", spec["name"], causal=False)
    mixer = build_mixer(dim=dim, causal=False, **spec)
    if mixer.max_len is None:
        weight = next(mixer.parameters(), None)
        if (weight is not None and weight.is_meta) or _ignores_order({"dim": dim, "causal": False} | spec, tokens):
            return mixer
    raise MixerError(
        f"points: {spec['name']} knows the order of its tokens, and a cloud has none; take a mixer that does not, such "
        + "as pct_attention, attention, external, hydra, aft_simple or linear, without positions."
    )


def _ignores_order(options: Options, tokens: int) -> bool:
    """Return whether the outputs of a mixer with random weights move with its tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(), torch.no_grad():
        probe = build_mixer(**options).cpu().double().eval()
        for parameter in probe.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
            parameter.copy_(PROBE * noise * parameter.shape[-1] ** -0.5)
        x = torch.randn(1, tokens, probe.dim, generator=generator, dtype=torch.float64, device="cpu")
        order = torch.randperm(tokens, generator=generator, device="cpu")
        here, there = probe(x)[:, order], probe(x[:, order])
    return torch.allclose(here, there, rtol=1e-6, atol=1e-6 * float(here.abs().max()))


class PointTrunk(nn.Module):
    """What both models begin with: two LBR, stages of neighbour embedding, two LBR, blocks, their concatenation, an LBR
    with slope 0.2.
    """

    def __init__(self, config: PointsConfig):
        super().__init__()
        n = len(config.neighbours)
        widths = [config.lift, *(max(config.dim >> (n - 1 - i), 1) for i in range(n))] if n else [config.dim]
        self.lift = nn.ModuleList([LBR(3, widths[0], bias=False), LBR(widths[0], widths[0], bias=False)])
        self.stages = nn.ModuleList(
            NeighbourEmbedding(a, b, neighbours=k, samples=m)
            for a, b, k, m in zip(widths[:-1], widths[1:], config.neighbours, config.samples, strict=True)
        )
        self.enter = nn.ModuleList(LBR(config.dim, config.dim, bias=False) for _ in range(2 if n else 0))
        self.least = config.least_points()
        tokens = next((m for m in reversed(config.samples) if m), max(self.least, PROBE_TOKENS))
        self.blocks = nn.ModuleList(PointBlock(config.dim, spec, tokens) for spec in config.specs())
        joined = (len(self.blocks) + 1) * config.dim
        self.fuse = LBR(joined, config.fuse, bias=False, slope=0.2)
        self.pool = config.pool
        self.width = config.fuse * (2 if config.pool == "max_mean" else 1)

    def forward(self, points: Tensor) -> Tensor:
        """Map points (B, N, 3) to features (B, M, fuse)."""
        if points.ndim != 3 or points.shape[-1] != 3 or not points.is_floating_point():
            raise MixerError(f"points: expects clouds (B, N, 3) of numbers, got {points.dtype} {tuple(points.shape)}.")
        if points.shape[1] < self.least:
            raise MixerError(
                f"points: this model needs clouds of at least {self.least} points (samples and neighbours), got "
                + f"{points.shape[1]}."
            )
        x = points
        for layer in self.lift:
            x = layer(x)
        for stage in self.stages:
            points, x = stage(points, x)
        found = [x]
        for layer in self.enter:
            x = layer(x)
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return self.fuse(torch.cat(found, -1))

    def pool_cloud(self, x: Tensor) -> Tensor:
        """Pool features (B, M, fuse) to one vector for each cloud, (B, width)."""
        return torch.cat([x.amax(1), x.mean(1)], -1) if self.pool == "max_mean" else x.amax(1)


class PointHead(nn.Module):
    """Layers with BatchNorm, relu and dropout, and a last linear one."""

    def __init__(self, width: int, config: PointsConfig, outputs: int):
        super().__init__()
        widths = [width, *config.hidden]
        self.layers = nn.ModuleList(LBR(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))
        self.last = nn.Linear(widths[-1], outputs)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, outputs)."""
        for layer in self.layers:
            x = F.dropout(layer(x), self.dropout, self.training)
        return self.last(x)


class PointModel(Model):
    """The base of both models, which sets their parameters."""

    head: PointHead
    max_len: int | None = None

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator, each layer as torch does."""
        for module in self.modules():
            if isinstance(module, (LBR, Mixer)) or (isinstance(module, nn.Linear) and module is self.head.last):
                module.reset_parameters()


class PointClassifier(PointModel):
    """The trunk, pooling over the points, and a head over classes; the order of the points does not matter."""

    config_class = PointClassifierConfig

    def __init__(self, config: PointClassifierConfig):
        super().__init__()
        self.config = config
        self.trunk = PointTrunk(config)
        self.head = PointHead(self.trunk.width, config, config.classes)

    def forward(self, points: Tensor) -> Tensor:
        """Map clouds (B, N, 3) to logits (B, classes)."""
        return self.head(self.trunk.pool_cloud(self.trunk(points))[None])[0]


class PointSegmenter(PointModel):
    """The trunk over all points, each beside the pooled cloud and its category, and a head over the labels of parts."""

    config_class = PointSegmenterConfig

    def __init__(self, config: PointSegmenterConfig):
        super().__init__()
        self.config = config
        self.trunk = PointTrunk(config)
        self.told = LBR(config.classes, config.category, bias=False, slope=0.2) if config.category else None
        self.head = PointHead(config.fuse + self.trunk.width + config.category, config, config.parts)

    def forward(self, points: Tensor, category: Tensor | None = None) -> Tensor:
        """Map clouds (B, N, 3) of categories (B,) to logits (B, N, parts); the logits move with the points."""
        x = self.trunk(points)
        about = [self.trunk.pool_cloud(x)]
        if self.told is not None:
            if category is None or category.shape != points.shape[:1]:
                raise MixerError(f"PointSegmenter: needs the category of each of {len(points)} clouds, or category=0.")
            about.append(self.told(F.one_hot(category, self.config.classes).to(x.dtype)[None])[0])
        return self.head(torch.cat([x, torch.cat(about, -1)[:, None].expand(-1, x.shape[1], -1)], -1))
