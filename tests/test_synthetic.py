"""Training on synthetic sequences: the data, runs to the bit, what reads the runs, and sweeps over them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import kill_nine
from test_sweep import in_this_process
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data import SYNTHETIC_TASKS, Synthetic
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report import read_run
from tokenmix.lab.report.curves import Screen, frame
from tokenmix.lab.report.tables import summary_table
from tokenmix.lab.report.watch import Watch
from tokenmix.lab.sweep import Results, SweepPlan, compare, results_table, sweep
from tokenmix.lab.train import (
    OptimConfig,
    RunConfig,
    SyntheticDataConfig,
    TrainConfig,
    evaluate_run,
    resume,
    sample_run,
    train,
)
from tokenmix.lab.train.synthetic_task import answer
from tokenmix.lab.train.tasks import open_task
from tokenmix.mixers import state_bytes
from tokenmix.models import LMConfig, build_model

ROOT = Path(__file__).parents[1]
SMALL = {"model.dim": 16, "model.layers": 1, "model.max_len": 12, "model.vocab": 16, "data.seq_len": 12}
SMALL |= {"data.pairs": 3, "data.held_out": 32, "train.batch_size": 8, "train.threads": 1}


def config(task: str = "recall", **data) -> RunConfig:
    model = LMConfig(dim=16, max_len=12, mixers=({"name": "attention", "heads": 2},), layers=1, vocab=16, dropout=0.1)
    loop = TrainConfig(steps=12, batch_size=4, log_every=3, eval_every=4, eval_batch=5, save_every=4, keep=3, threads=1)
    data = {"seq_len": 12, "pairs": 3, "held_out": 16, **data}
    return RunConfig(model, SyntheticDataConfig(task, **data), OptimConfig(lr=1e-2, warmup=2), loop)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run nobody touched."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(config(), out)
    return out


@pytest.mark.parametrize("task", SYNTHETIC_TASKS)
def test_what_is_held_out_never_comes_in_training(task):
    sizes = {"seq_len": 24 if task == "recall" else 600, "vocab": 64, "pairs": 6, "shortest": 20, "longest": 20}
    if task == "parity":
        sizes |= {"shortest": 60, "longest": 60}
    drawn = Synthetic(task, **sizes)
    held = [drawn.held_out(split, 200)[0] for split in ("valid", "test")]
    seen = [drawn.batch(50, seed=seed, step=step)[0] for seed in (0, 1, -1) for step in range(20)]
    rows = {tuple(row) for part in (*held, *seen) for row in part.tolist()}
    assert len(rows) == 2 * 200 + 3 * 20 * 50
    again = Synthetic(task, **sizes)
    assert torch.equal(held[0], again.held_out("valid", 200)[0])
    assert torch.equal(seen[25], again.batch(50, seed=1, step=5)[0])
    with pytest.raises(MixerError, match=f"{task} has no split 'tests'; choose one of train, valid, test"):
        drawn.held_out("tests", 1)


def test_examples_come_once_an_epoch_in_new_orders():
    drawn = Synthetic("addition", 64, 64, longest=6, examples=20)
    batches = [drawn.batch(8, seed=3, step=step) for step in range(10)]  # 4 epochs
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    rows = [tuple(row) for row in torch.cat([tokens, targets], 1).tolist()]
    epochs = [rows[at : at + 20] for at in range(0, 80, 20)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == 20
    assert len(set(map(tuple, epochs))) == 4
    assert torch.equal(drawn.batch(8, seed=3, step=7)[0], batches[7][0])
    assert not set(map(tuple, drawn.batch(20, seed=4, step=0)[0].tolist())) & {tuple(r) for r in tokens.tolist()}
    assert torch.equal(drawn.held_out("valid", 50)[0], replace(drawn, examples=None).held_out("valid", 50)[0])
    with pytest.raises(MixerError, match="addition: examples is at least 1, or None .* got 0"):
        replace(drawn, examples=0)


@pytest.mark.parametrize("step", [4, 8])
def test_going_back_and_on_again_gives_the_same_bits(whole, tmp_path, step):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    resume(run, from_step=step)
    kill_nine.compare(whole, run)


class Answers(nn.Module):
    """Guesses the target of every scored position but each fourth."""

    def __init__(self, tokens, targets, vocab):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        flat = targets.clamp(min=0).flatten()
        scored = (targets >= 0).flatten().nonzero()[:, 0]
        flat[scored[::4]] = (flat[scored[::4]] + 1) % vocab
        self.known = dict(zip(map(tuple, tokens.tolist()), flat.view_as(targets).tolist(), strict=True))
        self.vocab = vocab

    def forward(self, x):
        guesses = torch.tensor([self.known[tuple(row)] for row in x.tolist()])
        return 9.0 * nn.functional.one_hot(guesses, self.vocab)


def test_the_accuracy_is_that_of_the_scored_positions():
    opened = open_task(config())
    tokens, targets = opened.split("test")
    score = opened.evaluate(Answers(tokens, targets, 16), "test")
    assert (score.targets, score.sequences, score.seq_len) == (48, 16, 12)
    assert score.accuracy == 0.75
    assert score.exact == 4 / 16  # every fourth of 48 targets is wrong: one in each of 12 sequences
    tokens, _ = opened.split("train")
    assert torch.equal(tokens[4:8], opened.batch(1)[0])


def test_a_run_leaves_its_record(whole):
    env, lines = json.loads((whole / "env.json").read_text()), kill_nine.lines(whole)
    assert env["synthetic"]["name"] == "recall"
    assert len(env["synthetic"]["sha256"]) == 64
    model = build_model(config().model)
    _, state = model.extend(torch.zeros(1, 12, dtype=torch.long), model.init_state(1))
    assert (env["state_bytes_per_row"], env["state_context"]) == (state_bytes(state), 12)
    scores = [line for line in lines if line["kind"] == "eval"]
    assert [line["targets"] for line in scores] == [48] * 3
    assert RunConfig.from_json(json.loads((whole / "config.json").read_text())) == config()


def test_sequences_that_torch_draws_differently_are_refused(whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    env = json.loads((run / "env.json").read_text())
    env["synthetic"]["sha256"] = "0" * 64
    (run / "env.json").write_text(json.dumps(env))
    for use in (resume, evaluate_run):
        with pytest.raises(MixerError, match="not those that this run was trained on"):
            use(run)
    (run / "env.json").write_text(json.dumps(env | {"synthetic": 3}))
    with pytest.raises(MixerError, match="synthetic must be an object, got 3"):
        resume(run)


def test_the_best_checkpoint_is_the_one_with_the_highest_accuracy(tmp_path):
    """A rate so high that the scores go up and down."""
    wild = replace(config(), optim=OptimConfig(lr=0.3, warmup=1, schedule="constant"))
    summary = train(wild.override({"train.steps": 40}), tmp_path / "run")
    scores = {e["step"]: e["accuracy"] for e in kill_nine.lines(tmp_path / "run") if e["kind"] == "eval"}
    assert len(set(scores.values())) > 2
    assert summary["best_accuracy"] == scores[summary["best_step"]] == max(scores.values())


@pytest.mark.parametrize(
    ("task", "data", "words"),
    [
        ("recal", {}, "there is no synthetic task 'recal'; nearest: recall"),
        ("recall", {"pairs": 5}, "recall: 5 pairs need seq_len >= 15 and vocab >= 11, got seq_len=12, vocab=16"),
        ("recall", {"pairs": 4, "vocab": 8}, "4 pairs need seq_len >= 12 and vocab >= 9, got seq_len=12, vocab=8"),
        ("recall", {"pairs": 0}, "recall: pairs must be at least 1, got 0"),
        ("recall", {"vocab": 17}, "data.vocab must be at most model.vocab=16, got 17"),
        ("recall", {"seq_len": 13}, "data.seq_len must be in 1..model.max_len=12, got 13"),
        ("recall", {"held_out": 0}, "data.held_out must be positive, got 0"),
        ("copy", {"longest": 5}, "copy: its characters need vocab >= 46, got 16"),
        ("copy", {"vocab": 46}, "data.vocab must be at most model.vocab=16, got 46"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(task, data, words):
    with pytest.raises(MixerError, match="config: .*" + words) as caught:
        config(task, **data)
    assert "\n" not in str(caught.value)


def test_options_of_other_data_are_refused(whole):
    with pytest.raises(MixerError, match="takes lengths, samples, passes; leave out stride, seq_len"):
        evaluate_run(whole, stride=4, seq_len=8)
    with pytest.raises(MixerError, match="recall has no split 'tests'"):
        evaluate_run(whole, split="tests")
    with pytest.raises(MixerError, match="sequences of recall are no text; only addition, "):
        sample_run(whole)
    with pytest.raises(
        MixerError, match="kind 'lm' is trained on data of kind 'text' or 'synthetic' or 'documents', got 'images'"
    ):
        config().override({"data": {"kind": "images"}})


def test_the_command_trains_and_scores(tmp_path, capsys):
    out = str(tmp_path / "run")
    options = [word for field, value in SMALL.items() for word in (f"--{field}", str(value))]
    argv = ["train", "recall", "--row", "aft_forget", "--out", out, "--train.steps", "3", *options]
    assert cli.main(argv) == 0
    assert "288 tokens in" in (said := capsys.readouterr().out)
    assert "% right on valid, peak" in said
    assert cli.main(["eval", out]) == 0
    assert "over 96 targets, up to 12 tokens" in (said := capsys.readouterr().out)
    assert "% of 32 sequences throughout" in said
    assert said.startswith("test: ")
    assert cli.main(["eval", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"] == 96
    assert cli.main(["eval", out, "--lengths", "3"]) == 2
    assert "recall has no sizes" in capsys.readouterr().err
    assert cli.main(["train", "recall", "--data", "sorting", "--out", out]) == 2
    assert "error: config: data: there is no synthetic task 'sorting'; nearest: sort" in capsys.readouterr().err


@pytest.mark.parametrize("row", RECIPES["recall"].rows)
def test_every_row_trains(row, tmp_path):
    changes = {"train.steps": 2, "train.batch_size": 2, "data.held_out": 4}
    summary = train(RECIPES["recall"].config(row).override(changes), tmp_path / "run")
    assert (summary["step"], 0 <= summary["valid_accuracy"] <= 1) == (2, True)


def test_report_and_watch_read_the_runs(whole):
    evaluate_run(whole)
    run = read_run(whole)
    table = summary_table([run])
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["test accuracy"] == f"{100 * run.last_eval('test'):.2f} %"
    assert "Accuracy: the share of correct first guesses" in table.notes[0]
    watch = Watch([whole])
    watch.read()
    (watched,) = watch.runs.values()
    assert watched.best == max(e["accuracy"] for e in run.evals if e["split"] == "valid")
    assert "accuracy on the validation split" in frame(watch, Screen(), metric="score")
    assert "cross-entropy of the answers" in frame(watch, Screen())


def test_a_sweep_takes_the_rate_with_the_highest_accuracy(tmp_path):
    """Attention at rate 1e-9 learns nothing; higher is better in table and comparison."""
    rows = {"attention": {}, "aft_simple": {}}
    plan = SweepPlan(
        "recall", rows, rates=(1e-9, 1e-2), seeds=(0,), shell="modern", changes=SMALL, steps=60, tune=1.0, hopeless=None
    )
    with in_this_process():
        found = sweep(plan, tmp_path / "out")
    for row in rows:
        tried = {r["rate"]: r["score"] for r in found.of("tune", row)}
        assert tried[1e-2] > tried[1e-9]
        assert found.best_rate(row) == 1e-2
    assert found.yardsticks == {"constant predictor": pytest.approx(0.1146, abs=1e-3)}
    final = {row: found.of("final", row)[0] for row in rows}
    assert all(r["metric"] == "accuracy" and r["higher"] for r in final.values())
    assert final["attention"]["state_bytes"] > final["aft_simple"]["state_bytes"] > 0
    table = results_table(found)
    assert "tokens" in table.columns
    assert table.columns[-1] == "state bytes"
    assert float(table.rows[0][1]) >= float(table.rows[1][1])


@pytest.mark.parametrize("name", ["recall", "copy"])
def test_the_rows_of_the_plan_differ_in_their_mixers_alone(name):
    plan = SweepPlan.from_json(json.loads((ROOT / f"benchmarks/sweeps/{name}.json").read_text()))
    configs = [plan.config(row) for row in plan.rows]
    assert {config.data.task for config in configs} == {name}
    shared = {(config.data, config.optim, config.train, config.model.dim, config.model.layers) for config in configs}
    assert len(shared) == 1
    assert len({json.dumps(config.model.mixers) for config in configs}) == len(plan.rows)


# --- sizes beyond those of training


TINY = {
    "model.dim": 16,
    "train.steps": 4,
    "train.batch_size": 4,
    "data.held_out": 8,
    "data.longest": 2,
    "train.threads": 1,
}


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    """A run on sums of up to two digits, of a looped model."""
    out = tmp_path_factory.mktemp("sums") / "run"
    row = RECIPES["arithmetic_addition"].config("abacus_fire_looped")
    train(row.override({**TINY, "model.mixers.0.heads": 2}), out)
    return out


def test_lengths_beyond_training_are_scored_and_kept_apart(sums, capsys):
    before = read_run(sums).last_eval("test")
    evaluate_run(sums)
    plain = read_run(sums).last_eval("test")
    assert (before, plain is None) == (None, False)
    score = evaluate_run(sums, lengths=(1, 3), samples=7)
    assert score.names == ("digits of a", "digits of b")
    assert [cell.sizes for cell in score.grid] == [(1, 1), (1, 3), (3, 1), (3, 3)]
    assert (score.sequences, score.seq_len) == (28, 12)
    assert score.accuracy == pytest.approx(
        sum(c.accuracy * n for c, n in zip(score.grid, _targets(), strict=True)) / sum(_targets())
    )
    assert cli.main(["eval", str(sums), "--lengths", "1", "3", "--samples", "7", "--passes", "2"]) == 0
    assert "down: digits of a, across: digits of b\n            1    3\n     1" in capsys.readouterr().out
    line = kill_nine.lines(sums)[-1]
    assert (line["names"], line["passes"], len(line["grid"])) == (["digits of a", "digits of b"], 2, 4)
    assert read_run(sums).last_eval("test") == plain  # the score of a run is that of the sizes it was trained on


def _targets() -> list[int]:
    drawn = RECIPES["arithmetic_addition"].config().override(TINY).data.sequences(64)
    return [int((drawn.of_sizes(n, "test", 7)[1] >= 0).sum()) for n in ((1, 1), (1, 3), (3, 1), (3, 3))]


def test_exact_answers_are_those_that_generation_writes(sums):
    """Greedy generation from each prompt writes the whole answer as often as the score says."""
    config = RunConfig.from_json(json.loads((sums / "config.json").read_text()))
    opened, model = open_task(config), build_model(config.model)
    torch.manual_seed(0)
    tokens, targets = opened.sequences.of_sizes((1, 1), "test", 60)
    for p in model.parameters():  # a model of random weights that is right now and then
        torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.zeros_(model.head.weight)
    model.head.weight.data[14].fill_(0.5), model.head.weight.data[:10].normal_()
    score = opened.evaluate(model, "test", lengths=(1,), samples=60)
    model.eval()
    right = 0
    for row, asked in zip(tokens, targets, strict=True):
        answer = asked[asked >= 0]
        start = int((row == 12).nonzero()[0, 0]) + 1
        written = model.generate(row[None, :start], len(answer), temperature=0)[0, start:]
        right += int(torch.equal(written, answer))
    assert score.grid[0].exact == pytest.approx(right / 60)


def test_a_run_answers_questions(sums, capsys):
    assert cli.main(["sample", str(sums), "--prompt", "12+34="]) == 0
    said = capsys.readouterr().out.rstrip("\n")
    assert said.startswith("12+34=")
    assert cli.main(["sample", str(sums), "--prompt", "12-34="]) == 2
    assert "error: sample: a prompt for addition (a+b=sum) is made of 0123456789+x=,;_abc" in capsys.readouterr().err
    model = build_model(RunConfig.from_json(json.loads((sums / "config.json").read_text())).model)
    model.generate = lambda tokens, n, **_: torch.cat([tokens, torch.tensor([[4, 6, 14, 3]])], 1)
    assert answer(model, "addition", b"12+34=", 9) == b"12+34=46;"
    assert answer(model, "addition", b"1", 9) == b"146;"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": (3, 2000)}, "AbacusPositions: max_len=1024 has rows for places 0 to 1023, got 2000"),
        (
            {"lengths": (0,)},
            r"the lengths of addition \(digits of a and digits of b\) are at least 1, got 0; it was trained on 1 to ",
        ),
        ({"samples": 3}, "samples is the number of sequences for each of lengths, which was not given"),
        ({"lengths": (2,), "samples": 0}, "samples must be at least 1, got 0"),
        ({"passes": 0}, "passes must be at least 1, got 0"),
        ({"lengths": (2,), "split": "train"}, "has no split 'train'"),
    ],
)
def test_wrong_lengths_are_one_clear_line(sums, options, words):
    with pytest.raises(MixerError, match=words) as caught:
        evaluate_run(sums, **options)
    assert "\n" not in str(caught.value)


def test_lengths_beyond_the_model_are_one_clear_line():
    config = RECIPES["arithmetic_addition"].config("nope").override({**TINY, "model.positions": "learned"})
    opened, model = open_task(config), build_model(config.override({"model.max_len": 64}).model)
    with pytest.raises(MixerError, match="3 x 30 addition has up to 66 tokens, and the model's longest sequence is 64"):
        opened.evaluate(model, "test", lengths=(3, 30))


def test_passes_of_a_model_without_a_loop_are_refused(whole):
    with pytest.raises(MixerError, match="passes is for a looped model"):
        evaluate_run(whole, passes=3)


def test_the_report_draws_the_lengths(sums, tmp_path):
    from tokenmix.lab.report import write_report

    evaluate_run(sums, lengths=(1, 2, 3, 4), samples=5)
    strings = tmp_path / "strings"
    row = RECIPES["arithmetic_strings"].config("rotary")
    train(row.override({**TINY, "model.mixers.0.heads": 2, "data.seq_len": 60}), strings)
    evaluate_run(strings, lengths=(1, 4), samples=5)
    page = write_report([sums, strings], tmp_path / "page.html", compare=False).read_text()
    assert "Beyond the sizes of training" in page
    assert "Heat map of the share of exact answers of run by size, digits of a down, digits of b across." in page
    assert "Line chart of the share of exact answers by size. At the largest size: strings" in page


def test_a_sweep_scores_lengths(tmp_path):
    rows = {"abacus": {}, "nope": {}}
    changes = {"model.dim": 16, "model.layers": 1, "data.longest": 2, "data.held_out": 8, "train.batch_size": 4}
    plan = SweepPlan("arithmetic_addition", rows, (1e-3,), (0, 1), changes=changes, steps=3, lengths=(2, 3))
    with in_this_process():
        found = sweep(plan, tmp_path / "out")
    assert all(0 <= r["beyond"] <= 1 and len(r["grid"]) == 4 for r in found.of("final", "abacus"))
    table = results_table(found)
    assert table.columns[-2:] == ["beyond", "spread beyond"]
    assert any("at sizes 2, 3 and their pairs" in note for note in table.notes)
    assert found.scores("nope") == {r["seed"]: r["beyond"] for r in found.of("final", "nope")}
    for lengths, words in (((2,), "lies beyond data.longest=2"),):
        with in_this_process(), pytest.raises(MixerError, match=words):
            sweep(replace(plan, lengths=lengths), tmp_path / "other")


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("arithmetic")])
def test_every_recipe_of_arithmetic_takes_its_first_steps(name, tmp_path):
    changes = {**TINY, "train.steps": 2, "model.mixers.0.heads": 2}
    tasks = ("copy", "reverse", "parity", "selective_copy", "passkey") if name.endswith("strings") else (None,)
    for task in tasks:
        given = changes if task is None else {**changes, "data.task": task}
        assert train(RECIPES[name].config().override(given), tmp_path / str(task))["step"] == 2


def test_rows_on_other_sequences_are_not_compared(tmp_path):
    """Coupled positions are trained on padded numbers, which their recipe says and no plan."""
    plan = SweepPlan("arithmetic_addition", {"abacus": {}, "nope": {}, "coupled": {}}, (1e-3,), lengths=(9,))
    found = Results(tmp_path / "results.json", plan)
    common = {"phase": "final", "rate": 1e-3, "seed": 0, "score": 0.5, "beyond": 0.1, "tokens": 9, "higher": True}
    found.runs = {row: {**common, "row": row} for row in plan.rows}
    assert "the rows differ in data.pad" in compare(found, "coupled", "abacus").why
    assert not any("differ" in why for why in compare(found, "nope", "abacus").why)
