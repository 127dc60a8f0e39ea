"""The report: what it shows, what it survives, and that the page needs nothing from outside."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle
from PIL import Image

from page_checks import check_page
from run_dirs import KINDS, SPECS, tiny_run
from tokenmix import MixerError, build_mixer
from tokenmix.lab.report import Table, read_run, write_report
from tokenmix.lab.report.biases import filters, pair_bias
from tokenmix.lab.report.cautions import cautions, question
from tokenmix.lab.report.differences import differences_table, not_comparable
from tokenmix.lab.report.figures import THEMES, colour_range, evaluations, render_both
from tokenmix.lab.report.runs import Run, readable
from tokenmix.lab.report.tables import summary_table
from tokenmix.lab.report.vision import of_all_classes
from tokenmix.models import config_from_json, in_shell
from tokenmix.system.text import MISSING, named_apart, number, size


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [tiny_run(folder, name) for name in SPECS]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    extra = Table("Extra", ["what", "how much"], [["a <b>", number(1.5)]], ["a note"])
    return write_report(
        runs, tmp_path_factory.mktemp("page") / "report.html", tables=[extra], title="Tiny & real", lead=["One < two."]
    )


def test_runs_of_a_sweep_are_named_with_their_rows():
    """Two rows of a sweep were once "rate_0.016_seed_0" and "rate_0.016_seed_1" on a page that compared them."""
    finals = [Path("a/runs/final") / row / f"rate_0.016_seed_{seed}" for row, seed in (("attention", 0), ("hydra", 1))]
    assert named_apart(finals) == ["attention/rate_0.016_seed_0", "hydra/rate_0.016_seed_1"]
    assert named_apart([Path("runs/one"), Path("runs/two")]) == ["one", "two"]
    assert named_apart([Path("x/run"), Path("y/run"), Path("z")]) == ["x/run", "y/run", "z"]


def test_page_passes_its_checks(page):
    assert check_page(page) == []


def test_page_shows_curves_tables_samples_biases_and_facts(page, runs):
    text = page.read_text()
    assert "<title>Tiny &amp; real</title>" in text
    assert "One &lt; two." in text
    assert "a &lt;b&gt;" in text
    for run in runs:
        env = json.loads((run / "env.json").read_text())
        row = re.search(rf'<tr><th scope="row">{run.name}</th>(.*?)</tr>', text)
        assert row
        assert f"<td>{env['parameters']:,}</td>" in row[1]
        assert f"<td>{read_run(run).last_eval('valid'):.3f}</td>" in row[1]
        assert f"<h3>{run.name}, step_00000020.txt</h3>" in text
    assert env["corpus"]["sha256"] in text
    assert text.count("Line chart of training loss") == 2
    assert text.count("Heat map of exp(w) - 1 over pairs of positions") == 2
    assert text.count("Heat map of exp(w) - 1 over taps") == 1


def test_the_summary_names_shell_and_optimiser_of_each_run(runs):
    """A difference between runs in two shells, or under two optimisers, says nothing about their mixers."""
    first, model = read_run(runs[0]), read_run(runs[0]).config["model"]
    modern = in_shell(config_from_json(model), "modern")
    configs = {
        "as it is": first.config,
        "today's": {"model": modern.to_json(), "optim": {"name": "muon"}},
        "mixed": {"model": modern.to_json() | {"norm_type": "layer"}, "optim": {}},
        "foreign": {"model": model | {"kind": "rnn"}},
        "damaged": {"model": {"mixers": [{}]}, "optim": []},
        "empty": {},
    }
    table = summary_table([replace(first, name=name, config=config) for name, config in configs.items()])
    shell, optimiser = (table.columns.index(name) for name in ("shell", "optimiser"))
    assert {row[0]: (row[shell], row[optimiser]) for row in table.rows} == {
        "as it is": ("paper", "adamw"),
        "today's": ("modern", "muon"),
        "mixed": ("neither", "adamw"),
        "foreign": (MISSING, MISSING),
        "damaged": (MISSING, MISSING),
        "empty": (MISSING, MISSING),
    }
    assert "shell" not in summary_table([replace(first, config={})]).columns


def test_the_title_is_the_question_and_small_models_are_folded_away(runs, tmp_path):
    text = write_report(runs, tmp_path / "page.html").read_text()
    names = ", ".join(run.name for run in runs)
    assert f"<h1>Which is best: {names}?</h1>" in text
    opened = text.index("<details>\n<summary>Pictures of what these small models compute")
    assert (
        opened < text.index("Effective attention") < text.index("Learned position biases") < text.rindex("</details>")
    )
    assert question([read_run(runs[0])]) == f"What did {runs[0].name} learn?"
    assert question([read_run(runs[0])] * 5) == "Which is best: 5 runs?"


def test_scores_of_one_seed_and_of_few_examples_are_cautioned(runs):
    first, second = (read_run(run) for run in runs[:2])
    assert any("trained once" in said for said in cautions([first, second]))
    again = replace(first, config={**first.config, "train": {**first.config["train"], "seed": 7}})
    assert not any("trained once" in said for said in cautions([first, again]))
    assert not any("trained once" in said for said in cautions([first]))
    score = {"split": "valid", "top1": 0.5, "cross_entropy": 1.0}
    images = {"model": {"kind": "vit"}, "data": {"kind": "images"}}
    few = replace(first, config=images, evals=[{**score, "images": 400}])
    assert cautions([few]) == [
        f"Caution: the score of {first.name} is of only 400 images, of which chance alone moves a share by 4.9 points "
        "either way."
    ]
    assert cautions([replace(few, evals=[{**score, "images": 10_000}])]) == []


def test_pictures_are_of_all_classes():
    labels = [0, 0, 0, 0, 2, 2, 1]
    assert of_all_classes(labels, 8) == [0, 6, 4]
    assert of_all_classes([0, 0, 0, 0, 1], 8) == [0, 4, 1]
    assert of_all_classes(list(range(100)), 4) == [0, 25, 50, 75]
    assert of_all_classes([0] * 5, 8) == [0, 1, 2]


def changed(run: Run, name: str, **model) -> Run:
    """A run with another name and other fields of its model."""
    return replace(run, name=name, config={**run.config, "model": {**run.config["model"], **model}})


def test_the_page_opens_with_the_fields_that_differ(runs, page):
    text = page.read_text()
    assert text.index("What differs between the runs") < text.index("<caption>Runs")
    first = read_run(runs[0])
    other = changed(first, "other", dim=64, mixers=[{"name": "attention", "heads": 4, "rotary": None}])
    table = differences_table([first, other])
    assert table.columns == ["field", "attention", "other"]
    assert table.rows == [
        ["model.dim", "16", "64"],
        ["model.mixers.0.heads", "2", "4"],
        ["model.mixers.0.rotary", "-", "not set"],
    ]
    assert differences_table([first]) is None
    assert differences_table([first, replace(first, name="again")]) is None


def test_differences_of_many_runs_and_of_lists_of_several_lengths(runs):
    first = read_run(runs[0])
    many = [replace(with_loop(first, seed=i), name=f"seed {i}") for i in range(3)]
    table = differences_table(many)
    assert table.columns == ["field", "seed 0", "seed 1", "seed 2"]
    assert table.rows == [["train.seed", "0", "1", "2"]]
    longer = changed(first, "longer", mixers=[*[{"name": "hydra"}] * 2, {"name": "attention", "heads": 2}])
    assert differences_table([first, longer]).rows == [
        ["model.mixers", "1 x attention(heads=2)", "2 x hydra, 1 x attention(heads=2)"]
    ]
    assert differences_table([replace(first, config={}), replace(first, config={"train": 3})]).rows == [
        ["train", "-", "3"]
    ]


def test_runs_that_cannot_be_compared_are_named_in_one_line(runs, tmp_path):
    first = read_run(runs[0])
    assert not_comparable([first]) is None
    assert not_comparable([first, read_run(runs[1])]) is None
    shorter = replace(first, train=first.train[:-1])
    said = not_comparable([first, shorter])
    assert said.startswith("Not comparable: the runs differ in steps (20, 18) and tokens (1,920, 1,728), so the score")
    assert "\n" not in said
    other = replace(first, env={"corpus": {"sha256": "0" * 64}})
    assert "differ in data (" in not_comparable([first, other])
    assert "train.eval_bytes 500" in not_comparable([first, with_loop(first, eval_bytes=500)])
    assert not_comparable([with_loop(run, steps=None, max_seconds=60.0) for run in (first, shorter)]) is None
    assert not_comparable([replace(first, config={"train": 3}), replace(first, config={})]) is None
    folder = tmp_path / "short"
    shutil.copytree(runs[0], folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-2]))
    with pytest.warns(UserWarning, match="Not comparable: the runs differ in steps"):
        page = write_report([runs[0], folder], tmp_path / "page.html")
    assert page.read_text().count("Not comparable: the runs differ in steps") == 1


def test_scores_of_other_amounts_of_data_are_not_comparable(runs):
    first = read_run(runs[0])
    last = next(e for e in reversed(first.evals) if e["split"] == "valid")
    few = {**last, "bytes": 100, "bits_per_byte": 0.5}
    looked = replace(first, evals=[*first.evals, few])
    assert looked.last_eval("valid") == last["bits_per_byte"], "a look at 100 bytes replaces no whole evaluation"
    assert evaluations(looked, "step") == evaluations(first, "step")
    assert not_comparable([first, looked]) is None
    shorter = replace(first, evals=[few])
    said = not_comparable([first, shorter])
    assert f"what the valid score is of ({last['bytes']:,} bytes, 100 bytes)" in said
    wider = replace(first, evals=[*first.evals, {**last, "seq_len": 7}])
    assert f"{last['bytes']:,} bytes in windows of 7" in not_comparable([first, wider])
    assert not_comparable([first, replace(first, evals=[])]) is None


def with_loop(run: Run, **fields) -> Run:
    """A run with other fields of its training loop."""
    return replace(run, config={**run.config, "train": {**run.config["train"], **fields}})


def pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).convert("RGB"))


def test_the_dark_picture_is_the_light_one_in_other_colours():
    """It is drawn once; in the dark one nothing may be left of the light theme's paper and ink."""

    def draw(ax):
        ink = ax.xaxis.label.get_color()
        shown = ax.imshow([[0.0, 1.0], [2.0, 3.0]], cmap="RdBu_r")
        ax.axvline(0.5, color=ink, linestyle="--")
        ax.add_patch(Rectangle((0, 0), 0.5, 0.5, fill=False, edgecolor=ink))
        ax.scatter([0.2], [0.8], color=ink)
        bar = ax.figure.colorbar(shown, ax=ax)
        bar.ax.tick_params(colors=ink)
        bar.set_label("how much", color=ink)
        bar.outline.set_visible(False)
        ax.set_title("title", color=ink)
        ax.set_xlabel("across")
        ax.plot([0, 1], [0, 1], label="line")
        ax.legend(frameon=False, labelcolor=ink)

    light, dark = map(pixels, render_both(draw, (4.0, 3.0)))
    assert light.shape == dark.shape
    (paper, ink), (night, chalk) = (tuple(map(to_pixel, THEMES[theme])) for theme in ("light", "dark"))
    assert is_colour(light, ink).sum() > 500
    for ours, theirs in ((ink, chalk), (paper, night)):  # but for pixels that are blended to a colour by chance
        assert (is_colour(light, ours) ^ is_colour(dark, theirs)).sum() < 0.01 * is_colour(light, ours).sum()
    assert not is_colour(dark, ink).any()
    assert not is_colour(dark, paper).any()


def to_pixel(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def is_colour(picture: np.ndarray, colour: tuple[int, ...]) -> np.ndarray:
    return (picture == colour).all(-1)


def test_progress_names_each_run_and_layer(runs, tmp_path):
    said: list[str] = []
    write_report(runs, tmp_path / "page.html", tell=said.append)
    assert said[0] == "report: reading the runs"
    for i, run in enumerate(runs, 1):
        assert f"report: {run.name} ({i} of {len(runs)}): effective attention of layer 0" in said
    assert f"report: {runs[1].name} (2 of {len(runs)}): position biases of layer 0" in said


def test_a_page_of_mixers_of_every_kind(tmp_path):
    page = write_report([tiny_run(tmp_path, name) for name in KINDS], tmp_path / "kinds.html")
    assert check_page(page) == []
    text = page.read_text()
    for name in KINDS:
        assert len(re.findall(rf'alt="Heat map of the effective attention of layer 0 of {name}, [^"]*', text)) >= 1
        assert f'<th scope="row">{name}</th>' in text


def test_a_run_cut_anywhere_is_read_as_far_as_it_got(runs, tmp_path):
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "config.json").write_text((runs[0] / "config.json").read_text())
    lines = (runs[0] / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(lines[: lines.index("\n", 100) + 20])
    assert len(read_run(cut).train) >= 1
    assert check_page(write_report([cut], tmp_path / "cut.html")) == []
    (cut / "metrics.jsonl").unlink()
    assert check_page(write_report([cut], tmp_path / "empty.html")) == []


def test_loss_that_is_not_finite_is_said_in_words(runs, tmp_path):
    sick = tmp_path / "sick"
    sick.mkdir()
    (sick / "config.json").write_text((runs[0] / "config.json").read_text())
    lines = [
        {
            "kind": "train",
            "step": s,
            "loss": float("nan") if s > 3 else 2.0,
            "tokens": s,
            "seconds": s,
            "tokens_per_s": 1.0,
            "peak_mib": 1.0,
        }
        for s in range(1, 9)
    ]
    lines.append({"kind": "eval", "split": "valid", "step": 8, "bits_per_byte": float("nan"), "seconds": 1.0})
    (sick / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report([sick], tmp_path / "sick.html")
    assert check_page(page) == []
    assert "not finite" in page.read_text()


class Counted(dict):
    """A line of the metrics that counts how often it is read."""

    reads = 0

    def __getitem__(self, key):
        Counted.reads += 1
        return super().__getitem__(key)


def test_evaluations_stand_at_the_last_seconds_before_them_found_in_one_pass():
    """A search of all lines for every evaluation made the page of a long run take minutes."""
    train = [Counted(step=s, seconds=s / 2) for s in range(10, 2010, 10) if s != 40] + [Counted(step=2010)]
    evals = [{"split": "valid", "step": s, "bits_per_byte": s / 1000} for s in range(0, 2020, 20)]
    run = Run("r", Path(), {}, {}, train, [*evals, {"split": "test", "step": 5, "bits_per_byte": 1.0}], [], [], None)
    assert evaluations(run, "step") == ([e["step"] for e in evals], [e["bits_per_byte"] for e in evals])
    Counted.reads = 0
    at, scores = evaluations(run, "seconds")
    assert Counted.reads <= 2 * len(train)
    assert at == [15.0 if e["step"] == 40 else min(e["step"], 2000) / 2 for e in evals[1:]]
    assert scores == [e["bits_per_byte"] for e in evals[1:]]


def test_samples_are_escaped_and_bytes_shown(runs, tmp_path):
    copy = tmp_path / "odd"
    (copy / "samples").mkdir(parents=True)
    (copy / "config.json").write_text((runs[0] / "config.json").read_text())
    (copy / "samples" / "step_00000001.txt").write_bytes(
        b"<script>alert(1)</script>\xff\x00\x1b[31m \xc3\xa9 http://example.org"
    )
    page = write_report([copy], tmp_path / "odd.html")
    assert check_page(page) == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\xff\\x00\\x1b[31m é" in page.read_text()
    assert readable(b"a\tb\n\x7f") == "a\tb\n\\x7f"


def test_runs_of_the_same_name_are_told_apart(runs, tmp_path):
    for parent in ("one", "two"):
        (tmp_path / parent / "run").mkdir(parents=True)
        (tmp_path / parent / "run" / "config.json").write_text((runs[0] / "config.json").read_text())
    text = write_report([tmp_path / "one/run", tmp_path / "two/run"], tmp_path / "r.html").read_text()
    assert "one/run" in text
    assert "two/run" in text


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda d: None, "no config.json"), (lambda d: (d / "config.json").write_text("{"), "cannot be read")],
)
def test_what_is_no_run_is_refused(tmp_path, make, words):
    make(tmp_path)
    with pytest.raises(MixerError, match=words):
        write_report([tmp_path], tmp_path / "r.html")


def test_no_runs_are_refused(tmp_path):
    with pytest.raises(MixerError, match="at least one"):
        write_report([], tmp_path / "r.html")


def test_pair_bias_is_exp_w_less_one_inside_the_window_and_blank_in_the_future():
    mixer = build_mixer("aft_local", dim=4, max_len=9, window=3, rank=None, init_std=1.0, causal=True)
    extra = pair_bias(mixer)
    w = mixer.bias.weight.detach().double()
    for t in range(9):
        for s in range(9):
            expected = float("nan") if s > t else torch.expm1(w[t, s]).item() if t - s < 3 else 0.0
            assert extra[t, s].item() == pytest.approx(expected, nan_ok=True)


def test_the_bias_of_a_mixer_without_a_longest_sequence_is_drawn():
    mixer = build_mixer("aft_full", 8, causal=True, bias={"name": "alibi", "slope": 0.5})
    drawn = pair_bias(mixer)
    assert drawn.shape == (96, 96)
    assert float(drawn[5, 3]) == pytest.approx(math.exp(-1.0) - 1)


@pytest.mark.parametrize(("ndim", "shape"), [(1, (2, 3)), (2, (2, 3, 3)), (3, (2, 3, 3))])
def test_filters_of_any_dimension_lie_in_a_plane(ndim, shape):
    mixer = build_mixer("aft_conv", dim=4, heads=2, kernel_size=3, ndim=ndim, reparam=False, init_std=1.0)
    assert filters(mixer).shape == shape
    head = mixer.kernel()[1].detach().double()
    assert torch.equal(filters(mixer)[1], torch.expm1(head if ndim < 3 else head[1]))


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([0.0, 0.0], (0.0, 1.0, "neither")),
        ([1.0, 1.0, 0.0], (0.0, 1.0, "neither")),
        ([-2.0, 2.0, float("nan")], (-2.0, 2.0, "neither")),
        ([0.1] * 99 + [7.0], (0.0, 0.1, "max")),
        ([0.1] * 198 + [-7.0, 7.0], (-0.1, 0.1, "both")),
        ([0.1] * 99 + [-7.0], (-0.1, 0.1, "min")),
    ],
)
def test_a_few_large_values_do_not_take_all_colours(values, found):
    low, high, beyond = colour_range(torch.tensor(values))
    assert (pytest.approx(low), pytest.approx(high), beyond) == found


GOOD = (
    "<!doctype html><html><head><title>t</title></head>"
    "<body><h1>h</h1><table><tr><td>1</td></tr></table>{}</body></html>"
)
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ('<img src="http://example.org/a.png" alt="a">', "outside"),
        ('<img src="//example.org/a.png" alt="a">', "outside"),
        ('<a href="https://example.org">a</a>', "outside"),
        ('<img src="a.png" alt="a">', "outside"),
        ("<style>@import 'a.css'; p { color: red }</style>", "style sheet"),
        ("<style>p { background: url(https://example.org/a) }</style>", "style sheet"),
        ('<p style="background: url(a.png)">a</p>', "outside address"),
        ("<script>1</script>", "not allowed"),
        ('<img src="data:image/png;base64,AAAA" alt="a">', "does not decode"),
        (f'<img src="data:image/png;base64,{DOT}" alt="a">', "blank"),
        ('<img src="data:image/gif;base64,AAAA" alt="a">', "not a PNG"),
        (f'<img src="data:image/png;base64,{DOT}">', "no alternative"),
        ("<table><tr><th>a</th></tr></table>", "no rows"),
        ("<table><tr><td>nan</td></tr></table>", "not a number"),
        ("<table><tr><td>inf s</td></tr></table>", "not a number"),
        ("<p>loss NaN</p>", "not a number"),
        ("<div><p>a</div>", "closes <p>"),
        ("<div>", "closes <div>"),
        ('<p id="a">a</p><p id="a">b</p>', "is used twice"),
    ],
)
def test_the_checks_find(tmp_path, wrong, words):
    page = tmp_path / "page.html"
    page.write_text(GOOD.format(""))
    assert check_page(page) == []
    page.write_text(GOOD.format(wrong))
    assert any(words in problem for problem in check_page(page)), check_page(page)


def test_the_checks_find_what_is_missing(tmp_path):
    (tmp_path / "page.html").write_text("<html><body><h1>a</h1>")
    problems = " ".join(check_page(tmp_path / "page.html"))
    assert "<html> is never closed" in problems
    assert "no <table>" in problems


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (None, "not measured"),
    ],
)
def test_sizes_are_written_short(n, text):
    assert size(n) == text


def test_tables_line_up_in_a_terminal():
    lines = Table("T", ["model", "x"], [["a", "1.0"], ["longer", "10.0"]]).text().split("\n")
    assert lines == ["T", "model      x", "------------", "a        1.0", "longer  10.0"]
    wide = Table("T", ["model", "x" * 150], [["a", "1.0"]]).text().split("\n")
    assert wide[3] == "x" * 150 + "  1.0"


def test_weights_of_another_size_are_one_clear_line(runs, tmp_path):
    other = shutil.copytree(runs[0], tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace('"dim": 16', '"dim": 32'))
    with pytest.raises(MixerError, match="does not fit the model of .*size mismatch for embed.weight"):
        write_report([other], tmp_path / "page.html")


def test_a_truncated_checkpoint_is_one_clear_line(tmp_path):
    run = tiny_run(tmp_path, "attention")
    weights = read_run(run).weights
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(MixerError, match="model.safetensors is truncated or edited"):
        write_report([run], tmp_path / "page.html")
