"""Pictures of a field: references, targets, what is drawn, differences, depths, turntables, meshes, and one page."""

from __future__ import annotations

import html
import math
from pathlib import Path

import torch
from torch import Tensor

from tokenmix import MixerError
from tokenmix.system.files import whole_file

from .model import TransHuman
from .renderer import rasterize, vertex_normals
from .scenes import Scene, View, camera_at
from .volume import density_grid, draw_image

SCALE = 3
"""Screen pixels along a side of a pixel."""


def to_pixels(image: Tensor) -> Tensor:
    """Return an image (3, H, W) or (H, W) in 0..1 as bytes (H, W, 3), enlarged."""
    image = image.expand(3, -1, -1) if image.ndim == 2 else image
    large = image.repeat_interleave(SCALE, 1).repeat_interleave(SCALE, 2)
    return (large.clamp(0, 1) * 255).round().byte().permute(1, 2, 0)


def save(image: Tensor, path: Path) -> None:
    """Write an image as PNG."""
    from PIL import Image

    with whole_file(path) as f:
        Image.fromarray(to_pixels(image).numpy()).save(f, "PNG")


def save_grid(rows: list[list[Tensor]], names: list[str], path: Path) -> None:
    """Write rows of images (3, H, W) as one PNG, with a name over each column."""
    from PIL import Image, ImageDraw, ImageFont

    cells = to_pixels(torch.cat([torch.cat(row, 2) for row in rows], 1))
    height, width = 26, cells.shape[1]
    whole = Image.new("RGB", (width, cells.shape[0] + height), "white")
    whole.paste(Image.fromarray(cells.numpy()), (0, height))
    draw = ImageDraw.Draw(whole)
    for i, name in enumerate(names):
        middle = (i + 0.5) * width / len(names)
        draw.text((middle, height / 2), name, fill="black", anchor="mm", font=ImageFont.load_default(15))
    with whole_file(path) as f:
        whole.save(f, "PNG")


def crop_to_body(images: list[Tensor], mask: Tensor) -> list[Tensor]:
    """Return the middle columns of images (3, H, W), half as wide, around a body."""
    width = mask.shape[1]
    middle = int(mask.any(0).nonzero().float().mean())
    left = min(max(middle - width // 4, 0), width - width // 2)
    return [image[:, :, left : left + width // 2] for image in images]


def shade_depth(depth: Tensor, opacity: Tensor) -> Tensor:
    """Return depths as grey: the nearest of the body is white."""
    body = opacity > 0.5
    if not body.any():
        return torch.zeros_like(depth)
    depth = depth / opacity.clamp_min(1e-6)  # of a ray that sees the body in part, too
    low, high = depth[body].min(), depth[body].max()
    return (1 - 0.8 * (depth - low) / (high - low + 1e-6)) * body


def comparison(model: TransHuman, scene: Scene, *, samples: int = 32) -> dict[str, Tensor]:
    """Return rows of images side by side: references, targets, drawn, difference, depth."""
    known = model.encode(scene)
    drawn = [draw_image(model, known, scene, view.camera, samples=samples) for view in scene.targets]

    def row(images: list[Tensor]) -> Tensor:
        return torch.cat([image.expand(3, -1, -1) if image.ndim == 2 else image for image in images], 2)

    return {
        "references": row([view.colours for view in scene.references]),
        "target": row([view.colours for view in scene.targets]),
        "drawn": row([d.colours for d in drawn]),
        "difference": row([(d.colours - v.colours).abs() for d, v in zip(drawn, scene.targets, strict=True)]),
        "depth": row([shade_depth(d.depth, d.opacity) for d in drawn]),
    }


def back_view(scene: Scene) -> View:
    """Return the true view from straight behind the reference cameras."""
    from .renderer import Image

    frame = scene.frame
    size = scene.targets[0].camera.size[0]
    camera = camera_at(math.pi, frame, size)
    image: Image = rasterize(frame.vertices, frame.body.faces, camera)
    colours = image.interpolate(scene.colours, frame.body.faces).permute(2, 0, 1)
    return View(camera, colours, image.face >= 0, image.depth)


def turntable(model: TransHuman, scene: Scene, path: Path, *, frames: int = 24, samples: int = 32) -> None:
    """Write an animation (WebP or GIF, by the ending) of the drawn body beside the true one, turning once."""
    from PIL import Image

    if path.suffix not in (".webp", ".gif"):
        raise MixerError(f"turntable: {path} must end in .webp or .gif.")
    known, size, shots = model.encode(scene), scene.targets[0].camera.size[0], []
    for i in range(frames):
        camera = camera_at(2 * math.pi * i / frames, scene.frame, size)
        drawn = draw_image(model, known, scene, camera, samples=samples).colours
        image = rasterize(scene.frame.vertices, scene.frame.body.faces, camera)
        truth = image.interpolate(scene.colours, scene.frame.body.faces).permute(2, 0, 1)
        shots.append(Image.fromarray(to_pixels(torch.cat([truth, drawn], 2)).numpy()))
        print(f"\rturntable: {i + 1} of {frames}", end="", flush=True)
    print()
    with whole_file(path) as f:
        kind = {".webp": "WEBP", ".gif": "GIF"}[path.suffix]
        shots[0].save(f, kind, save_all=True, append_images=shots[1:], duration=100, loop=0)


def extract_mesh(model: TransHuman, scene: Scene, *, cells: int = 96, level: float = 20.0) -> tuple[Tensor, Tensor]:
    """Return the vertices (in the body's frame) and faces of the surface where the density has a level (1 / m)."""
    from skimage.measure import marching_cubes

    density, low, high = density_grid(model, model.encode(scene), scene, cells=cells)
    if not float(density.min()) < level < float(density.max()):
        raise MixerError(
            f"extract_mesh: no surface of density {level}: it is between {float(density.min()):.3g} and "
            f"{float(density.max()):.3g}; give another level, or train longer."
        )
    vertices, faces, _, _ = marching_cubes(density.numpy(), level)
    scaled = torch.tensor(vertices.copy()) / (cells - 1) * (high - low) + low
    return scaled.float(), torch.tensor(faces.copy()).long()


def write_obj(vertices: Tensor, faces: Tensor, path: Path) -> None:
    """Write a mesh as Wavefront OBJ."""
    lines = [f"v {x:.5f} {y:.5f} {z:.5f}" for x, y, z in vertices.tolist()]
    lines += [f"f {a + 1} {b + 1} {c + 1}" for a, b, c in faces.tolist()]
    with whole_file(path) as f:
        f.write(("\n".join(lines) + "\n").encode())


def draw_mesh(vertices: Tensor, faces: Tensor, scene: Scene, angle: float = 0.4) -> Tensor:
    """Return a picture (3, H, W) of a mesh in the body's frame, shaded by its normals."""
    world = vertices @ scene.frame.rotation.T + scene.frame.translation
    camera = camera_at(angle, scene.frame, scene.targets[0].camera.size[0] * 2)
    image = rasterize(world, faces, camera)
    normals = vertex_normals(world, faces)
    light = torch.nn.functional.normalize(camera.centre - world.mean(0), dim=0)
    shade = (normals @ light).abs()[:, None].expand(-1, 3)
    return image.interpolate(shade, faces).permute(2, 0, 1)


def write_page(title: str, parts: list[tuple[str, str]], table: list[list[str]], path: Path) -> None:
    """Write one page: a table, and pictures with their captions.

    Args:
        parts: caption and file name of each picture, beside the page.
        table: its first row is the head.
    """
    head, *rows = table
    lines = ["<!doctype html><html lang=en><meta charset=utf-8>", f"<title>{html.escape(title)}</title>"]
    lines += ["<meta name=viewport content='width=device-width'><style>body{font:16px/1.5 sans-serif;max-width:60rem;"]
    lines += ["margin:2rem auto;padding:0 1rem}img{max-width:100%;image-rendering:pixelated;background:#000}"]
    lines += ["table{border-collapse:collapse}td,th{padding:.3rem .8rem;border-bottom:1px solid #ccc;text-align:right}"]
    lines += ["td:first-child,th:first-child{text-align:left}</style>", f"<h1>{html.escape(title)}</h1>"]
    if rows:
        cells = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
        cells += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
        lines += ["<table>", *(f"<tr>{row}</tr>" for row in cells), "</table>"]
    for caption, file in parts:
        lines += [f"<h2>{html.escape(caption)}</h2><img src='{html.escape(file)}' alt='{html.escape(caption)}'>"]
    with whole_file(path) as f:
        f.write("\n".join(lines).encode())
