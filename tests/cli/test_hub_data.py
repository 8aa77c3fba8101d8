"""Datasets of the Hugging Face Hub by their names. The cache of the tests has one, and nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protrain.cli import hub_data
from protrain.cli.main import main

constants = pytest.importorskip("huggingface_hub.constants")

NAME, REVISIONS = "some-org/Chats", ("0" * 40, "1" * 40)
ROWS = {"data/train-0.jsonl": "the quick brown fox jumps over the lazy dog", "data/test-0.jsonl": "left out"}


def publish(hub: Path, files: dict[str, str], revision: str) -> Path:
    """Have the cache ``hub`` hold ``files``, each with many rows of one text, as the newest ``revision``."""
    dataset = hub / f"datasets--{NAME.replace('/', '--')}"
    (dataset / "refs").mkdir(parents=True, exist_ok=True)
    (dataset / "refs" / "main").write_text(revision)
    snapshot = dataset / "snapshots" / revision
    for name, text in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text((json.dumps({"text": text}) + "\n") * 50)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def words(data: str, folder: Path, *more: str) -> list[str]:
    given = ["--data", data, "--folder", str(folder), "--device", "cpu", "--sample-tokens", "0", "--no-model"]
    return ["train", "--model", "tiny", "--batch", "1", "--sequence", "16", *given, *more]


@pytest.mark.filterwarnings("ignore:--data:UserWarning")
def test_a_run_keeps_the_rows_that_it_began_with(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = publish(hub, ROWS, REVISIONS[0])
    run = tmp_path / "run"
    assert main(words(NAME, run, "--steps", "2", "--checkpoint-every", "2")) == 0
    assert f"the Hub cannot be reached, so what the cache has of the dataset {NAME} is read" in capsys.readouterr().err
    job = json.loads((run / "job.json").read_text())
    assert job["data"] == str(first)
    tokens = (run / "data" / "train.bin").read_bytes()
    assert main(words(str(first / "data" / "train-0.jsonl"), tmp_path / "local", "--steps", "2")) == 0
    assert (tmp_path / "local" / "data" / "train.bin").read_bytes() == tokens

    publish(hub, {"data/train-0.jsonl": "other rows"}, REVISIONS[1])
    assert main(["train", "--resume", "--folder", str(run), "--data", NAME, "--steps", "4"]) == 0
    assert (run / "data" / "train.bin").read_bytes() == tokens
    assert main(["train", "--resume", "--folder", str(run), "--data", f"{NAME}/data", "--steps", "6"]) == 2
    assert f"--data {NAME}/data differs from {first}" in capsys.readouterr().err
    shutil.rmtree(first)
    assert main(["train", "--resume", "--folder", str(run), "--steps", "6"]) == 2
    command = f"`hf download {NAME} --repo-type dataset --revision {REVISIONS[0]}` brings it to the cache of the Hub"
    assert command in capsys.readouterr().err


def test_of_several_parts_one_is_named(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = publish(hub, {"de/train.jsonl": "deutsch", "en/train.jsonl": "english", "en/test.jsonl": "x"}, "0" * 40)
    assert main(words(NAME, tmp_path / "run")) == 2
    said = f"the dataset {NAME} has rows in the folders de, en: name one of them, like --data {NAME}/en"
    assert said in capsys.readouterr().err
    assert hub_data.data_on_disk(f"{NAME}/de") == str(snapshot / "de")
    assert main(words(f"{NAME}/fr", tmp_path / "run")) == 2
    assert f"the folder fr of the dataset {NAME} has no file that training reads" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("hub")
def test_a_dataset_that_is_not_here_is_one_line_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("no-org/none", tmp_path / "run")) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "there is no folder no-org/none, and the Hugging Face Hub does not give a dataset 'no-org/none': " in said
    assert "`hf download no-org/none --repo-type dataset --local-dir FOLDER` brings it to a folder" in said
    assert not (tmp_path / "run").exists()


def test_what_is_downloaded_is_told_before(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Hub is stood in for, as none can be reached."""
    import huggingface_hub

    asked: list[dict[str, Any]] = []
    listed = [
        SimpleNamespace(filename=name, file_size=size, will_download=name != "test.parquet")
        for name, size in (("train-0.parquet", 2**20), ("train-1.parquet", 2**21), ("test.parquet", 7))
    ]

    def download(name: str, **how: Any) -> Any:
        asked.append(how)
        if how.get("dry_run"):
            return listed
        assert "downloading 2 files, 3 MiB, of the dataset" in capsys.readouterr().err
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub_data.data_on_disk(NAME) == str(hub)
    assert [how["repo_type"] for how in asked] == ["dataset"] * 2
    assert asked[0]["allow_patterns"] == asked[1]["allow_patterns"]
    listed.append(SimpleNamespace(filename="de/train-0.parquet", file_size=1, will_download=True))
    with pytest.raises(ValueError, match=r"has rows in the folders \., de: name one of them"):
        hub_data.data_on_disk(NAME)


def test_a_path_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-org").mkdir()
    (tmp_path / "some-org" / "Chats").write_text("text")
    for path in (NAME, "nowhere", "/some/where", "../some/where", str(tmp_path)):
        assert hub_data.data_on_disk(path) == path
