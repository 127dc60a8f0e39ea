"""The example of clips: what it draws moves as labelled, and it trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[1] / "examples/video.py"


@pytest.fixture(scope="module")
def video():
    spec = importlib.util.spec_from_file_location("video_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shapes_move_the_way_of_their_label(video):
    """Of all shifts by up to two pixels, one of the label's direction fits the next frame best."""
    clips, labels = video.clips(3, 40)
    assert clips.shape == (40, 1, 8, 24, 24)
    assert labels.unique().numel() == 8
    shifts = [(y, x) for y in range(-2, 3) for x in range(-2, 3)]
    first, after = clips[:, 0, :-1], clips[:, 0, 1:]
    fits = torch.stack([(first.roll(shift, (2, 3)) * after).sum((1, 2, 3)) for shift in shifts], 1)
    found = torch.tensor(shifts)[fits.argmax(1)].sign()
    assert (found == video.WAYS[labels]).all(1).float().mean() > 0.9
    again, _ = video.clips(3, 40)
    assert torch.equal(clips, again)


@pytest.mark.parametrize("mixer", ["attention", "hydra", "aft_conv"])
def test_each_mixer_takes_the_grid_of_clips(video, mixer):
    model = video.VideoTransformer(mixer)
    images, labels = video.clips(0, 2)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    assert all(float(p.grad.abs().max()) > 0 for p in (model.patch.weight, model.positions))
    assert model.blocks[0].on_grid == (mixer == "aft_conv")


def test_a_run_ends_in_a_score(video, tmp_path, monkeypatch):
    monkeypatch.setattr(video, "VALID", video.VALID[:1])
    assert 0 <= video.run("hydra", tmp_path / "run", steps=2)["accuracy"] <= 1
