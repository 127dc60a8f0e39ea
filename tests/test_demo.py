"""The demo at toy sizes: all models trained, measured, in one page whose sentences follow from the numbers."""

from __future__ import annotations

import gzip
import os
import re

import pytest

from tokenmix import demo
from tokenmix.bench import Decoding
from tokenmix.demo.tables import against_gzip, ranking
from tokenmix.report import read_run
from tokenmix.report.checks import check_page

SIZES = {"dim": 16, "layers": 4, "seq_len": 32, "batch_size": 2, "eval_bytes": 600, "sample_bytes": 8}
TINY = demo.Plan(seconds=0.7, evals=3, contexts=(16, 64), lengths=(16, 64), advice=(16, 64), **SIZES)


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


def test_training_ends_with_its_decay(shown):
    """The steps are fixed before training, and the last one has the lowest rate."""
    for name in demo.MODELS:
        run = read_run(shown[0] / name)
        steps = run.config["train"]["steps"]
        assert run.train[-1]["step"] == steps
        assert run.train[-1]["lr"] < 0.5 * TINY.lr
        assert run.evals[-1]["step"] == steps
        assert run.config["model"]["norm_type"] == "rms"
        assert run.config["optim"]["name"] == "muon"


def test_the_page_opens_with_quality(shown):
    page = shown[1].read_text()
    assert page.index("Line chart of bits per byte while training") < page.index('class="lead"')


def test_a_difference_within_the_spread_is_none():
    said = ranking({"b": 2.04, "a": 2.0, "c": 2.5, "d": None})
    assert said == "a (2.000), no difference to b (2.040), then c (2.500)"


def test_gzip_decides_whether_quality_means_anything():
    limit = demo.yardsticks(TINY)["gzip -9"]
    assert against_gzip(TINY, {"a": limit - 0.1, "b": limit + 0.1}).endswith(": a.")
    assert "nothing follows" in against_gzip(TINY, {"a": limit + 0.1, "b": None})


def test_findings_change_with_the_numbers(shown):
    runs = {name: read_run(shown[0] / name) for name in demo.MODELS}

    def told(ms):
        decode = {n: {c: Decoding(c, ms if n == "attention" else 2.0, 1) for c in (16, 64)} for n in runs}
        return demo.findings(TINY, runs, demo.Measured({n: {16: 1.0} for n in runs}, decode))[1]

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
