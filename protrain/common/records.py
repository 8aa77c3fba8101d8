"""Records: small frozen dataclasses that serialise to JSON and print as a table."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import types
from pathlib import Path
from typing import Any, ClassVar, Self, cast, get_args, get_origin, get_type_hints

from protrain.common.tables import WIDTH, aligned, format_bytes


class Record:
    """A mixin for frozen keyword-only dataclasses: JSON in both directions, files, and a printed table.

    Fields may be int, float, str, bool, StrEnum, other records, tuples or dicts of these, and one of them or None.
    """

    # What users call a file of such a record, and how they get one. Messages about files say this and not the class
    # name.
    file_kind: ClassVar[str] = ""
    file_source: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """The record as plain dicts and tuples, ready for ``json.dumps``."""
        return dataclasses.asdict(cast(Any, self))

    def to_json(self) -> str:
        """The record as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record in ``data``. A ValueError names a field that is missing or unknown, or whose value is wrong."""
        if not isinstance(data, dict):
            raise ValueError(f"{cls.__name__} must be a JSON object, not {type(data).__name__}")
        fields = dataclasses.fields(cast(Any, cls))
        unknown = sorted(set(data) - {field.name for field in fields})
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}")
        for field in fields:
            if field.name not in data and field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"{cls.__name__} lacks the field {field.name!r}")
        hints = _hints(cls)
        return cls(**{name: _typed(hints[name], value, f"{cls.__name__}.{name}") for name, value in data.items()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record in JSON ``text``."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The record in the file ``path``. A ValueError names a file that is missing, wrong, or of another kind."""
        name, kind = os.fspath(path), cls.file_kind or cls.__name__
        remedy = f"; {cls.file_source}" if cls.file_source else ""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ValueError(f"cannot read {kind} from {name}: {error.strerror}{remedy}") from None
        except (ValueError, RecursionError) as error:  # also of what is no text or JSON, or has endless nesting
            raise ValueError(f"{name} is not {kind} of this version of ProTrain: {error}{remedy}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to ``path``, completely or not at all.

        If ``path`` is a link, the file that it names is written.
        """
        target = Path(path).resolve()
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            scratch.write_text(self.to_json() + "\n", encoding="utf-8")
            os.replace(scratch, target)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise

    def rows(self) -> list[tuple[str, str]]:
        """The rows (name, value) of the printed table, with bytes in readable units."""
        return [(f.name, _shown(f.name, getattr(self, f.name))) for f in dataclasses.fields(cast(Any, self))]

    def table(self) -> str:
        """The record as a table of aligned text."""
        return aligned(self.rows(), WIDTH)


_hints: Any = functools.cache(get_type_hints)  # which take longer than the rest of reading a record


def _typed(hint: Any, value: Any, where: str) -> Any:
    origin, kinds = get_origin(hint), get_args(hint)
    if isinstance(hint, types.UnionType):  # one type or None
        return None if value is None else _typed(next(kind for kind in kinds if kind is not type(None)), value, where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(kinds[0], part, f"{where}[{index}]") for index, part in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _typed(kinds[1], part, f"{where}[{key!r}]") for key, part in value.items()}
    if origin is not None:
        raise ValueError(f"{where} must be {'a list' if origin is tuple else 'an object'}, not {value!r}")
    if hint is Any:
        return value
    if issubclass(hint, Record):
        return hint.from_dict(value)
    if issubclass(hint, enum.StrEnum):
        if value not in [*hint]:
            raise ValueError(f"{where} must be one of {', '.join(hint)}, not {value!r}")
        return hint(value)
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:  # a bool is no int
        raise ValueError(f"{where} must be {hint.__name__}, not {value!r}")
    if hint in (int, float) and not abs(value) < 2**63:  # the planner computes with 64-bit integers; NaN is refused too
        raise ValueError(f"{where} must be a finite number less than 2**63, not {value!r}")
    return value


def _shown(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes"):
        return format_bytes(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, tuple) and (len(value) > 8 or any(isinstance(item, Record | tuple) for item in value)):
        return f"{len(value)} entries"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return str(value)
