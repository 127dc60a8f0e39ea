"""Test that a run takes objects of the user's own, and goes on exactly after ``kill -9``."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import sys
import time
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tokenmix.lab
from kill_nine import checkpoints, compare, lines
from tokenmix import MixerError
from tokenmix.lab.cli import main
from tokenmix.lab.report import LiveCurve, write_report
from tokenmix.lab.report.watch import Watch
from tokenmix.lab.train import DataConfig, OwnData, OwnModel, Parts, RunConfig, TrainConfig, resume, train
from tokenmix.lab.train.own_objects import fingerprint, name_of, pack_state, unpack_state
from tokenmix.models import LMConfig

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "examples" / "own"
EXAMPLES = sorted(path.stem for path in OWN.glob("own_*.py"))
LOOP = TrainConfig(steps=12, log_every=3, eval_every=6, save_every=4, keep=9, threads=1, device="cpu")


def batch(step):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    return x, (x.sum(1) > 0).long()


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


def lower_rate(step):
    return 1 - step / 12


class Stream:
    """Batches from a stream with a state, in the order of a generator of random numbers."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self):
        while True:
            yield batch(int(torch.randint(99, (), generator=self.generator)))

    def state_dict(self):
        return {"random": self.generator.get_state(), "kind": "a stream", "seen": (1, 2.5)}

    def load_state_dict(self, state):
        assert state["seen"] == (1, 2.5)
        self.generator.set_state(state["random"])


class Counter:
    """A callback with a state, which stops the process at a step."""

    stop_at = 0

    def __init__(self):
        self.calls = 0

    def on_step(self, step, model):
        self.calls += 1
        if step == Counter.stop_at:
            raise RuntimeError("the process is gone")

    def on_evaluate(self, step, model):
        return {"calls": self.calls}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def all_parts(logged) -> dict:
    own = {"model": model, "batches": Stream(), "valid": [batch(99)], "loss": loss, "schedule": lower_rate}
    own |= {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "callbacks": [Counter()]}
    return own | {"on_log": logged.append}


def test_every_part_is_ones_own_and_goes_on_to_the_bit(tmp_path, monkeypatch):
    logged: list[dict] = []
    tokenmix.lab.train(LOOP, tmp_path / "whole", **all_parts(logged))
    assert [line["step"] for line in logged] == [3, 6, 6, 9, 12, 12]
    assert [line["calls"] for line in logged if line["kind"] == "eval"] == [6, 12]
    assert [round(line["lr"], 6) for line in logged if line["kind"] == "train"] == [
        round(0.1 * lower_rate(step - 1), 6) for step in (3, 6, 9, 12)
    ]
    monkeypatch.setattr(Counter, "stop_at", 7)
    with pytest.raises(RuntimeError):
        train(LOOP, tmp_path / "broken", **all_parts([]))
    monkeypatch.setattr(Counter, "stop_at", 0)
    train(LOOP, tmp_path / "broken", resume=True, **all_parts([]))
    compare(tmp_path / "whole", tmp_path / "broken")
    own = (checkpoints(tmp_path / "whole")[-1] / "own.safetensors").read_bytes()
    assert own == (checkpoints(tmp_path / "broken")[-1] / "own.safetensors").read_bytes()
    assert any(word in own for word in (b"momentum",))


def test_weights_that_no_seed_repeats_are_saved_before_the_first_step(tmp_path, monkeypatch):
    own = {"batches": batch, "loss": loss, "callbacks": [Counter()]}
    first = model()
    kept = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    train(LOOP, tmp_path / "whole", model=first, **own)
    monkeypatch.setattr(Counter, "stop_at", 2)
    second = model()
    second.load_state_dict(kept)
    with pytest.raises(RuntimeError):
        train(LOOP, tmp_path / "broken", model=second, **own | {"callbacks": [Counter()]})
    monkeypatch.setattr(Counter, "stop_at", 0)
    train(LOOP, tmp_path / "broken", model=model(), resume=True, **own | {"callbacks": [Counter()]})
    compare(tmp_path / "whole", tmp_path / "broken")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    train(LOOP, folder, model=model, batches=batch, loss=loss, optimizer=torch.optim.Adam)
    return folder


def test_other_code_and_other_data_are_one_clear_error(run):
    again = partial(train, LOOP, run, resume=True, model=model, batches=batch, loss=loss, optimizer=torch.optim.Adam)
    assert again()["step"] == 12
    for changed, said in (
        ({"loss": F.cross_entropy}, "the code of its loss"),
        ({"batches": lambda step: batch(step + 1)}, "the code of its batches"),
        ({"optimizer": None}, "began with optimizer= of its own; give it again"),
        ({"schedule": lower_rate}, "began without schedule=; leave it out"),
    ):
        with pytest.raises(MixerError, match=said):
            again(**changed)
    own = {"model": model, "batches": batch, "loss": loss, "optimizer": torch.optim.Adam}
    config = RunConfig(OwnModel(), OwnData(), train=LOOP).override({"optim.lr": 0.5})
    with pytest.raises(MixerError, match=r"optim\.lr cannot change in the middle"):
        train(config, run, resume=True, **own)
    parts = Parts(batches=lambda step: batch(step))
    recorded = parts.record
    with pytest.raises(MixerError, match="the first batch of its batches"):
        parts.check_same({"batches": recorded["batches"] | {"first": "0"}}, run)


def test_fingerprints_see_code_and_values_and_pass_comments_over():
    def source(rate, comment=""):
        file = Path(os.environ.get("TMPDIR", "/tmp")) / f"own_{time.monotonic_ns()}.py"
        file.write_text(f"RATE = {rate}\n\ndef f(x):\n    return x * RATE{comment}\n")
        try:
            return fingerprint(runpy.run_path(str(file))["f"])
        finally:
            file.unlink()

    assert source(1, "  # a note") != source(2)
    assert fingerprint(partial(loss, 1)) != fingerprint(partial(loss, 2))
    assert fingerprint(nn.Linear(2, 3)) != fingerprint(nn.Linear(2, 4))


def test_names_are_those_that_can_be_imported():
    assert name_of(loss) == "test_own_parts:loss"
    assert name_of(F.cross_entropy) == "torch.nn.functional:cross_entropy"
    assert name_of(lambda step: 1.0) is None
    assert name_of(partial(loss, 1)) is None
    assert name_of(type("Nowhere", (), {"__module__": "not_imported"})()) is None
    assert name_of(LOOP) == "test_own_parts:LOOP" or name_of(LOOP) is None


def test_states_are_tensors_and_json():
    state = {"a": torch.ones(2), 3: [1, (2.5, None)], "d": {"e": True}}
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack_state(state, tensors, "x")))
    found = unpack_state(packed, tensors)
    assert torch.equal(found.pop("a"), state["a"])
    assert found == {3: [1, (2.5, None)], "d": {"e": True}}
    with pytest.raises(MixerError, match=r"state_dict of x\.f holds a set"):
        pack_state({"f": {1}}, {}, "x")


def test_what_cannot_be_used_is_one_line(tmp_path):
    own = {"model": model, "batches": batch, "loss": loss}
    for wrong, said in (
        ({"lose": loss}, "there is no part 'lose'; nearest: loss"),
        ({"loss": None}, "it takes loss="),
        ({"loss": 3}, "loss= takes a function, got int 3"),
        ({"schedule": [0.1]}, "schedule= takes a function, got list"),
        ({"batches": 3}, "batches= takes a function of the step, a list or a loader, got int 3"),
        ({"valid": batch}, "valid= takes a list or a loader of batches, got function"),
        ({"optimizer": "lion"}, "optimizer= takes a function of the parameters, or an optimiser, got str lion"),
        ({"callbacks": loss}, "callbacks= takes a list of functions, or of objects with on_step"),
        ({"callbacks": ["accuracy"]}, "callbacks= takes a list .* got str accuracy"),
        ({"valid": iter([])}, "not an iterator"),
        ({"optimizer": lambda parameters: 3}, "gives a int, which is no torch.optim.Optimizer"),
        ({"model": lambda: 3}, "gives a int; it must be a module"),
    ):
        with pytest.raises(MixerError, match=said):
            train(LOOP, tmp_path / "run", **own | wrong)
        assert not (tmp_path / "run").exists()
    for wrong, said in (
        (lambda step: batch(step)[0], "gives a Tensor; it must be a pair"),
        (lambda step: ((1, 2), torch.ones(1)), "gives a tuple; it must be a pair"),
        (iter([batch(0)]), "has no more; give a loader"),
    ):
        with pytest.raises(MixerError, match=said):
            train(LOOP, tmp_path / f"run {len(said)}", **own | {"batches": wrong})
    with pytest.warns(UserWarning, match="has no state_dict, so a resumed run begins it anew"):
        train(LOOP, tmp_path / "loader", **own | {"batches": torch.utils.data.DataLoader([batch(0)], batch_size=None)})


def test_reports_never_import_and_resume_only_when_allowed(tmp_path, monkeypatch, capsys):
    """The file of a run is imported by `resume --allow-code`, and by nothing that only reads."""
    monkeypatch.chdir(tmp_path)
    text = (OWN / "own_data.py").read_text().replace("steps=100", "steps=20")
    Path("own_data.py").write_text("from pathlib import Path\nPath('imported').touch()\n" + text)
    runpy.run_path("own_data.py", run_name="__main__")
    Path("imported").unlink()
    run = "runs/own_data"
    write_report([run], "page.html")
    watch = Watch([run])
    watch.read()
    assert [each.state for each in watch.runs.values()] == ["finished"]
    assert main(["report", "--watch", "--once", run]) == 0
    assert not Path("imported").exists()
    assert main(["resume", run, "--train.steps", "30"]) == 2
    said = capsys.readouterr().err
    assert f"error: {run}: the module 'own_data' of its model is not imported" in said
    assert "--allow-code" in said
    assert not Path("imported").exists()
    assert main(["resume", run, "--train.steps", "30", "--allow-code"]) == 0
    assert "30 steps" in capsys.readouterr().out
    assert Path("imported").exists()
    sys.modules.pop("own_data", None)


def run_example(name: str, folder: Path) -> None:
    """Run an example as its own program, with fewer steps, in a process that has imported torch already."""
    os.chdir(folder)
    for file in OWN.glob("own_*.py"):
        Path(file.name).write_text(file.read_text().replace("steps=100", "steps=40").replace("every=50", "every=20"))
    sys.path.insert(0, str(folder))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (of a process that ends)
    torch.set_num_threads(1)
    runpy.run_path(f"{name}.py", run_name="__main__")


def start_example(name: str, folder: Path) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tokenmix.lab.train"])
    process = context.Process(target=run_example, args=(name, folder))
    process.start()
    return process


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_killed_and_resumed_to_the_same_numbers(name, tmp_path):
    text = (OWN / f"{name}.py").read_text()
    if "from datasets" in text:
        pytest.importorskip("datasets")
    assert len(text.splitlines()) <= 40
    assert text.strip() in (ROOT / "docs" / "own-parts.md").read_text(), "the page shows another file"
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
    broken, whole = (tmp_path / folder / "runs" / name for folder in ("broken", "whole"))
    process = start_example(name, tmp_path / "broken")
    while len(checkpoints(broken)) < 2 or not lines(broken):
        assert process.is_alive()
        time.sleep(0.002)
    process.kill()
    process.join()
    assert json.loads((broken / "env.json").read_text())["resumed"] == []
    for folder in ("broken", "whole"):
        process = start_example(name, tmp_path / folder)
        process.join()
        assert process.exitcode == 0
    assert len(json.loads((broken / "env.json").read_text())["resumed"]) == 1, "it was not killed in time"
    compare(whole, broken)


def test_a_curve_grows_in_a_notebook(monkeypatch, tmp_path):
    """The display is a stand-in: IPython is no dependency, and nobody looks at this notebook."""
    shown: list = []

    class Handle:
        def update(self, figure):
            shown.append(figure)

    def display(figure, display_id):
        shown.append(figure)
        return Handle()

    module = types.ModuleType("IPython.display")
    module.display = display
    package = types.ModuleType("IPython")
    package.version_info = (9, 0)  # matplotlib asks
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(OWN)
    notebook = json.loads((OWN / "live_curve.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum(len(cell.splitlines()) for cell in cells) <= 40
    space: dict = {}
    for cell in cells:
        exec(cell.replace("steps=300", "steps=20"), space)
    assert len(shown) >= 2
    points = shown[-1].axes[0].lines
    assert list(points[0].get_xdata()) == [10, 20]
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(MixerError, match="needs IPython"):
        LiveCurve()


def test_a_text_run_takes_a_loss_and_nothing_else(tmp_path):
    """The score stays that of the data; the line of training says no bits per byte, which the loss is not."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(b"to be, or not to be: that is the question. " * 90)
    config = RunConfig(
        LMConfig(dim=8, max_len=16, mixers=({"name": "aft_simple"},)), DataConfig(str(corpus), seq_len=16)
    )
    config = config.override({"train.steps": 4, "train.batch_size": 2, "train.device": "cpu", "train.eval_bytes": 99})

    def half(outputs, targets):
        return 0.5 * F.cross_entropy(outputs.flatten(0, 1), targets.flatten().long())

    found = train(config, tmp_path / "run", loss=half)
    assert found["valid_bits_per_byte"] > 1
    assert "bpb" not in lines(tmp_path / "run")[0]
    with pytest.raises(MixerError, match="its loss has no name to import"):
        resume(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
