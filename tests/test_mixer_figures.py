"""The pictures of the mixers' pages: each core mixer has a map and a sketch, the shapes are those of a forward pass."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import docs_mixers
from mixer_figures import FOLDER, LINE, PATTERN_OPTIONS, PATTERNS, RESULTS, TOKENS, attended, maps_of, reach, spec_of
from mixer_sketches import OPTIONS, OTHER_SIZES, SIZES, flow, legend, said, svg
from tokenmix.lab.report.taxonomy import page_of
from tokenmix.mixers import CORE, MIXERS, build_mixer
from tokenmix.mixers.facts import mixer_options
from tokenmix.models import LMConfig, build_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/mixers"
SVG = "{http://www.w3.org/2000/svg}"


class Figures(HTMLParser):
    """The images of a page with their alternative texts, and the captions below them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: dict[str, str] = {}
        self.captions: dict[str, str] = {}
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "img":
            self.latest = found["src"]
            self.images[self.latest] = found["alt"]
        self.inside = self.inside or tag == "figcaption"

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "figcaption"

    def handle_data(self, data):
        if self.inside:
            self.captions[self.latest] = self.captions.get(self.latest, "") + data


def figures(name: str) -> Figures:
    page = PAGES / f"{page_of(name, PAGES)}.md"
    file = SimpleNamespace(abs_src_path=str(page), src_uri=page.relative_to(ROOT / "docs").as_posix())
    return Figures(docs_mixers.on_page_markdown(page.read_text(), page=SimpleNamespace(file=file)))


@pytest.mark.parametrize("name", CORE)
def test_the_page_of_a_core_mixer_has_its_map_and_its_sketch(name):
    found, record = figures(name), json.loads(RESULTS.read_text())["maps"][name]
    for file in (f"{name}_map.png", f"{name}_flow.svg"):
        path = f"../assets/mixers/{file}"
        assert (PAGES / path).is_file(), "draw it: python benchmarks/mixer_figures.py"
        assert len(found.images[path]) > 60
        assert name in found.images[path]
    caption = found.captions[f"../assets/mixers/{name}_map.png"]
    assert f"{record['tokens']:,} bytes" in caption
    assert f"{record['bits_per_byte']:.2f} bits per byte" in caption
    assert [f"{panel['reach']:.1f}" for panel in record["panels"]] == caption.rsplit(": ")[-1].rstrip(".").split(", ")


@pytest.mark.parametrize("name", CORE)
def test_a_map_is_of_the_model_that_the_code_builds(name):
    assert json.loads(RESULTS.read_text())["maps"][name]["spec"] == json.loads(json.dumps(spec_of(name)))


@pytest.mark.parametrize("name", PATTERNS)
def test_the_page_of_a_fixed_pattern_has_its_picture(name):
    path = f"../assets/mixers/{name}_pattern.png"
    found = figures(name)
    assert (PAGES / path).is_file()
    assert name in found.images[path]
    recorded = json.loads(RESULTS.read_text())["patterns"][name]
    pairs = {form: [each["pairs"] for each in sets] for form, sets in recorded["sets"].items()}
    now = {form: attended(name, causal=form == "causal").values() for form in pairs}
    assert pairs == {form: [int(each.sum()) for each in sets] for form, sets in now.items()}
    assert all(str(count) in found.captions[path] for counts in pairs.values() for count in counts)


def test_no_figure_is_left_over_and_all_are_small():
    expected = {f"{name}_map.png" for name in CORE} | {f"{name}_flow.svg" for name in CORE}
    expected |= {f"{name}_pattern.png" for name in PATTERNS}
    assert {file.name for file in FOLDER.iterdir()} == expected
    sizes = {file.name: file.stat().st_size for file in (ROOT / "docs/assets").rglob("*") if file.is_file()}
    assert {name: size for name, size in sizes.items() if size >= 200_000} == {}
    assert sum(sizes.values()) < 4_000_000


# --- sketches


@pytest.mark.parametrize("name", CORE)
def test_the_committed_sketch_is_that_of_the_code(name):
    drawn = svg(flow(name))
    assert (FOLDER / f"{name}_flow.svg").read_text() == drawn, "draw it: python benchmarks/mixer_figures.py --sketches"


@pytest.mark.parametrize("name", CORE)
def test_a_sketch_does_not_depend_on_the_sizes_it_was_recorded_at(name):
    assert flow(name) == flow(name, OTHER_SIZES)


def sizes_of(shape: str, letters: dict[str, int]) -> tuple[int, ...]:
    """Read a shape, such as B×T×3D, as numbers."""
    parts = [re.findall(r"\d+|[A-Za-z]", part) for part in shape.split("×")]
    return tuple(math.prod(int(each) if each.isdigit() else letters[each] for each in part) for part in parts)


@pytest.mark.parametrize("name", CORE)
def test_the_shapes_of_a_sketch_are_those_that_a_forward_pass_records(name):
    """Recorded here by plain hooks, apart from the code that draws."""
    options = {key: size for key, (size, *_) in OPTIONS.items() if key in mixer_options(MIXERS[name])}
    options = MIXERS[name].example_options(37) | options
    mixer = build_mixer(name, SIZES["D"], causal=True, **options)
    recorded: dict[str, tuple[int, ...]] = {}

    def record(key):
        def hook(module, given, out):
            if given:
                recorded[key] = tuple(out.shape)

        return hook

    for key, child in mixer.named_children():
        child.register_forward_hook(record(key))
    y = mixer(torch.randn(*SIZES.values()))
    letters = {"e": SIZES["D"] // 4, "b": 8, **SIZES}
    letters |= {letter: size for key, (size, letter, _) in OPTIONS.items() if key in options}
    steps = [*flow(name).before, *flow(name).after]
    drawn = {step.name: sizes_of(step.lines[-1], letters) for step in steps}
    assert drawn == {"x": tuple(SIZES.values()), **recorded, "y": tuple(y.shape)}
    texts = [part.text for part in ElementTree.parse(FOLDER / f"{name}_flow.svg").iter(f"{SVG}text")]
    assert {step.lines[-1] for step in steps} <= set(texts)


@pytest.mark.parametrize("name", CORE)
def test_a_sketch_is_legible_on_a_telephone_and_says_what_it_shows(name):
    root = ElementTree.parse(FOLDER / f"{name}_flow.svg").getroot()
    assert float(root.get("width")) <= 390
    assert min(float(part.get("font-size", root.get("font-size"))) for part in root.iter(f"{SVG}text")) >= 11
    found = flow(name)
    assert (root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")) == (said(found), legend(found))
    drawn = " ; ".join(part.text for part in root.iter(f"{SVG}text"))
    explained = {meaning.partition(" ")[0] for meaning in found.letters}
    shapes = {c for shape in re.findall(r"\w+(?:×\w+)+", drawn) for c in shape if c.isalpha()}
    assert shapes <= explained, "a letter without a meaning"


def test_a_sketch_follows_tensors_through_modules_and_parameters():
    found = flow("aft_forget")
    reads = {step.name: step.reads for step in [*found.before, *found.after]}
    assert reads["conv"] == ["q_proj", "k_proj", "v_proj"]
    assert (reads["k_norm"], reads["g_proj"], reads["out_proj"]) == (["conv"], ["x"], ["aft_forget"])
    ports = {port.name: port for port in found.ports}
    assert {key: port.reads for key, port in ports.items()} == {
        "q": ["conv"],
        "k": ["k_norm"],
        "v": ["conv"],
        "g": ["g_proj"],
    }
    assert ports["g"].lines == ["B×T×D", "rate D"]


# --- maps


def test_the_maps_of_a_model_are_its_layers_and_its_nearest_and_farthest_heads():
    torch.manual_seed(0)
    specs = ({"name": "attention", "heads": 4}, {"name": "local", "heads": 4, "window": 2})
    maps, facts = maps_of(build_model(LMConfig(dim=16, max_len=64, mixers=specs)).eval())
    assert facts == {"kind": "values", "groups": 4, "part": "head"}
    assert [each.title for each in maps[:2]] == ["layer 1, mean of 4 heads", "layer 2, mean of 4 heads"]
    nearest, farthest = maps[2:]
    assert nearest.title.startswith("layer 2, head ")
    assert farthest.title.startswith("layer 1, head ")
    assert reach(nearest.weights) <= 1 < reach(farthest.weights)
    for each in maps:
        torch.testing.assert_close(each.weights.sum(-1), torch.ones(len(LINE)))
        assert float(each.weights.triu(1).abs().max()) == 0.0


def test_patterns_are_those_of_the_equations():
    t, s = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    window, stride, columns, prefix, radius = (
        PATTERN_OPTIONS[key] for key in ("window", "stride", "columns", "global_tokens", "radius")
    )
    past = s <= t
    assert torch.equal(*attended("local", causal=True).values(), past & (t - s < window))
    near, far = attended("strided", causal=True).values()
    assert torch.equal(near, past & (t - s <= stride))
    assert torch.equal(far, past & ((t - s) % stride == 0))
    block, ends = attended("fixed", causal=True).values()
    assert torch.equal(block, past & (t // stride == s // stride))
    assert torch.equal(ends, past & (s % stride >= stride - columns))
    (pairs,) = attended("etc", causal=False).values()
    assert torch.equal(pairs, ((t - s).abs() <= radius) | (s < prefix) | (t < prefix))
    (lines,) = attended("axial", causal=False).values()
    width = PATTERN_OPTIONS["width"]
    assert torch.equal(lines, (t // width == s // width) | (t % width == s % width))
    assert len(attended("bigbird", causal=True)) == PATTERN_OPTIONS["heads"]
