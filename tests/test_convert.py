"""Turn softmax ViTs into ViTs with other mixers.

What is copied is equal to the bit, what is new is a fresh build's, and the report says which is which.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from cases import BOTH_WAYS, CASES
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.hosts import convert_command, convert_vit, read_weights, save_converted, to_hf
from tokenmix.lab.train import load_model
from tokenmix.mixers import CORE, register_mixer
from tokenmix.models import MODELS, ViTConfig, build_model

ATTENTION = {"name": "attention", "heads": 2}
NORMED = {**ATTENTION, "qk_norm": "layer"}
TINY = ViTConfig(dim=16, layers=2, mixers=(ATTENTION,), image_size=(12, 16), patch=4, classes=3)
OPTIONS = {
    "attention": {"heads": 2},
    "aft_full": {"rank": 3},
    "aft_local": {"window": 3, "rank": 2},
    "aft_conv": {"heads": 4, "kernel_size": 3},
    "multihead_linear": {"heads": 4},
    "external": {"slots": 4},
    "external_multihead": {"heads": 2, "slots": 3},
    "linear": {"heads": 2},
    "performer": {"heads": 2},
    "rfa": {"heads": 2},
    "synthesizer_dense": {"heads": 2},
    "synthesizer_random": {"heads": 2},
    "synthesizer_factorized_dense": {"heads": 2},
    "synthesizer_factorized_random": {"heads": 2},
    "synthesizer_mixture": {"heads": 2},
    "local": {"heads": 2, "window": 4},
}


def vit(**options):
    model = build_model(replace(TINY, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def fresh(config, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(config).state_dict()


def check(source, model, report, seed):
    """Check that every tensor of the model is the source's or a fresh build's, as the report says.

    Every tensor is in the report once.
    """
    state, anew = model.state_dict(), fresh(model.config, seed)
    by_name = {e.name: e for e in report.entries if e.status != "dropped"}
    assert set(by_name) == set(state)
    for name, tensor in state.items():
        entry = by_name[name]
        if entry.status == "new":
            assert torch.equal(tensor, anew[name]), name
        elif entry.status == "copied":
            assert torch.equal(tensor, source[entry.origin]), name
            assert source[entry.origin].any()
    used = {e.origin for e in report.entries if e.status in ("copied", "split")}
    assert {e.name for e in report.entries if e.status == "dropped"} == set(source) - used
    assert report.parameters("copied", "split", "new") == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in CORE if not MIXERS[name].facts.causal_only])
def test_into_every_core_mixer(name):
    source = vit()
    spec = {"name": name, **OPTIONS.get(name, {})}
    model, report = convert_vit(source, spec, seed=5)
    check(source.state_dict(), model, report, 5)
    kept = {n.split(".mixer.")[1].split(".")[0] for n in report.names("copied") if ".mixer." in n}
    rule = set(MIXERS[name].facts.carries) - {"q_norm", "k_norm"}  # which the source does not have
    assert kept == rule if name != "synthesizer_mixture" else kept <= rule
    assert {n for n in report.names("copied") if ".mixer." not in n} == {
        n for n in source.state_dict() if ".mixer." not in n
    }
    assert model.training
    assert torch.isfinite(model(torch.randn(1, 3, 12, 16))).all()


@pytest.mark.parametrize("spec", [ATTENTION, NORMED], ids=["attention", "normed"])
def test_the_same_mixer_is_the_same_model(spec):
    source = vit(mixers=(spec,))
    model, report = convert_vit(source, spec)
    assert report.share == 1
    assert report.names("new", "dropped") == []
    x = torch.randn(2, 3, 12, 16)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), source(x))


@pytest.mark.parametrize("case", BOTH_WAYS)
def test_into_every_mixer(case):
    name, options = CASES[case]
    if name not in CORE:
        spec = {
            "name": name,
            **{k: v for k, v in options.items() if k not in ("max_len", "causal", "ndim", "grid_size", "head_dim")},
        }
        source = vit()
        model, report = convert_vit(source, spec, seed=1)
        entries = [e for e in report.entries if e.status != "dropped"]
        for e in entries:
            assert e.status == "new" or torch.equal(model.state_dict()[e.name], source.state_dict()[e.origin])
        assert {e.name for e in entries} == set(model.state_dict())


@pytest.mark.parametrize("name", [name for name, cls in MIXERS.items() if cls.facts.carries])
def test_what_a_mixer_carries_and_copies_is_there(name):
    cls = MIXERS[name]
    given = {"attention": {"qk_norm": "rms"}, "synthesizer_mixture": {"parts": ["attention", "dense"]}}.get(name, {})
    mixer = build_mixer(name, 16, **cls.example_options(8, heads=2), **given)
    parts = {part for part, _ in mixer.named_modules()}
    assert set(cls.facts.carries) <= parts
    assert set(cls.facts.copies) <= parts
    assert set(cls.facts.copies.values()) <= set(cls.facts.carries)


def test_global_projections_start_as_the_others():
    spec = next({"name": n, **o} for n, o in CASES.values() if n == "longformer")
    spec = {k: v for k, v in spec.items() if k not in ("max_len", "causal")}
    source = vit()
    model, report = convert_vit(source, spec)
    assert torch.equal(model.blocks[1].mixer.q_global.weight, source.blocks[1].mixer.q_proj.weight)
    assert "blocks.1.mixer.q_global.weight" in report.names("copied")


def test_table_8_of_aft():
    """Check that everything is copied but positions, class token and the query and key projections.

    The named model's V has no bias, so the source's is dropped too.
    """
    with torch.device("meta"):
        model, report = convert_vit(build_model("deit_base_384"), "aft_conv_base384_k25_h32")
    parts = {n.split(".mixer.")[-1] for n in report.names("dropped")}
    assert parts == {
        "class_token",
        "positions",
        "q_proj.weight",
        "q_proj.bias",
        "k_proj.weight",
        "k_proj.bias",
        "v_proj.bias",
    }
    new = {n.split(".mixer.")[-1] for n in report.names("new")}
    assert new == {"q_proj.weight", "k_proj.weight", "raw", "gamma", "beta"}
    D, h, taps = 768, 32, 25 * 25
    assert report.parameters("new") == 12 * (D * D + D * h + h * taps + 2 * h)
    assert report.parameters("copied", "split", "new") == 79_845_736
    assert report.parameters("copied") == 79_845_736 - report.parameters("new") == 72_232_168
    assert report.share == pytest.approx(0.9046, abs=1e-4)


def test_table_8_in_small_runs_at_other_sizes():
    source = vit()
    spec = {"name": "aft_conv", "heads": 4, "kernel_size": 3}
    target = replace(source.config, mixers=(spec,), pool="mean", positions=None)
    model, report = convert_vit(source, target, seed=2)
    check(source.state_dict(), model, report, 2)
    assert [n for n in report.names("dropped") if ".mixer." not in n] == ["class_token", "positions"]
    assert "blocks.0.mixer.v_proj.bias" in report.names("copied")
    assert model.eval()(torch.randn(1, 3, 20, 28)).shape == (1, 3)


def test_some_layers_only():
    source = vit(layers=4)
    model, report = convert_vit(
        source, [ATTENTION, ATTENTION, {"name": "hydra"}, {"name": "external", "slots": 2}], seed=3
    )
    check(source.state_dict(), model, report, 3)
    assert not any(n.startswith(("blocks.0", "blocks.1", "blocks.2")) for n in report.names("new", "dropped"))
    again, report = convert_vit(
        model, [ATTENTION, {"name": "hydra"}, {"name": "hydra"}, {"name": "external", "slots": 2}], seed=3
    )
    check(model.state_dict(), again, report, 3)
    assert report.share == 1, "external stays as it is, hydra takes all of attention"
    back, report = convert_vit(again, ATTENTION, seed=4)
    check(again.state_dict(), back, report, 4)
    assert {n for n in report.names("new") if n.endswith("weight")} == {
        "blocks.3.mixer.k_proj.weight",
        "blocks.3.mixer.v_proj.weight",
    }


def test_projections_go_across_only_where_both_mean_softmaxs():
    source = vit(mixers=({"name": "aft_conv", "heads": 4, "kernel_size": 3},))
    model, report = convert_vit(source, ATTENTION, seed=1)
    check(source.state_dict(), model, report, 1)
    assert {n.split(".")[3] for n in report.names("new")} == {"q_proj", "k_proj"}, (
        "AFT-conv's queries and keys are not attention's"
    )
    wider = {"name": "aft_conv", "heads": 4, "kernel_size": 5}
    with pytest.raises(
        MixerError,
        match=r"'blocks.0.mixer.raw' has the shape \(4, 3, 3\), blocks.0.mixer.raw of the target \(4, 5, 5\)",
    ):
        convert_vit(source, wider)


def test_positions_without_the_class_token_are_split():
    source = vit()
    model, report = convert_vit(source, replace(source.config, mixers=({"name": "hydra"},), pool="mean"))
    assert report.names("split") == ["positions"]
    assert torch.equal(model.positions, source.positions[1:])


def test_a_split_tensor_of_timm():
    import timm.models as timm

    theirs = timm.VisionTransformer(img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=2, num_classes=2)
    model, report = convert_vit(theirs, {"name": "aft_simple"}, seed=0)
    parts = [f"blocks.0.mixer.{p}_proj.{leaf}" for leaf in ("weight", "bias") for p in "qkv"]
    assert sorted(report.names("split")) == sorted(parts)
    assert torch.equal(model.blocks[0].mixer.k_proj.weight, theirs.blocks[0].attn.qkv.weight[12:24])


def test_another_head():
    source = vit()
    model, report = convert_vit(source, ATTENTION, classes=7, seed=6)
    check(source.state_dict(), model, report, 6)
    assert report.names("new", "dropped") == ["head.weight", "head.bias", "head.weight", "head.bias"]
    assert "the head is new: 3 classes before, 7 now" in report.notes
    _, report = convert_vit(source, replace(source.config, classes=0))
    assert report.names("new", "dropped") == ["head.weight", "head.bias"]


def test_another_image_size():
    source = vit()
    target = replace(source.config, mixers=({"name": "aft_full", "rank": 2},), image_size=(20, 24))
    with pytest.raises(
        MixerError, match=r"another size than the target, 12 x 16 to 20 x 24; allow it with resize=True"
    ):
        convert_vit(source, target)
    before = {k: v.clone() for k, v in source.state_dict().items()}
    model, report = convert_vit(source, target, resize=True, seed=1)
    assert all(torch.equal(v, before[k]) for k, v in source.state_dict().items()), "the source is left alone"
    same = read_weights((before, source.config)).model().resize((20, 24))
    check(same.state_dict(), model, report, 1)
    assert "resized from images of 12 x 16 to 20 x 24" in report.notes
    with pytest.raises(MixerError, match="has patch=4, the target patch=8"):
        convert_vit(source, replace(target, image_size=(16, 16), patch=8), resize=True)


def test_what_does_not_fit_is_an_error():
    source = vit()
    wrong = {
        r"'blocks.0.mixer.k_proj.weight' has the shape \(16, 16\), .*k_proj.weight of the target \(8, 16\)": {
            "mixers": ({**ATTENTION, "kv_heads": 1},)
        },
        r"'blocks.0.mlp.up.weight' has the shape \(64, 16\), blocks.0.mlp.up.weight of the target \(32, 16\)": {
            "mlp_ratio": 2.0
        },
        r"has patch=4, the target patch=2": {"patch": 2},
        r"has dim=16, the target dim=32": {"dim": 32},
        r"has layers=2, the target layers=3": {"layers": 3},
        r"has channels=3, the target channels=1": {"channels": 1},
    }
    for words, options in wrong.items():
        with pytest.raises(MixerError, match=words):
            convert_vit(source, replace(source.config, **options))
    with pytest.raises(MixerError, match=r"'registers' has the shape \(2, 16\)"):
        convert_vit(vit(registers=2), replace(TINY, registers=3))
    with pytest.raises(MixerError, match=r"'positions' has the shape \(12, 16\), positions of the target \(13, 16\)"):
        convert_vit(vit(pool="mean"), TINY)
    for target, words in ((3, "got int"), ("deit_tinny", "nearest: deit_tiny"), ("{", "not readable JSON")):
        with pytest.raises(MixerError, match=words):
            convert_vit(source, target)


def test_what_shapes_cannot_tell_is_noted():
    _, report = convert_vit(vit(), replace(TINY, mixers=({**ATTENTION, "heads": 4},), norm_eps=1e-3))
    assert any("LayerNorm eps was 1e-06, is 0.001" in note for note in report.notes)
    assert any(note.startswith("options of attention differ") for note in report.notes)
    _, report = convert_vit(vit(), replace(TINY, mixers=({**ATTENTION, "out_bias": True},)))
    assert report.notes == (), "a default written out is no difference"


def test_a_mixer_of_your_own(monkeypatch):
    from tokenmix.mixers.hydra import Hydra

    class Mine(Hydra):
        """A mixer from elsewhere."""

    register_mixer("mine", Mine)
    try:
        _, report = convert_vit(vit(), {"name": "mine"})
        assert "blocks.0.mixer.out_proj.weight" in report.names("copied"), "a subclass carries what its parent does"
        monkeypatch.setattr(Mine, "facts", replace(Mine.facts, carries=("v_proj",)))
        _, report = convert_vit(vit(), {"name": "mine"})
        assert "blocks.0.mixer.v_proj.weight" in report.names("copied")
        assert "blocks.0.mixer.out_proj.weight" in report.names("new")
    finally:
        del MIXERS["mine"]


def test_the_seed_is_torchs_where_none_is_given():
    source = vit()
    torch.manual_seed(9)
    model, _ = convert_vit(source, {"name": "external_multihead", "heads": 2, "slots": 3})
    assert torch.equal(model.blocks[0].mixer.memory_k, fresh(model.config, 9)["blocks.0.mixer.memory_k"])
    before = torch.get_rng_state()
    convert_vit(source, {"name": "hydra"}, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_report_reads_well_and_is_json():
    _, report = convert_vit(
        vit(layers=3), [ATTENTION, {"name": "aft_simple", "gate": None}, {"name": "aft_simple", "gate": None}]
    )
    text = str(report)
    assert "layer 0\n  copied   mixer_norm, mlp_norm, mixer.q_proj" in text
    assert "layers 1 to 2, each" in text
    assert "  dropped  mixer.q_proj\n" in text + "\n"
    data = json.loads(json.dumps(report.to_json()))
    assert data["counts"]["dropped"] == {"tensors": 4, "parameters": 2 * (16 * 16 + 16)}
    assert sum(row["tensors"] for row in data["counts"].values()) == len(data["tensors"])


def test_command_and_folder(tmp_path):
    from safetensors.torch import save_file

    source = vit(dim=64, image_size=(16, 16), mixers=({"name": "attention", "heads": 1},))
    save_file({k: v.contiguous() for k, v in to_hf(source, files=True).items()}, tmp_path / "vit.safetensors")
    spec = '{"name": "aft_conv", "heads": 4, "kernel_size": 3}'
    report = convert_command(str(tmp_path / "vit.safetensors"), spec, tmp_path / "out", classes=10, seed=4)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors", "report.json"]
    model, config = load_model(tmp_path / "out")
    assert config == model.config
    again, _ = convert_vit(tmp_path / "vit.safetensors", json.loads(spec), classes=10, seed=4)
    assert not model.training
    assert model.config == again.config
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == json.loads(json.dumps(report.to_json()))
    back, _ = convert_vit(str(tmp_path / "out"), {"name": "hydra"})
    assert torch.equal(back.patch.weight, source.patch.weight), "a converted folder is a source too"
    with pytest.raises(MixerError, match="holds a model or a run already"):
        convert_command(str(tmp_path / "vit.safetensors"), spec, tmp_path / "out")
    with pytest.raises(MixerError, match="no such file or folder"):
        convert_command(str(tmp_path / "none"), spec, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    import os

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    model, report = convert_vit(vit(), {"name": "hydra"})
    with pytest.raises(MixerError, match="No space left on device"):
        save_converted(model, report, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_folder_is_named(tmp_path):
    model, report = convert_vit(vit(), {"name": "hydra"})
    save_converted(model, report, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(MixerError, match=f"{weights}: is truncated"):
        load_model(tmp_path / "out")
    config = {**model.config.to_json(), "classes": 4}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    save_converted(model, report, tmp_path / "good")
    (tmp_path / "good" / "config.json").write_text(json.dumps(config))
    with pytest.raises(MixerError, match="do not fit the model.*head.weight"):
        load_model(tmp_path / "good")


def test_named_models_keep_classes_and_eps_of_the_source():
    with torch.device("meta"):
        source = build_model(replace(MODELS["deit_tiny"], classes=10, norm_eps=1e-12))
        model, report = convert_vit(source, "aft_full_tiny")
    assert (model.config.classes, model.config.norm_eps) == (10, 1e-12)
    assert report.notes == ()
