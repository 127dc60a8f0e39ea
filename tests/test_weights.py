"""Turn timm's and Hugging Face's Vision Transformers into ours to the last bit, and back.

What is refused, and in which words.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import timm
import torch
import transformers

from tokenmix import MixerError
from tokenmix.hosts import from_hf, from_timm, hf_options, read_weights, timm_options, to_hf, to_timm
from tokenmix.models import MODELS, ViT, ViTConfig, build_model

SMALL = {"img_size": (24, 32), "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
ATTENTION = {"name": "attention", "heads": 4}
TINY = ViTConfig(dim=32, layers=2, mixers=(ATTENTION,), image_size=(16, 24), patch=8, classes=5)


def shaken(model):
    """The model in eval mode with weights of which none is zero or one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3) + (0.5 if parameter.ndim == 1 else 0)
            )
    return model.eval()


def timm_vit(**options):
    return shaken(timm.models.VisionTransformer(**{**SMALL, **options}))


def hf_vit(cls="ViTForImageClassification", **options):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "image_size": [16, 24],
        "patch_size": 8,
    }
    return shaken(getattr(transformers, cls)(transformers.ViTConfig(**{**sizes, "num_labels": 5, **options})))


def ours(**options) -> ViT:
    return shaken(build_model(replace(TINY, **options)))


def images(model, n: int = 2):
    return torch.randn(n, model.config.channels, *model.config.image_size)


def same_bits(a, b) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_small_patch16_224"])
def test_deit_of_timm(name):
    theirs = shaken(timm.create_model(name, pretrained=False))
    found = from_timm(theirs)
    model = found.model()
    with torch.no_grad():
        x = images(model)
        tokens, wanted = model.forward_features(x), theirs.forward_features(x)
        torch.testing.assert_close(tokens, wanted, atol=1e-5, rtol=0)
        logits, wanted = model.forward_head(tokens), theirs.forward_head(wanted)
        assert (logits - wanted).abs().max() <= 1e-5
        assert (wanted[0] - wanted[1]).abs().max() > 0.01, "the inputs make a difference"
    assert found.notes == ()
    assert found.config == MODELS[name.removesuffix("_patch16_224")]
    assert same_bits(to_timm(model), theirs.state_dict())
    assert from_timm(theirs.state_dict()).config == found.config, "shapes, and 64 features per head, tell the same"


TIMM_VARIANTS = {
    "class": {},
    "mean": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "no_embed_class": {"no_embed_class": True},
    "registers": {"reg_tokens": 3},
    "registers-no_embed_class": {"reg_tokens": 3, "no_embed_class": True},
    "registers-mean": {"reg_tokens": 2, "class_token": False, "global_pool": "avg", "fc_norm": False},
    "no_positions": {"pos_embed": "none"},
    "no_head": {"num_classes": 0},
    "no_qkv_bias": {"qkv_bias": False},
    "normed": {"qk_norm": True},
    "wide": {"mlp_ratio": 2.7},
    "grey": {"in_chans": 1},
    "rounded": {"embed_dim": 11, "num_heads": 1, "mlp_ratio": 15.5 / 11},  # int(11 * (15 / 11)) is 14
}


@pytest.mark.parametrize("options", TIMM_VARIANTS.values(), ids=TIMM_VARIANTS)
def test_variants_of_timm(options):
    theirs = timm_vit(**options)
    model = from_timm(theirs).model()
    x, other = images(model), images(model)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), theirs.forward_features(x), atol=1e-5, rtol=0)
        torch.testing.assert_close(model(x), theirs(x), atol=1e-5, rtol=0)
        assert (model(x) - model(other)).abs().max() > 1e-3
    bare = options.get("no_embed_class", False)
    back = to_timm(model, no_embed_class=bare)
    if not ("reg_tokens" in options and not bare):  # their rows among the positions went into the registers
        assert same_bits(back, theirs.state_dict())
    twin = timm.models.VisionTransformer(**timm_options(model.config, no_embed_class=bare)).eval()
    twin.load_state_dict(back)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), theirs(x), atol=1e-6, rtol=0)


SCALED = {
    "scaled": lambda: timm_vit(init_values=0.1),
    "deit3": lambda: shaken(timm.create_model("deit3_small_patch16_224", depth=2)),
    "dinov2": lambda: shaken(timm.create_model("vit_small_patch14_reg4_dinov2", img_size=42, depth=2)),
}


@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
def test_layer_scale_goes_into_the_projections(make):
    theirs = make()
    found = from_timm(theirs)
    assert found.notes == ("LayerScale is multiplied into the projections before it",)
    model = found.model()
    x = images(model)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), theirs.forward_features(x), atol=1e-5, rtol=0)
        theirs.blocks[1].ls1.gamma.mul_(2)
        assert (model.forward_features(x) - theirs.forward_features(x)).abs().max() > 1e-3, (
            "the scale makes a difference"
        )
    half = {k: v for k, v in theirs.state_dict().items() if k != "blocks.1.mlp.fc2.weight"}
    with pytest.raises(MixerError, match=r"'blocks.1.mlp.fc2.weight' is missing"):
        from_timm(half, heads=3, image_size=model.config.image_size)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"registers": 2},
        {"pool": "mean"},
        {"positions": None},
        {"classes": 0},
        {"norm_eps": 1e-3},
        {"mixers": ({**ATTENTION, "qk_norm": "layer"},)},
    ],
)
def test_ours_to_timm_and_home(options):
    model = ours(**options)
    twin = timm.models.VisionTransformer(**timm_options(model.config)).eval()
    twin.load_state_dict(to_timm(model))
    x = images(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x), atol=1e-5, rtol=0)
    home = from_timm(twin)
    assert same_bits(home.state, model.state_dict())
    assert home.config.norm_eps == model.config.norm_eps


@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": False}, {"layer_norm_eps": 1e-3}, {"num_channels": 1}, {"image_size": 24}]
)
def test_vit_of_transformers(options, tmp_path):
    theirs = hf_vit(**options)
    found = from_hf(theirs)
    model = found.model()
    assert found.config.norm_eps == options.get("layer_norm_eps", 1e-12)
    x = images(model)
    with torch.no_grad():
        seen = theirs(x, output_hidden_states=True)
        torch.testing.assert_close(model(x), seen.logits, atol=1e-5, rtol=0)
        tokens, given = model.embed(x)
        for block, wanted in zip(model.blocks, seen.hidden_states, strict=False):
            torch.testing.assert_close(tokens, wanted, atol=1e-5, rtol=0)
            tokens = block(tokens, **given)
    assert same_bits(to_hf(model), theirs.state_dict())
    theirs.save_pretrained(tmp_path)
    for place in (tmp_path, f"hf:{tmp_path}"):
        saved = read_weights(place)
        assert saved.config == found.config, "the folder's config.json says all"
        assert same_bits(saved.state, found.state), "and its file spells the names in the older way"
    assert same_bits(to_hf(model, files=True), dict(load(tmp_path / "model.safetensors")))


def load(path):
    from safetensors.torch import load_file

    return load_file(path)


def test_vit_model_of_transformers_has_features_for_logits():
    theirs = hf_vit("ViTModel")
    found = from_hf(theirs)
    model = found.model()
    assert found.config.classes == 0
    assert set(found.left_out) == {"pooler.dense.weight", "pooler.dense.bias"}
    x = images(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x).last_hidden_state[:, 0], atol=1e-5, rtol=0)
    twin = transformers.ViTModel(transformers.ViTConfig(**hf_options(found.config)), add_pooling_layer=False)
    twin.load_state_dict(to_hf(model))


def test_bare_states_are_read_with_what_is_said():
    theirs = timm_vit(embed_dim=128, num_heads=4)
    with pytest.raises(MixerError, match=r"12 positions of patches form no square; give image_size"):
        from_timm(theirs.state_dict())
    found = from_timm(theirs.state_dict(), heads=4, image_size=(24, 32))
    assert found.config == from_timm(theirs).config
    assert from_timm(theirs.state_dict(), image_size=(24, 32)).config.mixers[0]["heads"] == 2
    with pytest.raises(MixerError, match=r"48 features are not heads of 64.* give heads="):
        from_timm(timm_vit().state_dict())
    square = {"img_size": 24, "embed_dim": 64, "no_embed_class": True, "reg_tokens": 2, "num_heads": 1}
    theirs = timm_vit(**square)
    assert same_bits(from_timm(theirs.state_dict()).state, from_timm(theirs).state), "9 positions: no rows for tokens"
    theirs = timm_vit(**square | {"img_size": 16})
    with pytest.raises(MixerError, match=r"4 positions may be 2 x 2 patches, or fewer and 3 tokens; give image_size"):
        from_timm(theirs.state_dict())
    assert same_bits(from_timm(theirs.state_dict(), image_size=16).state, from_timm(theirs).state)
    found = from_hf(hf_vit(hidden_size=64, image_size=16).state_dict())
    assert (found.config.norm_eps, found.config.image_size, found.config.mixers[0]["heads"]) == (1e-12, (16, 16), 1)


REFUSED = {
    "distilled": (lambda: timm.create_model("deit_tiny_distilled_patch16_224"), r"'dist_token' shows a distilled DeiT"),
    "distilled-state": (lambda: {"dist_token": torch.ones(1, 1, 8)}, r"'dist_token' shows a distilled DeiT"),
    "layer-scale": (
        lambda: timm_vit().state_dict() | {"blocks.0.ls1.gamma": torch.ones(3)},
        r"'blocks.0.ls1.gamma' of shape \(3,\) does not scale",
    ),
    "scale-of-nothing": (
        lambda: timm_vit().state_dict() | {"blocks.7.ls1.gamma": torch.ones(48)},
        r"'blocks.7.ls1.gamma' has no place",
    ),
    "norm-after-pooling": (
        lambda: timm_vit(class_token=False, global_pool="avg"),
        r"norm is a Identity; only plain timm ViTs",
    ),
    "norm-after-pooling-state": (
        lambda: timm_vit(class_token=False, global_pool="avg").state_dict(),
        r"'fc_norm.weight' has no place",
    ),
    "pooling": (lambda: timm_vit(global_pool="avg", fc_norm=False), r"global_pool='avg' with class_token=True"),
    "qk-norm": (lambda: timm_vit(qk_norm=True, scale_attn_norm=True), r"'blocks.0.attn.norm.weight' has no place"),
    "rms-norm": (lambda: timm_vit(norm_layer=torch.nn.RMSNorm), r"norm is a RMSNorm"),
    "activation": (lambda: timm_vit(act_layer="quick_gelu"), r"activation is"),
    "biases": (lambda: timm_vit(proj_bias=False), r"'blocks.0.attn.proj.bias' is missing"),
    "pre-norm": (lambda: timm_vit(pre_norm=True), r"'norm_pre.weight' has no place"),
    "resnet": (lambda: timm.create_model("resnet18"), r"first key is 'conv1.weight'"),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224"), r"the model is a SwinTransformer"),
    "swin-state": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224").state_dict(),
        r"'patch_embed.norm.weight' has no place",
    ),
    "deit-of-hf": (lambda: hf_deit(), r"'embeddings.distillation_token' shows a distilled DeiT"),
    "hf-activation": (lambda: hf_vit(hidden_act="relu"), r"hidden_act='relu'"),
    "hf-family": (lambda: hf_dinov2(), r"type 'dinov2'"),
    "hf-masked": (lambda: hf_vit("ViTForMaskedImageModeling", encoder_stride=8), r"'decoder.0.weight' has no place"),
    "not-a-model": (lambda: 3, r"expects a model, a state dict, \(state, ViTConfig\) or a path, got int"),
}


def hf_deit():
    return transformers.DeiTModel(
        transformers.DeiTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16
        )
    )


def hf_dinov2():
    return transformers.Dinov2Model(
        transformers.Dinov2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=14)
    )


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_other_architectures_are_refused(make, words):
    with pytest.raises(MixerError, match=words) as refused:
        read_weights(make())
    assert "\n" not in str(refused.value)


def test_attention_with_a_bias_is_not_written_without_it():
    attention = {"name": "attention", "heads": 4, "bias": {"name": "alibi"}}
    model = ViT(ViTConfig(dim=32, image_size=16, patch=8, layers=1, classes=3, mixers=(attention,)))
    for write in (to_timm, to_hf):
        with pytest.raises(MixerError, match="only the usual attention, .*bias.*, can be written") as refused:
            write(model)
        assert "\n" not in str(refused.value)


def test_keys_that_lack_or_do_not_fit_are_named():
    state = {k: v.clone() for k, v in timm_vit().state_dict().items()}
    options = {"heads": 3, "image_size": (24, 32)}
    for key in (
        "blocks.1.attn.qkv.weight",
        "blocks.0.attn.qkv.bias",
        "norm.bias",
        "patch_embed.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "head.bias",
    ):
        with pytest.raises(MixerError, match=f"'{key}' is missing"):
            from_timm({k: v for k, v in state.items() if k != key}, **options)
    with pytest.raises(
        MixerError,
        match=r"'blocks.0.mlp.fc2.weight' gives blocks.0.mlp.down.weight the shape \(4, 4\), "
        r"a ViT of its sizes needs \(48, 192\)",
    ):
        from_timm(state | {"blocks.0.mlp.fc2.weight": torch.ones(4, 4)}, **options)
    with pytest.raises(MixerError, match=r"'extra.weight' has no place"):
        from_timm(state | {"extra.weight": torch.ones(1)}, **options)
    with pytest.raises(MixerError, match=r"'blocks.4.norm1.weight' has no place|'blocks.2.norm1.weight' is missing"):
        from_timm(state | {"blocks.4.norm1.weight": torch.ones(48)}, **options)
    state = hf_vit().state_dict()
    with pytest.raises(MixerError, match=r"'vit.layers.1.attention.k_proj.bias' is missing"):
        from_hf(
            {k: v for k, v in state.items() if k != "vit.layers.1.attention.k_proj.bias"}, heads=4, image_size=(16, 24)
        )


def test_files(tmp_path):
    theirs = timm_vit(img_size=24, embed_dim=64, num_heads=1)
    wanted = from_timm(theirs).state
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    torch.save({"model": theirs.state_dict()}, tmp_path / "official.pth")
    torch.save({"state_dict": theirs.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")
    from safetensors.torch import save_file

    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    for name in ("bare.pth", "official.pth", "checkpoint.pt", "model.safetensors"):
        found = read_weights(tmp_path / name)
        assert same_bits(found.state, wanted)
        assert found.where == str(tmp_path / name)
    for name in ("bare.pth", "model.safetensors"):
        (tmp_path / f"cut-{name}").write_bytes((tmp_path / name).read_bytes()[:-5000])
    torch.save(theirs, tmp_path / "whole_model.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "weights.txt").write_text("no")
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "resnet.pth")
    broken = {
        "cut-bare.pth": "is truncated",
        "cut-model.safetensors": "is truncated",
        "whole_model.pth": "holds more than tensors",
        "list.pth": "holds no state dict",
        "weights.txt": "weights are read from",
        "resnet.pth": "first key is 'conv1.weight'",
        "absent.pth": "no such file",
    }
    for name, words in broken.items():
        with pytest.raises(MixerError, match=words) as refused:
            read_weights(tmp_path / name)
        assert str(tmp_path / name) in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["new.pth", "old.pth", "model.safetensors"])
def test_damaged_files_are_refused_in_one_line(name, tmp_path):
    from safetensors.torch import save

    state, rng = timm_vit(img_size=24, embed_dim=64, num_heads=1, depth=1).state_dict(), random.Random(0)
    path = tmp_path / name
    if name.endswith("pth"):
        torch.save(state, path, _use_new_zipfile_serialization=name == "new.pth")
    whole = path.read_bytes() if path.exists() else save(state)
    said = []
    for i in range(40):
        cut = rng.randrange(len(whole))
        changed = bytearray(whole)
        for _ in range(30):
            changed[rng.randrange(2000)] = rng.randrange(256)
        path.write_bytes(
            (whole[:cut], bytes(changed), rng.randbytes(cut % 3000), whole[:cut] + whole[cut + 300 :])[i % 4]
        )
        try:
            read_weights(path)
        except MixerError as why:
            said.append(str(why))
    assert len(said) > 20
    assert all(str(path) in line and "\n" not in line for line in said)


@pytest.mark.parametrize(("module", "extra"), [("timm", "vision"), ("safetensors", "train")])
def test_what_is_not_installed_is_named(module, extra, monkeypatch, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MixerError, match=rf"needs {module}: pip install 'tokenmix\[{extra}\]'"):
        read_weights("timm:deit_tiny_patch16_224" if module == "timm" else tmp_path / "a.safetensors")


def test_reading_needs_torch_only():
    blocked = ["numpy", "timm", "transformers", "safetensors", "torchvision", "PIL"]
    code = f"""
import sys
sys.modules.update({{name: None for name in {blocked}}})
from tokenmix.hosts import convert_vit, read_weights, to_timm
from tokenmix.models import build_model
model = build_model("deit_tiny", layers=1, image_size=(32, 32))
assert read_weights(to_timm(model)).config == model.config
assert convert_vit(model, {{"name": "hydra"}})[1].share == 1
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_folders(tmp_path):
    with pytest.raises(MixerError, match=r"config.json is missing"):
        read_weights(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MixerError, match="not readable JSON"):
        read_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(MixerError, match="neither model.safetensors nor pytorch_model.bin"):
        read_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model": {"kind": "lm"}}))
    with pytest.raises(MixerError, match="a model of kind 'lm'"):
        read_weights(tmp_path)


def test_run_directory(tmp_path):
    from tokenmix.system.checkpoint import save_checkpoint

    model = ours()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"model": model.config.to_json(), "data": {}}))
    for step, scale in ((10, 2.0), (20, 1.0)):
        save_checkpoint(
            tmp_path / "checkpoints", step, {"model": {k: v * scale for k, v in model.state_dict().items()}}, {}
        )
    found = read_weights(tmp_path)
    assert found.config == model.config
    assert same_bits(found.state, model.state_dict()), "the latest checkpoint"
    assert found.where.endswith("(step 20)")


def test_timm_by_name(monkeypatch):
    with pytest.raises(MixerError, match=r"timm:deit_tinny: timm .* has no such model"):
        read_weights("timm:deit_tinny")
    asked = []

    def create(name, pretrained):
        asked.append((name, pretrained))
        return timm_vit()

    monkeypatch.setattr(timm, "create_model", create)
    assert read_weights("timm:deit_tiny_patch16_224.fb_in1k").where == "timm:deit_tiny_patch16_224.fb_in1k"
    assert asked == [("deit_tiny_patch16_224.fb_in1k", True)]


def test_only_softmax_has_a_way_back():
    for spec, words in (
        ({"name": "hydra"}, "layer 0 is hydra"),
        ({**ATTENTION, "kv_heads": 2}, "kv_heads"),
        ({**ATTENTION, "out_bias": False}, "out_bias"),
    ):
        model = ours(mixers=(spec,))
        for way in (to_timm, to_hf):
            with pytest.raises(MixerError, match=words):
                way(model)
    with pytest.raises(MixerError, match="in their ViTs all layers are alike"):
        to_timm(ours(mixers=(ATTENTION, {**ATTENTION, "heads": 2})))
    normed = ours(mixers=({**ATTENTION, "qk_norm": "layer"},))
    with pytest.raises(MixerError, match="does not normalise queries and keys"):
        to_hf(normed)
    for spec in ({"qk_norm": "rms"}, {"qk_norm": "layer", "norm_eps": 1e-3}):
        with pytest.raises(
            MixerError, match="norms of queries and keys are LayerNorms with the eps of the others, 1e-06"
        ):
            to_timm(ours(mixers=({**ATTENTION, **spec},)))
    with pytest.raises(MixerError, match="in their ViTs all layers are alike"):
        to_timm(ours(mixers=({**ATTENTION, "qk_norm": "layer"}, ATTENTION)))
    for options, words in (
        ({"registers": 1}, "registers"),
        ({"pool": "mean"}, "no class token"),
        ({"positions": None}, "no positions"),
    ):
        with pytest.raises(MixerError, match=words):
            to_hf(ours(**options))
    with pytest.raises(MixerError, match="sinusoidal"):
        to_timm(ours(positions="sinusoidal"))
    with pytest.raises(MixerError, match="no_embed_class"):
        to_timm(ours(), no_embed_class=True)
