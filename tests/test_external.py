"""Test what is special to External attention.

Its norm, its memories, parameter counts, and the defects of public copies that ours must not have.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tokenmix import MixerError, build_mixer, functional, reference
from tokenmix.mixers import Inputs


def drawn(
    T: int = 12, dim: int = 8, slots: int = 5, heads: int = 1, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, T, dim), (slots, dim // heads), (slots, dim // heads)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def weights(x: torch.Tensor, memory_k: torch.Tensor, **options) -> torch.Tensor:
    """The weights of one head, read off with a memory of unit vectors."""
    slots = len(memory_k)
    x, memory_k = (torch.cat([a, a.new_zeros(*a.shape[:-1], max(0, slots - a.shape[-1]))], -1) for a in (x, memory_k))
    return functional.external(x, memory_k, torch.eye(slots, x.shape[-1], dtype=x.dtype), **options)[..., :slots]


def same(a: torch.Tensor, b: torch.Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def test_norm_is_softmax_over_tokens_then_l1_over_slots():
    x, memory_k, memory_v = drawn()
    over_tokens = torch.softmax(x @ memory_k.T, 1)
    both = over_tokens / (1e-9 + over_tokens.sum(-1, keepdim=True))
    same(functional.external(x, memory_k, memory_v), both @ memory_v)
    same(functional.external(x, memory_k, memory_v, norm="tokens"), over_tokens @ memory_v)
    same(functional.external(x, memory_k, memory_v, norm="slots"), torch.softmax(x @ memory_k.T, -1) @ memory_v)
    rows, columns = weights(x, memory_k, eps=0.0).sum(-1), weights(x, memory_k).sum(1)
    same(rows, torch.ones_like(rows))
    assert float((columns - columns.mean()).abs().max()) > 1e-3, "columns sum to one only before the second step"


def test_causal_is_the_whole_computed_on_each_prefix():
    """Ours: the paper has no causal form. The last token of a prefix gets what the full form gives it there."""
    x, memory_k, memory_v = drawn(T=40)
    y = functional.external(x, memory_k, memory_v, causal=True)
    for t in (1, 2, 17, 33, 40):
        same(y[:, t - 1], functional.external(x[:, :t], memory_k, memory_v)[:, -1])


@pytest.mark.parametrize(("causal", "norm"), [(c, n) for c in (False, True) for n in ("double", "tokens", "slots")])
def test_every_norm_equals_the_reference_and_streams(causal, norm):
    mixer = build_mixer("external_multihead", 8, heads=2, coef=2, slots=4, norm=norm, causal=causal).double()
    x = drawn()[0].requires_grad_()
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4], mask[1, 5] = False, False
    args, options = mixer.functional_args(Inputs(x, key_mask=mask))
    pairs = mask[:, None] & (torch.ones(12, 12, dtype=torch.bool).tril() if causal else True)
    want = reference.external(*args, heads=4, norm=norm, mask=pairs.expand(2, 12, 12))
    got = functional.external(*args, **options)
    same(got, want)
    grads = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (got, want)]
    same(*grads)
    if causal:
        state, outputs = mixer.init_state(2), []
        for part, live in zip(x.split([5, 1, 6], 1), mask.split([5, 1, 6], 1), strict=True):
            y, state = mixer.extend(part, state, key_mask=live)
            outputs.append(y)
        same(torch.cat(outputs, 1), mixer(x, key_mask=mask))


def test_with_a_softmax_over_slots_tokens_do_not_meet():
    """Why the ablation is no token mixer: each output depends on its own token."""
    mixer = build_mixer("external", 8, norm="slots").double()
    x = drawn()[0]
    same(mixer(x)[:, :3], mixer(x[:, :3]))


@pytest.mark.parametrize(("dtype", "reach"), [(torch.float32, 240.0), (torch.float16, 19.0), (torch.float32, 1e4)])
@pytest.mark.parametrize("eps", [1e-9, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_a_token_far_below_the_others_is_finite(dtype, reach, eps, causal):
    """Check that a token far below the others gives finite numbers.

    In public copies every slot's softmax underflows for such a token and l1 divides 0 by 0. In fp16 1e-9 is 0 as well.
    """
    x = torch.zeros(1, 6, 8, dtype=dtype)
    x[0, :5] = torch.tensor([reach] + [0.0] * 7)
    memory = torch.zeros(4, 8, dtype=dtype)
    memory[:, 0] = 1.0
    x = x.flip(1) if causal else x
    x.requires_grad_()
    y = functional.external(x, memory, torch.ones_like(memory), eps=eps, causal=causal)
    (grad,) = torch.autograd.grad(y.float().sum(), x)
    assert bool(y.isfinite().all())
    assert bool(grad.isfinite().all())


def test_padding_has_no_influence():
    """A public copy has no mask: ten zero tokens change real outputs by 15 %."""
    for name in ("external", "external_multihead"):
        mixer = build_mixer(name, 8).double()
        x = drawn()[0]
        padded = torch.cat([x, torch.zeros(2, 10, 8, dtype=torch.float64)], 1)
        mask = torch.arange(22).expand(2, 22) < 12
        same(mixer(padded, key_mask=mask)[:, :12], mixer(x))


def test_a_tied_memory_is_one_parameter_and_stays_tied():
    """Check that a tied memory is one Parameter, updated once, that stays tied.

    The official PyTorch code has two Parameters over one storage, updated twice, and apart after a move of dtype or a
    copy.
    """
    mixer = build_mixer("external", 8, slots=4, tied=True)
    assert [n for n, _ in mixer.named_parameters() if "memory" in n] == ["memory_k"]
    twin = copy.deepcopy(mixer).double()
    x = drawn()[0]
    before = twin.memory_k.detach().clone()
    same(twin(x), twin.out_proj(functional.external(twin.q_proj(x), before, before)))
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(x).square().sum().backward()
    move = -0.1 * twin.memory_k.grad
    optimiser.step()
    same(twin.memory_k.detach() - before, move)


def test_the_bias_of_the_first_memory_cancels():
    """Check that the bias of the first memory, which the official multi-head form has, cancels.

    A softmax over tokens does not change when a slot's logits all move by the same.
    """
    mixer = build_mixer("external_multihead", 8, heads=2, coef=1, slots=4).double()
    x = drawn()[0]
    want = mixer(x)
    torch.nn.init.normal_(mixer.memory_k_bias)
    same(mixer(x), want, 1e-10)


def test_memories_start_as_documented():
    torch.manual_seed(0)
    mixer = build_mixer("external", 512, slots=64)
    assert abs(float(mixer.memory_k.detach().std()) / (2 / 64) ** 0.5 - 1) < 0.02
    assert abs(float(mixer.memory_v.detach().std()) / (2 / 512) ** 0.5 - 1) < 0.02
    many = build_mixer("external_multihead", 512)
    assert float(many.memory_k.detach().std()) < 0.03
    assert not bool(many.memory_v_bias.any())


def test_parameters_and_multiplications_of_the_segmentation_head():
    """512 channels, 64 slots, 128 x 128 pixels: two 1 x 1 convolutions and one tied memory."""
    with torch.device("meta"):
        cost = build_mixer("external", 512, slots=64, tied=True, qkv_bias=False, out_bias=False).cost(128 * 128)
    assert cost.parameters == 557_056
    twice = cost.flops / 2
    once = twice - cost.mixing / 4
    assert (f"{once / 1e9:.2f}", f"{twice / 1e9:.2f}") == ("9.13", "9.66")


def test_parameters_of_one_multihead_layer():
    """Twice those of attention at 384 features; as in the official file."""
    with torch.device("meta"):
        ours = sum(p.numel() for p in build_mixer("external_multihead", 384, heads=6).parameters())
        theirs = sum(p.numel() for p in build_mixer("attention", 384, heads=6).parameters())
    assert (ours, theirs) == (1_189_888, 591_360)
    dim, width = 384, 64
    assert ours == dim * 4 * dim + 4 * dim + (width * 64 + 64) + (64 * width + width) + 4 * dim * dim + dim


@pytest.mark.parametrize("causal", [False, True])
def test_simplified_attention_is_attention_without_projections(causal):
    x = drawn()[0]
    ours = build_mixer("simplified_attention", 8, causal=causal).double()
    theirs = build_mixer("attention", 8, heads=1, scale=1.0, causal=causal, qkv_bias=False).double()
    for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj):
        torch.nn.init.eye_(projection.weight)
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    same(ours(x), theirs(x))


def test_options_that_make_no_sense_are_refused():
    wrong = [({"slots": 0}, "slots"), ({"norm": "softmax"}, "norm"), ({"eps": -1.0}, "eps")]
    for name in ("external", "external_multihead"):
        for options, word in wrong:
            with pytest.raises(MixerError, match=word):
                build_mixer(name, 8, **options)
    with pytest.raises(MixerError, match="heads=3"):
        build_mixer("external_multihead", 8, heads=3)
