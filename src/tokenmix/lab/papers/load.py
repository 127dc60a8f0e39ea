"""Data files: one TOML file for each source in ``sources``, checked field by field when it is read."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import MixerError
from ...system.config import from_json, nearest
from ...types import Record
from .claim import CLAIMED, VERDICTS, Claim, Number, Paper, Trial

SOURCES = Path(__file__).parent / "sources"


@dataclass(frozen=True)
class RecipeRows:
    """The rows of a recipe as numbers, which stand there as printed.

    Args:
        name: the recipe.
        fields: names in a row's ``printed``, whose numbers are joined by " / "; rows that lack one are left out.
        rows: beginning of the names of the rows.
        form: format of one number.
        label: what is appended to the name of a row.
    """

    name: str
    fields: tuple[str, ...]
    rows: str = ""
    form: str = "{:.3f}"
    label: str = ""

    def printed_numbers(self) -> dict[str, str]:
        """Return the printed numbers by the names of the rows."""
        from ..recipes import find_recipe

        return {
            name.removeprefix(self.rows).replace("_", " ") + self.label: " / ".join(
                self.form.format(row.printed[field]) for field in self.fields
            )
            for name, row in find_recipe(self.name).rows.items()
            if name.startswith(self.rows) and all(field in row.printed for field in self.fields)
        }


def read_papers(folder: Path = SOURCES) -> dict[str, Paper]:
    """Read every source of a folder, in the order that the files state."""
    papers = sorted(map(read_paper, sorted(folder.glob("*.toml"))), key=lambda paper: paper.order)
    return {paper.key: paper for paper in papers}


def read_paper(file: Path) -> Paper:
    """Read the data file of one source; what is damaged or mistyped is refused with its place."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as why:  # tomllib.TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise MixerError(f"papers: {file.name} is no TOML file: {why}.") from None
    claims = tuple(
        _claim(claim, f"{file.name}, claim {i} ({claim.get('section', 'without a section')})")
        for i, claim in enumerate(_tables(data, "claim", file.name), 1)
    )
    paper = from_json(Paper, data | {"key": file.stem, "claims": claims}, where=file.name)
    _refuse_twice([f"{claim.section}: {number.name}" for claim in claims for number in claim.numbers], file.name)
    return paper


def _tables(data: Record, name: str, where: str) -> list[Record]:
    """Take a list of tables out of a table."""
    tables = data.pop(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise MixerError(f"papers: {where}: {name} must be a list of tables, [[{name}]], got {tables!r:.60}.")
    return tables


def _claim(data: Record, where: str) -> Claim:
    """Return one claim."""
    trials = tuple(from_json(Trial, trial, where=f"{where}.trials") for trial in _tables(data, "trials", where))
    for trial in trials:
        _one_of(trial.claimed, CLAIMED, f"{where}.trials.claimed")
    numbers = tuple(number for entry in _tables(data, "numbers", where) for number in _numbers(entry, where))
    if not numbers:
        raise MixerError(f"papers: {where} has no numbers; give [[claim.numbers]], at least one.")
    return from_json(Claim, data | {"numbers": numbers, "trials": trials}, where=where)


def _numbers(entry: Record, where: str) -> Iterator[Number]:
    """Return the number of an entry, or those of its rows, which share the entry's other fields."""
    given = [name for name in ("name", "rows", "recipe") if name in entry]
    if len(given) != 1:
        raise MixerError(f"papers: {where}: [[claim.numbers]] needs one of name, rows and recipe, got {given}.")
    if "name" in entry:
        yield _number(entry, f"{where}, number {entry['name']}")
        return
    recipe, rows = entry.pop("recipe", None), entry.pop("rows", None)
    if recipe is not None:
        rows = _recipe_rows(from_json(RecipeRows, recipe, where=f"{where}.recipe"), where)
    if not isinstance(rows, dict) or not rows:
        raise MixerError(f"papers: {where}.rows must be a table of names and printed numbers, got {rows!r:.60}.")
    for name, row in rows.items():
        own = row if isinstance(row, dict) else {"printed": row}
        both = [table["args"] for table in (entry, own) if isinstance(table.get("args"), dict)]
        args = {"args": both[0] | both[1]} if len(both) == 2 else {}
        yield _number(entry | own | args | {"name": name}, f"{where}, number {name}")


def _recipe_rows(rows: RecipeRows, where: str) -> dict[str, str]:
    """Return the printed numbers of a recipe, of which there must be some."""
    try:
        found = rows.printed_numbers()
    except (MixerError, LookupError, ValueError) as why:
        raise MixerError(f"papers: {where}.recipe: {why}") from None
    if not found:
        raise MixerError(f"papers: {where}.recipe: no row of {rows.name} begins with {rows.rows!r} and has its fields.")
    return found


def _number(data: Record, where: str) -> Number:
    """Return one number whose function exists and takes its arguments."""
    number = from_json(Number, data, where=where)
    _one_of(number.untested, VERDICTS, f"{where}.untested")
    if number.compute:
        try:
            inspect.signature(number.function).bind(**number.args)
        except MixerError as why:
            raise MixerError(f"papers: {where}.compute: {str(why).removeprefix('papers: ')}") from None
        except TypeError as why:
            raise MixerError(f"papers: {where}.args do not fit {number.compute}: {why}.") from None
    return number


def _one_of(value: str, known: tuple[str, ...], where: str) -> None:
    if value not in known:
        raise MixerError(f"papers: {where} is {value!r}; {nearest(value, known)}.")


def _refuse_twice(names: list[str], where: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MixerError(f"papers: {where} has two numbers of the name {twice[0]!r}; rename one.")
