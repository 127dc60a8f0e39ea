"""Folders of runs from elsewhere: nothing outside of them is read, and whatever lies in them ends in one line."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data.records import read_records
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report.runs import load_model, read_run
from tokenmix.lab.report.watch import Watch
from tokenmix.lab.train import resume, train
from tokenmix.lab.train.rundir import RunDir
from tokenmix.models.sampling import pick_token
from tokenmix.system.checkpoint import list_steps
from tokenmix.system.files import is_own


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a small run."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_bytes(b"the cat sat on the mat. " * 300)
    fields = {"data.source": str(folder / "text.txt"), "data.seq_len": 16, "model.max_len": 16, "model.dim": 8}
    fields |= {"model.layers": 1, "train.steps": 4, "train.eval_every": 2, "train.save_every": 2}
    fields |= {"train.batch_size": 2, "train.eval_bytes": 100, "train.sample_bytes": 4, "train.log_every": 1}
    train(RECIPES["text"].config("aft_simple").override(fields), folder / "run", verbose=False)
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """Return a copy of the run."""
    return shutil.copytree(trained, tmp_path / "copy")


@pytest.fixture
def secret(tmp_path):
    """Return a file that is nobody else's business."""
    path = tmp_path / "secret.txt"
    path.write_text("the secret text\n")
    return path


def test_a_link_among_the_samples_stays_out_of_the_page(run, secret, tmp_path):
    (run / "samples" / "step_00000099.txt").symlink_to(secret)
    (run / "samples" / "step_00000098.png").symlink_to(secret)
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(secret, tmp_path / "elsewhere" / "step_00000097.txt")
    with pytest.warns(UserWarning, match=r"step_00000098.png, step_00000099.txt left out"):
        found = read_run(run)
    assert "secret" not in str(found.samples)
    assert found.drawn == []
    shutil.rmtree(run / "samples")
    (run / "samples").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="left out"):
        assert read_run(run).samples == []


@pytest.mark.parametrize("name", ["config.json", "env.json", "metrics.jsonl"])
def test_files_of_a_run_that_are_links_are_refused(name, run, tmp_path):
    (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    with pytest.raises(MixerError, match=f"{name} is a link or no regular file"):
        read_run(run)
    if name != "metrics.jsonl":
        with pytest.raises(MixerError, match=f"{name} is a link or no regular file"):
            RunDir.open(run).read(name)


def test_a_file_is_a_folders_own_only_inside_of_it(tmp_path, secret):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own").write_text("")
    assert is_own(folder / "own", folder)
    assert not is_own(folder / ".." / "secret.txt", folder)
    assert not is_own(secret, folder)
    assert not is_own(folder / "missing", folder)
    (tmp_path / "linked").symlink_to(folder)
    assert is_own(tmp_path / "linked" / "own", tmp_path / "linked")  # the folder itself may be given by a link


def test_watch_does_not_wait_for_a_pipe(run):
    for name in ("metrics.jsonl", "config.json", ".lock"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        watch = Watch([run])
        watch.read()
    assert any("config.json is a link or no regular file" in note for note in watch.notes())


def test_odd_numbers_and_names_end_in_a_line_or_are_left_out(run):
    before = len(read_records(run / "metrics.jsonl")[0])
    with (run / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"kind": "train", "step": 9, "loss": 1e308}) + "\n")
        f.write(json.dumps({"kind": "train", "step": 9, "loss": float("nan")}) + "\n")
        f.write(json.dumps({"kind": "train", "step": 9, "loss": 1e38}) + "\n")
    good, bad = read_records(run / "metrics.jsonl")
    assert (len(good) - before, len(bad)) == (2, 1)
    for name in ("step_²", "step_٣", "step_", "step_x1", "step_7"):
        (run / "checkpoints" / name).mkdir()
    assert list_steps(run / "checkpoints")[-1] == 7
    watch = Watch([run])
    watch.read()
    assert read_run(run).weights.parent.name == "step_00000004"


@pytest.mark.parametrize(("part", "value"), [("data", None), ("model", None), ("data", []), ("model", 3)])
def test_a_config_without_its_parts_is_a_note(part, value, run):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, part: value}))
    watch = Watch([run])
    watch.read()
    assert any("config.json is not the config of a run" in note for note in watch.notes())
    with pytest.raises(MixerError, match=f"{part} must be an object"):
        read_run(run)


def test_a_model_too_large_to_build_is_one_line(run):
    config = json.loads((run / "config.json").read_text())
    config["model"]["dim"] = 10**12
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(MixerError, match="the model does not fit: out of memory") as why:
        load_model(read_run(run))
    assert len(str(why.value)) < 400


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 5e-324])
def test_the_lowest_temperatures_take_the_most_likely(temperature):
    logits = torch.tensor([[0.0, 3.0, 2.999], [5e4, -5e4, 0.0]])
    assert pick_token(logits, temperature=temperature).tolist() == [[1], [0]]
    assert pick_token(logits, temperature=temperature, top_k=2, top_p=0.5).tolist() == [[1], [0]]


def test_a_higher_temperature_draws_as_before():
    logits, generator = torch.randn(64, 9), torch.Generator().manual_seed(0)
    drawn = pick_token(logits, temperature=0.7, generator=generator)
    wanted = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, wanted)


@pytest.mark.parametrize(
    "command", [("sample", "x", "--n", "5"), ("report", "x", "--ot", "y"), ("eval", "x", "--ste", "1")]
)
def test_a_mistyped_option_names_the_nearest_of_its_verb(command, capsys):
    assert cli.main(list(command)) == 2
    said = capsys.readouterr().err
    assert f"there is no option {command[2]}; " in said
    assert len(said) < 400
    assert said.count("\n") == 1


def test_what_was_typed_cannot_give_a_terminal_orders(capsys):
    assert cli.main(["report", "\x1b[2Jx\x07"]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\\x1b[2Jx" in said


def test_resume_says_what_more_steps_do_to_the_schedule(run):
    with pytest.warns(UserWarning, match=r"train.steps was 4, is 6: the cosine schedule is stretched to its new end"):
        resume(run, changes={"train.steps": 6}, verbose=False)
