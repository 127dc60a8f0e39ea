"""The ledger of claims: every number of ours is computed again, every path and command exists, the page is current."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro

from ledger import printed
from tokenmix import MixerError
from tokenmix.lab.cli.entry import main, take_overrides
from tokenmix.lab.cli.verbs import OTHER_VERBS, VERBS
from tokenmix.lab.papers import (
    PAPERS,
    VERDICTS,
    Trial,
    agrees,
    compute_values,
    decide_trial,
    find_paper,
    locate_code,
    measured_elsewhere,
    ours,
    recorded_values,
    write_value,
)
from tokenmix.lab.papers.claim import MEASURES
from tokenmix.lab.papers.claims_page import count_kinds, page
from tokenmix.lab.papers.counts import classify_kept_memory
from tokenmix.lab.papers.identities import equal
from tokenmix.lab.papers.load import SOURCES, read_paper, read_papers
from tokenmix.lab.recipes import RECIPES, find_recipe
from tokenmix.lab.sweep.plan import SweepPlan, run_key
from tokenmix.lab.sweep.results import Results

ROOT = Path(__file__).parents[1]
CLAIMS = [(paper, claim) for paper in PAPERS.values() for claim in paper.claims]
NUMBERS = [(paper, key, number) for paper in PAPERS.values() for key, number in paper.numbers().items()]
CONTRADICTED = {
    "transhuman: Table 6, parameters: TransHuman",
    "aft: Table 7, parameters: lambda_small",
    "aft: Table 7, parameters: aft_conv_tiny_k11_h192",
    "aft: Table 8, parameters: aft_conv_base384_k25_h32",
    "aft: Section 5.3, tokens: 1 + (H / 16) / (W / 16) at 224",
    "hydra: Speed of DeiT-B: multiply-accumulates saved at 224",
    "synthesizer: WMT'14, parameters: dense + vanilla",
    "synthesizer: WMT'14, parameters: random + dense",
    "survey: Table 1, BigBird: decodes",
}


@pytest.mark.parametrize("key", PAPERS)
def test_our_numbers_are_computed_again(key):
    before = torch.get_rng_state()
    ours = compute_values(PAPERS[key])
    assert torch.equal(torch.get_rng_state(), before)
    assert ours == pytest.approx(recorded_values(PAPERS[key])), "write them anew: make tables"


def test_the_contradictions_are_these_and_each_has_its_reason():
    found = {
        f"{paper.key}: {key}": number
        for paper, key, number in NUMBERS
        if number.verdict(recorded_values(paper).get(key)) == "contradicted"
    }
    assert set(found) == CONTRADICTED
    assert [name for name, number in found.items() if not number.why] == []


def test_a_verdict_follows_from_the_numbers():
    number = PAPERS["aft"].numbers()["Table 7, parameters: deit_tiny"]
    assert (number.verdict(5.717), number.verdict(5.76), number.verdict(None)) == (
        "confirmed",
        "contradicted",
        "cannot be tested here",
    )
    assert replace(number, compute="").verdict(5.717) == "cannot be tested here"
    assert {number.untested for _, _, number in NUMBERS} <= set(VERDICTS)


@pytest.mark.parametrize(
    ("printed", "ours", "same"),
    [
        ("5.9", 5.94, True),
        ("5.9", 5.956, False),
        ("13,229,288", 13_229_288, True),
        ("13,229,288", 13_229_289, False),
        ("about 60", 60.75, True),
        ("about 60", 66.0, False),
        ("about 4", 4.07, True),
        ("about 4", 4.6, False),
        ("> 60", 63.75, True),
        ("> 60", 60.0, False),
        ("< 3", 2.0, True),
        ("10 to 27", 11.04, True),
        ("10 to 27", 4.05, False),
        ("equal", "equal", True),
        ("equal", "off by 1.0e-02", False),
        ("N^2", "N", False),
    ],
)
def test_agreement_goes_by_the_printed_digits(printed, ours, same):
    assert agrees(printed, ours) is same


def test_what_is_no_number_is_refused():
    with pytest.raises(MixerError, match="'4 x 4' is no printed number"):
        agrees("4 x 4", 4.0)


def test_ours_is_written_with_more_digits():
    assert (write_value("5.9", 5.956), write_value("13,229,288", 13_229_288), write_value("about 4", 4.068)) == (
        "5.956",
        "13,229,288",
        "4.07",
    )


def test_every_claim_says_something_and_no_two_numbers_share_a_name():
    for paper, claim in CLAIMS:
        assert claim.numbers, (paper.key, claim.section)
        assert claim.says.endswith("."), (paper.key, claim.section)
    for paper in PAPERS.values():
        assert len(paper.numbers()) == sum(len(claim.numbers) for claim in paper.claims)
        assert set(recorded_values(paper)) == {key for key, number in paper.numbers().items() if number.compute}


@pytest.mark.parametrize(("paper", "claim"), CLAIMS, ids=lambda x: getattr(x, "key", None) or x.section)
def test_code_is_found(paper, claim):
    if claim.example:
        assert (ROOT / claim.example).is_file()
    elif not claim.code:
        assert all(n.untested == "not built yet" or n.compute for n in claim.numbers), "names no code"
    if not claim.code:
        return
    file, line = locate_code(claim.code)
    text = (ROOT / "src" / file).read_text().splitlines()
    last = claim.code.split(".")[-1]
    assert last in text[line - 1] or Path(file).stem == last or file.endswith(f"{last}/__init__.py")


def test_a_path_to_nothing_is_refused():
    with pytest.raises(MixerError, match="'functional.hydra.hydrant' names nothing in tokenmix; nearest: hydra"):
        locate_code("functional.hydra.hydrant")


@pytest.mark.parametrize(
    "command", sorted({command for paper, claim in CLAIMS if (command := paper.command(claim))}), ids=lambda c: c[9:60]
)
def test_commands_parse(command):
    words = shlex.split(command)
    assert words[0] == "tokenmix"
    argv, changes = take_overrides(words[1:])
    chosen = tyro.extras.subcommand_cli_from_dict(VERBS, args=argv)
    if words[1] == "train":
        find_recipe(chosen.recipe).config(chosen.row, chosen.size).override(changes)
    if words[1] == "paper":
        assert chosen.section in {claim.section for claim in PAPERS[chosen.key].claims}


def test_the_command_of_a_computed_number_prints_it_or_trains_its_model():
    """`tokenmix list --cost 4096` printed costs at one length, from which no growth can be read."""
    for paper, claim in CLAIMS:
        if any(number.compute for number in claim.numbers):
            words = shlex.split(paper.command(claim))
            prints = words == ["tokenmix", "paper", paper.key, "--section", claim.section, "--run"]
            assert prints or words[1] == "train", claim.section


@pytest.mark.parametrize("command", ["tokenmix paper explained --run", 'tokenmix paper hydra --section "Hydra" --run'])
def test_quick_commands_run(command, capsys):
    assert main(shlex.split(command)[1:]) == 0
    assert "confirmed" in capsys.readouterr().out


def test_measurements_of_other_kinds_are_found():
    results = [number.result for _, _, number in NUMBERS if number.result]
    assert results
    assert all(measured_elsewhere(result) for result in results)
    assert measured_elsewhere("no_such.json:rows") is None


def test_every_verdict_is_counted_once_by_kind():
    kinds = count_kinds(tuple(PAPERS.values()))
    assert sum(sum(kinds[kind].values()) for kind in list(kinds)[:3]) == len(NUMBERS)
    assert sum(sum(kinds[kind].values()) for kind in list(kinds)[3:]) == sum(len(claim.trials) for _, claim in CLAIMS)
    printed = kinds["numbers only printed"]
    assert set(printed) == {"cannot be tested here", "not built yet"}


def test_the_page_is_that_of_the_table():
    assert (ROOT / "docs/claims.md").read_text() == page(tuple(PAPERS.values())), "write it anew: make tables"


TRIED = sorted({trial for _, claim in CLAIMS for trial in claim.trials}, key=str)


@pytest.mark.parametrize(
    "trial",
    [trial for trial in TRIED if trial.claimed not in MEASURES],
    ids=lambda trial: f"{trial.sweep}: {trial.text()}",
)
def test_what_is_tried_in_small_models_is_in_a_plan(trial):
    plan = SweepPlan.from_json(json.loads((ROOT / f"benchmarks/sweeps/{trial.sweep}.json").read_text()))
    assert {trial.row, trial.against} <= set(plan.rows)
    assert decide_trial(trial).verdict in VERDICTS[:4]


@pytest.mark.parametrize("file", ["directions", "word_weights", "locality", "detector_small"])
def test_what_is_tried_of_measured_rows_was_measured(file):
    rows = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())["rows"]
    tried = [trial for trial in TRIED if trial.claimed in MEASURES and trial.sweep == file]
    assert {name for trial in tried for name in (trial.row, trial.against)} <= set(rows)
    assert "cannot be tested here" not in {decide_trial(trial).verdict for trial in tried}
    assert {trial.is_measured for trial in tried} == {file == "directions"}


@pytest.mark.parametrize(
    ("ms", "verdict"),
    [
        ((80, 90, 85), "confirmed"),
        ((120, 130, 125), "contradicted"),
        ((80, 130, 100), "no difference"),
        ((80, 90), "cannot be tested here"),
    ],
)
def test_a_direction_is_decided_by_the_interval_of_the_ratio(ms, verdict, tmp_path, monkeypatch):
    rows = {"a": {"ms": ms, "MiB": ms}, "b": {"ms": [100] * len(ms), "MiB": [100] * len(ms)}}
    (tmp_path / "directions.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(ours, "RESULTS", tmp_path)
    assert decide_trial(Trial("directions", "a", "faster", "b")).verdict == verdict
    swapped = {"confirmed": "contradicted", "contradicted": "confirmed"}
    assert decide_trial(Trial("directions", "a", "larger", "b")).verdict == swapped.get(verdict, verdict)
    assert decide_trial(Trial("directions", "b", "slower", "a")).verdict == verdict
    assert decide_trial(Trial("directions", "a", "smaller", "c")).found == "not run"


def test_memory_that_is_kept_is_that_of_a_run():
    assert classify_kept_memory("attention", heads=1, plain=True) == "T^2"
    assert classify_kept_memory("attention", heads=1, plain=True, by="d") == "d"
    assert classify_kept_memory("linear", heads=1) == "T"


def test_a_claim_that_is_tried_leads_to_where_it_is_reported():
    assert [claim.section for _, claim in CLAIMS if claim.trials and not claim.small] == []


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ((0.80, 0.81, 0.80), "confirmed"),
        ((0.60, 0.61, 0.60), "contradicted"),
        ((0.60, 0.81, 0.70), "no difference"),
        ((0.80, 0.81), "cannot be tested here"),
        ((), "cannot be tested here"),
    ],
)
def test_small_models_decide_by_the_protocol(scores, verdict, tmp_path, monkeypatch):
    """A sign that is turned over, and seeds that are too few, are what this would not forgive."""
    rates, seeds = (0.1, 0.2, 0.3), (0, 1, 2)
    plan = SweepPlan("aft_cifar10_classify", rows={"a": {}, "b": {}}, rates=rates, seeds=seeds, shell="paper")
    results = Results(tmp_path / "results/made.json", plan, yardsticks={"constant predictor": 0.1})
    same = {"metric": "top1", "higher": True, "tokens": 9, "steps": 1, "seconds": 1.0, "peak_mib": 1.0}
    for row, found in (("a", scores), ("b", (0.70, 0.71, 0.70))):
        tuned = [("tune", rate, 0, 1 - rate) for rate in rates]
        for phase, rate, seed, score in (*tuned, *(("final", 0.1, seed, score) for seed, score in enumerate(found))):
            curve = [[4, 1.4 - score, 0.5], [9, score, 1.0]]  # halfway the rows are the other way round
            run = {"phase": phase, "row": row, "rate": rate, "seed": seed, "score": score, "curve": curve}
            results.runs[run_key(phase, row, rate, seed)] = run | same
    results.save()
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/made.json").write_text(json.dumps(plan.to_json()))
    monkeypatch.setattr(ours, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(ours, "RESULTS", tmp_path / "results")
    assert decide_trial(Trial("made", "a", "better", "b")).verdict == verdict
    swapped = {"confirmed": "contradicted", "contradicted": "confirmed"}
    assert decide_trial(Trial("made", "a", "worse", "b")).verdict == swapped.get(verdict, verdict)
    assert decide_trial(Trial("made", "a", "worse", "b", after=0.5)).verdict == verdict
    alike = {"confirmed": "contradicted"}
    assert decide_trial(Trial("made", "a", "like", "b")).verdict == alike.get(verdict, verdict)
    assert decide_trial(Trial("no_such_plan", "a", "better", "b")) is None


def test_recipes_print_what_the_table_prints():
    rows = RECIPES["aft_imagenet"].rows
    for name, number in printed("aft", "Table 7, parameters").items():
        assert rows[f"table7/{name}"].printed["parameters_m"] == float(number)
    eighth = {name: float(number) for name, number in printed("aft", "Table 8, parameters").items()}
    assert rows["table8/deit_base_384"].printed["parameters_m"] == eighth["deit_base_384"]
    assert rows["table8/aft_conv_random"].printed["parameters_m"] == eighth["aft_conv_base384_k25_h32"]


def test_the_list_names_every_source(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["paper"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(PAPERS)
    assert max(map(len, lines)) <= 100
    assert main(["paper", "--json"]) == 0
    found = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["livt"]["verdicts"] == {
        "confirmed": 5,
        "stated alike": 2,
        "cannot be tested here": 9,
    }
    assert sum(found["livt"]["small"].values()) == 8


@pytest.mark.parametrize("key", PAPERS)
def test_a_paper_is_shown(key, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["paper", key]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{claim.section}\n" in text for claim in PAPERS[key].claims)
    assert [line for line in text.splitlines() if len(line) > 120] == []
    assert main(["paper", key, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["claims"]) == len(PAPERS[key].claims)


def test_wrong_names_are_refused(capsys):
    with pytest.raises(MixerError, match="there is no paper 'hydar'; nearest: hydra"):
        find_paper("hydar")
    assert main(["paper", "aft", "--section", "Tabel 7"]) == 2
    assert "paper aft has no section 'Tabel 7'; nearest: Table 7" in capsys.readouterr().err
    assert main(["paper", "--run"]) == 2
    assert "paper: --run needs a KEY, one of aft, hydra" in capsys.readouterr().err
    assert OTHER_VERBS["papers"] == "paper"


SOURCE = """\
title = "A paper"
order = 1
[[claim]]
section = "Eq. 1"
says = "It counts."
trials = [{ sweep = "addition", row = "a", claimed = "better", against = "b" }]
[[claim.numbers]]
name = "parameters"
printed = "5.7"
compute = "counts.parameters"
args = { model = "deit_tiny" }
[[claim.numbers]]
untested = "not built yet"
[claim.numbers.rows]
"a score" = "81.6"
"another" = { printed = "82", unit = "%" }
"""


def test_a_data_file_is_read(tmp_path):
    (tmp_path / "mine.toml").write_text(SOURCE)
    (claim,) = read_papers(tmp_path)["mine"].claims
    assert [(n.name, n.printed, n.unit, n.untested) for n in claim.numbers] == [
        ("parameters", "5.7", "", "cannot be tested here"),
        ("a score", "81.6", "", "not built yet"),
        ("another", "82", "%", "not built yet"),
    ]
    assert claim.numbers[0].function(**claim.numbers[0].args) == 5_717_416


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("order = 1", "order = ", "mine.toml is no TOML file: Invalid value"),
        ("order = 1", 'order = "1"', "mine.toml.order must be an int, got '1'"),
        ("order = 1\n", "", "mine.toml needs the field 'order'"),
        ("order = 1", "order = 1\nclaim = 2", "mine.toml"),
        ('says = "It', 'say = "It', r"mine.toml, claim 1 \(Eq. 1\) has no field 'say'; nearest: says"),
        ('says = "It counts."\n', "", r"mine.toml, claim 1 \(Eq. 1\) needs the field 'says'"),
        ('"better"', '"bigger"', r"mine.toml, claim 1 .*trials.claimed is 'bigger'; nearest: higher"),
        ('printed = "5.7"', "printed = 5.7", "mine.toml, .*number parameters.printed must be a str, got 5.7"),
        ('printed = "5.7"', 'printd = "5.7"', "mine.toml, .*number parameters has no field 'printd'; nearest: printed"),
        ('name = "parameters"\n', "", r"mine.toml, .*needs one of name, rows and recipe, got \[\]"),
        ("counts.param", "counts.parm", "mine.toml, .*parameters.compute: .*names nothing .*nearest: parameters"),
        ("model =", "modle =", "mine.toml, .*number parameters.args do not fit counts.parameters: .*'model'"),
        ('"not built yet"', '"unbuilt"', "mine.toml, .*number a score.untested is 'unbuilt'; "),
        ('"81.6"', "81.6", "mine.toml, .*number a score.printed must be a str, got 81.6"),
        ('unit = "%"', "unti = 3", "mine.toml, .*number another has no field 'unti'; nearest: unit"),
        ('"another"', '"parameters"', "mine.toml has two numbers of the name 'Eq. 1: parameters'; rename one"),
        ('[claim.numbers.rows]\n"a score" = "81.6"', 'rows = ["81.6"]\n[x]', "mine.toml, .*rows must be a table"),
        (
            '[claim.numbers.rows]\n"a score" = "81.6"\n"another" = { printed = "82", unit = "%" }',
            'recipe = { name = "aft_imagenet", fields = ["top2"] }',
            "mine.toml, .*recipe: no row of aft_imagenet begins with '' and has its fields",
        ),
        (
            '[claim.numbers.rows]\n"a score" = "81.6"\n"another" = { printed = "82", unit = "%" }',
            'recipe = { name = "aft_imagnet", fields = ["top1"] }',
            "mine.toml, .*recipe: there is no recipe 'aft_imagnet'; nearest: aft_imagenet",
        ),
    ],
)
def test_a_damaged_data_file_is_refused_in_one_line(old, new, message, tmp_path):
    assert SOURCE.count(old) >= 1
    (tmp_path / "mine.toml").write_text(SOURCE.replace(old, new, 1))
    with pytest.raises(MixerError, match=message) as refused:
        read_paper(tmp_path / "mine.toml")
    assert "\n" not in str(refused.value)


def test_data_files_are_beside_the_code():
    assert SOURCES.is_relative_to(Path(ours.__file__).parent)
    assert {file.stem for file in SOURCES.iterdir()} == set(PAPERS)


def test_equality_of_forms_notices_a_difference_and_an_unknown_input():
    form = "functional.aft.aft_local"
    given = {"inputs": {"w": "T T"}, "window": 3}
    assert equal(form, "reference.aft.aft_local", **given) == "equal"
    assert equal(form, "functional.aft.aft_full", **given).startswith("off by ")
    with pytest.raises(MixerError, match="neither .* has a parameter widow"):
        equal(form, "reference.aft.aft_local", widow=3)
