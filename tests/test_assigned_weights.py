"""Test that a mixer built on the meta device and given its weights by assignment gives the numbers of the original."""

from __future__ import annotations

import pytest
import torch

from cases import forms, subject_of


@pytest.mark.parametrize(("case", "causal"), forms())
def test_a_meta_build_with_assigned_weights_is_the_original(case, causal):
    s = subject_of(case, causal)
    mixer, x = s.build(dtype=torch.float32), s.x(dtype=torch.float32)
    with torch.device("meta"):
        late = s.raw().eval()
    late.load_state_dict(mixer.state_dict(), assign=True)
    assert torch.equal(s.call(late, x), s.call(mixer, x))


def test_a_hook_on_the_second_stage_acts_in_forward_and_stream_alike():
    s = subject_of("axial", True)
    mixer, x = s.build(), s.x()
    plain = s.call(mixer, x)
    mixer.stage_2.register_forward_hook(
        lambda _, __, out: tuple(2 * a for a in out) if isinstance(out, tuple) else 2 * out
    )
    whole, streamed = s.call(mixer, x), mixer.extend(x, mixer.init_state(2, dtype=x.dtype))[0]
    assert not torch.allclose(whole, plain)
    torch.testing.assert_close(streamed, whole)
