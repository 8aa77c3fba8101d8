"""--data in other formats than plain text is refused with a command that makes text of it, or left out of a folder."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from protrain.cli.data import byte_codec, find_documents, tokenize
from protrain.cli.main import main

TEXTS = ["The first text, with a comma.", 'A "second" one: {braces}.', "Ein drittes, über zwei Wörter."]
PLAIN = "".join(f"{text}\n" for text in TEXTS).encode()


def records() -> list[dict[str, object]]:
    return [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def json_lines() -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records()).encode()


def table(delimiter: str) -> bytes:
    written = io.StringIO()
    writer = csv.DictWriter(written, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records())
    return written.getvalue().encode()


def tar() -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(PLAIN)
        archive.addfile(entry, io.BytesIO(PLAIN))
    return written.getvalue()


def zipped() -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("a.txt", PLAIN)
    return written.getvalue()


def tensors() -> bytes:
    written = io.BytesIO()
    torch.save(torch.arange(4), written)
    return written.getvalue()


def array() -> bytes:
    written = io.BytesIO()
    np.save(written, np.arange(1, 4, dtype=np.uint8))
    return written.getvalue()


# the file's name, its content, the format's name, and the program that the command needs
CONVERTED: list[tuple[str, Callable[[], bytes], str, str]] = [
    ("data.jsonl", json_lines, "JSON lines", "python"),
    ("data.ndjson", json_lines, "JSON lines", "python"),
    ("data.json", json_lines, "JSON lines", "python"),
    ("data.txt", json_lines, "JSON lines", "python"),
    ("data", lambda: b"\n" + json_lines().rstrip(), "JSON lines", "python"),
    ("data.json", lambda: json.dumps(records(), indent=1).encode(), "JSON", "python"),
    ("data.json", lambda: json.dumps({"text": PLAIN.decode().removesuffix("\n")}).encode(), "JSON", "python"),
    ("data.CSV", lambda: table(","), "CSV", "python"),
    ("it's data.tsv", lambda: table("\t"), "TSV", "python"),
    ("data.txt.gz", lambda: gzip.compress(PLAIN, 9, mtime=0x01010101), "compressed by gzip", "gzip"),
    ("data.bz2", lambda: bz2.compress(PLAIN), "compressed by bzip2", "bzip2"),
    ("data.txt.xz", lambda: lzma.compress(PLAIN), "compressed by xz", "xz"),
    ("data.zip", zipped, "a ZIP archive", "unzip"),
    ("data.tar", tar, "a tar archive", "tar"),
    ("data.tar.gz", lambda: gzip.compress(tar()), "a tar archive", "tar"),
]


@pytest.mark.parametrize(
    ("name", "content", "is_what", "program"), CONVERTED, ids=[f"{name}-{what}" for name, _, what, _ in CONVERTED]
)
def test_a_file_is_refused_with_the_command_that_makes_text_of_it(
    name: str, content: Callable[[], bytes], is_what: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    file.write_bytes(content())
    with pytest.raises(ValueError, match=" and training reads plain text only; this writes the text of ") as refused:
        find_documents(file)
    said = str(refused.value)
    assert said.startswith(f"--data: {file} is {is_what}, ")
    if program != "python" and shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    monkeypatch.chdir(tmp_path)
    command = said[said.index(f": {program} ") + 2 :]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", "-c", command], check=True, env={**os.environ, "PATH": path, "PYTHONUTF8": "1"})
    (made,) = (path for path in tmp_path.iterdir() if path != file)
    assert made.name == f"{file.stem}-text.txt"
    assert find_documents(made) == [made]
    tokens = tokenize([made], byte_codec(), tmp_path / "tokens", held_out=0.0)
    assert bytes(tokens.train.tolist()) == PLAIN + b"\0"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data.parquet", lambda: b"PAR1\x15\x04\0", r"is Parquet, .*pandas\.read_parquet"),
        ("data.arrow", lambda: b"\xff\xff\xff\xff\x10\0", r"is Arrow, .*Dataset\.from_file"),
        ("data.jsonl.zst", lambda: b"\x28\xb5\x2f\xfdrest", "is compressed by zstd, .*: zstd -dc "),
        ("data.pdf", lambda: b"%PDF-1.7\n", "is PDF, .*: pdftotext "),
        ("data.docx", zipped, "is a document with layout, .*: pandoc "),
        ("data.pt", tensors, "is tensors or Python objects, .*; give a UTF-8 text file"),
        ("data.npy", array, "is tensors or Python objects, "),
        ("data.safetensors", lambda: b"\x10\0\0\0\0\0\0\0{}", "is tensors or Python objects, "),
        ("data.pkl", lambda: pickle.dumps(TEXTS, protocol=0), "is tensors or Python objects, "),
        ("data", lambda: pickle.dumps(TEXTS), "is tensors or Python objects, "),
    ],
)
def test_a_binary_file_is_called_by_its_format(
    name: str, content: Callable[[], bytes], said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content())
    with pytest.raises(ValueError, match=f"^--data: {tmp_path / name} {said}"):
        find_documents(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("LEIAME.pt", "Isto é português."),
        ("notes.txt", '{"one": "object alone is no lines of them"}\n'),
        ("code.js", "{\n  let braces;\n}\n"),
        ("log.txt", '{"one": 1}\nand prose\n'),
        ("page.html", "<p>markup</p>"),
        ("settings.yaml", "{}\n{}\n["),
    ],
)
def test_what_only_looks_like_data_is_text(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert find_documents(tmp_path / name) == [tmp_path / name]


def test_a_folder_of_code_keeps_its_json(tmp_path: Path) -> None:
    written = {
        "package.json": json.dumps({"name": "code", "files": ["a.js"]}),
        "tsconfig.json": json.dumps({"compilerOptions": {}}, indent=2) + "\n",
        "nested/notebook.ipynb": json.dumps({"cells": [{"source": "1 + 1"}]}),
        "nested/a.js": "let a = {};\n" * 10,
    }
    (tmp_path / "nested").mkdir()
    for name, content in written.items():
        (tmp_path / name).write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        documents = find_documents(tmp_path)
    tokens = tokenize(documents, byte_codec(), tmp_path / "tokens", held_out=0.0)
    assert bytes(tokens.train.tolist()) == b"".join(written[name].encode() + b"\0" for name in sorted(written))


def test_records_among_text_are_left_out_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("prose " * 1000)
    (tmp_path / "README.md").write_text("what this is")
    for name in ("data.jsonl", "more.jsonl"):
        (tmp_path / name).write_bytes(json_lines())
    (tmp_path / "numbers.csv").write_bytes(table(","))
    (tmp_path / "rows.json").write_text(json.dumps(records()))
    left_out = (
        f"--data: left out, because training reads plain text only: {tmp_path}/data.jsonl and 1 more: JSON lines; "
        f"{tmp_path}/numbers.csv: CSV; {tmp_path}/rows.json: JSON"
    )
    with pytest.warns(UserWarning, match=f"^{left_out}$"):
        documents = find_documents(tmp_path)
    tokens = tokenize(documents, byte_codec(), tmp_path / "tokens", held_out=0.0)
    assert bytes(tokens.train.tolist()) == b"what this is\0" + b"prose " * 1000 + b"\0"


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv", "data.json", "data.txt.gz", "data.parquet"])
def test_a_folder_of_records_is_refused_in_spite_of_its_readme(name: str, tmp_path: Path) -> None:
    content = {
        "data.jsonl": json_lines(),
        "data.csv": table(","),
        "data.json": json.dumps(records()).encode(),
        "data.txt.gz": gzip.compress(PLAIN),
        "data.parquet": b"PAR1\0" + bytes(100),
    }[name]
    (tmp_path / name).write_bytes(content)
    said = rf"^--data: {tmp_path} holds no text file \({tmp_path}/{name}: .*\), and .*; this writes the text of {name}"
    with pytest.raises(ValueError, match=said):
        find_documents(tmp_path)
    (tmp_path / "README.md").write_text("A data set.")
    said = rf"^--data: {tmp_path} holds more bytes in other formats than in text \({tmp_path}/{name}: .*; move those"
    with pytest.raises(ValueError, match=said):
        find_documents(tmp_path)


def test_a_folder_of_json_objects_is_no_code(tmp_path: Path) -> None:
    for record in records():
        (tmp_path / f"{record['id']}.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"holds no text file \({tmp_path}/0.json and 2 more: JSON\)"):
        find_documents(tmp_path)
    (tmp_path / "README.md").write_text("Each file is a record.")
    with pytest.raises(ValueError, match=rf"more bytes in other formats than in text \({tmp_path}/0.json and 2 more:"):
        find_documents(tmp_path)


def test_a_data_set_that_was_saved_is_refused_as_one(tmp_path: Path) -> None:
    part = tmp_path / "saved" / "train"
    part.mkdir(parents=True)
    (part / "data-00000-of-00001.arrow").write_bytes(b"\xff\xff\xff\xff\x10\0")
    for name in ("dataset_info.json", "state.json"):
        (part / name).write_text('{"features": {"text": "string"}}')
    with pytest.raises(ValueError, match=rf"^--data: {part} is a data set that save_to_disk wrote, .*load_from_disk"):
        find_documents(part)
    (tmp_path / "a.txt").write_text("prose " * 100)
    with pytest.warns(UserWarning, match="data-00000-of-00001.arrow and 2 more: Arrow$"):
        assert find_documents(tmp_path) == [tmp_path / "a.txt"]
    (part.parent / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ValueError, match=r"saved is data sets that save_to_disk wrote, .*\['train'\]\['text'\]"):
        find_documents(part.parent)


def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.jsonl").write_bytes(json_lines())
    options = ["--data", str(tmp_path / "data.jsonl"), "--folder", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["train", "--model", "tiny", *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"protrain train: --data: {tmp_path}/data.jsonl is JSON lines, and training reads plain text"
    )
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()
