"""What --data means: text or rows, what is refused with the remedy, and what is left out of a folder."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from protrain.cli.job import TrainJob
from protrain.cli.main import main
from protrain.cli.run_files import JOB_FILE
from protrain.cli.sources import Source, find_source

LINES = b'{"text": "one"}\n{"text": "two"}\n'
TABLE = b"id,text\n1,one\n2,two\n"


def text(*paths: Path) -> Source:
    return Source("text", list(paths))


def rows(*paths: Path) -> Source:
    return Source("rows", list(paths))


def tar() -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return written.getvalue()


def zipped() -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("a.txt", "text")
    return written.getvalue()


def array() -> bytes:
    written = io.BytesIO()
    np.save(written, np.arange(1, 4, dtype=np.uint8))
    return written.getvalue()


@pytest.mark.slow
def test_python_sources_are_the_default() -> None:
    source = find_source(None)
    assert source.kind == "text"
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in source.paths}
    assert not any({"site-packages", "test", "idlelib"} & set(path.parts) for path in source.paths)
    assert source.paths == sorted(source.paths)


@pytest.mark.parametrize("name", ["a.jsonl", "a.NDJSON", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow"])
def test_rows_are_recognised_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(LINES)
    assert find_source(tmp_path / name) == rows(tmp_path / name)
    assert find_source(tmp_path) == rows(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("LEIAME.pt", "Isto é português."),
        ("notes.txt", '{"one": "object alone is no lines of them"}\n'),
        ("code.js", "{\n  let braces;\n}\n"),
        ("log.txt", '{"one": 1}\nand prose\n'),
        ("page.html", "<p>markup</p>"),
        ("settings.yaml", "{}\n[\n{}"),
    ],
)
def test_what_only_looks_like_data_is_text(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert find_source(tmp_path / name) == text(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data.jsonl.gz", lambda: gzip.compress(LINES), "compressed, or an archive; unpack it"),
        ("data.bz2", lambda: bz2.compress(LINES), "compressed, or an archive; unpack it"),
        ("data.xz", lambda: lzma.compress(LINES), "compressed, or an archive; unpack it"),
        ("data.zst", lambda: b"\x28\xb5\x2f\xfdrest", "compressed, or an archive; unpack it"),
        ("data.zip", zipped, "compressed, or an archive; unpack it"),
        ("data.tar", tar, "compressed, or an archive; unpack it"),
        ("data.txt", lambda: LINES, "JSON lines under another name; end its name in .jsonl"),
        ("data", lambda: b"\n" + LINES.rstrip(), "JSON lines under another name; end its name in .jsonl"),
        ("data.bin", lambda: b"PAR1\x15\x04\0", "Parquet under another name; end its name in .parquet"),
        ("data.npy", array, "tensors or Python objects; give a UTF-8 text file, JSON lines, "),
        ("data", lambda: pickle.dumps(["a"]), "tensors or Python objects; give a UTF-8 text file, JSON lines, "),
        ("data.pdf", lambda: b"%PDF-1.7\n", "PDF; convert it, as pdftotext does"),
        (
            "data.txt",
            lambda: "some text".encode("utf-16"),
            "text in UTF-16; convert it, as `iconv -f utf-16 -t utf-8` does",
        ),
        ("data.csv", lambda: b"\xfe\xff" + "a,b".encode("utf-16-be"), "text in UTF-16; convert it"),
        ("image.png", lambda: b"\x89PNG\0\0", "no text, as it holds zero bytes; give a UTF-8 text file, "),
    ],
)
def test_other_formats_are_refused_with_the_remedy(
    name: str, content: Callable[[], bytes], said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content())
    with pytest.raises(ValueError, match=f"^--data: {tmp_path / name} is {said}"):
        find_source(tmp_path / name)


def test_a_place_without_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        find_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds nothing to read; give a UTF-8 text file, JSON lines"):
        find_source(tmp_path)


def test_hidden_and_binary_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("text")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    left_out = f"--data: {tmp_path} is read as text, and left out are {tmp_path}/image.png"
    with pytest.warns(UserWarning, match=f"^{left_out}: no text, as it holds zero bytes$"):
        assert find_source(tmp_path) == text(tmp_path / "text.md")
    (tmp_path / "utf16.txt").write_text("a", encoding="utf-16")
    also = f"; {tmp_path}/utf16.txt: text in UTF-16$"
    with pytest.warns(UserWarning, match=f"^{left_out}: no text, as it holds zero bytes{also}"):
        assert find_source(tmp_path) == text(tmp_path / "text.md")
    (tmp_path / "utf16.txt").write_text("much more text", encoding="utf-16")
    with pytest.raises(ValueError, match=r"most of .* is text in UTF-16 \(.*utf16.txt\); convert it"):
        find_source(tmp_path)


def test_a_folder_of_code_keeps_its_json(tmp_path: Path) -> None:
    written = {
        "nested/a.js": "let a = {};\n" * 10,
        "nested/notebook.ipynb": json.dumps({"cells": [{"source": "1 + 1"}]}),
        "package.json": json.dumps({"name": "code", "files": ["a.js"]}),
        "tsconfig.json": json.dumps({"compilerOptions": {}}, indent=2) + "\n",
    }
    (tmp_path / "nested").mkdir()
    for name, content in written.items():
        (tmp_path / name).write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_source(tmp_path) == text(*(tmp_path / name for name in written))


def test_a_folder_is_read_as_what_most_of_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("prose " * 1000)
    for name in ("data.jsonl", "more.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    (tmp_path / "list.json").write_text('[{"text": "one"}]')
    left_out = f"--data: {tmp_path} is read as text, and left out are {tmp_path}/data.jsonl and 2 more: rows"
    with pytest.warns(UserWarning, match=f"^{left_out}$"):
        assert find_source(tmp_path) == text(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("what this is")
    left_out = f"--data: {tmp_path} is read as rows, and left out are {tmp_path}/a.txt: text"
    with pytest.warns(UserWarning, match=f"^{left_out}$"):
        found = find_source(tmp_path)
    assert found == rows(*(tmp_path / name for name in ("data.jsonl", "list.json", "more.jsonl")))
    (tmp_path / "data.jsonl.gz").write_bytes(b"\x1f\x8b" + bytes(1000))
    with pytest.raises(
        ValueError, match=rf"most of {tmp_path} is compressed, .* \({tmp_path}/data.jsonl.gz\); unpack it"
    ):
        find_source(tmp_path)


def test_a_folder_of_json_objects_is_no_code(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.json").write_text('{"text": "a longer one"}')
    assert find_source(tmp_path) == rows(*(tmp_path / f"{number}.json" for number in range(3)))


def test_rows_that_are_named_for_tests_are_not_trained_on(tmp_path: Path) -> None:
    for name in ("test-00000.jsonl", "train-00000.jsonl", "train-00001.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    left_out = f"left out are {tmp_path}/test-00000.jsonl: rows that are not named train$"
    with pytest.warns(UserWarning, match=left_out):
        assert find_source(tmp_path) == rows(tmp_path / "train-00000.jsonl", tmp_path / "train-00001.jsonl")
    (tmp_path / "train-00000.jsonl").rename(tmp_path / "training.jsonl")
    (tmp_path / "train-00001.jsonl").unlink()
    assert find_source(tmp_path) == rows(tmp_path / "test-00000.jsonl", tmp_path / "training.jsonl")


def test_what_runs_leave_among_the_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    run = tmp_path / "runs" / "mine"
    (run / "model").mkdir(parents=True)
    for name in ("metrics.jsonl", "model/config.json"):
        (run / name).write_text("{}")
    TrainJob(model="tiny").save(run / JOB_FILE)
    assert find_source(tmp_path) == text(tmp_path / "text.txt")


def test_a_run_s_own_folder_is_no_text_before_and_after_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some text")
    run = tmp_path / "mine"
    run.mkdir()
    (run / "notes.txt").write_text("text of a folder that a run is started in")
    monkeypatch.chdir(tmp_path)
    for root in (tmp_path, Path()):
        for folder in (run, Path("mine"), Path("mine") / ".." / "mine"):
            assert find_source(root, exclude=folder) == text(root / "text.txt")
    assert find_source(run, exclude=run / "inner") == text(run / "notes.txt")


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"model": "tiny", "steps": 3}'])
def test_a_job_of_others_is_text(content: str, tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_text(content)
    (tmp_path / "text.txt").write_text("text that is longer than any of these jobs")
    assert find_source(tmp_path) == text(tmp_path / JOB_FILE, tmp_path / "text.txt")


def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.gz").write_bytes(gzip.compress(LINES))
    options = ["--data", str(tmp_path / "data.gz"), "--folder", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["train", "--model", "tiny", *options]) == 2
    said = f"protrain train: --data: {tmp_path}/data.gz is compressed, or an archive; unpack it\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "run").exists()
