"""Gated linear recurrences as ONNX's standard operator: the operator's own reference, ONNX Runtime and torch agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmix import MixerError, build_mixer
from tokenmix.export import export_onnx
from tokenmix.testing.tolerances import ADVERSARIAL

onnx = pytest.importorskip("onnx", reason="onnx comes with the extra onnx")
pytest.importorskip("onnxscript", reason="onnxscript comes with the extra onnx")
pytest.importorskip("onnxruntime", reason="onnxruntime comes with the extra onnx")
pytestmark = pytest.mark.skipif(onnx.defs.onnx_opset_version() < 27, reason="LinearAttention exists from opset 27 on")
CASES = {
    "gated_delta": ("gated_delta", {"heads": 2, "value_heads": 4, "head_dim": 8}, {"key_mask": True}),
    "kda": ("gated_delta", {"heads": 2, "decay": "feature"}, {"decode": True, "chunk": 3}),
    "delta": ("gated_delta", {"heads": 2, "decay": None}, {}),
    "gated": ("mamba2", {"heads": 2, "state_dim": 8}, {}),
}


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_the_operator_is_written_and_any_length_is_right(case, tmp_path):
    """``export_onnx`` compares with ONNX Runtime; onnx's reference runs the operator as its specification says."""
    name, options, how = CASES[case]
    torch.manual_seed(0)
    mixer, path = build_mixer(name, 32, **options).eval(), tmp_path / "mixer.onnx"
    report = export_onnx(mixer, path, operators="standard", **how)
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if node.op_type == "LinearAttention"]
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 27)]
    assert len(nodes) == 1
    rule = next(a.s.decode() for a in nodes[0].attribute if a.name == "update_rule")
    assert rule == {"kda": "gated_delta"}.get(case, case)
    if "decode" in how:
        return
    assert (report.sizes.length, report.sizes.padded) == ((1, None), False)
    x, mask = torch.randn(2, 70, 32), torch.rand(2, 70) < 0.7
    given = {"x": x.numpy()} | ({"key_mask": mask.numpy()} if "key_mask" in how else {})
    found = onnx.reference.ReferenceEvaluator(model).run(None, given)[0]
    with torch.no_grad():
        want = mixer(x, key_mask=mask if "key_mask" in how else None).numpy()
    seen = mask.numpy() if "key_mask" in how else np.ones((2, 70), bool)
    assert np.abs(found - want)[seen].max() < ADVERSARIAL * np.abs(want).max()


def test_other_operators_are_refused(tmp_path):
    mixer = build_mixer("gated_delta", 8, heads=2)
    with pytest.raises(MixerError, match="operators must be 'primitive' or 'standard', got 'own'"):
        export_onnx(mixer, tmp_path / "a.onnx", operators="own")
    with pytest.raises(MixerError, match="operators='standard' writes opset 27; leave out opset=20"):
        export_onnx(mixer, tmp_path / "a.onnx", operators="standard", opset=20)
