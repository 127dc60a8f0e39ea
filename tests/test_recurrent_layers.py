"""Gated recurrences and LFM2's convolution: equal to the layers of transformers, without what is wrong there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recurrent_layers import OTHERS, PAIRS, copy, copy_low_rank, kimi, lfm, mamba, perturb, qwen
from tokenmix import MixerError, build_mixer
from tokenmix.hosts import convert_layer

pytest.importorskip("transformers", reason="transformers comes with the extra hf")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def tokens(layer: Any, rows: int = 2, length: int = 37) -> torch.Tensor:
    """Draw an input of the width that the layer reads."""
    return torch.randn(rows, length, layer.dim, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [*PAIRS, *OTHERS])
def test_layers_equal_those_of_transformers(name):
    """With the weights that ``convert_layer`` takes over."""
    theirs, ours = {**PAIRS, **OTHERS}[name]()
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    x = tokens(ours)
    want = theirs(x)
    assert float(want.detach().abs().max()) > 0.05
    torch.testing.assert_close(ours(x), want, **CLOSE)


def test_converted_layers_keep_dtypes_and_share_no_memory():
    theirs, _ = kimi()
    theirs.to(torch.bfloat16)
    theirs.forget_gate.A_log.data = theirs.forget_gate.A_log.data.float()
    ours = convert_layer(theirs)
    assert (ours.A_log.dtype, ours.q_proj.weight.dtype) == (torch.float32, torch.bfloat16)
    assert all(p.requires_grad and p.is_contiguous() for p in ours.parameters())
    before = {name: p.clone() for name, p in ours.named_parameters()}
    with torch.no_grad():
        for p in theirs.parameters():
            p.zero_()
    assert all(torch.equal(p, before[name]) for name, p in ours.named_parameters())


def spoil(build: Any, change: Any) -> Any:
    layer = build()[0]
    change(layer)
    return layer


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: torch.nn.Linear(2, 2), "no mixer is known to equal Linear; the layers known are Qwen3NextGatedDelta"),
        (lambda: spoil(qwen, lambda a: setattr(a, "activation", "gelu")), "has the activation 'gelu'"),
        (
            lambda: spoil(qwen, lambda a: a.register_buffer("extra", torch.ones(1))),
            "Qwen3NextGatedDeltaNet has extra, for which gated_delta has no place",
        ),
        (lambda: spoil(kimi, lambda a: delattr(a, "g_a_proj")), "g_proj.down.weight is in one of them only"),
        (
            lambda: spoil(kimi, lambda a: setattr(a.forget_gate, "f_b_proj", torch.nn.Linear(4, 16, bias=False))),
            r"does not fit gated_delta: a_proj.up.weight is \(16, 4\) there",
        ),
        (
            lambda: spoil(mamba, lambda a: setattr(a, "intermediate_size", 24)),
            "has 24 features of values, and mamba2 a multiple of dim=16",
        ),
    ],
)
def test_layers_of_another_family_are_refused_in_one_line(layer, why):
    with pytest.raises(MixerError, match=f"^convert_layer: .*{why}") as said:
        convert_layer(layer())
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("name", PAIRS)
def test_padding_on_the_left_equals_theirs(name):
    """On the left all of them are right: their state is still empty there."""
    theirs, ours = PAIRS[name]()
    x, mask = tokens(ours), torch.ones(2, 37, dtype=torch.bool)
    mask[0, :9] = False
    want = theirs(x, attention_mask=mask)
    torch.testing.assert_close(ours(x, key_mask=mask)[mask], want[mask], **CLOSE)
    torch.testing.assert_close(ours(x[:1, 9:])[0], ours(x, key_mask=mask)[0, 9:], **CLOSE)


@pytest.mark.parametrize("name", PAIRS)
def test_streams_equal_theirs(name):
    theirs, ours = PAIRS[name]()
    x, state = tokens(ours), ours.init_state(2)
    want, parts = theirs(x), []
    for part in x.split([20, 1, 1, 15], 1):
        y, state = ours.extend(part, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), want, **CLOSE)


SIZES = {
    "qwen3_next": (33_718_464, "gated_delta", 2048, {"heads": 16, "value_heads": 32, "head_dim": 128}),
    "kimi_linear": (
        39_514_272,
        "gated_delta",
        2304,
        {"heads": 32, "head_dim": 128, "decay": "feature", "gate": "sigmoid", "gate_rank": 128},
    ),
    "fla_gated_deltanet": (25_215_500, "gated_delta", 2048, {"heads": 6, "head_dim": 256, "value_dim": 512}),
    "fla_kda": (
        17_887_376,
        "gated_delta",
        2048,
        {"heads": 16, "decay": "feature", "gate": "sigmoid", "gate_rank": 128, "gate_bias": True},
    ),
    "fla_deltanet": (4_210_944, "gated_delta", 1024, {"heads": 4, "decay": None, "gate": None}),
    "mamba2_130m": (3_764_552, "mamba2", 768, {"heads": 24}),
}


@pytest.mark.parametrize("name", SIZES)
def test_layers_have_as_many_parameters_as_published_ones(name):
    """The first two are built by transformers from its default configs, the next three are fla's defaults."""
    count, row, dim, options = SIZES[name]
    with torch.device("meta"):
        assert sum(p.numel() for p in build_mixer(row, dim, **options).parameters()) == count
        if name in ("qwen3_next", "kimi_linear"):
            assert sum(p.numel() for p in default_layer(name).parameters()) == count


def default_layer(name: str) -> torch.nn.Module:
    """Build a layer of transformers from the default config of its model."""
    if name == "qwen3_next":
        from transformers.models.qwen3_next import modeling_qwen3_next as hf

        return hf.Qwen3NextGatedDeltaNet(hf.Qwen3NextConfig(), 0)
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

    return kimi_linear.KimiLinearDeltaAttention(kimi_linear.KimiLinearConfig(), 0)


def test_the_gate_of_kimi_has_finite_gradients_here_only():
    """Of softplus(x) = x above 20, else log(1 + exp(x)), the other branch overflows above 88.7 and gives 0 * inf."""
    theirs, ours = kimi()
    with torch.no_grad():
        for bias in (theirs.forget_gate.dt_bias, ours.dt_bias):
            bias[0] = 100.0
    x = tokens(ours)
    theirs(x).sum().backward()
    ours(x).sum().backward()
    assert not bool(theirs.forget_gate.dt_bias.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in ours.parameters())


def test_packed_documents_are_refused_there_and_right_here():
    theirs, ours = qwen()
    x, ends = tokens(ours, 1, 20), torch.tensor([0, 7, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        theirs(x, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    want = torch.cat([theirs(x[:, :7]), theirs(x[:, 7:])], 1)[0]
    torch.testing.assert_close(ours.forward_packed(x[0], ends), want, **CLOSE)


def test_padding_inside_changes_the_state_there_and_not_here():
    """Mamba-2 of transformers lets padding decay the state, so only padding on the left is right."""
    theirs, ours = PAIRS["mamba2"]()
    x, mask = tokens(ours, 1), torch.ones(1, 37, dtype=torch.bool)
    mask[0, 5:20] = False
    positions = torch.cat([torch.arange(5), torch.arange(20, 37)])[None]
    without = ours(x[:, mask[0]], positions=positions)
    torch.testing.assert_close(ours(x, key_mask=mask)[mask], without[0], **CLOSE)
    there = theirs(x, attention_mask=mask).detach()[mask]
    assert float((there - without[0].detach()).abs().max()) > 1e-2


def test_padding_of_a_biased_convolution_counts_there_and_not_here():
    """Masked tokens are set to 0 before a projection whose biases make them b * b again."""
    theirs, ours = lfm(bias=True)
    x, mask = tokens(ours, 1), torch.ones(1, 37, dtype=torch.bool)
    mask[0, :9] = False
    torch.testing.assert_close(ours(x, key_mask=mask)[:, 9:], theirs(x[:, 9:]), **CLOSE)
    assert float((theirs(x, attention_mask=mask)[:, 9:] - theirs(x[:, 9:])).detach().abs().max()) > 1e-2


def test_the_bounded_decay_is_that_of_glm_5():
    from transformers.models.glm5_next import modeling_glm5_next as hf

    config = hf.Glm5NextTextConfig(hidden_size=32, linear_head_dim=8, linear_num_heads=2, linear_lower_bound=-5.0)
    theirs: Any = perturb(hf.Glm5NextTextForgetGate(config))
    options = {"decay": "feature", "gate": "sigmoid", "gate_rank": 8, "lower_bound": -5.0}
    ours: Any = build_mixer("gated_delta", 32, heads=2, head_dim=8, **options)
    copy_low_rank(ours.a_proj, theirs.f_a_proj, theirs.f_b_proj)
    copy(ours.A_log, theirs.A_log)
    copy(ours.dt_bias, theirs.dt_bias)
    x = tokens(ours)
    torch.testing.assert_close(ours.log_decay(x), theirs(x).flatten(2), **CLOSE)


def test_the_page_says_how_fast_hybrids_were_trained():
    root = Path(__file__).parents[1]
    gdn, kda = json.loads((root / "benchmarks/results/hybrid_training.json").read_text())["rows"]
    page = (root / "docs/mixers/recurrence.md").read_text()
    for row, said in ((gdn, "{} times as many tokens a second"), (kda, "and {} times as many in that of Kimi Linear")):
        assert said.format(round(row["ratio_of_least"], 1)) in page
        assert f"({row['parameters'] / 1e6:.1f} million" in page
        assert row["largest_difference_of_losses"] < 2e-6
        assert row["steps"] == 12
