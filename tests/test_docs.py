"""The documents name files and functions that exist, link to pages that exist, and stay short enough to be read."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from protrain.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "bench").rglob("*.md"))]


def names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def defined(file: Path) -> set[str]:
    """Names of the functions, classes and constants of a Python file, with those of a class as Class.name."""

    def of(body: list[ast.stmt], prefix: str = "") -> set[str]:
        found = set()
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + statement.name)
                if isinstance(statement, ast.ClassDef):
                    found |= of(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, ast.Assign):
                found |= {prefix + target.id for target in statement.targets if isinstance(target, ast.Name)}
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found.add(prefix + statement.target.id)
        return found

    return of(ast.parse(file.read_text()).body)


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of ``page`` get."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_files_and_functions_that_a_page_names_exist(page: Path) -> None:
    wrong = []
    for file, name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|json|md))(?::([\w.]+))?`", page.read_text()):
        # Records are named as seen from the folder of all results, or from the page's own.
        places = [folder / file for folder in (ROOT, ROOT / "bench" / "results", page.parent)]
        found = next((place for place in places if place.is_file()), None)
        if found is None or (name and name not in defined(found)):
            wrong.append(f"{file}:{name}" if name else file)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_pages_that_the_sources_name_exist() -> None:
    wrong = []
    for package in ("protrain", "protrain_kernels", "bench", "tests"):
        for file in (ROOT / package).rglob("*.py"):
            pages = re.findall(r"\b(?:docs|bench)/[\w/-]+\.md\b", file.read_text())
            wrong += [f"{names(file)}: {page}" for page in pages if not (ROOT / page).is_file()]
    assert wrong == []


@pytest.mark.parametrize(("page", "limit"), [("README.md", 800), ("docs/how-it-works.md", 1200)])
def test_a_page_is_short_enough_to_be_read(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text().split()) < limit


def test_the_table_of_plan_has_the_options_of_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    offered = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE))
    table = (ROOT / "docs" / "command-line.md").read_text().partition("| option of `plan` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(--[\w-]+)", table)) == offered


def test_the_reference_has_every_public_name() -> None:
    import protrain.public

    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert {name.rpartition(".")[2] for name in shown} >= set(protrain.public.__all__)
    for name in shown:
        module, _, item = name.rpartition(".")
        assert item in defined(ROOT / f"{module.replace('.', '/')}.py"), name
