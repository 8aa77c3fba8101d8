"""Records: exact JSON in both directions, errors that name the field, atomic files."""

from __future__ import annotations

import dataclasses
import enum
import errno
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protrain.common.records import Record
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import load
from protrain.planning import Plan


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner(Record):
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Outer(Record):
    count: int
    ratio: float
    name: str
    ready: bool
    colour: Colour
    inner: Inner
    maybe: int | None = None
    several: tuple[int, ...] = ()
    nested: tuple[tuple[Inner, ...], ...] = ()
    table_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    anything: Any = None


FULL = Outer(
    count=3,
    ratio=0.1,
    name="näme",
    ready=True,
    colour=Colour.BLUE,
    inner=Inner(size_bytes=1536),
    maybe=7,
    several=(1, 2, 3),
    nested=((Inner(size_bytes=1),), ()),
    table_of={"a": (1, 2)},
    anything=[1, {"b": None}],
)
SMALL: dict[str, Any] = FULL.to_dict() | {"ratio": 1}


def test_a_record_survives_json_and_files(tmp_path: Path) -> None:
    assert Outer.from_json(FULL.to_json()) == FULL
    assert Outer.from_dict(json.loads(json.dumps(FULL.to_dict()))) == FULL
    FULL.save(tmp_path / "record.json")
    assert Outer.load(str(tmp_path / "record.json")) == FULL
    dataclasses.replace(FULL, count=4).save(tmp_path / "record.json")
    assert Outer.load(tmp_path / "record.json").count == 4
    (tmp_path / "record.json").write_text(FULL.to_json(), encoding="utf-8-sig")  # as editors on Windows do
    assert Outer.load(tmp_path / "record.json") == FULL
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"], "the scratch file is gone"


def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FULL.save(tmp_path / "record.json")

    def full(self: Path, text: str, **_: str) -> None:
        self.write_bytes(text[:5].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        dataclasses.replace(FULL, count=4).save(tmp_path / "record.json")
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    assert Outer.load(tmp_path / "record.json") == FULL


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": "3"}, r"Outer.count must be int, not '3'"),
        ({"count": True}, r"Outer.count must be int, not True"),
        ({"ready": 1}, r"Outer.ready must be bool, not 1"),
        ({"name": None}, r"Outer.name must be str, not None"),
        ({"colour": "green"}, r"Outer.colour must be one of red, blue, not 'green'"),
        ({"inner": {}}, r"Inner lacks the field 'size_bytes'"),
        ({"maybe": "x"}, r"Outer.maybe must be int, not 'x'"),
        ({"several": [1, "2"]}, r"Outer.several\[1\] must be int, not '2'"),
        ({"table_of": []}, r"Outer.table_of must be an object, not \[\]"),
        ({"table_of": {"a": [0.5]}}, r"Outer.table_of\['a'\]\[0\] must be int, not 0.5"),
        ({"colours": 1}, r"Outer has no field 'colours'"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Outer.from_dict(SMALL | change)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read Inner from .*record.json: No such file"),
        ("{", "record.json is not Inner of this version of ProTrain: "),
        ("[" * 100_000, "record.json is not Inner of this version of ProTrain: "),
        ('{"size_bytes": ' + "9" * 5000 + "}", "record.json is not Inner of this version of ProTrain: "),
        ("[1]", "record.json is not Inner of this version of ProTrain: Inner must be a JSON object, not list"),
        ('{"size_bytes": "5"}', "record.json is not Inner of this version of ProTrain: Inner.size_bytes must be int"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_wrong_file_is_named(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        Inner.load(tmp_path / "record.json")


def test_a_file_of_another_kind_is_told(tmp_path: Path) -> None:
    machine, plan = load("h100"), tmp_path / "plan.json"
    machine.save(tmp_path / "machine.json")
    (tmp_path / "config.json").write_text('{"architectures": [], "model_type": "llama"}')
    for name, unknown in (("machine.json", "all_gather_gbps"), ("config.json", "architectures")):
        words = f"{name} is not a plan of .*: Plan has no field '{unknown}'; `protrain plan MODEL --out FILE` writes"
        with pytest.raises(ValueError, match=words):
            Plan.load(tmp_path / name)
    with pytest.raises(ValueError, match=r"cannot read a plan from .*plan.json: No such file or directory; `protrain"):
        Plan.load(plan)
    plan.write_text(json.dumps(dict.fromkeys(Plan.__dataclass_fields__)))
    with pytest.raises(
        ValueError, match=r"is not a hardware profile of .*: .* has no field 'accumulation'; `protrain calibrate --out"
    ):
        HardwareProfile.load(plan)
