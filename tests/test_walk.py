"""Test that notebooks and the Chinese pages say what the pages they are made from say, and that the notebooks run.

The examples of the English pages run in tests/test_docs.py.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from notebooks import NOTEBOOKS, notebook, path_of, written

ROOT = Path(__file__).resolve().parents[1]
WALK = ("docs/from-attention-to-aft.md", "docs/from-attention-to-aft.zh.md")
PAIRS = [("README.md", "README.zh.md"), WALK, ("docs/aft-annotated.md", "docs/aft-annotated.zh.md")]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+(?= )", flags=re.MULTILINE)
PICTURE = re.compile(r"!\[(.*?)\]\((assets/walk/[\w.]+)\)")


def result_of(source: str, names: dict[str, object]) -> str:
    """Run a cell, and return what a notebook shows: printed text, its last expression, or its error."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue() + ("" if value is None else repr(value))


def cells_of(page: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path_of(page).read_text())["cells"] if cell["cell_type"] == "code"]


def shown_by(output: dict[str, Any]) -> str:
    return "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_a_notebook_is_that_of_its_page(page):
    assert path_of(page).read_text() == written(page), "write it anew: make tables"


def test_no_notebook_is_left_over():
    assert {path_of(page) for page in NOTEBOOKS} == set((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_all_cells_run_from_top_to_bottom_and_show_what_they_say(page):
    # Pages import transformers and timm themselves, which fail beside a torchvision built for another torch.
    cells, checker, names = cells_of(page), doctest.OutputChecker(), {"__name__": "__main__"}
    for cell in cells:
        source, outputs = "".join(cell["source"]), cell["outputs"]
        if any(output["output_type"] == "error" for output in outputs):
            with pytest.raises(Exception, match=re.escape(outputs[0]["evalue"].split("...")[0])):
                result_of(source, names)
            continue
        expected = "".join(map(shown_by, outputs))
        assert checker.check_output(expected, result_of(source, names), doctest.ELLIPSIS), cell["id"]
    assert len(cells) >= 3


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_a_notebook_is_valid(page):
    book = json.loads(path_of(page).read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    needed = {"code": {"outputs", "execution_count"}, "markdown": set()}
    for cell in book["cells"]:
        assert set(cell) == {"id", "cell_type", "metadata", "source"} | needed[cell["cell_type"]]
    counts = [cell["execution_count"] for cell in book["cells"] if "outputs" in cell]
    assert counts == list(range(1, len(counts) + 1))
    for cell in book["cells"]:
        for output in cell.get("outputs", []):
            assert output.get("execution_count", cell["execution_count"]) == cell["execution_count"]
    text = "".join(line for cell in book["cells"] for line in cell["source"])
    assert "```python" not in text
    assert "```math" not in text


def test_links_of_the_notebooks_exist():
    books = [json.loads(path_of(page).read_text()) for page in NOTEBOOKS]
    texts = ["".join(cell["source"]) for book in books for cell in book["cells"] if cell["cell_type"] == "markdown"]
    paths = [path for path in re.findall(r"\]\(([^)#]+)", "".join(texts)) if not path.startswith("http")]
    assert paths
    made = {"../docs/explain-example.html"}  # by the build of the documentation
    assert [path for path in paths if path not in made and not (ROOT / "examples" / path).exists()] == []


def test_an_output_and_a_formula_become_cells():
    aligned = "\\begin{aligned}\na &= b \\\\\nc &= d\n\\end{aligned}\n"
    page = f"# A\n\n```math\n{aligned}```\n\n```python\n>>> x = 1\n>>> x\n1\n>>> y = 2\n\n```\n"
    first, one, two = notebook(page)["cells"]
    assert "".join(first["source"]) == f"# A\n\n$$\n{aligned}$$"
    assert ("".join(one["source"]), one["outputs"][0]["data"]["text/plain"]) == ("x = 1\nx", ["1"])
    assert ("".join(two["source"]), two["outputs"]) == ("y = 2", [])


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_the_chinese_page_has_the_same_code_and_headings(english, chinese):
    ours, theirs = ((ROOT / page).read_text() for page in (english, chinese))
    assert FENCED.findall(theirs) == FENCED.findall(ours), f"copy the blocks of {english} to {chinese}"
    heads = [HEADING.findall(FENCED.sub("", text)) for text in (ours, theirs)]
    assert heads[0] == heads[1], "each heading has its translation, in the same order"
    assert chinese.rsplit("/")[-1] in ours
    assert english.rsplit("/")[-1] in theirs


def test_links_of_the_chinese_readme_are_those_of_the_readme_and_exist():
    ours, theirs = (
        set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())) for name in ("README.md", "README.zh.md")
    )
    assert theirs
    assert {path.replace(".zh.md", ".md") for path in theirs} == {path.replace(".zh.md", ".md") for path in ours}
    assert [path for path in theirs if not (ROOT / path).exists()] == []


def test_the_annotated_pages_ask_for_the_same_tables_and_pictures():
    texts = [(ROOT / page).read_text() for page in PAIRS[2]]
    asked = [re.findall(r"<!-- .*? -->|assets/[\w/.]+", text) for text in texts]
    assert len(asked[0]) > 15
    assert asked[0] == asked[1]


@pytest.mark.parametrize("page", WALK)
def test_pictures_are_small_and_described(page):
    text = (ROOT / page).read_text()
    shown = PICTURE.findall(text)
    assert {path for _, path in shown} == {f"assets/walk/{file.name}" for file in (ROOT / "docs/assets/walk").iterdir()}
    assert all(len(alt) > 15 for alt, _ in shown)
    sizes = [(ROOT / "docs" / path).stat().st_size for _, path in shown]
    assert max(sizes) < 200_000
    assert sum(sizes) < 1_500_000
