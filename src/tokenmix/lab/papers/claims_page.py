"""The page of claims as Markdown, one section for each source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ..sweep.evidence import Comparison
from .claim import VERDICTS, Claim, Number, Paper, Trial, Value, write_value
from .dotted import locate_code
from .ours import count_verdicts, drawn_again, measured_elsewhere, outcomes, recorded_values, training_minutes

DOCS = Path(__file__).resolve().parents[4] / "docs"

INTRODUCTION = """# Claims of the papers

What the papers claim, section by section, as printed, and what is found here. `make tables` writes this page from the
data files in `src/tokenmix/lab/papers/sources`, and computes every number of ours anew; `tokenmix paper` and
`tokenmix paper KEY` show the same table, `tokenmix paper KEY --run` computes it.

- A number that needs no training is *confirmed* if ours, computed from a model that is built or a form that is run,
  rounded to the printed digits is the printed one, and *contradicted* if not; the reason stands below the table.
- Where ours is only what the library states (a mixer's cost formula, a default, a recipe's field) and agrees, it is
  *stated alike*: we wrote down the same, which is no test.
- Numbers in brackets in the column *printed* are printed nowhere: they follow from the formula that is.
- Scores of the papers' trained models, and times and memory on their machines, *cannot be tested here*: they take their
  data, sizes and GPUs. The recipe that is named trains such a model.
- *Tried here* is the same question, put to models that train on one machine, by [the protocol](evidence.md): the
  architecture around the mixer, the task, tokens, tuned rates, at least three paired seeds and a spread. It is
  *confirmed* or *contradicted* if the 95 % interval of the difference leaves 0 out, *no difference* if not. With fewer
  seeds, or not run, it *cannot be tested here*. That one row is *like* another is contradicted by a difference in
  either direction, and never confirmed. None of it says anything of the papers' sizes. The plans are in
  `benchmarks/sweeps`: `tokenmix sweep benchmarks/sweeps/PLAN.json` runs one.
- *Faster*, *slower*, *smaller* and *larger* are tried in the same tables: CPU time or peak memory of two calls, on one
  thread of a CPU, three times in turns (`python -m benchmarks.directions`). The verdict is about the direction alone,
  by the 95 % interval of the ratio over the repeats; how large the papers' ratios are on their GPUs it does not say.
  *Higher* is the same of what trained models do, such as how far they look, over their seeds.
- *Not built yet*: the library lacks what the claim is about.

Second-hand numbers are those that were not read in the document itself. A value in brackets was measured here under
other conditions and decides nothing.

53 verdicts of earlier versions of this page were withdrawn, and none was turned into its opposite: 43 confirmed what
the library itself states, 8 were arithmetic with printed numbers, and 2 were of models that had not learned the sums of
their training (`LOG.md`, 2026-11-30).

Of nine claims nothing is built or run: Adaptive-Span, RepMLP and models of feed-forward layers alone
([Mixers](mixers/index.md#left-out-and-what-is-nearest) has what is nearest); dynamic NTK, whose base would outdate the
keys that a stream has stored; that AFT's bits on the training set are the lowest, as the language models here see each
byte at most once, where training and validation bits say the same; LeViT, MobileViT and other hybrids, which Hydra's
paper names beside itself; pruned heads, named there too; Abacus by effective depth, hours of training for each depth;
instance segmentation, for which a pyramid's maps go into another library's head ([Dense
tasks](dense.md#the-pyramid-in-a-detector)); and LiVT by number of parameters, on a set that is not at hand."""

COMPUTED, STATEMENTS, PRINTED = "numbers computed here", "numbers that the library states", "numbers only printed"
TRAINED, MEASURED = "small models, trained here", "time and memory, measured here"


def page(papers: tuple[Paper, ...]) -> str:
    """Return the whole page, from the recorded values."""
    return "\n\n".join([INTRODUCTION, *_lots_text(), overview(papers), *map(section, papers)]) + "\n"


def _lots_text() -> list[str]:
    """Return how many verdicts that were drawn by lot kept their word, and each of them."""
    lots = drawn_again()
    done = [lot for lot in lots if "word" in lot]
    if not done:
        return []
    words = Counter(lot["word"] for lot in done)
    head = f"{len(lots)} verdicts on small models were drawn by lot, to train both rows of each again with three new "
    head += "seeds at the rates of before (`benchmarks/lots.py`). "
    head += f"Of {len(done)} that were, " if len(done) < len(lots) else "Of them, "
    head += f"{words.pop('kept', 0)} kept their word" + "".join(f"; *{word}*: {n}" for word, n in words.most_common())
    head += ". *Not found again* has no difference now, *a difference now* had none before."
    table = ["| drawn | in | before | with new seeds | |", "|---|---|---|---|---|"]
    for lot in done:
        trial = Trial(**lot["trial"])
        told = (Comparison(**lot[when]).text() for when in ("before", "now"))
        table.append(f"| {trial.text('`{}`')} | `{trial.sweep}` | {' | '.join(told)} | {lot['word']} |")
    return [head, "\n".join(table)]


def overview(papers: tuple[Paper, ...]) -> str:
    """Return the verdicts counted by kind, and by source."""
    named = [(f"[`{paper.key}`](#{paper.key}): {paper.title}", paper) for paper in papers]
    numbers = {name: paper.verdicts(recorded_values(paper)) for name, paper in named}
    tables = [_counts("by kind", count_kinds(papers), VERDICTS), _counts("numbers", numbers, VERDICTS)]
    for kind, measured in ((TRAINED, False), (MEASURED, True)):
        found = {name: count for name, paper in named if (count := count_verdicts(paper, measured=measured))}
        tables.append(_counts(kind, found, VERDICTS[:4]))
    return "\n\n".join(tables)


def count_kinds(papers: tuple[Paper, ...]) -> dict[str, Counter[str]]:
    """Count the verdicts of all papers by how they come about."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in (COMPUTED, STATEMENTS, PRINTED, TRAINED, MEASURED)}
    kinds = {"computed": COMPUTED, "stated": STATEMENTS, "": PRINTED}
    for paper in papers:
        ours = recorded_values(paper)
        for key, number in paper.numbers().items():
            found[kinds[number.kind]][number.verdict(ours.get(key))] += 1
        found[TRAINED] += count_verdicts(paper)
        found[MEASURED] += count_verdicts(paper, measured=True)
    return found


def _counts(head: str, counts: Mapping[str, Counter[str]], verdicts: tuple[str, ...]) -> str:
    """Return a table of counted verdicts, one line for each source."""
    rows = [f"| {name} | {' | '.join(str(count[v] or '') for v in verdicts)} |" for name, count in counts.items()]
    return "\n".join([f"| {head} | {' | '.join(verdicts)} |\n|---{'|---' * len(verdicts)}|", *rows])


def section(paper: Paper) -> str:
    """Return the section of one source."""
    about = ", ".join(part for part in (paper.authors, f"arXiv {paper.arxiv}" if paper.arxiv else "") if part)
    head = f"## {paper.key}\n\n{paper.title}{f' ({about})' if about else ''}."
    ours = recorded_values(paper)
    return "\n\n".join([head, *(part for claim in paper.claims for part in _claim(paper, claim, ours))])


def _claim(paper: Paper, claim: Claim, ours: dict[str, Value]) -> list[str]:
    """Return the parts of one claim: sentence, equation, where its code is, table, reasons."""
    parts = [f"### {paper.key}: {claim.section}", claim.says]
    if claim.equation:
        parts.append(f"```text\n{claim.equation}\n```")
    where = [f"Code: `tokenmix.{claim.code}` in `src/{locate_code(claim.code)[0]}`."] if claim.code else []
    where += [f"Code: `{claim.example}`."] if claim.example else []
    command = paper.command(claim)
    parts += [" ".join([*where, *([f"Run: `{command}`."] if command else [])])] if where or command else []
    rows = [row(claim, number, ours) for number in claim.numbers]
    parts.append("\n".join(["| number | printed | ours | verdict |", "|---|---|---|---|", *rows]))
    reasons = [f"- {number.name}: {number.why}." for number in claim.numbers if number.why]
    parts += ["\n".join(reasons)] if reasons else []
    return [*parts, *_trials_text(claim)]


def _trials_text(claim: Claim) -> list[str]:
    """Return what was tried here of a claim, and where."""
    place = f"[{title(claim.small)}]({claim.small})" if claim.small else ""
    if not claim.trials:
        return [f"Tried here: {place}."] if place else []
    table = ["| tried here | in | difference | CPU-minutes | verdict |", "|---|---|---|---|---|"]
    for trial, (verdict, found) in outcomes(claim):
        took = "" if (minutes := training_minutes(trial)) is None else f"{minutes:.0f}"
        table.append(f"| {trial.text('`{}`')} | `{trial.sweep}` | {found} | {took} | {verdict} |")
    return ["\n".join(table), *([f"More in {place}."] if place else [])]


def title(place: str) -> str:
    """Return the title of the page of the documentation that holds a section, "page.md#section"."""
    return (DOCS / place.partition("#")[0]).read_text().partition("\n")[0].removeprefix("# ")


def row(claim: Claim, number: Number, ours: dict[str, Value]) -> str:
    """Return one row of a claim's table."""
    value = ours.get(f"{claim.section}: {number.name}")
    name = f"{number.name} ({number.source})" if number.source else number.name
    printed = with_unit(number.printed, number.unit)
    cells = [name, f"[{printed}]" if number.derived else printed, value_text(number, value), number.verdict(value)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def with_unit(text: str, unit: str) -> str:
    """Append a unit to a number."""
    return f"{text} {unit}".strip() if any(c.isdigit() for c in text) else text


def value_text(number: Number, value: Value | None) -> str:
    """Return our value as text; one from ``benchmarks/results`` stands in brackets, with its file."""
    if value is not None:
        return with_unit(write_value(number.printed, value), number.unit if not isinstance(value, str) else "")
    if number.result:
        found = measured_elsewhere(number.result)
        return f"[{found:.2f}, {number.result.partition(':')[0]}]" if found is not None else number.result
    return ""
