"""Images with masks: scenes from a seed, folders of labels or colours, augmentation of both together, bad input."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_sets import noise, save
from tokenmix import MixerError
from tokenmix.lab.data import SCENE_CLASSES, MaskAugment, MaskSampler, MaskSplit, mask_batches, open_masks, scene
from tokenmix.lab.data.augment_masks import resize_pair, window
from tokenmix.lab.data.masks import paint_mask
from tokenmix.lab.data.pair_sampler import IGNORED


def labels(*size: int, classes: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, size, dtype=np.uint8)


def folder(root: Path, n: int = 10, size=lambda i: (8, 9), mask=lambda i, size: labels(*size, seed=i)) -> Path:
    """images/*.jpg of noise and masks/*.png."""
    for i in range(n):
        save(root / "images" / f"{i}.jpg", noise(*size(i), 3, seed=i))
        save(root / "masks" / f"{i}.png", mask(i, size(i)))
    return root


def shown(split: MaskSplit) -> list[torch.Tensor]:
    return [split.read(i)[1] for i in range(len(split))]


def test_a_scene_is_a_function_of_seed_and_index():
    image, mask = scene(3, 5, (24, 32))
    assert (image.dtype, image.shape, mask.dtype, mask.shape) == (torch.uint8, (3, 24, 32), torch.int64, (24, 32))
    torch.rand(3)
    random.random()
    again = scene(3, 5, (24, 32))
    assert torch.equal(image, again[0])
    assert torch.equal(mask, again[1])
    for other in (scene(3, 6, (24, 32)), scene(4, 5, (24, 32))):
        assert not torch.equal(image, other[0])


def test_scenes_have_every_class_and_borders_where_the_colours_change():
    masks = torch.stack([scene(0, i, (32, 32))[1] for i in range(60)])
    assert set(masks.unique().tolist()) == set(range(len(SCENE_CLASSES)))
    assert 0.5 < float((masks == 0).double().mean()) < 0.85
    inside, across = [], []
    for i in range(60):  # neighbours differ more across a border of classes than inside of one
        image, mask = scene(0, i, (32, 32))
        change = (image[:, :, 1:].int() - image[:, :, :-1].int()).abs().sum(0)
        border = mask[:, 1:] != mask[:, :-1]
        inside.append(float(change[~border].double().mean()))
        across.append(float(change[border].double().mean()))
    assert np.mean(across) > 2 * np.mean(inside)


def test_shapes_are_what_they_are_called():
    """The area of a whole shape of radius 1: a disc's is pi, and so on."""
    from tokenmix.lab.data.scenes import _inside_shape

    at = (torch.arange(400) + 0.5) / 200 - 1
    y, x = torch.meshgrid(at, at, indexing="ij")
    arm, long = 0.3, (1 - 0.3**2) ** 0.5
    areas = {
        "disc": np.pi,
        "square": 2.0,
        "triangle": 3 * 3**0.5 / 4,
        "ring": np.pi * 0.75,
        "cross": 8 * arm * long - 4 * arm**2,
    }
    assert set(areas) == set(SCENE_CLASSES[1:])
    for name, area in areas.items():
        assert float(_inside_shape(name, x, y).double().mean()) * 4 == pytest.approx(area, rel=0.01), name


def test_splits_of_scenes_share_no_scene():
    data = open_masks("scenes", size=(16, 16), scenes=20)
    assert data.describe()["images"] == [20, 2, 2]
    assert data.describe()["names"] == list(SCENE_CLASSES)
    images = [split.read(i)[0] for split in data.splits.values() for i in range(len(split))]
    assert len({bytes(x.flatten().tolist()) for x in images}) == 24
    assert data.fingerprint == open_masks("scenes", size=(16, 16), scenes=20).fingerprint
    assert data.fingerprint != open_masks("scenes", size=(16, 16), scenes=21).fingerprint
    with pytest.raises(MixerError, match="no split 'dev'"):
        data.split("dev")
    with pytest.raises(MixerError, match="at least 8 x 8"):
        scene(0, 0, (4, 16))


def test_labels_are_read_as_they_are(tmp_path):
    """Grey, palette, 1-bit and 16-bit masks; what is ignored; the sizes of each."""
    root = folder(tmp_path, 10, size=lambda i: (8 + i, 9))
    wanted = {i: labels(8 + i, 9, seed=i) for i in range(10)}
    wanted[3][0, :4] = 255
    save(root / "masks/3.png", wanted[3])
    palette = Image.fromarray(wanted[4])
    palette.putpalette([7, 8, 9] * 256)
    palette.save(root / "masks/4.png")
    Image.fromarray(wanted[5].astype(np.uint16)).save(root / "masks/5.png")
    wanted[6] = labels(14, 9, classes=2, seed=6)
    Image.fromarray(wanted[6] * 255).convert("1").save(root / "masks/6.png")
    data = open_masks(str(root))
    assert (data.classes, data.describe()["images"]) == (("0", "1", "2"), [8, 1, 1])
    got = {m.shape[0] - 8: m for split in data.splits.values() for m in shown(split)}
    for i, mask in wanted.items():
        want = torch.tensor(mask.astype(np.int64))
        assert torch.equal(got[i], want.masked_fill(want == 255, IGNORED)), i
    image, _ = data.split("train").read(0)
    assert (image.dtype, image.shape[0], image.shape[2]) == (torch.uint8, 3, 9)


def test_colours_are_classes(tmp_path):
    """Those of classes.txt with their names and those to be ignored; without the file, in order."""
    table = np.array([(0, 0, 128), (200, 10, 0), (90, 90, 90)], np.uint8)
    root = folder(tmp_path, 10, mask=lambda i, size: table[labels(*size, seed=i)])
    data = open_masks(str(root))
    assert data.classes == ("#000080", "#5a5a5a", "#c80a00")
    numbered = torch.tensor([0, 2, 1])[torch.tensor(labels(8, 9, seed=0).astype(np.int64))]
    assert any(torch.equal(numbered, m) for split in data.splits.values() for m in shown(split))
    (root / "classes.txt").write_text("road 200 10 0\nblue sky 0 0 128\nignore 90 90 90\n")
    named = open_masks(str(root))
    assert named.classes == ("road", "blue sky")
    numbered = torch.tensor([1, 0, IGNORED])[torch.tensor(labels(8, 9, seed=0).astype(np.int64))]
    assert any(torch.equal(numbered, m) for split in named.splits.values() for m in shown(split))
    assert named.fingerprint != data.fingerprint


def test_black_and_white_masks_by_colours(tmp_path):
    root = folder(tmp_path, 5, mask=lambda i, size: labels(*size, classes=2, seed=i) * 255)
    (root / "classes.txt").write_text("background 0 0 0\ncell 255 255 255\n")
    data = open_masks(str(root))
    assert data.classes == ("background", "cell")
    assert torch.cat([m.flatten() for m in shown(data.split("train"))]).unique().tolist() == [0, 1]


def test_labels_may_begin_at_one(tmp_path):
    """As in ADE20K: 0 belongs to no class, in splits below the folders of images and annotations."""
    for part, n in (("training", 4), ("validation", 2)):
        for i in range(n):
            save(tmp_path / "images" / part / f"{part}_{i}.jpg", noise(6, 6, 3, seed=i))
            save(tmp_path / "annotations" / part / f"{part}_{i}.png", labels(6, 6, classes=4, seed=i))
    data = open_masks(str(tmp_path), ignore=0, first_label=1)
    assert (data.classes, data.describe()["images"]) == (("1", "2", "3"), [4, 2, 2])
    want = torch.tensor(labels(6, 6, classes=4, seed=0).astype(np.int64)) - 1
    assert torch.equal(data.split("train").read(0)[1], want.masked_fill(want < 0, IGNORED))


def test_a_folder_is_checked_once_and_again_when_it_changes(tmp_path, monkeypatch):
    from tokenmix.lab.data import mask_files

    root, calls = folder(tmp_path, 6), []
    whole = mask_files._scan
    monkeypatch.setattr(mask_files, "_scan", lambda *a: calls.append(1) or whole(*a))
    first = open_masks(str(root)).fingerprint
    assert open_masks(str(root)).fingerprint == first
    assert len(calls) == 1
    save(root / "masks/0.png", labels(8, 9, seed=77))
    assert open_masks(str(root)).fingerprint != first
    assert len(calls) == 2


def rgb(i, size):
    return noise(*size, 3, seed=i)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda r: save(r / "masks/2.png", labels(8, 8)), r"2.png has 8 x 8 pixels, but its image .*2.jpg has 8 x 9"),
        (lambda r: (r / "masks/2.png").unlink(), r"1 of 10 images has no mask .images/2.jpg.;"),
        (lambda r: (r / "images/2.jpg").unlink(), r"1 of 10 masks has no image .masks/2.png.;"),
        (lambda r: (r / "classes.txt").write_text("a\nb\n"), r"the label 2 is out of range; 2 classes have"),
        (lambda r: (r / "classes.txt").write_text("a\nb\nc\nd\n"), r"no pixel of the training masks .* class 'd'"),
        (lambda r: (r / "classes.txt").write_text("a\nb\na\n"), r"line 3: the class 'a' is there twice"),
        (lambda r: (r / "classes.txt").write_text("a 0 0 0\nb\n"), r"gives colours to some classes only"),
        (lambda r: (r / "classes.txt").write_text("a 0 0 0\nb 1 1 1\n"), r"the colour \(2, 2, 2\) is none of"),
        (lambda r: save(r / "images/2.png", noise(8, 9, 3)), r"have the same name; remove one"),
        (lambda r: save(r / "masks/11.jpg", labels(8, 9)), r"11.jpg is compressed with loss"),
        (lambda r: (r / "masks/2.png").write_bytes(b"no"), r"masks/2.png is not an image"),
        (lambda r: [save(r / "masks" / f"{i}.png", rgb(i, (8, 9))) for i in range(10)], r"have 720 colours"),
        (lambda r: [save(r / "masks" / f"{i}.png", np.zeros((8, 9), np.uint8)) for i in range(10)], r"has 1 class"),
        (lambda r: [save(r / "masks" / f"{i}.png", labels(8, 9) * 2) for i in range(10)], r"class '1'.*empty_"),
        (lambda r: [p.unlink() for p in r.rglob("*.*")], r"contains no images; expected images/NAME.jpg with masks/"),
    ],
)  # fmt: skip
def test_a_bad_folder_is_one_line(tmp_path, break_it, says):
    root = folder(tmp_path)
    break_it(root)
    with pytest.raises(MixerError, match=says) as refused:
        open_masks(str(root))
    assert "\n" not in str(refused.value)


def test_other_bad_input_is_one_line(tmp_path):
    for call, says in (
        (lambda: open_masks(str(tmp_path / "none")), "there is no folder"),
        (lambda: open_masks("scenes", scenes=3), "at least 10"),
        (lambda: open_masks(str(folder(tmp_path / "two", 2))), "needs at least 3"),
        (lambda: MaskAugment(scale=(2.0, 1.0)), "least, most"),
        (lambda: MaskAugment(flip=2.0), "probability"),
        (lambda: open_masks(str(folder(tmp_path / "first", 5)), first_label=1), "below data.first_label=1"),
    ):
        with pytest.raises(MixerError, match=says):
            call()
    empty = open_masks(str(folder(tmp_path / "gap", 6, mask=lambda i, s: labels(*s, seed=i) * 2)), empty_classes=True)
    assert empty.classes == ("0", "1", "2", "3", "4")


def marked(n: int = 6, size=(10, 14)) -> MaskSplit:
    """Images whose every channel says which class a pixel has: grey 40 * class; bars of 2 to 4 pixels."""
    masks = [
        torch.tensor(labels(size[0], size[1] // 2, classes=5, seed=i)).long().repeat_interleave(2, 1) for i in range(n)
    ]
    return MaskSplit("train", n, lambda i: ((40 * masks[i]).to(torch.uint8).expand(3, -1, -1), masks[i]))


def test_image_and_mask_move_together():
    """Windows and mirrors alone keep every pixel on its class."""
    augment = MaskAugment(scale=(1.0, 1.0), flip=0.5)
    sampler = MaskSampler(marked(), image_size=(10, 14), channels=3, batch_size=6, augment=augment)
    mirrored = 0
    for step in range(4):
        x, masks = sampler.batch(step)
        pixels = (
            (x * torch.tensor(sampler.std)[:, None, None] + torch.tensor(sampler.mean)[:, None, None]) * 255
        ).round()
        assert torch.equal(pixels[:, 0].long(), 40 * masks)
        originals = [marked().read(i)[1] for i in range(6)]
        mirrored += sum(any(torch.equal(m, o.flip(-1)) for o in originals) for m in masks)
    assert 4 < mirrored < 20


def test_scaled_masks_lie_on_their_images():
    """A straight border of the mask is that of the image, and no class is made up between two others."""
    image = torch.zeros(3, 40, 40, dtype=torch.uint8)
    mask = torch.full((40, 40), 4)
    image[:, :, 24:], mask[:, 24:] = 255, 1
    for size in ((27, 53), (40, 61), (80, 80), (13, 17)):
        x, m = resize_pair(image, mask, size)
        assert set(m.unique().tolist()) == {1, 4}
        assert int(((x[0] > 127) != (m == 1)).sum(1).max()) == 0, size
    augment = MaskAugment(scale=(0.5, 2.0))
    split = MaskSplit("train", 1, lambda i: (image, mask))
    sampler = MaskSampler(
        split, image_size=(32, 32), channels=3, batch_size=8, augment=augment, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    x, masks = sampler.batch(0)
    assert set(masks.unique().tolist()) == {IGNORED, 1, 4}
    assert bool((x.abs().sum(1)[masks == IGNORED] == 0).all())
    seen = masks != IGNORED
    assert bool(((x[:, 0] > 0) == (masks == 1))[seen].double().mean() > 0.999)
    assert 0.05 < float((~seen).double().mean()) < 0.6


def test_a_window_shows_all_of_a_small_image_and_a_part_of_a_large_one():
    rng = random.Random(0)
    x, mask = torch.arange(1.0, 13).view(1, 3, 4), torch.arange(1, 13).view(3, 4)
    for _ in range(5):
        y, m = window(x, mask, (5, 3), rng)
        assert (y.shape, m.shape) == ((1, 5, 3), (5, 3))
        inside = m != IGNORED
        assert int(inside.sum()) == 9
        assert torch.equal(y[0][inside].long(), m[inside])
        assert not bool(y[0][~inside].any())


def test_a_batch_is_a_function_of_seed_and_step():
    options = {"image_size": (16, 16), "channels": 3, "batch_size": 4, "augment": MaskAugment((0.5, 2), 0.5, 0.2)}
    data = open_masks("scenes", size=(20, 24), scenes=10)
    sampler = MaskSampler(data.split("train"), seed=1, **options)
    later = sampler.batch(3)
    sampler.batch(0)
    assert all(torch.equal(a, b) for a, b in zip(later, sampler.batch(3), strict=True))
    other = MaskSampler(data.split("train"), seed=2, **options).batch(3)
    assert not torch.equal(later[0], other[0])
    seen = []
    plain = MaskSampler(data.split("train"), seed=1, **{**options, "batch_size": 5, "augment": MaskAugment()})
    for step in range(2):
        seen += [bytes(x.mul(50).to(torch.int8).flatten().tolist().__repr__(), "ascii") for x in plain.batch(step)[0]]
    assert len(set(seen)) == 10


def test_evaluation_keeps_masks_at_their_own_size():
    split = marked(5, (12, 20))
    batches = list(mask_batches(split, batch_size=2, image_size=(8, 8), channels=1))
    assert [x.shape for x, _ in batches] == [(2, 1, 8, 8), (2, 1, 8, 8), (1, 1, 8, 8)]
    masks = [m for _, part in batches for m in part]
    assert all(torch.equal(m, split.read(i)[1]) for i, m in enumerate(masks))
    assert len(list(mask_batches(split, batch_size=2, image_size=(8, 8), channels=3, limit=2))) == 1


def test_classes_have_colours_and_what_is_ignored_is_white():
    mask = torch.tensor([[0, 1], [IGNORED, 200]])
    painted = paint_mask(mask, 201)
    assert (painted.shape, painted.dtype) == ((3, 2, 2), torch.uint8)
    assert painted[:, 1, 0].tolist() == [255, 255, 255]
    assert painted[:, 0, 0].tolist() == [0, 0, 0]
    assert len({tuple(paint_mask(torch.tensor([[i]]), 201)[:, 0, 0].tolist()) for i in range(200)}) == 200
