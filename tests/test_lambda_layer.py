"""The lambda layer: BatchNorm over live tokens, full context against a window, and resizing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenmix import MixerError, build_mixer, contrib
from tokenmix.mixers.parts.token_norm import TokenBatchNorm


def test_token_norm_is_batch_norm():
    torch.manual_seed(0)
    ours, theirs, x = (
        TokenBatchNorm(6).double(),
        nn.BatchNorm1d(6).double(),
        torch.randn(3, 7, 6, dtype=torch.float64) * 3 + 1,
    )
    for _ in range(3):
        torch.testing.assert_close(ours(x), theirs(x.flatten(0, 1)).view_as(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x.flatten(0, 1)).view_as(x))


def test_masked_tokens_have_no_part_in_the_statistics():
    """In train mode: padding, whatever it holds, changes neither the output nor the running statistics."""
    x, mask = torch.randn(2, 9, 8), torch.arange(9) < 5
    found = []
    for tokens, given in ((x[:, :5], {}), (torch.where(mask[:, None], x, 1e4), {"key_mask": mask.expand(2, 9)})):
        torch.manual_seed(0)
        mixer = build_mixer("lambda", 8, max_len=9, heads=2, key_width=3).train()
        found.append((mixer(tokens, **given)[:, :5], mixer.norms["k"].running_mean, mixer.norms["q"].running_var))
    for short, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, short)


def test_a_batch_without_tokens_leaves_the_statistics():
    norm = TokenBatchNorm(4)
    assert norm(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)).isfinite().all()
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert torch.equal(norm.running_var, torch.ones(4))


def test_without_norm_rows_are_independent_in_train_mode():
    mixer, x = build_mixer("lambda", 8, max_len=9, heads=2, norm=None).train(), torch.randn(3, 9, 8)
    torch.testing.assert_close(mixer(x[1:2]), mixer(x)[1:2])
    assert not list(mixer.buffers())


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_wider_than_the_sequence_is_full_context(causal):
    torch.manual_seed(0)
    full = build_mixer("lambda", 8, max_len=9, heads=2, key_width=3, causal=causal).eval()
    local = build_mixer(
        "lambda", 8, max_len=None, window=9 if causal else 17, heads=2, key_width=3, causal=causal
    ).eval()
    local.load_state_dict(full.state_dict())
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(local(x), full(x))
    assert local(torch.randn(2, 40, 8)).shape == (2, 40, 8)


def test_without_positions_every_token_gets_the_same_map():
    """The content lambda alone is one linear map for all queries: equal queries, equal outputs, wherever they stand."""
    q = torch.randn(1, 1, 6).expand(1, 5, 6)
    y = contrib.lambda_layer(q, torch.randn(1, 5, 3), torch.randn(1, 5, 4), torch.zeros(1, 3), heads=2)
    torch.testing.assert_close(y, y[:, :1].expand_as(y))


def test_resize_keeps_distances():
    mixer = build_mixer("lambda", 8, max_len=6, heads=2).eval()
    x = torch.randn(1, 6, 8)
    before = mixer(x)
    mixer.resize(9)
    torch.testing.assert_close(mixer(x), before)
    assert mixer(torch.randn(1, 9, 8)).shape == (1, 9, 8)
    mixer.resize(4)
    torch.testing.assert_close(mixer(x[:, :4]), build_like(mixer, x[:, :4]))
    with pytest.raises(MixerError, match="max_len=4"):
        mixer(x)


def build_like(mixer, x):
    twin = build_mixer("lambda", 8, max_len=4, heads=2).eval()
    twin.load_state_dict(mixer.state_dict())
    return twin(x)


def test_options_that_make_no_sense_are_refused():
    for wrong, word in (
        ({"window": 4}, "odd"),
        ({}, "max_len"),
        ({"window": 3, "heads": 3}, "heads"),
        ({"window": 3, "norm": "kv"}, "norm"),
    ):
        with pytest.raises(MixerError, match=word):
            build_mixer("lambda", 8, max_len=None, **wrong)


@pytest.mark.parametrize(("dim", "heads", "printed"), [(192, 3, 4.8), (384, 6, 17.7)])
def test_parameters_of_afts_baseline(dim, heads, printed):
    """Count Lambda tiny and small in Table 7 of AFT.

    12 layers at 14 x 14 patches, key width 16, BatchNorm on q and k, mean pooling, learned positions.
    """
    layer = sum(
        p.numel() for p in build_mixer("lambda", dim, max_len=None, grid_size=[14, 14], heads=heads).parameters()
    )
    assert (
        layer
        == dim * 16 * heads
        + 16 * heads
        + dim * 16
        + 16
        + dim * 64
        + 64
        + dim * dim
        + dim
        + 27 * 27 * 16
        + 2 * 16 * (heads + 1)
    )
    mlp, norms = 8 * dim * dim + 5 * dim, 4 * dim
    total = 768 * dim + dim + 196 * dim + 12 * (layer + mlp + norms) + 2 * dim + dim * 1000 + 1000
    assert round(total / 1e6, 1) == printed


def test_on_a_grid_distances_are_of_lines_and_columns():
    """Check that a cell at the end of a line and the next one are far apart.

    The next one stands at the start of the line below. And grids must fit.
    """
    torch.manual_seed(0)
    mixer, x = build_mixer("lambda", 8, max_len=None, grid_size=[3, 4], heads=2).eval(), torch.randn(1, 12, 8)
    flat = build_mixer("lambda", 8, max_len=12, heads=2).eval()
    flat.load_state_dict({**mixer.state_dict(), "embedding": flat.embedding})
    assert float((mixer(x, grid=(3, 4)) - flat(x)).detach().abs().max()) > 0.01
    turned = x.unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2)
    twin = build_mixer("lambda", 8, max_len=None, grid_size=[4, 3], heads=2).eval()
    twin.load_state_dict({**mixer.state_dict(), "embedding": mixer.embedding.transpose(0, 1)})
    back = twin(turned, grid=(4, 3)).unflatten(1, (4, 3)).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close(back, mixer(x, grid=(3, 4)))
    for wrong in ((4, 3), None, (12,)):
        with pytest.raises(MixerError, match="grid"):
            mixer(x, grid=wrong)
    with pytest.raises(MixerError, match="grid"):
        build_mixer("lambda", 8, max_len=None, grid_size=[3, 4], causal=True)


def test_heads_share_keys_values_and_embeddings():
    """Multi-query lambdas: only queries and the way out grow with the number of heads of one width."""
    mixer = build_mixer("lambda", 192, max_len=196, heads=3, qkv_bias=False)
    counts = {name: p.numel() for name, p in mixer.named_parameters()}
    widths = {"q_proj.weight": 192 * 48, "k_proj.weight": 192 * 16, "v_proj.weight": 192 * 64, "embedding": 391 * 16}
    assert {name: counts[name] for name in widths} == widths
