"""Test the Synthesizer family.

The paper's parameter counts, the equalities between its members, and the faults of public copies that ours must not
have.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tokenmix import MIXERS, MixerError, build_mixer, functional
from tokenmix.functional.synthesizer import LOGITS, dense_logits, factorized_dense_logits, factorized_random_logits
from tokenmix.lab.papers.counts import in_t5
from tokenmix.mixers import Inputs

SINGLE = ("synthesizer_dense", "synthesizer_random", "synthesizer_factorized_dense", "synthesizer_factorized_random")
EVERY = (*SINGLE, "synthesizer_mixture")
D, H, N = 16, 4, 12


def count(mixer) -> int:
    return sum(p.numel() for p in mixer.parameters())


def logits_of(mixer, x):
    """The logits (.., H, T, T) of a mixer with one kind of them, from its own tables."""
    T, tables = x.shape[1], mixer.logits()
    name = next(n for n, cls in MIXERS.items() if type(mixer) is cls).removeprefix("synthesizer_")
    return LOGITS[name](mixer.q_proj(x) if hasattr(mixer, "q_proj") else x, tables, T, T)


def weights_of(mixer, x, **given):
    """What each query gives each key in head h, (B, T, S, H): the form applied to one-hot values."""
    T = x.shape[1]
    args, options = mixer.functional_args(Inputs(x, **given))
    at = 0 if "random" in type(mixer).__name__.lower() else 2 if len(args) > 3 else 1
    v = torch.eye(T, dtype=x.dtype).repeat(1, mixer.heads).expand(x.shape[0], T, -1)
    form = next(getattr(functional, n) for n, cls in MIXERS.items() if type(mixer) is cls)
    return form(*args[:at], v, *args[at + 1 :], **options).unflatten(-1, (mixer.heads, T)).permute(0, 1, 3, 2)


# Parameter counts


NO_BIAS = {"qkv_bias": False, "out_bias": False}
T5, WMT = {"max_len": 512, "heads": 8, "head_dim": 128, **NO_BIAS}, {"max_len": 256, "heads": 8, **NO_BIAS}
DENSE, PLUS = {"share_heads": True, "bias": False}, {"join": "plus", "scale": 1.0}
T5_ROWS = [
    ("random", "synthesizer_random", {}, 254, 254.5),
    ("random plus", "synthesizer_mixture", {"parts": ["attention", "random"], **PLUS}, 292, 292.2),
    (
        "random plus alpha",
        "synthesizer_mixture",
        {"parts": ["attention", "random"], **PLUS, "join": "gated"},
        292,
        292.2,
    ),
    ("dense", "synthesizer_dense", DENSE, 224, 224.6),
    ("dense plus", "synthesizer_mixture", {"parts": ["attention", "dense"], **DENSE, **PLUS}, 243, 243.4),
    (
        "dense plus alpha",
        "synthesizer_mixture",
        {"parts": ["attention", "dense"], **DENSE, **PLUS, "join": "gated"},
        243,
        243.4,
    ),
    ("factorized", "synthesizer_factorized_random", {"rank": 16}, 207, 207.3),
]


@pytest.mark.parametrize(
    ("row", "name", "options", "printed", "closer"), T5_ROWS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_parameters_in_the_t5_base_shell(row, name, options, printed, closer):
    """Build T5-base with a Synthesizer in its 24 self-attention layers: it counts as Narang et al. 2021 print it.

    ``closer`` starts from a rounded 223M.
    """
    total = in_t5(name, **T5, **options)
    assert round(total) == printed or int(total) == printed
    assert total == pytest.approx(closer, abs=0.2)


def test_t5_base_itself_has_its_printed_size():
    assert round(in_t5("attention", heads=12, bias={"name": "t5"}, **NO_BIAS)) == 223


def test_a_dense_map_per_head_would_not_give_the_printed_count():
    assert in_t5("synthesizer_dense", **T5, bias=False) == pytest.approx(235.6, abs=0.2)


WMT_ROWS = [
    ("Fix", "synthesizer_random", {"trainable": False}, 60.7, 61),
    ("R", "synthesizer_random", {}, 67.0, 67),
    ("D", "synthesizer_dense", {"hidden": 0, "bias": False}, 62.3, 62),
    ("R+V", "synthesizer_mixture", {"parts": ["random", "attention"]}, 73.3, 73),
    ("D+V with W1 = W_Q", "synthesizer_mixture", {"parts": ["dense", "attention"], "bias": False}, 68.6, None),
]


@pytest.mark.parametrize(
    ("row", "name", "options", "closer", "printed"), WMT_ROWS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_parameters_in_the_wmt_shell(row, name, options, closer, printed):
    """Replace the 12 self-attention layers of the base Transformer's 67M, 8 heads, N = 256.

    The paper's 62M for D leaves no room for W1 (65.4M).
    """
    with torch.device("meta"):
        layer, vanilla = (
            build_mixer(name, 512, **WMT, **options),
            build_mixer("attention", 512, qkv_bias=False, out_bias=False),
        )
    total = 67.0e6 + 12 * (count(layer) - count(vanilla))
    assert total / 1e6 == pytest.approx(closer, abs=0.06)
    assert printed is None or round(total / 1e6) == printed


def test_parameters_of_the_logits_are_those_of_the_paper():
    """Check Table 1: N^2, 2 N k, d^2 + d N, d^2 + d (a + b), beside values and output.

    The tables that ignore heads are for one head.
    """
    d, n, k, a = 1024, 32, 8, 8
    beside = 2 * d * d
    bare = {"max_len": n, "qkv_bias": False, "out_bias": False}
    for heads in (1, 8):
        assert (
            count(build_mixer("synthesizer_dense", d, heads=heads, bias=False, **bare)) - beside
            == d * d + d * n
            == 1_081_344
        )
        got = count(build_mixer("synthesizer_factorized_dense", d, heads=heads, factor=a, bias=False, **bare)) - beside
        assert got == d * d + d * (a + n // a)
    assert count(build_mixer("synthesizer_random", d, heads=8, share_heads=True, **bare)) - beside == n * n
    assert count(build_mixer("synthesizer_random", d, heads=8, **bare)) - beside == 8 * n * n
    assert (
        count(build_mixer("synthesizer_factorized_random", d, heads=8, share_heads=True, rank=k, **bare)) - beside
        == 2 * n * k
    )


# Faults of public copies


@pytest.mark.parametrize(("n", "factor"), [(32, 4), (30, None), (197, None), (30, 4), (7, 50), (13, 1)])
def test_all_factorised_logits_are_distinct(n, factor):
    """Tiling (or repeating) both factors leaves 8 distinct logits of 32, and 28 of 197 in public copies."""
    torch.manual_seed(0)
    mixer = build_mixer("synthesizer_factorized_dense", 64, max_len=n, heads=H, hidden=32, factor=factor).double()
    x = torch.randn(2, n, 64, dtype=torch.float64)
    logits = logits_of(mixer, x)
    assert logits.shape == (2, H, n, n)
    assert all(row.unique().numel() == n for row in logits.flatten(0, 2))
    q, tables = mixer.q_proj(x), mixer.logits()
    places = torch.arange(n).flip(0).expand(2, n)
    assert torch.equal(factorized_dense_logits(q, tables, n, places), logits.flip(-1))
    hidden = q.unflatten(-1, (H, -1)).relu()
    A, B = (torch.einsum("bthe,hen->bhtn", hidden, tables[i]) + tables[i + 2][:, None] for i in (0, 1))
    for j in range(n):
        torch.testing.assert_close(logits[..., j], A[..., j % A.shape[-1]] * B[..., j // A.shape[-1]])


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("causal", [False, True])
def test_weights_are_a_softmax(name, causal):
    """Non-negative and of sum 1 in each row; a public random form forgets the softmax."""
    mixer = build_mixer(name, D, max_len=N, heads=H, causal=causal).double()
    for T in (1, 7, N):
        for mask in (None, torch.rand(3, T) < 0.6):
            weights = weights_of(mixer, torch.randn(3, T, D, dtype=torch.float64), key_mask=mask)
            assert bool((weights >= 0).all())
            some = torch.ones(3, T, T, dtype=torch.bool).tril(0 if causal else T)
            some = (some if mask is None else some & mask[:, None]).any(-1)
            torch.testing.assert_close(weights.sum(2), some[..., None].expand(3, T, H).double())


@pytest.mark.parametrize("name", SINGLE)
def test_what_the_logits_depend_on(name):
    """Check what the weights depend on: random ones on no input at all, dense ones on the query's own token alone.

    A public random one is a dot product of rank 8.
    """
    mixer = build_mixer(name, D, max_len=N, heads=H).double()
    x = torch.randn(1, N, D, dtype=torch.float64)
    other = x.clone()
    other[:, 3] = torch.randn(D, dtype=torch.float64)
    differ = (weights_of(mixer, x) - weights_of(mixer, other)).abs().amax((0, 2, 3)) > 1e-9
    assert differ.tolist() == [t == 3 and "dense" in name for t in range(N)]


@pytest.mark.parametrize("name", EVERY)
def test_tables_are_parameters_of_any_batch_and_length(name):
    """Public random tables are no parameters, are not saved, and hold the batch size."""
    mixer = build_mixer(name, D, max_len=N, heads=H)
    tables = {n for n, _ in mixer.named_parameters() if "proj" not in n and n != "alpha"}
    assert tables
    assert tables <= set(mixer.state_dict())
    for batch, T in ((3, N), (2, 5), (1, 1)):
        mixer.zero_grad()
        mixer(torch.randn(batch, T, D)).square().sum().backward()
        assert all(p.grad is not None for p in mixer.parameters())
    with pytest.raises(MixerError, match="max_len=12"):
        mixer(torch.randn(1, N + 1, D))


def test_factorised_random_rows_differ_and_have_rank_k():
    """In the official code the product lacks the axis of queries, so that every row would be the same."""
    mixer = build_mixer("synthesizer_factorized_random", D, max_len=40, heads=H, rank=5).double()
    logits = logits_of(mixer, torch.randn(1, 40, D, dtype=torch.float64))
    assert torch.linalg.matrix_rank(logits).tolist() == [5] * H
    assert float(logits.detach().std(1).min()) > 1e-3


@pytest.mark.parametrize("name", SINGLE)
def test_starts_near_uniform(name):
    """Check that ours start near the mean.

    Factors drawn from N(0, 1) give logits of deviation 2.8 and weights near one-hot (0.33 at the largest).
    """
    torch.manual_seed(0)
    n = 197
    mixer = build_mixer(name, 64, max_len=n, heads=4)
    x = torch.randn(2, n, 64)
    assert 1e-4 < float(logits_of(mixer, x).detach().std()) < 0.4
    assert float(weights_of(mixer, x).detach().amax(2).mean()) < 3 / n
    if name == "synthesizer_factorized_random":
        assert float(logits_of(mixer, x).detach().std()) == pytest.approx(0.02, rel=0.1)


def test_frozen_table_is_saved_drawn_again_and_never_trained():
    torch.manual_seed(3)
    mixer = build_mixer("synthesizer_random", D, max_len=N, heads=H, trainable=False)
    assert "logits.weight" in mixer.state_dict()
    assert "logits.weight" not in dict(mixer.named_parameters())
    assert count(mixer) == 2 * D * (D + 1)
    before = mixer.logits.weight.clone()
    assert float(before.std()) == pytest.approx(1.0, rel=0.2)
    optimiser = torch.optim.SGD(mixer.parameters(), lr=0.1)
    mixer(torch.randn(2, N, D)).square().sum().backward()
    optimiser.step()
    assert torch.equal(mixer.logits.weight, before)
    torch.manual_seed(3)
    mixer.reset_parameters()
    assert torch.equal(mixer.logits.weight, before)


def test_random_logits_are_not_repeated_for_the_batch():
    """Without masks of single rows the weights are kept once, whatever the batch."""
    T, largest = 64, []
    for batch in (1, 16):
        mixer, kept = build_mixer("synthesizer_random", D, max_len=T, heads=H, causal=True), []

        def keep(t, kept=kept):
            if t.shape[-2:] == (T, T):
                kept.append(t.untyped_storage().nbytes())
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            mixer(torch.randn(batch, T, D))
        largest.append(max(kept))
    assert largest[0] == largest[1] == 4 * H * T * T


# Equalities


def twin(a, b, **names):
    """Copy the parameters of b into those of a of the same name, or of the name given."""
    theirs = dict(b.named_parameters())
    with torch.no_grad():
        for n, p in a.named_parameters():
            source = names.get(n.split(".")[0], n.split(".")[0]) + n[len(n.split(".")[0]) :]
            if source in theirs:
                p.copy_(theirs[source])
    return a


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("causal", [False, True])
def test_mixture_of_one_part_is_that_part(name, causal):
    part = name.removeprefix("synthesizer_")
    one = build_mixer(name, D, max_len=N, heads=H, causal=causal).double()
    x, mask = torch.randn(2, N, D, dtype=torch.float64), torch.rand(2, N) < 0.7
    for join in ("softmax", "plus"):
        mixture = twin(
            build_mixer("synthesizer_mixture", D, max_len=N, heads=H, causal=causal, parts=[part], join=join).double(),
            one,
            **{part: "logits"},
        )
        torch.testing.assert_close(mixture(x, key_mask=mask), one(x, key_mask=mask))
    heavy = twin(
        build_mixer("synthesizer_mixture", D, max_len=N, heads=H, causal=causal, parts=["attention", part]).double(),
        one,
        **{part: "logits"},
    )
    with torch.no_grad():
        heavy.alpha.copy_(torch.tensor([-1e3, 0.0]))
    torch.testing.assert_close(heavy(x), one(x))


@pytest.mark.parametrize("causal", [False, True])
def test_mixture_of_attention_alone_is_attention(causal):
    attention = build_mixer("attention", D, heads=H, causal=causal).double()
    x = torch.randn(2, N, D, dtype=torch.float64)
    mixture = twin(
        build_mixer("synthesizer_mixture", D, max_len=N, heads=H, causal=causal, parts=["attention"]).double(),
        attention,
    )
    torch.testing.assert_close(mixture(x), attention(x))
    gated = twin(
        build_mixer("synthesizer_mixture", D, max_len=N, heads=H, causal=causal, join="gated").double(), attention
    )
    with torch.no_grad():
        gated.alpha.fill_(-1e3)
    torch.testing.assert_close(gated(x), attention(x))


def test_sum_of_random_and_attention_is_attention_with_a_bias():
    """Compare with torch's own kernel with R as its additive mask.

    Nothing divides R by sqrt(d), and ``scale`` touches attention only.
    """
    x = torch.randn(2, N, D, dtype=torch.float64)
    for scale, factor in ((None, (D // H) ** -0.5), (1.0, 1.0)):
        mixer = build_mixer(
            "synthesizer_mixture", D, max_len=N + 3, heads=H, join="plus", scale=scale, init_std=1.0
        ).double()
        q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mixer.random.weight[:, :N, :N], scale=factor)
        torch.testing.assert_close(mixer(x), mixer.out_proj(y.transpose(1, 2).flatten(2)))


def test_mixture_joins_logits_and_not_weights():
    """softmax(sum_i alpha_i S_i), where some copies and summaries have sum_i alpha_i softmax(S_i)."""
    mixer = build_mixer(
        "synthesizer_mixture", D, max_len=N, heads=H, parts=["random", "factorized_random"], init_std=2.0
    ).double()
    with torch.no_grad():
        mixer.alpha.copy_(torch.tensor([0.3, -0.8]))
    x = torch.randn(1, N, D, dtype=torch.float64)
    a, (r1, r2) = mixer.alpha.detach().softmax(0), mixer.factorized_random()
    each = mixer.random.weight.detach(), (r1 @ r2.mT).detach()
    got = weights_of(mixer, x)[0].permute(2, 0, 1).detach()
    torch.testing.assert_close(got, (a[0] * each[0] + a[1] * each[1]).softmax(-1))
    assert float((got - a[0] * each[0].softmax(-1) - a[1] * each[1].softmax(-1)).abs().max()) > 1e-2


def test_learned_weights_start_equal_and_sum_to_one():
    mixer = build_mixer("synthesizer_mixture", D, max_len=N, heads=H, parts=["attention", "dense", "random"])
    assert mixer.alpha.shape == (3,)
    assert not mixer.alpha.any()
    gated = build_mixer("synthesizer_mixture", D, max_len=N, heads=H, join="gated")
    assert gated.alpha.shape == (1,)
    assert float(gated.alpha.detach().sigmoid()) == 0.5
    plus = twin(build_mixer("synthesizer_mixture", D, max_len=N, heads=H, join="plus").double(), gated.double())
    assert plus.alpha is None
    with torch.no_grad():
        for p in (plus.q_proj.weight, plus.q_proj.bias, plus.random.weight):
            p.mul_(0.5)
    x = torch.randn(2, N, D, dtype=torch.float64)
    torch.testing.assert_close(gated(x), plus(x))


def test_factorised_forms_contain_the_plain_ones():
    """Check the equalities: R1 R2^T with R2 = I is R; A of N numbers times B = 1 is the dense row.

    W2 = 0 leaves a random form whose rows are equal.
    """
    v, r = torch.randn(2, N, D, dtype=torch.float64), torch.randn(H, N, N, dtype=torch.float64)
    eye = torch.eye(N, dtype=torch.float64).expand(H, N, N)
    torch.testing.assert_close(
        functional.synthesizer_factorized_random(v, (r, eye)), functional.synthesizer_random(v, r)
    )
    q, w, b = (
        torch.randn_like(v),
        torch.randn(H, D // H, N, dtype=torch.float64),
        torch.randn(H, N, dtype=torch.float64),
    )
    one = torch.ones(H, 1, dtype=torch.float64)
    torch.testing.assert_close(
        functional.synthesizer_factorized_dense(q, v, (w, 0 * w[..., :1], b, one), causal=True),
        functional.synthesizer_dense(q, v, (w, b), causal=True),
    )
    torch.testing.assert_close(
        functional.synthesizer_dense(q, v, (0 * w, b)), functional.synthesizer_random(v, b[:, None].expand(H, N, N))
    )


def test_one_table_for_all_heads_is_that_table_in_every_head():
    v, q, w = torch.randn(2, N, D), torch.randn(2, N, D), torch.randn(1, D // H, N)
    torch.testing.assert_close(
        functional.synthesizer_dense(q, v, (w,)), functional.synthesizer_dense(q, v, (w.repeat(H, 1, 1),))
    )
    r = torch.randn(1, N, N)
    torch.testing.assert_close(functional.synthesizer_random(v, r), functional.synthesizer_random(v, r.repeat(H, 1, 1)))


def test_a_step_of_decoding_reads_one_row_of_the_table():
    mixer = build_mixer("synthesizer_random", D, max_len=N, heads=H, causal=True, init_std=1.0).double()
    x = torch.randn(1, N, D, dtype=torch.float64)
    _, state = mixer.extend(x[:, :7], mixer.init_state(1))
    y, _ = mixer.extend(x[:, 7:8], state)
    v = mixer.v_proj(x[:, :8]).unflatten(-1, (H, -1))
    want = torch.einsum("hs,bshe->bhe", mixer.logits.weight[:, 7, :8].softmax(-1), v).flatten(1)
    torch.testing.assert_close(y[:, 0], mixer.out_proj(want))


def test_dense_without_a_first_layer_reads_each_heads_features():
    mixer = build_mixer("synthesizer_dense", D, max_len=N, heads=H, hidden=0).double()
    x = torch.randn(2, N, D, dtype=torch.float64)
    want = torch.einsum("bthe,hen->bhtn", x.unflatten(-1, (H, -1)), mixer.logits.weight) + mixer.logits.bias[:, None]
    assert mixer.q_proj is None
    torch.testing.assert_close(mixer(x), mixer.out_proj(functional.synthesize(want, mixer.v_proj(x))))
    assert float((dense_logits(x, mixer.logits(), N, N) - want).abs().max()) > 0.01


# Lengths and refusals


@pytest.mark.parametrize("name", EVERY)
def test_resize(name):
    """To the same length nothing changes; to another one, lengths fit and numbers are interpolated."""
    options = (
        {"parts": ["attention", "dense", "random", "factorized_dense", "factorized_random"]}
        if name.endswith("mixture")
        else {}
    )
    mixer = build_mixer(name, D, max_len=N, heads=H, causal=True, **options).double()
    x = torch.randn(2, N, D, dtype=torch.float64)
    want = mixer(x)
    mixer.resize(N)
    torch.testing.assert_close(mixer(x), want)
    fewer = {n: p.shape for n, p in mixer.named_parameters()}
    mixer.resize(3 * N)
    assert mixer.max_len == 3 * N
    assert mixer(torch.randn(1, 3 * N, D, dtype=torch.float64)).isfinite().all()
    mixer(x).sum().backward()
    fresh = build_mixer(
        name,
        D,
        max_len=3 * N,
        heads=H,
        **{**options, **({"factor": 3} if "factorized_dense" in name or options else {})},
    )
    assert {n: p.shape for n, p in mixer.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert {n: p.shape for n, p in mixer.named_parameters()} != fewer
    with pytest.raises(MixerError, match="resize"):
        mixer.resize(0)


def test_resize_keeps_a_ramp_and_a_frozen_table():
    mixer = build_mixer("synthesizer_random", D, max_len=8, heads=2, trainable=False)
    ramp = torch.arange(8.0)
    mixer.logits.weight.copy_(ramp[:, None] * 10 + ramp)
    mixer.resize(16)
    assert "logits.weight" in dict(mixer.named_buffers())
    assert mixer.logits.weight.shape == (2, 16, 16)
    inner = mixer.logits.weight[0, 1:-1, 1:-1]
    torch.testing.assert_close(inner.diff(dim=0), torch.full_like(inner[1:], 5.0))
    torch.testing.assert_close(inner.diff(dim=1), torch.full_like(inner[:, 1:], 0.5))


@pytest.mark.parametrize("name", EVERY)
def test_a_context_is_refused(name):
    mixer = build_mixer(name, D, max_len=N, heads=H)
    assert not mixer.capabilities.context
    with pytest.raises(MixerError, match="takes no context"):
        mixer(torch.randn(1, 4, D), torch.randn(1, 5, D))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("synthesizer_dense", {"heads": 3}, "heads=3"),
        ("synthesizer_dense", {"hidden": -1}, "hidden"),
        ("synthesizer_dense", {"heads": 3, "head_dim": 4, "hidden": 0}, "hidden"),
        ("synthesizer_random", {"head_dim": 0}, "head_dim"),
        ("synthesizer_random", {"init_std": 0.0}, "init_std"),
        ("synthesizer_factorized_dense", {"factor": 0}, "factor"),
        ("synthesizer_factorized_dense", {"hidden": 0}, "hidden"),
        ("synthesizer_factorized_random", {"rank": 1.5}, "rank"),
        ("synthesizer_mixture", {"parts": []}, "parts"),
        ("synthesizer_mixture", {"parts": ["dense", "dense"]}, "parts"),
        ("synthesizer_mixture", {"parts": ["sparse"]}, "parts"),
        ("synthesizer_mixture", {"join": "product"}, "join"),
        ("synthesizer_mixture", {"join": "gated", "parts": ["dense", "random"]}, "gated"),
        ("synthesizer_mixture", {"join": "plus", "alpha_per_head": True}, "learns no alpha"),
    ],
)
def test_wrong_options_are_refused(name, options, said):
    with pytest.raises(MixerError, match=said):
        build_mixer(name, D, **{"max_len": N, "heads": H, **options})


def test_wrong_arguments_of_the_forms_are_refused():
    v = torch.randn(1, 5, 8)
    for call in (
        lambda: functional.synthesize(torch.zeros(3, 5, 5), v),
        lambda: functional.synthesize(torch.zeros(2, 5, 4), v),
        lambda: functional.synthesizer_random(v, torch.zeros(2, 4, 4)),
        lambda: functional.synthesizer_dense(v, v, (torch.zeros(3, 4, 5),)),
        lambda: functional.synthesizer_factorized_dense(v, v, (torch.zeros(2, 4, 2), torch.zeros(2, 4, 2))),
        lambda: functional.synthesizer_mixture(v, v, v, torch.zeros(1), (), (), (), (), parts=["dense"], heads=2),
        lambda: functional.synthesizer_mixture(v, v, v, torch.zeros(2), (), (), (), (), parts=["attention"], heads=2),
        lambda: functional.synthesizer_mixture(
            v, v, v, torch.zeros(3, 1), (), (), (), (), parts=["attention"], heads=2
        ),
    ):
        with pytest.raises(MixerError):
            call()


def test_factors_of_large_logits_stay_finite_in_half_precision():
    """The product of two factors of 1e3 does not fit float16; logits are made in float32."""
    v = torch.randn(1, 6, 8, dtype=torch.float16)
    big = torch.full((2, 6, 3), 400.0, dtype=torch.float16)
    assert factorized_random_logits(v, (big, big), 6, 6).dtype == torch.float32
    assert functional.synthesizer_factorized_random(v, (big, big)).isfinite().all()
