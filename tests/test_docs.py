"""The documents: their code runs, their commands and links exist, and the API pages leave no public symbol out."""

import functools
import importlib
import inspect
import pathlib
import re
import shlex

import jax
import pytest

import ringjax as rj
from ringjax.cli.main import COMMANDS, parser
from ringjax.cli.tune import Tuning

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)
SHELL = ("bash", "sh", "shell", "console")
OURS = re.compile(r"(?:.*/)?(?:make|bash|srun|ringjax|python[\d.]*)")


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: pathlib.Path, *languages: str) -> list[tuple[int, str]]:
    """The fenced blocks in these languages, each with the line at which it starts."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(2)), m[2]) for m in FENCE.finditer(text) if m[1] in languages]


def prose(page: pathlib.Path) -> str:
    """A page without its code, but with its indented commands."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.fixture
def _compiled_quickly():
    """Compiling is most of what the code of a page costs. Dtypes are promoted as by default, which optax needs."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python", *SHELL)], ids=name_of)
def test_code_fits_the_width_of_the_site(page):
    lines = [line for _, code in blocks(page, "python", *SHELL) for line in code.splitlines()]
    assert max(map(len, lines)) <= 95


@pytest.mark.usefixtures("_compiled_quickly")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Tuning("cpu", jax.device_count(), "zigzag", "auto", None).save("tuning.json")  # as `ringjax tune` on a page does
    namespace = {"__name__": f"page_{page.stem}"}
    for line, code in blocks(page, "python"):
        compiled = compile("\n" * line + code, str(page), "exec")  # errors then name the line of the page
        exec(compiled, namespace)


def commands(page: pathlib.Path) -> list[list[str]]:
    """The commands of the shell blocks, and those of other blocks without a language that look like ours, as words."""
    text = page.read_text(encoding="utf-8")
    plain = [code for _, code in blocks(page, "")] + INDENTED.findall(FENCE.sub("", text))
    shell = [words for _, code in blocks(page, *SHELL) for words in _words(code)]
    return shell + [words for code in plain for words in _words(code) if OURS.fullmatch(words[0])]


def _words(code: str) -> list[list[str]]:
    return [words for line in code.replace("\\\n", " ").splitlines() for words in _simple_commands(line)]


def _simple_commands(line: str) -> list[list[str]]:
    """What stands between ``&&``, ``|`` and ``;`` of a line, without prompt, comment and variables before it."""
    if line.lstrip().startswith("#") or not line.strip():
        return []
    lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="&|;<>()")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation that goes on in the next line
        return []
    parts: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("&|;<>()"):
            parts.append([])
        elif parts[-1] or not re.fullmatch(r"\w+=.*", word):
            parts[-1].append(word)
    return [part for part in parts if part]


@functools.cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def check_ringjax(words: list[str]) -> None:
    """Whether the arguments of the command `ringjax` are understood."""
    if words and not set(words) & {"--help", "--version"} and not any("…" in w or "..." in w for w in words):
        assert words[0] in COMMANDS, words
        parser(words[0]).parse_args(words)


def check_script(path: str, words: list[str]) -> None:
    """Whether a script of ours is there and has the options that it is given."""
    assert (ROOT / path).is_file(), path
    sources = [ROOT / path, *(ROOT / path).parent.glob("*/*.py")]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    fields = re.findall(r"^    (\w+): ", text, re.MULTILINE)  # of a dataclass that is made into options
    known = set(re.findall(r'"(--[\w-]+)"', text)) | {f"--{name.replace('_', '-')}" for name in fields}
    known |= {option.replace("--", "--no-", 1) for option in known} | {"--help"}
    mine = words[: words.index("--")] if "--" in words else words  # what follows is another's
    options = {w.split("=")[0] for w in mine if re.match(r"--\w", w)}
    assert options <= known, (path, options - known)


def check_command(words: list[str]) -> None:
    first, rest = pathlib.PurePath(words[0]).name, words[1:]
    if first == "make":
        named = [w for w in rest if "=" not in w and not w.startswith("-")]
        assert set(named) <= make_targets(), named
    elif first == "ringjax":
        check_ringjax(rest)
    elif re.fullmatch(r"python[\d.]*", first) and rest[:1] == ["-m"]:
        if rest[1] == "ringjax":
            check_ringjax(rest[2:])
        elif rest[1].startswith("ringjax"):
            assert importlib.util.find_spec(rest[1]), rest[1]
    for i, word in enumerate(words):
        if re.fullmatch(r"(?:examples|benchmarks|tests|\.ci)/[\w./-]+", word):
            check_script(word, words[i + 1 :] if word.endswith(".py") else [])


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=name_of)
def test_commands_exist(page):
    for words in commands(page):
        check_command(words)


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[- ]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_images_are_there(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.is_file(), target
        if page.is_relative_to(DOCS):
            assert found.is_relative_to(DOCS), f"{target} is not part of the site"
        if anchor:
            assert anchor in anchors(found), target


def documented() -> list[object]:
    """What the API pages show."""
    names = [name for page in DOCS.rglob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert len(set(names)) == len(names)
    modules = ((importlib.import_module(m), attribute) for m, _, attribute in (n.rpartition(".") for n in names))
    return [getattr(module, attribute) for module, attribute in modules]


def public(module: str) -> list[str]:
    """The public names of a module: those of `__all__`, or the classes and functions that it defines."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return list(found.__all__)
    mine = inspect.getmembers(found, lambda x: getattr(x, "__module__", None) == module)
    return [name for name, x in mine if not name.startswith("_") and (inspect.isclass(x) or inspect.isfunction(x))]


@pytest.mark.parametrize("module", ["ringjax", "ringjax.nnx", "ringjax.linen", "ringjax.models", "ringjax.aot"])
def test_api_pages_leave_nothing_out(module):
    shown, names = documented(), public(module)
    assert names
    missing = [name for name in names if not any(getattr(importlib.import_module(module), name) is x for x in shown)]
    assert not missing, f"docs/api has no `::: {module}.{missing[0]}`"


def test_the_site_has_every_page():
    nav = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_wrong_documents_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\n$ make nothing  # no such target\nX=1 ringjax plan --spiral 3 | cat\n```\n    make test\n"
    )
    assert commands(page) == [
        ["make", "nothing"],
        ["ringjax", "plan", "--spiral", "3"],
        ["cat"],
        ["make", "test"],
    ]
    with pytest.raises(AssertionError):
        check_command(["make", "nothing"])
    with pytest.raises(SystemExit):
        check_command(["ringjax", "plan", "--spiral", "3"])
    with pytest.raises(AssertionError):
        check_command(["python", "examples/ring.py", "--spiral"])
    check_command(["make", "test", "PYTHON=python3.12"])
    assert rj.__all__ == public("ringjax")
