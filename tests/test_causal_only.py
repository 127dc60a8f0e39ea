"""A mixer whose class states ``causal_only``, from outside: what builds mixers knows, and hosts refuse it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import cases
import foreign_mixers
from gated_delta import GatedDelta, equation
from tokenmix import MIXERS, MixerError, build_mixer, register_mixer
from tokenmix.lab.bench.cases import BenchSubject, Setting, is_causal
from tokenmix.lab.cli import main
from tokenmix.lab.cli.doctor import diagnose
from tokenmix.lab.report.taxonomy import readme_table, taxonomy
from tokenmix.mixers import Facts, example_mixer
from tokenmix.models import LM, EncoderConfig, LMConfig, Seq2SeqConfig, ViTConfig, build_model
from tokenmix.testing import ContractError, check_mixer

NAME = "outside_delta"
SPEC = {"name": NAME}
PROMISES = (
    "equals_reference",
    "future_cannot_reach_past",
    "masked_keys_have_no_influence",
    "non_finite_is_honest",
    "gradients_of_non_finite_are_honest",
    "streaming_equals_parallel",
    "builds_on_meta",
    "runs_under_autocast",
    "attn_mask_equals_causal",
    "refuses_what_it_cannot",
    "nothing_to_attend",
)


@pytest.fixture(autouse=True)
def registered():
    register_mixer(NAME, GatedDelta)
    yield
    del MIXERS[NAME]


def test_the_class_states_what_follows():
    assert GatedDelta.facts.causal_forms() == (True,)
    assert GatedDelta.facts.causal
    assert MIXERS["attention"].facts.causal_forms() == (False, True)
    assert MIXERS["fourier"].facts.causal_forms() == (False,)

    class Narrowed(MIXERS["attention"]):
        facts = Facts(causal_only=True)

    assert Narrowed(8, causal=True).capabilities.context is Narrowed.facts.context is False


def test_the_base_class_refuses_the_other_form():
    with pytest.raises(MixerError, match="^GatedDelta: has only a causal form; build it with causal=True, or ") as why:
        build_mixer(NAME, 8, causal=False)
    assert "\n" not in str(why.value)
    with pytest.raises(MixerError, match="has only a causal form"):
        example_mixer(NAME, 8, T=8, causal=False)
    assert example_mixer(NAME, 8, T=8).causal


def test_it_keeps_the_contract_where_causal_is_not_named():
    report = check_mixer(NAME, reference=equation, promises=PROMISES)
    assert {r.promise for r in report.results if r.status == "not applicable"} == {"attn_mask_equals_causal"}


def test_check_builds_one_form(capsys, monkeypatch):
    from tokenmix.testing import run_promises

    monkeypatch.setattr("tokenmix.testing.cli.run_promises", lambda s: run_promises(s, ["keeps_shape"]))
    assert main(["check", NAME]) == 0
    out = capsys.readouterr().out
    assert out.count("pass  keeps_shape") == 1
    assert "not checked" not in out
    assert main(["check", NAME, "--options", '{"causal": false}']) == 2
    assert "has only a causal form" in capsys.readouterr().err


def test_a_class_that_builds_both_forms_breaks_the_promise():
    with pytest.raises(ContractError, match="causal=False, which causal_only excludes: is accepted silently"):
        check_mixer(foreign_mixers.SaysOnlyCausal, promises=["refuses_what_it_cannot"])
    check_mixer(foreign_mixers.OnlyCausal, promises=["refuses_what_it_cannot"])


def test_the_table_of_cases_has_one_form_of_it(monkeypatch):
    monkeypatch.setitem(cases.CASES, NAME, (NAME, {"heads": 2}))
    monkeypatch.setattr(cases, "QUICK", None)
    assert [causal for case, causal in cases.forms() if case == NAME] == [True]


def test_the_doctor_tries_one_form(monkeypatch):
    monkeypatch.setattr("tokenmix.mixers.MIXERS", {name: MIXERS[name] for name in (NAME, "attention", "fourier")})
    found = diagnose()
    assert found["broken"] == []
    assert set(found["forward"]) == {
        "outside_delta causal",
        "attention bidirectional",
        "attention causal",
        "fourier bidirectional",
    }


def test_lists_and_tables_say_so(capsys, tmp_path):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "causal only, streaming, export" in " ".join(out.partition(f"  {NAME} [")[2][:900].split())
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["mixers"]
    only = {name for name, m in found.items() if m["causal_only"]}
    assert only == {name for name, cls in MIXERS.items() if cls.facts.causal_only} >= {NAME}
    assert main(["list", "--cost", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[NAME]["causal"] is True
    (row,) = [line for line in taxonomy(tmp_path).splitlines() if f"`{NAME}`" in line]
    assert row.endswith("| only | constant |")
    assert NAME not in readme_table().partition("Without a causal form")[2]


def test_bench_runs_it_causally():
    for causal in (False, True):
        assert is_causal(BenchSubject(NAME), Setting("op", 32, 2, 16, 2, causal=causal)) is True
    assert is_causal(BenchSubject("fourier"), Setting("op", 32, 2, 16, 2)) is False


def test_bench_measures_it(capsys):
    given = ["--lengths", "16", "--dim", "16", "--heads", "2", "--budget", "0.1", "--pass", "forward", "--json", "-"]
    assert main(["bench", "--ops", NAME, "--level", "op", *given]) == 0
    (row,) = [r for r in json.loads(capsys.readouterr().out)["rows"] if r["subject"].startswith(NAME)]
    assert (row["status"], row["causal"]) == ("ok", True)


def test_a_language_model_streams_with_it():
    torch.manual_seed(0)
    model, tokens = (
        LM(LMConfig(vocab=11, dim=8, layers=1, mixers=(SPEC,), max_len=16)).eval(),
        torch.randint(11, (2, 7)),
    )
    state, parts = model.init_state(2), []
    for part in tokens.split(3, 1):
        logits, state = model.extend(part, state)
        parts.append(logits)
    assert torch.allclose(torch.cat(parts, 1), model(tokens), atol=1e-5)


SIZES = {"dim": 8, "layers": 1, "mixers": (SPEC,)}


def encoder():
    return build_model(EncoderConfig(vocab=11, max_len=16, **SIZES))


def translator(**mixers):
    return build_model(Seq2SeqConfig(vocab=11, max_len=16, dim=8, mixers=(SPEC,), **mixers))


def cross():
    return translator(encoder_mixers=({"name": "aft_simple"},), cross_mixers=(SPEC,))


def vit():
    return build_model(ViTConfig(image_size=8, patch=4, classes=3, **SIZES))


def points():
    from tokenmix.models.points import blind_mixer

    return blind_mixer(8, SPEC, 5)


def maps():
    from tokenmix.models.segmentation import MixerResidual

    return MixerResidual(8, SPEC, (2, 2))


def torch_host():
    from tokenmix.hosts import MultiheadMixer

    return MultiheadMixer(8, 2, mixer=NAME)


def timm_host():
    pytest.importorskip("timm", reason="timm comes with the extra vision")
    from tokenmix.hosts.timm import attention_class

    return attention_class(NAME)(8, num_heads=2)


def surgery():
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra hf")
    from tokenmix.hosts import replace_mixers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return replace_mixers(transformers.BertModel(transformers.BertConfig(vocab_size=11, **sizes)), SPEC)


def huggingface():
    pytest.importorskip("transformers", reason="transformers comes with the extra hf")
    from tokenmix.hosts.huggingface import TokenMixConfig, TokenMixForMaskedLM

    return TokenMixForMaskedLM(TokenMixConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, mixers=[SPEC]))


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (encoder, NAME),
        (translator, NAME),
        (cross, NAME),
        (vit, NAME),
        (points, NAME),
        (maps, NAME),
        (surgery, NAME),
        (huggingface, NAME),
        (torch_host, "GatedDelta"),
        (timm_host, "GatedDelta"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_reads_both_sides_refuses_it_by_name(build, named):
    why = "cannot be a cross mixer" if build is cross else "only a causal form"
    with pytest.raises(MixerError, match=f"{named}.*{why}") as said:
        build()
    assert "\n" not in str(said.value)


def test_an_attention_function_of_transformers_refuses_both_sides(monkeypatch):
    pytest.importorskip("transformers", reason="transformers comes with the extra hf")
    from tokenmix.hosts.huggingface import attention_interface

    monkeypatch.setattr(GatedDelta, "facts", replace(GatedDelta.facts, only_qkv=True, form=running_mean))
    attend = attention_interface.AttentionInterface()[attention_interface.register_attention(NAME)]
    module, q = torch.nn.Module(), torch.randn(1, 2, 5, 4)
    with pytest.raises(MixerError, match=f"^tokenmix_{NAME}: has only a causal form") as said:
        attend(module, q, q, q, None, is_causal=False)
    assert "\n" not in str(said.value)
    whole, _ = attend(module, q, q, q, None, is_causal=True)
    one, _ = attend(module, q[:, :, 4:], q, q, None, is_causal=True)
    assert torch.equal(one[:, 0], whole[:, 4])


def running_mean(q, k, v, *, heads=1, causal=True, key_mask=None, backend="auto"):
    """The mean of the values so far; as long as the queries."""
    assert len(q[0]) == len(v[0])
    return v.cumsum(1) / torch.arange(1, v.shape[1] + 1)[:, None]
