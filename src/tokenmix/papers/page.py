"""The page of claims as Markdown, one section for each source."""

from __future__ import annotations

from pathlib import Path

from .claim import VERDICTS, Claim, Number, Paper, Value, located, written
from .ours import measured_elsewhere, recorded

DOCS = Path(__file__).resolve().parents[3] / "docs"

INTRODUCTION = """# Claims of the papers

What the papers claim, section by section, as printed, and what is found here. `make tables` writes this page from the
table in `src/tokenmix/papers`, and computes every number of ours anew; `tokenmix papers` and `tokenmix paper KEY` show
the same table, `tokenmix paper KEY --run` computes it.

- A number that needs no training (a count, a formula, an identity between an equation and our code) is *confirmed* if
  ours, rounded to the printed digits, is the printed one, and *contradicted* if not; the reason stands below the table.
- A number that needs training has the verdict *not yet*. It takes runs that keep to [the protocol](evidence.md): the
  architecture around the mixer, the task, tokens, tuned rates, paired seeds and a spread. The verdicts are then
  *confirmed*, *contradicted*, *no difference* or *cannot be tested at this size*. Single short runs, which the log and
  other pages report, are no verdict.
- *In small models* leads to where the same question was put to models that train on one machine.
- *Not built yet*: the library lacks what the claim is about.

Second-hand numbers are those that were not read in the document itself. A value in brackets was measured here under
other conditions and decides nothing."""


def page(papers: tuple[Paper, ...]) -> str:
    """Return the whole page, from the recorded values."""
    return "\n\n".join([INTRODUCTION, overview(papers), *map(section, papers)]) + "\n"


def overview(papers: tuple[Paper, ...]) -> str:
    """Return the table of sources with their verdicts counted."""
    head = f"| source | {' | '.join(VERDICTS)} |\n|---{'|---' * len(VERDICTS)}|"
    rows = []
    for paper in papers:
        count = paper.verdicts(recorded(paper))
        rows.append(
            f"| [`{paper.key}`](#{paper.key}): {paper.title} | {' | '.join(str(count[v] or '') for v in VERDICTS)} |"
        )
    return "\n".join([head, *rows])


def section(paper: Paper) -> str:
    """Return the section of one source."""
    about = ", ".join(part for part in (paper.authors, f"arXiv {paper.arxiv}" if paper.arxiv else "") if part)
    head = f"## {paper.key}\n\n{paper.title}{f' ({about})' if about else ''}."
    ours = recorded(paper)
    return "\n\n".join([head, *(part for claim in paper.claims for part in _claim(paper, claim, ours))])


def _claim(paper: Paper, claim: Claim, ours: dict[str, Value]) -> list[str]:
    """Return the parts of one claim: sentence, equation, where its code is, table, reasons."""
    parts = [f"### {paper.key}: {claim.section}", claim.says]
    if claim.equation:
        parts.append(f"```text\n{claim.equation}\n```")
    where = [f"Code: `tokenmix.{claim.code}` in `src/{located(claim.code)[0]}`."] if claim.code else []
    command = paper.command(claim)
    parts += [" ".join([*where, *([f"Run: `{command}`."] if command else [])])] if where or command else []
    rows = [row(claim, number, ours) for number in claim.numbers]
    parts.append("\n".join(["| number | printed | ours | verdict |", "|---|---|---|---|", *rows]))
    reasons = [f"- {number.name}: {number.why}." for number in claim.numbers if number.why]
    parts += ["\n".join(reasons)] if reasons else []
    return [*parts, f"In small models: [{title(claim.small)}]({claim.small})."] if claim.small else parts


def title(place: str) -> str:
    """Return the title of the page of the documentation that holds a section, "page.md#section"."""
    return (DOCS / place.partition("#")[0]).read_text().partition("\n")[0].removeprefix("# ")


def row(claim: Claim, number: Number, ours: dict[str, Value]) -> str:
    """Return one row of a claim's table."""
    value = ours.get(f"{claim.section}: {number.name}")
    name = f"{number.name} ({number.source})" if number.source else number.name
    cells = [name, with_unit(number.printed, number.unit), shown(number, value), number.verdict(value)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def with_unit(text: str, unit: str) -> str:
    """Append a unit to a number."""
    return f"{text} {unit}".strip() if any(c.isdigit() for c in text) else text


def shown(number: Number, value: Value | None) -> str:
    """Return our value as text; one from ``benchmarks/results`` stands in brackets, with its file."""
    if value is not None:
        return with_unit(written(number.printed, value), number.unit if not isinstance(value, str) else "")
    if number.result:
        found = measured_elsewhere(number.result)
        return f"[{found:.2f}, {number.result.partition(':')[0]}]" if found is not None else number.result
    return ""
