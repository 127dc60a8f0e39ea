"""Segments beyond the contract's promises: who has them, affine transitions, documents, identities, refusals."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import tokenmix
from cases import CASES, FIRST
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.mixers import Facts, register_state
from tokenmix.mixers.segments import Segmented
from tokenmix.parallel import SimWorld
from tokenmix.testing import PROMISES, run_promise, subject

WITH = {
    *("aft_simple", "aft_local", "aft_conv", "aft_forget", "aft_reach", "aft_pairs", "hydra", "multihead_linear"),
    *("polynl", "linear", "performer", "rfa", "external", "external_multihead", "local", "lightconv", "dynamicconv"),
    *("pooling", "image_local", "gated_delta", "mamba2", "short_conv"),
}
NARROWED = {"aft_full-alibi", "lambda-window", "transformer_xl-memory"}


@register_state
class DeltaState(NamedTuple):
    S: torch.Tensor


class DeltaSegment(NamedTuple):
    """S -> M S + b."""

    M: torch.Tensor
    b: torch.Tensor

    def then(self, later):
        return DeltaSegment(later.M @ self.M, later.M @ self.b + later.b)

    def after(self, state):
        return DeltaState(self.M @ state.S + self.b)


class Delta(Segmented):
    """The delta rule: S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, y_t = S_t^T q_t."""

    facts = Facts(causal=True, streaming=True)

    def __init__(self, dim, *, causal=True):
        super().__init__(dim, causal=causal)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.register_module(name, torch.nn.Linear(dim, dim))
        self.b_proj = torch.nn.Linear(dim, 1)

    def _step(self, x, valid, S):
        k, b = torch.nn.functional.normalize(self.k_proj(x), dim=-1), self.b_proj(x).sigmoid()
        outputs, M = [], torch.eye(self.dim, dtype=x.dtype).expand(len(x), -1, -1)
        for t in range(x.shape[1]):
            bk = torch.where(valid[:, t, None], b[:, t] * k[:, t], 0.0)[..., None]
            S = S - bk @ (k[:, t, None] @ S) + bk @ self.v_proj(x[:, t, None])
            M = M - bk @ (k[:, t, None] @ M)
            outputs.append((self.q_proj(x[:, t, None]) @ S)[:, 0])
        return outputs, M, S

    def mix(self, inputs):
        x = inputs.x
        return self.mix_chunk(
            x, self.empty_state(len(x), device=None, dtype=x.dtype), positions=None, key_mask=inputs.key_mask
        )[0]

    def empty_state(self, batch_size, *, device, dtype):
        return DeltaState(torch.zeros(batch_size, self.dim, self.dim, dtype=dtype))

    def mix_chunk(self, x, state, *, positions, key_mask):
        y, _, S = self._step(x, tokenmix.mixers.valid_mask(x, key_mask), state.S)
        return self.out_proj(torch.stack(y, 1)), DeltaState(S)

    def segment(self, x, *, positions=None, key_mask=None, halo=None):
        zero = x.new_zeros(len(x), self.dim, self.dim)
        return DeltaSegment(*self._step(x, tokenmix.mixers.valid_mask(x, key_mask), zero)[1:])


def test_the_laws_hold_for_affine_transitions():
    s = subject(Delta, {"causal": True})
    for promise in ("segments_compose", "gradients_of_segments", "streaming_equals_parallel"):
        assert run_promise(s, promise, PROMISES[promise]).status == "kept"
    mixer, x = s.build(), s.x()
    for scan in ("gather", "steps"):
        assert torch.allclose(SimWorld(5, scan=scan).mix(mixer, x), mixer(x), atol=1e-12)


def test_which_rows_have_segments_is_known():
    found = set()
    for case, (name, options) in CASES.items():
        try:
            mixer = build_mixer(name, 8, causal=True, **options)
        except MixerError:
            continue
        if mixer.capabilities.segments:
            found.add(name if name in WITH else case)
            assert isinstance(mixer.segment(torch.randn(2, 3, 8)), tokenmix.Segment)
    assert found == WITH | NARROWED


@pytest.mark.parametrize("name", ["attention", "compressive", "lambda"])
def test_a_mixer_without_segments_says_so_in_one_line(name):
    mixer = build_mixer(name, 8, causal=True, **CASES[FIRST[name]][1])
    with pytest.raises(MixerError, match="has no segments") as caught:
        mixer.segment(torch.randn(1, 3, 8))
    assert "\n" not in str(caught.value)
    if not mixer.capabilities.key_blocks:
        with pytest.raises(MixerError, match=f"{type(mixer).__name__}: has neither segments nor blocks of keys"):
            SimWorld(2).mix(mixer, torch.randn(1, 4, 8))


@pytest.mark.parametrize("name", ["aft_simple", "aft_forget", "aft_local", "lightconv", "rfa"])
def test_no_tokens_and_masked_tokens_change_nothing(name):
    mixer = build_mixer(name, 8, causal=True, **CASES[FIRST[name]][1]).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    _, state = mixer.extend(x[:, :4], mixer.init_state(2))
    _, want = mixer.extend(x[:, 4:], state, key_mask=mask)
    y = mixer.extend(x[:, 4:], want)[0]
    masked = mixer.segment(x[:, 4:], key_mask=mask, halo=None)
    assert torch.allclose(mixer.extend(x[:, 4:], masked.after(state))[0], y)
    none = mixer.segment(x[:, :0])
    assert torch.allclose(mixer.extend(x[:, 4:], none.then(masked).then(none).after(state))[0], y)


@pytest.mark.parametrize("name", sorted(WITH & set(MIXERS)))
def test_nothing_before_a_document_counts(name):
    """Tokens of packed documents, whose boundaries lie inside shares, at their edges, or in none of them."""
    mixer = build_mixer(name, 8, causal=True, **CASES[FIRST[name]][1]).double().eval()
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    want = mixer.forward_packed(x[0], torch.tensor([0, 4, 5, 9, 12], dtype=torch.int32))
    for ranks, scan in ((3, "gather"), (4, "steps"), (12, "steps")):
        got = SimWorld(ranks, scan=scan).mix(mixer, x, starts=(4, 5, 9))
        assert torch.allclose(got[0], want, atol=1e-10, rtol=1e-10)
