"""Write pages of the documentation as notebooks, so that both have one source.

    python -m benchmarks.notebooks          # docs/PAGE.md -> examples/NAME.ipynb, for each of NOTEBOOKS

Text becomes cells of text, formulas those of Jupyter, and each example of a page a cell of code with its output.
"""

from __future__ import annotations

import doctest
import json
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {
    "index": "first_steps",
    "from-attention-to-aft": "from_attention_to_aft",
    "positions": "positions",
    "contract": "contract",
    "training": "training",
    "vision": "vision",
    "hosts/torch": "replace_attention_torch",
    "hosts/surgery": "replace_attention",
}
"""The notebooks by the pages that they are made from."""
PYTHON = re.compile(r"^```python\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)
MATH = re.compile(r"^```math\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)")
HIDDEN = re.compile(
    r"\A---\n(?s:.*?)\n---\n|^</?div[^>]*>\n|^<!--[^\n]*-->\n|^The repository has this page as a notebook too.*?\. ",
    flags=re.MULTILINE,
)
"""What only the page needs: its settings, boxes, marks of tables, and the mention of the notebook."""


def notebook(page: str, folder: str = "../docs") -> dict[str, Any]:
    """Return the notebook of a page in Markdown, in nbformat 4.5; links of the page start from ``folder``."""
    parts = PYTHON.split(page)  # text, code, text, code ... text
    cells: list[dict[str, Any]] = []
    for i, part in enumerate(parts):
        cells += code_cells(part) if i % 2 else text_cells(part, folder)
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    count = 0
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["execution_count"] = count = count + 1
            for output in cell["outputs"]:
                if output["output_type"] == "execute_result":
                    output["execution_count"] = count
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text_cells(text: str, folder: str) -> list[dict[str, Any]]:
    """Return one cell of text, or none: paths start from examples/, and formulas stand between dollars."""
    text = LINK.sub(f"]({folder}/", HIDDEN.sub("", text))
    text = MATH.sub(lambda found: f"$$\n{found[1]}$$\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return [{"cell_type": "markdown", "metadata": {}, "source": lines(text)}] if text else []


def code_cells(block: str) -> list[dict[str, Any]]:
    """Return a cell for the examples of a block up to each output that the page shows."""
    cells, source = [], ""
    for example in doctest.DocTestParser().get_examples(block):
        source += example.source
        if example.want:
            cells.append(code_cell(source, example))
            source = ""
    return [*cells, code_cell(source, None)] if source else cells


def code_cell(source: str, shown: doctest.Example | None) -> dict[str, Any]:
    """Return a cell of code with what its last example shows: an error, printed text, or a value."""
    output: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if shown is not None and shown.exc_msg:
        name, _, said = shown.exc_msg.strip().partition(": ")
        output = {"output_type": "error", "ename": name, "evalue": said, "traceback": [shown.exc_msg.strip()]}
        metadata = {"tags": ["raises-exception"]}  # the cells after it run all the same
    elif shown is not None and "print(" in shown.source:
        output = {"output_type": "stream", "name": "stdout", "text": lines(shown.want)}
    elif shown is not None:
        data = {"text/plain": lines(shown.want.strip())}
        output = {"data": data, "metadata": {}, "output_type": "execute_result"}
    return {
        "cell_type": "code",
        "metadata": metadata,
        "source": lines(source.strip()),
        "outputs": [output] if output else [],
    }


def lines(text: str) -> list[str]:
    """Return the lines of a text with their ends, as notebooks store them."""
    return text.splitlines(keepends=True)


def path_of(page: str) -> Path:
    """Return the notebook that is made from a page."""
    return ROOT / f"examples/{NOTEBOOKS[page]}.ipynb"


def written(page: str) -> str:
    """Return the notebook of a page as the text of its file."""
    folder = posixpath.join("../docs", posixpath.dirname(page)).rstrip("/")
    made = notebook((ROOT / f"docs/{page}.md").read_text(), folder)
    return json.dumps(made, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    for page in NOTEBOOKS:
        path_of(page).write_text(written(page))
