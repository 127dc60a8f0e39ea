"""Test that a mixer somebody registers from a script can do all that a built-in one can.

Surgery, advise, bench, a model of transformers, ONNX, a report.
"""

from __future__ import annotations

import json

import pytest
import torch

from own_mixer import WeighedMean
from tokenmix import MIXERS, Mixer, MixerError, build_mixer, register_mixer
from tokenmix.lab.cli import main

NAME = "weighed_mean"
SPEC = {"name": NAME, "floor": 0.25}


@pytest.fixture(autouse=True)
def registered():
    register_mixer(NAME, WeighedMean)
    yield
    del MIXERS[NAME]


def bert():
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra hf")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return transformers.BertModel(config).eval()


def test_it_is_listed_and_diagnosed(capsys):
    assert main(["list", "--cost", "128"]) == 0
    assert NAME in capsys.readouterr().out
    main(["doctor"])
    assert f"{NAME} " not in capsys.readouterr().out, "the doctor names only what is broken"


def test_surgery_carries_its_projections_and_back():
    from tokenmix.hosts import replace_mixers, restore

    old = bert()
    new, report = replace_mixers(old, SPEC)
    first = new.encoder.layer[0].attention
    mixer = next(m for m in first.modules() if isinstance(m, WeighedMean))
    source = old.encoder.layer[0].attention.self
    assert torch.equal(mixer.q_proj.weight, source.query.weight)
    assert torch.equal(mixer.k_proj.bias, source.key.bias)
    assert not [e for e in report.entries if e.status == "new"]
    tokens = torch.randint(0, 50, (2, 9))
    assert new(tokens).last_hidden_state.isfinite().all()
    back, _ = restore(new)
    assert torch.equal(back(tokens).last_hidden_state, old(tokens).last_hidden_state)


def test_advise_measures_it(tmp_path, capsys):
    bert().save_pretrained(tmp_path / "bert")
    assert (
        main(
            [
                "advise",
                str(tmp_path / "bert"),
                "--lengths",
                "16",
                "--seconds",
                "0.2",
                "--candidates",
                f"{NAME}:floor=0.5",
                "--json",
            ]
        )
        == 0
    )
    rows = json.loads(capsys.readouterr().out)["candidates"]
    assert [r["mixer"] for r in rows if r["why"] is None][1:] == [f"{NAME}:floor=0.5"]


@pytest.mark.parametrize("level", ["op", "layer", "decode", "model"])
def test_bench_judges_and_times_it(capsys, level):
    given = ["--lengths", "32", "--dim", "16", "--heads", "2", "--budget", "0.2", "--pass", "forward", "--json", "-"]
    assert main(["bench", "--ops", NAME, "--level", level, *given]) == 0
    (row,) = [r for r in json.loads(capsys.readouterr().out)["rows"] if r["subject"].startswith(NAME)]
    assert row["status"] == "ok"


def test_a_model_of_transformers_generates_with_it(tmp_path):
    pytest.importorskip("transformers", reason="transformers comes with the extra hf")
    from tokenmix.hosts.huggingface import TokenMixConfig, TokenMixForCausalLM

    torch.manual_seed(0)
    model = TokenMixForCausalLM(
        TokenMixConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, mixers=[SPEC])
    ).eval()
    model.save_pretrained(tmp_path / "mine")
    loaded = TokenMixForCausalLM.from_pretrained(tmp_path / "mine")
    prompt = torch.randint(0, 50, (1, 5))
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    streamed = loaded.generate(prompt, use_cache=True, **given)
    assert torch.equal(streamed, model.generate(prompt, use_cache=False, **given))


def test_it_is_an_attention_function_of_transformers():
    pytest.importorskip("transformers", reason="transformers comes with the extra hf")
    from tokenmix.hosts.huggingface import register_attention

    model = bert()
    before = model(torch.arange(8)[None]).last_hidden_state
    model.set_attn_implementation(register_attention(NAME, floor=0.1))
    after = model(torch.arange(8)[None]).last_hidden_state
    assert after.isfinite().all()
    assert not torch.allclose(before, after)


def test_it_is_exported(tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime comes with the extra onnx")
    from tokenmix.export import export_onnx

    report = export_onnx(build_mixer(NAME, 16, causal=True, floor=0.5).eval(), tmp_path / "mine.onnx")
    assert (tmp_path / "mine.onnx").is_file()
    assert report.difference < 1e-4


def test_a_run_with_it_is_reported(tmp_path, monkeypatch):
    from tokenmix.lab.report import write_report
    from tokenmix.lab.train import train
    from tokenmix.lab.train.config import RunConfig

    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 122)) * 60)
    config = {
        "model": {"kind": "lm", "dim": 16, "layers": 1, "max_len": 32, "vocab": 256, "mixers": [SPEC]},
        "data": {"source": str(text), "seq_len": 16},
        "train": {"steps": 2, "batch_size": 2, "eval_every": 2, "threads": 1},
    }
    train(RunConfig.from_json(config), tmp_path / "run", verbose=False)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert NAME in page.read_text()


def test_what_it_leaves_out_is_refused_in_its_name():
    with pytest.raises(MixerError, match="needs the option 'floor'"):
        build_mixer(NAME, 16)
    with pytest.raises(MixerError, match="WeighedMean: floor must be positive"):
        build_mixer(NAME, 16, floor=-1.0)


@pytest.mark.parametrize("name", ["mix", "functional_args"])
def test_the_signature_of_before_is_refused_where_the_class_is_made(name):
    def before(self, x, context, *, positions, key_mask, attn_mask, grid, prefix):
        raise AssertionError

    with pytest.raises(MixerError, match=f"^Old: {name} takes .self, inputs., one Inputs instead of x"):
        type("Old", (Mixer,), {name: before})
