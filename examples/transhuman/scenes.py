"""Scenes of the small body: somebody in a pose, seen by reference cameras at the front and by target cameras around."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmix import MixerError

from .body import Body, Identity, Posed, build_body, draw_identity, draw_pose, rotation_matrices
from .renderer import Camera, Image, find_visible, orbit, rasterize

FRONT = (-0.9, 0.0, 0.9)
"""Angles of the reference cameras in radians: none sees the back."""
DISTANCE, FOCAL, MIDDLE = 2.6, 1.25, 0.95
"""Metres from the cameras to the body; focal length by image width; height of the point that they look at."""
PLAIN = build_body()


@dataclass(frozen=True)
class Frame:
    """The body of a scene, before and after its global motion p -> rotation p + translation.

    Attributes:
        posed: the body in its own frame.
        rotation, translation: from there to the world.
        vertices: (N, 3), in the world.
    """

    body: Body
    posed: Posed
    rotation: Tensor
    translation: Tensor

    @property
    def vertices(self) -> Tensor:
        """The vertices (N, 3) in the world."""
        return self.posed.vertices @ self.rotation.T + self.translation

    def to_body(self, points: Tensor) -> Tensor:
        """Return points of the world (..., 3) in the body's frame."""
        return (points - self.translation) @ self.rotation

    def to(self, dtype: torch.dtype) -> Frame:
        """Return the frame with numbers of another dtype."""
        posed = Posed(self.posed.vertices.to(dtype), self.posed.rotations.to(dtype))
        return Frame(self.body.to(dtype), posed, self.rotation.to(dtype), self.translation.to(dtype))

    def move(self, rotation: Tensor, translation: Tensor) -> Frame:
        """Return the frame after the world has been moved by p -> rotation p + translation."""
        return replace(self, rotation=rotation @ self.rotation, translation=rotation @ self.translation + translation)


@dataclass(frozen=True)
class View:
    """An image and its camera.

    Attributes:
        colours: (3, H, W) in 0..1, black around the body.
        mask: (H, W), where the body is.
        depth: (H, W); infinity around the body.
    """

    camera: Camera
    colours: Tensor
    mask: Tensor
    depth: Tensor

    def __post_init__(self) -> None:
        for name, got in (("colours", self.colours.shape[1:]), ("mask", self.mask.shape), ("depth", self.depth.shape)):
            if tuple(got) != tuple(self.camera.size):
                raise MixerError(f"View: {name} has {tuple(got)} pixels, its camera {tuple(self.camera.size)}.")


@dataclass(frozen=True)
class Scene:
    """Somebody in a pose, with views.

    Attributes:
        references: what a model is given.
        targets: what it should draw.
        visible: (V, N), which vertices each reference camera sees.
        colours: (N, 3), the true colours of the vertices.
    """

    frame: Frame
    references: tuple[View, ...]
    targets: tuple[View, ...]
    visible: Tensor
    colours: Tensor

    @property
    def unseen(self) -> Tensor:
        """Which vertices (N,) on the surface no reference camera sees."""
        return ~self.visible.any(0) & self.frame.body.outside

    def with_references(self, kept: tuple[int, ...]) -> Scene:
        """Return the scene with some of its reference views only."""
        if not kept or max(kept) >= len(self.references):
            raise MixerError(f"with_references: the scene has views 0 to {len(self.references) - 1}, got {kept}.")
        views = tuple(self.references[i] for i in kept)
        return replace(self, references=views, visible=self.visible[list(kept)])


def build_frame(identity: Identity, angles: Tensor, yaw: float = 0.0) -> Frame:
    """Pose somebody, turned by an angle around the vertical axis."""
    body = build_body(identity.shape)
    rotation = rotation_matrices(torch.tensor([0.0, yaw, 0.0]))
    lowest = body.pose(angles).vertices[:, 1].min()
    return Frame(body, body.pose(angles), rotation, torch.tensor([0.0, -float(lowest), 0.0]))


def camera_at(angle: float, frame: Frame, size: int, height: float = 0.15) -> Camera:
    """Return a camera on the circle around a body; angle 0 sees its front."""
    target = frame.translation + frame.rotation @ torch.tensor([0.0, MIDDLE, 0.0])
    yaw = math.atan2(float(frame.rotation[0, 2]), float(frame.rotation[2, 2]))
    return orbit(angle + yaw, target, distance=DISTANCE, height=height, focal=FOCAL * size, size=size)


def draw_view(frame: Frame, identity: Identity, camera: Camera) -> View:
    """Draw the true image of a body."""
    image: Image = rasterize(frame.vertices, frame.body.faces, camera)
    mask = image.face >= 0
    places = image.interpolate(PLAIN.rest, frame.body.faces)
    colours = identity.clothes.paint(places) * mask[..., None]
    return View(camera, colours.permute(2, 0, 1), mask, image.depth)


def draw_scene(
    person: int, pose: int, *, size: int = 64, targets: int = 6, angles: tuple[float, ...] = FRONT, seed: int = 0
) -> Scene:
    """Draw a scene: somebody and a pose by their numbers, reference views at given angles, targets all around.

    Target cameras stand at equal distances around the body, from a random angle on.
    """
    identity = draw_identity(person)
    g = torch.Generator().manual_seed((person * 7919 + pose) * 31 + seed)
    turn, first = (float(torch.rand((), generator=g)) * 2 * math.pi for _ in range(2))
    frame = build_frame(identity, draw_pose(pose), turn)
    references = tuple(draw_view(frame, identity, camera_at(angle, frame, size)) for angle in angles)
    around = [first + 2 * math.pi * i / targets for i in range(targets)]
    seen = tuple(draw_view(frame, identity, camera_at(angle, frame, size)) for angle in around)
    visible = torch.stack([find_visible(frame.vertices, frame.body.faces, view.camera) for view in references])
    return Scene(frame, references, seen, visible & frame.body.outside, identity.clothes.paint(PLAIN.rest))
