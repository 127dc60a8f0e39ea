"""Mixers as the attn_layer of timm's own Vision Transformers, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import timm
import torch

from timm_models import GRID, SMALL, SPECS, TOKENS, images, small
from tokenmix import MixerError
from tokenmix.hosts.timm import attention_class


@pytest.mark.parametrize("spec", SPECS)
def test_attn_layer_of_timms_own_models(spec):
    options = {k: v for k, v in SPECS[spec].items() if k != "name"}
    torch.manual_seed(0)
    prefix = int(spec != "pooling")  # which has no place for tokens outside of the grid
    cls = attention_class(spec, grid=GRID, prefix=prefix, **options)
    shell = {} if prefix else {"class_token": False, "global_pool": "avg"}
    model = timm.create_model("deit_tiny_patch16_224", **SMALL, **shell, attn_layer=cls)
    x = torch.randn(2, prefix + TOKENS, 16)
    attention = model.blocks[0].attn
    place = {"grid": GRID, "prefix": prefix} if attention.on_grid else {}
    torch.testing.assert_close(attention(x), attention.mixer(x, **place))
    model(images()).sum().backward()
    assert model(images()).shape == (2, 5)


def test_timms_options_reach_the_mixer():
    model = timm.create_model(
        "deit_tiny_patch16_224", **SMALL, qkv_bias=False, proj_bias=False, attn_layer=attention_class("linear")
    )
    mixer = model.blocks[0].attn.mixer
    assert (mixer.heads, mixer.q_proj.bias, mixer.out_proj.bias) == (2, None, None)
    assert abs(float(mixer.q_proj.weight.detach().std()) - 0.02) < 0.005
    dtype = (
        timm.create_model("deit_tiny_patch16_224", **SMALL, attn_layer=attention_class("linear"), dtype=torch.bfloat16)
        .blocks[0]
        .attn.mixer.q_proj.weight
    )
    assert dtype.dtype == torch.bfloat16


def test_what_is_no_projection_begins_as_the_mixer_says():
    """timm draws every linear layer anew; those inside of a mixer are the mixer's own matter."""
    classes = (
        attention_class("longformer", window=4, global_tokens=1),
        attention_class("axial", grid=GRID, heads=2, width=None),
    )
    longformer, axial = (
        timm.create_model("deit_tiny_patch16_224", **SMALL, attn_layer=c).blocks[0].attn.mixer for c in classes
    )
    for twin, source in ((longformer.q_global, longformer.q_proj), (longformer.v_global, longformer.v_proj)):
        torch.testing.assert_close(twin.weight, source.weight, rtol=0, atol=0)
    assert float(axial.stage_2.bias.detach().abs().max()) > 0.0


def test_masks():
    x, keep = torch.randn(2, 5, 16), torch.rand(2, 5) < 0.6
    keep[:, 0] = True
    hydra, softmax = (attention_class(n)(16, 2) for n in ("hydra", "attention"))
    for host in (hydra, softmax):
        torch.testing.assert_close(host(x, attn_mask=keep[:, None, None]), host.mixer(x, key_mask=keep))
    pairs = torch.rand(2, 5, 5) < 0.6
    for mask in (pairs, pairs[:, None], torch.zeros(2, 5, 5).masked_fill(~pairs, float("-inf"))):
        torch.testing.assert_close(softmax(x, attn_mask=mask), softmax.mixer(x, attn_mask=pairs))
    with pytest.raises(MixerError, match="does not weight pairs"):
        hydra(x, attn_mask=pairs)
    with pytest.raises(MixerError, match="0 and -inf"):
        softmax(x, attn_mask=torch.rand(5, 5))
    with pytest.raises(MixerError, match=r"attention_class\('hydra', causal=True\)"):
        hydra(x, is_causal=True)
    causal = attention_class("hydra", causal=True)(16, 2)
    torch.testing.assert_close(causal(x, is_causal=True)[:, :3], causal(x[:, :3], is_causal=True))


REFUSED = {
    "unknown": (("hidra",), {}, "no mixer is called 'hidra'; nearest: hydra"),
    "bound": (("aft_full",), {}, r"'aft_full'\) needs grid=\(rows, columns\).*or max_len"),
    "grid": (("aft_conv",), {"heads": 2, "kernel_size": 3}, r"'aft_conv'\) needs grid.*or ndim"),
    "no grid": (("hydra",), {"grid": 14}, r"expects grid=\(rows, columns\).*got 14"),
    "prefix": (("hydra",), {"prefix": -1}, "prefix as the number of tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_classes_refused(case):
    args, options, why = REFUSED[case]
    with pytest.raises(MixerError, match=why):
        attention_class(*args, **options)


def test_models_refused():
    with pytest.raises(MixerError, match="has no qk_norm"):
        small("hydra", qk_norm=True)
    with pytest.raises(MixerError, match="1 to depth=2 specs, got 3"):
        small([SPECS["hydra"]] * 3)
    with pytest.raises(MixerError, match="an object with a name"):
        small([["hydra"]])
    other = timm.create_model("deit_tiny_patch16_224", **SMALL, attn_layer=attention_class("hydra", grid=(14, 14)))
    with pytest.raises(MixerError, match="hydra was made for 1 \\+ 14 x 14 tokens, got 13"):
        other(images())
    with pytest.raises(MixerError, match="needs the number of tokens"):
        torch.jit.script(attention_class("hydra")(16, 2))
    with pytest.raises(torch.jit.Error, match="scripted mixer takes no attn_mask"):
        torch.jit.script(small("hydra"))(images(), is_causal=True)


@pytest.mark.parametrize(
    ("broken", "why"),
    [("sys.modules['timm'] = None", "needs timm, which could not be imported"), (None, "needs timm >= 1.0.27, found")],
)
def test_timm_missing_or_old(broken, why):
    old = "import timm.models.vision_transformer as v\nclass Old: pass\nv.VisionTransformer = Old"
    code = "import sys\nfrom tokenmix.system.torchvision import ensure_torchvision\nensure_torchvision()\n"
    code += f"{broken or old}\nimport tokenmix.hosts.timm"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert why in last, done.stderr
    assert "pip install" in last
    assert "tokenmix[vision]" in last
