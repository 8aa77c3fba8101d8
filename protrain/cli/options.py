"""The parts that the commands' argument parsers share."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from protrain.common.progress import say, silence
from protrain.common.records import Record
from protrain.common.tables import parse_memory, wrapped

Number = TypeVar("Number", int, float)

# The arguments of protrain.wrap and protrain.export that have options. Some are common words, so they are replaced
# only before a "=".
_ARGUMENTS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("device_memory", "host_memory", "step_during_backward", "chunked_loss"),
        *("accumulation", "compile", "device", "moment_dtype", "dtype", "plan", "merge"),
    )
} | {"weights": "--model"}  # a model's folder holds the weights
_WITH_VALUE = re.compile(rf"(?<![\w/.-])({'|'.join(_ARGUMENTS)})=('[^']*'|\"[^\"]*\"|[^\s,;:)]*)")
_ALONE = re.compile(rf"(?<![\w/.-])({'|'.join(name for name in _ARGUMENTS if '_' in name)})(?![\w=.(])")


def in_options(message: str) -> str:
    """``message`` of the library with options of the command line in place of arguments of protrain.wrap."""

    def option(found: re.Match[str]) -> str:
        name, value = _ARGUMENTS[found[1]], found[2].strip("'\"")
        if value == "False":
            return f"--no-{name.removeprefix('--')}"
        return name if value in ("", "True") else f"{name} {value}"

    message = _WITH_VALUE.sub(option, message)
    message = _ALONE.sub(lambda found: _ARGUMENTS[found[1]], message)
    return re.sub(r"^weights: ", "--model: ", message)


def need(module: str, what: str, *, extra: str | None = None, package: str | None = None) -> None:
    """Raise a ValueError that says what to install, unless ``module`` is installed, which ``what`` needs.

    An ``extra`` of ProTrain brings the ``package``, or it is installed by its name, which is that of the module.
    """
    if find_spec(module) is None:
        remedy = f"'protrain[{extra}]'" if extra else module
        raise ValueError(f"{what} needs the package {package or module}: pip install {remedy}")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no line within the name of an option."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(" ".join(text.split()), width).splitlines()


class Parser(argparse.ArgumentParser):
    """A parser that exits with 2 and one line on a bad argument."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _HelpFormatter)
        if options.get("description"):
            paragraphs = options["description"].split("\n\n")
            options["description"] = "\n\n".join(wrapped(" ".join(text.split())) for text in paragraphs)
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse ``args``. An unknown option is reported by the command's own parser, not by that of `protrain`."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown

    def print_help(self, file: Any = None) -> None:
        """Print the help text as a result, since argparse drops errors in writing it."""
        print_result(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        """Print one line on standard error and exit with 2."""
        say(f"{self.prog}: {message} (see {self.prog} --help)")
        raise SystemExit(2)


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """An argparse type: a whole number in [least, most]."""
    return _number(int, least, most)


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a finite number in [least, most]."""
    return _number(float, least, most)


def _number(kind: type[Number], least: float, most: float) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a {'whole ' * (kind is int)}number, not {text!r}") from None
        if not least <= value <= most or value == math.inf:
            limits = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"must be {limits}, not {text}")
        return value

    return parse


_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", re.IGNORECASE)


def count(text: str) -> int:
    """An argparse type: a number of tokens, like 65536 or 15B."""
    found = _COUNT.fullmatch(text.strip())
    value = round(float(found[1]) * _COUNT_UNITS[found[2].lower()]) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a number like 300M or 15B, not {text!r}")
    return value


def prices(text: str) -> list[float]:
    """An argparse type: prices with commas between them."""
    return [number(0)(part) for part in text.split(",")]


def text_for(parse: Callable[[str], Any]) -> Callable[[str], str]:
    """An argparse type: text that ``parse`` takes without a ValueError. It stays text."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from None
        return text

    return check


def _memory_bytes(text: str) -> None:
    size_bytes = parse_memory(text, name="")
    if text.strip().isdigit() and size_bytes < 2**20:
        raise ValueError(f"{text} would be bytes: give a unit, like {text}GiB")


memory = text_for(_memory_bytes)  # an argparse type: a number of bytes, or like 24GiB


def writable_file(text: str) -> Path:
    """An argparse type: a file to write, which is checked before the work. A device or a pipe would be replaced."""
    path = Path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is no regular file: give one; results can be piped with --json")
    return _writable(path)


def writable_folder(text: str) -> Path:
    """An argparse type: a folder to write to or to make, which is checked before the work."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a file: give a folder")
    return _writable(path)


def new_folder(text: str) -> Path:
    """An argparse type: a folder that is empty or can be made."""
    path = writable_folder(text)
    if path.exists() and any(path.iterdir()):
        raise argparse.ArgumentTypeError(f"{path} is not empty: give a folder of its own")
    return path


def _writable(path: Path) -> Path:
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not (existing.is_dir() or existing == path) or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written, because of {existing}")
    return path


def print_result(text: str) -> None:
    """Print ``text`` on standard output, which is closed if it cannot take that.

    Raises:
        SystemExit: the reader has left, as `head` does, which is no failure.
        OSError: the text could not be written.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        silence(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise OSError(f"standard output: {error}") from None


def emit(record: Record, args: argparse.Namespace, table: str) -> None:
    """Print ``record`` as ``table`` or JSON, and write its JSON to a file, as the output options in ``args`` say."""
    print_result(record.to_json() if args.json else table)
    write_record(record, args)


def write_record(record: Record, args: argparse.Namespace) -> None:
    """Write the JSON of ``record`` to the file of --out, if that was given."""
    if args.out is not None:  # written last, so that a full disk does not lose what took long
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            record.save(args.out)
        except OSError as error:
            raise ValueError(f"--out: cannot write {args.out}: {error.strerror}") from None
