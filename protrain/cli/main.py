"""The `protrain` command."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pkgutil import resolve_name

from protrain.cli.commands import build_parser
from protrain.common.errors import MisuseError
from protrain.common.progress import say
from protrain.common.signals import is_program


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The status is 0 for success, 1 for a failed run, 2 for what the user can correct, 130 for Ctrl-C, and 141 if nobody
    reads the results any more. In the program `protrain`, ``protrain.common.signals`` ends most commands on Ctrl-C,
    and they never get here.
    """
    is_plan = is_program() and sys.argv[1:2] == ["plan"]
    if is_plan:
        gc.disable()  # the imports of torch and transformers make a million objects, all of which stay
    status = _status(argv)
    if is_plan:  # to free all of torch one by one would take a second
        with suppress(OSError, ValueError, AttributeError):  # then something remains unwritten
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)
    return status


def _status(argv: Sequence[str] | None) -> int:
    """What ``main`` returns."""
    name = "protrain"
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show must not cost the results
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = _parsed(argv)
        name = f"protrain {args.command}"
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            resolve_name(args.run)(args)  # imported only now, so that --help needs no torch
    except (ValueError, ImportError) as error:
        return _failed(name, error, 2)
    except (FloatingPointError, MemoryError, MisuseError, OSError) as error:
        return _failed(name, error, 1)
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return 130
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``, which is kept as ``words`` for those who start the command again in other processes."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["train"]:  # whose parser is TRL's
        return argparse.Namespace(command="train", run="protrain.cli.runs:train", words=words)
    return build_parser("".join(words[:1])).parse_args(words, argparse.Namespace(words=words))


def _say_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print a warning in one line, without the place in the code that raised it."""
    say(f"{category.__name__}: {message}")


def _failed(name: str, error: Exception, status: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    say(f"{name}: {text}")
    return status
