"""Distillation after surgery: layers learn, outputs learn, a stop changes nothing, the report reads the run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery_models import make, padded, shared
from tokenmix import MixerError
from tokenmix.hosts.surgery import replace_mixers
from tokenmix.hosts.surgery.capture import adapters_by_site, capture_calls, layer_losses
from tokenmix.lab.report import write_report
from tokenmix.lab.train import distill


def batches(name: str, n: int = 4) -> list[Any]:
    torch.manual_seed(5)
    if name in ("timm", "vit"):
        return [torch.randn(4, 3, 32, 32) for _ in range(n)]
    if name == "transformer":
        return [(torch.randn(2, 7, 32), torch.randn(2, 5, 32)) for _ in range(n)]
    if name == "detr":
        return [{"pixel_values": torch.randn(2, 3, 48, 48)} for _ in range(n)]
    found = []
    for _ in range(n):
        ids, mask = padded("left")
        found.append(
            {"input_ids": torch.where(mask.bool(), torch.randint(3, 60, ids.shape), 0), "attention_mask": mask}
        )
    return found


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "timm", "detr", "transformer"])
@torch.no_grad()
def test_softmax_in_the_same_place_has_no_loss(name):
    teacher = shared(name)
    adapters = adapters_by_site(replace_mixers(teacher, "attention")[0])
    other = adapters_by_site(replace_mixers(teacher, "hydra", seed=0)[0])
    for batch in batches(name, 1):
        with capture_calls(teacher, adapters) as calls:
            teacher(**batch) if isinstance(batch, dict) else teacher(*batch) if isinstance(batch, tuple) else teacher(
                batch
            )
    losses = layer_losses(adapters, calls)
    assert len(losses) == len(adapters) == len(other)
    assert all(loss < 1e-9 for loss in losses.values())
    assert all(loss > 1e-2 for loss in layer_losses(other, calls).values())


def test_padding_takes_no_part_in_the_losses():
    teacher, batch = shared("bert"), batches("bert", 1)[0]
    adapters = adapters_by_site(replace_mixers(teacher, "hydra", seed=0)[0])

    def losses(ids: torch.Tensor) -> list[float]:
        with torch.no_grad(), capture_calls(teacher, adapters) as calls:
            teacher(ids, attention_mask=batch["attention_mask"])
            return [float(x) for x in layer_losses(adapters, calls).values()]

    changed = torch.where(batch["attention_mask"].bool(), batch["input_ids"], 41)
    assert losses(changed) == pytest.approx(losses(batch["input_ids"]), rel=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama", "timm"])
def test_both_phases_learn(name, tmp_path):
    teacher, data = shared(name, 0.2), batches(name)
    student, _ = replace_mixers(teacher, "linear", init="random", seed=0)
    frozen = copy.deepcopy({k: v for k, v in student.state_dict().items() if "mixer" not in k})
    found = distill(
        teacher,
        student,
        data,
        out=tmp_path / "run",
        layer_steps=40,
        steps=40,
        valid=data,
        eval_every=40,
        log_every=5,
        lr=1e-2,
    )
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evals = [x for x in lines if x["kind"] == "eval"]
    assert [x["step"] for x in evals] == [0, 40, 80]
    assert all(evals[1]["layer_loss"][k] < 0.8 * loss for k, loss in evals[0]["layer_loss"].items())
    assert evals[2]["output_loss"] < 0.7 * evals[0]["output_loss"]
    assert found["step"] == 80
    assert {x["phase"] for x in lines if x["kind"] == "train"} == {"layers", "outputs"}
    assert all(torch.equal(student.state_dict()[k], v) for k, v in frozen.items())  # only the mixers learned
    assert all(p.requires_grad for p in student.parameters())
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "2 x linear" in page


def test_a_stop_changes_nothing(tmp_path):
    teacher, data = make("gpt2"), batches("gpt2")
    start, _ = replace_mixers(teacher, "aft_simple", seed=0)
    options: dict[str, Any] = {"layer_steps": 4, "save_every": 3, "log_every": 2, "train": "all", "valid": data[:1]}

    def student() -> Any:
        return copy.deepcopy(start)

    whole, cut = student(), student()
    distill(teacher, whole, data, out=tmp_path / "whole", steps=6, **options)
    distill(teacher, cut, data, out=tmp_path / "cut", steps=6, **options | {"keep": 9})
    for later in ("step_00000009", "step_00000010"):
        stale = tmp_path / "cut" / "checkpoints" / later
        if stale.is_dir():
            stale.rename(tmp_path / later)  # as if the run had been killed after step 6
    again = student()
    distill(teacher, again, data, out=tmp_path / "cut", steps=6, resume=True, **options | {"keep": 9})
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


def losses(run: Path) -> list[Any]:
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [(x["step"], x.get("loss"), x.get("output_loss")) for x in lines]


def test_labels_add_the_models_own_loss(tmp_path):
    teacher = make("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    student, _ = replace_mixers(teacher, "aft_simple", seed=0)
    data = [b | {"labels": b["input_ids"]} for b in batches("gpt2")]
    distill(teacher, student, data, out=tmp_path / "a", layer_steps=0, steps=1, log_every=1, task_weight=2.0)
    plain, _ = replace_mixers(teacher, "aft_simple", seed=0)
    distill(teacher, plain, data, out=tmp_path / "b", layer_steps=0, steps=1, log_every=1)
    first = [losses(tmp_path / run)[0][1] for run in "ab"]
    own = float(replace_mixers(teacher, "aft_simple", seed=0)[0](**data[0]).loss.detach())
    assert first[0] - first[1] == pytest.approx(2 * own, rel=1e-4)
    with pytest.raises(MixerError, match="task_weight needs batches with labels"):
        distill(teacher, plain, batches("gpt2"), out=tmp_path / "c", layer_steps=0, steps=1, task_weight=1.0)


def test_bad_input_is_one_line(tmp_path):
    teacher = shared("bert")
    student, _ = replace_mixers(teacher, "hydra", seed=0)
    data = batches("bert")
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((copy.deepcopy(teacher).train(), student, data), {}, "teacher is in training mode"),
        ((teacher, teacher, data), {}, "the student has no replaced attention"),
        ((teacher, student, iter(data)), {}, r"must be a list of batches, or a function of the step.*list\(loader\)"),
        ((teacher, student, []), {}, "data must be a list of batches, .*got an empty one"),
        ((teacher, student, data), {"valid": []}, "valid must be a list of batches, .*got an empty one; leave it out"),
        ((teacher, student, data), {"valid": iter(data)}, r"valid must be a list of batches.*list\(loader\) makes one"),
        ((teacher, student, data), {"stepz": 3}, "unexpected keyword argument 'stepz'"),
        ((teacher, student, data), {"train": "heads"}, "train must be 'mixers' or 'all', got 'heads'"),
        ((teacher, student, data), {"steps": 0, "layer_steps": 0}, "not both 0"),
        ((shared("gpt2"), student, data), {}, "has no module 'encoder.layer.0.attention'"),
    ]
    for i, (args, options, message) in enumerate(bad):
        with pytest.raises(MixerError, match=message):
            distill(*args, out=tmp_path / str(i), **{"layer_steps": 1, "steps": 0} | options)
    distill(teacher, student, data, out=tmp_path / "run", layer_steps=1, steps=0)
    with pytest.raises(MixerError, match="holds a run already"):
        distill(teacher, student, data, out=tmp_path / "run", layer_steps=1, steps=0)
    with pytest.raises(MixerError, match=r"started with other settings \(temperature\)"):
        distill(teacher, student, data, out=tmp_path / "run", layer_steps=1, steps=0, resume=True, temperature=2.0)


def test_what_no_step_can_be_taken_with_is_refused(tmp_path):
    teacher = make("gpt2")
    student = replace_mixers(teacher, "linear")[0]
    data = [{"input_ids": torch.randint(60, (2, 8))}]
    for name in ("log_every", "eval_every", "save_every"):
        with pytest.raises(MixerError, match=f"distill: {name} must be >= 1, got 0"):
            distill(teacher, student, data, out=tmp_path / "run", **{name: 0})
    with pytest.raises(MixerError, match="the mixers are float16, in which Adam's eps is 0"):
        distill(teacher.half(), student.half(), data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
