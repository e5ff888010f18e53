"""The files that `examples/train_lm.py` reads: which ones `--data-path` names, and what happens when they change."""

import json
import os
import pathlib
import socket
import tracemalloc

import numpy as np
import pytest
from lm import data, documents
from lm.display import Display
from lm.flags import RunError, UserError


@pytest.fixture
def texts(tmp_path):
    """Forty files in two folders."""
    for i in range(40):
        path = tmp_path / "texts" / f"v{i % 2}" / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([65 + i]) * (i + 1))
    return tmp_path / "texts"


def read(*paths):
    """The split, and the lines about what was skipped."""
    lines = []
    return data.read_documents([str(path) for path in paths], lines.append), lines


def names(found):
    return [pathlib.Path(x.path).name for x in found]


def test_links_add_no_documents_and_do_not_change_what_is_held_out(texts, tmp_path):
    before, _ = read(texts)
    (texts / "latest").symlink_to("v1")
    (texts / "a_link.txt").symlink_to("v0/00.txt")
    os.link(texts / "v0" / "02.txt", texts / "v0" / "zz.txt")
    for path in (texts, texts / "**", texts / "*" / "*.txt", texts / "**" / "*.txt"):
        after, _ = read(path)
        assert after.held_out == before.held_out
        assert after.train == before.train
    alone, _ = read(texts / "v1")
    linked, _ = read(texts / "latest")
    assert names(linked.held_out) == names(alone.held_out)
    assert linked.contents == alone.contents
    both, _ = read(texts / "latest", texts / "v1", texts / "v1" / "01.txt")
    assert len(both.train) + len(both.held_out) == 20


def test_links_that_form_loops_end(texts):
    before, _ = read(texts)
    (texts / "loop").symlink_to(".")
    (texts / "v0" / "up").symlink_to("..")
    (texts / "v1" / "up").symlink_to("../v0")
    for path in (texts, texts / "**", texts / "**" / "**" / "*.txt"):
        assert read(path)[0] == before
    (texts / "self").symlink_to("self")
    with pytest.raises(UserError, match=r"self cannot be read: Too many levels of symbolic links"):
        read(texts)


def test_links_to_other_folders_are_followed(texts, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.txt").write_text("more")
    before, _ = read(texts)
    (texts / "elsewhere").symlink_to(tmp_path / "elsewhere")
    after, _ = read(texts)
    assert set(names((*after.train, *after.held_out))) == {*names((*before.train, *before.held_out)), "more.txt"}


@pytest.fixture(params=["FIFO", "socket", "device"])
def special(request, texts, monkeypatch):
    monkeypatch.chdir(texts)  # the names of sockets must be short
    if request.param == "FIFO":
        os.mkfifo("special")
    elif request.param == "device":
        pathlib.Path("special").symlink_to(os.devnull)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("special")
    return request.param


def test_special_files_are_never_opened(special, texts):
    with pytest.raises(UserError, match=f"special is a {special}; only text files are supported"):
        read(texts / "special")
    for path in (texts, texts / "*"):
        split, lines = read(path, texts / "v0")
        assert "special" not in names((*split.train, *split.held_out))
        assert lines == [f"--data-path: skipped {texts}/special: not regular files"]


@pytest.mark.parametrize(
    "content", [b"\x7fELF\x02\x00" + b"a" * 500, bytes(range(1, 256)) * 4], ids=["NUL bytes", "control characters"]
)
def test_binary_files_are_skipped_in_folders_and_refused_by_name(texts, content):
    before, _ = read(texts)
    for i in range(5):
        (texts / f"{i}.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"0\.bin is binary: .*; only text files are supported"):
        read(texts / "0.bin")
    split, lines = read(texts)
    assert (split.train, split.held_out) == (before.train, before.held_out)
    assert lines == [f"--data-path: skipped {texts}/0.bin, {texts}/1.bin, {texts}/2.bin and 2 more: not text"]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "shift-jis", "koi8-r"])
def test_texts_in_any_encoding_are_read(tmp_path, encoding):
    text = {"latin-1": "Grüße, façade\n", "shift-jis": "日本語の文章\r\n", "koi8-r": "Привет\n"}.get(
        encoding, "é\t日\n"
    )
    (tmp_path / "text").write_bytes((text * 1000).encode(encoding))
    assert read(tmp_path)[1] == []
    assert len(read(tmp_path / "text")[0].train) == 1


def test_names_that_are_not_utf8_are_read_and_shown(tmp_path, capsys):
    folder = os.fsencode(tmp_path / "texts")
    os.mkdir(folder)
    for i in range(3):
        pathlib.Path(os.fsdecode(os.path.join(folder, b"caf\xe9%d" % i))).write_text("text")
    pathlib.Path(os.fsdecode(os.path.join(folder, b"bin\xff\n"))).write_bytes(b"\0")
    display = Display(tmp_path, 1, 1, as_json=False)
    split = data.read_documents([os.fsdecode(folder)], display.say)
    assert len(split.train) == 2
    assert data.Stream(split.train, np.arange(2)).read(0, 8).tobytes() == b"texttext"
    assert json.loads(json.dumps(split.facts())) == split.facts()
    assert "bin\\udcff\\n: not text" in capsys.readouterr().out
    with pytest.raises(UserError) as error:
        data.read_documents([os.fsdecode(os.path.join(folder, b"gone\xff"))])
    assert "gone\\udcff" in str(error.value)
    str(error.value).encode()  # can be printed anywhere


def test_absolute_and_relative_paths_go_together(texts, monkeypatch):
    whole, _ = read(texts)
    monkeypatch.chdir(texts)
    assert read("v0", texts / "v1")[0] == whole
    assert read("v0/../v0", texts / "v1", "v1/*.txt")[0] == whole


def test_patterns_match_as_in_a_shell(texts):
    (texts / ".hidden.txt").write_text("hidden")
    (texts / "v0" / "[x]").write_text("brackets")

    def matched(pattern):
        split, _ = read(texts / pattern)
        return sorted(set(names((*split.train, *split.held_out))))

    assert matched("*/0[0-3].txt") == ["00.txt", "01.txt", "02.txt", "03.txt"]
    assert matched("v?/1?.txt") == [f"{i}.txt" for i in range(10, 20)]
    assert matched("**/3*.txt") == [f"{i}.txt" for i in range(30, 40)]
    assert matched("v0/[[]x]") == ["[x]"]
    assert matched(".*") == [".hidden.txt"]
    assert ".hidden.txt" not in matched("**")
    with pytest.raises(UserError, match="no such file or folder, and no file matches it as a pattern"):
        read(texts / "*.txt")


def test_folders_that_cannot_be_read_are_an_error(texts, monkeypatch):
    """As for another user: root reads everything."""
    plain = os.scandir

    def scandir(path):
        if str(path).endswith("v1"):
            raise PermissionError(13, "Permission denied", path)
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for path in (texts, texts / "*" / "*", texts / "**" / "*.txt"):
        with pytest.raises(UserError, match=r"v1 cannot be read: Permission denied"):
            read(path)


def test_shortened_files_stop_the_run(texts):
    split, _ = read(texts)
    document = max(split.train, key=lambda x: x.size)
    stream = data.Stream([document], np.arange(1))
    assert len(stream.read(0, len(stream))) == document.size
    os.truncate(document.path, 10)
    assert len(stream.read(0, 10)) == 10
    message = f"{document.path} was truncated during the run: 10 bytes"
    with pytest.raises(RunError, match=message):
        stream.read(0, len(stream))
    with pytest.raises(RunError, match=message):
        data.unigram_entropy([document])
    os.remove(document.path)
    documents._opened.cache_clear()
    with pytest.raises(RunError, match=r"cannot be read: No such file or directory"):
        stream.read(0, 1)


def test_open_descriptors_are_bounded(tmp_path, monkeypatch):
    for i in range(300):
        (tmp_path / f"{i}").write_text(f"{i:4}")
    split, _ = read(tmp_path)
    before = len(os.listdir("/dev/fd"))
    documents._opened.cache_clear()
    stream = data.Stream(split.train, np.arange(len(split.train)))
    assert len(stream.read(0, len(stream))) == 4 * len(split.train)
    assert len(os.listdir("/dev/fd")) <= before + documents._OPEN_FILES
    documents._opened.cache_clear()


def test_digest_notices_other_bytes_of_the_same_size(texts, tmp_path):
    first, _ = read(texts)
    assert read(texts)[0].facts() == first.facts()
    path = texts / "v0" / "20.txt"
    about, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:9] + b"!" + content[10:])
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    changed = read(texts)[0].facts()
    assert {name for name in changed if changed[name] != first.facts()[name]} == {"contents"}
    path.write_bytes(content)
    touched = read(texts)[0].facts()
    assert {name for name in touched if touched[name] != first.facts()[name]} == {"modified"}
    path.rename(texts / "v0" / "other.txt")
    assert read(texts)[0].contents != first.contents


def test_digest_of_large_data_samples_both_ends_of_a_document(texts, monkeypatch):
    big = texts / "v0" / "big.txt"
    big.write_bytes(b"a" * 100_000)
    monkeypatch.setattr(documents, "_DIGEST_BYTES", 1000)
    first = read(texts)[0].contents
    for at in (0, 99_999):
        content = bytearray(b"a" * 100_000)
        content[at] = ord("b")
        big.write_bytes(content)
        assert read(texts)[0].contents != first


def test_unigram_entropy_takes_little_memory(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(b"ab" * 2**23)
    tracemalloc.start()
    try:
        entropy = data.unigram_entropy([data.Document(str(path), 0, 2**24)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert entropy == pytest.approx(np.log(2))
    assert peak < 2**24  # the size of the file, an eighth of that of its bytes as int64
