"""The contract suite on mixers from outside: correct ones pass, and each public defect breaks its promise."""

from __future__ import annotations

import json

import pytest
import torch

import foreign_mixers
from tokenmix import MixerError
from tokenmix.testing import PLAIN_PROMISES, PROMISES, ContractError, check_mixer, freeze, main_check, run_promises
from tokenmix.testing.suite import find_subject

DEFECTS = {
    "BareExponential": "finite_at_large_inputs",
    "GlobalMaximum": "future_cannot_reach_past",
    "Leak": "future_cannot_reach_past",
    "MaskIgnored": "mask_hides_padding",
    "MaskOnKeysOnly": "mask_hides_padding",
    "ReplacedParameter": "every_parameter_learns",
    "Untrained": "every_parameter_learns",
    "ZeroDivision": "finite_at_large_inputs",
    "OverTheBatch": "rows_are_independent",
    "HiddenTensor": "copies",
    "OneMemoryTwice": "copies",
    "FixedLength": "any_length",
    "NoSecondDerivative": "differentiable_twice",
    "WrongCounter": "streaming_equals_parallel",
    "Forgetful": "streaming_equals_parallel",
    "ExcusedLeak": "future_cannot_reach_past",
    "Silent": "attn_mask_equals_causal",
    "NotJson": "options_are_json",
}


@pytest.mark.parametrize("causal", [True, False])
def test_a_right_module_passes(causal):
    report = check_mixer(foreign_mixers.Mean, {"causal": causal}, reference=foreign_mixers.mean_reference)
    assert {r.promise for r in report.results} == set(PLAIN_PROMISES)
    assert report.status("future_cannot_reach_past") == ("kept" if causal else "not applicable")


@pytest.mark.parametrize("causal", [True, False])
def test_a_right_mixer_passes(causal):
    report = check_mixer(foreign_mixers.MeanMixer, {"causal": causal}, reference=foreign_mixers.mean_mixer_reference)
    assert {r.promise for r in report.results} == set(PROMISES)
    assert report.status("equals_reference") == report.status("padded_equals_shorter") == "kept"
    assert report.status("streaming_equals_parallel") == ("kept" if causal else "not applicable")


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught_by_comparison(name):
    cls = getattr(foreign_mixers, name)
    options = (
        {"causal": True} if name in ("GlobalMaximum", "WrongCounter", "Forgetful", "ExcusedLeak", "Silent") else {}
    )
    with pytest.raises(ContractError) as caught:
        check_mixer(cls, options, promises=[DEFECTS[name]])
    assert caught.value.report.status(DEFECTS[name]) == "broken"
    assert "seed=" in str(caught.value)


def test_a_branch_on_values_does_not_compile():
    report = run_promises(find_subject(foreign_mixers.Branches, {}, dim=8, seed=0), ["compiles"])
    assert report.status("compiles") == "crashed"
    torch._dynamo.reset()


def test_waivers_are_honoured_but_never_for_causality():
    report = check_mixer(
        foreign_mixers.Excused, {"causal": True}, promises=["streaming_equals_parallel", "declares_waivers"]
    )
    assert report.status("streaming_equals_parallel") == "waived"
    assert "keeps no past" in str(report)
    with pytest.raises(ContractError, match="no mixer may waive"):
        check_mixer(foreign_mixers.ExcusedLeak, {"causal": True}, promises=["declares_waivers"])


def test_a_wrong_reference_is_noticed():
    with pytest.raises(ContractError, match="not the reference's"):
        check_mixer(
            foreign_mixers.Mean,
            {"causal": True},
            reference=lambda m, x, allowed: m.value(x),
            promises=["equals_reference"],
        )


def test_an_unknown_promise_or_name_is_refused():
    with pytest.raises(MixerError, match="no promise is called 'speed'"):
        check_mixer(foreign_mixers.Mean, promises=["speed"])
    with pytest.raises(MixerError, match="no mixer is called 'aft'"):
        check_mixer("aft")
    with pytest.raises(MixerError, match="not a subclass"):
        check_mixer(dict)


def test_freeze_enters_every_decision():
    class Decides(torch.nn.Module):
        depth = 0

        def frozen(self):
            outer = self

            class _Hold:
                def __enter__(self):
                    outer.depth += 1

                def __exit__(self, *_):
                    outer.depth -= 1

            return _Hold()

    holder = torch.nn.Sequential(Decides(), torch.nn.Identity(), Decides())
    with freeze(holder):
        assert [m.depth for m in holder if isinstance(m, Decides)] == [1, 1]
    assert [m.depth for m in holder if isinstance(m, Decides)] == [0, 0]


class TestCommand:
    def test_a_right_module(self, capsys):
        assert main_check("foreign_mixers:Mean", {"dim": 12}) == 0
        out = capsys.readouterr().out
        assert "dim=12" in out
        assert "pass  future_cannot_reach_past" in out
        assert "FAIL" not in out

    def test_a_leak_prints_the_input(self, capsys):
        assert main_check("foreign_mixers:Leak", {"causal": True}) == 1
        line = next(line for line in capsys.readouterr().out.splitlines() if "FAIL  future_cannot_reach_past" in line)
        assert "seed=0" in line
        assert "tokens from" in line

    def test_json(self, capsys):
        assert main_check("foreign_mixers:MaskIgnored", {"dim": 8}, json=True) == 1
        (report,) = json.loads(capsys.readouterr().out)
        assert {"promise": "mask_hides_padding", "status": "broken"}.items() <= next(
            r for r in report["results"] if r["promise"] == "mask_hides_padding"
        ).items()

    def test_both_forms_of_a_library_mixer(self, capsys, monkeypatch):
        monkeypatch.setattr("tokenmix.testing.cli.run_promises", lambda s: run_promises(s, ["equals_reference"]))
        assert main_check("aft_local", {"window": 3, "max_len": 12, "dim": 8}) == 0
        assert (
            main_check("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 2, "dim": 8, "grid": [3, 4], "causal": False})
            == 0
        )
        out = capsys.readouterr().out
        assert "causal=False" in out
        assert "causal=True" in out
        assert out.count("pass  equals_reference") == 3

    @pytest.mark.parametrize(
        ("target", "options", "message"),
        [
            ("no_such_package:Mixer", {}, "cannot import 'no_such_package'"),
            ("foreign_mixers:Nobody", {}, "foreign_mixers has no 'Nobody'"),
            ("foreign_mixers:mean_reference", {}, "not a subclass"),
            ("aft", {}, "no mixer is called 'aft'"),
            ("aft_local", {"window": -1, "max_len": 8}, "cannot build"),
            ("foreign_mixers:Mean", {"widht": 3}, "cannot build"),
        ],
    )
    def test_what_cannot_be_checked_is_said(self, target, options, message):
        with pytest.raises(MixerError, match=message) as caught:
            main_check(target, options)
        assert "\n" not in str(caught.value)

    def test_a_class_from_the_working_directory(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "my_layers.py").write_text(
            "from torch import nn\n\nclass Twice(nn.Module):\n"
            "    def __init__(self, d_model):\n        super().__init__()\n"
            "        self.p = nn.Linear(d_model, d_model)\n"
            "    def forward(self, x):\n        return 2 * self.p(x)\n"
        )
        monkeypatch.chdir(tmp_path)
        assert main_check("my_layers:Twice", {"d_model": 6}) == 0
        assert "keeps_shape" in capsys.readouterr().out
