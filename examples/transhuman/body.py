"""A small articulated body: 24 joints, a capsule for each bone, linear blend skinning, clothes as functions of place.

It needs no model file. ``read_body`` reads one with the arrays of SMPL's files instead, from a path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix import MixerError

JOINTS = 24
PARENTS = (-1, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 12, 13, 14, 16, 17, 18, 19, 20, 21)
NAMES = (
    "pelvis", "left_hip", "right_hip", "spine1", "left_knee", "right_knee", "spine2", "left_ankle", "right_ankle",
    "spine3", "left_foot", "right_foot", "neck", "left_collar", "right_collar", "head", "left_shoulder",
    "right_shoulder", "left_elbow", "right_elbow", "left_wrist", "right_wrist", "left_hand", "right_hand",
)  # fmt: skip


class Bone(NamedTuple):
    """A capsule from a joint to its tip in metres: y is up, z is forward, x is to the body's left.

    Attributes:
        radii: at the joint and at the tip.
        flat: factor of the radius along z.
    """

    joint: tuple[float, float, float]
    tip: tuple[float, float, float]
    radii: tuple[float, float]
    flat: float = 1.0


LEFT = {  # bones with a mirror image, by the index of the left joint; the right one is next
    1: Bone((0.09, 0.87, 0.0), (0.10, 0.50, 0.0), (0.085, 0.060)),
    4: Bone((0.10, 0.48, 0.0), (0.10, 0.11, -0.01), (0.060, 0.042)),
    7: Bone((0.10, 0.09, -0.02), (0.11, 0.05, 0.08), (0.042, 0.042)),
    10: Bone((0.11, 0.045, 0.09), (0.11, 0.04, 0.15), (0.040, 0.034)),
    13: Bone((0.06, 1.38, 0.0), (0.15, 1.39, 0.0), (0.070, 0.062)),
    16: Bone((0.17, 1.40, 0.0), (0.41, 1.40, 0.0), (0.054, 0.043)),
    18: Bone((0.43, 1.40, 0.0), (0.65, 1.40, 0.0), (0.042, 0.033)),
    20: Bone((0.67, 1.40, 0.0), (0.74, 1.40, 0.0), (0.033, 0.034)),
    22: Bone((0.76, 1.40, 0.0), (0.83, 1.40, 0.0), (0.032, 0.024)),
}
MIDDLE = {
    0: Bone((0.0, 0.95, 0.0), (0.0, 1.02, 0.0), (0.135, 0.120), 0.8),
    3: Bone((0.0, 1.05, 0.0), (0.0, 1.14, 0.0), (0.120, 0.125), 0.8),
    6: Bone((0.0, 1.17, 0.0), (0.0, 1.24, 0.0), (0.128, 0.135), 0.75),
    9: Bone((0.0, 1.26, 0.0), (0.0, 1.36, 0.0), (0.140, 0.110), 0.72),
    12: Bone((0.0, 1.45, 0.0), (0.0, 1.52, 0.01), (0.052, 0.050)),
    15: Bone((0.0, 1.57, 0.01), (0.0, 1.66, 0.01), (0.085, 0.095)),
}
AROUND, ALONG, CAP = 14, 4, 3
"""Vertices around a capsule, rings along it, and rings of each cap below its pole."""


def _bones() -> list[Bone]:
    bones = dict(MIDDLE)
    for index, bone in LEFT.items():
        flip = torch.tensor([-1.0, 1.0, 1.0])
        joint, tip = ((torch.tensor(p) * flip).tolist() for p in (bone.joint, bone.tip))
        bones |= {index: bone, index + 1: bone._replace(joint=tuple(joint), tip=tuple(tip))}
    return [bones[index] for index in range(JOINTS)]


BONES = _bones()


@dataclass(frozen=True)
class Posed:
    """A body in a pose, in its own frame: before the global rotation and translation.

    Attributes:
        vertices: (N, 3).
        rotations: (N, 3, 3), the rotations of the joints, averaged with the weights of a vertex.
    """

    vertices: Tensor
    rotations: Tensor


@dataclass(frozen=True)
class Body:
    """A triangle mesh with a skeleton.

    Attributes:
        rest: (N, 3), vertices in the canonical pose.
        faces: (F, 3), indices of vertices, counterclockwise from outside.
        weights: (N, 24), how much a vertex follows each joint.
        joints: (24, 3), joints in the canonical pose.
        outside: (N,) whether a vertex lies on the surface, and not inside of another bone.
    """

    rest: Tensor
    faces: Tensor
    weights: Tensor
    joints: Tensor
    outside: Tensor

    def pose(self, angles: Tensor) -> Posed:
        """Return the body with its joints rotated by axis times angle (24, 3), in radians, each in its parent's frame.

        Linear blend skinning: v' = sum_j w_j (A_j v + t_j).
        """
        if angles.shape != (JOINTS, 3):
            raise MixerError(f"Body.pose: a pose has {JOINTS} joints x 3 numbers, got {tuple(angles.shape)}.")
        if not torch.isfinite(angles).all():
            joint = NAMES[int((~torch.isfinite(angles)).any(1).nonzero()[0])]
            raise MixerError(f"Body.pose: the angles must be finite, those of {joint} are not.")
        local = rotation_matrices(angles.to(self.rest))
        turned, moved = [local[0]], [self.joints[0]]
        for j in range(1, JOINTS):
            parent = PARENTS[j]
            turned.append(turned[parent] @ local[j])
            moved.append(moved[parent] + turned[parent] @ (self.joints[j] - self.joints[parent]))
        rotations, places = torch.stack(turned), torch.stack(moved)
        shifts = places - (rotations @ self.joints[..., None])[..., 0]
        blended = torch.einsum("nj,jab->nab", self.weights, rotations)
        vertices = (blended @ self.rest[..., None])[..., 0] + self.weights @ shifts
        return Posed(vertices, blended)

    def to(self, dtype: torch.dtype) -> Body:
        """Return the body with numbers of another dtype."""
        return Body(self.rest.to(dtype), self.faces, self.weights.to(dtype), self.joints.to(dtype), self.outside)


def rotation_matrices(angles: Tensor) -> Tensor:
    """Return the rotations (..., 3, 3) by axis times angle (..., 3): Rodrigues' formula."""
    angle = angles.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    x, y, z = (angles / angle).unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
    sine, cosine = angle[..., None].sin(), angle[..., None].cos()
    return torch.eye(3).to(angles) + sine * cross + (1 - cosine) * (cross @ cross)


@dataclass(frozen=True)
class Shape:
    """Sizes of a body, each a factor of the standard one."""

    height: float = 1.0
    limbs: float = 1.0
    torso: float = 1.0
    head: float = 1.0

    def width(self, joint: int) -> float:
        """Return the factor of the radii of a joint's bone."""
        if NAMES[joint] in ("neck", "head"):
            return self.head
        return self.torso if joint in MIDDLE or "collar" in NAMES[joint] else self.limbs


def build_body(shape: Shape = Shape()) -> Body:  # noqa: B008  # a frozen value
    """Build the body of capsules in its canonical pose, with the arms to the sides."""
    vertices: list[Tensor] = []
    faces, owners = [], []
    for index, bone in enumerate(BONES):
        points, triangles = _capsule(bone, shape.width(index))
        faces.append(triangles + sum(map(len, vertices)))
        vertices.append(points)
        owners.append(torch.full((len(points),), index))
    rest, owner = torch.cat(vertices), torch.cat(owners)
    inside = torch.zeros(len(rest), dtype=torch.bool)
    for index, bone in enumerate(BONES):
        inside |= (owner != index) & (_distance(rest, bone, shape.width(index)) < -0.004)
    joints = torch.tensor([bone.joint for bone in BONES])
    weights = _weights(rest, owner)
    return Body(rest * shape.height, torch.cat(faces), weights, joints * shape.height, ~inside)


def _axes(bone: Bone) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return the joint, the direction, two axes across it (the second the more along z), and the length of a bone."""
    start, end = torch.tensor(bone.joint), torch.tensor(bone.tip)
    length = float((end - start).norm())
    along = (end - start) / length
    helper = torch.tensor([0.0, 0.0, 1.0]) if abs(float(along[2])) < 0.8 else torch.tensor([0.0, 1.0, 0.0])
    first = torch.linalg.cross(along, helper)
    first = first / first.norm()
    return start, along, first, torch.linalg.cross(along, first), length


def _capsule(bone: Bone, wide: float) -> tuple[Tensor, Tensor]:
    start, along, first, second, length = _axes(bone)
    low, high = (r * wide for r in bone.radii)
    rise = [math.pi / 2 * (i + 1) / (CAP + 1) for i in range(CAP)]
    rings = [(-low * math.cos(a), low * math.sin(a)) for a in rise]
    rings += [(length * i / (ALONG - 1), low + (high - low) * i / (ALONG - 1)) for i in range(ALONG)]
    rings += [(length + high * math.cos(a), high * math.sin(a)) for a in reversed(rise)]
    turn = torch.arange(AROUND) * (2 * math.pi / AROUND)
    across = turn.cos()[:, None] * first + turn.sin()[:, None] * second * bone.flat
    points = torch.cat([start + along * place + across * radius for place, radius in rings])
    poles = torch.stack([start - along * low, start + along * (length + high)])
    faces = []
    for ring in range(len(rings) - 1):
        for i in range(AROUND):
            a, b = ring * AROUND + i, ring * AROUND + (i + 1) % AROUND
            faces += [(a, b, a + AROUND), (b, b + AROUND, a + AROUND)]
    top, bottom, last = len(points) + 1, len(points), (len(rings) - 1) * AROUND
    for i in range(AROUND):
        j = (i + 1) % AROUND
        faces += [(bottom, j, i), (top, last + i, last + j)]
    return torch.cat([points, poles]), torch.tensor(faces)


def _distance(points: Tensor, bone: Bone, wide: float) -> Tensor:
    """Return how far points lie outside of a capsule; negative inside."""
    start, along, first, second, length = _axes(bone)
    p = points - start
    place = (p @ along).clamp(0, length)
    radius = (bone.radii[0] + (bone.radii[1] - bone.radii[0]) * place / length) * wide
    off = torch.stack([p @ along - place, p @ first, p @ second / bone.flat], -1)
    return off.norm(dim=-1) - radius


def _weights(rest: Tensor, owner: Tensor) -> Tensor:
    """Return smooth weights: of the vertex's own bone, and of its neighbours in the skeleton where they are near."""
    away = torch.stack([_distance(rest, bone, 1.0).clamp_min(0) for bone in BONES], 1)
    near = torch.zeros(JOINTS, JOINTS, dtype=torch.bool)
    for j, parent in enumerate(PARENTS):
        near[j, j] = True
        if parent >= 0:
            near[j, parent] = near[parent, j] = True
    score = (-((away / 0.05) ** 2)).masked_fill(~near[owner], -math.inf)
    score[torch.arange(len(rest)), owner] += 0.7  # ties go to the own bone
    return score.softmax(1)


def read_body(path: Path | str) -> Body:
    """Read a body from a file of arrays (.npz) with the names of SMPL's: v_template, f, weights, J (or J_regressor)."""
    import numpy

    try:
        with numpy.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as why:
        raise MixerError(f"{path} is no file of arrays (.npz): {why}.") from None
    if missing := [name for name in ("v_template", "f", "weights") if name not in found]:
        raise MixerError(f"{path} holds no body: {', '.join(missing)} missing; found {', '.join(found) or 'nothing'}.")
    rest = torch.tensor(found["v_template"]).float()
    if "J" not in found and "J_regressor" not in found:
        raise MixerError(f"{path} holds no body: neither J nor J_regressor.")
    joints = torch.tensor(found["J"] if "J" in found else found["J_regressor"] @ found["v_template"]).float()
    weights, faces = torch.tensor(found["weights"]).float(), torch.tensor(found["f"].astype("int64"))
    want = {"v_template": (len(rest), 3), "weights": (len(rest), JOINTS), "J": (JOINTS, 3)}
    for (name, shape), array in zip(want.items(), (rest, weights, joints), strict=True):
        if tuple(array.shape) != shape:
            raise MixerError(f"{path}: {name} has shape {tuple(array.shape)}, a body with 24 joints has {shape}.")
    return Body(rest, faces, weights, joints, torch.ones(len(rest), dtype=torch.bool))


PATTERNS = ("plain", "rings", "stripes", "checks")


@dataclass(frozen=True)
class Clothes:
    """Colours of a body as a function of the place in the canonical pose.

    Attributes:
        colours: (7, 3): skin, hair, shirt, second colour of the shirt, trousers, shoes, badge.
        pattern: index into ``PATTERNS``.
        sleeves: where sleeves end, in metres from the middle.
        hem: where trousers end, in metres above the ground.
    """

    colours: Tensor
    pattern: int
    frequency: float
    sleeves: float
    hem: float

    def paint(self, places: Tensor) -> Tensor:
        """Return the colours (..., 3) at places (..., 3) on the surface of the standard body in its canonical pose."""
        skin, hair, shirt, second, trousers, shoes, badge = self.colours.to(places)
        x, y, z = places.unbind(-1)
        side = x.abs()
        rings, stripes = (
            (2 * math.pi * self.frequency * torch.where(side > 0.2, side, y)).sin() > 0,
            ((2 * math.pi * self.frequency * torch.where(side > 0.2, y, x)).sin() > 0),
        )
        other = {"plain": torch.zeros_like(rings), "rings": rings, "stripes": stripes, "checks": rings ^ stripes}
        found = torch.where(other[PATTERNS[self.pattern]][..., None], second, shirt)
        chest = (z > 0.05) & ((x - 0.05) ** 2 + (y - 1.28) ** 2 < 0.045**2)
        found = torch.where(chest[..., None], badge, found)  # on the front alone
        found = torch.where((side > self.sleeves)[..., None], skin, found)
        found = torch.where((y < 0.98)[..., None], trousers, found)
        found = torch.where((y < self.hem)[..., None], skin, found)
        found = torch.where((y < 0.085)[..., None], shoes, found)
        found = torch.where(((y > 1.43) & (side < 0.12))[..., None], skin, found)
        scalp = (y > 1.66) | ((z < 0.02) & (y > 1.50))  # all of the back of the head
        found = torch.where((scalp & (side < 0.12))[..., None], hair, found)
        eyes = (z > 0.06) & ((side - 0.033) ** 2 + (y - 1.63) ** 2 < 0.014**2) & (side < 0.12)
        return torch.where(eyes[..., None], hair * 0.3, found)


@dataclass(frozen=True)
class Identity:
    """Somebody: a shape and clothes."""

    shape: Shape
    clothes: Clothes


SKINS = ((0.95, 0.80, 0.70), (0.85, 0.65, 0.50), (0.60, 0.42, 0.30), (0.36, 0.24, 0.18))
HAIRS = ((0.08, 0.06, 0.05), (0.35, 0.20, 0.10), (0.80, 0.65, 0.30), (0.55, 0.15, 0.08), (0.60, 0.60, 0.62))


def draw_identity(seed: int) -> Identity:
    """Draw somebody at random."""
    g = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=g))

    def choose(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    shape = Shape(between(0.92, 1.06), between(0.85, 1.2), between(0.9, 1.15), between(0.95, 1.1))
    bright = torch.rand(5, 3, generator=g) * 0.9 + 0.05
    skin, hair = torch.tensor(SKINS[choose(4)]), torch.tensor(HAIRS[choose(5)])
    colours = torch.stack([skin, hair, *bright])
    clothes = Clothes(colours, choose(4), between(5.0, 10.0), (0.40, 0.66)[choose(2)], (0.10, 0.10, 0.55)[choose(3)])
    return Identity(shape, clothes)


Triple = tuple[float, float, float]
SWINGS: dict[
    int, tuple[Triple, Triple]
] = {  # standard deviation and mean of the angles around x, y and z, in radians, of the left joint
    1: ((0.35, 0.10, 0.08), (-0.10, 0.0, 0.05)),
    4: ((0.30, 0.0, 0.0), (0.35, 0.0, 0.0)),
    7: ((0.15, 0.05, 0.05), (0.0, 0.0, 0.0)),
    13: ((0.05, 0.05, 0.08), (0.0, 0.0, 0.0)),
    16: ((0.30, 0.45, 0.40), (0.0, -0.1, -0.85)),
    18: ((0.10, 0.45, 0.10), (0.0, -0.5, 0.0)),
    20: ((0.15, 0.15, 0.15), (0.0, 0.0, 0.0)),
}
TURNS = {0: 0.0, 3: 0.10, 6: 0.10, 9: 0.10, 12: 0.12, 15: 0.15}


def draw_pose(seed: int) -> Tensor:
    """Draw the angles (24, 3) of a person who moves: arms mostly down, knees that bend one way."""
    g = torch.Generator().manual_seed(seed)
    angles = torch.zeros(JOINTS, 3)
    for joint, turn in TURNS.items():
        angles[joint] = torch.randn(3, generator=g) * turn
    mirror = torch.tensor([1.0, -1.0, -1.0])
    for joint, (deviation, mean) in SWINGS.items():
        for side in (0, 1):
            drawn = torch.randn(3, generator=g).clamp(-2, 2) * torch.tensor(deviation) + torch.tensor(mean)
            angles[joint + side] = drawn * mirror if side else drawn
    angles[4:6, 0] = angles[4:6, 0].clamp_min(0.0)
    return angles
