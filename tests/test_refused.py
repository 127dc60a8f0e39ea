"""Test what is refused beside a mixer's options, of which the promise refuses_wrong_options tells.

Options of functional forms, wrong tensors, states, specs.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from cases import BOTH_WAYS, subject_of
from tokenmix import MixerError, build_mixer, contrib, functional, merge
from tokenmix.testing.option_promises import VALUES

SMALL = {
    "hydra": {},
    "linear": {"heads": 2},
    "performer": {"heads": 2, "num_features": 3},
    "external": {"slots": 3},
    "aft_simple": {},
}
FORMS = ("aft_", "attention", "hydra", "multihead_linear", "polynl", "linear", "external", "simplified_attention")
TENSORS = ("positions", "key_mask", "attn_mask", "grid")
SPECS = {
    "a name that is no string": {"name": [], "dim": 8},
    "no name it knows": {"name": "aft", "dim": 8},
    "an option it does not know": {"name": "aft_simple", "dim": 8, "window": 3},
    "no dim": {"name": "aft_simple", "dim": None},
    "the word false": {"name": "external", "dim": 8, "tied": "false"},
    "a table for nobody": {"name": "aft_full", "dim": 8, "max_len": None},
    "no room in memory": {"name": "aft_full", "dim": 8, "max_len": 2**31 - 1, "rank": 2**20},
}


@pytest.mark.parametrize("what", SPECS)
def test_wrong_specs_are_refused(what):
    with pytest.raises(MixerError):
        build_mixer(**SPECS[what])


def test_x_longer_than_the_context_it_is_for_itself():
    mixer = build_mixer("aft_full", 8, max_len=12, max_context_len=4)
    with pytest.raises(MixerError, match="AFTFull: was built with max_context_len=4, got x of length 10"):
        mixer(torch.randn(2, 10, 8))
    with pytest.raises(MixerError, match="max_context_len=4 must be >= max_len=12 with causal=True"):
        build_mixer("aft_full", 8, max_len=12, max_context_len=4, causal=True)


@pytest.mark.parametrize("case", [case for case in BOTH_WAYS if case.startswith(FORMS)])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_options_of_functional_forms_work_or_are_refused_by_name(case, backend):
    s = subject_of(case, False)
    mixer, x = s.build(dtype=torch.float32), s.x(dtype=torch.float32)
    with torch.no_grad():
        args, options = s.args(mixer, x)
        for option in inspect.signature(s.functional).parameters:
            for wrong in VALUES if option in options and option not in TENSORS else ():
                said = option
                try:
                    y = s.functional(*args, **{**options, option: wrong, "backend": backend})
                    assert y.isfinite().all(), f"{option}={wrong!r} gives {y}"
                except MixerError as error:
                    said = str(error)
                assert option in said.splitlines()[-1], f"{option}={wrong!r}: {said}"


@pytest.mark.parametrize("prefix", [1, 5, -1, 2**40])
def test_a_grid_that_is_not_the_tokens_is_refused(prefix):
    """The C kernel would read and write beside them."""
    q, k, v, kernel = torch.randn(2, 12, 8), torch.randn(2, 12, 2), torch.randn(2, 12, 8), torch.randn(2, 3, 3)
    with pytest.raises(MixerError, match="aft_conv: grid"):
        functional.aft_conv(q, k, v, kernel, grid=(3, 4), prefix=prefix)


@pytest.mark.parametrize("window", [11, 2**31 - 1, 2**62])
@pytest.mark.parametrize("outside", ["zero", "none"])
def test_a_window_beyond_the_sequence_is_the_sequence(window, outside):
    q, k, v = torch.randn(3, 2, 10, 8).unbind(0)
    w, same = torch.randn(10, 10), {"outside": outside, "backend": "eager"}
    assert torch.equal(
        functional.aft_local(q, k, v, w, window=window, **same), functional.aft_local(q, k, v, w, window=10, **same)
    )


@pytest.mark.parametrize("name", SMALL)
def test_states_of_other_sizes_do_not_merge(name):
    """Shapes that broadcast would otherwise merge without a word."""

    def state(rows: int, dim: int = 8):
        return build_mixer(name, dim, causal=True, **SMALL[name]).init_state(rows)

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
    "a mask of one row, which would mask queries": lambda: functional.synthesizer_random(X, RANDOM, key_mask=LIVE[0]),
    "an additive mask": lambda: functional.local(X, X, X, window=2, heads=2, key_mask=torch.zeros(2, 5)),
    "a mask of integers": lambda: contrib.simplified_attention(X, X, key_mask=LIVE.long()),
    "pairs of another length": lambda: functional.attention(
        X, X, X, heads=2, attn_mask=torch.ones(5, 6, dtype=torch.bool)
    ),
    "a bias without heads": lambda: functional.synthesizer_dense(X, X, (DENSE[0], DENSE[1][0])),
    "positions of another length": lambda: functional.synthesizer_dense(
        X, X, DENSE, positions=torch.zeros(2, 6, dtype=torch.long)
    ),
    "keys of another width in a mixture": lambda: functional.synthesizer_mixture(
        X, X[..., :4], X, tensor(2), (), (RANDOM,), (), (), parts=["attention", "random"], heads=2
    ),
    "integers": lambda: functional.hydra(X.long(), X, X),
    "a negative eps": lambda: functional.hydra(X, X, X, eps=-1.0),
    "a negative eps of external": lambda: functional.external(X, tensor(3, 8), tensor(3, 8), eps=-1.0),
    "a bias of another size": lambda: functional.external(X, tensor(3, 8), tensor(3, 8), tensor(4)),
    "no eps under relu": lambda: functional.performer(X, X, X, tensor(2, 3, 4), heads=2, feature="relu", eps=0.0),
    "no bound": lambda: functional.rfa(X, X, X, tensor(2, 3, 4), tensor(2, 4), heads=2, eps=0.0),
    "half a window": lambda: functional.local(X, X, X, window=1.5, heads=2),
}


@pytest.mark.parametrize("what", REFUSED)
def test_functional_forms_refuse(what):
    with pytest.raises(MixerError, match="expects|must be|takes"):
        REFUSED[what]()
