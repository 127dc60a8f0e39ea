"""Images of a field: samples along rays within the body's box, and their colours from front to back (NeRF)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmix import MixerError

from .model import Encoded, TransHuman
from .renderer import Camera
from .scenes import Frame, Scene

REACH = 0.09
"""Metres from the nearest vertex beyond which the density is zero: clothes of these bodies are painted on."""


@dataclass(frozen=True)
class Drawn:
    """What rays show.

    Attributes:
        colours: (R, 3), on black.
        opacity: (R,) in 0..1.
        depth: (R,), mean distance along the ray, weighted as the colours.
    """

    colours: Tensor
    opacity: Tensor
    depth: Tensor


def composite(density: Tensor, colours: Tensor, distances: Tensor, steps: Tensor) -> Drawn:
    """Sum the colours of samples from front to back.

    alpha_i = 1 - exp(-density_i step_i), T_i = prod_{j < i} (1 - alpha_j), colour = sum_i T_i alpha_i colour_i.

    Args:
        density: (R, S).
        colours: (R, S, 3).
        distances: (R, S), of the samples along their ray.
        steps: (R, S) or (R, 1), lengths in metres.
    """
    passed = -(density * steps)
    before = (passed.cumsum(1) - passed).exp()
    weights = before * -torch.expm1(passed)
    return Drawn((weights[..., None] * colours).sum(1), weights.sum(1), (weights * distances).sum(1))


def cross_box(origin: Tensor, directions: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return where rays (R, 3) from an origin enter and leave a box; a ray that misses it leaves before it enters."""
    safe = torch.where(directions.abs() < 1e-9, torch.full_like(directions, 1e-9), directions)
    first, second = (low - origin) / safe, (high - origin) / safe
    return torch.minimum(first, second).amax(-1).clamp_min(0), torch.maximum(first, second).amin(-1)


def body_box(frame: Frame, margin: float = 0.06) -> tuple[Tensor, Tensor]:
    """Return the corners of the box around a body in its own frame."""
    posed = frame.posed.vertices
    return posed.amin(0) - margin, posed.amax(0) + margin


def near_body(frame: Frame, points: Tensor) -> Tensor:
    """Return which points (P,) in the body's frame are within ``REACH`` of a vertex on its surface."""
    surface = frame.posed.vertices[frame.body.outside].to(points)[::3]
    return torch.cdist(points, surface).amin(1) < REACH


def draw_rays(
    model: TransHuman,
    encoded: Encoded,
    scene: Scene,
    camera: Camera,
    pixels: Tensor,
    *,
    samples: int,
    generator: torch.Generator | None = None,
) -> Drawn:
    """Draw the rays through pixels (R, 2) of a camera.

    Args:
        samples: equal steps of a ray within the body's box.
        generator: places each sample at random within its step, as in training; None: in its middle.
    """
    frame = scene.frame
    origin, directions = camera.rays(pixels)
    low, high = body_box(frame)
    enter, leave = cross_box(frame.to_body(origin), directions @ frame.rotation, low, high)
    meets = leave > enter
    step = ((leave - enter) / samples).clamp_min(0)[:, None]
    jitter = (
        torch.full((len(pixels), samples), 0.5)
        if generator is None
        else torch.rand(len(pixels), samples, generator=generator)
    ).to(pixels)
    distances = enter[:, None] + (torch.arange(samples).to(pixels) + jitter) * step
    points = origin + distances[..., None] * directions[:, None]
    with torch.no_grad():
        kept = near_body(frame, frame.to_body(points).flatten(0, 1)).unflatten(0, points.shape[:2]) & meets[:, None]
    density = points.new_zeros(points.shape[:2])
    colours = torch.zeros_like(points)
    if kept.any():
        ahead = directions[:, None].expand_as(points)[kept]
        found, shade = model(encoded, scene, points[kept], ahead)
        density = density.masked_scatter(kept, found)
        colours = colours.masked_scatter(kept[..., None].expand_as(colours), shade)
    return composite(density, colours, distances, step)


def pixel_centres(size: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the centres x, y (H W, 2) of the pixels of an image, row by row."""
    y, x = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1).to(dtype) + 0.5


@torch.no_grad()
def draw_image(
    model: TransHuman, encoded: Encoded, scene: Scene, camera: Camera, *, samples: int = 32, chunk: int = 1024
) -> Drawn:
    """Draw a whole image: colours (3, H, W), opacity and depth (H, W)."""
    if samples < 1:
        raise MixerError(f"draw_image: samples must be 1 or more, got {samples}.")
    parts = [
        draw_rays(model, encoded, scene, camera, pixels, samples=samples)
        for pixels in pixel_centres(camera.size, camera.rotation.dtype).split(chunk)
    ]
    colours = torch.cat([part.colours for part in parts]).T.unflatten(1, camera.size)
    opacity, depth = (
        torch.cat([getattr(part, name) for part in parts]).unflatten(0, camera.size) for name in ("opacity", "depth")
    )
    return Drawn(colours.clamp(0, 1), opacity, depth)


def draw_patches(mask: Tensor, *, patches: int, side: int, share: float, generator: torch.Generator) -> Tensor:
    """Return pixel indices (patches side^2,) of square patches of an image: around the body, or anywhere.

    Args:
        mask: (H, W), where the body is.
        share: of the patches that are centred on a pixel of the body.
    """
    height, width = mask.shape
    if side > min(height, width):
        raise MixerError(f"draw_patches: patches of {side} pixels do not fit into {height} x {width}.")
    body = mask.flatten().nonzero()[:, 0]

    def corners() -> Iterator[int]:
        for _ in range(patches):
            on_body = len(body) and float(torch.rand((), generator=generator)) < share
            from_list = body if on_body else torch.arange(height * width)
            middle = int(from_list[int(torch.randint(len(from_list), (), generator=generator))])
            top = min(max(middle // width - side // 2, 0), height - side)
            left = min(max(middle % width - side // 2, 0), width - side)
            yield top * width + left

    inside = (torch.arange(side)[:, None] * width + torch.arange(side)).flatten()
    return torch.cat([corner + inside for corner in corners()])


@torch.no_grad()
def colour_vertices(model: TransHuman, encoded: Encoded, scene: Scene, kept: Tensor, *, chunk: int = 4096) -> Tensor:
    """Return the colours (M, 3) of the field at chosen vertices (N,), seen from straight ahead of each."""
    from .renderer import vertex_normals

    vertices = scene.frame.vertices
    normals = vertex_normals(vertices, scene.frame.body.faces)[kept]
    parts = zip(vertices[kept].split(chunk), normals.split(chunk), strict=True)
    found = [model(encoded, scene, points, -normal)[1] for points, normal in parts]
    return torch.cat(found) if found else vertices.new_zeros(0, 3)


@torch.no_grad()
def density_grid(
    model: TransHuman, encoded: Encoded, scene: Scene, *, cells: int = 96
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the density on a grid over the body's box (x, y, z), and the box's corners in the body's frame."""
    low, high = body_box(scene.frame)
    sides = [torch.linspace(float(a), float(b), cells) for a, b in zip(low, high, strict=True)]
    points = torch.stack(torch.meshgrid(*sides, indexing="ij"), -1).flatten(0, 2)
    found = torch.zeros(len(points))
    for start in range(0, len(points), 8192):
        part = points[start : start + 8192]
        kept = near_body(scene.frame, part)
        if kept.any():
            world = part[kept] @ scene.frame.rotation.T + scene.frame.translation
            found[start : start + 8192][kept] = model(encoded, scene, world, torch.zeros_like(world))[0]
    return found.view(cells, cells, cells), low, high
