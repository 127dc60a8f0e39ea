"""What the suites of transformers, timm and torch ask of our models, at weights large enough to show a wrong state."""

from __future__ import annotations

from typing import Any

from . import attempt
from .hosts import _small, _tried


@attempt("u1", "cache.crop after a gap in the positions")
def crop_after_a_gap() -> str:
    """Silently wrong logits."""
    import torch
    from transformers import DynamicCache

    model = _small("TokenMixForCausalLM", mixers=[{"name": "attention", "positions": {"name": "rotary"}}])
    x, at = torch.arange(3, 13)[None], torch.tensor([[0, 1, 2, 3, 4, 5, 6, 20, 21, 22]])
    with torch.no_grad():
        want = model(x, position_ids=at, use_cache=False).logits[:, 7:]
        cache: Any = DynamicCache(config=model.config)
        model(x[:, :7], position_ids=at[:, :7], cache=cache)
        cache.activate_past_recording()
        model(x[:, 7:], position_ids=at[:, 7:], cache=cache)
        cache.crop(-3)
        got = model(x[:, 7:], position_ids=at[:, 7:], cache=cache).logits
    return f"the same logits: {torch.allclose(got, want, atol=1e-4)}"


@attempt("u2", "A prompt that ends in the pad id")
def prompt_ends_in_padding() -> str:
    """generate() stopped with a message about positions that nobody gave."""
    import torch

    def run() -> str:
        model, x = (
            _small("TokenMixForCausalLM", mixers=[{"name": "local", "window": 4}]),
            torch.arange(3, 17).view(2, 7),
        )
        x[1, -1] = 0
        both = model.generate(x, max_new_tokens=4, do_sample=False)
        alone = model.generate(x[1:], max_new_tokens=4, do_sample=False)
        return f"written as the row alone: {torch.equal(both[1:], alone)}"

    return _tried(run)


@attempt("u3", "torch.jit.script of a ViT of Lambda layers, with gradients on")
def script_lambda() -> str:
    """Its trace branched on the gradient mode."""
    import tokenmix.hosts.timm  # noqa: F401, I001  # registers its models
    import timm
    import torch

    model = timm.create_model("deit_tiny_lambda_patch16_224", depth=1, img_size=64).eval()
    return _tried(lambda: f"scripted: {torch.jit.script(model) is not None}")


@attempt("u4", "timm.create_model('pvt_tiny', num_classes=0, global_pool='')")
def unpooled_pyramid() -> str:
    """Refused."""
    import tokenmix.hosts.timm  # noqa: F401, I001  # registers its models
    import timm
    import torch

    return _tried(
        lambda: tuple(
            timm.create_model("pvt_tiny", num_classes=0, global_pool="", img_size=64)(torch.randn(1, 3, 64, 64)).shape
        )
    )


@attempt("u5", "torch.jit.script of a MultiheadMixer, and its in_proj_bias without biases")
def scripted_multihead() -> str:
    """A bare error of TorchScript, and an object in place of None."""
    import torch

    from tokenmix.hosts import MultiheadMixer

    said = _tried(lambda: torch.jit.script(MultiheadMixer(8, 2)))
    return f"{said}; in_proj_bias is None: {MultiheadMixer(8, 2, bias=False).in_proj_bias is None}"


@attempt("u6", "A converted BERT: save_pretrained, then AutoModel.from_pretrained")
def auto_model_of_a_converted_folder() -> str:
    """It was loaded with random attention."""
    import torch

    from tokenmix.hosts import huggingface, replace_mixers

    huggingface.register()
    from transformers import AutoModel, BertConfig, BertModel

    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, _ = replace_mixers(BertModel(BertConfig(**sizes, intermediate_size=16)).eval(), "hydra")
    model.save_pretrained("folder")
    x = torch.arange(1, 7)[None]

    def run() -> str:
        found = AutoModel.from_pretrained("folder")
        return f"the same output: {torch.equal(found(x)[0], model(x)[0])}"

    return _tried(run)


@attempt("u7", "Converting a host with dynamic rotary angles")
def dynamic_angles() -> str:
    """Refused, without a way out."""
    from tokenmix.hosts import rotary_spec

    return _tried(lambda: rotary_spec({"rope_type": "dynamic", "factor": 2.0}, head_dim=8))
