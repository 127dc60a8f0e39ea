"""TransHuman (Pan et al. 2023, arXiv 2307.12291): tokens of a painted body, mixed in the canonical pose, read in 3-D.

1. TransHE: image features are painted on the vertices that a view sees, the others are zero; the mean of a cluster of
   vertices is a token; a stack of blocks around any bidirectional mixer lets the tokens of a view talk to each other.
2. DPaRF: a point reads the K nearest clusters of the posed body, each in that cluster's own turned coordinates.
3. FDI: the point's representation attends the features of the pixels that it projects to.

Deviations from the paper: group norm in place of batch norm in the image encoder; view directions are turned into the
body's frame, so that colour too does not depend on where the body stands; a softplus in place of the ReLU of the
density, which a small model may never leave; the widths of the last layers, which the paper does not state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix import MixerError
from tokenmix.models.blocks import Block

from .encodings import encode
from .renderer import Camera
from .scenes import Frame, Scene

KINDS = ("tokens", "none", "voxels", "convolution")
PLACE, DIRECTION = 10, 4
"""Frequencies of the local place and of the view's direction: 63 and 27 numbers."""
BOX = 1.5
"""Half the side in metres of the box around the canonical pose, whose places are encoded in -1..1."""


@dataclass(frozen=True)
class TransHumanConfig:
    """Sizes of the model.

    Attributes:
        mixer: the mixer of the tokens, as JSON.
        kind: "tokens", or a baseline: "none" (features of pixels alone), "voxels" (painted vertices in a grid around
            the posed body, 3-D convolutions), "convolution" (tokens in a grid around the canonical body, 3-D
            convolutions in place of the mixer).
        clusters: number of tokens.
        neighbours: clusters that a point reads, K.
        temperature: of the weights by distance, in metres.
        dim: features of a token, a multiple of 6.
        depth: blocks.
        image: width of the image encoder; a pixel has 4 of it and ``lift`` features.
        lift: features that a pixel's colours become by themselves.
        stride: of the first convolution; with 2, a pooling follows, as in ResNets.
        width: features of a point.
        keys: features of queries and keys over the views.
        cells: cells along the sides of the grids of the baselines.
    """

    mixer: dict[str, Any]
    kind: Literal["tokens", "none", "voxels", "convolution"] = "tokens"
    clusters: int = 128
    neighbours: int = 7
    temperature: float = 0.5
    dim: int = 96
    depth: int = 4
    image: int = 16
    lift: int = 16
    stride: int = 1
    width: int = 128
    keys: int = 64
    cells: int = 16

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise MixerError(f"TransHumanConfig: kind={self.kind!r} is unknown; choose one of {', '.join(KINDS)}.")
        if self.dim % 6:
            raise MixerError(
                f"TransHumanConfig: dim must be a multiple of 6, sine and cosine of x, y, z; got {self.dim}."
            )
        if not 1 <= self.neighbours <= self.clusters:
            raise MixerError(f"TransHumanConfig: neighbours must be 1 to {self.clusters}, got {self.neighbours}.")


PAPER = TransHumanConfig(
    {"name": "attention", "heads": 3, "qkv_bias": True},
    clusters=300,
    dim=192,
    depth=12,
    image=64,
    lift=128,
    stride=2,
    width=256,
    keys=128,
)
"""The paper's sizes, as far as it and its figures state them."""
PAPER_PARAMETERS = 6_080_000
"""Table 6 of the paper."""


@dataclass(frozen=True)
class Encoded:
    """What a model knows of a scene.

    Attributes:
        pixels: (V, C, h, w), features of the reference images.
        tokens: (V, clusters, dim), (V, dim, cells, cells, cells) of voxels, or None.
        low, high: corners of the voxels' box.
    """

    pixels: Tensor
    tokens: Tensor | None
    low: Tensor
    high: Tensor


class Residual(nn.Module):
    """Two convolutions and a way past them, as in ResNet-18."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(min(8, after), after) for _ in range(2)])
        self.past = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(min(8, after), after))
            if before != after
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (V, C, h, w) to (V, C', h', w')."""
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.past(x))


class ImageEncoder(nn.Module):
    """The first convolution and two stages of ResNet-18, joined at the resolution of the first, and lifted colours."""

    def __init__(self, config: TransHumanConfig):
        super().__init__()
        width, stride = config.image, config.stride
        self.stride = stride
        self.first = nn.Conv2d(3, width, 7, stride, 3, bias=False)
        self.norm = nn.GroupNorm(min(8, width), width)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(Residual(width, width, 1), Residual(width, width, 1)),
                nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1)),
            ]
        )
        self.lift = nn.Conv2d(3, config.lift, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (V, 3, H, W) to features (V, 4 image + lift, H, W)."""
        size = images.shape[-2:]
        maps = [F.relu(self.norm(self.first(images)))]
        x = F.max_pool2d(maps[0], 3, 2, 1) if self.stride == 2 else maps[0]
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        joined = [F.interpolate(m, size, mode="bilinear", align_corners=False) for m in maps]
        return torch.cat([*joined, self.lift(images)], 1)


class Grid(nn.Module):
    """3-D convolutions over a grid of cells at three resolutions, so that every cell hears of the whole body.

    They have half of the features, and with that about the parameters of four blocks of a mixer.
    """

    def __init__(self, dim: int):
        super().__init__()
        dim, whole = dim // 2, dim
        self.enter, self.leave = nn.Conv3d(whole, dim, 1), nn.Conv3d(dim, whole, 1)
        self.before = nn.ModuleList(nn.Conv3d(dim, dim, 3, padding=1) for _ in range(3))
        self.down = nn.ModuleList(nn.Conv3d(dim, dim, 3, stride=2, padding=1) for _ in range(2))
        self.after = nn.ModuleList(nn.Conv3d(dim, dim, 3, padding=1) for _ in range(2))

    def forward(self, cells: Tensor) -> Tensor:
        """Map (V, dim, n, n, n) to the same."""
        x = self.enter(cells)
        x = x + F.relu(self.before[0](x))
        fine = [x]
        for down, layer in zip(self.down, self.before[1:], strict=True):
            x = F.relu(down(x))
            x = x + F.relu(layer(x))
            fine.append(x)
        for layer, finer in zip(self.after, reversed(fine[:-1]), strict=True):
            x = finer + F.interpolate(x, finer.shape[2:], mode="trilinear", align_corners=False)
            x = x + F.relu(layer(x))
        return cells + self.leave(x)


class TransHuman(nn.Module):
    """A field of density and colour around a body, from a few images of it.

    Args:
        config: sizes.
        labels: (N,), the cluster of each vertex of the body.
        rest: (N, 3), the vertices in the canonical pose, on which the clusters were made.
    """

    labels: Tensor
    members: Tensor
    centres: Tensor

    def __init__(self, config: TransHumanConfig, labels: Tensor, rest: Tensor):
        super().__init__()
        self.config = config
        features, dim, width, keys = 4 * config.image + config.lift, config.dim, config.width, config.keys
        self.register_buffer("labels", labels, persistent=False)
        counts = torch.bincount(labels, minlength=config.clusters)
        if len(counts) != config.clusters or not counts.all():
            raise MixerError(f"TransHuman: labels must name {config.clusters} clusters, each with a vertex.")
        self.register_buffer("members", counts.to(rest), persistent=False)
        self.register_buffer("centres", cluster_means(rest, labels, config.clusters), persistent=False)
        self.images = ImageEncoder(config)
        self.reduce = nn.Linear(features, dim)
        self.blocks = nn.ModuleList()
        self.grid: Grid | None = None
        if config.kind == "tokens":
            for _ in range(config.depth):
                self.blocks.append(Block(dim, config.mixer, causal=False, max_len=config.clusters, norm_eps=1e-6))
        elif config.kind != "none":
            self.grid = Grid(dim)
        self.norm = nn.LayerNorm(dim)
        self.body = nn.Linear(dim + 3 + 6 * PLACE, width)
        self.pixel = nn.Linear(features, width)
        self.body_keys, self.body_values = nn.Linear(width, keys), nn.Linear(width, width)
        self.pixel_keys, self.pixel_values = nn.Linear(width, keys), nn.Linear(width, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.density = nn.Linear(width, 1)
        self.view = nn.Linear(width + 3 + 6 * DIRECTION, width // 2)
        self.colour = nn.Linear(width // 2, 3)
        for layer in (self.body, self.pixel, self.body_values, self.pixel_values, *self.layers, self.view):
            nn.init.kaiming_normal_(layer.weight)  # torch's own start loses colours on their way through seven layers

    # TransHE

    def encode(self, scene: Scene) -> Encoded:
        """Return what the model knows after it has seen the reference views of a scene."""
        images = torch.stack([view.colours for view in scene.references]).to(self.reduce.weight)
        pixels = self.images(images * 2 - 1)
        posed = scene.frame.posed.vertices
        low, high = posed.amin(0) - 0.1, posed.amax(0) + 0.1
        if self.config.kind == "none":
            return Encoded(pixels, None, low, high)
        painted = self.reduce(self.paint(pixels, scene))  # (V, N, dim)
        painted = painted * scene.visible[..., None]  # what a view does not see is for the tokens to fill in
        if self.config.kind == "voxels":
            return Encoded(pixels, self._voxels(painted, posed, low, high), low, high)
        tokens = cluster_means(painted, self.labels, self.config.clusters)
        places = encode(self.centres / BOX, self.config.dim // 6, raw=False, pi=True)
        tokens = tokens + places.to(tokens)
        if self.grid is not None:
            low, high = self.centres.amin(0) - 0.1, self.centres.amax(0) + 0.1
            cells = self.grid(scatter_to_grid(tokens, self.centres, low, high, self.config.cells))
            return Encoded(pixels, self.norm(sample_grid(cells, self.centres, low, high)), low, high)
        for block in self.blocks:
            tokens = block(tokens)
        return Encoded(pixels, self.norm(tokens), low, high)

    def paint(self, pixels: Tensor, scene: Scene) -> Tensor:
        """Return the features (V, N, C) of the pixels that the vertices project to."""
        vertices = scene.frame.vertices.to(pixels)
        return torch.stack(
            [sample_pixels(p, view.camera, vertices) for p, view in zip(pixels, scene.references, strict=True)]
        )

    def _voxels(self, painted: Tensor, posed: Tensor, low: Tensor, high: Tensor) -> Tensor:
        assert self.grid is not None
        return self.grid(
            scatter_to_grid(painted, posed.to(painted), low.to(painted), high.to(painted), self.config.cells)
        )

    # DPaRF

    def read_body(self, encoded: Encoded, frame: Frame, points: Tensor) -> Tensor:
        """Return the representation (P, V, dim + 63) of points (P, 3) in the body's frame.

        sum_k w_k [token_k; PE(R_k^T (p - c_k))], w = softmax_k(-|p - c_k| / T), over the K nearest clusters.
        """
        config, views = self.config, len(encoded.pixels)
        if encoded.tokens is None:
            nothing = points.new_zeros(len(points), views, config.dim)
            return torch.cat([nothing, points.new_zeros(len(points), views, 3 + 6 * PLACE)], -1)
        if config.kind == "voxels":
            found = self.norm(sample_grid(encoded.tokens, points, encoded.low, encoded.high)).transpose(0, 1)
            place = encode(points, PLACE, raw=True, pi=False)
            return torch.cat([found, place[:, None].expand(-1, views, -1)], -1)
        centres = cluster_means(frame.posed.vertices.to(points), self.labels, config.clusters)
        turns = cluster_means(frame.posed.rotations.flatten(1).to(points), self.labels, config.clusters)
        away, nearest = torch.cdist(points, centres).topk(config.neighbours, largest=False)
        weights = (-away / config.temperature).softmax(-1)
        offset = points[:, None] - centres[nearest]
        local = torch.einsum("pka,pkab->pkb", offset, turns.unflatten(1, (3, 3))[nearest])
        place = (weights[..., None] * encode(local, PLACE, raw=True, pi=False)).sum(1)
        tokens = torch.einsum("pk,vpkd->pvd", weights, encoded.tokens[:, nearest])
        return torch.cat([tokens, place[:, None].expand(-1, views, -1)], -1)

    # FDI and the field

    def forward(self, encoded: Encoded, scene: Scene, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the density (P,) and the colour (P, 3) at points of the world, seen along directions (P, 3)."""
        frame = scene.frame
        body = F.relu(self.body(self.read_body(encoded, frame, frame.to_body(points))))
        pixels = torch.stack(
            [sample_pixels(p, v.camera, points) for p, v in zip(encoded.pixels, scene.references, strict=True)], 1
        )
        pixels = F.relu(self.pixel(pixels))  # (P, V, width)
        scores = self.body_keys(body) @ self.pixel_keys(pixels).mT / math.sqrt(self.config.keys)
        x = self.body_values(body) + scores.softmax(-1) @ self.pixel_values(pixels)
        for layer in self.layers:
            x = F.relu(layer(x))
        x = x.mean(1)
        density = F.softplus(self.density(x)[:, 0] - 1)
        ahead = encode(directions @ frame.rotation, DIRECTION, raw=True, pi=False)
        colour = self.colour(F.relu(self.view(torch.cat([x, ahead], -1)))).sigmoid()
        return density, colour


def cluster_means(values: Tensor, labels: Tensor, clusters: int) -> Tensor:
    """Return the means (..., clusters, C) of values (..., N, C) by their labels (N,)."""
    total = values.new_zeros(*values.shape[:-2], clusters, values.shape[-1]).index_add(-2, labels, values)
    return total / torch.bincount(labels, minlength=clusters).to(values)[:, None]


def make_clusters(rest: Tensor, clusters: int, *, seed: int = 0) -> Tensor:
    """Return the cluster (N,) of each vertex of the canonical pose, by k-means of scikit-learn."""
    from sklearn.cluster import KMeans

    if not 1 <= clusters <= len(rest):
        raise MixerError(
            f"make_clusters: a body of {len(rest)} vertices has 1 to {len(rest)} clusters, not {clusters}."
        )
    found = KMeans(clusters, n_init=1, random_state=seed).fit(rest.double().numpy())
    return torch.tensor(found.labels_).long()


def sample_pixels(features: Tensor, camera: Camera, points: Tensor) -> Tensor:
    """Return the features (..., C) of a map (C, h, w) at the pixels that points (..., 3) project to, bilinearly."""
    places, _ = camera.project(points)
    size = torch.tensor([camera.size[1], camera.size[0]]).to(places)
    grid = (places / size * 2 - 1).reshape(1, 1, -1, 2)
    found = F.grid_sample(features[None], grid.to(features), align_corners=False, padding_mode="border")
    return found[0, :, 0].T.unflatten(0, points.shape[:-1])


def scatter_to_grid(values: Tensor, places: Tensor, low: Tensor, high: Tensor, cells: int) -> Tensor:
    """Return means (V, C, cells, cells, cells) of values (V, N, C) by the cell of their place (N, 3); 0 elsewhere."""
    index = ((places - low) / (high - low) * cells).long().clamp(0, cells - 1)
    flat = (index[:, 2] * cells + index[:, 1]) * cells + index[:, 0]
    total = values.new_zeros(len(values), cells**3, values.shape[-1]).index_add(1, flat, values)
    counts = torch.bincount(flat, minlength=cells**3).clamp_min(1).to(values)
    return (total / counts[:, None]).mT.unflatten(-1, (cells, cells, cells))


def sample_grid(cells: Tensor, places: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the values (V, P, C) of a grid (V, C, n, n, n) at places (P, 3), by trilinear interpolation."""
    at = ((places - low) / (high - low) * 2 - 1).to(cells)
    grid = at[None, :, None, None].expand(len(cells), -1, -1, -1, -1)
    found = F.grid_sample(cells, grid, align_corners=False, padding_mode="border")
    return found[..., 0, 0].mT


def build_on_meta(config: TransHumanConfig) -> TransHuman:
    """Return a model without memory for its tensors."""
    labels, rest = torch.arange(config.clusters), torch.zeros(config.clusters, 3)
    with torch.device("meta"):
        return TransHuman(config, labels, rest)


def count_parameters(config: TransHumanConfig) -> dict[str, int]:
    """Return the parameters of each part, from a model on the meta device."""
    children = build_on_meta(config).named_children()
    parts = {name: sum(p.numel() for p in child.parameters()) for name, child in children}
    return {name: n for name, n in parts.items() if n}
