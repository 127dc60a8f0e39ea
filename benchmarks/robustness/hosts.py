"""What users of torch.nn, timm and transformers do with the models they know, done with ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from . import attempt


def _tried(what: Callable[[], Any]) -> str:
    """What it returns, or the first line of what it raises."""
    warnings.simplefilter("ignore")
    try:
        return str(what())
    except Exception as why:  # a user sees this line
        said = (str(why).strip() or "nothing").splitlines()[0]
        return f"{type(why).__name__}: {said}"


@attempt("h2", "A frozen DeiT with AFT-full at another image size")
def frozen_resize() -> str:
    """Its pair biases became trainable."""
    import tokenmix.hosts.timm  # noqa: F401, I001  # registers its models, and sees to a torchvision that fits
    import timm

    model = timm.create_model("deit_tiny_aft_full_patch16_224", depth=2).requires_grad_(False)
    model.set_input_size(256)
    return f"{sum(p.requires_grad for p in model.parameters())} parameters to train"


def _small(kind: str, **options: Any) -> Any:
    """A tiny model of transformers' kind with mixers of ours."""
    import torch

    from tokenmix.hosts import huggingface

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    sizes |= {
        "initializer_range": 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "image_size": 16,
        "patch_size": 4,
        "mixers": [{"name": "aft_simple"}],
    }
    return getattr(huggingface, kind)(huggingface.TokenMixConfig(**{**sizes, **options})).eval()


@attempt("h5", "AutoModel on a folder of an image model")
def folder_of_another_kind() -> str:
    """transformers reports that all weights are missing, and goes on with random ones."""
    model = _small("TokenMixForImageClassification")
    from transformers import AutoModel

    model.save_pretrained("folder")
    return _tried(lambda: f"loads a {type(AutoModel.from_pretrained('folder')).__name__} of random weights")


@attempt("h5", "A folder that lacks the weights of one layer")
def folder_that_lacks_weights() -> str:
    """The same."""
    from safetensors.torch import load_file, save_file

    model = _small("TokenMixForCausalLM")
    model.save_pretrained("folder")
    kept = {name: tensor for name, tensor in load_file("folder/model.safetensors").items() if ".layers.1." not in name}
    save_file(kept, "folder/model.safetensors", metadata={"format": "pt"})
    return _tried(
        lambda: f"loads a {type(type(model).from_pretrained('folder')).__name__} with a layer of random weights"
    )


@attempt("h3", "Hidden states of an encoder and decoder for transformers")
def seq2seq_hidden_states() -> str:
    """The encoder's were left out."""
    import torch

    x = torch.arange(1, 7)[None]
    out = _small("TokenMixForSeq2SeqLM", decoder_start_token_id=1)(x, decoder_input_ids=x, output_hidden_states=True)
    return ", ".join(
        f"{side}: {len(out[name]) if out.get(name) else None}"
        for side in ("encoder", "decoder")
        for name in [f"{side}_hidden_states"]
    )


def _written(**options: Any) -> str:
    """Whether a hybrid model writes with these options of generate() what it writes without."""
    import torch

    model, x = (
        _small("TokenMixForCausalLM", mixers=[{"name": "hydra"}, {"name": "aft_local", "window": 4}]),
        torch.arange(1, 8)[None],
    )
    steps = {"max_new_tokens": 20, "do_sample": False}
    wanted = model.generate(x, **steps)
    return _tried(lambda: f"the same text: {torch.equal(model.generate(x, **steps, **options), wanted)}")


@attempt("h6", "Prompt look-up with mixers that keep a sum")
def prompt_lookup() -> str:
    """Refused, though a state is a value and the one before is still there."""
    return _written(prompt_lookup_num_tokens=3)


@attempt("h6", "A static cache for mixers that keep a state")
def static_cache() -> str:
    """A bare KeyError."""
    return _written(cache_implementation="static")


@attempt("h6", "register_for_auto_class, then save_pretrained")
def auto_class() -> str:
    """transformers looked for files that are not there."""

    def save() -> str:
        model = _small("TokenMixForCausalLM")
        type(model).register_for_auto_class("AutoModelForCausalLM")
        model.save_pretrained("folder")
        return "saved"

    return _tried(save)


@attempt("h6", "A head for question answering")
def question_answering() -> str:
    """There was none."""
    import torch

    return _tried(lambda: tuple(_small("TokenMixForQuestionAnswering")(torch.arange(1, 7)[None]).start_logits.shape))


@attempt("h6", "Flash attention asked of a folder of ours")
def flash() -> str:
    """transformers advised to ask for it on the model's page."""
    model = _small("TokenMixForCausalLM", mixers=[{"name": "attention"}])
    model.save_pretrained("folder")
    return _tried(lambda: type(type(model).from_pretrained("folder", attn_implementation="flex_attention")).__name__)


def _beside_torch() -> tuple[Any, Any]:
    """Softmax attention of ours and of torch."""
    import torch

    from tokenmix.hosts import MultiheadMixer

    torch.manual_seed(0)
    return MultiheadMixer(16, 2, batch_first=True).eval(), torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()


@attempt("h7", "Weights of nn.MultiheadAttention by load_state_dict")
def torchs_weights() -> str:
    """Only from_torch took them."""
    import torch

    (ours, theirs), x = _beside_torch(), torch.randn(2, 5, 16)

    def load() -> str:
        ours.load_state_dict(theirs.state_dict())
        return f"loaded, off by less than 1e-6: {bool((ours(x, x, x)[0] - theirs(x, x, x)[0]).abs().max() < 1e-6)}"

    return _tried(load)


@attempt("h7", "Key and value as equal views of one tensor")
def equal_views() -> str:
    """They were two tensors."""
    import torch

    (ours, _), x = _beside_torch(), torch.randn(5, 2, 16)
    return _tried(lambda: tuple(ours(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].shape))


@attempt("h6", "torch.jit.trace of softmax attention")
def traced() -> str:
    """torch's own function did not take the flag that a trace makes of a comparison."""
    import torch

    class OfOne(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = _beside_torch()[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mixer(x, x, x, need_weights=False)[0]

    return _tried(lambda: tuple(torch.jit.trace(OfOne(), (torch.randn(2, 5, 16),))(torch.randn(3, 9, 16)).shape))
