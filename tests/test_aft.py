"""Test what is special to the AFT family.

The identities between its members, the papers' parameter counts, and its options.
"""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, build_mixer, functional, reference
from tokenmix.mixers import Inputs, Mixer


def qkv(T: int, D: int = 8, B: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(3)]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 7, 8, 50])
class TestIdentities:
    def test_full_without_bias_is_simple(self, T, causal):
        q, k, v = qkv(T)
        same(
            functional.aft_full(q, k, v, torch.zeros(T, T, dtype=torch.float64), causal=causal),
            functional.aft_simple(q, k, v, causal=causal),
        )

    def test_local_with_a_window_over_everything_is_full(self, T, causal):
        q, k, v = qkv(T)
        w = torch.randn(T, T, dtype=torch.float64)
        for window in (T, T + 3):
            same(
                functional.aft_local(q, k, v, w, window=window, causal=causal),
                functional.aft_full(q, k, v, w, causal=causal),
            )

    def test_local_without_a_window_is_simple(self, T, causal):
        q, k, v = qkv(T)
        same(
            functional.aft_local(q, k, v, torch.randn(T, T, dtype=torch.float64), window=0, causal=causal),
            functional.aft_simple(q, k, v, causal=causal),
        )

    def test_a_shift_of_keys_or_of_a_row_of_weights_changes_nothing(self, T, causal):
        q, k, v = qkv(T)
        w = torch.randn(T, T, dtype=torch.float64)
        shifted = functional.aft_full(
            q,
            k + 3.0 * torch.randn(8, dtype=torch.float64),
            v,
            w + torch.randn(T, 1, dtype=torch.float64),
            causal=causal,
        )
        same(shifted, functional.aft_full(q, k, v, w, causal=causal))

    def test_conv_is_full_with_the_relative_bias(self, T, causal):
        q, k, v = qkv(T)
        kernel = torch.randn(2, 5, dtype=torch.float64)
        y = functional.aft_conv(q, k[..., :2], v, kernel, causal=causal)
        lag = torch.arange(T) - torch.arange(T)[:, None] + (4 if causal else 2)
        for head, channels in enumerate((slice(0, 4), slice(4, 8))):
            w = torch.where((lag >= 0) & (lag < 5), kernel[head][lag.clamp(0, 4)], 0.0)
            keys = k[..., head : head + 1].expand(-1, -1, 4)
            same(y[..., channels], functional.aft_full(q[..., channels], keys, v[..., channels], w, causal=causal))


@pytest.mark.parametrize("grid", [(3, 5), (6, 2), (2, 3, 4), (1, 7)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_conv_on_a_grid_is_full_with_the_relative_bias(grid, prefix):
    cells = torch.cartesian_prod(*(torch.arange(n) for n in grid))
    T = prefix + len(cells)
    q, k, v = qkv(T, D=4)
    kernel = torch.randn(2, *[3] * len(grid), dtype=torch.float64)
    tap = cells[None] - cells[:, None] + 1
    inside = ((tap >= 0) & (tap < 3)).all(-1)
    w = torch.zeros(2, T, T, dtype=torch.float64)
    for head in range(2):
        w[head, prefix:, prefix:] = torch.where(inside, kernel[head][tuple(tap.clamp(0, 2).unbind(-1))], 0.0)
    y = functional.aft_conv(q, k[..., :2], v, kernel, grid=grid, prefix=prefix)
    for head, channels in enumerate((slice(0, 2), slice(2, 4))):
        same(
            y[..., channels],
            functional.aft_full(q[..., channels], k[..., head : head + 1].expand(-1, -1, 2), v[..., channels], w[head]),
        )


def test_equation_6_as_printed():
    """conv(exp(K) V, exp(w) - 1) + sum exp(K) V over the same with V = 1, at sizes where it does not cancel."""
    q, k, v = qkv(11, D=4)
    kernel, e = torch.randn(2, 3, dtype=torch.float64), torch.exp(k[..., :2]).repeat_interleave(2, -1)
    filters = torch.expm1(kernel).repeat_interleave(2, 0)[:, None]

    def blurred(a):
        return torch.nn.functional.conv1d(a.transpose(1, 2), filters, padding=1, groups=4).transpose(1, 2) + a.sum(
            1, keepdim=True
        )

    same(functional.aft_conv(q, k[..., :2], v, kernel), torch.sigmoid(q) * blurred(e * v) / blurred(e))


def test_output_before_the_gate_is_a_convex_combination_of_values():
    q, k, v = qkv(20)
    y = functional.aft_full(q, 30 * k, v, 5 * torch.randn(20, 20, dtype=torch.float64), gate=None)
    assert (y <= v.amax(1, keepdim=True) + 1e-12).all()
    assert (y >= v.amin(1, keepdim=True) - 1e-12).all()


def test_conv_starts_as_simple_with_one_key_per_head():
    mixer = build_mixer("aft_conv", 8, heads=2, kernel_size=3, causal=True)
    x = torch.randn(2, 9, 8)
    (q, k, v, _), _ = mixer.functional_args(Inputs(x))
    expected = mixer.out_proj(functional.aft_simple(q, k.repeat_interleave(4, -1), v, causal=True))
    torch.testing.assert_close(mixer(x), expected)


def test_conv_kernel_is_normalised_per_head_and_a_single_tap_is_defined():
    mixer = build_mixer("aft_conv", 8, heads=2, kernel_size=5, ndim=2)
    with torch.no_grad():
        mixer.gamma.copy_(torch.tensor([2.0, -1.0]))
        mixer.beta.copy_(torch.tensor([0.5, 0.25]))
    kernel = mixer.kernel().flatten(1)
    torch.testing.assert_close(kernel.mean(1), mixer.beta)
    torch.testing.assert_close(kernel.std(1, unbiased=False), mixer.gamma.abs(), rtol=1e-4, atol=0)
    one = build_mixer("aft_conv", 8, heads=2, kernel_size=1)
    one(torch.randn(1, 4, 8)).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in one.parameters())


def count(mixer: Mixer) -> int:
    return sum(p.numel() for p in mixer.parameters())


DEIT_TINY, DEIT_SMALL = 5_717_416, 22_050_664


@pytest.mark.parametrize(("dim", "qkv_bias", "shell", "expected"), [
    (192, True, DEIT_TINY, 6_322_600), (192, False, DEIT_TINY, 6_315_688),
    (384, True, DEIT_SMALL, 22_655_848), (384, False, DEIT_SMALL, 22_642_024),
])  # fmt: skip
def test_parameters_of_aft_full_in_the_deit_shell(dim, qkv_bias, shell, expected):
    """Facts of Table 7: DeiT with its 12 attention layers replaced by AFT-full of rank 128 over 197 tokens."""
    attention = count(build_mixer("attention", dim, heads=3))
    mixer = build_mixer("aft_full", dim, max_len=197, rank=128, qkv_bias=qkv_bias)
    assert shell + 12 * (count(mixer) - attention) == expected


@pytest.mark.parametrize(("dim", "kernel", "heads", "qkv_bias", "shell", "expected"), [
    (192, 11, 32, True, DEIT_TINY, 5_356_072), (192, 11, 32, False, DEIT_TINY, 5_351_080),
    (192, 11, 192, True, DEIT_TINY, 5_962_792), (384, 11, 16, False, DEIT_SMALL, 20_288_680),
    (384, 11, 384, True, DEIT_SMALL, 22_541_416), (384, 15, 384, False, DEIT_SMALL, 23_006_824),
])  # fmt: skip
def test_parameters_of_aft_conv_in_the_deit_shell(dim, kernel, heads, qkv_bias, shell, expected):
    """Check facts of Table 7.

    Without class token and position embedding, K of width h, an s x s filter, gamma and beta per head.
    """
    attention = count(build_mixer("attention", dim, heads=3))
    mixer = build_mixer("aft_conv", dim, heads=heads, kernel_size=kernel, ndim=2, qkv_bias=qkv_bias)
    assert shell - dim - 197 * dim + 12 * (count(mixer) - attention) == expected


def test_parameters_of_table_3():
    """9.6M and 0.6M per layer at T = 3072, d = 256: the bias with Q, K and V, without biases."""
    plain = build_mixer("aft_local", 256, max_len=3072, window=256, rank=None, qkv_bias=False, out_bias=False)
    factors = build_mixer("aft_local", 256, max_len=3072, window=256, rank=64, qkv_bias=False, out_bias=False)
    out = 256 * 256
    assert count(plain) - out == 9_633_792
    assert count(factors) - out == 589_824


def test_bias_starts_with_the_given_deviation():
    for rank in (None, 16):
        mixer = build_mixer("aft_full", 8, max_len=200, rank=rank, init_std=0.01)
        for parameter in mixer.bias.parameters():
            assert abs(float(parameter.detach().std()) - 0.01) < 0.001


def test_resize_interpolates_the_bias():
    mixer = build_mixer("aft_local", 8, max_len=8, window=4, rank=2)
    with torch.no_grad():
        mixer.bias.u.copy_(torch.arange(8.0)[:, None].expand(8, 2))
    mixer.resize(16)
    assert mixer.bias.u.shape == (16, 2)
    torch.testing.assert_close(mixer.bias.u[:4, 0], torch.tensor([0.0, 0.25, 0.75, 1.25]))
    assert mixer(torch.randn(1, 16, 8)).shape == (1, 16, 8)


def test_memory_does_not_grow_with_the_square_of_the_length():
    """AFT-local with factors keeps no (T, T) tensor: saved activations grow linearly with T."""

    def saved(T: int) -> int:
        sizes: list[int] = []
        mixer = build_mixer("aft_local", 8, max_len=T, window=8, rank=2, causal=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            mixer(torch.randn(1, T, 8))
        return sum(sizes)

    assert saved(2048) < 2.2 * saved(1024)


@pytest.mark.parametrize(("name", "options", "words"), [
    ("aft_local", {"max_len": 8, "window": -1}, "window must be an integer >= 0"),
    ("aft_local", {"max_len": 8, "window": 0, "outside": "none"}, "window >= 1"),
    ("aft_local", {"max_len": 8, "window": 2, "rank": 0}, "rank must be a positive integer"),
    ("aft_full", {"max_len": 0}, "max_len must be a positive integer"),
    ("aft_full", {"max_len": 8, "gate": "sigmoyd"}, "gate='sigmoyd' is unknown"),
    ("aft_conv", {"heads": 3, "kernel_size": 3}, "heads=3 must divide dim=8"),
    ("aft_conv", {"heads": 2, "kernel_size": 4}, "kernel_size must be odd"),
    ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 2, "causal": True}, "1 with causal=True"),
    ("aft_locl", {}, "nearest: aft_local"),
    ("aft_local", {"max_len": 8, "windw": 2}, "nearest: window"),
    ("aft_local", {"max_len": 8}, "needs the option 'window'"),
])  # fmt: skip
def test_a_wrong_option_is_named(name, options, words):
    with pytest.raises(MixerError, match="(?s)" + words.replace("(", r"\(")):
        build_mixer(name, 8, **options)


def test_reference_is_written_independently_of_the_library():
    """The reference agrees with a sum spelled out for one output."""
    q, k, v = qkv(4, D=2, B=1)
    w = torch.randn(4, 4, dtype=torch.float64)
    numerator = sum(torch.exp(k[0, s, 1] + w[2, s]) * v[0, s, 1] for s in range(3))
    denominator = sum(torch.exp(k[0, s, 1] + w[2, s]) for s in range(3))
    y = reference.aft_full(q, k, v, w, mask=torch.ones(1, 4, 4, dtype=torch.bool).tril())
    same(y[0, 2, 1], torch.sigmoid(q[0, 2, 1]) * numerator / denominator)


@pytest.mark.parametrize("rank", [None, 3])
def test_the_bias_of_row_t_and_column_s_is_w_ts(rank):
    """The table is not transposed: moving one entry of w moves query t only, through key s only."""
    mixer = build_mixer("aft_full", 8, max_len=6, rank=rank)
    w = mixer.bias.table(torch.arange(6)[None], torch.arange(6)[None])[0]
    expected = mixer.bias.weight if rank is None else mixer.bias.u @ mixer.bias.v.T
    torch.testing.assert_close(w, expected.double())
    x = torch.randn(1, 6, 8)
    (q, k, v, _), _ = mixer.functional_args(Inputs(x))
    before = functional.aft_full(q, k, v, w.detach())
    w = w.detach().clone()
    w[4, 1] += 2.0
    changed = (functional.aft_full(q, k, v, w) - before).abs().amax(-1)[0] > 1e-6
    assert changed.tolist() == [False, False, False, False, True, False]
