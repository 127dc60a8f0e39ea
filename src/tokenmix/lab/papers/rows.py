"""Rows of printed numbers that claims share: those of recipes, and those of plain tables."""

from __future__ import annotations

from .claim import NOT_BUILT, NOT_YET, TOO_LARGE, Number


def trained(rows: dict[str, str], unit: str = "", *, source: str = "", built: bool = True) -> tuple[Number, ...]:
    """Return the numbers of a table that only training or a data set can test, as printed, by the names of its rows."""
    without = TOO_LARGE if built else NOT_BUILT
    return tuple(Number(name, printed, unit, source=source, without=without) for name, printed in rows.items())


def timed(rows: dict[str, str], unit: str, *, source: str = "") -> tuple[Number, ...]:
    """Return the numbers of a table of speed or memory, which take its authors' machine, by the names of its rows."""
    return tuple(Number(name, printed, unit, source=source, without=NOT_YET) for name, printed in rows.items())


def of_recipe(
    recipe: str,
    rows: str,
    fields: tuple[str, ...],
    unit: str,
    form: str = "{:.3f}",
    label: str = "",
    without: str = TOO_LARGE,
) -> tuple[Number, ...]:
    """Return the numbers that a recipe's rows give as printed, joined by " / " where there are several fields.

    Args:
        rows: beginning of the names of the rows.
        fields: names in a row's ``printed``; rows that lack one of them are left out.
        form: format of one number.
        label: what is appended to the name of a row.
        without: their verdict: quality cannot be tested at this size, ``NOT_YET`` is that of speed and memory.
    """
    from ..recipes import RECIPES

    found = []
    for name, row in RECIPES[recipe].rows.items():
        if name.startswith(rows) and all(field in row.printed for field in fields):
            printed = " / ".join(form.format(row.printed[field]) for field in fields)
            found.append(Number(name.removeprefix(rows).replace("_", " ") + label, printed, unit, without=without))
    return tuple(found)
