"""Test what is special to memory-compressed attention.

Its limits, torch's convolution, its causal form and its small state.
"""

from __future__ import annotations

import pytest
import torch

from cases import subject_of
from tokenmix import build_mixer, contrib, functional, state_bytes
from tokenmix.testing import PROMISES


def qkv(T: int, D: int = 8, B: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(3)]


def conv(block: int, D: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((D, D, block), (D, D, block), (D,), (D,))
    )


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_of_one_with_identity_is_softmax_attention(causal):
    q, k, v = qkv(9)
    one, zero = torch.eye(8, dtype=torch.float64)[..., None], torch.zeros(8, dtype=torch.float64)
    y = contrib.memory_compressed(q, k, v, (one, one, zero, zero), heads=2, block=1, causal=causal)
    same(y, functional.attention(q, k, v, heads=2, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_one_local_block_is_softmax_attention(causal):
    q, k, v = qkv(9)
    for block in (9, 50):
        same(
            contrib.memory_compressed(q, k, v, heads=2, block=block, mode="local", causal=causal),
            functional.attention(q, k, v, heads=2, causal=causal),
        )


@pytest.mark.parametrize("T", [12, 13])
def test_compression_is_torchs_strided_convolution(T):
    q, k, v = qkv(T)
    weights = conv(3)
    short = []
    for a, w, b in zip((k, v), weights[:2], weights[2:], strict=True):
        full = torch.nn.functional.pad(a.mT, (0, -T % 3))
        short.append(torch.nn.functional.conv1d(full, w, b, stride=3).mT)
    same(contrib.memory_compressed(q, k, v, weights, heads=2, block=3), functional.attention(q, *short, heads=2))


@pytest.mark.parametrize("promise", ["past_reaches_present", "token_before_reaches"])
def test_compressed_keeps_the_promises_local_cannot(promise):
    PROMISES[promise](subject_of("memory_compressed", True))


def test_causal_tokens_see_whole_blocks_before_their_own():
    """Check that tokens see whole blocks before their own, and the tokens of their own block.

    tensor2tensor shows the first token of all to everyone, so that the first block has something to attend; here a
    block shows itself its tokens.
    """
    q, k, v = qkv(9)
    weights = tuple(w.requires_grad_() for w in conv(3))
    y = contrib.memory_compressed(q, k, v, weights, heads=2, block=3, causal=True)
    assert all((g == 0).all() for g in torch.autograd.grad(y[:, :3].square().sum(), weights, retain_graph=True))
    same(y[:, :3], functional.attention(q[:, :3], k[:, :3], v[:, :3], heads=2, causal=True))
    cells = [
        torch.nn.functional.conv1d(a[:, :3].mT, w, b, stride=3).mT
        for a, w, b in zip((k, v), weights[:2], weights[2:], strict=True)
    ]
    at_4 = [torch.cat([c, a[:, 3:5]], 1) for c, a in zip(cells, (k, v), strict=True)]
    same(y[:, 4:5], functional.attention(q[:, 4:5], *at_4, heads=2))


def test_the_state_keeps_a_fraction_of_the_history():
    mixer, history = (
        build_mixer(name, 32, causal=True, heads=4, **more)
        for name, more in (("memory_compressed", {"block": 8}), ("attention", {}))
    )
    x = torch.randn(1, 2000, 32)
    sizes = [state_bytes(m.extend(x, m.init_state(1))[1]) for m in (mixer, history)]
    assert sizes[0] < sizes[1] / 6
    state = mixer.init_state(1)
    for token in x[:, :400].split(1, 1):
        _, state = mixer.extend(token, state)
    assert state.keys.shape[1] == 1 + 400 // 8, "token by token the state grows as it does in one chunk"


@pytest.mark.parametrize("mode", ["compressed", "local"])
def test_positions_may_come_and_go_in_a_stream(mode):
    """Chunks with positions of their own, with gaps, between chunks without: the counter goes on from the last."""
    torch.manual_seed(0)
    mixer = build_mixer("memory_compressed", 8, causal=True, heads=2, block=3, mode=mode).double()
    x = torch.randn(2, 23, 8, dtype=torch.float64)
    first = torch.arange(7).expand(2, 7)
    jumps = torch.tensor([[9, 10, 14, 15, 19], [7, 8, 9, 20, 21]])
    rest = jumps[:, -1:] + 1 + torch.arange(11)
    want = mixer(x, positions=torch.cat([first, jumps, rest], 1))
    for cut in (1, 4, 11):
        y, state = mixer.extend(x[:, :7], mixer.init_state(2))
        outputs = [y]
        y, state = mixer.extend(x[:, 7:12], state, positions=jumps)
        outputs.append(y)
        for piece in x[:, 12:].split(cut, 1):
            y, state = mixer.extend(piece, state)
            outputs.append(y)
        same(torch.cat(outputs, 1), want)


def test_parameters_and_default_blocks():
    D = 16
    mixer = build_mixer("memory_compressed", D)
    assert mixer.block == 3
    assert sum(p.numel() for p in mixer.parameters()) == 4 * (D * D + D) + 2 * (3 * D * D + D)
    local = build_mixer("memory_compressed", D, mode="local")
    assert local.block == 256
    assert sum(p.numel() for p in local.parameters()) == 4 * (D * D + D)
