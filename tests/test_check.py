"""What `tokenmix check` prints: every input that breaks a promise, hints, the author's own line; what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import foreign_mixers
from tokenmix import MixerError, functional, reference
from tokenmix.mixers import Attention, Facts, Mixer
from tokenmix.system.torchvision import REPAIR, torchvision_hint
from tokenmix.testing import ContractError, check_mixer, main_check, run_promises
from tokenmix.testing.device import on_device
from tokenmix.testing.report import HINT, SHOWN, Broken, collect_failures, same
from tokenmix.testing.subject import leaf_names
from tokenmix.testing.suite import find_subject

ROOT = Path(__file__).resolve().parents[1]


def result_of(name, promise, **more):
    s = find_subject(getattr(foreign_mixers, name), {"causal": True}, dim=8, seed=0, **more)
    return run_promises(s, [promise]).results[0]


def only(monkeypatch, *promises):
    monkeypatch.setattr("tokenmix.testing.cli.run_promises", lambda s: run_promises(s, promises))


class TestEveryInput:
    def test_all_are_found_and_some_are_shown(self):
        result = result_of("Forgetful", "streaming_equals_parallel")
        assert len(result.others) > SHOWN
        lines = result.text().splitlines()
        assert len(lines) == SHOWN + 1
        assert lines[0] == f"FAIL  streaming_equals_parallel: {result.reason}"
        assert (
            lines[-1].strip() == f"and {len(result.others) - SHOWN + 1} more; {len(result.others) + 1} inputs break it"
        )
        whole = result.text(verbose=True).splitlines()
        assert [line.strip() for line in whole[1:]] == [f"also: {other}" for other in result.others]

    def test_the_cuts_that_work_are_not_among_them(self):
        result = result_of("Forgetful", "streaming_equals_parallel")
        cuts = [text.partition("cuts=")[2].partition(";")[0] for text in (result.reason, *result.others)]
        assert "(3, 1, 6)" in cuts
        assert "(10,)" not in cuts  # one chunk holds everything

    def test_one_alone_is_one_line(self):
        s = find_subject(foreign_mixers.Untrained, {}, dim=8, seed=0)
        (result,) = run_promises(s, ["every_parameter_learns"]).results
        assert result.status == "broken"
        assert "\n" not in str(result)

    def test_a_mask_is_read_both_ways(self):
        check_mixer(foreign_mixers.HidesByMask, promises=["mask_hides_padding"])
        with pytest.raises(ContractError, match="mask_hides_padding"):
            check_mixer(foreign_mixers.MaskOnKeysOnly, promises=["mask_hides_padding"])

    def test_outside_of_a_check_the_first_raises(self):
        one, two = torch.ones(2), torch.full((2,), 2.0)
        with pytest.raises(Broken, match="off by"):
            same(one, two, "they differ")
        found: list[str] = []
        with collect_failures(found):
            same(one, two, "they differ")
            same(one, two[:1], "they differ")
        assert [text.partition(":")[2][:7] for text in found] == [" off by", " shape "]

    def test_json_stays_as_it_was(self, capsys, monkeypatch):
        only(monkeypatch, "streaming_equals_parallel")
        assert main_check("foreign_mixers:Forgetful", {"causal": True}, json=True, verbose=True) == 1
        (report,) = json.loads(capsys.readouterr().out)
        (result,) = report["results"]
        assert set(report) == {"subject", "results"}
        assert set(result) == {"promise", "status", "reason"}
        assert result["reason"].startswith("streaming is not the parallel form: off by")


class TestNumbers:
    @pytest.mark.parametrize(
        ("got", "want", "said"),
        [
            (1.5, 1.25, "1.5, expected 1.25"),
            (1.00000001, 1.0, "1.00000001, expected 1$"),
            (1 + 2**-40, 1.0, "1.0000000000009095, expected 1.0"),
        ],
    )
    def test_as_many_digits_as_tell_them_apart(self, got, want, said):
        a, b = (torch.tensor([x], dtype=torch.float64) for x in (got, want))
        with pytest.raises(Broken, match=said):
            same(a, b, "they differ", tol=0.0)

    def test_float32_inside_float64_is_named(self):
        result = result_of("Narrow", "equals_reference", reference=foreign_mixers.mean_mixer_reference)
        assert result.status == "broken"
        assert HINT in result.reason

    def test_other_errors_are_not(self):
        for name in ("WrongCounter", "Forgetful"):
            assert HINT not in result_of(name, "streaming_equals_parallel").text(verbose=True)
        narrow = torch.tensor([1.0]), torch.tensor([1.0 + 1e-6])
        with pytest.raises(Broken, match="off by") as caught:
            same(*narrow, "they differ", tol=1e-10)
        assert HINT not in str(caught.value)


class TestCrashes:
    def test_the_innermost_line_of_ones_own(self, capsys, monkeypatch):
        result = result_of("Crashes", "streaming_equals_parallel")
        assert result.status == "crashed"
        assert "foreign_mixers.py:" in result.where
        assert result.where.endswith("in mix_chunk: return x @ x.new_ones(3, 3), state  # the wrong size")
        assert f"at {result.where}" in str(result)
        assert "Traceback" not in str(result)
        only(monkeypatch, "streaming_equals_parallel")
        assert main_check("foreign_mixers:Crashes", {"causal": True}, verbose=True) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().out

    def test_of_the_constructor(self):
        with pytest.raises(MixerError, match="ZeroDivisionError.*in __init__: self.half = nn.Linear") as caught:
            main_check("foreign_mixers:CannotBuild", {})
        assert "\n" not in str(caught.value)

    def test_of_the_file(self, tmp_path):
        file = tmp_path / "broken_on_import.py"
        file.write_text("import torch\n\nHALF = torch.ones(2) @ torch.ones(3)\n")
        with pytest.raises(MixerError, match=r"broken_on_import.py:3, in <module>: HALF = ") as caught:
            main_check(f"{file}:Anything", {})
        assert "\n" not in str(caught.value)

    def test_options_without_annotations_are_broken_and_not_a_crash_of_the_suite(self):
        result = result_of("Unannotated", "refuses_wrong_options")
        assert result.status == "broken"
        assert "annotate dim" in result.reason


class TestReference:
    def test_it_is_compared_with(self, capsys, monkeypatch):
        only(monkeypatch, "equals_reference")
        layer = "foreign_mixers:MeanMixer"
        assert main_check(layer, {}, reference="foreign_mixers:mean_mixer_reference") == 0
        assert capsys.readouterr().out.count("pass  equals_reference") == 2
        assert main_check(layer, {}) == 0
        assert capsys.readouterr().out.count("no reference was given") == 2
        assert main_check("foreign_mixers:WrongCounter", {}, reference=f"{__file__}:wrong") == 1
        assert "the output is not the reference's" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("reference", "message"),
        [
            ("mean_mixer_reference", "names nothing; write package:Name or file.py:Name"),
            ("foreign_mixers:", "names nothing"),
            ("foreign_mixers:nobody", "foreign_mixers has no 'nobody'"),
            ("foreign_mixers:MeanMixer", "--reference is a function, .*which is the class MeanMixer"),
            ("foreign_mixers:__doc__", "--reference is a function, .*which is a str"),
            ("no_such_module:f", "cannot import 'no_such_module': ModuleNotFoundError"),
            ("nowhere/equation.py:f", "there is no file nowhere/equation.py"),
        ],
    )
    def test_what_is_no_reference_is_refused(self, reference, message):
        with pytest.raises(MixerError, match=message) as caught:
            main_check("foreign_mixers:MeanMixer", {}, reference=reference)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "message"),
        [("my-layer.py", "rename it to a name such as mine.py"), ("json.py", "that of another module")],
    )
    def test_a_file_that_cannot_be_imported_under_its_name_is_refused(self, tmp_path, name, message):
        (tmp_path / name).write_text("x = 1\n")
        with pytest.raises(MixerError, match=message):
            main_check(f"{tmp_path / name}:Layer", {})


def wrong(mixer, x, allowed):
    """Return the values unmixed."""
    return mixer.v_proj(x)


def test_a_form_that_the_constructor_refuses_is_named(capsys, monkeypatch):
    only(monkeypatch, "keeps_shape", "attn_mask_equals_causal")
    assert main_check("foreign_mixers:OnlyCausal", {}) == 0
    out = capsys.readouterr().out
    assert out.count("pass  keeps_shape") == 1
    assert "n.a.  attn_mask_equals_causal" in out
    last = out.splitlines()[-1]
    assert last.startswith("not checked: cannot build OnlyCausal(dim=16, causal=False)")
    assert last.endswith("states facts = Facts(causal_only=True).")
    assert main_check("foreign_mixers:OnlyCausal", {}, json=True) == 0
    found = capsys.readouterr()
    assert len(json.loads(found.out)) == 1
    assert found.err.startswith("not checked: ")
    with pytest.raises(MixerError, match="has only a causal form"):
        main_check("foreign_mixers:OnlyCausal", {"causal": False})


UNPAIRED = """import torch
if not hasattr(torch.ops.torchvision, "nms"):
    raise RuntimeError("operator torchvision::nms does not exist")
"""
LAYER = "import torchvision\nfrom foreign_mixers import MeanMixer\n"


class TestTorchvision:
    """A torchvision that was built for another torch, as a package that fails the same way."""

    def run(self, folder, code):
        (folder / "torchvision").mkdir(exist_ok=True)
        (folder / "torchvision/__init__.py").write_text(UNPAIRED)
        (folder / "layer.py").write_text(LAYER)
        paths = os.pathsep.join(str(p) for p in (folder, ROOT / "src", ROOT / "tests"))
        env = {**os.environ, "PYTHONPATH": paths}
        command = [sys.executable, "-W", "ignore", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)

    def test_the_line_of_the_page_repairs_it(self, tmp_path):
        assert REPAIR == "import tokenmix.hosts.torchvision"
        assert REPAIR in (ROOT / "docs/hosts/timm.md").read_text()
        assert self.run(tmp_path, "import torchvision").returncode == 1
        done = self.run(tmp_path, f"{REPAIR}\nimport torchvision")
        assert done.returncode == 0, done.stderr

    def test_the_error_names_the_line(self, tmp_path):
        code = "from tokenmix.lab.cli import main; raise SystemExit(main(['check', 'layer.py:MeanMixer']))"
        done = self.run(tmp_path, code)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"write `{REPAIR}` before timm, transformers or torchvision are imported" in done.stderr

    def test_other_errors_are_left_alone(self):
        assert torchvision_hint(RuntimeError("out of memory")) == ""
        outer = ModuleNotFoundError("Could not import module")
        outer.__cause__ = RuntimeError("operator torchvision::nms does not exist")
        assert REPAIR in torchvision_hint(outer)


class TestDevice:
    @pytest.mark.parametrize(
        ("name", "word"),
        [("tpux", "'tpux' cannot be used"), ("cuda:99", "'cuda:99' cannot be used"), ("meta", "holds")],
    )
    def test_one_that_cannot_be_used_is_one_line(self, name, word):
        with pytest.raises(MixerError, match=word) as why:
            main_check("aft_simple", {}, device=name)
        assert "\n" not in str(why.value)

    def test_inputs_and_weights_are_on_it(self):
        s = find_subject("aft_local", {"max_len": 9, "window": 3, "rank": 2}, dim=8, seed=0)
        want = s.x()
        with torch.device("meta"):
            assert s.x().is_meta
            assert {p.device.type for p in s.build().parameters()} == {"meta"}
        with on_device("cpu"):
            assert torch.equal(s.x(), want)

    def test_the_cpu_is_no_mode(self):
        """Under one, torch.compile refuses calls such as unflatten."""
        with on_device("cpu"):
            assert torch._C._len_torch_function_stack() == 0

    def test_a_layer_that_unflattens_compiles(self, capsys, monkeypatch):
        only(monkeypatch, "compiles")
        assert main_check("foreign_mixers:InHeads", {}) == 0
        assert "pass  compiles" in capsys.readouterr().out
        with torch.device("cpu"):  # as --device cuda enters one
            check_mixer(foreign_mixers.InHeads, promises=["compiles"])


class TestWords:
    """What a failed comparison says: the bound with its digits, what it is relative to, the first wrong token."""

    def said(self, got, want, **more):
        with pytest.raises(Broken) as caught:
            same(got, want, "they differ", **more)
        return str(caught.value)

    def test_the_bound_has_the_digits_that_tell_it_from_the_error(self):
        one = torch.ones(1, dtype=torch.float64)
        assert "off by 9.89e-04 of max|expected|, 1 (allowed 9.60e-04)" in self.said(one + 9.89e-4, one, tol=9.6e-4)
        assert "(allowed 9.88800e-04)" in self.said(one + 9.89e-4, one, tol=9.888e-4)
        assert "off by 9.89000e-04" in self.said(one + 9.89e-4, one, tol=9.888e-4)
        said = self.said(one + 0.5, one, tol=0.1, scale=4.0, of="the largest gradient")
        assert "off by 1.25e-01 of the largest gradient, 4 (allowed 1.00e-01)" in said

    def test_the_first_wrong_token_is_named_besides_the_worst(self):
        want = torch.ones(2, 9, 3, dtype=torch.float64)
        got = want.clone()
        got[1, 4, 2], got[0, 7, 1] = 1.25, 3.0
        said = self.said(got, want, start=10)
        assert "row 0, token 17, feature 1: 3, expected 1" in said
        assert said.endswith("first wrong token row 1, token 14, feature 2: 1.25, expected 1")
        assert "first wrong token" not in self.said(got, want)
        live = torch.ones(2, 9, dtype=torch.bool)
        live[0, 7] = False
        said = self.said(got, want, start=0, live=live)
        assert "row 1, token 4, feature 2: 1.25, expected 1" in said
        assert "first wrong" not in said
        same(got, want, "they agree", live=live & (torch.arange(9) < 4))
        got[1, 6, 0] = float("nan")
        assert "1 of 54 numbers are not finite, first row 1, token 6, feature 0" in self.said(got, want, start=0)

    def test_a_recurrence_that_goes_wrong_names_where(self):
        result = result_of("WrongCounter", "streaming_equals_parallel")
        assert re.search(r"; first wrong token row \d, token \d, feature \d: ", result.text(verbose=True))

    def test_arguments_are_called_by_their_names(self):
        options = {"heads": 2, "causal": True}
        found = check_mixer(Scaled, options, promises=["finite_at_large_keys"], functional=functional.attention)
        assert not found.failures
        for promise, said in (
            ("accurate_on_adversarial_keys", r"float32 gradient of v: off by .* of the largest gradient, "),
            ("gradients_of_non_finite_are_honest", r"reaches the gradient of q"),
        ):
            with pytest.raises(ContractError, match=said) as why:
                check_mixer(Scaled, options, promises=[promise], reference=reference.attention, functional=scaled)
            assert not re.search(r"argument \d", str(why.value))

    def test_a_form_without_keys_has_its_own_names_and_may_close_its_gates(self):
        options = {"promises": ["accurate_on_adversarial_keys"], "functional": gated}
        check_mixer(Gated, {"causal": True}, reference=lambda q, v, *, mask: gated(q, v), **options)
        with pytest.raises(ContractError, match=r"q=float32 .* in \[") as why:
            check_mixer(Gated, {"causal": True}, reference=lambda q, v, *, mask: gated(q, v) + v, **options)
        assert "k=" not in str(why.value)

    def test_names_of_leaves_inside_of_tuples(self):
        def form(q, w, index, k, *, heads=1):
            """Nothing."""

        a = torch.ones(1)
        assert leaf_names(form, (a, (a, (a, None)), a.long(), a)) == ["q", "w[0]", "w[1][0]", "k"]


class Scaled(Attention):
    """Attention for ``scaled``."""


def scaled(q, k, v, **options):
    """Softmax attention whose gradient of the values is a thousandth too large, and which hides no NaN from q."""
    q = q + 0.0 * v.detach().sum((0, 1))
    return functional.attention(q, k, v + 1e-3 * (v - v.detach()), **options)


class Gated(Mixer):
    """Values times a gate, which keys of -100 close: float32 has neither 4e-44 nor its reciprocal."""

    facts = Facts(causal_only=True)

    def __init__(self, dim, *, causal=True):
        super().__init__(dim, causal=causal)
        self.q_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(3))

    def functional_args(self, inputs):
        return (self.q_proj(inputs.x), self.v_proj(inputs.x)), {}


def gated(q, v, **_):
    """The sigmoid of q times v."""
    return torch.sigmoid(q) * v
