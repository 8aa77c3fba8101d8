"""`--config`: a YAML file whose keys are the names of a command's options, and whose values are theirs."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def with_config(words: Sequence[str], options: dict[str, argparse.Action]) -> list[str]:
    """The command line ``words``, with what the file of its --config says put before them as words too.

    Options that ``words`` have are left out of the file, so they win. ``options`` are those of the parser, by spelling.

    Raises:
        ValueError: the file is missing or no mapping of options, or PyYAML is not installed.
    """
    given = {word.partition("=")[0] for word in words}
    if "--config" not in given:
        return list(words)
    last = max(index for index, word in enumerate(words) if word.partition("=")[0] == "--config")
    inline, following = words[last].partition("=")[2], words[last + 1 : last + 2]
    path = Path(inline or (following[0] if following else ""))
    added: list[str] = []
    for key, value in _read(path).items():
        option = f"--{key}"
        if option not in options or key in ("config", "help"):
            near = difflib.get_close_matches(str(key).replace("_", "-"), [name.lstrip("-") for name in options], n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--config {path}: {key!r} is no option{meant}")
        if given.isdisjoint(options[option].option_strings):
            added += _words(path, option, value, options[option])
    return [*added, *words]


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise ValueError("--config needs the package PyYAML: pip install 'protrain[hf]'") from None
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise ValueError(f"--config: {path} is no YAML: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config: {path} must have a line for each option, like 'steps: 1000'")
    return found


def _words(path: Path, option: str, value: Any, action: argparse.Action) -> list[str]:
    """``value`` of ``option`` as words of a command line."""
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ValueError(f"--config {path}: {option[2:]} must be true or false, not {value!r}")
        if value:
            return [option]
        return [f"--no-{option[2:]}"] if f"--no-{option[2:]}" in action.option_strings else []
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, dict | list | bool | None) for each in values):
        raise ValueError(f"--config {path}: {option[2:]} must be a number or text, not {value!r}")
    return [f"{option}={each}" for each in values]
