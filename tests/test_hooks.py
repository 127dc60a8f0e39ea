"""Test that weights fetched by hooks and tokens masked inside of a prompt give the same numbers.

Hooks fetch the weights for each call, as accelerate's offloading does.
"""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch

from cases import forms, subject_of
from tokenmix.hosts import huggingface
from tokenmix.models import LM, LMConfig
from tokenmix.testing.streaming import stream

MIXERS = {
    "aft_local": [{"name": "aft_local", "window": 4, "rank": 3}],
    "aft_full": [{"name": "aft_full", "rank": 3}],
    "aft_conv": [{"name": "aft_conv", "heads": 2, "kernel_size": 3}],
    "hybrid": [
        {"name": "external", "slots": 4},
        {"name": "compressive", "heads": 2},
        {"name": "attention", "heads": 2},
    ],
}
CPU = torch.device("cpu")


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 31, (rows, length), generator=torch.Generator().manual_seed(1))


def host_model(mixers: str):
    torch.manual_seed(0)
    specs = MIXERS[mixers]
    config = huggingface.TokenMixConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=len(specs),
        mixers=specs,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    return huggingface.TokenMixForCausalLM(config).eval()


@pytest.mark.parametrize("mixers", MIXERS)
@torch.no_grad()
def test_a_host_model_is_the_same_when_offloaded(mixers, tmp_path):
    model, x = host_model(mixers), tokens(2, 9)
    want, wrote = model(x).logits, model.generate(x, max_new_tokens=5, do_sample=False)
    for offload in (accelerate.cpu_offload, lambda m, **device: accelerate.disk_offload(m, tmp_path, **device)):
        other = copy.deepcopy(model)
        offload(other, execution_device=CPU)
        assert torch.equal(other(x).logits, want)
        assert torch.equal(other.generate(x, max_new_tokens=5, do_sample=False), wrote)


@pytest.mark.parametrize("mixers", MIXERS)
@torch.no_grad()
def test_a_model_of_ours_is_the_same_when_offloaded(mixers):
    torch.manual_seed(0)
    specs = MIXERS[mixers]
    model, x = (
        LM(LMConfig(vocab=31, dim=16, layers=len(specs), mixers=specs, max_len=32, tied=True)).eval(),
        tokens(2, 9),
    )
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.3)
    want, wrote = model(x), model.generate(x, 5, temperature=0)
    accelerate.cpu_offload(model, execution_device=CPU)
    assert torch.equal(model(x), want)
    assert torch.equal(model.generate(x, 5, temperature=0), wrote)


@pytest.mark.parametrize("mixers", MIXERS)
@torch.no_grad()
def test_a_prompt_with_a_hole_goes_on_as_without_the_hole(mixers):
    """Check that the shorter prompt gives the same continuation.

    generate() counts positions without the padding inside of a prompt.
    """
    model, x = host_model(mixers), tokens(2, 10)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0, 1, 1]]).expand(2, -1)
    kept = x[:, mask[0].bool()]
    assert torch.equal(
        model.generate(x, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, 10:],
        model.generate(kept, max_new_tokens=6, do_sample=False)[:, kept.shape[1] :],
    )


CAUSAL = [case for case, causal in forms() if causal]


def outputs_of(mixer, x) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of all tokens at once, and of a stream of single tokens."""
    return mixer(x), stream(mixer, x, (1,) * x.shape[1])[0]


def scale_output(module, args, output):
    """Change the outputs of a part; the state of a stream that a part returns beside them stays."""
    if isinstance(output, tuple):
        return tuple(scale_output(module, args, each) if isinstance(each, torch.Tensor) else each for each in output)
    return 1.25 * output if output.is_floating_point() else output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["eager", "kernels"])
@pytest.mark.parametrize("case", CAUSAL)
@torch.no_grad()
def test_a_hook_on_any_part_acts_alike_on_all_tokens_and_in_a_stream(case, dtype):
    """A part that only one of both calls, or whose weights are read past it, would leave a hook out there."""
    s = subject_of(case, True)
    mixer, x, near = s.build(dtype=dtype), s.x(dtype=dtype), 1e-9 if dtype is torch.float64 else 1e-4
    whole = outputs_of(mixer, x)
    for name, part in list(mixer.named_modules())[1:]:
        hook = part.register_forward_hook(scale_output)
        both = outputs_of(mixer, x)
        hook.remove()
        assert float((both[0] - both[1]).abs().max()) <= near * float(both[0].abs().max()), name
        acts = [not torch.equal(a, b) for a, b in zip(both, whole, strict=True)]
        assert acts[0] == acts[1], name
