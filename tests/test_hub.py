"""Models in folders and on the Hub: the same outputs to the bit in a fresh process, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_model

import own_mixer
from tokenmix import MIXERS, MixerError, __version__
from tokenmix.lab.report.taxonomy import page_of
from tokenmix.lab.train import load_model
from tokenmix.mixers.facts import page_stem
from tokenmix.models import (
    KINDS,
    LM,
    MAE,
    DiT,
    DiTConfig,
    EAMLPConfig,
    Encoder,
    EncoderConfig,
    ImageDensityConfig,
    LMConfig,
    MAEConfig,
    PointClassifierConfig,
    PointSegmenter,
    PointSegmenterConfig,
    PyramidConfig,
    ResNetConfig,
    SegmentationConfig,
    SegmenterConfig,
    Seq2Seq,
    Seq2SeqConfig,
    ViT,
    ViTConfig,
    build_model,
)

ROOT = Path(__file__).parent.parent
ATTENTION, HYDRA = {"name": "attention", "heads": 2}, {"name": "hydra"}
IMAGES = {"image_size": (16, 16), "classes": 3}
SPECS = {  # attention and two others; attention-free ones on grids too
    "attention": ATTENTION,
    "aft": {"name": "aft_conv", "kernel_size": 3, "heads": 2},
    "hydra": HYDRA,
}
SETS = {  # of mixers that do not know the order
    "attention": ATTENTION,
    "offset": {"name": "pct_attention"},
    "external": {"name": "external", "slots": 4},
}


def configs() -> dict[str, object]:
    """A small config of every kind of model around each of three mixers."""
    found: dict[str, object] = {"resnet": ResNetConfig(widths=(4, 8), depths=(1, 1), image_size=(16, 16))}
    for name, spec in SPECS.items():
        vit = ViTConfig(8, 2, (spec,), patch=4, pool="mean", **IMAGES)
        found |= {
            f"lm-{name}": LMConfig(8, 16, (spec,), layers=2, tied=name == "hydra"),
            f"encoder-{name}": EncoderConfig(8, 16, (spec,), layers=2, classes=3 * (name == "hydra")),
            f"seq2seq-{name}": Seq2SeqConfig(8, 16, (spec,), layers=2),
            f"vit-{name}": vit,
            f"pyramid-{name}": PyramidConfig(
                (1, 1), (spec,), dims=(8, 8), patches=(4, 2), mlp_ratios=(2.0, 2.0), pool="mean", **IMAGES
            ),
            f"eamlp-{name}": EAMLPConfig(8, 1, (SETS["external"] if name == "aft" else spec,), **IMAGES),
            f"image_density-{name}": ImageDensityConfig(8, (4, 4), (spec,), layers=2, values=8),
            f"dit-{name}": DiTConfig(8, 2, (spec,), image_size=(16, 16), patch=4, classes=3),
            f"mae-{name}": MAEConfig(
                8, 2, (HYDRA if name == "aft" else spec,), image_size=(16, 16), patch=4, classes=0, decoder_dim=8,
                decoder_layers=1, decoder_mixers=(ATTENTION,),
            ),
            f"segmentation-{name}": SegmenterConfig(
                replace(vit, classes=0), SegmentationConfig(3, mixer=spec, width=8, hidden=8, levels=(1, 3))
            ),
        }  # fmt: skip
    for name, spec in SETS.items():
        sizes = {"layers": 2, "dim": 8, "lift": 8, "fuse": 8, "hidden": (8, 8)}
        near = {"neighbours": (4, 4), **sizes}
        found[f"point_classifier-{name}"] = PointClassifierConfig(3, (spec,), samples=(12, 8), **near)
        found[f"point_segmenter-{name}"] = PointSegmenterConfig(3, (spec,), parts=4, category=4, **near)
    return found


CONFIGS = configs()


def inputs_of(model) -> tuple[torch.Tensor, ...]:
    """Inputs that a model of ``configs`` takes."""
    if isinstance(model, LM | Encoder | Seq2Seq):
        tokens = torch.randint(3, 256, (2, 9))
        return (tokens, tokens.flip(1)) if isinstance(model, Seq2Seq) else (tokens,)
    config = model.config
    if config.kind.startswith("point"):
        clouds = torch.randn(2, 24, 3)
        return (clouds, torch.tensor([0, 2])) if isinstance(model, PointSegmenter) else (clouds,)
    if config.kind == "image_density":
        return (torch.randint(8, (2, 4 * 4 * 3)),)
    images = torch.randn(2, 3, *config.image_size)
    if isinstance(model, DiT):
        return images, torch.rand(2), torch.tensor([0, 2])
    return (images, torch.tensor([[0, 5, 9, 10]] * 2)) if isinstance(model, MAE) else (images,)


def train_briefly(config) -> torch.nn.Module:
    """A model with weights, and averages of norms, that no new model has."""
    model = build_model(config).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        model(*inputs_of(model))
    return model.eval()


def lm(**options) -> LM:
    return train_briefly(LMConfig(8, 16, (ATTENTION,), layers=2, **options))


FRESH = """
import sys, torch, tokenmix.models
from pathlib import Path
torch.set_num_threads(1)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    name, inputs, outputs, tensors = torch.load(folder / "outputs.pt", weights_only=True)
    model = getattr(tokenmix.models, name).from_pretrained(folder, local_files_only=True)
    assert type(model).__name__ == name and not model.training
    assert model.state_dict().keys() == tensors.keys()
    with torch.no_grad():
        same = torch.equal(model(*inputs), outputs)
    alike = all(torch.equal(t, tensors[n]) and t.dtype == tensors[n].dtype for n, t in model.state_dict().items())
    print(folder.name, same, alike)
"""


def in_a_fresh_process(code: str, *arguments: object, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_model_computes_the_same_bits_in_a_fresh_process(tmp_path):
    assert {name.split("-")[0] for name in CONFIGS} == set(KINDS)
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = train_briefly(config)
        if name == "vit-attention":
            model.resize((24, 16))
        if name.startswith("dit"):
            model.to(torch.float64)
        inputs = tuple(x.double() if x.is_floating_point() and "dit" in name else x for x in inputs_of(model))
        with torch.no_grad():
            outputs = model(*inputs)
        assert outputs.std() > 0
        assert model.save_pretrained(tmp_path / name) is None
        torch.save((type(model).__name__, inputs, outputs, model.state_dict()), tmp_path / name / "outputs.pt")
    said = in_a_fresh_process(FRESH, tmp_path).splitlines()
    assert said == [f"{name} True True" for name in sorted(CONFIGS)]


@pytest.mark.parametrize("spec", [*SPECS.values(), {"name": "pooling"}], ids=lambda spec: spec["name"])
def test_half_precision_stays(spec, tmp_path):
    """Also in a mixer without parameters, which knows its dtype by a buffer that is not saved."""
    model = train_briefly(ViTConfig(8, 2, (spec,), patch=4, pool="mean", **IMAGES)).bfloat16()
    images = torch.randn(2, 3, 16, 16, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert {t.dtype for t in again.state_dict().values()} == {torch.bfloat16}
    assert {b.dtype for b in again.buffers()} == {b.dtype for b in model.buffers()}
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


def test_each_tensor_keeps_its_dtype(tmp_path):
    model = lm()
    model.norm.double()
    model.save_pretrained(tmp_path)
    found = LM.from_pretrained(tmp_path)
    assert {n: t.dtype for n, t in found.state_dict().items()} == {n: t.dtype for n, t in model.state_dict().items()}


def test_tied_and_strided_tensors(tmp_path):
    model = lm()
    model.head.weight = model.embed.weight
    wide = torch.randn(16, 8)
    model.blocks[0].mlp.up.weight.data = torch.randn(8, 32).t()  # not contiguous
    model.blocks[0].mixer.q_proj.weight.data, model.blocks[0].mixer.k_proj.weight.data = wide[:8], wide[4:12]  # overlap
    model.save_pretrained(tmp_path / "a")
    with safe_open(tmp_path / "a/model.safetensors", framework="pt") as f:
        assert "head.weight" not in f.keys()  # noqa: SIM118
        assert f.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    tokens = inputs_of(model)[0]
    again = LM.from_pretrained(tmp_path / "a")
    assert torch.equal(again(tokens), model(tokens))
    for layer in (model.blocks[0].mixer.q_proj, model.blocks[0].mixer.k_proj):
        layer.weight.data = layer.weight.data.clone()  # files of safetensors itself are read too
    save_model(model, str(tmp_path / "a/model.safetensors"))
    assert torch.equal(LM.from_pretrained(tmp_path / "a")(tokens), model(tokens))


OWN = """
import sys, torch
from tokenmix.models import LM
if sys.argv[2] == "imported": import own_mixer
tokens, outputs = torch.load(sys.argv[1] + "/outputs.pt", weights_only=True)
try: print(torch.equal(LM.from_pretrained(sys.argv[1])(tokens), outputs))
except ValueError as why: print(why)
"""


def test_mixers_from_outside_of_the_package(tmp_path, monkeypatch):
    monkeypatch.delitem(MIXERS, "own_mixer:WeighedMean", raising=False)
    model = train_briefly(LMConfig(8, 16, ({"name": "own_mixer:WeighedMean", "floor": 0.5},)))
    tokens = inputs_of(model)[0]
    model.save_pretrained(tmp_path)
    torch.save((tokens, model(tokens).detach()), tmp_path / "outputs.pt")
    assert in_a_fresh_process(OWN, tmp_path, "imported") == "True\n"
    (said,) = in_a_fresh_process(OWN, tmp_path, "not").splitlines()
    assert "own_mixer" in said
    card = (tmp_path / "README.md").read_text()
    assert "import `own_mixer` before you load the model" in card
    assert own_mixer.WeighedMean.facts.about.paper in card
    monkeypatch.delitem(MIXERS, "own_mixer:WeighedMean", raising=False)


def test_the_folders_of_all_ways_to_save_are_alike(tmp_path):
    """``load_model`` reads what save_pretrained wrote, whatever its class; RNG and other files are left alone."""
    model = lm()
    (tmp_path / "notes.txt").write_text("mine")
    model.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    found, config = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert config == model.config
    assert type(found) is LM
    (tmp_path / "README.md").write_text("my card")
    model.save_pretrained(str(tmp_path))
    assert (tmp_path / "README.md").read_text() == "my card"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors", "notes.txt"]


def refusal_of(work) -> str:
    with pytest.raises(MixerError) as told:
        work()
    assert "\n" not in str(told.value)
    return str(told.value)


def test_what_is_wrong_with_a_folder_is_said_in_one_line(tmp_path):
    def say(cls=LM, **options) -> str:
        return refusal_of(lambda: cls.from_pretrained(tmp_path, **options))

    assert f"{tmp_path} contains no model: config.json is missing" in say()
    model = lm()
    model.save_pretrained(tmp_path)
    file, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    good, bytes_ = json.loads(file.read_text()), weights.read_bytes()
    assert "describes a model of kind 'lm'; ViT.from_pretrained loads those of kind 'vit'" in say(ViT)
    for given, words in (
        ({**good, "gate": 2}, f"tokenmix {__version__}: config: LMConfig has no field 'gate'"),
        ({**good, "dim": "x"}, "dim must be an int"),
        ({**good, "kind": "lm2"}, "a model of kind 'lm2'"),
        ({"dim": 8}, "describes no model of tokenmix"),
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({**good, "dim": 10**15}, "does not fit"),
        ({**good, "layers": 10**9}, "layers must be at most"),
        ({**good, "layers": 1}, "do not fit the model"),
        ({**good, "mixers": [{"name": "gone"}]}, "no mixer is called 'gone'"),
        ([], "holds no JSON object"),
    ):
        file.write_text(json.dumps(given))
        assert words in say()
    file.write_text("{")
    assert "is not readable JSON" in say()
    file.write_text(json.dumps(good))
    assert "map_location='nowhere'" in say(map_location="nowhere")
    for content in (bytes_[:100], bytes_[:-1], b"", b"\x80\x02}q\x00."):
        weights.write_bytes(content)
        assert f"{weights}: is truncated or not a safetensors file" in say()
    weights.unlink()
    assert "model.safetensors is missing" in say()
    (tmp_path / "checkpoints").mkdir()
    assert "is a run directory; tokenmix.lab.train.load_model loads it" in say()
    assert "whose config would be lost" in refusal_of(lambda: model.save_pretrained(tmp_path))
    assert "cannot be made" in refusal_of(lambda: model.save_pretrained(file))


def test_only_strict_refuses_other_names(tmp_path):
    model = lm()
    model.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**data, "layers": 3}))
    assert "blocks.2" in refusal_of(lambda: LM.from_pretrained(tmp_path))
    loaded = LM.from_pretrained(tmp_path, strict=False, map_location=torch.device("cpu"))
    assert torch.equal(loaded.embed.weight, model.embed.weight)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    small = torch.ao.quantization.quantize_dynamic(lm(), {torch.nn.Linear}, dtype=torch.qint8)
    assert "is no tensor" in refusal_of(lambda: small.save_pretrained(tmp_path))
    with torch.device("meta"):
        empty = LM(LMConfig(8, 16, (ATTENTION,)))
    assert "meta device" in refusal_of(lambda: empty.save_pretrained(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_methods_say_its_name(tmp_path, monkeypatch):
    model = lm()
    model.save_pretrained(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    LM.from_pretrained(tmp_path / "a")  # folders do not need it
    said = refusal_of(lambda: LM.from_pretrained("me/no-model"))
    assert said.startswith("LM.from_pretrained: there is no folder 'me/no-model'")
    assert said.endswith("needs huggingface_hub: pip install 'tokenmix[hf]'.")
    assert refusal_of(lambda: model.push_to_hub("me/x")).endswith("pip install 'tokenmix[hf]'.")
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "safetensors" in refusal_of(lambda: LM.from_pretrained(tmp_path / "a"))
    assert "pip install" in refusal_of(lambda: model.save_pretrained(tmp_path / "b"))


def test_the_import_needs_neither_package(tmp_path):
    code = "import sys; sys.modules.update(dict.fromkeys(['huggingface_hub', 'safetensors', 'yaml', 'numpy']))\n"
    code += "import tokenmix.models; print(tokenmix.models.LM.from_pretrained.__name__)"
    assert in_a_fresh_process(code) == "from_pretrained\n"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_card_is_one_that_the_hub_takes(name, tmp_path):
    torch.manual_seed(0)
    model = build_model(CONFIGS[name])
    model.save_pretrained(tmp_path / "tiny")
    card = huggingface_hub.ModelCard.load(tmp_path / "tiny/README.md")
    assert card.data.library_name == "tokenmix"
    assert card.data.pipeline_tag is None or set(card.data.pipeline_tag) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert card.data.tags[0] == "tokenmix"
    assert all(isinstance(tag, str) for tag in card.data.tags)
    assert f"`{type(model).__name__}`" in card.text
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters in float32" in card.text
    assert json.loads(card.text.split("```json\n")[1].split("```")[0]) == json.loads(
        (tmp_path / "tiny/config.json").read_text()
    )
    for page in {
        line.split("docs/mixers/")[1].split("`")[0] for line in card.text.splitlines() if "docs/mixers" in line
    }:
        assert (ROOT / "docs/mixers" / page).is_file()
    code = card.text.split("```python\n")[1].split("```")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(code, found := {})
    assert type(found["model"]) is type(model)


def test_the_card_counts_layers_and_quotes_odd_names(tmp_path):
    model = LM(LMConfig(8, 16, (ATTENTION, HYDRA, ATTENTION)))
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| 2 | `attention` | Vaswani et al. 2017" in text
    assert "| 1 | `hydra` |" in text
    assert "`docs/mixers/hydra.md`" in text
    assert "pipeline_tag: text-generation" in text
    assert f"# {tmp_path.name}\n" in text


def test_every_mixer_of_the_package_names_its_page():
    for name, cls in MIXERS.items():
        if cls.__module__.startswith("tokenmix."):
            assert page_of(name, ROOT / "docs/mixers") == page_stem(cls)


class Api:
    """What ``push_to_hub`` calls, without a network: keeps the files of every commit."""

    commits: list[dict] = []

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, *, repo_id, private, exist_ok):
        assert exist_ok
        if "refuse" in repo_id:
            raise PermissionError("403\nForbidden: you may not")
        self.private = private
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{'' if '/' in repo_id else 'me/'}{repo_id}")

    def upload_folder(self, *, folder_path, **given):
        files = {p.name: p.read_bytes() for p in Path(folder_path).iterdir()}
        self.commits.append({**given, "files": files, "token": self.token, "private": self.private})
        return f"https://huggingface.co/{given['repo_id']}/commit/1"


@pytest.fixture
def commits(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(Api, "commits", found := [])
    return found


def test_a_push_is_one_commit_of_the_folder(commits, tmp_path):
    model = lm()
    assert model.push_to_hub("tiny", private=True, token="t", branch="b", create_pr=True, ignore_patterns="*.md") == (
        "https://huggingface.co/me/tiny/commit/1"
    )
    (commit,) = commits
    assert {n: commit[n] for n in ("repo_id", "private", "token", "revision", "create_pr", "ignore_patterns")} == {
        "repo_id": "me/tiny", "private": True, "token": "t", "revision": "b", "create_pr": True,
        "ignore_patterns": "*.md",
    }  # fmt: skip
    assert sorted(commit["files"]) == ["README.md", "config.json", "model.safetensors"]
    assert b'LM.from_pretrained("me/tiny")' in commit["files"]["README.md"]
    assert model.save_pretrained(tmp_path / "named", push_to_hub=True, commit_message="first").endswith("commit/1")
    assert (commits[1]["repo_id"], commits[1]["commit_message"]) == ("me/named", "first")
    for name, content in commit["files"].items():
        assert name == "README.md" or (tmp_path / "named" / name).read_bytes() == content
    said = refusal_of(lambda: model.push_to_hub("me/refuse"))
    assert said == "LM.push_to_hub: 'me/refuse': 403 Forbidden: you may not."


def test_a_model_of_the_hub_is_loaded_by_its_files(monkeypatch, tmp_path):
    model, asked = lm(), []
    model.save_pretrained(tmp_path)

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options))
        if repo_id != "me/tiny":
            raise LocalEntryNotFoundError("Cannot find the file\n on the disk")
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    options = {"revision": "v1", "token": "t", "cache_dir": "c", "force_download": True, "local_files_only": True}
    found = LM.from_pretrained("me/tiny", **options)
    assert [each[:2] for each in asked] == [("me/tiny", "config.json"), ("me/tiny", "model.safetensors")]
    assert all(each[2] == options for each in asked)
    tokens = inputs_of(model)[0]
    assert torch.equal(found(tokens), model(tokens))
    said = refusal_of(lambda: LM.from_pretrained("me/gone"))
    assert "there is no folder 'me/gone'" in said
    assert "Cannot find the file on the disk" in said


def test_the_cache_is_enough_offline_and_wrong_names_are_refused(tmp_path):
    """With the real huggingface_hub, which may not use a network here."""
    code = "import sys; from tokenmix.models import LM; from tokenmix import MixerError\n"
    code += "for name in ('me/gone', 'a/b/c', '/no/such/folder'):\n"
    code += "    try: LM.from_pretrained(name, cache_dir=sys.argv[1], local_files_only=True)\n"
    code += "    except MixerError as why: print(why)\n"
    said = in_a_fresh_process(code, tmp_path / "none", HF_HUB_OFFLINE="1").splitlines()
    assert len(said) == 3
    assert all(line.startswith("LM.from_pretrained: there is no folder") for line in said)
    snapshot = tmp_path / "models--me--tiny/snapshots/abc"
    lm().save_pretrained(snapshot)
    (tmp_path / "models--me--tiny/refs").mkdir()
    (tmp_path / "models--me--tiny/refs/main").write_text("abc")
    assert isinstance(LM.from_pretrained("me/tiny", cache_dir=tmp_path, local_files_only=True), LM)


def test_a_class_of_your_own_derives_from_a_model(tmp_path):
    class Mine(LM):
        pass

    model = Mine(LMConfig(8, 16, (ATTENTION,)))
    model.save_pretrained(tmp_path)
    assert type(Mine.from_pretrained(tmp_path)) is Mine
    assert f"from {__name__} import Mine" in (tmp_path / "README.md").read_text()
