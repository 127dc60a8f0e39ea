"""Passes of loops that are computed again, and operators of kernels called with what is missing or elsewhere."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

import tokenmix

from . import attempt


def _said(call: Callable[[], str]) -> str:
    try:
        return call()
    except Exception as error:  # what is raised is the answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"


def _looped(name: str, **options: object) -> str:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    plain, x = tokenmix.build_mixer(name, 16, **options).train(), torch.randn(2, 12, 16)
    again, found = copy.deepcopy(plain), []
    for call in (plain, lambda y: checkpoint(again, y, use_reentrant=False)):
        torch.manual_seed(1)
        start = y = x.clone().requires_grad_()
        for _ in range(3):
            y = y + call(y)
        y.square().sum().backward()
        found.append(start.grad)
    return f"gradients off by {float((found[0] - found[1]).abs().max() / found[0].abs().max()):.0e}"


@attempt("a1", "Routing applied three times, each in a checkpoint, before one backward pass")
def routing_loop() -> str:
    """Each pass moves the centroids, and is computed again with those of the last."""
    return _said(lambda: _looped("routing", heads=2, clusters=4, window=3, decay=0.2))


@attempt("a2", "Performer applied three times, each in a checkpoint, features drawn for each pass")
def performer_loop() -> str:
    """Each pass draws features, and is computed again with those of the last."""
    return _said(lambda: _looped("performer", heads=2, redraw_interval=1))


@attempt("a3", "AFT-simple applied twice under two backends, each in a checkpoint")
def backends_loop() -> str:
    """A pass computed again takes its own path, or torch finds other saved tensors."""

    def run() -> str:
        mixer = tokenmix.build_mixer("aft_simple", 16, causal=True).train()
        y = torch.randn(2, 12, 16, requires_grad=True)
        for name in ("eager", "auto"):
            with tokenmix.use_backend(name):
                y = checkpoint(mixer, y, use_reentrant=False)
        y.sum().backward()
        return "ok"

    return _said(run)


@attempt("a4", "The operator of AFT-local with a band of no keys")
def empty_band() -> str:
    """Its kernel writes before its buffers."""

    def run() -> str:
        q, k, v = (torch.randn(2, 6, 8) for _ in range(3))
        for _ in range(300):
            torch.ops.tokenmix.aft_band(q, k, v, torch.randn(1, 1, 6, 0), None, True, True)
        return "ran"

    return _said(run)


@attempt("a5", "An operator with one tensor on meta")
def one_on_meta() -> str:
    """Torch runs the shapes alone, whose results on the CPU are memory that nobody wrote."""

    def run() -> str:
        q, k, v = (torch.randn(2, 6, 8) for _ in range(3))
        y = torch.ops.tokenmix.hydra(q, k, v.to("meta"), None, True, True, True, 1e-5, False, False)[0]
        return f"a result on {y.device}"

    return _said(run)


@attempt("a6", "An operator without its keys")
def without_keys() -> str:
    """Torch hands None on where a schema says Tensor."""
    q = torch.randn(2, 6, 8)
    return _said(lambda: str(torch.ops.tokenmix.hydra(q, None, q, None, True, True, True, 1e-5, False, False)[0].shape))


@attempt("a7", "A trace of a ViT at 32 x 40, called with images of 30 x 39; of a ViT of AFT-conv, of 40 x 32")
def traced_images() -> str:
    """A trace holds no padding that its image did not need, and its grid as numbers."""
    from tokenmix.models import ViT, ViTConfig

    warnings.simplefilter("ignore")

    def run(mixer: dict, size: tuple[int, int]) -> str:
        torch.manual_seed(0)
        model = ViT(
            ViTConfig(dim=16, layers=1, image_size=(32, 40), patch=8, mixers=(mixer,), pool="mean", positions=None)
        ).eval()
        with torch.no_grad():
            program, x = torch.jit.trace(model, torch.randn(1, 3, 32, 40), check_trace=False), torch.randn(1, 3, *size)
            return f"off by {float((program(x) - model(x)).abs().max()):.0e}"

    def conv() -> str:
        try:
            return run({"name": "aft_conv", "heads": 2, "kernel_size": 3}, (40, 32))
        except torch.jit.Error as error:
            return f"refused: {str(error).strip().splitlines()[-1][:120]}"

    return f"{_said(lambda: run({'name': 'attention', 'heads': 2}, (30, 39)))}; {_said(conv)}"


@attempt("a8", "A host's own class opens a converted folder, given the converted model's config")
def own_config() -> str:
    """The class initialises the attention at random; transformers only lists the missing keys."""
    import tempfile
    from importlib import import_module

    import_module("tokenmix.hosts.huggingface")  # sees to a torchvision that fits
    from transformers import BertConfig, BertModel

    from tokenmix.hosts.surgery import replace_mixers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=11, **sizes)).eval()
    model = replace_mixers(model, "linear")[0]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _said(
            lambda: type(BertModel.from_pretrained(folder, config=model.config)).__name__ + " with new attention"
        )


@attempt("a9", "generate with top_k=2.5 and with a seed beyond 64 bits")
def settings_of_generation() -> str:
    """Python and torch say something of slices and long long."""
    from tokenmix.models import LM, LMConfig

    model, prompt = LM(LMConfig(dim=8, vocab=7, max_len=8, mixers=({"name": "hydra"},))), torch.ones(1, 2).long()
    return "; ".join(_said(lambda g=g: str(model.generate(prompt, 2, **g))) for g in ({"top_k": 2.5}, {"seed": 2**70}))
