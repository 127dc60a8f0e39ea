"""The effective attention of a mixer is the operator its output really is."""

from __future__ import annotations

import pytest
import torch

from cases import CASES, GRIDS, forms
from tokenmix import MixerError, build_mixer
from tokenmix.lab.report.pictures import attention_pictures, effective_attention

DIM, T = 8, 9


def built(case: str, causal: bool):
    name, options = CASES[case]
    torch.manual_seed(3)
    mixer = build_mixer(name, DIM, **options, causal=causal).double().eval()
    given = {"grid": GRIDS[case][0], "prefix": GRIDS[case][1]} if case in GRIDS else {}
    n = T if case not in GRIDS else GRIDS[case][1] + torch.Size(GRIDS[case][0]).numel()
    return mixer, torch.randn(1, n, DIM, dtype=torch.float64), given


def test_softmax_attention_gives_its_own_weights():
    mixer, x, _ = built("attention", True)
    q, k = (proj(x).unflatten(-1, (2, -1)).transpose(1, 2) for proj in (mixer.q_proj, mixer.k_proj))
    logits = (q @ k.transpose(-1, -2) / 2.0).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    found = effective_attention(mixer, x)
    assert found.kind == "values"
    torch.testing.assert_close(found.weights, logits.softmax(-1)[0])


def test_aft_rows_sum_to_the_gate():
    for case in ("aft_full", "aft_local-3", "aft_simple", "aft_conv"):
        mixer, x, _ = built(case, True)
        found = effective_attention(mixer, x)
        assert found.kind == "values"
        torch.testing.assert_close(
            found.weights.sum(-1).T[None], torch.sigmoid(mixer.q_proj(x)).expand(1, T, DIM)[..., : len(found.weights)]
        )


@pytest.mark.parametrize(("case", "causal"), forms())
def test_every_mixer_has_one_and_it_keeps_to_causality(case, causal):
    mixer, x, given = built(case, causal)
    weights, kind = effective_attention(mixer, x, **given)
    assert weights.isfinite().all()
    assert bool((weights != 0).any())
    assert kind in ("values", "jacobian")
    if causal:
        assert float(weights.triu(1).abs().max()) == 0.0


def test_jacobian_agrees_with_finite_differences():
    from tokenmix.lab.report.pictures import _by_jacobian

    mixer, x, _ = built("aft_simple", True)
    found, step = _by_jacobian(mixer, x, None, {}), 1e-6
    for s in (0, 4):
        for t in (4, 8):
            columns = []
            for c in range(DIM):
                wiggle = torch.zeros_like(x)
                wiggle[0, s, c] = step
                columns.append((mixer(x + wiggle)[0, t] - mixer(x - wiggle)[0, t]) / (2 * step))
            torch.testing.assert_close(found[t, s], torch.stack(columns).norm(), rtol=1e-5, atol=1e-8)


def test_jacobian_is_the_same_in_pieces(monkeypatch):
    from tokenmix.lab.report import pictures

    mixer, x, _ = built("aft_forget", True)
    whole = pictures._by_jacobian(mixer, x, None, {})
    monkeypatch.setattr(pictures, "COPIES", 3)
    torch.testing.assert_close(pictures._by_jacobian(mixer, x, None, {}), whole, rtol=1e-12, atol=1e-14)
    full = torch.autograd.functional.jacobian(mixer, x)[0, :, :, 0]
    torch.testing.assert_close(whole, full.square().sum((1, 3)).sqrt(), rtol=1e-12, atol=1e-14)


def test_context_and_masks():
    mixer, x, _ = built("attention", False)
    context = torch.randn(1, 5, DIM, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True, False]])
    weights, _ = effective_attention(mixer, x, context, key_mask=mask)
    assert weights.shape == (2, T, 5)
    assert float(weights[..., ~mask[0]].abs().max()) == 0.0
    with pytest.raises(MixerError, match="one sequence"):
        effective_attention(mixer, x.expand(2, -1, -1))


def test_pictures_of_a_model():
    from tokenmix.models import LMConfig, build_model

    model = build_model(
        LMConfig(dim=16, max_len=32, mixers=({"name": "attention", "heads": 2}, {"name": "aft_simple"}))
    ).eval()
    pictures = attention_pictures("run", model, b"some text that is long enough to be cut at the model's length")
    assert [p.caption.split(":")[0] for p in pictures] == ["run, layer 0", "run, layer 1"]
    assert "2 heads" in pictures[0].caption
    assert "16 channels" in pictures[1].caption
