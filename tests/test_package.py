"""What pyproject.toml says is so. `make package` builds it and tries the wheel (`smoke.py`)."""

import ast
import importlib
import pathlib
import re
import sys
import tomllib

import ringjax as rj

ROOT = pathlib.Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
BUILD = SETTINGS["tool"]["hatch"]
TEXTS = [ROOT / "Makefile", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def imported(path: pathlib.Path) -> set[str]:
    """The packages that a module imports when it is imported itself."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    plain = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[0] for name in plain + [node.module for node in body if isinstance(node, ast.ImportFrom)]}


def test_the_version_is_that_of_the_module():
    text = (ROOT / BUILD["version"]["path"]).read_text(encoding="utf-8")
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE) == [rj.__version__]
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", rj.__version__)


def test_the_command_is_there():
    assert set(PROJECT["scripts"]) == {"ringjax"}
    module, _, function = PROJECT["scripts"]["ringjax"].partition(":")
    assert getattr(importlib.import_module(module), function)(["--version"]) == 0


def test_imports_need_no_extras():
    found = {name for path in (ROOT / "ringjax").rglob("*.py") for name in imported(path)}
    assert found - sys.stdlib_module_names - {"ringjax"} <= names(PROJECT["dependencies"])


def test_extras_that_texts_name_exist():
    named = [found for path in TEXTS for found in re.findall(r"\.\[([\w,-]+)\]", path.read_text(encoding="utf-8"))]
    assert len(named) >= 3
    assert {extra for several in named for extra in several.split(",")} <= set(PROJECT["optional-dependencies"])


def test_what_is_shipped_is_there():
    shipped = [*BUILD["build"]["targets"]["sdist"]["include"], *PROJECT["license-files"], PROJECT["readme"]]
    assert [name for name in shipped if not (ROOT / name).exists()] == []
    assert {"ringjax", "tests", "docs", "Makefile"} <= set(shipped)
    assert BUILD["build"]["targets"]["wheel"]["packages"] == ["ringjax"]
    assert (ROOT / "ringjax" / "py.typed").is_file()


def test_what_is_made_is_not_shipped():
    """The sdist leaves out what git ignores."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert {".venv*/", "__pycache__/", "dist/", "build/", ".peer/", "runs/", "/*.png"} <= set(ignored)
