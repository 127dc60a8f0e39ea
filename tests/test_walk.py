"""Test that the notebook and the Chinese pages say what the pages they are made from say, and that the notebook runs.

The examples of the English pages run in tests/test_docs.py.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
from pathlib import Path

import pytest

from walk_notebook import NOTEBOOK, PAGE, notebook, written

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [("README.md", "README.zh.md"), ("docs/from-attention-to-aft.md", "docs/from-attention-to-aft.zh.md")]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+(?= )", flags=re.MULTILINE)
PICTURE = re.compile(r"!\[(.*?)\]\((assets/walk/[\w.]+)\)")


def result_of(source: str, names: dict[str, object]) -> str:
    """Run a cell, and return what a notebook shows of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return "" if value is None else repr(value)


def test_the_notebook_is_that_of_the_page():
    assert NOTEBOOK.read_text() == written(PAGE.read_text()), "write it anew: make tables"


def test_all_cells_run_from_top_to_bottom_and_show_what_they_say():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for cell in cells:
        shown = "".join(line for output in cell["outputs"] for line in output["data"]["text/plain"])
        assert doctest.OutputChecker().check_output(shown, result_of("".join(cell["source"]), names), 0), cell["id"]
    assert len(cells) >= 10


def test_the_notebook_is_valid():
    book = json.loads(NOTEBOOK.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    needed = {"code": {"outputs", "execution_count"}, "markdown": set()}
    for cell in book["cells"]:
        assert set(cell) == {"id", "cell_type", "metadata", "source"} | needed[cell["cell_type"]]
    counts = [cell["execution_count"] for cell in book["cells"] if "outputs" in cell]
    assert counts == list(range(1, len(counts) + 1))
    for cell in book["cells"]:
        for output in cell.get("outputs", []):
            assert output["execution_count"] == cell["execution_count"]
    text = "".join(line for cell in book["cells"] for line in cell["source"])
    assert "```" not in text
    paths = re.findall(r"\]\(([^)#]+)", text)
    assert paths
    assert [path for path in paths if not (NOTEBOOK.parent / path).exists()] == []


def test_an_output_and_a_formula_become_cells():
    page = "# A\n\n```math\na = b\nc = d\n```\n\n```python\n>>> x = 1\n>>> x\n1\n>>> y = 2\n\n```\n"
    first, one, two = notebook(page)["cells"]
    assert "".join(first["source"]) == "# A\n\n$$a = b$$\n\n$$c = d$$"
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
    own = {"README.md", "docs/from-attention-to-aft.zh.md"}
    assert theirs
    assert theirs - own == ours - {"README.zh.md"} - own
    assert [path for path in theirs if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [page for pair in PAIRS[1:] for page in pair])
def test_pictures_are_small_and_described(page):
    text = (ROOT / page).read_text()
    shown = PICTURE.findall(text)
    assert {path for _, path in shown} == {f"assets/walk/{file.name}" for file in (ROOT / "docs/assets/walk").iterdir()}
    assert all(len(alt) > 15 for alt, _ in shown)
    sizes = [(ROOT / "docs" / path).stat().st_size for _, path in shown]
    assert max(sizes) < 200_000
    assert sum(sizes) < 1_500_000
