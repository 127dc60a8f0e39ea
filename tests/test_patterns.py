"""Test what is special to the pattern mixers.

Who sees whom, identities, growth of the cost, and the defects known from others' versions.
"""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tokenmix import MixerError, build_mixer, contrib, functional, reference, state_bytes
from tokenmix.contrib.patterns_bigbird import random_choice

PATTERNS = {
    "local": {"window": 16},
    "strided": {"stride": 16},
    "fixed": {"stride": 16, "columns": 2},
    "longformer": {"window": 16, "dilation": [1, 1, 2, 3], "global_tokens": 3},
    "bigbird": {"block": 16, "random_blocks": 2, "global_blocks": 1},
    "etc": {"radius": 8, "global_tokens": 5},
}
CAUSAL = [n for n in PATTERNS if n != "etc"]


def qkv(T: int, D: int = 8, B: int = 2, seed: int = 0, n: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(n)]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def seen(name: str, T: int, *, heads: int = 1, **options) -> list[list[set[int]]]:
    """Return which tokens each token of each head attends.

    With queries 0 the weight of a key is 1 / number of keys, read off values that are unit vectors.
    """
    q, v = torch.zeros(1, T, heads * T), torch.eye(T).repeat(1, heads)[None]
    args = (q, q, v) if name != "longformer" else (q, q, v, q, q, v)
    y = getattr(functional if name == "local" else contrib, name)(*args, heads=heads, **options)[0].unflatten(
        -1, (heads, T)
    )
    return [[set(torch.nonzero(y[t, h]).flatten().tolist()) for t in range(T)] for h in range(heads)]


def either_way(t: int, T: int, causal: bool) -> range:
    return range(t + 1) if causal else range(T)


@pytest.mark.parametrize("causal", [False, True])
class TestWhoSeesWhom:
    def test_local_sees_what_aft_local_sees(self, causal):
        T, window = 11, 4
        ((*rows,),) = seen("local", T, window=window, causal=causal)
        w, v = torch.zeros(T, T), torch.eye(T)[None]
        aft = functional.aft_local(
            v, torch.zeros(1, T, T), v, w, window=window, outside="none", gate=None, causal=causal
        )[0]
        for t in range(T):
            assert (
                rows[t]
                == set(torch.nonzero(aft[t]).flatten().tolist())
                == {s for s in either_way(t, T, causal) if abs(t - s) < window}
            )

    def test_pool_sees_everything(self, causal):
        T = 40
        (rows,) = seen("local", T, window=3, outside="pool", causal=causal)
        assert all(rows[t] == set(either_way(t, T, causal)) for t in range(T))

    def test_strided_halves(self, causal):
        T, stride = 37, 5
        near, column = seen("strided", T, heads=2, stride=stride, causal=causal)
        (both,) = seen("strided", T, stride=stride, merged=True, causal=causal)
        for t in range(T):
            assert near[t] == {s for s in either_way(t, T, causal) if abs(t - s) <= stride}
            assert column[t] == {s for s in either_way(t, T, causal) if (t - s) % stride == 0}
            assert both[t] == near[t] | column[t]

    def test_fixed_halves(self, causal):
        T, stride, columns = 37, 5, 2
        near, column = seen("fixed", T, heads=2, stride=stride, columns=columns, causal=causal)
        (both,) = seen("fixed", T, stride=stride, columns=columns, merged=True, causal=causal)
        for t in range(T):
            assert near[t] == {s for s in either_way(t, T, causal) if s // stride == t // stride}
            assert column[t] == {s for s in either_way(t, T, causal) if s % stride >= stride - columns}
            assert both[t] == near[t] | column[t]

    def test_longformer_windows_are_dilated_and_global_tokens_see_all(self, causal):
        T, g, dilations = 41, 3, [1, 3]
        heads = seen("longformer", T, heads=2, reach=2, dilation=dilations, global_tokens=g, causal=causal)
        for d, rows in zip(dilations, heads, strict=True):
            for t in range(T):
                window = (
                    {s for s in range(T) if abs(t - s) <= 2 * d and (t - s) % d == 0} | set(range(g))
                    if t >= g
                    else set(range(T))
                )
                assert rows[t] == window & set(either_way(t, T, causal))

    def test_bigbird_blocks(self, causal):
        T, b = 200, 8
        heads = seen(
            "bigbird", T, heads=3, block=b, window_blocks=3, random_blocks=2, global_blocks=2, seed=5, causal=causal
        )
        patterns = set()
        for rows in heads:
            chosen = []
            for t in range(T):
                i, blocks = t // b, {s // b for s in rows[t]}
                own = {j for j in range(i - 1, i + 2) if 0 <= j < T // b and (j <= i or not causal)} | {
                    j for j in range(2) if j <= i or not causal
                }
                assert rows[t] == {s for s in range(T) if s // b in blocks and (s <= t or not causal)}
                candidates = T // b - len(own) if not causal else max(0, i - 3)
                if i >= 2:
                    assert own <= blocks
                    assert len(blocks - own) == min(2, candidates), (
                        "as many random blocks as there is room for, none twice"
                    )
                    chosen.append(tuple(sorted(blocks - own)))
            patterns.add(tuple(chosen))
        assert len(patterns) == 3, "each head draws its own"


def test_random_blocks_do_not_depend_on_the_length_when_causal():
    i = torch.arange(40)[None]
    draw = {"window": 1, "first": 2, "heads": 2, "count": 3}
    long = random_choice(i, i + 1, seed=1, **draw)
    assert torch.equal(random_choice(i[:, :15], i[:, :15] + 1, seed=1, **draw), long[:, :, :15])
    assert not torch.equal(random_choice(i, i + 1, seed=2, **draw), long)


def test_random_blocks_are_spread_evenly():
    i = torch.arange(400, 2000)[None]
    chosen = random_choice(i, torch.full((1, 1), 2000), window=1, first=0, heads=4, count=1, seed=0)
    counts = torch.histc(chosen.float(), bins=20, min=0, max=2000)
    assert bool((counts - 320).abs().max() < 6 * sqrt(320))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local", {"window": 40}),
        ("local", {"window": 40, "outside": "pool"}),
        ("strided", {"stride": 40, "merged": True}),
        ("strided", {"stride": 1, "merged": True}),
        ("fixed", {"stride": 40, "columns": 1, "merged": True}),
        ("fixed", {"stride": 3, "columns": 3, "merged": True}),
        ("longformer", {"window": 80, "global_tokens": 0}),
        ("longformer", {"window": 2, "global_tokens": 40}),
        ("longformer", {"window": 80, "global_tokens": 4}),
        ("bigbird", {"block": 4, "window_blocks": 19, "global_blocks": 0, "random_blocks": 0}),
        ("bigbird", {"block": 4, "window_blocks": 1, "global_blocks": 0, "random_blocks": 10}),
        ("bigbird", {"block": 40}),
    ],
)
def test_a_pattern_that_holds_every_pair_is_attention(name, options, causal):
    torch.manual_seed(0)
    mixer = build_mixer(name, 8, heads=2, causal=causal, **options).double()
    plain = build_mixer("attention", 8, heads=2, causal=causal).double()
    plain.load_state_dict({k: v for k, v in mixer.state_dict().items() if "global" not in k})
    x = qkv(37)[0]
    same(mixer(x), plain(x))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("T", [1, 5, 31, 64, 150])
def test_blocks_equal_the_dense_form(name, T):
    torch.manual_seed(0)
    x = qkv(T, 16)[0]
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, : T // 4], mask[1, 2 * T // 3 :], mask[1, T // 2] = False, False, False
    for causal in (False, True) if name in CAUSAL else (False,):
        mixer = build_mixer(name, 16, heads=4, causal=causal, **PATTERNS[name]).double()
        for key_mask in (None, mask):
            places = torch.arange(T).expand(2, T) - (0 if key_mask is None else torch.tensor([[T // 4], [0]]))
            live = torch.ones_like(mask) if key_mask is None else mask
            same(mixer(x, key_mask=key_mask)[live], mixer(x, key_mask=key_mask, positions=places.clamp_min(0))[live])


class TestPool:
    def test_queries_of_zero_give_the_mean_of_all(self):
        q, k, v = qkv(30)
        y = functional.local(0 * q, k, v, window=4, heads=2, outside="pool", causal=True)
        same(y, functional.aft_simple(q, 0 * k, v, gate=None, causal=True))
        same(functional.local(0 * q, k, v, window=4, heads=2, outside="pool"), v.mean(1, keepdim=True).expand_as(v))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("size", [1e4, -1e4])
    def test_logits_of_ten_thousand(self, causal, size):
        q, k, v = (torch.ones(1, 50, 1), size * torch.rand(1, 50, 1).add(0.1), torch.randn(1, 50, 1))
        y = functional.local(q, k, v, window=4, heads=1, outside="pool", causal=causal)
        mask = torch.ones(1, 50, 50, dtype=torch.bool).tril() if causal else None
        want = reference.local(q.double(), k.double(), v.double(), window=4, heads=1, outside="pool", mask=mask)
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)

    def test_only_far_tokens_left_give_their_mean(self):
        q, k, v = qkv(20)
        mask = torch.zeros(2, 20, dtype=torch.bool)
        mask[:, :3] = True
        y = functional.local(q, k, v, window=4, heads=2, outside="pool", causal=True, key_mask=mask)
        same(y[:, 10], v[:, :3].mean(1))

    def test_state_is_constant(self):
        for outside in ("none", "pool"):
            mixer = build_mixer("local", 8, causal=True, window=5, heads=2, outside=outside)
            state, sizes = mixer.init_state(2), set()
            for n in (1, 3, 300, 70):
                _, state = mixer.extend(torch.randn(2, n, 8), state)
                sizes.add(state_bytes(state))
            assert len(sizes) == 1


class TestNoLeak:
    """Hugging Face's BigBird in block-sparse form as a decoder changes past logits by 14 %."""

    @pytest.mark.parametrize("name", CAUSAL)
    @pytest.mark.parametrize("p", [1, 17, 40, 100, 149])
    def test_the_future_at_ten_thousand(self, name, p):
        torch.manual_seed(0)
        mixer = build_mixer(name, 16, heads=4, causal=True, **PATTERNS[name])
        x = torch.randn(2, 150, 16)
        other = torch.cat([x[:, :p], 1e4 * torch.randn(2, 150 - p, 16)], 1)
        past, changed = mixer(x)[:, :p].detach(), mixer(other).detach()
        assert float((changed[:, :p] - past).abs().max() / past.abs().max()) <= 1e-6
        assert float((changed[:, p:] - mixer(x)[:, p:]).abs().max()) > 1e-2

    @pytest.mark.parametrize("name", CAUSAL)
    def test_more_tokens_do_not_change_the_past(self, name):
        torch.manual_seed(0)
        mixer = build_mixer(name, 16, heads=4, causal=True, **PATTERNS[name]).double()
        x = torch.randn(1, 300, 16, dtype=torch.float64)
        same(mixer(x)[:, :130], mixer(x[:, :130]))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor made inside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


def measured(name: str, T: int, causal: bool, heads: int = 4, **options) -> tuple[int, int, int]:
    """FLOPs beside the projections, bytes kept for backward and the largest tensor of a forward pass."""
    mixer = build_mixer(name, 16, heads=heads, causal=causal, **options)
    x, kept = torch.randn(1, T, 16), {}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(x)

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Largest() as largest:
        y = mixer(x)
    del y
    return counter.get_total_flops() - mixer.cost(T).projections, sum(kept.values()), largest.numel


@pytest.mark.parametrize(
    ("name", "causal"),
    [(name, causal) for name in PATTERNS for causal in (False, True) if not (causal and name == "etc")],
)
def test_cost_grows_as_declared(name, causal):
    """Linear in T; T sqrt T for the Sparse Transformer with stride = sqrt(T). Nothing is ever as large as T x T."""
    found = []
    for T in (576, 1156, 2304):
        options = {**PATTERNS[name], **({"stride": round(sqrt(T))} if name in ("strided", "fixed") else {})}
        found.append(measured(name, T, causal, **options))
        assert found[-1][2] < 4 * T * T / (6 if T > 2000 else 2), "a tensor of heads x T x T elements or near it"
    growth = sqrt(2) if name in ("strided", "fixed") else 1.0
    for one, two, times in ((0, 1, 1156 / 576), (1, 2, 2304 / 1156)):
        flops, kept, _ = (b / a for a, b in zip(found[one], found[two], strict=True))
        assert flops <= times * growth * 1.1
        assert kept <= times * growth * 1.1


class TestParameters:
    def test_global_projections_start_equal(self):
        mixer = build_mixer("longformer", 16, heads=2)
        assert torch.equal(mixer.q_global.weight, mixer.q_proj.weight)
        assert mixer.q_global.weight.data_ptr() != mixer.q_proj.weight.data_ptr()

    @pytest.mark.parametrize(
        ("name", "maps"), [("local", 4), ("strided", 4), ("fixed", 4), ("bigbird", 4), ("longformer", 7), ("etc", 7)]
    )
    def test_counts(self, name, maps):
        assert sum(p.numel() for p in build_mixer(name, 16, heads=2).parameters()) == maps * (16 * 16 + 16)


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("local", {"window": 0}, "window"),
        ("local", {"outside": "zero"}, "outside"),
        ("local", {"heads": 3}, "heads"),
        ("strided", {"heads": 1}, "merged"),
        ("strided", {"stride": 0}, "stride"),
        ("fixed", {"heads": 1}, "merged"),
        ("fixed", {"columns": 33}, "columns"),
        ("longformer", {"window": 3}, "even"),
        ("longformer", {"dilation": [1, 2]}, "dilation"),
        ("longformer", {"dilation": 0}, "dilation"),
        ("etc", {"global_tokens": 0}, "global_tokens"),
        ("etc", {"causal": True}, "causal"),
        ("bigbird", {"window_blocks": 2}, "odd"),
        ("bigbird", {"block": 0}, "block"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, word):
    with pytest.raises(MixerError, match=word):
        build_mixer(name, 16, **options)


def test_functional_forms_refuse_what_does_not_fit():
    q, k, v = qkv(6)
    for call in (
        lambda: functional.local(q, k, v, window=2, heads=3),
        lambda: functional.local(q, k, v, window=2, heads=2, outside="all"),
        lambda: contrib.strided(q, k[:, :4], v[:, :4], stride=2, heads=2),
        lambda: contrib.strided(q, k, v, stride=2, heads=1),
        lambda: contrib.fixed(q, k, v, stride=2, columns=3, heads=2),
        lambda: contrib.longformer(q, k, v, q, k, v, reach=1, dilation=[1], global_tokens=1, heads=2),
        lambda: contrib.bigbird(q, k, v, block=2, window_blocks=2, random_blocks=1, global_blocks=1, seed=0, heads=2),
    ):
        with pytest.raises(MixerError):
            call()


def test_etc_rows_see_their_radius_and_the_global_tokens():
    """Long rows: the global tokens and those within the radius; global rows: everything."""
    torch.manual_seed(0)
    mixer, x = (
        build_mixer("etc", 8, heads=2, radius=2, global_tokens=3).double(),
        torch.randn(1, 12, 8, dtype=torch.float64),
    )
    for s in range(12):
        other = x.clone()
        other[0, s] = torch.randn(8, dtype=torch.float64)
        reached = (mixer(other) - mixer(x))[0].detach().abs().amax(-1) > 1e-9
        assert reached.tolist() == [t < 3 or s < 3 or abs(t - s) <= 2 for t in range(12)]
