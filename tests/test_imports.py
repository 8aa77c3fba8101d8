"""Imports go one way: kernels <- hardware, engine; planning <- data only; engine <- Plan; wrap <- everything.

What plans from plain data imports no torch, whose import takes longer than a search.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
# Inside the planner a module imports those before it.
PLANNER = tuple(
    f"protrain.planning.{module}"
    for line in (
        ("layout", "schedule", "sharing", "plan", "timeline", "rates", "contention", "gradient_regions"),
        ("segments", "memory", "planned_step", "step", "simulate", "predict", "ranges", "fits", "search"),
        ("answer", "sweeps"),
    )
    for module in line
)
# No torch, not even by the packages that these are in. A prefix covers its submodules.
PURE = (
    *("protrain.common.cache", "protrain.planning", *DATA, *PROFILES),
    *("protrain.hardware.shipped", "protrain.profiler.kept_profiles"),
    *("protrain.cli.main", "protrain.cli.commands", "protrain.cli.plan_run"),
)


def _within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def imports(source: str, module: str, *, is_package: bool) -> set[str]:
    """Every module that ``source`` imports, also inside functions; ``from a import b`` gives both a and a.b."""
    found = set()
    for base, name in _imported(source, module, is_package=is_package):
        found |= {base, f"{base}.{name}"} if name else {base}
    return found


def _imported(source: str, module: str, *, is_package: bool) -> Iterator[tuple[str, str]]:
    """(a, b) for every ``from a import b``, and (a, "") for every ``import a``, wherever it stands in ``source``."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((base, alias.name) for alias in node.names)


def _sources() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def violations(module: str, imported: set[str]) -> list[str]:
    """What ``module`` imports against the direction of the design."""
    wrong = []
    for name in sorted(imported):
        if _within(name, ("torch", "triton")) and _within(module, PURE):
            wrong.append(f"{module} imports {name}, but what plans from plain data needs none")
        # `from a import b` yields a.b; b may be a plain name of the module a, which is checked by itself
        if not _within(name, PACKAGES) or not _is_module(name):
            continue
        owner = next((package for package in ALLOWED if _within(module, (package,))), None)
        if owner is not None and not _within(name, (owner, *ALLOWED[owner])) and not _reaches(name, ALLOWED[owner]):
            wrong.append(f"{module} imports {name}")
        folder = ".".join(module.split(".")[:3])
        if folder in PLANNER and _within(name, PLANNER[PLANNER.index(folder) + 1 :]):
            wrong.append(f"{module} imports {name}, which builds on it")
        if _within(name, ("protrain.cli",)) and not _within(module, ("protrain.cli", "protrain.__main__")):
            wrong.append(f"{module} imports {name}, but nothing imports the command line")
    return wrong


def _reaches(name: str, allowed: tuple[str, ...]) -> bool:
    """Whether ``name`` is the package on the way to an allowed module: ``from protrain import records``."""
    return name == "protrain" and any(_within(module, ("protrain",)) for module in allowed)


def test_imports_go_one_way() -> None:
    wrong = []
    for module, path in _sources():
        wrong += violations(module, imports(path.read_text(), module, is_package=path.name == "__init__.py"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("protrain_kernels.adam", "from protrain import records"),
        ("protrain_kernels.host_library", "from protrain.common.cache import cache_folder"),
        ("protrain.planning.search", "import torch"),
        ("protrain.planning.search", "from protrain.engine import core"),
        ("protrain.planning.memory", "from protrain.planning.predict import RuntimeModel"),
        ("protrain.hardware.detection", "from protrain.profiler import model_profile"),
        ("protrain.profiler.trace", "def late():\n    from protrain.planning import plan"),
        ("protrain.engine.core", "from protrain.planning import search"),
        ("protrain.wrapping", "import protrain.cli"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, imports(source, module, is_package=False))


def test_a_right_import_passes() -> None:
    source = "from protrain.planning.plan import Plan\nfrom protrain.common.errors import PlanError\nimport torch"
    assert violations("protrain.engine.core", imports(source, "protrain.engine.core", is_package=False)) == []


def _imported_without_torch(modules: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Import ``modules`` in a process in which an import of torch, triton or transformers fails."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'transformers')))"
    code = "\n".join([blocked, *(f"import {module}" for module in modules)])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_what_plans_from_plain_data_is_imported_without_torch() -> None:
    modules = [module for module, _ in _sources() if _within(module, PURE)]
    assert len(modules) > 20
    ended = _imported_without_torch(modules)
    assert ended.returncode == 0, ended.stderr


def test_an_import_of_torch_by_a_package_is_found() -> None:
    assert "import of torch halted" in _imported_without_torch(["protrain_kernels.slices"]).stderr


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


def file_imports() -> dict[str, set[str]]:
    """The files that each file imports. Imports under TYPE_CHECKING and inside functions count like all others."""
    sources = dict(_sources())
    graph = {}
    for module, path in sources.items():
        found = _imported(path.read_text(), module, is_package=path.name == "__init__.py")
        files = {f"{base}.{name}" if f"{base}.{name}" in sources else base for base, name in found}
        graph[module] = (files & sources.keys()) - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """The groups of files in which every file imports every other, directly or through a third."""
    reached = {module: _reachable(graph, module) for module in graph}
    groups = {frozenset(other for other in found if module in reached[other]) for module, found in reached.items()}
    return sorted((group for group in groups if group), key=sorted)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        new = graph[pending.pop()] - found
        found |= new
        pending += new
    return found


def test_no_two_files_import_each_other() -> None:
    found = circles(file_imports())
    assert not found, "\n".join(f"these import each other: {', '.join(sorted(circle))}" for circle in found)


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [frozenset({"b", "c"})]
