"""Test that each defect found in public implementations is absent here.

It is present there where the package can be run; where a peer is right, it is an oracle.
"""

from __future__ import annotations

import pytest
import torch

from peer_defects import DEFECTS, measure
from tokenmix import build_mixer


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.what.replace(" ", "-")[:70])
def test_ours_does_not_have_it(defect):
    found = measure(defect)
    assert found["ours_is_right"], found
    if found["theirs"] is not None:
        assert not defect.right(found["theirs"]), f"{defect.who} no longer has it: {found}; say so in the table"


def test_softmax_attention_equals_x_transformers():
    from x_transformers.x_transformers import Attention

    theirs = Attention(dim=32, heads=4, dim_head=8, causal=True).eval()
    ours = build_mixer("attention", 32, heads=4, causal=True, qkv_bias=False, out_bias=False).eval()
    for mine, other in (("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("out_proj", "to_out")):
        getattr(ours, mine).weight.data.copy_(getattr(theirs, other).weight.data)
    x = torch.randn(2, 17, 32)
    found = theirs(x)
    torch.testing.assert_close(ours(x), found[0] if isinstance(found, tuple) else found, rtol=1e-4, atol=1e-5)


def test_local_equals_local_attention():
    from local_attention import LocalAttention

    from tokenmix import functional

    q, k, v = (torch.randn(2, 40, 32) for _ in range(3))
    theirs = LocalAttention(
        window_size=8,
        causal=True,
        look_backward=1,
        look_forward=0,
        exact_windowsize=True,
        autopad=True,
        use_rotary_pos_emb=False,
    )
    split = [a.unflatten(-1, (4, 8)).transpose(1, 2) for a in (q, k, v)]
    want = theirs(*split).transpose(1, 2).flatten(2)
    torch.testing.assert_close(functional.local(q, k, v, window=9, heads=4, causal=True), want, rtol=1e-4, atol=1e-5)


def test_aft_full_equals_aft_pytorch_at_small_keys():
    import aft_pytorch

    theirs = aft_pytorch.AFTFull(max_seqlen=12, dim=16, hidden_dim=16)
    ours = build_mixer("aft_full", 16, max_len=12, rank=None)
    for mine, other in (("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"), ("out_proj", "project")):
        getattr(ours, mine).load_state_dict(getattr(theirs, other).state_dict())
    ours.bias.weight.data.copy_(theirs.wbias.data)
    x = torch.randn(2, 12, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
