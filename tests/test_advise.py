"""Advice: the arithmetic, shares with known times, lengths that do not fit, candidates, the page, wrong commands."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import retime_advice
from page_checks import check_page
from surgery_models import make
from tokenmix import MixerError
from tokenmix.hosts.surgery import replace_mixers
from tokenmix.lab import cli
from tokenmix.lab.advise import Share, bound, first_length, load_host, measuring, runtimes
from tokenmix.lab.advise import advice as advice_module
from tokenmix.lab.advise import advise as ask
from tokenmix.lab.advise.advice import Advice, Skipped, expected_peak
from tokenmix.lab.advise.amdahl import expected_seconds, share_for
from tokenmix.lab.advise.attention_modules import modules_of, torch_projections
from tokenmix.lab.advise.candidates import OWN, Candidate, parse_candidates
from tokenmix.lab.advise.choice import RULE
from tokenmix.lab.advise.compare import Comparison, Speed
from tokenmix.lab.advise.decoding import decode
from tokenmix.lab.advise.distill import check_distillation, chosen_spec
from tokenmix.lab.advise.inputs import Inputs, inputs_of
from tokenmix.lab.advise.loading import Host
from tokenmix.lab.advise.measuring import Clock, measure_share
from tokenmix.lab.advise.probe import Nearness, probe
from tokenmix.lab.advise.text import above_bound, answer, as_json, candidate_tables, describe_bound, findings, text
from tokenmix.lab.bench import timing
from tokenmix.lab.cli.arguments import parse_lengths
from tokenmix.mixers.attention import Attention
from tokenmix.models import LMConfig, ViTConfig, build_model

LM = LMConfig(dim=16, max_len=64, mixers=({"name": "attention", "heads": 2},), layers=2)
BERT = [
    "--options",
    '{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}',
]


def share(
    length: int, mixing: float, attention: float = 0.0, peak: int | None = 100 << 20, without: int | None = 60 << 20
) -> Share:
    return Share(length, length, 1.0, max(attention, mixing), mixing, peak, without, 3)


def found(*shares: Share, worth: float = 1.25, limit: int | None = None, skipped=(), rows=()) -> Advice:
    model = build_model(LM)
    host = Host(
        "some", model, "tokenmix", Inputs(lambda n, b: ((torch.zeros(b, n, dtype=torch.long),), {}), limit=limit)
    )
    return Advice(host, modules_of(model, "some"), 1, worth, machine_of(), list(shares), list(skipped), list(rows))


def machine_of() -> dict:
    return {
        "device": "a machine",
        "cores": 2,
        "threads": 1,
        "load": 0.1,
        "torch": "2",
        "kernels": {"cpu": "none", "triton": "none"},
    }


def refused(capsys, *argv: str) -> str:
    assert cli.main(list(argv)) == 2
    out, err = capsys.readouterr()
    last = err.strip().split("\n")[-1]
    assert (out, last.startswith("error: ")) == ("", True)
    return last


# arithmetic


@pytest.mark.parametrize(
    ("part", "left", "wanted"), [(0.0, 0.0, 1.0), (0.5, 0.0, 2.0), (0.2, 0.0, 1.25), (0.5, 0.5, 4 / 3), (1.0, 0.5, 2.0)]
)
def test_amdahl(part, left, wanted):
    assert math.isclose(bound(part, left), wanted)
    if left == 0 and part:
        assert math.isclose(share_for(bound(part)), part)


def test_amdahl_refuses_what_is_no_share():
    for wrong in ((1.5, 0.0), (-0.1, 0.0), (1.0, 0.0), (0.5, -1.0)):
        with pytest.raises(MixerError, match="expects a share"):
            bound(*wrong)
    with pytest.raises(MixerError, match="larger than 1"):
        share_for(1.0)


def exact(T: float, pairs: float = 1.0, each: float = 3000.0) -> float:
    """The mixing's share where joining costs T^2 and the rest T."""
    return pairs * T * T / (pairs * T * T + each * T)


def test_the_first_length_is_where_the_formula_says():
    """pairs T^2 / (pairs T^2 + each T) = 1/5 where T = each / 4 pairs = 750: between, beyond and before the lengths
    measured.
    """
    assert first_length([256, 1024, 4096], [exact(T) for T in (256, 1024, 4096)], 0.2).how == "between"
    assert math.isclose(first_length([256, 1024, 4096], [exact(T) for T in (256, 1024, 4096)], 0.2).tokens, 750)
    beyond = first_length([64, 128], [exact(T) for T in (64, 128)], 0.2)
    assert (beyond.how, round(beyond.tokens)) == ("beyond", 750)
    assert first_length([1024, 2048], [exact(T) for T in (1024, 2048)], 0.2) == type(beyond)(1024, "measured")
    assert first_length([64, 128], [0.0, 0.0], 0.2).tokens is None
    assert first_length([64, 128], [0.0, 0.3], 0.2).tokens == 128


def test_what_a_longer_input_takes():
    assert expected_seconds(10.0, 4.0, 100, 200) == 6 * 2 + 4 * 4
    assert expected_peak([share(100, 0.1, peak=None)], 200) is None
    assert expected_peak([share(100, 0.1, peak=100, without=60)], 200) == 60 * 2 + 40 * 4
    linear = [share(100, 0.1, peak=100), share(200, 0.1, peak=200)]
    assert math.isclose(expected_peak(linear, 800), 800)
    square = [share(100, 0.1, peak=100), share(200, 0.1, peak=400)]
    assert math.isclose(expected_peak(square, 400), 1600)


# measuring


@pytest.fixture
def passing(monkeypatch):
    """Advance the clock of the measurements, which stands still otherwise, whatever the load of the machine."""
    now = [0.0]
    monkeypatch.setattr(measuring, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


class Slow(nn.Module):
    """Takes a known time."""

    def __init__(self, passing, seconds: float, weight: bool = False):
        super().__init__()
        self.passing, self.seconds = passing, seconds
        self.weight = nn.Parameter(torch.ones(1)) if weight else None

    def forward(self, x, **given):
        self.passing(self.seconds)
        return x


def test_shares_are_those_of_modules_whose_time_is_known(passing, monkeypatch):
    """Attention takes 20 ms per layer in a projection and 40 ms in mixing, the rest 40 ms: shares 0.6 and 0.4."""
    model = build_model(LM).eval()
    for block in model.blocks:
        block.mixer.q_proj = Slow(passing, 0.02, weight=True)
        block.mlp = Slow(passing, 0.04)
    monkeypatch.setattr(Attention, "functional_args", lambda self, inputs: ((self.q_proj(inputs.x),), {}))
    monkeypatch.setattr(
        Attention, "mix", lambda self, inputs: (self.functional_args(inputs), passing(0.04), inputs.x)[2]
    )
    tokens = torch.zeros(1, 8, dtype=torch.long)
    s = measure_share(model, modules_of(model, "lm"), lambda: model(tokens), 8, 8, budget=0.0)
    assert s.seconds == pytest.approx(0.1 * len(model.blocks))
    assert (s.attention_share, s.mixing_share, s.bound) == pytest.approx((0.6, 0.4, 1 / 0.6))


def test_time_outside_of_attention_is_not_attention(passing):
    model = build_model(LM).eval()
    for block in model.blocks:
        block.mlp = Slow(passing, 0.05)
    s = measure_share(
        model, modules_of(model, "lm"), lambda: model(torch.zeros(1, 4, dtype=torch.long)), 4, 4, budget=0.0
    )
    assert (s.attention_share, s.mixing_share, s.bound) == (0, 0, 1)


def test_the_mixing_of_attention_rises_with_length_in_work():
    """The clock in FLOPs instead of seconds: nothing of this machine enters."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(LMConfig(dim=16, max_len=512, mixers=LM.mixers, layers=1)).eval()
    shares = []
    for n in (16, 64, 256):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            clock = Clock([m.module for m in modules_of(model, "lm")])
            clock._read_time = lambda counter=counter: float(counter.get_total_flops())
            with clock.measure_pass():
                model(torch.zeros(1, n, dtype=torch.long))
        shares.append(clock.seconds()[0] / counter.get_total_flops())
    assert 0 < shares[0] < shares[1] < shares[2] < 1


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "timm", "transformer", "vit", "detr"])
def test_every_host_is_measured_and_left_as_it_was(name):
    model = make(name)
    shapes = {"timm": (1, 3, 32, 32), "vit": (1, 3, 32, 32), "detr": (1, 3, 32, 32)}
    x = (
        torch.zeros(1, 8, 32)
        if name == "transformer"
        else torch.zeros(shapes[name])
        if name in shapes
        else torch.ones(1, 8, dtype=torch.long)
    )
    args = (x, x) if name == "transformer" else (x,)
    before = model(*args)
    s = measure_share(model, modules_of(model, name), lambda: model(*args), 8, 8, budget=0.0)
    assert 0 < s.attention_share <= 1
    assert 0 <= s.mixing_share <= s.attention_share
    assert s.memory_share is None or 0 <= s.memory_share <= 1
    assert all(not m._forward_hooks and not m._forward_pre_hooks and "forward" not in vars(m) for m in model.modules())
    after = model(*args)
    first = [o if isinstance(o, torch.Tensor) else o[0] for o in (before, after)]
    assert torch.equal(first[0], first[1])
    assert torch.backends.mha.get_fastpath_enabled()


def test_projections_of_torch_are_those_it_computes():
    torch.manual_seed(0)
    module, x, y = nn.MultiheadAttention(8, 2), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    q = x @ module.in_proj_weight[:8].T + module.in_proj_bias[:8]
    assert torch.allclose(torch_projections(module, (x, x, x), {})(), module.out_proj(q), atol=1e-6)
    cross = torch_projections(module, (x,), {"key": y, "value": y})()
    assert torch.allclose(cross, module.out_proj(x @ module.in_proj_weight[:8].T), atol=1e-6)


# lengths


def test_lengths_that_do_not_fit_are_reported():
    host = Host("lm", build_model(LM).eval(), "tokenmix", inputs_of(build_model(LM), "lm"))
    a = ask(host, [8, 16, 128], seconds=9)
    assert [s.length for s in a.shares] == [8, 16]
    assert a.skipped == [Skipped(128, "the model takes 64 tokens at most")]
    with pytest.raises(MixerError, match="no length could be measured; 128: the model takes 64 tokens"):
        ask(host, [128])


def test_a_length_that_takes_no_time_is_measured_though_none_is_left(monkeypatch):
    """On a busy machine the first length used up all seconds, and the next, of milliseconds, was left out."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(advice_module, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    host = Host("lm", build_model(LM).eval(), "tokenmix", inputs_of(build_model(LM), "lm"))
    assert [s.length for s in ask(host, [8, 16], seconds=9).shares] == [8, 16]
    late = ask(host, [8, 16], seconds=1e-3)
    assert [s.length for s in late.shares] == [8]
    assert re.search(r"would take about \d+\.\d s of 0\.0 s that are left", late.skipped[0].why)


def test_time_and_memory_are_foreseen(monkeypatch):
    seen = [Share(100, 100, 1.0, 0.5, 0.5, 2**30, 2**29, 1)]
    assert "about 10 s of 8.0 s that are left" in advice_module._outlook(
        [Share(100, 100, 1.0, 0.5, 0.25, None, None, 1)], 200, 8.0, "cpu"
    )
    monkeypatch.setattr(advice_module, "memory_available", lambda device: 2**30)
    assert "up to 3.0 GiB of memory, 1.0 GiB are free" in advice_module._outlook(seen, 200, 1e9, "cpu")
    assert (
        advice_module._outlook(seen, 100, 1e9, "cpu") == "a pass would take up to 1.0 GiB of memory, 1.0 GiB are free"
    )
    monkeypatch.setattr(advice_module, "memory_available", lambda device: 2**40)
    assert advice_module._outlook(seen, 200, 1e9, "cpu") is None


def test_a_model_that_refuses_a_length_is_no_crash():
    def factory_inputs(n, b):
        return torch.ones(b, 7 if n == 7 else n, 16 if n < 9 else 3)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    host = Host("own", Encoder().eval(), "factory", Inputs(lambda n, b: ((factory_inputs(n, b),), {})))
    a = ask(host, [4, 8, 12], seconds=9)
    assert [s.length for s in a.shares] == [4, 8]
    assert a.skipped[0].why.startswith("the model does not take it (")


@pytest.mark.parametrize(("model", "sizes"), [("timm", (32, 64)), ("vit", (32, 64)), ("ours", (32, 64))])
def test_images_grow(model, sizes):
    ours = ViTConfig(
        dim=32, layers=1, mixers=({"name": "attention", "heads": 4},), image_size=(32, 32), patch=8, classes=3
    )
    built = build_model(ours).eval() if model == "ours" else make(model)
    inputs = inputs_of(built, model)
    a = ask(Host(model, built, "tokenmix" if model == "ours" else model, inputs), [*sizes, 33], seconds=9)
    assert [s.tokens for s in a.shares] == [(n // 8) ** 2 + 1 for n in sizes]
    assert a.skipped == [Skipped(33, "the patches of 8 pixels do not divide it")]
    assert inputs.length(17) == 32
    assert inputs.length(18) == 40
    assert "32 x 32" in text(a)


def test_parse_lengths():
    assert parse_lengths("4k, 256,1K,256", "advise") == [256, 1024, 4096]


# the answer


def test_a_bound_cannot_say_yes():
    a = found(share(256, exact(256)), share(1024, exact(1024)))
    assert a.verdict == "open"
    assert answer(a).startswith("Open: no candidate was measured in eager torch (--candidates auto measures some)")
    said = describe_bound(a)
    assert said.startswith("Bound: at 1,024 mixing takes 25 % of the time")
    assert "The bound reaches 1.25x (mixing at 20 % of the time) at about 750 (between measured lengths" in said
    assert "at 256 already" in describe_bound(found(share(256, 0.5)))
    assert a.says_no == "no candidate was measured"


def test_no_is_said_without_candidates_only_where_nothing_could_reach_the_bar():
    a = found(share(128, 0.02, attention=0.1), share(512, 0.042, attention=0.15))
    assert (a.verdict, a.says_no) == ("no", "not even a model without attention reaches the bar of 1.25x")
    assert answer(a) == (
        "No: not even a model without attention reaches the bar of 1.25x: at 512 without any attention it would be "
        "1.18x as fast."
    )
    assert found(share(512, 0.042, attention=0.3)).verdict == "open", "a mixer with fewer projections may reach it"
    late = found(share(128, 0.02), skipped=[Skipped(4096, "its passes would take about 90 s", fits=True)])
    assert (late.verdict, "; 4,096 left out), and a bound" in answer(late)) == ("open", True)
    elsewhere = found(share(128, 0.02))
    elsewhere.runtime = "onnx"
    assert elsewhere.verdict == "open", "shares of eager torch say nothing of another runtime"
    assert "is reached at about 2,920" not in describe_bound(a)
    assert "reaches 1.25x (mixing at 20 % of the time) at about 2,920" in describe_bound(a)
    assert "more than the 600 the model takes" in describe_bound(found(share(512, 0.042), limit=600))
    assert "Nothing here says" in describe_bound(found(share(512, 0.0)))


def test_yes_is_a_measured_candidate_at_a_length_in_the_runtime_asked_for():
    rows = [timed("hydra", 1.1, 1.05, 1.15), timed("linear", 1.4, 1.3, 1.5)]
    a = found(share(256, 0.01), rows=rows)
    assert (a.verdict, a.says_no) == ("yes", None)
    assert answer(a) == (
        "Yes, by speed, at 256: linear makes the model 1.40x (1.30 to 1.50) as fast at 256 in eager torch, the bar of "
        "1.25x or more."
    )
    a.rows = [replace(r, runtime="onnx") for r in rows]
    assert a.verdict != "yes", "another runtime than the one asked for"
    a.runtime = "onnx"
    assert (a.verdict, "in ONNX Runtime" in answer(a)) == ("yes", True)
    a.rows.append(replace(timed("linear", 1.0, 0.9, 1.1), length=512, runtime="onnx"))
    assert "; at 512 none reaches it." in answer(a)
    a.rows = [replace(rows[0], runtime="onnx")]
    assert (a.verdict, a.says_no) == ("no", "no candidate measured reaches the bar of 1.25x")
    assert answer(a).startswith("No: no candidate measured reaches the bar of 1.25x in ONNX Runtime. The best: hydra")
    a.rows = [replace(timed("hydra", 1.3, 1.2, 1.4), runtime="onnx")]
    assert (a.verdict, answer(a).startswith("Open: hydra makes the model 1.30x (1.20 to 1.40)")) == ("open", True)
    a.rows, a.shares = [replace(rows[0], runtime="onnx")], [share(256, 0.01), share(512, 0.01)]
    assert (a.verdict, answer(a).endswith("no candidate was measured at 512.")) == ("open", True)
    a.shares, a.skipped = [share(256, 0.01)], [Skipped(600, "the model takes 512 tokens at most")]
    assert a.verdict == "no", "what the model does not take cannot be asked"
    a.skipped = [Skipped(512, "its passes would take about 9 s of 8.0 s that are left", fits=True)]
    assert (a.verdict, a.says_no) == ("open", "it is open whether a candidate reaches the bar of 1.25x")
    assert answer(a).endswith("no candidate was measured at 512.")
    a.rows = [replace(timed("hydra", 1.2, 1.1, 1.3), runtime="onnx")]
    assert answer(a).endswith(
        "the bar of 1.25x lies within the spread of its ratios; measure again on a quiet machine."
    )
    a.rows = [Candidate("hydra", 256, why="it cannot be exported", runtime="onnx")]
    assert "every one fails, the first with: it cannot be exported" in answer(a)


def test_a_yes_says_that_quality_was_not_measured_and_what_measures_it(tmp_path):
    a = found(share(256, 0.01), rows=[timed("linear", 1.4, 1.3, 1.5)])
    only = "Quality: not measured, the answer is by speed alone"
    assert findings(a)[1] == f"{only}; `tokenmix train` trains the same model with the mixer."
    a.nearness = {"linear": Nearness(0.9, 0.8, 20)}
    assert findings(a)[1].startswith(f"{only} (the probe ranks candidates, and does not say what the model keeps)")
    a.host = replace(a.host, origin="transformers", name=str(tmp_path))
    assert "; --data TEXT --write FOLDER distils the choice, and compares it" in findings(a)[1]
    a.host = replace(a.host, trained=False)
    assert "; these weights are random; give trained ones" in findings(a)[1]
    a.host = replace(a.host, trained=True, name="some")
    assert "; tokenmix.lab.train.distill, with valid=" in findings(a)[1]
    a.rows = []
    assert not any(line.startswith("Quality") for line in findings(a)), "without a candidate there is nothing to keep"


def test_findings_follow_from_the_rows():
    rows = [
        Candidate(OWN, 256, 1.0, 1.0, 9),
        Candidate("hydra", 256, 0.8, 1.25, 9),
        Candidate("linear", 256, 0.5, 2.0, 9),
    ]
    assert "linear makes the model 2.00x as fast at 256" in findings(found(share(256, 0.5), rows=rows))[4]
    slow = [rows[0], Candidate("hydra", 256, 2.0, 0.5, 9)]
    said = findings(found(share(256, 0.5), rows=slow))[4]
    assert said.startswith("Choice: hydra, the fastest of the candidates measured, none of which reaches 1.25x")
    assert findings(found(share(256, 0.5)))[2].startswith("Memory: at 256 the peak of a pass would be up to 40 % lower")
    small = share(256, 0.5, peak=1 << 19, without=1 << 18)
    assert len(findings(found(small))) == 2, "a quarter of a MiB is the noise of resident memory, no saving"


def timed(mixer: str, speedup: float, least: float, most: float, saved: int = 0) -> Candidate:
    return Candidate(mixer, 256, 1 / speedup, speedup, 9, least=least, most=most, saved=saved)


def test_of_candidates_alike_in_speed_the_nearest_is_chosen():
    rows = [timed("linear", 1.9, 1.7, 2.1), timed("hydra", 1.8, 1.6, 2.0), timed("external", 1.3, 1.2, 1.4)]
    a = found(share(256, 0.5), rows=rows)
    a.specs |= {name: {"name": name} for name in ("linear", "hydra", "external")}
    assert a.choice.row.mixer == "linear"
    assert a.choice.why == (
        "the fastest of the candidates that reach 1.25x; hydra as fast within the quartiles, quality not ranked"
    )
    a.nearness |= {
        "linear": Nearness(0.9, 0.5, 20),
        "hydra": Nearness(0.9, 0.2, 20),
        "external": Nearness(0.9, 0.1, 20),
    }
    assert a.choice.row.mixer == "hydra"
    why = "the nearest to attention of the candidates that reach 1.25x; linear as fast within the quartiles"
    assert a.choice.why == why
    assert any(said.startswith(f"Choice: hydra, {why}:") for said in findings(a))
    assert (as_json(a)["choice"]["mixer"], chosen_spec(a)) == ("hydra", {"name": "hydra"})
    table = candidate_tables(a)[-1]
    assert [row[:2] + [row[3]] for row in table.rows] == [
        ["linear", "1", "3"],
        ["hydra", "2", "2"],
        ["external", "3", "1"],
    ]
    assert "Nearest to its attention after a probe of 20 steps is external: error 0.100" in text(a)


def test_the_choice_reaches_the_bar_at_the_longest_length_where_one_does():
    rows = [timed("hydra", 2.0, 1.9, 2.1), replace(timed("hydra", 1.0, 0.9, 1.1), length=512)]
    rows += [timed("linear", 1.4, 1.3, 1.5), replace(timed("linear", 1.2, 1.1, 1.24), length=512)]
    a = found(share(256, 0.5), share(512, 0.5), rows=rows)
    assert (a.choice.row.mixer, a.choice.row.length) == ("hydra", 256), "at 512 none reaches it"
    a.rows.append(replace(timed("external", 1.5, 1.4, 1.6), length=512))
    assert (a.choice.row.mixer, a.choice.row.length) == ("external", 512)


def test_a_probe_of_fewer_than_20_steps_ranks_nothing():
    rows = [timed("linear", 1.9, 1.7, 2.1), timed("hydra", 1.8, 1.6, 2.0)]
    a = found(share(256, 0.5), rows=rows)
    a.nearness |= {"linear": Nearness(0.9, 0.5, 19), "hydra": Nearness(0.9, 0.2, 19)}
    assert a.choice.row.mixer == "linear", "the fastest"
    table = candidate_tables(a)[-1]
    assert [row[3] for row in table.rows] == ["not ranked", "not ranked"]
    assert "Quality: not ranked: 19 steps of learning rank nothing, 20 are needed." in table.notes
    said = "Quality: not ranked: the probe made 19 steps, and fewer than 20 rank nothing."
    assert said in findings(a)
    assert "Nearest" not in text(a)
    assert not any(near["ranks"] for near in as_json(a)["nearness"].values())


def test_the_page_states_the_rule():
    page = (Path(__file__).parent.parent / "docs/hosts/advise.md").read_text()
    assert RULE in page.replace("\n", " ")


def test_the_page_has_the_promises_that_were_timed_again():
    root = Path(__file__).parent.parent
    results = json.loads((root / "benchmarks/results/retime_advice.json").read_text())
    assert "\n".join(["", *retime_advice.table(results), ""]) in (root / "docs/hosts/advise.md").read_text()
    for line in results["lines"]:
        assert line["within"] is (abs(line["promised"] / line["found"] - 1) <= retime_advice.WITHIN)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (timed("hydra", 1.9, 1.8, 2.0), None),
        (timed("hydra", 2.1, 1.9, 2.3), "only within the noise: the quartiles of its timings allow 1.90x to 2.30x"),
        (timed("hydra", 2.4, 2.2, 2.6, saved=64), "because it has 64 parameters fewer than attention"),
        (timed("hydra", 2.4, 2.2, 2.6), "measured in other passes"),
        (timed("hydra", 2.9, 2.8, 3.0, saved=64), "measured in other passes"),
    ],
)
def test_faster_than_its_bound_says_why(row, said):
    """Mixing takes half of the time, attention with its projections 60 %: bounds of 2x and 2.5x."""
    a = found(share(256, 0.5, attention=0.6), rows=[row])
    assert (above_bound(a, row) is None) is (said is None)
    notes = " ".join(candidate_tables(a)[0].notes)
    assert ("hydra: above the bound of 2.00x" in notes) is (said is not None)
    if said is not None:
        assert said in notes
        assert said in findings(a)[4]


def test_what_was_gained_and_lost_is_in_the_text():
    before, after = Speed(0.2, 0.21, None, None), Speed(0.1, 0.11, None, None)
    compared = Comparison(("teacher", "distilled"), {}, {256: {"teacher": before, "distilled": after}})
    a = found(share(256, 0.5))
    a.distilled = {"mixer": "linear", "layers": 2, "steps": 3, "seconds": 4.0, "loss": "loss", "out": "folder"}
    a.distilled |= {"loss_before": 2.0, "loss_after": 1.0, "comparison": compared.to_json(), "table": compared.table()}
    said = text(a)
    assert "Gained and lost\nmodel      tokens         ms a pass" in said
    assert said.endswith("Distilled, nothing is worse than before beyond noise; better: 2.00x as fast at 256 tokens.")
    assert json.loads(json.dumps(as_json(a)["distilled"]))["comparison"]["speeds"][0]["seconds"] == 0.2


def test_where_no_candidate_reaches_the_bar_the_rule_takes_all_that_were_measured():
    a = found(share(256, 0.5), rows=[timed("hydra", 1.0, 0.8, 1.2), timed("linear", 0.9, 0.7, 1.1)])
    a.specs |= {"hydra": {"name": "hydra"}, "linear": {"name": "linear"}}
    assert chosen_spec(a) == {"name": "hydra"}
    a.nearness |= {"hydra": Nearness(1.0, 0.5, 20), "linear": Nearness(1.0, 0.2, 20)}
    assert chosen_spec(a) == {"name": "linear"}
    a.rows = [Candidate("hydra", 256, why="it has no causal form")]
    with pytest.raises(MixerError, match="no candidate fits this model .it has no causal form"):
        chosen_spec(a)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_probe_of_sixteen_bits_learns_as_one_of_float32(dtype):
    host = load_host("BertModel", json.loads(BERT[1]))
    for p in host.model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    small = Host(host.name, copy.deepcopy(host.model).to(dtype), host.origin, host.inputs)
    wide, narrow = (probe(h, parse_candidates("linear"), 12, seconds=60, steps=4)["linear"] for h in (host, small))
    assert narrow.after < narrow.before
    assert narrow.after == pytest.approx(wide.after, rel=0.05)
    assert next(small.model.parameters()).dtype == dtype


def test_a_probe_ranks_no_candidate_whose_error_is_no_number():
    host = load_host("BertModel", json.loads(BERT[1]))
    host.model.encoder.layer[0].attention.self.value.bias.data.fill_(math.nan)
    assert probe(host, parse_candidates("linear"), 12, seconds=60, steps=2) == {}


def test_a_candidate_that_cannot_continue_has_no_time_per_token():
    """Attention's state knows no window, and refuses to go beyond it."""
    host = make("mistral")
    host.config.sliding_window = 8
    for layer in host.model.layers:
        layer.self_attn.sliding_window = 8
    inputs = inputs_of(host, "mistral")
    assert decode(host, inputs, 20, 1) is not None
    assert decode(replace_mixers(host, "attention")[0].eval(), inputs, 20, 1) is None


def test_a_probe_tells_attention_from_what_is_far_from_it():
    model = make("bert", std=0.2)
    host = Host("bert", model, "transformers", inputs_of(model, "bert"))
    near = probe(host, parse_candidates("attention,linear,fourier"), 12, seconds=60, steps=6)
    assert near["attention"].before < 1e-8
    assert near["linear"].before > 0.01
    assert near["linear"].after < near["linear"].before
    assert {n.steps for n in near.values()} == {6}


# times


@pytest.fixture
def clock(monkeypatch):
    """A clock for the timings that only calls move on."""
    now = [0.0]
    fake = types.SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(timing, "time", fake)
    return now


def calls_of(clock, seconds, noise=0.0):
    """Samplers of calls that take these seconds, and every other time more by ``noise``."""

    def made(each):
        turns = itertools.count()
        return lambda: clock.__setitem__(0, clock[0] + each * (1 + noise * (next(turns) % 2)))

    return {str(i): timing.sampler(made(each)) for i, each in enumerate(seconds)}


@pytest.mark.parametrize("seconds", [(0.5, 0.25, 1.0), (0.01, 0.02, 0.005), (2.0, 0.01), (1e-4, 3e-4)])
@pytest.mark.parametrize("budget", [0.0, 0.5, 10.0])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_estimates_of_seconds_hold_within_a_factor_of_two(clock, seconds, budget, noise):
    least, most = timing.expected_seconds(seconds, budget)
    timing.measure(calls_of(clock, seconds, noise), budget=budget, settle=0.1)
    assert least / 2 <= clock[0] <= 2 * most


def test_timings_are_repeated_until_they_settle_or_say_their_spread(clock):
    steady = timing.measure(calls_of(clock, (0.1, 0.2)), budget=3.0, settle=0.1)
    assert (3.0 < clock[0] < 4.5, steady["0"].spread) == (True, pytest.approx(0))
    clock[0] = 0.0
    restless = timing.measure(calls_of(clock, (0.1, 0.2), 0.5), budget=3.0, settle=0.1)
    assert 9.0 < clock[0] < 11.0
    assert restless["0"].spread == pytest.approx(0.5)
    row = replace(timed("hydra", 1.5, 1.2, 1.8), turns=90)
    notes = candidate_tables(found(share(256, 0.5), rows=[row]))[0].notes
    assert "hydra: its ratios still spread by 50 % after 90 samples, as the machine was busy." in notes
    calm = replace(row, least=1.45, most=1.52)
    assert "still spread" not in " ".join(candidate_tables(found(share(256, 0.5), rows=[calm]))[0].notes)


def test_a_load_that_changes_both_passes_alike_leaves_their_ratio(clock):
    """Each turn is slower than the one before by up to six times, and takes all models alike."""
    calls = itertools.count()

    def call(seconds):
        def run():
            load = 1 + next(calls) // 2 % 6  # of a turn, which has two calls
            clock[0] += seconds * load

        return timing.sampler(run)

    samplers = {"own": call(0.4), "hydra": call(0.25)}
    got = timing.measure(samplers, budget=6.0, against="own", known={"own": 0.4, "hydra": 0.25}, settle=0.1)
    assert clock[0] < 12.0, "the ratios have settled, so no patience is spent"
    assert got["own"].spread > 0.9
    assert got["hydra"].ratio == pytest.approx((1.6, 1.6, 1.6))
    assert (got["own"].ratios, len(got["hydra"].ratios)) == ((), got["hydra"].samples)


def test_each_candidate_is_timed_beside_the_model_in_alternating_order(clock):
    order = []
    calls = {
        name: timing.sampler(lambda n=name: (order.append(n), clock.__setitem__(0, clock[0] + 1.0))) for name in "oab"
    }
    timing.measure(calls, budget=0.0, against="o", known=dict.fromkeys("oab", 1.0))
    assert "".join(order) == "oaob" + "boao" + "oaob"
    assert timing.measure({"o": calls["o"]}, budget=0.0, against="o")["o"].ratios == ()


def test_seconds_are_divided_so_that_what_fits_is_measured():
    """Nine pairs with one model, 3 turns and a warm-up: 0.1 s a pass takes 7.4 s, 1 s takes 64 s."""
    assert advice_module.plan_budgets([0.1, 1.0], 10, 100.0) == pytest.approx([7.15, 7.15])
    assert advice_module.plan_budgets([0.1, 1.0], 10, 20.0) == [pytest.approx(6.3), None]
    assert advice_module.plan_budgets([0.1], 10, 7.4) == [pytest.approx(0.0)]


# runtimes


def test_a_runtime_is_refused_before_anything_is_measured(capsys, monkeypatch):
    said = refused(capsys, "advise", "bert", "--runtime", "jit")
    assert "a runtime is one of eager, compile, onnx, got 'jit'" in said
    with pytest.raises(MixerError, match="is measured on the CPU, got the device cuda"):
        runtimes.check_runtime("onnx", "cuda")
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    said = refused(capsys, "advise", "bert", "--runtime", "onnx")
    assert "needs onnx, onnxscript, onnxruntime: pip install 'tokenmix[onnx]'" in said


def test_a_candidate_that_cannot_be_exported_says_so_in_its_row(monkeypatch):
    """The exporter is replaced: a file takes seconds to write."""

    def export(model, path, *, length, fixed, inputs):
        raise MixerError("export: encoder is routing, which declares no export.")

    monkeypatch.setattr(runtimes, "export_onnx", export)
    model = make("bert")
    a = ask(model, [8], seconds=1, candidates="linear", runtime="onnx", steps=0)
    assert [(r.runtime, r.mixer) for r in a.rows] == [
        ("onnx", OWN),
        ("onnx", "linear"),
        ("eager", OWN),
        ("eager", "linear"),
    ]
    assert a.rows[1].why == "export: encoder is routing, which declares no export"
    assert "linear: not measured: export: encoder is routing" in text(a)
    assert (a.verdict, a.choice) == ("open", None)
    assert answer(a).startswith("Open: no candidate was measured in ONNX Runtime (every one fails")


def test_what_would_take_too_long_to_compile_is_left_out_and_says_so(monkeypatch):
    """Compiling takes 30 s a model by the replaced clock; 90 s are allowed, and the longest length is the first."""
    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr(runtimes, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    monkeypatch.setattr(advice_module, "PREPARING", 180)
    host = Host("bert", make("bert"), "transformers", inputs_of(make("bert"), "bert"))
    told: list[str] = []
    a = ask(host, [8, 16], seconds=0.5, candidates="external,linear", runtime="compile", steps=0, tell=told.append)
    rows = [(r.length, r.mixer, r.why) for r in a.rows if r.runtime == "compile"]
    late = "compiling both models takes about 60 s, and 0 s are left; give more --seconds"
    assert rows == [(8, "external", late), (8, "linear", late), *((16, m, None) for m in (OWN, "external", "linear"))]
    assert any(
        "preparing its own attention at 16, torch.compile, 3 models, each in half a minute to" in t for t in told
    )
    assert any("preparing external at 16, torch.compile, 2 models in about 60 s" in t for t in told)
    assert a.verdict != "no", "at 8 no candidate was measured"
    monkeypatch.setattr(advice_module, "PREPARING", 150)
    a = ask(host, [16], seconds=0.5, candidates="external,linear", runtime="compile", steps=0)
    assert [r.why is None for r in a.rows[:3]] == [True, True, False]
    assert a.rows[2].why.startswith("compiling it takes about 30 s, and 15 s are left")


def test_more_programs_are_compiled_than_torch_keeps_of_one_function(monkeypatch):
    """By the limit of torch the ninth model would run eagerly and be timed as compiled."""
    from torch._dynamo.testing import CompileCounter

    compile_model, layers = torch.compile, nn.Linear(2, 2)

    class Doubled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.layer, self.factor = layers, factor

        def forward(self, x):
            return self.layer(x) * self.factor

    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compile_model(model, backend=counter, dynamic=dynamic))
    runtime = runtimes.Runtime("compile", Inputs(lambda n, b: ((torch.ones(b, n, 2),), {})), 8, Path())
    given = ((torch.ones(1, 8, 2),), {})
    made = [runtime.prepare(str(i), Doubled(float(i)), 8, given) for i in range(20)]
    assert counter.frame_count == 20
    want = layers(torch.ones(1, 8, 2))
    assert all(torch.equal(each.call(), want * i) for i, each in enumerate(made))
    assert counter.frame_count == 20, "each call finds its own program"


@pytest.fixture
def unlimited_time(monkeypatch):
    """Let preparing programs take any time, however busy the machine is."""
    monkeypatch.setattr("tokenmix.lab.advise.advice.PREPARING", float("inf"))


@pytest.mark.usefixtures("unlimited_time")
@pytest.mark.parametrize("runtime", ["onnx", "compile"])
def test_the_runtime_asked_for_is_measured_beside_eager(runtime):
    a = ask(make("bert"), [8, 16], seconds=2, candidates="external", runtime=runtime, steps=0)
    timed_rows = [(r.runtime, r.length, r.mixer) for r in a.rows if r.seconds]
    assert timed_rows == [(name, n, m) for name in (runtime, "eager") for n in (8, 16) for m in (OWN, "external")]
    assert all(r.note is None for r in a.rows), "one file for all lengths"
    assert {r["runtime"] for r in as_json(a)["candidates"]} == {runtime, "eager"}


@pytest.mark.usefixtures("unlimited_time")
def test_a_module_of_ones_own_is_measured_in_onnx_runtime():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1).eval()
    inputs = lambda n, b: {"src": torch.zeros(b, n, 16)}  # noqa: E731  (a user writes one)
    a = ask(encoder, [8, 12], seconds=2, candidates="external", runtime="onnx", steps=0, inputs=inputs)
    assert [r.length for r in a.rows if r.runtime == "onnx" and r.seconds] == [8, 8, 12, 12]


def test_whisper_reads_a_whole_recording():
    a = ask(make("whisper"), [12, 20], seconds=2, candidates="hydra,external", steps=0)
    assert [s.length for s in a.shares] == [12]
    assert a.skipped == [Skipped(20, "the model takes 12 tokens and no other length")]
    assert [r.seconds is not None for r in a.rows] == [True, True, False]


@pytest.mark.usefixtures("unlimited_time")
def test_whisper_is_measured_in_onnx_runtime():
    a = ask(make("whisper"), [12], seconds=1, candidates="hydra", runtime="onnx", steps=0)
    assert [(r.runtime, r.mixer) for r in a.rows if r.seconds] == [
        (n, m) for n in ("onnx", "eager") for m in (OWN, "hydra")
    ]


def test_a_converted_folder_is_measured_where_it_kept_attention(tmp_path, capsys):
    make("bert").save_pretrained(tmp_path / "bert")
    assert cli.main(["convert", str(tmp_path / "bert"), "hydra", "--last", "1", "--out", str(tmp_path / "new")]) == 0
    capsys.readouterr()
    host = load_host(str(tmp_path / "new"))
    a = ask(host, [8], seconds=2, candidates="linear")
    assert ([m.name.split(".")[2] for m in a.modules], a.rows[1].mixer) == (["0"], "linear")
    assert set(a.nearness) == {"linear"}


# the command


def test_json_holds_everything(capsys):
    assert (
        cli.main(
            [
                "advise",
                "BertModel",
                *BERT,
                "--lengths",
                "8,16,1k",
                "--seconds",
                "6",
                "--candidates",
                "hydra,linear",
                "--json",
            ]
        )
        == 0
    )
    got = json.loads(capsys.readouterr().out)
    assert list(got) == [
        "model",
        "attention",
        "machine",
        "setting",
        "lengths",
        "skipped",
        "answer",
        "quality",
        "bound",
        "choice",
        "specs",
        "candidates",
        "plan",
        "distilled",
        "nearness",
        "refused",
    ]
    assert {name: near["steps"] >= 1 for name, near in got["nearness"].items()} == {"hydra": True, "linear": True}
    assert got["model"]["class"] == "BertModel"
    assert got["attention"][0]["heads"] == 4
    assert [s["length"] for s in got["lengths"]] == [8, 16]
    assert all(0 < s["mixing_share"] <= s["attention_share"] <= 1 and s["bound"] >= 1 for s in got["lengths"])
    assert got["skipped"] == [{"length": 1024, "why": "the model takes 512 tokens at most", "fits": False}]
    assert {r["mixer"] for r in got["candidates"]} == {OWN, "hydra", "linear"}
    assert got["answer"]["verdict"] in ("yes", "no", "open")
    assert (got["answer"]["by"], got["quality"]["measured"]) == ("speed", False)
    assert got["quality"]["text"].startswith("Quality: not measured, the answer is by speed alone")


def test_candidates_of_a_decoder_stream(monkeypatch):
    for name, model in (("gpt2", make("gpt2")), ("lm", build_model(LM).eval())):
        origin = "tokenmix" if name == "lm" else "transformers"
        a = ask(Host(name, model, origin, inputs_of(model, name)), [32], seconds=9, candidates="aft_simple,fourier")
        own, simple = a.rows[0], a.rows[1]
        assert own.mixer == OWN
        assert own.decoded.state_bytes > simple.decoded.state_bytes > 0
        assert simple.decoded.ms_per_token > 0
        assert "no causal form" in a.rows[2].why
        assert "fourier: not measured" in text(a)


def test_the_state_of_a_cache_is_counted():
    model = make("gpt2")
    a = ask(Host("gpt2", model, "transformers", inputs_of(model, "gpt2")), [32], seconds=3, candidates="aft_simple")
    assert a.rows[0].decoded.state_bytes == 2 * 2 * 32 * 32 * 4  # layers, keys and values, tokens, features, bytes


def test_the_page_stands_alone(tmp_path, capsys):
    page = tmp_path / "advice.html"
    argv = [
        "advise",
        "BertModel",
        *BERT,
        "--lengths",
        "8,16",
        "--seconds",
        "6",
        "--candidates",
        "auto",
        "--out",
        str(page),
    ]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert "Attention's part" in printed
    assert "external" in printed
    assert check_page(page) == []
    assert "<h2>By length</h2>" in page.read_text()
    assert page.read_text().count("data:image/png") >= 6


def test_a_factory_may_bring_inputs(monkeypatch, capsys):
    package = types.ModuleType("somewhere")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1)
    package.encoder = lambda: (encoder, lambda n, b: {"src": torch.zeros(b, n, 16)})
    package.alone = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16), 1)
    package.wrong = lambda: 3
    package.odd = lambda: (encoder, lambda n, b: 3)
    package.linear = lambda: (nn.Linear(2, 2), lambda n, b: torch.zeros(b, n, 2))
    package.thing = 3
    monkeypatch.setitem(sys.modules, "somewhere", package)
    assert cli.main(["advise", "somewhere:encoder", "--lengths", "8", "--seconds", "5"]) == 0
    assert "Measured without torch's fused inference pass" in capsys.readouterr().out
    for name, why in {
        "alone": "let the factory return (model, inputs)",
        "wrong": "must return an nn.Module",
        "odd": "must return a tensor, a tuple or a dict, got int",
        "linear": "Linear has no attention of a known family",
        "thing": "somewhere has no callable 'thing'",
    }.items():
        assert why in refused(capsys, "advise", f"somewhere:{name}", "--lengths", "8")
    assert "calling it with {'x': 1} fails" in refused(capsys, "advise", "somewhere:encoder", "--options", '{"x": 1}')


def test_names_and_folders_are_found(tmp_path):
    assert load_host("deit_tiny", {"layers": 1, "image_size": [32, 32]}).inputs.usual_lengths(32) == [32, 64]
    assert type(load_host("bert", json.loads(BERT[1])).model).__name__ == "BertModel"
    assert load_host("timm:deit_tiny_patch16_224", {"depth": 1}).origin == "timm"
    make("bert").save_pretrained(tmp_path / "saved")
    host = load_host(str(tmp_path / "saved"))
    assert (host.notes, host.inputs.limit) == ((), 40)
    assert load_host(str(tmp_path / "saved"), {"max_position_embeddings": 80}).inputs.limit == 80
    assert load_host(str(tmp_path / "saved"), {"max_position_embeddings": 80}).inputs.usual_lengths() == [80]


def test_wrong_commands(tmp_path, capsys, monkeypatch):
    for argv, why in {
        ("nothere/model",): "there is no folder 'nothere/model'; models are not downloaded",
        ("deit_tinny",): "nearest: deit_tiny",
        ("Bertmodel",): "nearest: BertModel",
        ("qqqqqqqqqq",): "a model is a run directory, a folder of transformers",
        (
            "timm:deit_tinny_patch16_224",
        ): "timm 1.0.31 has no model 'deit_tinny_patch16_224'; nearest: deit_tiny_patch16_224",
        ("hf:Bertmodel",): "has no model 'Bertmodel'",
        ("nosuchpackage:factory",): "cannot import 'nosuchpackage'",
        ("bert", "--lengths", "1q"): "got '1q'",
        ("bert", "--lengths", ","): "--lengths is empty",
        ("bert", "--options", "{"): "--options is not JSON",
        ("bert", "--options", "3"): "--options must be a JSON object",
        (
            "hydra_deit_base",
            "--options",
            '{"layers": 12}',
        ): "has no softmax attention to replace; its layers mix by hydra",
        ("pvt_tiny",): "is of kind 'pyramid'",
        ("bert", *BERT, "--candidates", "hidra"): "nearest: hydra",
        ("bert", *BERT, "--candidates", "sdpa"): "--candidates takes mixers",
        ("bert", *BERT, "--batch", "0"): "must be positive",
        ("bert", *BERT, "--worth", "1"): "larger than 1",
        ("bert", *BERT, "--device", "tpu"): "device='tpu' is unknown",
        ("bert", *BERT, "--out", "nofolder/x.html"): "the folder nofolder of x.html does not exist",
        ("bert", *BERT, "--data", "x"): "--data distils a language model in a folder of transformers",
        (str(tmp_path),): "holds no config.json",
    }.items():
        assert why in refused(capsys, "advise", *argv), argv
    (tmp_path / "config.json").write_text("{}")
    assert "describes neither a model of tokenmix" in refused(capsys, "advise", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model": {"kind": "segmentation", "backbone": {}}}')
    assert "is of kind 'segmentation'; of our models" in refused(capsys, "advise", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is not readable JSON" in refused(capsys, "advise", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("timm:deit_tiny_patch16_224", "timm", "vision"), ("hf:BertModel", "transformers", "hf")],
)
def test_a_missing_package_names_its_extra(name, package, extra, monkeypatch, capsys):
    from tokenmix.lab.advise import loading

    monkeypatch.setattr(loading, "_has", lambda p: p != package)
    assert f"needs {package}: pip install 'tokenmix[{extra}]'" in refused(capsys, "advise", name)
    assert f"{package} is not installed (pip install 'tokenmix[{extra}]')" in refused(capsys, "advise", "qqqqqqq")


def saved_with_tokenizer(folder):
    """A tiny BERT whose tokens are words."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {w: i for i, w in enumerate(["[PAD]", "[UNK]", "the", "cat", "sat", "on", "mat"])}, "[UNK]"
        )
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(
        folder
    )
    make("bert", std=0.1).save_pretrained(folder)
    return str(folder)


def test_the_model_is_distilled_and_written(tmp_path, capsys):
    from tokenmix.hosts.surgery.save_load import load_converted

    model, data, out = saved_with_tokenizer(tmp_path / "bert"), tmp_path / "text.txt", tmp_path / "distilled"
    data.write_text("the cat sat on the mat\nthe mat sat on the cat\n" * 60)
    argv = [
        "advise",
        model,
        "--lengths",
        "16",
        "--seconds",
        "3",
        "--candidates",
        "hydra",
        "--data",
        str(data),
        "--minutes",
        "0.03",
    ]
    assert cli.main([*argv, "--write", str(out), "--worth", "1000", "--json"]) == 1
    got = json.loads(capsys.readouterr().out)
    assert (got["distilled"], got["refused"]) == (None, "no candidate measured reaches the bar of 1000x")
    assert not out.exists()
    argv += ["--anyway"]
    assert cli.main([*argv, "--write", str(out), "--last", "1", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)["distilled"]
    compared = got["comparison"]
    assert (compared["measure"], list(compared["quality"])) == ("cosine", ["teacher", "replaced", "distilled"])
    assert compared["quality"]["teacher"] == pytest.approx(1)
    assert compared["quality"]["replaced"] < compared["quality"]["distilled"] < 1
    assert compared["text"].startswith("distilled, worse than before: cosine ")
    assert (got["mixer"], got["layers"]) == ("hydra", 1)
    assert 0 < got["loss_after"] < got["loss_before"]
    assert type(load_converted(out).encoder.layer[1].attention.self.mixer).__name__ == "Hydra"
    assert "exists already" in refused(capsys, *argv, "--write", str(out))
    assert "needs --write DIR" in refused(capsys, *argv)
    data.write_text("the cat")
    assert "has 2 tokens; at least 80 are needed" in refused(capsys, *argv, "--write", str(tmp_path / "new"))
    data.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refused(capsys, *argv, "--write", str(tmp_path / "new"))
    assert "no such file" in refused(
        capsys, *argv[:-5], "--data", str(tmp_path / "none"), "--write", str(tmp_path / "new")
    )
    assert not (tmp_path / "new").exists()


def test_a_folder_that_lacks_weights_says_so(tmp_path):
    folder = tmp_path / "gpt2"
    make("gpt2").transformer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["GPT2ForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config))
    host = load_host(str(folder))
    assert host.notes == ("it lacks 1 of its 29 weights, such as score.weight, which are random",)
    text = tmp_path / "text.txt"
    text.write_text("the cat")
    with pytest.raises(MixerError, match="score.weight, which are random, and noise would be distilled"):
        check_distillation(host, text, tmp_path / "out")


def test_what_cannot_be_distilled_is_refused_before_it_is_measured(tmp_path, capsys):
    text, folder = tmp_path / "text.txt", tmp_path / "gpt2"
    text.write_text("the cat")
    make("gpt2").save_pretrained(folder)
    distil = [str(folder), "--data", str(text), "--write", str(tmp_path / "out")]
    for argv, said in (
        ([*distil, "--last", "3"], "--last must be in 1..2, the attention modules of"),
        ([*distil, "--minutes", "inf"], "--minutes must be a positive number, got inf"),
        ([str(folder), "--write", str(tmp_path / "out")], "give --data TEXT too"),
        ([str(folder), "--worth", "inf"], "all finite, got 1, 20.0 and inf"),
    ):
        assert cli.main(["advise", *argv]) == 2
        assert said in capsys.readouterr().err
    host = load_host(str(folder))
    with pytest.raises(MixerError, match="is float16, in which training steps become NaN"):
        check_distillation(Host(host.name, host.model.half(), host.origin, host.inputs), text, tmp_path / "out")


def test_a_module_is_taken_as_it_is():
    with pytest.raises(MixerError, match="advise: Linear: how to call a Linear is not known; give inputs="):
        ask(torch.nn.Linear(2, 2).eval(), [8])
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1)
    with pytest.raises(MixerError, match="the TransformerEncoder is in training mode; call its eval"):
        ask(encoder, [8])
    a = ask(encoder.eval(), [8], seconds=3, inputs=lambda n, b: torch.zeros(b, n, 16))
    assert (a.host.origin, [s.length for s in a.shares]) == ("module", [8])
    changed = make("bert")
    changed.encoder.layer[1].output.dense = nn.Sequential(nn.Linear(48, 8), nn.Linear(8, 32)).eval()
    a = ask(changed, [8], seconds=3, candidates="linear")
    assert (a.host.origin, [r.mixer for r in a.rows]) == ("transformers", [OWN, "linear"])
    with pytest.raises(MixerError, match="inputs are for a module"):
        ask("BertModel", [8], inputs=lambda n, b: torch.zeros(b, n))
