"""Write the page "From attention to AFT" as a notebook, so that both have one source.

    python -m benchmarks.walk_notebook          # docs/from-attention-to-aft.md -> examples/from_attention_to_aft.ipynb

Text becomes cells of text, formulas those of Jupyter, and each example of the page a cell of code with its output.
"""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/from-attention-to-aft.md"
NOTEBOOK = ROOT / "examples/from_attention_to_aft.ipynb"
PYTHON = re.compile(r"^```python\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)
MATH = re.compile(r"^```math\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)")
THIS_PAGE = "The repository has this page as a notebook too, `examples/from_attention_to_aft.ipynb`. "


def notebook(page: str) -> dict[str, Any]:
    """Return the notebook of a page in Markdown, in nbformat 4.5."""
    parts = PYTHON.split(page)  # text, code, text, code ... text
    cells: list[dict[str, Any]] = []
    for i, part in enumerate(parts):
        cells += code_cells(part) if i % 2 else text_cells(part)
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    count = 0
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["execution_count"] = count = count + 1
            for output in cell["outputs"]:
                output["execution_count"] = count
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text_cells(text: str) -> list[dict[str, Any]]:
    """Return one cell of text, or none: paths start from examples/, and formulas stand between dollars."""
    text = LINK.sub("](../docs/", text.replace(THIS_PAGE, ""))
    text = MATH.sub(lambda found: "".join(f"$${line}$$\n\n" for line in found[1].splitlines()), text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return [{"cell_type": "markdown", "metadata": {}, "source": lines(text)}] if text else []


def code_cells(block: str) -> list[dict[str, Any]]:
    """Return a cell for the examples of a block up to each output that the page shows."""
    cells, source = [], ""
    for example in doctest.DocTestParser().get_examples(block):
        source += example.source
        if example.want:
            cells.append(code_cell(source, example.want))
            source = ""
    return [*cells, code_cell(source, "")] if source else cells


def code_cell(source: str, output: str) -> dict[str, Any]:
    """Return a cell of code with what its last expression shows."""
    shown = {"data": {"text/plain": lines(output.strip())}, "metadata": {}, "output_type": "execute_result"}
    return {
        "cell_type": "code",
        "metadata": {},
        "source": lines(source.strip()),
        "outputs": [shown] if output else [],
    }


def lines(text: str) -> list[str]:
    """Return the lines of a text with their ends, as notebooks store them."""
    return text.splitlines(keepends=True)


def written(page: str) -> str:
    """Return the notebook of a page as the text of its file."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(written(PAGE.read_text()))
