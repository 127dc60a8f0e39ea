"""Define a hook of mkdocs: a page shows a claim of a paper as printed and as found, in the language of the page.

A page asks by ``<!-- claim KEY: SECTION -->`` for the tables of one claim, and by ``<!-- locality -->`` and
``<!-- detection -->`` for what ``benchmarks/locality.py`` has measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tokenmix.lab.papers import find_paper, outcomes, recorded_values
from tokenmix.lab.papers.claims_page import value_text, with_unit

LOCALITY = Path(__file__).parent / "results" / "locality.json"
CLAIM = re.compile(r"<!-- claim (\w+): (.+?) -->")
CHINESE = {
    "number": "项目",
    "printed": "论文",
    "ours": "此处",
    "verdict": "结论",
    "tried here": "此处试验",
    "in": "计划",
    "difference": "差值",
    "better than": "优于",
    "worse than": "差于",
    "like": "相当于",
    "faster than": "快于",
    "slower than": "慢于",
    "smaller than": "内存少于",
    "larger than": "内存多于",
    "higher than": "高于",
    "not run": "尚未运行",
    "confirmed": "证实",
    "contradicted": "相反",
    "no difference": "无差异",
    "cannot be tested here": "此处无法检验",
    "not built yet": "尚未实现",
    "stated alike": "表述一致",
    "second-hand": "转引",
    "layer": "层",
    "softmax attention, ViT": "softmax 注意力，ViT",
    "bias of AFT-full, ViT": "AFT-full 的偏置，ViT",
    "softmax attention, bytes": "softmax 注意力，字节",
    "any shape": "任意形状",
    "one kind of shape": "某一种形状",
    "untrained": "未训练",
}
"""The words of the tables; others, such as names of rows, are left as they are."""
KINDS = {"vit": "softmax attention, ViT", "vit_bias": "bias of AFT-full, ViT", "lm": "softmax attention, bytes"}


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Put the tables where the page asks for them; mkdocs calls this."""
    chinese = page is not None and page.file.src_uri.endswith(".zh.md")
    words = CHINESE if chinese else {}
    markdown = CLAIM.sub(lambda found: claim_tables(found[1], found[2], words), markdown)
    for mark, build in (("<!-- locality -->", locality), ("<!-- detection -->", detection)):
        if mark in markdown:
            markdown = markdown.replace(mark, build(LOCALITY, words))
    return markdown


def claim_tables(key: str, section: str, words: dict[str, str]) -> str:
    """Return the numbers of a claim, and below them what small models say of it.

    Left out are the columns of our values and their verdicts where no number has a value, and numbers that are words.
    """
    paper = find_paper(key)
    found = [claim for claim in paper.claims if claim.section == section]
    if not found:
        raise ValueError(f"docs: the source {key!r} has no claim {section!r}.")
    claim, ours = found[0], recorded_values(paper)
    lines = []
    for number in claim.numbers:
        value = ours.get(f"{section}: {number.name}")
        name = f"{number.name} ({_say(number.source, words)})" if number.source else number.name
        shown, verdict = value_text(number, value), number.verdict(value)
        lines.append([name, with_unit(number.printed, number.unit), shown, _say(verdict, words)])
    width = 4 if any(line[2] for line in lines) else 2
    printed = any(number.compute or any(map(str.isdigit, number.printed)) for number in claim.numbers)
    heads = [_say(head, words) for head in ("number", "printed", "ours", "verdict")]
    parts, tried = [_table(heads[:width], lines, width)] * printed, []
    for trial, (verdict, difference) in outcomes(claim):
        claimed = f"`{trial.row}` {_say(trial.relation, words)} `{trial.against}`"
        tried.append([claimed, f"`{trial.sweep}`", _difference(difference, words), _say(verdict, words)])
    if tried:
        heads = [_say(head, words) for head in ("tried here", "in", "difference", "verdict")]
        parts.append(_table(heads, tried, 4))
    return "\n\n".join(parts)


def _say(text: str, words: dict[str, str]) -> str:
    return words.get(text, text)


def _difference(text: str, words: dict[str, str]) -> str:
    """Return the difference of a trial with its seeds in the words of the page."""
    if not words:
        return text
    for said, chinese in (
        (r"(\d+) seeds?", r"\1 个种子"),
        (r"(\d+) repeats?", r"\1 次重复"),
        (r" times the (\w+)", r" 倍 \1"),
    ):
        text = re.sub(said, chinese, _say(text, words))
    return text


def _table(heads: list[str], lines: list[list[str]], width: int) -> str:
    rows = [heads, ["---"] * width, *(line[:width] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def locality(file: Path, words: dict[str, str]) -> str:
    """Return how far the tokens are that a layer reads, over the mean of equal weights; how much of it is near."""
    runs = _list_trained(file, KINDS)
    if not runs:
        return _say_missing(words)
    depth = max(len(layers) for seeds in runs.values() for layers in seeds)
    lines = []
    for i in range(depth):
        cells = []
        for seeds in runs.values():
            here = [layers[i] for layers in seeds if i < len(layers)]
            near = f", {100 * mean(each['near'] for each in here):.0f} %" if here else ""
            cells.append(_spread([each["distance"] for each in here]) + near)
        lines.append([str(i + 1), *cells])
    heads = [_say(head, words) for head in ("layer", *(KINDS[run] for run in runs))]
    said = []
    for run, seeds in runs.items():
        lower = sum(layers[0]["distance"] < layers[-1]["distance"] for layers in seeds)
        equal = f"{100 * seeds[0][0]['near_equal']:.0f} %"
        name = _say(KINDS[run], words)
        said.append(
            f"{name}：{len(seeds)} 个模型中有 {lower} 个的第一层比最后一层更局部；权重相等时附近的份额为 {equal}。"
            if words
            else f"{name}: the first layer is more local than the last in {lower} of {len(seeds)} models; "
            f"with equal weights {equal} would be near."
        )
    return "\n\n".join([_table(heads, lines, len(heads)), "\n".join(f"- {each}" for each in said)])


def detection(file: Path, words: dict[str, str]) -> str:
    """Return how well the best key of each layer tells patches of shapes from others."""
    if not (seeds := _list_trained(file, ["keys"]).get("keys")):
        return _say_missing(words)
    start = _list_trained(file, ["keys"], "start")["keys"]
    lines = []
    for i in range(len(seeds[0])):
        both = [(what, when) for what in ("any", "kind") for when in (seeds, start)]
        lines.append([str(i + 1), *(_spread([layers[i][what] for layers in when]) for what, when in both)])
    untrained = _say("untrained", words)
    kinds = [_say(kind, words) for kind in ("any shape", "one kind of shape")]
    heads = [_say("layer", words), *(head for kind in kinds for head in (kind, f"{kind}, {untrained}"))]
    return _table(heads, lines, len(heads))


def _list_trained(file: Path, kinds: Any, when: str = "trained") -> dict[str, list[list[dict[str, float]]]]:
    """Return the layers of the finished models of these kinds."""
    found = json.loads(file.read_text())["runs"] if file.is_file() else {}
    return {kind: [seed[when] for seed in found[kind].values()] for kind in kinds if kind in found}


def _spread(values: list[float]) -> str:
    """Return the mean of the seeds, and their standard deviation where there are several."""
    if not values:
        return ""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _say_missing(words: dict[str, str]) -> str:
    return f"*{_say('not yet', words).capitalize()}*: `python benchmarks/locality.py`."
