"""Test what the pixels of masks are taken for, that masks and images turn together, and what is told of a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from image_sets import noise, save
from tokenmix import MixerError
from tokenmix.lab.data import open_masks
from tokenmix.lab.data.pair_sampler import IGNORED


def values(*size: int, of: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> np.ndarray:
    return np.array(of)[np.random.default_rng(seed).integers(0, len(of), size)].astype(np.uint8)


def folder(root: Path, make, n: int = 8, size=(8, 10), ending: str = "png") -> Path:
    """images/*.jpg of noise and masks/*.png, which make(i) gives as an array or an image."""
    for i in range(n):
        save(root / "images" / f"{i}.jpg", noise(*size, 3, seed=i))
        mask = make(i)
        (root / "masks").mkdir(exist_ok=True)
        (mask if isinstance(mask, Image.Image) else Image.fromarray(mask)).save(root / "masks" / f"{i}.{ending}")
    return root


def found(data) -> list[int]:
    masks = [split.read(i)[1].flatten() for split in data.splits.values() for i in range(len(split))]
    return torch.cat(masks).unique().tolist()


def told(data) -> str:
    assert data.inventory is not None
    return "\n".join(data.inventory.lines())


@pytest.mark.parametrize("ignore", [255, None])
@pytest.mark.parametrize("mode", ["L", "RGB", "I;16", "P"])
def test_black_and_white_masks_have_two_classes(tmp_path, mode, ignore):
    def make(i: int) -> Image.Image:
        grey = values(8, 10, of=(0, 255), seed=i)
        if mode == "P":
            indexed = Image.fromarray(grey)
            indexed.putpalette([7] * 768)
            return indexed
        return Image.fromarray(grey.astype(np.uint16)) if mode == "I;16" else Image.fromarray(grey).convert(mode)

    root = folder(tmp_path, make)
    data = open_masks(str(root), ignore=ignore)
    assert (data.classes, found(data)) == (("0", "255"), [0, 1])
    assert torch.equal(data.split("test").read(0)[1] == 1, _stored(data, "test") == 255)
    (root / "classes.txt").write_text("background\ncell\n")
    assert open_masks(str(root), ignore=ignore).classes == ("background", "cell")


def _stored(data, split: str) -> torch.Tensor:
    """Return the grey levels of the mask of a split's first image."""
    image = Image.open(data.split(split).read.args[0].pairs[split][0][1])
    return torch.from_numpy(np.asarray(image.convert("L") if image.mode == "RGB" else image).astype(np.int64))


@pytest.mark.parametrize(
    ("of", "options", "words"),
    [
        ((0, 128, 255), {}, r"is of class '1'; its masks hold 0, 128, 255, and ignore=255; .*classes.txt .NAME 128"),
        ((0, 255), {"ignore": 0}, r"is of class '0'; its masks hold 0, 255, and ignore=0"),
        ((255,), {}, r"has 0 class.*its masks hold 255, and ignore=255"),
        ((0,), {"ignore": None}, r"has 1 class; a model needs two to tell apart; its masks hold 0;"),
        ((0, 255), {"first_label": 1}, r"has the label 0, below data.first_label=1"),
    ],
)
def test_labels_that_are_no_classes_are_refused_with_the_cause(tmp_path, of, options, words):
    root = folder(tmp_path, lambda i: values(8, 10, of=of, seed=i))
    with pytest.raises(MixerError, match=words) as refused:
        open_masks(str(root), **options)
    assert "\n" not in str(refused.value)


def test_a_label_of_another_number_of_bits_is_refused(tmp_path):
    deep = folder(tmp_path / "a", lambda i: values(8, 10, seed=i).astype(np.uint16) * 32767)
    with pytest.raises(MixerError, match="its masks hold 0, 32767, 65534"):
        open_masks(str(deep))
    wide = folder(tmp_path / "b", lambda i: values(8, 10, seed=i).astype(np.int32) * 50_000, ending="tif")
    with pytest.raises(MixerError, match=r"has the label 100000, more than the 65536 classes .*data.ignore=100000"):
        open_masks(str(wide))


def test_labels_saved_as_grey_colours_are_labels(tmp_path):
    root = folder(tmp_path / "a", lambda i: Image.fromarray(values(8, 10, of=(0, 1, 2, 255), seed=i)).convert("RGB"))
    data = open_masks(str(root))
    assert (data.classes, found(data)) == (("0", "1", "2"), [IGNORED, 0, 1, 2])
    shades = folder(tmp_path / "b", lambda i: Image.fromarray(values(8, 10, of=(0, 90, 200), seed=i)).convert("RGB"))
    assert open_masks(str(shades)).classes == ("#000000", "#5a5a5a", "#c8c8c8")


def test_masks_with_an_alpha_channel(tmp_path):
    whole = folder(tmp_path / "a", lambda i: Image.fromarray(values(8, 10, seed=i)).convert("RGBA"))
    assert open_masks(str(whole)).classes == ("0", "1", "2")
    image = Image.open(whole / "masks/3.png")
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.save(whole / "masks/3.png")
    with pytest.raises(MixerError, match="masks/3.png has transparent pixels, whose class is unknown"):
        open_masks(str(whole))


def test_labels_beside_colours_are_refused(tmp_path):
    table = np.array([(0, 0, 128), (200, 10, 0), (90, 90, 90)], np.uint8)
    root = folder(tmp_path, lambda i: table[values(8, 10, seed=i)] if i else values(8, 10, seed=i))
    with pytest.raises(MixerError, match="masks/0.png holds labels and .*masks/.*.png colours; save all masks alike"):
        open_masks(str(root))


# --- images that a camera turned


def turned_set(root: Path, how: int, size: tuple[int, int], drawn_on: str) -> Path:
    """Images whose mask is 1 where they are bright, drawn on the image as it is stored, or on the upright one."""
    exif = Image.Exif()
    exif[0x0112] = how
    stored = np.zeros(size, np.uint8)
    stored[:2, : size[1] // 2] = 1
    for i in range(6):
        picture = Image.fromarray(stored * 200).convert("RGB")
        save_to = root / "images" / f"{i}.png"
        save_to.parent.mkdir(parents=True, exist_ok=True)
        picture.save(save_to, exif=exif)
        (root / "masks").mkdir(exist_ok=True)
        mask = Image.fromarray(stored)
        if drawn_on == "upright":
            mask.getexif()[0x0112] = how
            mask = ImageOps.exif_transpose(mask)
        mask.save(root / "masks" / f"{i}.png")
    return root


@pytest.mark.parametrize("how", range(1, 9))
@pytest.mark.parametrize("drawn_on", ["stored", "upright"])
def test_images_and_masks_are_turned_together(tmp_path, how, drawn_on):
    root = turned_set(tmp_path / "set", how, (8, 10), drawn_on)
    told_by_size = how == 1 or how >= 5
    if not told_by_size:
        with pytest.raises(MixerError, match=rf"turned upright .EXIF orientation {how}.*turn_masks=True"):
            open_masks(str(root))
    data = open_masks(str(root), turn_masks=None if told_by_size else drawn_on == "stored")
    image, mask = data.split("train").read(0)
    assert image.shape[1:] == mask.shape == ((10, 8) if how >= 5 else (8, 10))
    assert torch.equal(image[0] > 100, mask == 1)
    assert ("6 images turned upright by EXIF" in told(data)) == (how > 1)


def test_a_wrong_word_about_turned_masks_is_refused_by_size(tmp_path):
    root = turned_set(tmp_path / "set", 6, (8, 10), "stored")
    with pytest.raises(MixerError, match=r"has 8 x 10 pixels, but its image .* has 10 x 8"):
        open_masks(str(root), turn_masks=False)


# --- which mask belongs to which image


def test_partners_that_are_missing_are_counted_on_both_sides(tmp_path):
    root = folder(tmp_path, lambda i: values(8, 10, seed=i))
    for i in (1, 2, 4, 5):
        (root / "masks" / f"{i}.png").unlink()
    (root / "images" / "7.jpg").unlink()
    words = r"4 of 7 images have no mask .images/1.jpg, .*4.jpg and 1 more. and 1 of 4 masks has no image .masks/7.png"
    with pytest.raises(MixerError, match=words):
        open_masks(str(root))


def test_folders_are_known_in_other_spellings_and_what_is_left_out_is_told(tmp_path):
    for part, n in (("Training", 5), ("Dev", 2), ("testing", 3)):
        for i in range(n):
            save(tmp_path / part / "Images" / f"{part}{i}.JPG", noise(6, 6, 3, seed=i))
            save(tmp_path / part / "Masks" / f"{part}{i}.png", values(6, 6, seed=i))
    (tmp_path / "Training" / "Masks" / "notes.json").write_text("{}")
    save(tmp_path / "Training" / "preview" / "1.png", noise(4, 4))
    data = open_masks(str(tmp_path))
    assert data.describe()["images"] == [5, 2, 3]
    said = told(data)
    assert "10 images with masks; splits: train 5, valid 2, test 3; pixels for training: 0 " in said
    assert "pixels without a class: 0" in said
    assert "1 no images (.json) (Training/Masks/notes.json)" in said
    assert "1 outside of images/ and masks/ (Training/preview/1.png)" in said
    (tmp_path / "train").mkdir()
    for name in ("Images", "Masks"):
        save(tmp_path / "train" / name / "x.png", values(6, 6))
    with pytest.raises(MixerError, match="has Training and train, which are both the split 'train'; keep one"):
        open_masks(str(tmp_path))


@pytest.mark.parametrize("one_bit", [False, True])
def test_masks_of_0_and_1_beside_masks_of_0_and_255_are_refused(tmp_path, one_bit):
    """255 would be left out as ignored, though it means what 1 does in the others."""

    def make(i: int) -> Image.Image:
        labels = values(8, 10, of=(0, 1), seed=i)
        return Image.fromarray(labels.astype(bool) if one_bit else labels) if i % 2 else Image.fromarray(labels * 255)

    root = folder(tmp_path / "set", make)
    with pytest.raises(MixerError, match=r"1.png holds 0 and 1, .*0.png 0 and 255, and no mask holds 1 and 255; save"):
        open_masks(str(root))
    names = "ground 0 0 0\nthing 255 255 255\n" if one_bit else "ground 0 0 0\nthing 1 1 1\nignore 255 255 255\n"
    (root / "classes.txt").write_text(names)
    assert open_masks(str(root)).classes == ("ground", "thing")
    assert open_masks(str(folder(tmp_path / "void", lambda i: values(8, 10, of=(0, 1, 255), seed=i)))).classes == (
        "0",
        "1",
    )


def test_the_list_of_classes_is_not_left_out(tmp_path):
    root = folder(tmp_path / "set", lambda i: values(8, 10, seed=i))
    (root / "classes.txt").write_text("\ufeffsky\nroad\ncar\n")
    data = open_masks(str(root))
    assert data.classes == ("sky", "road", "car")
    assert "left out" not in told(data)


def test_labels_that_begin_at_1_and_numbers_with_points(tmp_path):
    root = folder(tmp_path / "set", lambda i: values(8, 10, of=(1, 2, 3), seed=i))
    with pytest.raises(MixerError, match=r"hold 1, 2, 3, .*; if 1 is the first class, say first_label=1"):
        open_masks(str(root))
    assert open_masks(str(root), first_label=1).classes == ("1", "2", "3")
    root = folder(tmp_path / "floats", lambda i: values(8, 10, seed=i).astype(np.float32), ending="tif")
    with pytest.raises(MixerError, match=r"0.tif has floating-point pixels; save labels as whole"):
        open_masks(str(root))
