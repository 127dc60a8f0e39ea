"""Test examples/transhuman: its renderer, its equations, its runs, and that where the body stands changes nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenmix import MixerError
from transhuman import reference
from transhuman.__main__ import ROWS
from transhuman.body import build_body, draw_pose, read_body, rotation_matrices
from transhuman.encodings import encode
from transhuman.model import (
    PAPER,
    TransHuman,
    TransHumanConfig,
    cluster_means,
    count_parameters,
    make_clusters,
)
from transhuman.renderer import Camera, find_visible, look_at, rasterize
from transhuman.scenes import PLAIN, View, draw_scene
from transhuman.training import TrainSettings, build, load, loss_of, read_log, train
from transhuman.volume import composite, cross_box, draw_image

ROOT = Path(__file__).parent.parent
SMALL = TransHumanConfig(
    {"name": "aft_simple"}, clusters=12, neighbours=3, dim=12, depth=1, image=2, lift=2, width=8, keys=4, cells=4
)


@pytest.fixture(scope="module")
def scene():
    return draw_scene(1, 2, size=16, targets=2)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return TransHuman(SMALL, make_clusters(PLAIN.rest, SMALL.clusters), PLAIN.rest).double().eval()


def in_float64(scene):
    views = [
        tuple(replace(v, camera=v.camera.to(torch.float64), colours=v.colours.double()) for v in given)
        for given in (scene.references, scene.targets)
    ]
    return replace(scene, frame=scene.frame.to(torch.float64), references=views[0], targets=views[1])


def straight_on(size, focal=20.0):
    return Camera(torch.eye(3), torch.zeros(3), focal, (size, size))


def test_a_box_is_drawn_where_it_is():
    corners = torch.tensor([[x, y, z] for z in (2.0, 3.0) for y in (-0.5, 0.5) for x in (-0.5, 0.5)])
    faces = [(0, 1, 2), (1, 3, 2), (4, 6, 5), (5, 6, 7), (0, 2, 4), (2, 6, 4), (1, 5, 3), (3, 5, 7)]
    faces += [(0, 4, 1), (1, 4, 5), (2, 3, 6), (3, 7, 6)]
    image = rasterize(corners, torch.tensor(faces), straight_on(16))
    half = 20 * 0.5 / 2  # pixels from the middle to the edge of the front
    inside = ((torch.arange(16) + 0.5 - 8).abs() < half).float()
    assert torch.equal((image.face >= 0).float(), inside[:, None] * inside)
    assert torch.allclose(image.depth[image.face >= 0], torch.tensor(2.0))  # the front hides the back
    place = image.interpolate(corners, torch.tensor(faces))
    x = (torch.arange(16) + 0.5 - 8) * 2 / 20
    assert torch.allclose(place[8, 4:12, 0], x[4:12], atol=1e-5)


def test_a_sphere_is_drawn_as_its_equation_says():
    n = 96
    up, around = torch.linspace(-math.pi / 2, math.pi / 2, n), torch.arange(n) * 2 * math.pi / n
    ball = torch.stack(
        [
            up.cos()[:, None] * around.cos(),
            up.cos()[:, None] * around.sin(),
            up.sin()[:, None].expand(-1, n),
        ],
        -1,
    ).flatten(0, 1)
    index = torch.arange((n - 1) * n)
    beside = index // n * n + (index + 1) % n
    faces = torch.cat([torch.stack([index, beside, index + n], 1), torch.stack([beside, beside + n, index + n], 1)])
    camera = straight_on(64, 60.0)
    image = rasterize(ball + torch.tensor([0.0, 0.0, 3.0]), faces, camera)
    y, x = torch.meshgrid(*[(torch.arange(64) + 0.5 - 32) / 60] * 2, indexing="ij")
    ray = torch.stack([x, y, torch.ones_like(x)], -1)
    b, c = 3.0 * ray[..., 2], 8.0  # |z ray - (0, 0, 3)| = 1
    root = b**2 - (ray**2).sum(-1) * c
    truth = (b - root.clamp_min(0).sqrt()) / (ray**2).sum(-1)
    sure = root > 0.05  # not on the rim, which triangles cut
    assert (image.face >= 0)[sure].all()
    assert not (image.face >= 0)[root < -0.01].any()
    assert (image.depth - truth)[root > 0.3].abs().max() < 2e-3


def test_what_a_camera_sees_of_a_body(scene):
    frame = scene.frame
    assert frame.body.outside.sum() > 1500
    assert 0.2 < scene.visible.any(0)[frame.body.outside].float().mean() < 0.85
    behind = find_visible(frame.vertices, frame.body.faces, opposite(scene.references[1].camera, frame))
    front = scene.visible[1]
    assert (front & behind).sum() < 0.1 * front.sum()  # some insides of arms face both


def opposite(camera, frame):
    middle = frame.vertices.mean(0)
    place = 2 * middle - camera.centre
    return look_at(place, middle, camera.focal, camera.size)


def test_encodings_equal_their_equation():
    places = torch.rand(3, 3, dtype=torch.float64)
    for frequencies, raw, pi in ((10, True, False), (4, False, True)):
        found = encode(places, frequencies, raw=raw, pi=pi)
        for place, got in zip(places.tolist(), found, strict=True):
            want = torch.tensor(reference.encode_place(place, frequencies, raw=raw, pi=pi))
            assert torch.allclose(got, want.double(), atol=1e-10)


def test_tokens_equal_their_equation(scene, model):
    exact = in_float64(scene)
    pixels = model.images(torch.stack([v.colours for v in exact.references]) * 2 - 1)
    painted = model.reduce(model.paint(pixels, exact))
    got = cluster_means(painted * exact.visible[..., None], model.labels, SMALL.clusters)
    for view in range(3):
        want = reference.paint_clusters(painted[view], exact.visible[view], model.labels, SMALL.clusters)
        assert torch.allclose(got[view], want, atol=1e-10)


def test_partial_fields_equal_their_equation(scene, model):
    exact = in_float64(scene)
    encoded = model.encode(exact)
    posed = exact.frame.posed
    points = posed.vertices[[5, 900, 2000]] + 0.05
    got = model.read_body(encoded, exact.frame, points)
    centres = cluster_means(posed.vertices, model.labels, SMALL.clusters)
    turns = cluster_means(posed.rotations.flatten(1), model.labels, SMALL.clusters).unflatten(1, (3, 3))
    for i, point in enumerate(points):
        for view in range(3):
            want = reference.read_fields(
                point, centres, turns, encoded.tokens[view], neighbours=SMALL.neighbours, temperature=SMALL.temperature
            )
            assert torch.allclose(got[i, view], want, atol=1e-9)


def test_integration_and_rays_equal_their_equations():
    g = torch.Generator().manual_seed(0)
    queries, keys, own, values = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(4))
    got = own + (queries @ keys.T / math.sqrt(4)).softmax(-1) @ values
    assert torch.allclose(got, reference.integrate(queries, keys, own, values), atol=1e-12)
    density = torch.rand(2, 5, generator=g, dtype=torch.float64) * 30
    colours = torch.rand(2, 5, 3, generator=g, dtype=torch.float64)
    drawn = composite(density, colours, torch.ones(2, 5).double(), torch.full((2, 1), 0.05).double())
    for row in range(2):
        want = reference.march(density[row].tolist(), colours[row], 0.05)
        assert torch.allclose(drawn.colours[row], want, atol=1e-12)
    assert torch.allclose(drawn.opacity, 1 - (-density.sum(1) * 0.05).exp())


def test_rays_enter_and_leave_a_box():
    directions = torch.nn.functional.normalize(torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.1, 0.0, 1.0]]), dim=1)
    enter, leave = cross_box(torch.tensor([0.0, 0.0, -2.0]), directions, -torch.ones(3), torch.ones(3))
    assert torch.allclose(enter[0], torch.tensor(1.0))
    assert torch.allclose(leave[0], torch.tensor(3.0))
    assert leave[1] < enter[1]


@pytest.mark.parametrize("kind", ["tokens", "none", "voxels", "convolution"])
def test_the_field_does_not_depend_on_where_the_body_stands(scene, kind):
    torch.manual_seed(1)
    field = TransHuman(replace(SMALL, kind=kind), make_clusters(PLAIN.rest, SMALL.clusters), PLAIN.rest).double().eval()
    exact = in_float64(scene)
    turn = rotation_matrices(torch.tensor([0.3, -1.2, 0.5], dtype=torch.float64))
    shift = torch.tensor([0.4, -0.2, 0.7], dtype=torch.float64)
    moved = replace(
        exact,
        frame=exact.frame.move(turn, shift),
        references=tuple(replace(v, camera=v.camera.move(turn, shift)) for v in exact.references),
    )
    points = exact.frame.vertices[::100] + 0.02
    directions = torch.nn.functional.normalize(torch.randn(len(points), 3, dtype=torch.float64), dim=1)
    here = field(field.encode(exact), exact, points, directions)
    there = field(field.encode(moved), moved, points @ turn.T + shift, directions @ turn.T)
    for a, b in zip(here, there, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_counts_of_the_papers_sizes():
    parts = count_parameters(PAPER)
    assert parts["blocks"] == 5_338_368  # ViT-tiny
    assert parts["images"] == 683_072 + 512
    assert parts["reduce"] == 73_920
    assert parts["body"] == 65_536
    assert parts["body_keys"] + parts["body_values"] == parts["pixel_keys"] + parts["pixel_values"] == 98_688
    assert sum(parts.values()) == 6_626_308  # Table 6 says 6.08 million, the layers that its code uses 6,922,628


def test_the_page_shows_what_was_recorded():
    from benchmarks import transhuman_small as small

    results = json.loads(small.RESULTS.read_text())
    page = (ROOT / "docs" / "bodies.md").read_text()
    assert small.renew(page, results) == page
    assert results["counts"] == count_parameters(PAPER)
    described = small.describe_paper()
    assert json.loads(json.dumps(described)) == {name: results[name] for name in described}


@pytest.mark.parametrize("row", sorted(ROWS))
def test_every_row_has_gradients(scene, row):
    config = replace(ROWS[row], clusters=12, neighbours=min(3, ROWS[row].neighbours), dim=12, depth=1)
    config = replace(config, image=2, lift=2, width=8, keys=4, cells=4)
    field = TransHuman(config, make_clusters(PLAIN.rest, 12), PLAIN.rest)
    density, colour = field(field.encode(scene), scene, scene.frame.vertices[::50], torch.ones(69, 3))
    (density.sum() + colour.sum()).backward()
    used = {name.split(".")[0] for name, p in field.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {"images", "pixel", "density", "colour"} <= used
    assert ("blocks" in used) == (config.kind == "tokens")
    assert ("grid" in used) == (config.kind in ("voxels", "convolution"))


def test_a_run_is_gone_on_with_to_the_bit(tmp_path, capsys):
    settings = TrainSettings(
        steps=6, people=1, poses=1, size=16, patches=2, side=4, samples=4, save_every=2, log_every=2
    )
    settings = replace(settings, log_every=2)
    train(SMALL, settings, tmp_path / "whole", data=tmp_path)
    stop_after(5, settings, tmp_path)
    train(SMALL, settings, tmp_path / "cut", data=tmp_path)
    whole, cut = (load(tmp_path / name)[0].state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    steps = [[line["step"] for line in read_log(tmp_path / name)] for name in ("whole", "cut")]
    assert steps[0] == steps[1] == [2, 4, 6]
    assert "step 6 of 6" in capsys.readouterr().out


def stop_after(steps, settings, folder):
    """Interrupt a run as Ctrl-C does, after some of its steps."""
    import transhuman.training as module

    seen, loss_of = [], module.loss_of

    def interrupt(*args):
        if len(seen) == steps:
            raise KeyboardInterrupt
        seen.append(1)
        return loss_of(*args)

    module.loss_of = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            train(SMALL, settings, folder / "cut", data=folder)
    finally:
        module.loss_of = loss_of


def test_a_perceptual_loss_is_an_option(scene, model):
    field = TransHuman(SMALL, model.labels, PLAIN.rest)
    given = TrainSettings(size=16, side=4, samples=4, single=0)
    plain, more = (
        loss_of(field, scene, replace(given, perceptual=weight), torch.Generator().manual_seed(0)) for weight in (0, 1)
    )
    assert more > plain > 0


def test_what_is_wrong_is_said_in_one_line(scene, tmp_path, model):
    frame, view = scene.frame, scene.targets[0]
    away = look_at(view.camera.centre, 2 * view.camera.centre - frame.vertices.mean(0), 20.0, (16, 16))
    with pytest.raises(MixerError, match=r"the camera must stand before the mesh"):
        rasterize(frame.vertices, frame.body.faces, away)
    with pytest.raises(MixerError, match=r"a pose has 24 joints x 3 numbers, got \(23, 3\)"):
        PLAIN.pose(torch.zeros(23, 3))
    with pytest.raises(MixerError, match=r"those of left_knee are not"):
        PLAIN.pose(draw_pose(0).index_fill(0, torch.tensor(4), math.nan))
    with pytest.raises(MixerError, match=r"mask has \(8, 8\) pixels, its camera \(16, 16\)"):
        View(view.camera, view.colours, view.mask[:8, :8], view.depth)
    (tmp_path / "body.npz").write_bytes(b"no body")
    with pytest.raises(MixerError, match=r"body.npz is no file of arrays"):
        read_body(tmp_path / "body.npz")
    import numpy

    numpy.savez(tmp_path / "other.npz", points=numpy.zeros(3))
    with pytest.raises(MixerError, match=r"holds no body: v_template, f, weights missing; found points"):
        read_body(tmp_path / "other.npz")
    with pytest.raises(MixerError, match=r"samples must be 1 or more"):
        draw_image(model, None, scene, view.camera, samples=0)
    with pytest.raises(MixerError, match=r"is no run of this example"):
        load(tmp_path)
    with pytest.raises(MixerError, match=r"people must be positive, got 0"):
        TrainSettings(people=0)
    with pytest.raises(MixerError, match=r"patches of 8 pixels do not fit into images of 4"):
        TrainSettings(size=4)


def test_a_step_whose_rays_all_miss_the_body_learns_nothing(tmp_path, monkeypatch):
    """With a fifth of the patches anywhere, that is one step in a thousand; it ended the run."""
    import transhuman.training as module

    monkeypatch.setattr(module, "draw_patches", lambda mask, **_: torch.arange(2))  # a corner of the image
    settings = TrainSettings(steps=2, people=1, poses=1, size=16, samples=2, scenes=1)
    trained = train(SMALL, settings, tmp_path / "run", data=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), build(SMALL, 0).parameters(), strict=True))


def test_damaged_files_are_named(tmp_path):
    settings = TrainSettings(steps=1, people=1, poses=1, size=16, patches=1, side=4, samples=2, scenes=1)
    train(SMALL, settings, tmp_path / "run", data=tmp_path)
    for file, said in ((tmp_path / "run/state.pt", "cannot be read"), (tmp_path / "scenes-1x1-16.pt", "is damaged")):
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(MixerError, match=rf"{file.name} {said}"):
            train(SMALL, settings, tmp_path / ("run" if file.name == "state.pt" else "other"), data=tmp_path)


def test_a_body_is_read_from_a_file(tmp_path):
    import numpy

    body = build_body()
    arrays = {"v_template": body.rest, "f": body.faces, "weights": body.weights, "J": body.joints}
    numpy.savez(tmp_path / "body.npz", **{name: value.numpy() for name, value in arrays.items()})
    read = read_body(tmp_path / "body.npz")
    angles = draw_pose(3)
    assert torch.allclose(read.pose(angles).vertices, body.pose(angles).vertices)


def test_the_commands(tmp_path):
    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "examples.transhuman", *words], cwd=ROOT, capture_output=True, text=True
        )

    assert "6,626,308" in run("counts").stdout
    words = ["--out", str(tmp_path / "run"), "--data", str(tmp_path), "--steps", "2", "--people", "1", "--size", "16"]
    assert run("train", "--row", "hydra", *words).returncode == 0
    assert "identity  model" in run("score", str(tmp_path / "run"), "--scenes", "1").stdout
    assert run("page", str(tmp_path / "run"), "--people", "1", "--out", str(tmp_path / "page")).returncode == 0
    assert "colour error, unseen" in (tmp_path / "page" / "index.html").read_text()
    refused = run("score", str(tmp_path))
    assert refused.returncode == 2
    assert "is no run of this example" in refused.stderr
