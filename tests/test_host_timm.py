"""The papers' models through timm.create_model. Everything timm does is done by timm itself here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_feature_extractor, load_checkpoint
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2, param_groups_layer_decay

from timm_models import GRID, SMALL, SPECS, TOKENS, images, noisy, ours, small
from tokenmix import MixerError
from tokenmix.hosts.timm import MODEL_NAMES, PYRAMID_NAMES, MixerAttention, checkpoint_filter
from tokenmix.models import MODELS, PyramidConfig, ViTConfig, build_model


@pytest.mark.parametrize("spec", SPECS)
def test_the_model_is_our_vit_in_timms_shell(spec):
    """One of our ViT's weights through the checkpoint filter: the same outputs."""
    mean = spec in ("aft_conv", "pooling")
    shell = {"pool": "mean", "positions": None} if mean else {"registers": 2}
    theirs = (
        {"global_pool": "avg", "class_token": False, "pos_embed": "none", "fc_norm": False}
        if mean
        else {"reg_tokens": 2}
    )
    source, model = ours(mixers=(SPECS[spec],), **shell), small(spec, **theirs)
    model.load_state_dict(checkpoint_filter(source.state_dict(), model))
    x = images()
    torch.testing.assert_close(model(x), source(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.forward_features(x), source.forward_features(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_registered_models_have_the_papers_shapes(name):
    with torch.device("meta"):
        model, source = timm.create_model(name), build_model(MODEL_NAMES[name])
    registers = source.config.registers * source.config.dim  # timm's have positions
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in source.parameters()) + registers
    assert [type(b.attn.mixer) for b in model.blocks] == [type(b.mixer) for b in source.blocks]
    cfg = model.pretrained_cfg
    assert cfg["input_size"] == (3, *source.config.image_size)
    assert (cfg["first_conv"], cfg["classifier"], cfg["architecture"]) == ("patch_embed.proj", "head", name)
    assert timm.is_model(name)
    assert name in timm.list_models("deit_*", module="vision_transformer")


def test_every_vit_and_pyramid_of_ours_is_registered_and_none_of_timms_is_lost():
    assert {*MODEL_NAMES.values(), *PYRAMID_NAMES.values()} == {
        n for n, config in MODELS.items() if isinstance(config, (ViTConfig, PyramidConfig))
    }
    assert type(timm.create_model("deit_tiny_patch16_224", depth=1)) is VisionTransformer
    code = "import warnings; warnings.simplefilter('error', UserWarning); "
    code += "from tokenmix.system.torchvision import ensure_torchvision; ensure_torchvision(); "
    code += "import timm; before = set(timm.list_models()); import tokenmix.hosts.timm as h; "
    code += "assert set(timm.list_models()) - before == {*h.MODEL_NAMES, *h.PYRAMID_NAMES}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_layer_in_two_differs():
    model = small([SPECS["attention"], SPECS["hydra"]], depth=4)
    assert [b.attn.spec["name"] for b in model.blocks] == ["attention", "hydra"] * 2


@pytest.mark.parametrize("spec", ["hydra", "aft_conv", "aft_full"])
def test_features(spec):
    model, x = small(spec, depth=3), images()
    state = model.state_dict()
    features = timm.create_model(
        "deit_tiny_mixer_patch16_224",
        mixers=SPECS[spec],
        **{**SMALL, "depth": 3},
        features_only=True,
        out_indices=(0, 2),
    )
    features.model.load_state_dict({n: t for n, t in state.items() if n in features.model.state_dict()})
    assert features.feature_info.channels() == [16, 16]
    assert features.feature_info.reduction() == [4, 4]
    maps = features.eval()(x)
    final, middle = model.forward_intermediates(x, indices=[0, 2])
    for one, other in zip(maps, middle, strict=True):
        assert one.shape == (2, 16, *GRID)
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(model.forward_head(final), model(x))
    patches = model.norm(torch.cat([final.new_zeros(2, 0, 16), middle[-1].flatten(2).transpose(1, 2)], 1))
    torch.testing.assert_close(patches, final[:, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["hydra", "aft_conv", "aft_full"])
def test_fx_and_torchscript(spec, tmp_path):
    """Check that fx takes a mixer as one node, and TorchScript holds it as a trace for this number of tokens.

    TorchScript's file needs torch only.
    """
    model, x = small(spec), images()
    nodes = create_feature_extractor(model, {"blocks.0.attn": "mixed", "head": "logits"})(x)
    torch.testing.assert_close(nodes["logits"], model(x))
    assert nodes["mixed"].shape == (2, 1 + TOKENS, 16)
    scripted = torch.jit.script(model)
    more = images(5)
    torch.testing.assert_close(scripted(more), model(more), rtol=1e-5, atol=1e-6)
    torch.jit.save(scripted, tmp_path / "model.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(x), model(x), rtol=1e-5, atol=1e-6)
    assert isinstance(model.blocks[0].attn, MixerAttention), "scripting leaves the model as it was"


def test_scripting_frees_no_module_while_it_prepares_the_model(monkeypatch):
    """Modules that TorchScript has prepared keep their ids: it would take a block's mixer for another's otherwise."""
    import torch.jit._script as torchscript

    prepare, prepared, freed = torchscript.call_prepare_scriptable_func_impl, [], []

    def recorded(module, memo):
        if isinstance(module, torch.nn.Module):
            prepared.append(weakref.ref(module))
        done = prepare(module, memo)
        freed.extend(ref for ref in prepared if ref() is None)
        return done

    monkeypatch.setattr(torchscript, "call_prepare_scriptable_func_impl", recorded)
    torch.jit.script(small("aft_conv", depth=4))
    assert len(prepared) > 20
    assert not freed


def test_a_training_step_with_timms_loss_and_optimiser():
    torch.manual_seed(0)
    model = small("aft_full", drop_path_rate=0.1).train()
    model.set_grad_checkpointing()
    optimiser = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05, layer_decay=0.7)
    x, target, loss = images(4), torch.rand(4, 5).softmax(-1), SoftTargetCrossEntropy()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    values = []
    for _ in range(12):
        optimiser.zero_grad()
        value = loss(model(x), target)
        value.backward()
        optimiser.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0]
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []


def test_grad_checkpointing_changes_nothing():
    model, x, grads = small("aft_conv").train(), images(), []
    for on in (False, True):
        model.set_grad_checkpointing(on)
        model.zero_grad()
        model(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_layer_decay_groups():
    model = small("aft_full", depth=3)
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()
    )
    scale = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    assert len(scale) == len(list(model.parameters()))
    by_name = {n: scale[id(p)] for n, p in model.named_parameters()}
    assert by_name["blocks.0.attn.mixer.q_proj.weight"] == by_name["blocks.0.mlp.fc1.weight"]
    assert by_name["blocks.0.attn.mixer.q_proj.weight"] * 2 == by_name["blocks.1.attn.mixer.q_proj.weight"]
    assert by_name["head.weight"] == 1.0
    decays = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    mixer = model.blocks[0].attn.mixer
    assert [decays[id(p)] for p in (model.pos_embed, *mixer.bias.parameters())] == [0.0, 0.0, 0.0]
    assert decays[id(mixer.q_proj.weight)] == 0.05


def test_heads_are_changed_and_taken_off():
    model, x = small(), images()
    assert (model.num_features, model.get_classifier()) == (16, model.head)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    model.reset_classifier(0, "avg")
    assert model(x).shape == (2, 16)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, 16)
    assert "pos_embed" in model.no_weight_decay()
    assert small(in_chans=1)(torch.randn(1, 1, 16, 12)).shape == (1, 5)


@pytest.mark.parametrize("spec", ["aft_full", "aft_conv", "hydra"])
def test_another_image_size(spec):
    """set_input_size is our ViT's resize: positions as timm resamples them, the mixers as we do."""
    model, source = small(spec, pos_embed="none"), ours(mixers=(SPECS[spec],), positions=None)
    model.load_state_dict(checkpoint_filter(source.state_dict(), model))
    model.set_input_size((20, 24))
    x = images(size=(20, 24))
    torch.testing.assert_close(model(x), source.resize((20, 24))(x), rtol=1e-5, atol=1e-5)
    assert torch.jit.script(model)(x).shape == (2, 5)


def test_a_frozen_model_stays_frozen_at_another_size():
    for name, given in (
        ("deit_tiny_aft_full_patch16_224", {"depth": 2}),
        ("pvt_tiny", {"mixers": {"name": "aft_full", "rank": 2}}),
    ):
        model = timm.create_model(name, img_size=64, **given).requires_grad_(False)
        model.set_input_size(96)
        assert not [n for n, p in model.named_parameters() if p.requires_grad]


def test_what_cannot_follow_is_refused_and_left_alone():
    model, x = small("synthesizer_random"), images()
    before = model(x)
    with pytest.raises(MixerError, match="SynthesizerRandom has parameters per position that cannot be resized"):
        model.set_input_size((20, 24))
    torch.testing.assert_close(model(x), before)


def test_any_size_where_nothing_depends_on_it():
    model = small("hydra", dynamic_img_size=True)
    assert model(images(size=(24, 32))).shape == (2, 5)
    assert small("hydra", patch_drop_rate=0.5).train()(images()).shape == (2, 5)
    for options in ({"dynamic_img_size": True}, {"patch_drop_rate": 0.5}):
        with pytest.raises(MixerError, match=r"'aft_full'\) needs grid"):
            small("aft_full", **options)


def test_saved_and_loaded(tmp_path):
    model, x = small("aft_full"), images()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "a.pth")
    again = small("aft_full")
    load_checkpoint(again, str(tmp_path / "a.pth"))
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    overlay = {"file": str(tmp_path / "a.pth")}
    options = {**SMALL, "mixers": SPECS["aft_full"]}
    third = timm.create_model(
        "deit_tiny_mixer_patch16_224", pretrained=True, pretrained_cfg_overlay=overlay | {"num_classes": 5}, **options
    ).eval()
    torch.testing.assert_close(third(x), model(x), rtol=0, atol=0)
    with io.BytesIO() as file:
        torch.save(model, file)  # a class made by a function is pickled by how it was made
        file.seek(0)
        torch.testing.assert_close(torch.load(file, weights_only=False)(x), model(x), rtol=0, atol=0)


def test_a_folder_of_timms_own_kind(tmp_path):
    from timm.models import save_for_hf

    model, x = small("hydra"), images()
    save_for_hf(model, str(tmp_path))
    kept = "model_args" in json.loads((tmp_path / "config.json").read_text())  # which timm before 1.0.31 forgets
    given = {} if kept else {**SMALL, "mixers": SPECS["hydra"]}
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **given).eval()
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


def test_softmax_weights_of_timm_fit_softmax_blocks_only():
    theirs = noisy(timm.create_model("deit_tiny_patch16_224", **SMALL).eval())
    model, x = small("attention"), images()
    model.load_state_dict(checkpoint_filter(theirs.state_dict(), model))
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(MixerError, match="layer 0 of the model is hydra; `tokenmix convert`"):
        checkpoint_filter(theirs.state_dict(), small("hydra"))


def test_compiled_whole():
    model, x = small("aft_full"), images()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_the_shell_is_chosen_by_name():
    """What a config of ours says reaches timm: pooling, registers, eps, patches."""
    model = timm.create_model("deit_tiny_aft_conv_k11_h32_patch16_224", depth=1)
    assert (model.global_pool, model.cls_token, model.pos_embed, model.norm.eps) == ("avg", None, None, 1e-6)
    assert model.blocks[0].attn.mixer.kernel_size == 11
    config = replace(MODELS["deit_tiny_registers"], layers=1)
    model = timm.create_model("deit_tiny_mixer_reg4_patch16_224", depth=1)
    assert model.num_reg_tokens == config.registers


@pytest.mark.parametrize("spec", ["performer", "aft_full"])
def test_built_on_the_meta_device(spec):
    model = timm.create_model("deit_tiny_mixer_patch16_224", mixers=SPECS[spec], **SMALL, device="meta").to_empty(
        device="cpu"
    )
    for p in (*model.parameters(), *model.buffers()):
        p.data.fill_(float("nan") if p.is_floating_point() else 0)
    model.init_weights()
    model.patch_embed.proj.reset_parameters()  # which timm leaves to its own constructor
    assert model.eval()(images()).isfinite().all()


@pytest.mark.parametrize("grad", [True, False])
def test_a_lambda_layer_is_scripted(grad):
    """Its trace is the same with gradients and without."""
    model, x = small("lambda", depth=1), images()
    with torch.set_grad_enabled(grad):
        scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x), rtol=1e-4, atol=1e-5)
    scripted(x).sum().backward()
    assert model.patch_embed.proj.weight.grad is not None
