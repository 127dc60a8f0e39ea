"""What a class of mixers states about itself: inheritance, contradictions, names that nothing reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tokenmix import MIXERS, Mixer, MixerError, build_mixer
from tokenmix.mixers import QKVO, Facts, Hydra, required_options

PUBLIC = 25
"""The most names that ``Mixer`` adds to those of ``nn.Module``."""


def test_the_public_names_of_a_mixer_are_few():
    added = [name for name in dir(Mixer) if not name.startswith("_") and name not in dir(nn.Module)]
    assert len(added) <= PUBLIC, ", ".join(added)


class Plain(Mixer):
    facts = Facts(causal=True, signed=True)


class Left(Plain):
    pass


class Right(Plain):
    facts = Facts(signed=False, carries=QKVO)


class Streams:
    """A part that is no mixer states facts too."""

    facts = Facts(streaming=True)


class Both(Left, Streams, Right):
    facts = Facts(grid=True)


def test_a_fact_that_a_class_does_not_state_is_that_of_the_first_base_that_does():
    assert Both.facts == Facts(grid=True, streaming=True, signed=False, carries=QKVO, causal=True)
    assert Both.facts.stated == {"grid"}
    assert Left.facts == Plain.facts
    assert Mixer.facts == Facts()


def test_a_causal_only_class_has_no_context_whatever_it_inherits():
    class Narrow(Hydra):
        facts = Facts(causal_only=True)

    assert Hydra.facts.context
    assert Narrow.facts == replace(Hydra.facts, causal_only=True, context=False)
    assert Narrow.facts.causal_forms() == (True,)
    with pytest.raises(MixerError, match="excludes context=True"):
        type("Wide", (Narrow,), {"facts": Facts(context=True)})


@pytest.mark.parametrize("wrong", [{"context": True}, {"causal": False}])
def test_facts_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(MixerError, match="^Facts: causal_only=True excludes context=True and causal=False"):
        Facts(causal_only=True, **wrong)


def test_a_misspelt_fact_is_refused():
    with pytest.raises(MixerError, match="^Facts: no fact is called 'steaming'; nearest: streaming"):
        Facts(steaming=True)
    with pytest.raises(MixerError, match=r"^Dict: facts must be Facts\(...\), got {'causal': True}"):
        type("Dict", (Mixer,), {"facts": {"causal": True}})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"supports_streaming": True}, r"write facts = Facts\(streaming=...\)"),
        (
            {"supports_causal": True, "form": "hydra"},
            r"supports_causal, form; write facts = Facts\(causal=..., form=...\)",
        ),
        ({"waivers": {}}, r"write facts = Facts\(waivers=...\)"),
        ({"about": property(lambda self: "me")}, r"write facts = Facts\(about=...\)"),
        ({"required_options": classmethod(lambda cls, given=(): [])}, "needs_one_of"),
        ({"has_segments": property(lambda self: False)}, "override narrow_capabilities"),
        ({"keeps_context": property(lambda self: False)}, "override narrow_capabilities"),
        ({"empty_context_state": lambda self, *given: None}, "empty_state"),
        ({"projection_flops": lambda self, T: 0}, "MixingCost"),
    ],
)
def test_what_nothing_would_read_is_refused(body, says):
    part = type("Part", (), body)
    for build in (lambda: type("Wrong", (Mixer,), body), lambda: type("Wrong", (part, Mixer), {})):
        with pytest.raises(MixerError, match=f"^Wrong: .*{says}") as said:
            build()
        assert "\n" not in str(said.value)


def test_a_fact_set_later_is_refused_too():
    class Mine(Hydra):
        def __init__(self, dim, *, causal=False):
            super().__init__(dim, causal=causal)
            self.supports_streaming = False

    with pytest.raises(MixerError, match=r"^Mine: nothing reads the attribute supports_streaming"):
        Mine(8)
    with pytest.raises(MixerError, match=r"^Mine: nothing reads the attribute signed"):
        Mine.signed = True


def test_one_of_several_options_is_asked_for():
    assert required_options(MIXERS["aft_full"]) == ["max_len"]
    assert required_options(MIXERS["aft_full"], {"bias": {"name": "alibi"}}) == []
    with pytest.raises(MixerError, match="^build_mixer: aft_full needs the option 'max_len'"):
        build_mixer("aft_full", 8)


def test_features_that_rest_on_others_go_with_them():
    can = build_mixer("hydra", 8, causal=True).capabilities
    assert can.segments
    assert not replace(can, streaming=False).segments
    can = build_mixer("hydra", 8).capabilities
    assert can.keeps_context
    assert not replace(can, context=False).keeps_context


@pytest.mark.parametrize(("name", "options"), [("hydra", {}), ("reformer", {}), ("attention", {"heads": 2})])
def test_compiled_programs_may_ask_what_a_mixer_can(name, options):
    mixer = build_mixer(name, 8, causal=True, **options)
    ask = torch.compile(lambda x: x * 2 if mixer.capabilities.streaming else x, backend="eager", fullgraph=True)
    assert ask(torch.ones(1)) == 2
