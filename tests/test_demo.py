"""The demo at toy sizes: all models trained, measured, in one page whose sentences follow from the numbers."""

from __future__ import annotations

import gzip
import os
import re

import pytest

from tokenmix import demo
from tokenmix.bench import Decoding
from tokenmix.report import read_run
from tokenmix.report.checks import check_page

# So many evaluations that every step is one: with fewer, a machine busy with something else may let a model end before
# its first.
SIZES = {"dim": 16, "layers": 4, "seq_len": 32, "batch_size": 2, "eval_bytes": 600, "sample_bytes": 8}
TINY = demo.Plan(seconds=0.7, evals=1_000_000, contexts=(16, 64), lengths=(16, 64), advice=(16, 64), **SIZES)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "demo"
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "say", lines.append)
        page = demo.demo(out, TINY)
    return out, page, "\n".join(lines)


def test_every_model_is_in_the_table_and_on_the_page(shown):
    out, page, printed = shown
    assert page == out / "report.html"
    assert str(page.resolve()) in printed
    assert check_page(page) == []
    for name in (*demo.MODELS, "gzip -9", "xz -9e"):
        assert f'<th scope="row">{name}</th>' in page.read_text()
        assert re.search(rf"(?m)^model .*{name}", printed)


def test_the_transformer_is_asked_whether_to_replace_its_attention(shown):
    _, page, printed = shown
    assert re.search(r"Should the attention of this Transformer be replaced\? (Yes, |No: )", printed)
    assert "mixing alone" in page.read_text()
    assert "tokenmix advise" in printed


def test_equal_tokens_are_equal_and_measured(shown):
    out, _, _ = shown
    runs = {name: read_run(out / name) for name in demo.MODELS}
    step, scores = demo.equal_tokens(runs)
    assert step is not None
    for name, run in runs.items():
        assert scores[name] in [e["bits_per_byte"] for e in run.evals if e["step"] == step]
        assert run.train[-1]["seconds"] >= TINY.seconds
    shared = [{e["step"] for e in run.evals} for run in runs.values()]
    assert step == max(set.intersection(*shared))


def test_no_common_evaluation_is_said(shown):
    runs = {name: read_run(shown[0] / name) for name in demo.MODELS}
    runs["attention"].evals.clear()
    assert demo.equal_tokens(runs) == (None, {})
    measured = demo.Measured(
        {n: {16: 1.0} for n in runs}, {n: {16: Decoding(16, 1.0, 1), 64: Decoding(64, 1.0, 1)} for n in runs}
    )
    text = demo.main_table(TINY, runs, (None, {}), measured).text()
    assert re.search(r"bits/byte at equal tokens +not measured +not measured +not measured +not measured", text)


def test_findings_change_with_the_numbers(shown):
    runs = {name: read_run(shown[0] / name) for name in demo.MODELS}

    def told(ms):
        decode = {n: {c: Decoding(c, ms if n == "attention" else 2.0, 1) for c in (16, 64)} for n in runs}
        return demo.findings(TINY, runs, demo.equal_tokens(runs), demo.Measured({n: {16: 1.0} for n in runs}, decode))[
            -1
        ]

    assert "attention beats aft_local at every length measured (16 to 64)" in told(1.0)
    assert "attention beats aft_local at no length measured (16 to 64)" in told(3.0)


def test_yardstick_compresses_the_evaluated_bytes():
    from tokenmix.data import open_corpus

    data = bytes(open_corpus("stdlib").split("valid")[: TINY.eval_bytes].tolist())
    assert demo.yardsticks(TINY)["gzip -9"] == 8 * len(gzip.compress(data, 9)) / TINY.eval_bytes


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (50.0 * (os.cpu_count() or 1), True)])
def test_a_busy_machine_is_said(monkeypatch, load, said):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert bool(demo.busy_note()) == said


def test_an_earlier_demo_is_left_alone(tmp_path):
    assert demo.free_name(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert demo.free_name(tmp_path / "demo") == tmp_path / "demo-3"
