"""Models in which a mixer was assigned by hand: distilled, compared and exported as those of replace_mixers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tokenmix
from surgery_models import make, padded
from tokenmix import MixerError
from tokenmix.export import OnnxModel, export_onnx
from tokenmix.hosts.surgery.capture import adapters_by_site
from tokenmix.lab.advise.compare import compare
from tokenmix.lab.advise.inputs import own_inputs
from tokenmix.lab.train import distill


class Mine(nn.Module):
    """Own attention with a signature that a mixer shares."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Mine()}) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["attn"](x)
        return self.head(x)


class Kept(nn.Module):
    """A mixer with the call of ViT's attention."""

    def __init__(self, mixer: tokenmix.Mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        return self.mixer(hidden_states), None


def own() -> tuple[Any, Any]:
    torch.manual_seed(0)
    teacher = Net().eval()
    student = copy.deepcopy(teacher)
    student.layers[2]["attn"] = tokenmix.build_mixer("aft_simple", dim=16)
    return teacher, student.eval()


def test_a_mixer_assigned_by_hand_is_distilled_compared_and_exported(tmp_path):
    teacher, student = own()
    assert list(adapters_by_site(student, teacher)) == ["layers.2.attn"]
    frozen = copy.deepcopy({n: t for n, t in student.state_dict().items() if "layers.2" not in n})
    data = [torch.randint(30, (4, 8), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = distill(teacher, student, data, out=tmp_path / "run", layer_steps=60, steps=5, valid=data[:1], lr=1e-2)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert found["valid"]["layer_loss"]["layers.2.attn"] < 0.8 * first["layer_loss"]["layers.2.attn"]
    assert all(torch.equal(student.state_dict()[n], t) for n, t in frozen.items())
    student.eval()
    inputs = own_inputs(lambda length, batch: torch.zeros(batch, length, dtype=torch.long), teacher, "here")
    told = compare({"teacher": teacher, "by hand": student}, data, [8], inputs=inputs, seconds=0.2)
    assert told.table().columns[:2] == ["model", "cosine"]

    def tokens(length: int, batch: int) -> Tensor:
        return torch.randint(30, (batch, length), generator=torch.Generator().manual_seed(length))

    export_onnx(student, tmp_path / "net.onnx", inputs=tokens, length=16)
    ids = tokens(5, 3)
    given = OnnxModel(tmp_path / "net.onnx")(ids)
    assert torch.allclose(given, student(ids), atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_model_of_transformers_changed_by_hand(name, tmp_path):
    teacher = make(name, 0.2)
    student = copy.deepcopy(teacher)
    layers = student.encoder.layer if name == "bert" else student.vit.layers
    place = "self" if name == "bert" else None
    mixer = Kept(tokenmix.build_mixer("hydra", dim=32))
    if place:
        layers[1].attention.self = mixer
    else:
        layers[1].attention = mixer
    site = "encoder.layer.1.attention.self" if place else "vit.layers.1.attention"
    assert list(adapters_by_site(student, teacher)) == [site]
    ids, mask = padded("right")
    batch = {"input_ids": ids, "attention_mask": mask} if place else {"pixel_values": torch.randn(2, 3, 32, 32)}
    found = distill(teacher, student, [batch], out=tmp_path / "run", layer_steps=40, steps=1, valid=[batch], lr=1e-2)
    assert set(found["valid"]["layer_loss"]) == {site}
    told = compare({"teacher": teacher, "by hand": student.eval()}, [batch], [32], seconds=0.2)
    assert "by hand" in told.sentence()
    report = export_onnx(student, tmp_path / "model.onnx", length=9 if place else None)
    assert report.difference < 1e-3
    with pytest.raises(MixerError, match="its mixers were assigned by hand, and where their states are is not known"):
        export_onnx(student, tmp_path / "step.onnx", decode=True)


WRONG = [
    (lambda n, b: [torch.zeros(b, n)], "inputs must return a tensor, a tuple or a dict, got list"),
    (lambda n, b: (torch.zeros(b, n, 3),), r"Net cannot be called with inputs\(7, 1\): Expected tensor for argument"),
    (lambda n, b: (n, b), r"inputs\(7, 1\) holds no tensor; return what Net is called with"),
]


@pytest.mark.parametrize(("inputs", "message"), WRONG)
def test_wrong_inputs_are_one_line(inputs, message, tmp_path):
    with pytest.raises(MixerError, match=message) as why:
        export_onnx(own()[1], tmp_path / "x.onnx", inputs=inputs, length=8)
    assert "\n" not in str(why.value)


def test_a_student_without_mixers_is_refused():
    teacher, _ = own()
    with pytest.raises(
        MixerError, match="has no replaced attention; replace_mixers makes one, or assign a mixer where"
    ):
        adapters_by_site(copy.deepcopy(teacher), teacher)
    bert = transformers.BertModel(
        transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with pytest.raises(MixerError, match="has no replaced attention"):
        adapters_by_site(bert, teacher)
