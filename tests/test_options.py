"""Every option of the core's mixers, given every wrong kind of value: one MixerError that says what was given, or a mixer that works."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MIXERS, MixerError, build_mixer, merge
from tokenmix import functional as F
from tokenmix.mixers import mixer_options

WRONG = [None, "x", "", 0, -1, 3, 1.5, 2.0, True, float("nan"), float("inf"), [], [2], {}, (1, 2), torch.tensor(2)]
SMALL = {"max_len": 6, "heads": 2, "slots": 3, "num_features": 3, "window": 3}
ALL = ["dense", "random", "factorized_dense", "factorized_random", "attention"]
ROWS = ["hydra", "polynl", "multihead_linear", "external", "external_multihead", "simplified_attention", "linear", "performer", "rfa", "local"]
ROWS += [name for name in MIXERS if name.startswith("synthesizer")]


def options_of(name: str) -> dict:
    known = mixer_options(MIXERS[name])
    return {**{option: value for option, value in SMALL.items() if option in known}, **({"parts": ALL} if "parts" in known else {})}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in ROWS for option in mixer_options(MIXERS[name])])
def test_a_wrong_value_is_named_or_works(name, option):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    for value in WRONG:
        said = None
        try:
            y = build_mixer(name, 8, **{**options_of(name), option: value})(x)
            assert y.isfinite().all(), f"{name} takes {option}={value!r} and gives {y}"
        except MixerError as error:
            said = str(error)
        assert said is None or repr(value) in said or str(value) in said, f"{value!r}: {said}"


@pytest.mark.parametrize("name", ["hydra", "linear", "performer", "external", "aft_simple"])
def test_states_of_other_sizes_do_not_merge(name):
    """Shapes that broadcast would otherwise merge without a word."""

    def state(rows: int, dim: int = 8):
        return build_mixer(name, dim, causal=True, **options_of(name)).init_state(rows)

    merge(state(2), state(2))
    for other in (state(1), state(2, 1 if name == "hydra" else 16)):
        if [a.shape for a in other] != [a.shape for a in state(2)]:
            with pytest.raises(MixerError, match="shapes"):
                merge(state(2), other)


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


X, LIVE = tensor(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
BOTH = ["attention", "random"]
DENSE, RANDOM = (tensor(2, 4, 6), tensor(2, 6)), tensor(2, 6, 6)
REFUSED = {
    "a mask of one row, which would mask queries": lambda: F.synthesizer_random(X, RANDOM, key_mask=LIVE[0]),
    "an additive mask": lambda: F.local(X, X, X, window=2, heads=2, key_mask=torch.zeros(2, 5)),
    "a mask of integers": lambda: F.simplified_attention(X, X, key_mask=LIVE.long()),
    "pairs of another length": lambda: F.attention(X, X, X, heads=2, attn_mask=torch.ones(5, 6, dtype=torch.bool)),
    "a bias without heads": lambda: F.synthesizer_dense(X, X, (DENSE[0], DENSE[1][0])),
    "positions of another length": lambda: F.synthesizer_dense(X, X, DENSE, positions=torch.zeros(2, 6, dtype=torch.long)),
    "keys of another width in a mixture": lambda: F.synthesizer_mixture(
        X, X[..., :4], X, tensor(2), (), (RANDOM,), (), (), parts=["attention", "random"], heads=2
    ),
    "integers": lambda: F.hydra(X.long(), X, X),
    "a negative eps": lambda: F.hydra(X, X, X, eps=-1.0),
    "a negative eps of external": lambda: F.external(X, tensor(3, 8), tensor(3, 8), eps=-1.0),
    "a bias of another size": lambda: F.external(X, tensor(3, 8), tensor(3, 8), tensor(4)),
    "no eps under relu": lambda: F.performer(X, X, X, tensor(2, 3, 4), heads=2, feature="relu", eps=0.0),
    "no bound": lambda: F.rfa(X, X, X, tensor(2, 3, 4), tensor(2, 4), heads=2, eps=0.0),
    "half a window": lambda: F.local(X, X, X, window=1.5, heads=2),
}


@pytest.mark.parametrize("what", REFUSED)
def test_functional_forms_refuse(what):
    with pytest.raises(MixerError, match="expects|must be|takes"):
        REFUSED[what]()


@pytest.mark.parametrize("flag", ["causal", "tied", "qkv_bias"])
def test_a_flag_in_a_spec_is_a_flag(flag):
    """The word "false" would count as true."""
    with pytest.raises(MixerError, match="True or False, got 'false'"):
        build_mixer(**{"name": "external", "dim": 8, flag: "false"})
