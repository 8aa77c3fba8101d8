from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.size import LIMITS, main

CODE = '"""A docstring."""\nx = 1\n\n\ndef f():\n    """Another."""\n    return x\n'


def test_a_package_above_its_limit_is_named_with_both_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files count in their package, docstrings do not count, and tests have no limit."""
    for name in ("protrain/top.py", "protrain/cli/deep/one.py", "tests/test_one.py", LIMITS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CODE)
    limits = {package: {"statements": 3, "nodes": 10} for package in ("protrain", "protrain/cli")}
    (tmp_path / LIMITS).write_text(json.dumps(limits))
    assert main(["--check"], root=tmp_path) == 0
    (tmp_path / "protrain/cli/deep/one.py").write_text(f"{CODE}y = 2\n")
    (tmp_path / "protrain/more").mkdir()
    (tmp_path / "protrain/more/one.py").write_text("x = 1\n")  # a package that the limits do not name may have nothing
    assert main(["--check"], root=tmp_path) == 1
    said = capsys.readouterr().err
    assert "protrain/cli has 4 statements, and 3 is its limit" in said
    assert "protrain/more has 1 statements, and 0 is its limit" in said
    assert "tests" not in said
