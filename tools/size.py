"""Size by package, in what rewriting cannot fold: `python -m tools.size` prints it, and `--check` holds the limits.

The limits are in `.ci/size.json`. The product, the tools and the examples have them. Tests and benchmarks have none, so
that a regression test costs nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ".ci/size.json"
_TOPS = ("protrain", "protrain_kernels", "tools", "examples", "bench", "tests")
_UNLIMITED = ("bench", "tests")
_C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a file or a package has of each. Docstrings are neither statements nor nodes."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    nodes: int = 0  # of the syntax tree, which stay where lines or statements are folded into one; words and signs of C
    definitions: int = 0

    def __add__(self, other: Size) -> Size:
        names = self.__dataclass_fields__
        return Size(**{name: getattr(self, name) + getattr(other, name) for name in names})


def size_of(path: Path) -> Size:
    """The size of a file of Python or C."""
    text = path.read_text(encoding="utf-8")
    return (_size_of_python if path.suffix == ".py" else _size_of_c)(text)


def _size_of_python(text: str) -> Size:
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = sum(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for node in nodes
    )
    return Size(
        files=1,
        lines=text.count("\n"),
        statements=sum(isinstance(node, ast.stmt) for node in nodes) - docstrings,
        nodes=len(nodes) - 2 * docstrings,
        definitions=sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in nodes),
    )


def _size_of_c(text: str) -> Size:
    code = _C_COMMENT.sub(" ", text)
    return Size(
        files=1,
        lines=text.count("\n"),
        statements=len(re.findall("[;{]", code)),
        nodes=len(re.findall(r"\w+|[^\w\s]", code)),
        definitions=len(re.findall("^}", code, re.MULTILINE)),
    )


def sizes(root: Path = ROOT) -> dict[str, Size]:
    """The size of each package below ``root``, by its folder."""
    found: dict[str, Size] = {}
    for top in _TOPS:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in (".py", ".c", ".h") and "__pycache__" not in path.parts:
                inner = path.relative_to(root).parts[1:-1] if top == "protrain" else ()
                package = "/".join((top, *inner[:1]))
                found[package] = found.get(package, Size()) + size_of(path)
    return found


def limited(found: dict[str, Size]) -> dict[str, dict[str, int]]:
    """What `.ci/size.json` would hold of the packages that have limits, if they were to stay as they are."""
    return {
        package: {"statements": size.statements, "nodes": size.nodes}
        for package, size in found.items()
        if package not in _UNLIMITED
    }


def grown(found: dict[str, Size], limits: dict[str, dict[str, int]]) -> list[str]:
    """A sentence for each number of a package that is above its limit. A package without a limit may have nothing."""
    return [
        f"{package} has {count:,} {what}, and {limits.get(package, {}).get(what, 0):,} is its limit"
        for package, counts in limited(found).items()
        for what, count in counts.items()
        if count > limits.get(package, {}).get(what, 0)
    ]


def lowered(found: dict[str, Size], limits: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """``limits`` with today's size wherever that is smaller. A package that is gone has none."""
    now = limited(found)
    return {
        package: {what: min(limit, now[package][what]) for what, limit in own.items()}
        for package, own in limits.items()
        if package in now
    }


def table(found: dict[str, Size]) -> str:
    """The size of each package, and of all that have limits together."""
    product = sum((size for package, size in found.items() if package not in _UNLIMITED), Size())
    names = list(Size.__dataclass_fields__)
    rows = [f"{package:24}" + "".join(f"{count:13,}" for count in astuple(size)) for package, size in found.items()]
    total = f"{'all with limits':24}" + "".join(f"{count:13,}" for count in astuple(product))
    return "\n".join([f"{'package':24}" + "".join(f"{name:>13}" for name in names), *rows, total])


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Print the sizes, or check or lower the limits: 0, or 1 where a package is above its limit."""
    parser = argparse.ArgumentParser(prog="tools.size", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="fail if a package is above its limit")
    what.add_argument("--lower", action="store_true", help="lower each limit to today's size where that is smaller")
    args = parser.parse_args(argv)
    found, file = sizes(root), root / LIMITS
    if not (args.check or args.lower):
        print(table(found))
        return 0
    limits = json.loads(file.read_text(encoding="utf-8"))
    if args.lower:
        file.write_text(json.dumps(lowered(found, limits), indent=2) + "\n", encoding="utf-8")
        return 0
    above = grown(found, limits)
    if above:
        print(*above, sep="\n", file=sys.stderr)
        print(
            "Make what the change adds to simpler, so that it fits. Raising a limit is a commit of its own, which "
            f"changes {LIMITS} and names the promise that the growth buys.",
            file=sys.stderr,
        )
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
