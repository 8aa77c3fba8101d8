"""Imports go one way: kernels <- hardware, engine; planning <- data only; engine <- Plan; wrap <- everything.

What plans from plain data imports no torch, whose import takes longer than a search.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import protrain
from protrain import public

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protrain", "protrain_kernels")
DATA = tuple(f"protrain.common.{name}" for name in ("records", "tables", "errors", "dtypes"))
PROFILES = ("protrain.hardware.profile", "protrain.profiler.model_profile")

# package -> what of this project it may import, itself aside. A prefix covers its submodules.
ALLOWED = {
    "protrain_kernels": (),
    "protrain.common": (),
    "protrain.forward": ("protrain.common", "protrain_kernels"),
    "protrain.planning": (*DATA, *PROFILES),
    "protrain.hardware": (
        *DATA,
        "protrain.common.cache",
        "protrain.common.host_memory",
        "protrain.distributed",
        "protrain_kernels",
    ),
    "protrain.profiler": ("protrain.common", "protrain.distributed.devices", "protrain.forward"),
    "protrain.distributed": ("protrain.common",),
    "protrain.engine": (
        "protrain.common",
        "protrain.distributed",
        "protrain.forward",
        *PROFILES,
        "protrain.planning.plan",
        "protrain.planning.layout",
        "protrain.planning.schedule",
        "protrain.planning.sharing",
        "protrain.planning.timeline",  # the names of lanes
        "protrain.profiler.blocks",
        "protrain_kernels",
    ),
}
# No torch, not even by the packages that these are in. A prefix covers its submodules.
PURE = (
    *("protrain.common.cache", "protrain.planning", *DATA, *PROFILES),
    *("protrain.hardware.shipped", "protrain.profiler.kept_profiles"),
    *("protrain.cli.main", "protrain.cli.commands", "protrain.cli.plan_run"),
)


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def sources() -> dict[str, Path]:
    """Each module, with its file."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(text: str) -> set[str]:
    """What a source imports, wherever that stands. ``from a import b`` is a.b if that is a module, and a if not."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


MODULES = sources()


def all_imports() -> dict[str, set[str]]:
    """What each module imports. Imports under TYPE_CHECKING and inside functions count like all others."""
    return {module: imported(path.read_text()) for module, path in MODULES.items()}


def test_imports_go_one_way() -> None:
    wrong = []
    for module, names in all_imports().items():
        owner = next((package for package in ALLOWED if within(module, (package,))), None)
        for name in names:
            against = owner is not None and within(name, PACKAGES) and not within(name, (owner, *ALLOWED[owner]))
            of_cli = within(name, ("protrain.cli",)) and not within(module, ("protrain.cli", "protrain.__main__"))
            if against or of_cli:
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_no_two_files_import_each_other() -> None:
    graph = {module: (names & MODULES.keys()) - {module} for module, names in all_imports().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


def test_what_plans_from_plain_data_is_imported_without_torch() -> None:
    modules = [module for module in MODULES if within(module, PURE)]
    assert len(modules) > 20
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'transformers')))"
    code = "\n".join([blocked, *(f"import {module}" for module in modules)])
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_late_names_are_completed_and_a_misspelt_one_is_recognised() -> None:
    code = "import protrain; print(*dir(protrain)); protrain.wrapp"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == sorted(["__version__", *public.__all__])
    assert "has no attribute 'wrapp'. Did you mean: 'wrap'?" in ended.stderr


def test_no_module_takes_the_place_of_a_late_name() -> None:
    names = set(public.__all__)
    assert names.isdisjoint(path.stem for path in ROOT.joinpath("protrain").iterdir())
    for name in names:
        assert getattr(protrain, name) is getattr(public, name)
    with pytest.raises(AttributeError, match="module 'protrain' has no attribute 'planner'"):
        assert protrain.planner  # type: ignore[attr-defined]  # that is the fault
