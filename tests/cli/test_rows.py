"""Rows of every format are read as they are, and a mistake is named with its file and line."""

from __future__ import annotations

import csv
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from protrain.cli.rows import read_rows

ROWS: list[dict[str, Any]] = [
    {"id": 1, "text": 'The first, with a comma and a "quote".'},
    {"id": 2, "text": "Ein zweites, über\nzwei Zeilen."},
    {"id": 3, "text": ""},
]
CHAT: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
    {"messages": [{"role": "user", "content": "three"}], "tags": ["a", {"b": 1}]},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write ``rows`` in the format that the name of ``path`` means."""
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8-sig")
    else:
        datasets = pytest.importorskip("datasets")
        made = datasets.Dataset.from_list(rows)
        if path.suffix == ".parquet":
            made.to_parquet(path)
        else:
            (datasets.DatasetDict(train=made, test=made) if path.name == "splits" else made).save_to_disk(path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "saved", "splits"])
def test_rows_come_as_they_were_written(name: str, tmp_path: Path) -> None:
    read = list(read_rows(write(tmp_path / name, ROWS)))
    expected = [{**row, "id": str(row["id"])} for row in ROWS] if name in ("a.csv", "a.tsv") else ROWS
    assert [row.values for row in read] == expected
    assert [row.share for row in read] == sorted(row.share for row in read)
    assert read[-1].share <= 1
    if name == "saved":
        (file,) = (tmp_path / name).glob("*.arrow")
        assert [row.values for row in read_rows(file)] == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_need_not_have_equal_rows(name: str, tmp_path: Path) -> None:
    assert [row.values for row in read_rows(write(tmp_path / name, CHAT))] == CHAT


def test_a_json_file_may_hold_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "one"}\n{"text": "two"}')
    assert [row.values["text"] for row in read_rows(tmp_path / "a.json")] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.jsonl",
            b'{"text": "one"}\n\n{"text": "tw\n',
            "a.jsonl, line 3 is not JSON: Unterminated string$",
        ),
        (
            "a.jsonl",
            b'{"text": "one"}\n{"text": "\xff"}\n',
            "a.jsonl is no UTF-8 text: line 2 has byte 0xff at offset 26 of the file; convert it, as `iconv ",
        ),
        ("a.jsonl", b'{"text": "one"}\n["two"]\n', "a.jsonl, line 2 is no object with columns, but list"),
        ("a.json", b'[{"text": "one"}, {"text": two}]', "a.json, row 2 is not JSON: Expecting value"),
        ("a.json", b'[{"text": "one"},\n', "a.json, row 2 is not JSON: Expecting value"),
        ("a.json", b'["one", "two"]', "a.json, row 1 is no object with columns, but str"),
        (
            "a.json",
            b'[{"text": "\xff"}]',
            "a.json is no UTF-8 text: line 1 has byte 0xff at offset 11 of the file; convert it",
        ),
        ("a.csv", b"id,text\n1,one\n2\n", "a.csv, line 3 has more or fewer fields than the first line names columns"),
        ("a.csv", b"id,text\n1,one,more\n", "a.csv, line 2 has more or fewer fields than"),
        ("a.csv", b'id,text\n1,"one\n', "a.csv, what follows line 1 is not CSV: unexpected end of data"),
        ("a.csv", b"text,text\none,two\n", "a.csv, line 1 has two columns with the name 'text': rename one of them$"),
        (
            "a.csv",
            b"id,text\n1,\xff\n",
            "a.csv is no UTF-8 text: line 2 has byte 0xff at offset 10 of the file; convert it",
        ),
        ("a.parquet", b"PAR1 and no more", "a.parquet cannot be read as Parquet: "),
        ("a.arrow", b"no arrow at all", "a.arrow cannot be read by the package datasets: "),
    ],
)
def test_a_broken_row_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    if name in ("a.parquet", "a.arrow"):
        pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^--data: {tmp_path}/{said}"):
        list(read_rows(tmp_path / name))


def test_a_saved_folder_needs_a_split_to_train_on(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(a=made, b=made).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved has no split named train, but a, b: give one of these folders"):
        list(read_rows(tmp_path / "saved"))
    assert [row.values for row in read_rows(tmp_path / "saved" / "a")] == ROWS


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "saved"])
def test_a_missing_package_is_named_with_its_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.arrow").touch()
    for module in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{name} needs the package datasets: pip install 'protrain\[data\]'"):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_large_file_is_never_held_in_memory(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, [{"text": "word " * 2000}] * 1500)
    tracemalloc.start()
    try:
        assert sum(len(row.values["text"]) for row in read_rows(tmp_path / name)) == 15_000_000
        assert tracemalloc.get_traced_memory()[1] < 7_000_000
    finally:
        tracemalloc.stop()
