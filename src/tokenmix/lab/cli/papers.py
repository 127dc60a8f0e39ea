"""The verb of the ledger: paper."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from ...types import Record
from .output import say, say_json, shorten_text, wrap_text

if TYPE_CHECKING:
    from ..papers import Claim, Number, Paper, Value


@dataclass(frozen=True)
class ShowPapers:
    """Show what a paper claims, section by section: equation, code, its numbers, ours, the verdict; or list the papers.

    Without KEY it lists the papers whose claims are kept, with the verdicts counted.
    """

    key: Positional[Annotated[str | None, arg(metavar="KEY")]] = None
    """Key of the paper; default: list them."""

    section: str | None = None
    """Section to show, or the beginning of its name; default: all."""

    execute: Annotated[bool, arg(name="run")] = False
    """Compute our numbers anew instead of showing the recorded ones; some seconds for a paper."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Print the claims of the paper, or one line for each paper."""
        if self.key is None:
            return self._list()
        from ...errors import MixerError
        from ...system.config import nearest
        from ..papers import compute_values, find_paper, recorded_values

        paper = find_paper(self.key)
        wanted = (self.section or "").lower()
        claims = tuple(c for c in paper.claims if c.section.lower() == wanted)
        claims = claims or tuple(c for c in paper.claims if c.section.lower().startswith(wanted))
        if not claims:
            known = [c.section for c in paper.claims]
            raise MixerError(f"paper {self.key} has no section {self.section!r}; {nearest(self.section or '', known)}.")
        ours = compute_values(paper, claims) if self.execute else recorded_values(paper)
        if self.json:
            say_json(as_json(paper, claims, ours))
        else:
            say(as_text(paper, claims, ours))
        return 0

    def _list(self) -> int:
        """Print one line for each source."""
        from ...errors import MixerError
        from ..papers import NOT_BUILT, PAPERS, STATED, TOO_LARGE, VERDICTS, count_verdicts, recorded_values

        if self.section is not None or self.execute:
            given = "--section" if self.section is not None else "--run"
            raise MixerError(f"paper: {given} needs a KEY, one of {', '.join(PAPERS)}.")
        found: list[Record] = [
            {
                "key": paper.key,
                "title": paper.title,
                "year": paper.year,
                "arxiv": paper.arxiv,
                "verdicts": dict(paper.verdicts(recorded_values(paper))),
                "small": dict(count_verdicts(paper)),
            }
            for paper in PAPERS.values()
        ]
        if self.json:
            say_json(found)
            return 0
        used = {v: {TOO_LARGE: "too big", NOT_BUILT: "unbuilt", STATED: "stated"}.get(v, v) for v in VERDICTS}
        used = {v: head for v, head in used.items() if any(v in entry["verdicts"] for entry in found)}
        say(f"{'paper':13} {'year':5} {'  '.join(used.values())}  title")
        for entry in found:
            counts = "  ".join(f"{entry['verdicts'].get(v, 0) or '':>{len(head)}}" for v, head in used.items())
            head = f"{entry['key']:13} {entry['year']:5} {counts}  "
            say(shorten_text(head, entry["title"]))
        return 0


def as_json(paper: Paper, claims: tuple[Claim, ...], ours: dict[str, Value]) -> Record:
    """Return the claims as plain values."""
    from ..papers import locate_code, outcomes

    def numbers(claim: Claim) -> list[Record]:
        return [
            {
                "name": number.name,
                "printed": number.printed,
                "unit": number.unit,
                "source": number.source,
                "ours": (value := ours.get(f"{claim.section}: {number.name}")),
                "verdict": number.verdict(value),
                "kind": number.kind,
                "derived": number.derived,
                "why": number.why,
                "result": number.result,
            }
            for number in claim.numbers
        ]

    return {
        "key": paper.key,
        "title": paper.title,
        "authors": paper.authors,
        "arxiv": paper.arxiv,
        "claims": [
            {
                "section": claim.section,
                "says": claim.says,
                "equation": claim.equation,
                "code": f"tokenmix.{claim.code}" if claim.code else claim.example,
                "line": "{}:{}".format(*locate_code(claim.code)) if claim.code else "",
                "command": paper.command(claim),
                "numbers": numbers(claim),
                "small": [asdict(trial) | outcome._asdict() for trial, outcome in outcomes(claim)],
            }
            for claim in claims
        ],
    }


def as_text(paper: Paper, claims: tuple[Claim, ...], ours: dict[str, Value]) -> str:
    """Return the claims as text."""
    about = ", ".join(part for part in (paper.authors, paper.arxiv and f"arXiv {paper.arxiv}") if part)
    return "\n".join(
        [
            *wrap_text("", f"{paper.title}{f' ({about})' if about else ''}", 0),
            *(line for claim in claims for line in _claim_lines(paper, claim, ours)),
        ]
    )


def _claim_lines(paper: Paper, claim: Claim, ours: dict[str, Value]) -> list[str]:
    """Return the lines of one claim: its sentence, equation, code and command, then a row for each number."""
    from ..papers import locate_code, outcomes

    lines = ["", claim.section, *wrap_text("  ", claim.says, 2)]
    if claim.equation:
        lines += wrap_text("    ", claim.equation, 6)
    if claim.code:
        lines += wrap_text("  code  ", "{}:{}".format(*locate_code(claim.code)), 8)
    if claim.example:
        lines += wrap_text("  code  ", claim.example, 8)
    if command := paper.command(claim):
        lines += wrap_text("  run   ", command, 8)
    from ..papers.claims_page import value_text, with_unit

    rows: list[tuple[Number, str, str, str]] = []
    for number in claim.numbers:
        value = ours.get(f"{claim.section}: {number.name}")
        printed = with_unit(number.printed, number.unit)
        printed = f"[{printed}]" if number.derived else printed
        rows.append((number, printed, value_text(number, value), number.verdict(value)))
    widths = [0, max(len(row[1]) for row in rows), max(len(row[2]) for row in rows)]
    names = max(len(row[0].name) for row in rows)
    for number, printed, value, verdict in rows:
        found = f"  {value:>{widths[2]}}" if widths[2] else ""
        line = f"    {number.name:{names}}  {printed:>{widths[1]}}{found}  {verdict}"
        lines += append_remark(line, f"[{number.source}]") if number.source else [line]
        lines += wrap_text("        ", number.why, 8) if number.why else []
    for trial, (verdict, found) in outcomes(claim):
        lines += wrap_text("    ", f"in small models: {trial.text()} ({trial.sweep}): {verdict}: {found}", 8)
    return lines


def append_remark(line: str, remark: str) -> list[str]:
    """Return a remark at the end of a line, or below it where the terminal is too narrow."""
    whole = wrap_text("", f"{line}  {remark}", 0)
    return [f"{line}  {remark}"] if len(whole) == 1 else [line, *wrap_text("        ", remark, 8)]
