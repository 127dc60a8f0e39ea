"""The learned weights of mixtures in a report: they are the model's, by place and layer; absent without mixtures."""

import re

import pytest
import torch
from matplotlib.figure import Figure

from page_checks import check_page
from run_dirs import tiny_run
from tokenmix.lab.report import mixtures as module
from tokenmix.lab.report import write_report
from tokenmix.lab.report.mixtures import READABLE, Mixture, mixture_pictures, mixture_table, mixtures
from tokenmix.lab.train import load_run
from tokenmix.models import LMConfig, Seq2SeqConfig, build_model

THREE = {"name": "synthesizer_mixture", "parts": ["random", "dense", "attention"], "heads": 2}
GATED = {"name": "synthesizer_mixture", "parts": ["attention", "dense", "random"], "join": "gated", "heads": 2}
PLUS = {"name": "synthesizer_mixture", "join": "plus", "heads": 2}
PLAIN = {"name": "attention", "heads": 2}


def pushed(model):
    """Return the model with alphas off their start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("alpha"):
                weight.normal_(generator=generator)
    return model


def shown(monkeypatch, found):
    """Return the bars of the pictures, (row, left, width) by part, and their texts."""
    axes = []

    def draw(put, inches):
        axes.append(Figure().add_subplot())
        put(axes[-1])
        return "", ""

    monkeypatch.setattr(module, "render_both", draw)
    mixture_pictures("run", found)
    bars = [
        {b.get_label(): [(round(r.get_y() + 0.36), r.get_x(), r.get_width()) for r in b] for b in ax.containers}
        for ax in axes
    ]
    return bars, [[text.get_text() for text in ax.texts] for ax in axes]


def test_weights_are_the_softmax_of_the_models_parameters(monkeypatch):
    model = pushed(build_model(LMConfig(dim=8, max_len=6, mixers=(PLAIN, THREE, PLUS, GATED), vocab=5)))
    found = mixtures(model)
    assert [(each.place, each.layer) for each in found] == [("layers", 1), ("layers", 3)]
    soft, gate = model.blocks[1].mixer.alpha.softmax(0).tolist(), model.blocks[3].mixer.alpha.sigmoid().item()
    assert found[0].weights == pytest.approx(dict(zip(THREE["parts"], soft, strict=True)))
    assert found[1].weights == pytest.approx({"attention": 1 - gate, "dense": gate, "random": gate})
    bars, texts = shown(monkeypatch, found)
    assert list(bars[0]) == ["attention", "dense", "random"]
    assert bars[0]["attention"] == [(0, 0, pytest.approx(soft[2])), (1, 0, pytest.approx(1 - gate))]
    assert bars[0]["dense"][0] == (0, pytest.approx(soft[2]), pytest.approx(soft[1]))
    assert bars[0]["random"][0] == (0, pytest.approx(soft[2] + soft[1]), pytest.approx(soft[0]))
    numbers = [a for a in (soft[2], 1 - gate, soft[1], gate, soft[0], gate) if a >= READABLE]
    assert texts[0] == [f"{a:.2f}" for a in numbers]
    table = mixture_table([("run", found), ("none", [])])
    assert table.columns == ["run", "place", "layer", "attention", "dense", "random"]
    assert table.rows[0] == ["run", "layers", "1", f"{soft[2]:.4f}", f"{soft[1]:.4f}", f"{soft[0]:.4f}"]
    assert len(table.rows) == 2


def test_the_weights_are_those_that_the_layer_computes_with():
    """The output with one-sided weights is that of the part alone."""
    torch.manual_seed(0)
    model = build_model(LMConfig(dim=8, max_len=6, mixers=(THREE,), vocab=5)).eval()
    mixer, x = model.blocks[0].mixer, torch.randn(1, 6, 8)
    with torch.no_grad():
        mixer.alpha.copy_(torch.tensor([-60.0, 60.0, -60.0]))
        assert mixer.part_weights() == [pytest.approx({"random": 0, "dense": 1, "attention": 0})]
        once = mixer(x)
        for name, weight in mixer.named_parameters():
            if name.startswith(("k_proj.", "random.")):
                weight.normal_()
        torch.testing.assert_close(mixer(x), once)


def test_heads_with_weights_of_their_own_have_a_bar_and_a_row_each(monkeypatch):
    each = {**THREE, "alpha_per_head": True}
    gate = {**GATED, "alpha_per_head": True}
    model = pushed(build_model(LMConfig(dim=8, max_len=6, mixers=(each, gate, THREE), vocab=5)))
    found = mixtures(model)
    assert [(m.layer, m.head) for m in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, None)]
    soft, gates = model.blocks[0].mixer.alpha.softmax(-1), model.blocks[1].mixer.alpha.sigmoid()
    assert soft.shape == (2, 3)
    assert found[1].weights == pytest.approx(dict(zip(THREE["parts"], soft[1].tolist(), strict=True)))
    assert found[2].weights == pytest.approx(
        {"attention": 1 - gates[0].item(), "dense": gates[0].item(), "random": gates[0].item()}
    )
    bars, _ = shown(monkeypatch, found)
    assert [row for row, _, _ in bars[0]["random"]] == [0, 1, 2, 3, 4]
    assert [row[2] for row in mixture_table([("run", found)]).rows] == [
        "0, head 0",
        "0, head 1",
        "1, head 0",
        "1, head 1",
        "2",
    ]
    pictures = mixture_pictures("run", found)
    assert "in each head" in pictures[0].caption
    assert "layer 0, head 1: random" in pictures[0].alt


def test_each_head_computes_with_its_own_weights():
    """Heads with one-sided weights give what those heads give where the part stands alone."""
    torch.manual_seed(0)
    model = build_model(LMConfig(dim=8, max_len=6, mixers=({**THREE, "alpha_per_head": True},), vocab=5)).eval()
    mixer, x = model.blocks[0].mixer, torch.randn(1, 6, 8)
    mixer.out_proj = torch.nn.Identity()
    with torch.no_grad():
        whole = {}
        for part in range(3):
            mixer.alpha.copy_(60.0 * (2 * torch.eye(3)[part] - 1).expand(2, -1))
            whole[part] = mixer(x)
        mixer.alpha.copy_(60.0 * (2 * torch.eye(3)[[1, 2]] - 1))
        torch.testing.assert_close(mixer(x), torch.cat([whole[1][..., :4], whole[2][..., 4:]], -1))


def test_an_encoder_decoder_has_up_to_three_places(monkeypatch):
    specs = {"mixers": (PLAIN, THREE), "encoder_mixers": (THREE,), "encoder_layers": 1}
    model = pushed(
        build_model(Seq2SeqConfig(dim=8, max_len=6, vocab=9, cross_mixers=({**PLAIN, "heads": 2},), **specs))
    )
    found = mixtures(model)
    assert [(each.place, each.layer) for each in found] == [("encoder", 0), ("decoder", 1)]
    assert found[0].weights != found[1].weights
    model.blocks[1].cross = model.encoder.blocks[0].mixer  # as one that takes a context would stand there
    across = mixtures(model)
    assert across[2] == Mixture("decoder to source", 1, found[0].weights)
    bars, _ = shown(monkeypatch, across)
    assert len(bars) == 3
    assert {row for part in bars[1].values() for row, _, _ in part} == {0}


def test_a_report_shows_the_mixtures_of_a_run_and_only_those(tmp_path):
    mixed, plain = tiny_run(tmp_path, "synthesizer_mixture"), tiny_run(tmp_path, "attention")
    page = write_report([mixed, plain], tmp_path / "report.html")
    assert check_page(page) == []
    text = page.read_text()
    (mixer,) = (block.mixer for block in load_run(mixed)[0].blocks)
    a, b = mixer.alpha.softmax(0).tolist()
    row = re.search(r'<tr><th scope="row">synthesizer_mixture</th><td>layers</td><td>0</td>(.*?)</tr>', text)
    assert row[1] == f"<td>{b:.4f}</td><td>{a:.4f}</td>"  # attention, random
    assert text.count("Bars of the weights of each part") == 1
    assert f"layer 0: random {a:.2f}, attention {b:.2f}" in text
    assert "Learned mixtures" not in write_report([plain], tmp_path / "plain.html").read_text()


def test_a_run_without_mixtures_has_no_picture_and_no_table():
    assert mixtures(build_model(LMConfig(dim=8, max_len=6, mixers=(PLUS,), vocab=5))) == []
    assert mixture_pictures("run", []) == []
    assert mixture_table([("run", [])]) is None
