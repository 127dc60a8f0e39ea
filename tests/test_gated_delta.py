"""Gated recurrences as mixers: their accuracy, what they refuse, and equalities between their rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from cases import CASES, DIM, subject_of
from tokenmix import MixerError, build_mixer
from tokenmix.mixers import MIXERS
from tokenmix.mixers.parts.recurrent import Recurrent
from tokenmix.models import LM, LMConfig, build_model
from tokenmix.testing.equality import longer_case, reference_value
from tokenmix.testing.measure import Measure, adversarial_cases
from tokenmix.testing.subject import roles

RECURRENT = [case for case, (name, _) in CASES.items() if issubclass(MIXERS[name], Recurrent)]


@pytest.mark.parametrize("case", RECURRENT)
def test_float32_is_accurate_relative_to_the_largest_output(case):
    """The exception from accurate_on_adversarial_keys: weights have both signs, so the sums of a row may cancel."""
    s = subject_of(case, True)
    args, options = longer_case(s)
    of = roles(s.functional)
    measure = Measure(s.functional, partial(reference_value, s), of, s.cls.largest_logit, signed=True)
    for name, keys, given in adversarial_cases(args, options, of, seed=s.seed):
        found = measure.compare(keys, given)
        assert all(part.error <= found.tolerance for part in found.parts), (name, found.parts)


def test_equal_decays_of_features_are_a_decay_of_the_head():
    torch.manual_seed(0)
    sizes = {"heads": 2, "head_dim": 4}
    head = build_mixer("gated_delta", 8, **sizes)
    low = {"a_proj.down.weight": head.a_proj.weight, "a_proj.up.weight": torch.eye(2).repeat_interleave(4, 0)}
    feature = build_mixer("gated_delta", 8, **sizes, decay="feature", decay_rank=2)
    rest = {k: v for k, v in head.state_dict().items() if k != "a_proj.weight"}
    feature.load_state_dict({**rest, **low, "dt_bias": head.dt_bias.repeat_interleave(4)})
    x = torch.randn(2, 30, 8)
    torch.testing.assert_close(feature(x), head(x), rtol=1e-5, atol=1e-6)


def test_without_decay_and_with_unit_writes_a_key_is_remembered_exactly():
    """With orthonormal keys and beta = 1 the state answers each key with its value, however many follow."""
    from tokenmix.functional import gated_delta

    k, v = torch.eye(6, dtype=torch.float64)[None], torch.randn(1, 6, 4, dtype=torch.float64)
    asked, nothing = torch.cat([k, k], 1), torch.zeros_like(v)
    beta = torch.cat([torch.ones(1, 6, 1), torch.zeros(1, 6, 1)], 1).double()
    y = gated_delta(asked, asked, torch.cat([v, nothing], 1), None, beta, heads=1, norm=False)
    torch.testing.assert_close(y[:, 6:] * 6**0.5, v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [*RECURRENT, "short_conv"])
def test_a_state_kept_before_a_chunk_takes_back_any_of_its_tokens(case):
    """Nothing changes in place: reading the accepted tokens again, after wrong guesses, equals a fresh stream."""
    name, options = CASES[case]
    mixer, x = build_mixer(name, DIM, **options), torch.randn(2, 12, DIM, generator=torch.Generator().manual_seed(2))
    before = mixer.extend(x[:, :5], mixer.init_state(2))[1]
    mixer.extend(x[:, 5:9].flip(0), before)  # guesses
    for n in range(1, 4):
        after = mixer.extend(x[:, 5 : 5 + n], before)[1]
        fresh = mixer.extend(x[:, : 5 + n], mixer.init_state(2))[1]
        for got, want in zip(after, fresh, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_mamba2_130m_has_as_many_parameters_as_published():
    with torch.device("meta"):
        assert sum(p.numel() for p in build_model("mamba2_130m").parameters()) == 128_989_632


def test_weights_of_another_family_are_refused_in_one_line(tmp_path):
    config = LMConfig(vocab=11, dim=8, layers=1, mixers=({"name": "gated_delta", "heads": 2},), max_len=16)
    LM(config).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("gated_delta", "mamba2"))
    with pytest.raises(MixerError, match=r"weights do not fit the model .*mixer\.norm has the shape") as said:
        LM.from_pretrained(tmp_path)
    assert "\n" not in str(said.value)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("gated_delta", {"causal": False}, "has only a causal form"),
    ("gated_delta", {"heads": 3}, "heads=3 must divide dim=8"),
    ("gated_delta", {"heads": 2, "value_heads": 3}, "value_heads=3 must be a multiple of heads=2"),
    ("gated_delta", {"decay": "token"}, "decay must be one of 'head', 'feature', None"),
    ("gated_delta", {"heads": 2, "decay_rank": 2}, "decay_rank=2 needs decay='feature'"),
    ("gated_delta", {"heads": 2, "gate": None, "gate_rank": 2}, "gate_rank=2 needs a gate"),
    ("gated_delta", {"heads": 2, "gate": None, "gate_bias": True}, "gate_bias=True needs a gate"),
    ("gated_delta", {"heads": 2, "decay": "feature", "lower_bound": 1.0}, "lower_bound must be a negative number"),
    ("gated_delta", {"heads": 2, "gate": "tanh"}, "gate must be one of"),
    ("mamba2", {"heads": 3}, "heads=3 must divide expand"),
    ("mamba2", {"heads": 2, "groups": 4}, "groups=4 must divide heads"),
    ("mamba2", {"heads": 2, "dt_limit": (1.0, 0.5)}, "dt_limit must rise"),
    ("mamba2", {"causal": False}, "has only a causal form"),
    ("short_conv", {"kernel_size": 0}, "kernel_size must be an integer >= 1"),
]


@pytest.mark.parametrize(("row", "options", "why"), BAD)
def test_wrong_options_are_refused_in_one_line(row, options, why):
    with pytest.raises(MixerError, match=why) as said:
        build_mixer(row, 8, **options)
    assert "\n" not in str(said.value)
