"""What a reader found and left out, with counts."""

from __future__ import annotations

from tokenmix.lab.data.inventory import Inventory, first_names


def test_an_inventory_says_what_was_found_and_what_was_left_out():
    found = Inventory("mine")
    found.count("files", 1)
    found.count("rows", 1200)
    found.tell("columns", "en, de")
    assert found.lines() == ["data: mine: 1 file, 1,200 rows; columns: en, de."]
    found.leave("hidden", ".a", ".b")
    found.leave("hidden", ".c", ".d")
    found.leave("empty", "e.txt")
    assert found.lines()[1:] == ["data: mine: left out: 4 hidden (.a, .b, .c, ...); 1 empty (e.txt)."]
    assert found.to_json()["left_out"]["hidden"] == {"count": 4, "first": [".a", ".b", ".c"]}
    assert Inventory.from_json(found.to_json()) == found
    whole = Inventory("all")
    whole.merge(found)
    whole.merge(found)
    assert whole.found == {"files": 2, "rows": 2400, "columns": "en, de"}
    assert whole.left_out["hidden"] == (8, [".a", ".b", ".c"])


def test_counts_of_many_classes_show_the_largest():
    found = Inventory("mine")
    found.tell_counts("classes", {f"c{i}": i for i in range(10)})
    assert found.found["classes"] == "c9 9, c8 8, c7 7, c6 6, c5 5, c4 4, c3 3, c2 2 and 2 more"
    found.tell_counts("splits", {"train": 1000, "valid": 1})
    assert found.found["splits"] == "train 1,000, valid 1"
    assert first_names(["a", "b", "c", "d"], 2) == "a, b and 2 more"
