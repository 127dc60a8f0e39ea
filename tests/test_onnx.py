"""Test exported programs and ONNX files against torch.

Core mixers at sizes other than those traced, decode steps from the first token on, models, refusals.
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path

import pytest
import torch

from cases import CASES, FIRST, GRIDS
from perturb import perturb_mixers
from tokenmix import MIXERS, Mixer, MixerError, build_mixer
from tokenmix.export import OnnxModel, export_onnx, export_program
from tokenmix.export.dynamic_shapes import Sizes
from tokenmix.export.inputs import find_port
from tokenmix.export.onnx_model import difference
from tokenmix.lab import cli
from tokenmix.mixers import CORE, Facts
from tokenmix.models import LM, DiTConfig, LMConfig, LoopConfig, build_model
from tokenmix.testing.subject import perturb

REST = [case for case in CASES if CASES[case][0] in CORE and case != FIRST[CASES[case][0]]]
DIM = 8


def built(case: str, *, causal: bool) -> Mixer:
    torch.manual_seed(0)
    return perturb(build_mixer(CASES[case][0], DIM, **CASES[case][1], causal=causal), seed=1).eval()


def lm(**options) -> LM:
    torch.manual_seed(0)
    mixers = ({"name": "hydra"}, {"name": "attention", "heads": 2, "positions": {"name": "rotary"}})
    return perturb_mixers(
        LM(LMConfig(**{"dim": 8, "max_len": 20, "mixers": mixers, "vocab": 11, "init_std": 0.5, **options}))
    )


def check_file(case: str, tmp_path: Path) -> None:
    """A mixer's whole form at any length and, where it streams, its decode step, through ONNX Runtime."""
    causal = MIXERS[CASES[case][0]].facts.causal and case not in GRIDS
    mixer = built(case, causal=causal)
    place = {"grid": GRIDS[case][0], "prefix": GRIDS[case][1]} if case in GRIDS else {}
    report = export_onnx(mixer, tmp_path / "whole.onnx", key_mask=not place, **place)
    assert report.difference < 1e-4
    assert report.sizes.batch is None, "any batch"
    low, high = report.sizes.length
    if place:
        assert low == high == place["prefix"] + prod(place["grid"])
    else:
        assert low == 1, "any length"
        assert ("shorter inputs are padded" in str(report)) is report.sizes.padded
        model, n = OnnxModel(tmp_path / "whole.onnx"), min(high or 9, 9)
        x, mask = torch.randn(4, n, DIM), torch.ones(4, n, dtype=torch.bool)
        mask[1, :2] = mask[2, -1] = False
        assert difference(model(x, mask)[mask], mixer(x, key_mask=mask)[mask]) < 1e-4
    if mixer.capabilities.streaming:
        step = export_onnx(mixer, tmp_path / "step.onnx", decode=True)
        assert step.difference < 1e-4
        assert step.sizes.batch is None


@pytest.mark.parametrize("name", CORE)
def test_core_mixers(name, tmp_path):
    check_file(FIRST[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST)
def test_other_options_of_core_mixers(case, tmp_path):
    check_file(case, tmp_path)


@pytest.mark.parametrize("decode", [False, True])
def test_language_model(tmp_path, decode):
    model = lm(positions=None)
    report = export_onnx(model, tmp_path / "lm.onnx", decode=decode, key_mask=not decode, length=17)
    assert report.difference < 1e-4
    assert report.compared > 1000
    file, tokens = OnnxModel(tmp_path / "lm.onnx"), torch.randint(11, (3, 9))
    assert file.about["config"] == model.config.to_json()
    assert list(report.inputs)[0] == "tokens"
    if decode:
        state, parts = file.init_state(3), []
        for token in tokens.split(1, 1):
            logits, state = file.extend(token, state)
            parts.append(logits)
        assert difference(torch.cat(parts, 1), model(tokens)) < 1e-4
        assert {"state.layers.0.total", "state.layers.1.keys", "state.position"} <= set(report.inputs)
        assert {"logits", "new_state.layers.1.keys"} <= set(report.outputs)
        assert report.inputs["state.layers.1.keys"] == "float (batch, 2, past, 4)"
    else:
        mask = torch.ones(3, 9, dtype=torch.bool)
        mask[1, :4] = False
        assert difference(file(tokens, mask)[mask], model(tokens, key_mask=mask)[mask]) < 1e-4
        with pytest.raises(MixerError, match="takes whole inputs and has no state"):
            file.init_state(2)


@pytest.mark.parametrize("wide", [False, True])
def test_a_state_is_in_float32_unless_asked(tmp_path, wide):
    mixer = built("aft_simple", causal=True)
    report = export_onnx(mixer, tmp_path / "step.onnx", decode=True, wide_state=wide)
    kinds = {shape.split()[0] for name, shape in report.inputs.items() if name.startswith("state")}
    assert kinds == {"double" if wide else "float"}
    file, x, parts = OnnxModel(tmp_path / "step.onnx"), 30 * torch.randn(3, 40, DIM), []
    x[:, -1] *= 5
    state, own = file.init_state(3), mixer.init_state(3)
    for part in x.split(1, 1):
        y, state = file.extend(part, state)
        wanted, own = mixer.extend(part, own)
        parts.append(difference(y, wanted))
    assert max(parts) < 1e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_mask", [False, True])
def test_attention_adds_its_mask(causal, key_mask, tmp_path):
    """No node but a product, a sum and the softmax passes over all pairs of all heads."""
    import onnx

    mixer = build_mixer("attention", DIM, heads=2, causal=causal).eval()
    export_onnx(mixer, tmp_path / "m.onnx", key_mask=key_mask, length=9)
    nodes = onnx.load(tmp_path / "m.onnx").graph.node
    makes = {name: node for node in nodes for name in node.output}
    softmax = next(node for node in nodes if node.op_type == "Softmax")
    before = makes[softmax.input[0]]
    assert (before.op_type == "Add") is (causal or key_mask)
    logits = makes[before.input[0]] if causal or key_mask else before
    assert logits.op_type == "MatMul"
    assert [node.op_type for node in nodes if softmax.output[0] in node.input] == ["MatMul"]


LATE = ("aft_simple", "aft_full", "aft_local-3", "aft_conv", "aft_forget", "hydra", "linear")


@pytest.mark.parametrize("case", LATE)
def test_any_length_without_padding_and_a_late_spike(case, tmp_path):
    """Keys of 100 and more, with the largest at the end, and NaN in masked tokens; both branches of the file."""
    mixer = built(case, causal=True)
    report = export_onnx(mixer, tmp_path / "m.onnx", key_mask=True, length=mixer.max_len or 70)
    assert not report.sizes.padded
    file = OnnxModel(tmp_path / "m.onnx")
    for scale in (1, 100):
        for T in (1, 9, 13) if mixer.max_len else (1, 31, 70):
            x, mask = scale * torch.randn(3, T, DIM), torch.ones(3, T, dtype=torch.bool)
            x[:, -1] *= 4
            mask[1, : T // 2] = mask[2, : T // 3] = False
            x[~mask] = float("nan")
            assert difference(file(x, mask)[mask], mixer(x, key_mask=mask)[mask]) < 1e-4


IMAGES = {
    "vit": (
        "deit_tiny",
        {
            "layers": 2,
            "dim": 12,
            "mixers": ({"name": "aft_conv", "heads": 2, "kernel_size": 3},),
            "image_size": (32, 48),
            "classes": 5,
        },
    ),
    "pyramid": ("pvt_tiny", {"image_size": (64, 64), "classes": 5}),
    "eamlp": ("eamlp_7", {"image_size": (32, 32), "layers": 1, "classes": 5}),
}


@pytest.mark.parametrize(
    "kind", ["vit", pytest.param("pyramid", marks=pytest.mark.slow), pytest.param("eamlp", marks=pytest.mark.slow)]
)
def test_models_of_images(kind, tmp_path):
    name, options = IMAGES[kind]
    model = build_model(name, **options).eval()
    report = export_onnx(model, tmp_path / "model.onnx")
    assert report.difference < 1e-4
    assert report.sizes.batch is None
    images = torch.randn(2, 3, *options["image_size"])
    assert difference(OnnxModel(tmp_path / "model.onnx")(images), model(images)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("decode", [False, True])
def test_density_model(decode, tmp_path):
    from tokenmix.models import ImageDensity, ImageDensityConfig

    torch.manual_seed(0)
    model = ImageDensity(
        ImageDensityConfig(dim=8, size=(3, 4), mixers=({"name": "aft_local", "window": 4},), layers=2)
    ).eval()
    assert export_onnx(model, tmp_path / "density.onnx", decode=decode).difference < 1e-4


def test_a_fixed_length(tmp_path):
    report = export_onnx(built("aft_local-3", causal=True), tmp_path / "m.onnx", length=11, fixed=True)
    assert report.sizes.length == (11, 11)
    assert report.sizes.batch is None
    assert report.difference < 1e-4
    assert report.inputs == {"x": "float (batch, 11, 8)"}


def test_a_length_that_only_onnx_fixed(tmp_path, monkeypatch):
    """Check that a file that says a number where torch.export left the length free is seen.

    It is made again for the longest input alone.
    """
    from tokenmix.export import onnx

    mixer, port = (
        built("hydra", causal=True),
        find_port(built("hydra", causal=True), decode=False, key_mask=False, chunk=1, grid=None, prefix=0),
    )
    for fixed in (False, True):
        export_onnx(mixer, tmp_path / f"{fixed}.onnx", length=11, fixed=fixed)
        assert onnx._as_free(OnnxModel(tmp_path / f"{fixed}.onnx"), port, Sizes(None, (1, 11))) is not fixed
    monkeypatch.setattr(onnx, "_as_free", lambda file, port, sizes: sizes.length == (11, 11))
    report = export_onnx(mixer, tmp_path / "again.onnx", length=11)
    assert report.sizes.length == (11, 11)
    assert report.inputs == {"x": "float (batch, 11, 8)"}
    assert OnnxModel(tmp_path / "again.onnx").about["sizes"]["length"] == [11, 11]


def test_program_of_torch():
    model = lm()
    program, step = export_program(model, length=15), export_program(model, decode=True)
    tokens = torch.randint(11, (5, 13))
    assert difference(program.module()(tokens), model(tokens)) < 1e-5
    run, state = step.module(), model.init_state(2)
    _, state = model.extend(tokens[:2, :9], state)
    got, after = run(tokens[:2, 9:10], state)
    assert difference(got, model(tokens[:2, :10])[:, -1:]) < 1e-5
    assert type(after) is type(state)


def test_a_looped_model_that_counts_digits(tmp_path):
    """Whole and one token at a time, from inside a number on."""
    model = lm(
        positions={"name": "abacus", "digits": [0, 6], "max_len": 30, "max_offset": 5},
        loop=LoopConfig(2, "concat", "layer"),
    )
    assert export_onnx(model, tmp_path / "whole.onnx", length=12).difference < 1e-4
    assert export_onnx(model, tmp_path / "step.onnx", decode=True).difference < 1e-4
    whole, step = (OnnxModel(tmp_path / f"{name}.onnx") for name in ("whole", "step"))
    tokens = torch.tensor([[1, 2, 8, 3, 4, 5, 9, 1]])
    logits = whole(tokens)
    state = step.init_state(1)
    for t in range(8):
        y, state = step.extend(tokens[:, t : t + 1], state)
        assert difference(y, model(tokens[:, : t + 1])[:, -1:]) < 1e-4
    assert difference(logits, model(tokens)) < 1e-4


def test_a_program_whose_steps_depend_on_the_length_pads():
    mixer = built("aft_simple", causal=True)
    run = export_program(mixer, length=19).module()
    for T in (1, 8, 12, 19):
        x = torch.randn(2, T, DIM)
        assert difference(run(x), mixer(x)) < 1e-5
    with pytest.raises(AssertionError):
        run(torch.randn(2, 20, DIM))


def test_decoding_compiles_once_and_whole():
    """Prefill and decode in one graph each; a token more is not a compilation more, whether the state grows or not."""
    for mixers in (
        ({"name": "hydra"}, {"name": "aft_local", "window": 4}),
        ({"name": "attention", "heads": 2, "positions": {"name": "rotary"}},),
    ):
        torch.compiler.reset()
        model = lm(mixers=mixers, positions=None, max_len=40).requires_grad_(False)
        tokens, graphs = torch.randint(11, (2, 30)), []

        def count(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        prefill = torch.compile(model.extend, backend=count, fullgraph=True)
        logits, state = prefill(tokens[:, :9], model.init_state(2))
        assert len(graphs) == 1
        torch.compiler.reset()
        step, parts = torch.compile(model.extend, backend=count, fullgraph=True), [logits]
        for i, token in enumerate(tokens[:, 9:].split(1, 1)):
            logits, state = step(token, state)
            parts.append(logits)
            settled = len(graphs) if i == 3 else None
            if settled is not None:
                after_four = settled
        assert len(graphs) == after_four, "a graph per decoded token"
        assert difference(torch.cat(parts, 1), model(tokens)) < 1e-5
    torch.compiler.reset()


@pytest.mark.slow
def test_decoding_compiles_with_inductor():
    torch.compiler.reset()
    model = lm(mixers=({"name": "hydra"}, {"name": "aft_simple"}), positions=None).requires_grad_(False)
    tokens, state, parts = torch.randint(11, (2, 8)), model.init_state(2), []
    step = torch.compile(model.extend, fullgraph=True)
    for token in tokens.split(1, 1):
        logits, state = step(token, state)
        parts.append(logits)
    assert difference(torch.cat(parts, 1), model(tokens)) < 1e-4
    torch.compiler.reset()


class Closed(MIXERS["hydra"]):
    facts = Facts(export=False)


REFUSED = {
    "declares no export": (lambda: Closed(8), {}, "the mixer is Closed, which declares no export"),
    "no decode step both ways": (
        lambda: build_mixer("hydra", 8),
        {"decode": True},
        "was built with causal=False, so there is no decode step",
    ),
    "no stream": (
        lambda: build_mixer("fourier", 8),
        {"decode": True},
        "has no streaming form, so there is no decode step",
    ),
    "images": (
        lambda: build_model("deit_tiny", layers=1, dim=12),
        {"decode": True},
        "reads whole images and has no decode step",
    ),
    "a mask of images": (lambda: build_model("deit_tiny", layers=1, dim=12), {"key_mask": True}, "takes no key_mask"),
    "a length of images": (
        lambda: build_model("deit_tiny", layers=1, dim=12),
        {"length": 4},
        "ViT takes one size, got length=4",
    ),
    "double": (
        lambda: build_mixer("hydra", 8).double(),
        {},
        "q_proj.weight is torch.float64 on cpu; export takes float32",
    ),
    "no mixer": (lambda: torch.nn.Linear(2, 2), {}, "Linear is called with input; what can be exported are mixers"),
    "more than images": (
        lambda: build_model(DiTConfig(8, 1, ({"name": "hydra"},), (8, 8))),
        {},
        "DiT is called with images, time; what can be exported are mixers",
    ),
    "no module": (lambda: 3, {}, "expects a mixer or a model of tokenmix, got int"),
    "too long": (lm, {"length": 21}, "LM takes lengths 1 to 20, got length=21"),
    "opset": (lm, {"opset": 9}, "opset must be in 18"),
    "chunk": (lm, {"decode": True, "chunk": 0}, "chunk must be an integer >= 1, got 0"),
    "a grid for a model": (lm, {"grid": (2, 2)}, "grid is for mixers; LM has its own"),
    "a mask to decode": (lm, {"decode": True, "key_mask": True}, "the decode step takes neither key_mask nor grid"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals(why, tmp_path):
    make, options, says = REFUSED[why]
    with pytest.raises(MixerError, match=re.escape(says)) as caught:
        export_onnx(make(), tmp_path / "no.onnx", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "no file is left behind"


def test_what_differs_is_not_written(tmp_path):
    """A file whose numbers are not torch's: the check has to notice, here because nothing is close enough."""
    with pytest.raises(MixerError, match="differ by .*no file was written"):
        export_onnx(built("hydra", causal=True), tmp_path / "no.onnx", tolerance=-1.0)
    assert not list(tmp_path.iterdir())
    (tmp_path / "taken.onnx").write_text("mine")
    with pytest.raises(MixerError, match="exists already"):
        export_onnx(built("hydra", causal=True), tmp_path / "taken.onnx")
    with pytest.raises(MixerError, match="folder that does not exist"):
        export_onnx(built("hydra", causal=True), tmp_path / "none" / "x.onnx")
    assert (tmp_path / "taken.onnx").read_text() == "mine"


def test_difference_sees_what_there_is():
    one = torch.tensor([1.0, float("-inf"), 300.0])
    assert difference(one, one) == 0
    assert difference(one + torch.tensor([0.3, 0.0, 0.0]), one) == pytest.approx(0.001)
    assert difference(torch.tensor([1.0, float("nan"), 300.0]), one) == float("inf")
    assert difference(one[:2], one) == float("inf")
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) > 0.3


def test_verb(tmp_path, capsys, monkeypatch):
    from tokenmix.models import MODELS, named

    monkeypatch.setitem(MODELS, "tiny", LMConfig(dim=8, max_len=6, mixers=({"name": "hydra"},), vocab=5))
    assert named.MODELS is MODELS
    assert cli.main(["export", "tiny", str(tmp_path / "m.onnx"), "--decode", "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["difference"] < 1e-4
    assert list(found["inputs"])[0] == "tokens"
    assert cli.main(["export", "nothing", str(tmp_path / "n.onnx")]) == 2
    assert "neither a directory nor the name of a model" in capsys.readouterr().err
