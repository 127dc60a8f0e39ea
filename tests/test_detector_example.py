"""The example of a detector: its boxes hold the shapes, its score is the area under precision, and it trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tokenmix.lab.data import scene, scene_of_shapes

PATH = Path(__file__).parents[1] / "examples/detector.py"


@pytest.fixture(scope="module")
def detector():
    pytest.importorskip("torchvision", reason="the extra that brings it is missing", exc_type=ImportError)
    spec = importlib.util.spec_from_file_location("detector_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shapes_apart_are_the_scene():
    for index in range(20):
        image, owner, kinds = scene_of_shapes(4, index, (24, 32))
        whole, mask = scene(4, index, (24, 32))
        assert torch.equal(image, whole)
        assert torch.equal(kinds[owner], mask)
        assert kinds[0] == 0
        assert 3 <= len(kinds) <= 6


def test_boxes_hold_what_is_seen_of_a_shape(detector):
    _, boxes = detector.scenes(2, 12)
    assert (boxes[:, :, 4] > 0).any(1).all()
    for index, each in enumerate(boxes):
        _, owner, kinds = scene_of_shapes(2, index, (64, 64))
        seen = [k for k in range(1, len(kinds)) if int((owner == k).sum()) >= detector.SEEN]
        assert int((each[:, 4] > 0).sum()) == len(seen)
        for k, (*corners, kind) in zip(seen, each.tolist(), strict=False):
            x1, y1, x2, y2 = map(int, corners)
            inside = torch.zeros_like(owner, dtype=torch.bool)
            inside[y1:y2, x1:x2] = True
            own = owner == k
            assert kind == kinds[k]
            assert not (own & ~inside).any()
            assert all(own[side].any() for side in (y1, y2 - 1))
            assert all(own[:, side].any() for side in (x1, x2 - 1))


def detections(boxes, scores):
    return [
        {"boxes": b[b[:, 4] > 0, :4], "labels": b[b[:, 4] > 0, 4].long(), "scores": s[b[:, 4] > 0]}
        for b, s in zip(boxes, scores, strict=True)
    ]


def test_the_score_is_the_area_under_precision_over_recall(detector):
    _, boxes = detector.scenes(3, 60)
    scores = torch.rand(60, 5, generator=torch.Generator().manual_seed(0))
    assert detector.average_precision(detections(boxes, scores), boxes) == pytest.approx(1)
    moved = boxes.clone()
    moved[:, :, :4] += 64
    assert detector.average_precision(detections(moved, scores), boxes) == 0
    other = boxes.clone()
    other[:, :, 4] = torch.where(boxes[:, :, 4] > 0, boxes[:, :, 4] % 5 + 1, 0)
    assert detector.average_precision(detections(other, scores), boxes) < 0.2
    twice = [{k: torch.cat([v, v]) for k, v in each.items()} for each in detections(boxes, scores)]
    one = torch.tensor([[[0.0, 0, 10, 10, 1]]])
    assert 0.4 < detector.average_precision(twice, boxes) < 1  # a box that is found again counts as wrong
    # right, wrong, right of two: precision 1 at recall 1/2 and 2/3 at recall 1
    two = torch.tensor([[[0.0, 0, 10, 10, 1], [30, 30, 40, 40, 1]]])
    three = {"boxes": torch.tensor([[0.0, 0, 10, 10], [50, 50, 60, 60], [30, 30, 40, 41]])}
    found = [three | {"labels": torch.ones(3), "scores": torch.tensor([0.9, 0.8, 0.7])}]
    assert 5 * detector.average_precision(found, two) == pytest.approx((1 + 2 / 3) / 2)
    none = [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}]
    assert detector.average_precision(none, one) == 0


@pytest.mark.parametrize("backbone", ["pvt", "resnet"])
def test_a_run_ends_in_a_score(detector, backbone, tmp_path, monkeypatch):
    monkeypatch.setattr(detector, "VALID", detector.VALID[:1])
    line = detector.run(backbone, tmp_path / "run", steps=2)
    assert 0 <= line["ap50"] <= 1
    assert line["loss"] > 0


def test_repeats_of_a_box_are_left_out(detector):
    torch.manual_seed(0)
    model = detector.Detector("aft_conv")
    (found,) = model.detect(detector.scenes(5, 1)[0])
    for kind in found["labels"].unique():
        boxes = found["boxes"][found["labels"] == kind]
        overlap = detector.box_iou(boxes, boxes).fill_diagonal_(0)
        assert float(overlap.max()) <= 0.5 if len(boxes) > 1 else True
    assert found["scores"].diff().le(0).all()
