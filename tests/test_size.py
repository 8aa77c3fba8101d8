from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.size import LIMITS, main, size_of, sizes

CODE = '"""A docstring."""\nx = 1\n\n\ndef f():\n    """Another."""\n    return x\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("protrain/top.py", "protrain/cli/deep/one.py", "tests/test_one.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CODE)
    (tmp_path / LIMITS).parent.mkdir()
    limits = {package: {"statements": 3, "nodes": 10} for package in ("protrain", "protrain/cli")}
    (tmp_path / LIMITS).write_text(json.dumps(limits))
    return tmp_path


def test_files_count_in_their_package_and_docstrings_do_not(root: Path) -> None:
    found = sizes(root)
    assert sorted(found) == ["protrain", "protrain/cli", "tests"]
    assert (found["protrain"].statements, found["protrain"].nodes, found["protrain"].definitions) == (3, 10, 1)


def test_c_counts_by_the_ends_of_its_statements_and_not_by_its_comments(tmp_path: Path) -> None:
    (tmp_path / "one.c").write_text("// a; b;\nint f(int x) {\n    int y = x; return y; /* ; */\n}\n")
    size = size_of(tmp_path / "one.c")
    assert (size.statements, size.nodes, size.definitions) == (3, 16, 1)


def test_a_package_above_its_limit_is_named_with_both_numbers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"], root=root) == 0
    with open(root / "protrain/cli/deep/one.py", "a") as file:
        file.write("y = 2\n")
    with open(root / "tests/test_one.py", "a") as file:
        file.write("y = 2\n")  # tests have no limit
    (root / "protrain/more").mkdir()
    (root / "protrain/more/one.py").write_text("x = 1\n")  # a package that the limits do not name may have nothing
    assert main(["--check"], root=root) == 1
    said = capsys.readouterr().err
    assert "protrain/cli has 4 statements, and 3 is its limit" in said
    assert "protrain/more has 1 statements, and 0 is its limit" in said
    assert "Raising a limit is a commit of its own" in said
    assert "tests" not in said


def test_lower_only_lowers(root: Path) -> None:
    (root / "protrain/top.py").write_text("x = 1\n")
    with open(root / "protrain/cli/deep/one.py", "a") as file:
        file.write("y = 2\n")
    assert main(["--lower"], root=root) == 0
    limits = json.loads((root / LIMITS).read_text())
    assert limits["protrain"]["statements"] == 1
    assert limits["protrain/cli"] == {"statements": 3, "nodes": 10}
