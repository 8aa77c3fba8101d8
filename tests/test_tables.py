"""Text tables within a width: the last column is wrapped where it stands, or goes below the others."""

from __future__ import annotations

from protrain.common.tables import aligned, wrapped


def test_a_table_that_fits_is_not_wrapped() -> None:
    rows = [["a", "bb", "c"], ["aaa", "b"], ["a", "", "cc"]]
    assert aligned(rows) == aligned(rows, 80) == "a    bb  c\naaa  b\na        cc"
    assert aligned([]) == ""


def test_the_last_column_is_wrapped_where_there_is_room_beside_the_others() -> None:
    rows = [["name", "one two three four five six seven eight nine"], ["other", "ten"]]
    assert aligned(rows, 36) == "name   one two three four five six\n       seven eight nine\nother  ten"


def test_otherwise_it_goes_below_and_a_row_without_it_takes_one_line() -> None:
    rows = [["a" * 20, "b" * 10, "one two three four five"], ["c", "d", ""], ["e", "f"]]
    assert aligned(rows, 40).splitlines() == [
        f"{'a' * 20}  {'b' * 10}",
        "    one two three four five",
        "c                     d",
        "e                     f",
    ]


def test_no_word_is_broken() -> None:
    assert wrapped("one two-three\nfour", 8, indent="  ") == "one\n  two-three\nfour"
