"""Bytes as people write them, and text tables within a width."""

from __future__ import annotations

from typing import Any

import pytest

from protrain.common.tables import aligned, format_bytes, parse_memory


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1.5e9, 1_500_000_000),
        ("2400", 2400),
        ("1100B", 1100),
        ("1KiB", 1024),
        ("2 MB", 2_000_000),
        ("24GiB", 24 * 1024**3),
        (" 24 gib ", 24 * 1024**3),
        ("24GB", 24_000_000_000),
        ("0.5TiB", 512 * 1024**3),
        ("1000000TiB", 10**6 * 1024**4),
    ],
)
def test_bytes_are_read(text: int | float | str, count: int) -> None:
    assert parse_memory(text, name="host_memory") == count


@pytest.mark.parametrize(
    "wrong", ["24 apples", "", "GiB", "-1GiB", "1e3", "1,5GiB", "24GiB free", None, True, [1], b"1"]
)
def test_what_is_no_size_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match="host_memory must be a number of bytes or text like '24GiB', not ") as caught:
        parse_memory(wrong, name="host_memory")
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [0, -5, 24, "64", "0GiB", "0.5B", float("nan"), 2**64, 2**60, "1048576TiB", "9" * 400, 1e300, float("inf")]
)
def test_a_size_that_is_nothing_or_that_64_bits_cannot_add_to_is_refused(wrong: float | str) -> None:
    with pytest.raises(ValueError, match=r"host_memory must be at least 1 KiB and less than .* TiB, ") as caught:
        parse_memory(wrong, name="host_memory")
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1536, "1.5 KiB"),
        (24 * 1024**3, "24 GiB"),
        (24_000_000_000, "22.4 GiB"),
        (99.96 * 1024, "100 KiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_bytes_are_written(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_the_last_column_is_wrapped_where_there_is_room_beside_the_others() -> None:
    rows = [["name", "one two three four five six seven eight nine"], ["other", "ten"]]
    assert aligned(rows, 36) == "name   one two three four five six\n       seven eight nine\nother  ten"
