"""Training on point clouds: both tasks end to end, their scores, their pages, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.cli import main
from tokenmix.lab.data.points import Cloud, PointSet
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report import write_report
from tokenmix.lab.report.clouds import project_points
from tokenmix.lab.train import evaluate_run, match_data, train
from tokenmix.lab.train.tasks import open_task
from tokenmix.models import build_model

TINY = {
    "model.dim": 16,
    "model.lift": 8,
    "model.fuse": 16,
    "model.hidden": [8],
    "model.neighbours": [4],
    "model.layers": 1,
    "data.points": 48,
    "data.clouds": 20,
    "data.held_out": 10,
    "train.batch_size": 4,
    "train.steps": 2,
    "train.eval_every": 2,
    "train.save_every": 2,
}


def tiny(name, **changes):
    samples = [24] if name == "points_classify" else [0]
    return RECIPES[name].config("external").override({**TINY, "model.samples": samples, **changes})


PAGES = [
    ("points_classify", "accuracy", "Clouds of the validation split: blue"),
    ("points_parts", "instance_miou", "a colour for each part"),
]


@pytest.mark.parametrize(("name", "metric", "said"), PAGES)
def test_a_run_trains_is_scored_and_has_a_page_with_its_clouds(name, metric, said, tmp_path, capsys):
    summary = train(tiny(name), tmp_path / "run", verbose=False)
    assert summary["clouds"] == 8
    assert 0 <= summary[f"valid_{metric}"] <= 1
    found = evaluate_run(tmp_path / "run", split="valid", device="cpu")
    assert getattr(found, metric) == pytest.approx(summary[f"valid_{metric}"])
    assert found.clouds == 10
    assert main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert "10 clouds of 48 points" in capsys.readouterr().out
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert said in page
    assert "Point clouds of run" in page


def test_the_command_line_takes_classes_and_parts_from_the_data():
    config = match_data(tiny("points_parts").override({"model.classes": 9, "model.parts": 9}))
    assert (config.model.classes, config.model.parts) == (5, 13)
    config = match_data(tiny("points_classify").override({"data.source": "objects"}))
    assert config.model.classes == 5


def test_what_does_not_fit_is_refused_in_one_line():
    for name, changes, message in (
        ("points_classify", {"data.points": 20}, "need clouds of at least 24"),
        ("points_parts", {"model.samples": [8]}, "samples of 0"),
        ("points_classify", {"model.pool": "mean"}, "pool must be one of"),
        ("points_classify", {"model.samples": [24, 8]}, "as many as each other"),
        ("points_classify", {"data": {"kind": "text"}}, "is trained on data of kind 'points'"),
    ):
        with pytest.raises(MixerError, match=message) as found:
            tiny(name, **changes)
        assert "\n" not in str(found.value)
    for name, changes, message in (
        ("points_classify", {"model.classes": 3}, "solids has 10 classes"),
        ("points_parts", {"data.source": "solids", "model.classes": 10}, "solids has no parts"),
        ("points_parts", {"model.parts": 14}, "objects has 13 labels of parts"),
        ("points_classify", {"data.source": "modelnet40"}, "there is no folder 'modelnet40'"),
    ):
        with pytest.raises(MixerError, match=message):
            open_task(tiny(name, **changes))


class Known(torch.nn.Module):
    """Answers with given logits, cloud by cloud."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.at = torch.nn.Parameter(logits), 0

    def forward(self, points, category=None):
        self.at += len(points)
        return self.logits[self.at - len(points) : self.at]


class Listed(PointSet):
    """A set of given clouds."""

    def __init__(self, clouds, classes, parts=()):
        super().__init__("listed", classes, parts, {"valid": [(0, c.category) for c in clouds]})
        self.clouds = clouds

    def held_out(self, split, n, limit=None):
        return iter(self.clouds)


def labelled(category, parts):
    return Cloud(torch.randn(len(parts), 3), category, torch.tensor(parts))


def test_accuracy_is_the_share_of_clouds_and_the_mean_of_classes():
    task = open_task(tiny("points_classify"))
    task.set = Listed([labelled(c, [0, 0]) for c in (0, 0, 0, 1)], ("a", "b"))
    score = task.evaluate(Known(torch.tensor([[2.0, 0], [2, 0], [0, 2], [0, 2]])), "valid")
    assert (score.accuracy, score.class_accuracy) == (0.75, pytest.approx((2 / 3 + 1) / 2))
    nats = torch.tensor([2.0, 0]).logsumexp(0)
    assert score.cross_entropy == pytest.approx(float((3 * (nats - 2) + nats) / 4))


def test_instance_and_category_mean_iou():
    task = open_task(tiny("points_parts"))
    clouds = [labelled(0, [0, 0, 1, 1]), labelled(0, [0, 0, 0, 0]), labelled(1, [2, 3, 3, 3])]
    task.set = Listed(clouds, ("a", "b"), ((0, 1), (2, 3)))
    said = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0], [2, 2, 3, 3]])
    score = task.evaluate(Known(torch.nn.functional.one_hot(said, 4).float()), "valid")
    ious = [(1 / 2 + 2 / 3) / 2, 1.0, (1 / 2 + 2 / 3) / 2]
    assert score.instance_miou == pytest.approx(sum(ious) / 3)
    assert score.category_miou == pytest.approx(((ious[0] + 1) / 2 + ious[2]) / 2)
    assert score.point_accuracy == pytest.approx(10 / 12)


def test_a_model_is_initialised_the_same_way_again():
    config = tiny("points_parts").model
    torch.manual_seed(3)
    one = build_model(config)
    before = {name: p.clone() for name, p in one.state_dict().items()}
    for p in one.parameters():
        torch.nn.init.constant_(p, 7.0)
    torch.manual_seed(3)
    one.reset_parameters()
    for name, p in one.state_dict().items():
        assert p.shape == before[name].shape
        assert not (p == 7).all(), name


def test_what_is_higher_appears_higher_and_what_is_in_front_nearer():
    _, up, away = project_points(torch.tensor([[0.0, 0, 0], [0, 0, 1], [0, 1, 0]]))
    assert up[1] > up[0]
    assert away[2] > away[0]
