"""Workflows, templates, citation and security notes agree with the Makefile, `.ci/run` and the package."""

import pathlib
import re

import pytest

import ringjax as rj
from ringjax._src.kernels.cpu import build

yaml = pytest.importorskip("yaml")  # a dependency of Flax
ROOT = pathlib.Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
YAML = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
MAKE = re.compile(r"^\s*make ((?:[a-z][a-z-]*\s?)+)", re.MULTILINE)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def commands(workflow: str) -> list[str]:
    """What the steps of a workflow run."""
    jobs = yaml.safe_load(read(f".github/workflows/{workflow}.yml"))["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def targets(text: str) -> set[str]:
    """The targets with which a shell script calls make."""
    return {target for found in MAKE.findall(text) for target in found.split()}


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_file_is_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_bounded_and_may_only_read_by_default(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
    assert all(re.search(r"@(v\d|release/v\d)", step["uses"]) for step in steps(workflow) if "uses" in step)


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_ci_workflow_calls_the_make_targets_of_the_ci_script():
    ours = targets(read(".ci/run"))
    assert {"lint", "types", "doctest", "test"} <= ours
    assert targets("\n".join(commands("ci"))) == ours | {"docs"}


def test_release_workflow_builds_the_package_and_runs_its_smoke_test():
    assert targets("\n".join(commands("release"))) == {"package"}
    assert any("python -I smoke.py" in command for command in commands("release"))
    assert "python -I smoke.py" in read("Makefile")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_make_targets_of_workflows_exist(path):
    rules = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    called = targets("\n".join(commands(path.stem)))
    assert called
    assert called <= rules


def test_ci_covers_the_versions_of_python_that_are_declared():
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    matrix = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["check"]["strategy"]["matrix"]
    assert matrix["python"] == declared == ["3.11", "3.12", "3.13"]


def test_citation_is_of_this_version():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert str(citation["version"]) == rj.__version__
    assert citation["authors"] == [{"name": "The ringjax authors"}]
    assert 'authors = [{ name = "The ringjax authors" }]' in read("pyproject.toml")


def test_security_notes_name_the_switch_and_the_sources_of_native_code():
    text = read("SECURITY.md")
    assert f"`{build.SWITCH}=0`" in text
    folder = re.search(r"the sources in `(.*?)/` of the installed package", text)[1]
    assert (ROOT / folder / "attention.cc").is_file()


@pytest.mark.parametrize(("folder", "name"), [("tests", r"`(test_\w+\*?)`"), ("benchmarks", r"`([\w*]+)\.py`")])
def test_readme_names_files_and_make_targets_that_exist(folder, name):
    text = read(f"{folder}/README.md")
    listed = re.findall(name, text.partition("## Conventions")[0])
    assert len(listed) > 10
    assert [file for file in listed if not list((ROOT / folder).glob(f"{file}.py"))] == []
    assert targets(text)
    assert targets(text) <= set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
