"""What the hooks of mkdocs write: equations as MathML, the sources of every mixer, the lists of the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

import docs_claims
import docs_hooks
import docs_math
import docs_mixers
from docs_hooks import SWEEP, sweep
from tokenmix.lab.report.taxonomy import page_of
from tokenmix.mixers import CORE, MIXERS
from tokenmix.testing.skeletons import SKELETONS

ROOT = Path(__file__).resolve().parents[1]
MIXER_PAGES = sorted(p for p in (ROOT / "docs/mixers").glob("*.md") if p.stem != "index")
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def block(*lines: str) -> str:
    return "\n".join(["```math", *lines, "```"])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def written(hook, page: Path, text: str | None = None) -> str:
    file = SimpleNamespace(abs_src_path=str(page), src_uri=page.relative_to(ROOT / "docs").as_posix())
    return hook.on_page_markdown(page.read_text() if text is None else text, page=SimpleNamespace(file=file))


@pytest.mark.parametrize(
    ("latex", "mathml"),
    [
        ("x_t", "<msub><mi>x</mi><mi>t</mi></msub>"),
        (r"\frac{a}{b}", "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>"),
        ("k'_j", '<msub><mrow><mi>k</mi><mo lspace="0" rspace="0">′</mo></mrow><mi>j</mi></msub>'),
        (r"W \operatorname{norm}(x)", '<mi>W</mi><mspace width="0.167em" /><mi>norm</mi><mo stretchy="false">(</mo>'),
        ("a = -b", '<mo>=</mo><mo form="prefix">−</mo><mi>b</mi>'),
        ("(a) - b", '<mo stretchy="false">)</mo><mo>−</mo><mi>b</mi>'),
        (r"\left[ \sum_s v_s \right]", "<munder><mo>∑</mo><mi>s</mi></munder>"),
        (r"j \bmod a", "<mo>mod</mo>"),
    ],
)
def test_latex_becomes_mathml(latex, mathml):
    assert mathml in docs_math.mathml(latex, "block")


def test_a_block_is_a_box_and_keeps_its_latex_as_text():
    made = docs_math.with_mathml(block("y < x"), "page.md")
    assert '<div class="equation"><math display="block" alttext="y &lt; x">' in made
    assert "```" not in made


def test_lines_of_a_block_are_rows_with_aligned_cells():
    made = docs_math.with_mathml(block(r"\begin{aligned}", r"a &= b \\", r"c &= d", r"\end{aligned}"), "page.md")
    assert made.count("<mtr>") == 2
    assert made.count("<mtd>") == 4
    assert "&amp;" in re.search('alttext="([^"]*)"', made)[1]
    assert "<mi>&" not in made


def test_a_formula_in_a_sentence_is_safe_from_markdown_and_tables():
    made = docs_math.with_mathml(r"| a | $\left| x_t * y_t \right|$ |", "page.md")
    inside = re.search("<math.*</math>", made)[0]
    assert not set("|*_\\`[") & set(inside)


@pytest.mark.parametrize("text", ["`$CC`, and $5 or 6$7", "costs $5 and $ 6 $", "```sh\n$x$\n```", "`` `$a$` ``"])
def test_code_and_prices_are_no_formulas(text):
    assert docs_math.with_mathml(text, "page.md") == text


@pytest.mark.parametrize(
    ("latex", "why"),
    [
        (r"\foo x", r"unknown command \foo"),
        (r"\text{max\_len}", "unknown command max\\_len"),
        (r"\frac{a", "braces do not match"),
        (r"\frac{a}", "an argument of mfrac is missing"),
        (r"\left( x", "extra left or missing right"),
        ("x_", "missing super script or subscript"),
        ("a & b", r"'&' belongs inside \begin{aligned}"),
        (r"a \\ b", "belongs at the end of a line"),
        ("a\nb", "one line, or lines between"),
        ("", "one line, or lines between"),
        ("\\begin{aligned}\na\nb\n\\end{aligned}", "one line, or lines between"),
    ],
)
def test_bad_latex_names_its_page_and_line(latex, why):
    number = 6 if "begin" in latex else 5
    with pytest.raises(PluginError, match=f"^mixers/some.md:{number}: .*{re.escape(why)}"):
        docs_math.with_mathml("# Title\n\ntext\n" + block(latex), "mixers/some.md")


def test_bad_latex_in_a_later_row_and_in_a_sentence_names_its_line(tmp_path):
    with pytest.raises(PluginError, match="^a.md:4: "):
        docs_math.with_mathml(block(r"\begin{aligned}", r"a &= b \\", r"c &= \foo", r"\end{aligned}"), "a.md")
    with pytest.raises(PluginError, match="^a.md:3: "):
        docs_math.with_mathml("one\n\ntwo $x_$ three", "a.md")
    page = tmp_path / "a.md"
    page.write_text("---\nhide:\n  - toc\n---\none $x_$\n")
    file = SimpleNamespace(abs_src_path=str(page), src_uri="a.md")
    with pytest.raises(PluginError, match="^a.md:5: "):
        docs_math.on_page_markdown("one $x_$\n", page=SimpleNamespace(file=file))


@pytest.mark.parametrize("text", ["- a\n\n  ```math\n  x\n  ```", "```math\nx", "a\n\n$$x_t$$", "$$\nx\n$$"])
def test_a_block_in_a_list_or_without_an_end_or_between_dollars_is_refused(text):
    with pytest.raises(PluginError, match=r"^a.md:\d: "):
        docs_math.with_mathml(text, "a.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_converts(page):
    assert not re.search("^```math", written(docs_math, page), flags=re.MULTILINE)


@pytest.mark.parametrize("like", SKELETONS)
def test_the_page_of_a_new_mixer_converts(like):
    assert '<div class="equation"><math' in docs_math.with_mathml(SKELETONS[like].page, "new.md")


def said_of_paper(paper: str) -> str:
    """What the sources of a mixer say of its paper; a placeholder for its number is no paper."""
    number = re.search(r"arXiv (\d{4}\.\d{5})", paper)
    assert number or "arxiv" not in paper.lower(), (
        f"About(paper={paper!r}) has no number: write it as in 'Katharopoulos et al. 2020, arXiv 2006.16236', "
        "or leave arXiv out of a paper that is not there"
    )
    return f"](https://arxiv.org/abs/{number[1]})" if number else f"paper {paper}"


def test_a_paper_without_its_number_says_what_to_fill_in():
    with pytest.raises(AssertionError, match="has no number: write it as in"):
        said_of_paper("Authors year, arXiv number")
    assert said_of_paper("Authors year") == "paper Authors year"
    assert said_of_paper("Somebody 2020, arXiv 2006.16236") == "](https://arxiv.org/abs/2006.16236)"


@pytest.mark.parametrize("page", MIXER_PAGES, ids=name_of)
def test_the_page_of_a_mixer_has_an_equation_and_its_sources(page):
    text = written(docs_math, page)
    assert '<div class="equation"><math' in text
    links = written(docs_mixers, page).split("## Sources\n")[1]
    named = [name for name in MIXERS if page_of(name, ROOT / "docs/mixers") == page.stem]
    assert named
    for name in named:
        line = re.search(rf"^- `{name}`: .*$", links, flags=re.MULTILINE)[0]
        assert said_of_paper(MIXERS[name].facts.about.paper) in line
        assert f"][{MIXERS[name].__module__}.{MIXERS[name].__name__}]" in line
        assert f"`src/{MIXERS[name].__module__.replace('.', '/')}.py`" in line
        assert re.search(r"\[`\w+`\]\[tokenmix\.(functional|contrib)\.\w+\.\w+\]", line)
        assert re.search(r"\[`\w+`\]\[tokenmix\.reference\.\w+\.\w+\]", line)
        assert f"`tests/cases.py`: `{name}" in line


def test_the_reference_lists_every_mixer_form_and_equation():
    names, classes, forms, equations = (
        written(docs_mixers, ROOT / f"docs/reference/{stem}.md") for stem in ("api", "mixers", "forms", "equations")
    )
    for name, cls in MIXERS.items():
        assert f"| `{name}` |" in names
        assert f"::: {cls.__module__}.{cls.__name__}\n" in classes
        form = cls.facts.functional_form()
        assert f"::: {form.__module__}.{form.__name__}\n" in forms
        assert f"::: {docs_mixers.equation_of(name)}\n" in equations


def test_the_first_table_for_choosing_compares_every_core_mixer():
    text = written(docs_mixers, ROOT / "docs/how-to-choose-a-mixer.md")
    assert [name for name in CORE if f"| [`{name}`](mixers/" in text] == list(CORE)


def test_every_plan_of_a_sweep_has_its_table_on_one_page():
    pages = "\n".join(path.read_text() for path in PAGES)
    plans = sorted(path.stem for path in (ROOT / "benchmarks/sweeps").glob("*.json"))
    assert sorted(SWEEP.findall(pages)) == plans


def test_a_strict_build_hears_its_warnings():
    """With -q mkdocs drops them before --strict counts them, and dead anchors pass."""
    (build,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert "--strict" in build.split()
    assert not {"-q", "--quiet"} & set(build.split())


def test_a_sweep_shows_scores_and_verdicts_and_folds_the_rest():
    shown, folded = sweep("enwik8_modern").split("??? note")
    head = shown.partition("\n")[0]
    assert head == "| row | score | spread | n | state bytes | against attention | verdict |"
    assert "| aft_forget | 1.920 | 0.005 | 3 | 30,900 | -0.026 ± 0.009 | better |" in shown
    assert "| row | best rate | parameters | tokens |" in folded
    assert not re.search("seconds|peak MiB", shown + folded)
    assert "tokenmix sweep benchmarks/sweeps/enwik8_modern.json" in folded


def test_a_sweep_of_one_seed_is_indicative_and_has_no_empty_columns():
    shown = sweep("enwik8_10m").split("??? note")[0]
    assert shown.partition("\n")[0] == "| row | score | n | state bytes | against attention |"
    assert "No row has a verdict: indicative." in shown


def test_a_sweep_in_a_folded_part_stays_in_it():
    text = '??? note "More"\n\n    <!-- sweep recall -->\n\nAfter.\n'
    lines = docs_hooks.on_page_markdown(text).split("\n")
    assert [line for line in lines[1:-2] if line and not line.startswith("    ")] == []
    assert lines[-2] == "After."


def test_the_page_of_onnx_holds_what_was_timed():
    page = ROOT / "docs/hosts/onnx.md"
    found, shown = json.loads((ROOT / "benchmarks/results/onnx_speed.json").read_text()), written(docs_hooks, page)
    ratios = []
    for way in ("causal", "bidirectional"):
        assert list(found[way]) == ["32", "128", "512", "1024"]
        for name in found[way]["1024"]:
            row = next(line for line in shown.splitlines() if line.startswith(f"| `{name}` | {way} |"))
            each = [found[way][n]["attention"]["median"] / found[way][n][name]["median"] for n in found[way]]
            assert re.findall(r"\*\*([\d.]+)\*\*", row) == [f"{times:.2f}" for times in each]
            ratios += [each[-1]] if name != "attention" else []
    said = re.search(
        r"At 1,024 tokens every file is ([\d.]+) to ([\d.]+) times as fast as attention's", page.read_text()
    )
    assert said is not None
    assert (float(said[1]), float(said[2])) == (round(min(ratios), 1), round(max(ratios), 1))


def test_the_table_of_conformance_says_what_the_file_says(tmp_path):
    results = [{"promise": name, "status": "kept", "reason": ""} for name in (*docs_hooks.TOKENS, "same_twice", "x")]
    results[0] |= {"status": "broken", "reason": "off by 1"}
    results[1] |= {"status": "refused", "reason": "ValueError: not here"}
    results[-1] |= {"status": "crashed", "reason": "RuntimeError"}
    report = {"subject": "f as fla, float32", "results": results}
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"versions": {"torch": "1"}, "models": {"m": report}, "functions": {"f": report}}))
    lines = docs_hooks.conformance(file).splitlines()
    assert "| `m` | **no** | refused |" + " yes |" * 7 + " 1 of 2, **no**: x |" in lines
    assert "| `f` | fla, float32 | 8 of 11, **no**: left_padding, refused: right_padding, **no**: x |" in lines
    assert "    - `m`, left_padding: `off by 1`" in lines
    assert "    - `m`, right_padding, refused: ValueError: not here" in lines


def test_a_claim_is_shown_as_printed_and_as_found_in_the_language_of_the_page():
    shown = docs_claims.claim_tables("aft", "Table 3", {})
    assert "| factors, train / test | 2.75 / 2.74 bits/dim |\n" in shown
    trial = "| `aft_local` better than `aft_local, plain bias` | `cifar10_density` | -0.096 ± 0.050 bits per dim, "
    assert f"{trial}3 seeds | confirmed |" in shown
    computed = docs_claims.claim_tables("aft", "Table 3, parameters", {})
    assert "| a bias for each pair | 9.6 M | 9.634 M | confirmed |" in computed
    chinese = docs_claims.claim_tables("aft", "Table 3", docs_claims.CHINESE)
    assert "| `aft_local` 优于 `aft_local, plain bias` | `cifar10_density` |" in chinese
    assert "3 个种子 | 证实 |" in chinese
    with pytest.raises(ValueError, match="'aft' has no claim 'Table 99'"):
        docs_claims.claim_tables("aft", "Table 99", {})


def test_numbers_that_are_words_have_no_table():
    assert "a direction" not in docs_claims.claim_tables("aft", "Table 9", {})


def test_locality_shows_mean_and_deviation_of_the_seeds(tmp_path):
    layers = [
        [{"distance": d, "near": 0.5, "near_equal": 0.1}, {"distance": 0.8, "near": 0.2, "near_equal": 0.1}]
        for d in (0.4, 0.6)
    ]
    runs = {"vit": {str(seed): {"trained": found} for seed, found in enumerate(layers)}}
    file = tmp_path / "found.json"
    assert "`python benchmarks/locality.py`" in docs_claims.locality(file, {})
    file.write_text(json.dumps({"runs": runs}))
    shown = docs_claims.locality(file, {})
    assert "| 1 | 0.50 ± 0.14, 50 % |\n| 2 | 0.80 ± 0.00, 20 % |" in shown
    assert "more local than the last in 2 of 2 models; with equal weights 10 % would be near" in shown


def test_detection_shows_the_trained_layer_beside_the_new_one(tmp_path):
    runs = {"keys": {"0": {"start": [{"any": 0.5, "kind": 0.51}], "trained": [{"any": 0.8, "kind": 0.7}]}}}
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"runs": runs}))
    assert "| 1 | 0.80 | 0.50 | 0.70 | 0.51 |" in docs_claims.detection(file, {})
