"""Point clouds: sampling and neighbours against literal forms, the order of the points, files, and what is refused."""

from __future__ import annotations

import json
import math

import numpy
import pytest
import torch

from tokenmix import MIXERS, MixerError
from tokenmix.lab.data import Jitter, PointSampler, open_points
from tokenmix.lab.data.point_files import read_cloud, read_points
from tokenmix.lab.data.point_shapes import OBJECTS, SOLIDS, box, make_mesh, rod, sample_mesh, triangle_areas
from tokenmix.lab.data.points import Cloud, stack_clouds, unit_ball
from tokenmix.lab.train.point_task import part_iou, part_labels
from tokenmix.models import PointClassifier, PointClassifierConfig, PointSegmenter, PointSegmenterConfig
from tokenmix.models.point_sampling import farthest_points, gather_points, nearest_points
from tokenmix.models.points import NeighbourEmbedding, blind_mixer

SMALL = {"dim": 16, "lift": 8, "fuse": 24, "hidden": (12,), "layers": 2, "neighbours": (5,)}
MIXED = ("attention", "hydra", "aft_simple", "linear", "set")
CUBE = "OFF\n8 12 0\n" + "\n".join(
    [" ".join(map(str, v)) for v in box(2, 2, 2).vertices.tolist()]
    + ["3 " + " ".join(map(str, f)) for f in box(2, 2, 2).faces.tolist()]
)


def clouds(n=40, B=2):
    return torch.randn(B, n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def stirred(model):
    """Return a model in eval mode whose statistics and norms matter too."""
    generator = torch.Generator().manual_seed(1)
    for name, a in (*model.named_parameters(), *model.named_buffers()):
        with torch.no_grad():
            a.add_(0.3 * torch.rand(a.shape, generator=generator, dtype=a.dtype)) if "var" in name else a.add_(
                0.1 * torch.randn(a.shape, generator=generator, dtype=a.dtype)
            )
    return model.eval()


def literal_farthest(points, n):
    """Choose points by loops over lists: the farthest from the mean, then the farthest from all chosen."""
    mean = [sum(p[d] for p in points) / len(points) for d in range(3)]
    chosen = [max(range(len(points)), key=lambda i: math.dist(points[i], mean))]
    while len(chosen) < n:
        chosen.append(max(range(len(points)), key=lambda i: min(math.dist(points[i], points[j]) for j in chosen)))
    return chosen


def test_farthest_points_are_those_of_a_literal_form():
    points = clouds()
    found = farthest_points(points, 9)
    assert found.tolist() == [literal_farthest(cloud.tolist(), 9) for cloud in points]


def test_nearest_points_are_those_of_a_literal_form():
    points = clouds(20)
    found = nearest_points(points[:, :3], points, 4)
    for b in range(2):
        for m in range(3):
            order = sorted(range(20), key=lambda i: math.dist(points[b, i].tolist(), points[b, m].tolist()))
            assert found[b, m].tolist() == order[:4]


def test_neighbour_embedding_is_the_papers_equations_written_out():
    torch.manual_seed(0)
    stage = stirred(NeighbourEmbedding(4, 6, neighbours=3, samples=5).double())
    points, x = clouds(12), torch.randn(2, 12, 4, dtype=torch.float64)
    centres, found = stage(points, x)
    for b in range(2):
        for m, p in enumerate(literal_farthest(points[b].tolist(), 5)):
            near = sorted(range(12), key=lambda i: math.dist(points[b, i].tolist(), points[b, p].tolist()))[:3]
            pairs = torch.stack([torch.cat([x[b, q] - x[b, p], x[b, p]]) for q in near])
            want = stage.second(stage.first(pairs[None]))[0].amax(0)
            assert torch.allclose(found[b, m], want, atol=1e-12)
            assert torch.equal(centres[b, m], points[b, p])


def classified_alike(name):
    torch.manual_seed(0)
    config = PointClassifierConfig(classes=3, mixers=({"name": name},), samples=(20,), **SMALL)
    model, points = stirred(PointClassifier(config).double()), clouds()
    order = torch.randperm(40)
    assert torch.allclose(model(points[:, order]), model(points), atol=1e-11)
    assert not torch.allclose(model(points.flip(0)), model(points))


def labelled_alike(name):
    torch.manual_seed(0)
    config = PointSegmenterConfig(classes=2, parts=4, mixers=({"name": name},), samples=(0,), category=3, **SMALL)
    model, points = stirred(PointSegmenter(config).double()), clouds()
    order, category = torch.randperm(40), torch.tensor([1, 0])
    here = model(points, category)
    assert torch.allclose(model(points[:, order], category), here[:, order], atol=1e-11)
    assert not torch.allclose(model(points, 1 - category), here)


@pytest.mark.parametrize("name", ["pct_attention", "external"])
def test_the_classifier_does_not_depend_on_the_order_of_the_points(name):
    classified_alike(name)


@pytest.mark.parametrize("name", ["pct_attention", "external"])
def test_the_labels_of_the_segmenter_move_with_the_points(name):
    labelled_alike(name)


@pytest.mark.parametrize("name", MIXED)
def test_classifier_and_segmenter_ignore_the_order_of_points(name):
    classified_alike(name)
    labelled_alike(name)


def test_mixers_that_know_the_order_are_refused():
    for name in ("aft_full", "local", "lightconv", "nystrom", "pooling"):  # no window holds 256 tokens
        with pytest.raises(MixerError, match=f"points: {name} knows the order"):
            blind_mixer(16, {"name": name, **MIXERS[name].example_options(256, heads=4)}, 256)
    with pytest.raises(MixerError, match="attention knows the order"):
        blind_mixer(16, {"name": "attention", "heads": 4, "positions": {"name": "rotary"}}, 64)


def test_models_refuse_clouds_that_are_too_small_or_no_clouds():
    model = PointClassifier(PointClassifierConfig(classes=3, samples=(20,), **SMALL))
    with pytest.raises(MixerError, match="at least 20 points.*got 19"):
        model(clouds(19).float())
    with pytest.raises(MixerError, match=r"expects clouds \(B, N, 3\)"):
        model(clouds().float()[..., :2])
    with pytest.raises(MixerError, match="a stage asks for 30 of 20 points"):
        PointClassifier(PointClassifierConfig(**{**SMALL, "neighbours": (5, 30)}, classes=3, samples=(20, 10)))
    with pytest.raises(MixerError, match="needs the category of each of 2 clouds"):
        PointSegmenter(PointSegmenterConfig(classes=2, samples=(0,), **SMALL))(clouds().float())


def test_parts_of_another_category_are_not_chosen():
    logits = torch.tensor([[9.0, 1.0, 2.0], [9.0, 3.0, 2.0]])
    assert part_labels(logits, (1, 2)).tolist() == [2, 1]


def test_iou_is_one_for_a_part_that_is_nowhere():
    said, wanted = torch.tensor([4, 4, 5, 5]), torch.tensor([4, 5, 5, 5])
    assert part_iou(said, wanted, (4, 5)) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert part_iou(said, wanted, (4, 5, 6)) == pytest.approx((1 / 2 + 2 / 3 + 1) / 3)


def test_points_of_a_mesh_lie_on_it_evenly():
    mesh, generator = box(2, 2, 6), torch.Generator().manual_seed(0)
    points, _ = sample_mesh(mesh, 4000, generator)
    half = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)
    assert torch.allclose((points.abs() / half).amax(1), torch.ones(4000, dtype=torch.float64))
    ends = (points[:, 2].abs() > 3 - 1e-9).double().mean()
    assert abs(float(ends) - 8 / 56) < 0.02
    assert float(triangle_areas(mesh).sum()) == pytest.approx(56)
    quarters = (points[(points[:, 2] - 3).abs() < 1e-9, :2] > 0).long() @ torch.tensor([1, 2])
    assert float(quarters.bincount(minlength=4).double().std() / len(quarters)) < 0.05
    assert float(triangle_areas(rod(1, 2)).sum()) == pytest.approx(2 * math.pi + 4 * math.pi, rel=0.02)


@pytest.mark.parametrize(
    ("make", "parts"), [*((m, 1) for m in SOLIDS.values()), *((m, len(p)) for m, p in OBJECTS.values())]
)
def test_every_mesh_of_ours_has_area_and_all_its_parts(make, parts):
    mesh = make_mesh(make, torch.Generator().manual_seed(3))
    assert mesh.vertices.isfinite().all()
    areas = torch.zeros(parts, dtype=torch.float64).index_add(0, mesh.parts, triangle_areas(mesh))
    assert (areas > 0.02 * areas.sum()).all()


def test_a_batch_is_a_function_of_seed_and_step():
    data, jitter = open_points("objects", clouds=20, held_out=5), Jitter(0.01, 1.2, 0.1, 0.4, True)
    one, two = (PointSampler(data, points=30, batch_size=4, seed=1, jitter=jitter) for _ in range(2))
    one.batch(0)
    for a, b in zip(one.batch(7), two.batch(7), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.batch(7)[0], one.batch(8)[0])
    assert not torch.equal(one.batch(7)[0], PointSampler(data, points=30, batch_size=4, seed=2).batch(7)[0])
    epoch = torch.cat([one.batch(step)[1] for step in range(5)])
    assert epoch.bincount().tolist() == [4] * 5


def test_held_out_clouds_are_the_same_each_time_and_no_others():
    data = open_points("solids", clouds=20, held_out=10)
    first, again = (list(data.held_out("valid", 16)) for _ in range(2))
    assert all(torch.equal(a.points, b.points) for a, b in zip(first, again, strict=True))
    for i in range(10):  # the same draws from the surfaces of other proportions
        seed = torch.Generator().manual_seed
        here, there, trained = (data.cloud(split, i, 16, seed(0)) for split in ("valid", "test", "train"))
        assert not torch.allclose(here.points, there.points, atol=1e-4)
        assert not torch.allclose(here.points, trained.points, atol=1e-4)
    assert [c.category for c in first] == list(range(10))


def test_augmentation_does_what_it_says():
    points, parts = clouds(500, 1)[0], torch.arange(500)
    generator = torch.Generator().manual_seed(0)
    dropped, labels = Jitter(drop=0.9)(points, parts, generator)
    assert dropped.shape == points.shape
    assert torch.equal(dropped, points[labels])
    assert 1 < len(labels.unique()) < 500
    scaled, _ = Jitter(scale=2.0)(points, parts, generator)
    ratio = scaled / points
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio))
    assert ((ratio[0] >= 0.5) & (ratio[0] <= 2)).all()
    noisy, _ = Jitter(noise=0.1)(points, parts, generator)
    assert abs(float((noisy - points).std()) - 0.1) < 0.01
    turned, _ = Jitter(rotate=True)(points, parts, generator)
    assert torch.allclose(turned[:, 2], points[:, 2])
    assert torch.allclose(turned.norm(dim=1), points.norm(dim=1))
    assert torch.equal(Jitter()(points, parts, generator)[0], points)


def test_clouds_are_centred_in_the_unit_ball():
    found = unit_ball(clouds(50, 1)[0] * 7 + 3)
    assert torch.allclose(found.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert float(found.norm(dim=1).max()) == pytest.approx(1)
    assert torch.equal(unit_ball(torch.ones(4, 3)), torch.zeros(4, 3))


def test_clouds_of_different_sizes_are_no_batch():
    a, b = (Cloud(torch.zeros(n, 3), 0, torch.zeros(n, dtype=torch.long)) for n in (4, 5))
    with pytest.raises(MixerError, match="same number of points, got 4 and 5"):
        stack_clouds([a, b])


def modelnet(root, classes=("chair", "desk"), n=4):
    for name in classes:
        for split in ("train", "test"):
            (root / name / split).mkdir(parents=True)
            for i in range(n):
                (root / name / split / f"{name}_{i:04d}.off").write_text(CUBE)
    return root


def test_modelnet_as_meshes(tmp_path):
    root = modelnet(tmp_path / "ModelNet2")
    (root / "chair" / "train" / "chair_0000.off").write_text(CUBE.replace("OFF\n", "OFF"))  # as some of ModelNet40's
    data = open_points(str(root), valid=0.25)
    assert (data.classes, data.sizes, data.labels) == (("chair", "desk"), {"train": 6, "valid": 2, "test": 8}, 0)
    points, category, _ = PointSampler(data, points=64, batch_size=6).batch(0)
    assert sorted(category.tolist()) == [0, 0, 0, 1, 1, 1]
    assert points.shape == (6, 64, 3)


def test_modelnet_as_points_with_lists(tmp_path):
    for name in ("bed", "night_stand"):
        (tmp_path / name).mkdir()
        for i in range(3):
            rows = numpy.random.default_rng(i).normal(size=(20, 6))
            numpy.savetxt(tmp_path / name / f"{name}_{i:04d}.txt", rows, delimiter=",")
    numpy.save(tmp_path / "bed" / "bed_0009.npy", numpy.ones((20, 3)) * [[i] for i in range(20)])
    train = [f"{name}_{i:04d}" for name in ("bed", "night_stand") for i in (0, 1)] + ["bed_0009"]
    (tmp_path / "modelnet40_train.txt").write_text("\n".join(train))
    (tmp_path / "modelnet40_test.txt").write_text("bed_0002\nnight_stand_0002\n")
    data = open_points(str(tmp_path))
    assert data.sizes == {"train": 4, "valid": 1, "test": 2}
    assert [c.category for c in data.held_out("test", 20)] == [0, 1]
    with pytest.raises(MixerError, match="has 20 points, fewer than data.points=21"):
        list(data.held_out("test", 21))
    (tmp_path / "modelnet40_test.txt").write_text("sofa_0002\n")
    with pytest.raises(MixerError, match="no class folder 'sofa'; it has bed, night_stand"):
        open_points(str(tmp_path))


def shapenet(root, offset="03797390", name="Mug", part=36):
    (root / offset).mkdir(parents=True)
    (root / "train_test_split").mkdir()
    (root / "synsetoffset2category.txt").write_text(f"{name}\t{offset}\n")
    rows = numpy.concatenate(
        [numpy.random.default_rng(0).normal(size=(30, 6)), part + numpy.arange(30)[:, None] % 2], 1
    )
    for stem in "ab":
        numpy.savetxt(root / offset / f"{stem}.txt", rows)
    for split, stem in (("train", "a"), ("val", "b"), ("test", "b")):
        file = root / "train_test_split" / f"shuffled_{split}_file_list.json"
        file.write_text(json.dumps([f"shape_data/{offset}/{stem}"]))
    return root


def test_shapenet_parts(tmp_path):
    data = open_points(str(shapenet(tmp_path / "set")))
    assert (data.classes, data.parts) == (("Mug",), ((36, 37),))
    cloud = next(data.held_out("valid", 30))
    assert cloud.parts.bincount(minlength=38)[36:].tolist() == [15, 15]
    (tmp_path / "set" / "99999999").mkdir()
    with pytest.raises(MixerError, match="folder of an unknown category, 99999999"):
        open_points(str(tmp_path / "set"))
    with pytest.raises(MixerError, match="unknown category 'Spoon"):
        open_points(str(shapenet(tmp_path / "two", name="Spoon")))
    with pytest.raises(MixerError, match="has the part 35, which Mug has not; its parts are 36, 37"):
        next(open_points(str(shapenet(tmp_path / "three", part=35))).held_out("test", 30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PLY\n3 1 0", "not an .off file; it begins with 'PLY'"),
        (CUBE[: len(CUBE) // 2], "is a broken .off file: its header promises 8 12"),
        ("OFF", "is a broken .off file"),
        (CUBE.replace("1.0", "nan", 1), "not finite in point"),
        (CUBE.replace("3 0 1", "3 0 9", 1), "a face with vertex 9, but only 8 vertices"),
        ("OFF\n3 1 0\n0 0 0\n0 0 0\n0 0 0\n3 0 1 2", "has no surface"),
    ],
)
def test_a_broken_mesh_is_one_line(tmp_path, text, message):
    file = tmp_path / "a.off"
    file.write_text(text)
    with pytest.raises(MixerError, match=message) as found:
        read_cloud(file)
    assert "\n" not in str(found.value)
    assert "a.off" in str(found.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,nan\n1,2,3", "not finite in point 0"),
        ("1 2\n3 4", "at least x, y and z"),
        ("a b c", "not a table"),
        ("", "has no points"),
    ],
)
def test_a_broken_table_is_one_line(tmp_path, text, message):
    file = tmp_path / "a.txt"
    file.write_text(text)
    with pytest.raises(MixerError, match=message) as found:
        read_points(file)
    assert "\n" not in str(found.value)


def test_folders_that_are_no_set_are_refused(tmp_path):
    with pytest.raises(MixerError, match="there is no folder"):
        open_points(str(tmp_path / "nothing"))
    with pytest.raises(MixerError, match="has no clouds"):
        open_points(str(tmp_path))
    root = modelnet(tmp_path / "set")
    (root / "lamp" / "test").mkdir(parents=True)
    with pytest.raises(MixerError, match="the class folder .*lamp contains no clouds"):
        open_points(str(root))
    with pytest.raises(MixerError, match="no split 'all'"):
        open_points("solids").split("all")
    with pytest.raises(MixerError, match="at least 10 clouds"):
        open_points("solids", clouds=5)
    for wrong in ({"noise": -1}, {"scale": 0.5}, {"drop": 1.0}):
        with pytest.raises(MixerError, match="noise and shift of points"):
            Jitter(**wrong)


def test_picked_takes_any_shape_of_indices():
    x, at = torch.arange(24.0).view(2, 4, 3), torch.tensor([[[0, 1], [3, 3]], [[2, 0], [1, 1]]])
    found = gather_points(x, at)
    assert found.shape == (2, 2, 2, 3)
    assert torch.equal(found[1, 0, 0], x[1, 2])
