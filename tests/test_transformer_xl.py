"""Transformer-XL: what the contract suite cannot see."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from tokenmix import build_mixer


def built(**options):
    torch.manual_seed(0)
    return build_mixer("transformer_xl", 16, **{"heads": 4, **options}).double().eval()


def test_without_its_position_terms_it_is_attention():
    for causal in (False, True):
        mixer, plain = built(causal=causal), build_mixer("attention", 16, heads=4, causal=causal).double()
        plain.load_state_dict({n: p for n, p in mixer.state_dict().items() if "proj" in n})
        with torch.no_grad():
            for p in (mixer.relative, mixer.content, mixer.place):
                p.zero_()
        x = torch.randn(2, 9, 16, dtype=torch.float64)
        torch.testing.assert_close(mixer(x), plain(x), rtol=1e-12, atol=1e-12)


def test_only_differences_of_positions_count_and_far_ones_keep_their_phase():
    x, place = torch.randn(2, 40, 16), torch.arange(40).expand(2, 40)
    for memory in (None, 7):
        mixer = built(memory=memory, causal=True)
        want = mixer(x.double())
        for start in (0, 5, 10**6):
            torch.testing.assert_close(mixer(x.double(), positions=place + start), want, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(mixer.float()(x, positions=place + 10**6).double(), want, rtol=1e-4, atol=1e-5)


def test_a_memory_is_a_band_and_a_long_one_is_none():
    x, away = torch.randn(2, 23, 16, dtype=torch.float64), torch.arange(23) - torch.arange(23)[:, None]
    for causal in (False, True):
        full, short, long = (built(causal=causal, memory=m) for m in (None, 5, 23))
        torch.testing.assert_close(short(x), full(x, attn_mask=away.abs() < 5), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(long(x), full(x), rtol=1e-10, atol=1e-10)


def test_segments_with_a_detached_state_are_the_papers_recurrence():
    """The outputs are those of one long pass; the gradient ends where the segment begins."""
    mixer = built(causal=True, memory=6)
    x = torch.randn(1, 12, 16, dtype=torch.float64).requires_grad_()
    first, state = mixer.extend(x[:, :6], mixer.init_state(1))
    second, _ = mixer.extend(x[:, 6:], pytree.tree_map(torch.Tensor.detach, state))
    torch.testing.assert_close(torch.cat([first, second], 1), mixer(x), rtol=1e-10, atol=1e-10)
    (grad,) = torch.autograd.grad(second.square().sum(), x)
    assert bool((grad[:, :6] == 0).all())
    assert bool((grad[:, 6:] != 0).any())


def test_parameters():
    D = 16
    assert built().cost(8).parameters == 4 * (D * D + D) + D * D + 2 * D


def test_a_memory_makes_the_cost_grow_with_the_length():
    counts = []
    for T in (512, 1024):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            built(memory=16, causal=True)(torch.randn(1, T, 16, dtype=torch.float64))
        counts.append(counter.get_total_flops())
    assert 1.9 < counts[1] / counts[0] < 2.1
