"""Pictures of other shapes with as many patches, modules of familiar names, and installations that half work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from . import attempt


def _said(what: Callable[[], Any]) -> str:
    """What it returns, or the first line of what it raises."""
    warnings.simplefilter("ignore")
    try:
        return str(what())
    except Exception as why:  # a user sees this line
        return f"{type(why).__name__}: {(str(why).strip() or 'nothing').splitlines()[0][:160]}"


def _mixed_as(model: Any, images: Any) -> str:
    """The grids that the model's mixers get."""
    seen: list[str] = []
    for module in model.modules():
        if type(module).__name__ == "AFTConv":
            module.register_forward_pre_hook(lambda m, args, kw: seen.append(str(kw["grid"])), with_kwargs=True)
    model(images)
    return f"mixed as {', '.join(dict.fromkeys(seen))}"


@attempt("g1", "A 16:9 picture of 9 x 16 patches in DINOv2 built for 8 x 8")
def wide_picture() -> str:
    """It was mixed as 12 x 12."""
    import tokenmix.hosts.torchvision  # noqa: F401, I001  # sees to a torchvision that fits
    import torch
    import transformers

    from tokenmix.hosts import replace_mixers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 112, "patch_size": 14}
    host = transformers.Dinov2Model(transformers.Dinov2Config(**sizes))
    model, _ = replace_mixers(host, {"name": "aft_conv", "kernel_size": 3}, seed=0)
    return _said(lambda: _mixed_as(model.eval(), torch.randn(1, 3, 126, 224)))


@attempt("g2", "A picture of 2 x 8 patches in timm's ViT of 4 x 4 with dynamic_img_size")
def dynamic_size() -> str:
    """It was mixed as 4 x 4."""
    from tokenmix.hosts.timm import attention_class  # noqa: I001  # sees to a torchvision that fits
    import timm
    import torch

    layer = attention_class("aft_conv", grid=(4, 4), heads=4, kernel_size=3)
    options = {"depth": 1, "img_size": 64, "dynamic_img_size": True}
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=layer, **options).eval()
    return _said(lambda: _mixed_as(model, torch.randn(1, 3, 32, 128)))


@attempt("g3", "Half of a ViT's 8 x 8 patches dropped in training, and AFT-conv in its blocks")
def dropped_patches() -> str:
    """32 patches form no square and were refused; 36 of 72 were mixed as 6 x 6."""
    import tokenmix.hosts.torchvision  # noqa: F401, I001  # sees to a torchvision that fits
    import timm
    import torch

    from tokenmix.hosts import replace_mixers

    host = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=(128, 144), patch_drop_rate=0.5)
    model, _ = replace_mixers(host, {"name": "aft_conv", "heads": 3, "kernel_size": 3}, seed=0)
    return _said(lambda: _mixed_as(model.train(), torch.randn(1, 3, 128, 144)))


@attempt("g4", "Attention of timm under a familiar name: BEiT, LeViT, VOLO, Visformer, NesT, TinyViT, EfficientFormer")
def familiar_names() -> str:
    """find_attention raised AttributeError."""
    import tokenmix.hosts.torchvision  # noqa: F401, I001  # sees to a torchvision that fits
    import timm
    import torch

    from tokenmix.hosts import replace_mixers

    names = ("beit_base_patch16_224", "levit_128s", "volo_d1_224", "visformer_tiny", "nest_tiny", "tiny_vit_5m_224")
    with torch.device("meta"):
        models = [timm.create_model(name) for name in (*names, "efficientformer_l1")]
    raised = [_said(lambda model=model: replace_mixers(model, "hydra")).split(":")[0] for model in models]
    return f"{', '.join(sorted(set(raised)))} for {len(models)} models"


@attempt("g5", "SAM of timm with Hydra in place of its windowed attention")
def segment_anything() -> str:
    """It was accepted, and failed in forward."""
    import tokenmix.hosts.torchvision  # noqa: F401, I001  # sees to a torchvision that fits
    import timm
    import torch

    from tokenmix.hosts import replace_mixers

    def call() -> str:
        model, _ = replace_mixers(timm.create_model("samvit_base_patch16_224", depth=1), "hydra")
        return f"outputs {tuple(model(torch.randn(1, 3, 224, 224)).shape)}"

    return _said(call)


@attempt("g6", "A Llama whose logits are capped at 30, by a function of its own, with attention copied")
def capped_logits() -> str:
    """It was accepted, and computed something else."""
    import tokenmix.hosts.torchvision  # noqa: F401, I001  # sees to a torchvision that fits
    import torch
    import transformers

    from tokenmix.hosts import replace_mixers

    def attend(
        module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0, **more: Any
    ) -> Any:
        logits = 30 * torch.tanh(q @ k.mT * scaling / 30)
        logits = logits if mask is None else logits + mask[..., : k.shape[-2]]
        return (logits.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("capped", attend)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    host = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=60, initializer_range=1.0)).eval()
    host.set_attn_implementation("capped")

    def call() -> str:
        model, _ = replace_mixers(host, "attention")
        tokens = torch.arange(8)[None]
        return f"accepted; logits differ by {float((model(tokens).logits - host(tokens).logits).abs().max()):.1e}"

    return _said(call)


@attempt("g7", "`tokenmix doctor` where torchvision was built for another torch, so that transformers does not import")
def doctor_and_torchvision() -> str:
    """It said that all was well."""
    import os
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "torchvision")
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
        paths = os.pathsep.join([folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
        command = [sys.executable, "-m", "tokenmix", "doctor"]
        ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    found = [line for line in ended.stdout.splitlines() if "torchvision" in line] or ended.stdout.splitlines()[-1:]
    return f"code {ended.returncode}: {found[-1][:200]}"
