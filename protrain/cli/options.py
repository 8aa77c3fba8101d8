"""The types of the commands' options, and how their results are printed and written."""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protrain.common.progress import silence
from protrain.common.records import Record


def need(module: str, what: str, *, extra: str | None = None, package: str | None = None) -> None:
    """Raise a ValueError that says what to install, unless ``module`` is installed, which ``what`` needs.

    An ``extra`` of ProTrain brings the ``package``, or it is installed by its name, which is that of the module.
    """
    if find_spec(module) is None:
        remedy = f"'protrain[{extra}]'" if extra else module
        raise ValueError(f"{what} needs the package {package or module}: pip install {remedy}")


def number(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a finite number of this ``kind``, int or float, in [least, most]."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            limits = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"must be {limits}, not {text}")
        return value

    parse.__name__ = kind.__name__  # by which argparse calls what is no number an invalid int or float
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
    return [number(float, 0)(part) for part in text.split(",")]


def parse_lora(text: str) -> dict[str, Any]:
    """The arguments of peft's LoraConfig in ``text``, like "r=16,alpha=32", of which any may be left out.

    Raises:
        ValueError: a name is unknown, or a value is no number.
    """
    values: dict[str, Any] = {"r": 16, "alpha": 32, "targets": "all-linear", "dropout": 0.0}
    try:
        for name, value in (part.split("=") for part in text.split(",")):
            values[name] = type(values[name])(value)
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is not made of r=N, alpha=N, targets=NAMES and dropout=P") from None
    targets = values["targets"]
    return {
        "r": values["r"],
        "lora_alpha": values["alpha"],
        "target_modules": targets if targets == "all-linear" else targets.split("+"),
        "lora_dropout": values["dropout"],
    }


def result_file(text: str) -> Path:
    """An argparse type: a file to write. A device or a pipe is refused, as the file would take its place."""
    path = Path(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is no regular file: give one; results can be piped with --json")
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
