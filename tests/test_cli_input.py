"""Invalid command lines print one line on standard error that names the option and the value, and have no effect."""

import logging
import os
import shlex
import signal
from typing import NamedTuple

import jax
import pytest

from ringjax.cli.main import main

LONG = "9" * 5000
NOT_UTF8 = "\udcff"  # how Python represents the byte 0xff


class Bad(NamedTuple):
    """A command line with the option and the value named in its error (by default the last word of the line)."""

    line: str
    option: str
    value: str | None = None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    @property
    def shown(self) -> str:
        value = self.words[-1].rpartition("=")[2] if self.value is None else self.value
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)[:20]


SIZES = [
    *("''", "' '", "0", "-1", "1X", "1Z", "1e400", "nan", "inf", "1.3", "1,5K", "１２", "2**20", NOT_UTF8, LONG),
    *(str(2**60), str(2**200), "2G"),
]
PATTERNS = ["''", "/", "2K", "2K-1", "0/1", "2K/0", "T/T", "2K/1,", "2K/1/3", "x/1", "[/b]", f"2K/{2**60}", NOT_UTF8]
SWEEPS = ["''", "ring", "=", "ring=0", "ring=x", "ring=-1", "layout=spiral", "device=abacus", "kv-heads=3"]
SWEEPS += ["pattern=[/b]"]
SECONDS = ["nan", "inf", "-1", "1e400", "x", "''"]
TARGETS = ["''", "abacus", "tpu", "tpu:v9:2x2", "tpu:v5e:0x4", "tpu:v5e:²x2", "tpu:v5e:4x", "tpu:v5p:999999x999999"]
TARGETS += ["cuda:z9:1x1x8", "cuda:h100:8", "cuda:h100:1x0x8", f"cuda:h100:1x{2**40}x8", "cpu:", "cpu:0", "cpu:-1"]
TARGETS += [f"cpu:{2**60}", f"cpu:{LONG}", NOT_UTF8]
OUTPUTS = ["''", "folder{}", "missing/picture{}", "file{}/picture{}", "/proc/picture{}", "pipe{}", "'nul\0{}'"]
OUTPUTS += ["x" * 300 + "{}"]

CASES = [
    Bad("", "COMMAND", "COMMAND"),
    Bad("fly", "COMMAND"),
    Bad("''", "COMMAND"),
    Bad(NOT_UTF8, "COMMAND"),
    Bad("--fly plan", "--fly", "--fly"),
    Bad("plan draw", "unrecognized arguments"),
    Bad("plan 'two\nlines'", "unrecognized arguments", "two lines"),
    Bad("plan --fly", "--fly"),
    Bad("plan --seq-len", "--seq-len"),
    Bad("plan --head 4", "--head-dim", "--head"),
    *(Bad(f"plan --seq-len {size}", "--seq-len") for size in SIZES),
    *(Bad(f"plan --{name} {2**60}", f"--{name}") for name in ("heads", "kv-heads", "head-dim", "batch", "ring")),
    *(Bad(f"plan --{name} -1", f"--{name}") for name in ("heads", "kv-heads", "head-dim", "batch", "ring")),
    Bad(f"plan --head-shards {2**60}", "--head-shards"),
    Bad("plan --head-shards 3", "--head-shards"),
    Bad("plan --kv-heads 3", "--kv-heads"),
    Bad("plan --stored-length 100", "--stored-length"),
    Bad("plan --ring 3 --stored-length 1048577", "--stored-length"),
    Bad(f"plan --stored-length {2**60}", "--stored-length"),
    *(Bad(f"plan --memory={size}", "--memory") for size in ("''", "0", "-1GB", "80XB", "1Z", "1e400", str(2**200))),
    *(Bad(f"plan --{name} abacus", f"--{name}") for name in ("device", "dtype", "layout", "strategy", "offsets")),
    *(Bad(f"plan --{name} abacus", f"--{name}") for name in ("branch-heads", "mixing", "padding")),
    Bad("plan --branch-heads split --offsets block", "--offsets"),
    Bad("plan --branch-heads split --mixing detached", "--mixing"),
    Bad("plan --branch-heads split --padding zeros", "--padding"),
    Bad("plan --mixing detached --sinks", "--sinks"),
    *(Bad(f"plan --pattern {text}", "--pattern") for text in PATTERNS),
    Bad(f"plan --pattern {','.join(['2K/1'] * 1000)}", "--pattern", "1000"),
    Bad("plan --seq-len 1G --pattern 1/1", "--pattern", "1/1"),
    Bad("plan --seq-len 1G --heads 1K --pattern 2K/1K", "--pattern", "2048/1024"),
    *(Bad(f"plan --sweep {text}", "--sweep") for text in SWEEPS),
    Bad("plan --sweep mood=1,2", "--sweep", "mood"),
    Bad("plan --sweep ring=1,,2", "--sweep", "''"),
    Bad(f"plan --sweep ring={2**60}", "--sweep"),
    Bad(f"plan --sweep ring={','.join(['1'] * 1000)}", "--sweep", "1000"),
    Bad("draw", "what", "what"),
    Bad("draw horses", "what"),
    Bad("draw mask --seq-len 64K", "--seq-len", "65536"),
    Bad("draw mask --pattern 2K-1", "--pattern"),
    Bad("draw mask --kv-heads 3", "--kv-heads"),
    Bad("draw coverage --heads 1K", "--heads", "1024"),
    Bad("draw coverage --kv-heads 3", "--kv-heads"),
    Bad("draw ring --ring 1", "--ring"),
    Bad("draw ring --ring 65", "--ring"),
    Bad("draw ring --seq-len 16M --pattern 2/1", "--pattern", "2/1"),
    Bad("draw ring --stored-length 5", "--stored-length"),
    Bad("draw mask --ascii --output mask.png", "--output"),
    *(Bad(f"draw mask -o {path.replace('{}', '.png')}", "--output") for path in OUTPUTS),
    *(Bad(f"draw mask -o {path}", "--output") for path in ("mask", "mask.gif", "/dev/null", f"mask.{NOT_UTF8}")),
    *(Bad(f"doctor --cpu-devices {size}", "--cpu-devices") for size in ("0", "x", "3", str(2**60), LONG)),
    *(Bad(f"doctor --seconds={size}", "--seconds") for size in SECONDS),
    Bad("doctor --distributed", "--distributed", "--distributed"),
    *(Bad(f"tune --ring {size}", "--ring") for size in ("0", "9", str(2**60))),
    *(Bad(f"tune --cpu-devices {size}", "--cpu-devices") for size in ("0", "3", str(2**60))),
    *(Bad(f"tune --seconds={size}", "--seconds") for size in SECONDS),
    *(Bad(f"tune --seconds 0 -o {path.replace('{}', '.json')}", "--output") for path in OUTPUTS),
    Bad("tune --kv-heads 3", "--kv-heads"),
    Bad("tune --pattern 2K-1", "--pattern"),
    Bad("tune --seq-len 1G", "--seq-len", "1073741824"),
    Bad("tune --layout zigzag", "--layout"),
    Bad("aot", "--target", "--target"),
    *(Bad(f"aot --target {target}", "--target") for target in TARGETS),
    Bad("aot --target cpu:2 --pass sideways", "--pass"),
    Bad("aot --target cpu:2 --kv-heads 3", "--kv-heads"),
    Bad("aot --target cpu:2 --stored-length 5", "--stored-length"),
    Bad("aot --target tpu:v5e:2x2", "--target"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Provides a working directory with paths that are not valid output files; cases time out after ten seconds."""
    jax.devices()  # initializes JAX, so that no case changes the devices of other tests
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ringjax.cli.aot._PACKAGES", {"tpu": ("none",), "cuda": ("none",), "cpu": ("jaxlib",)})
    for suffix in (".png", ".json"):
        os.mkdir(f"folder{suffix}")
        os.mkfifo(f"pipe{suffix}")
        (tmp_path / f"file{suffix}").write_text("kept")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("took longer than 10 s"))
    signal.alarm(10)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case.line)[1:61])
def test_invalid_command_line_error_names_option_and_value_on_one_line(case, folder, capsys, caplog):
    before = sorted((path.name, path.stat().st_size) for path in folder.iterdir())
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, "jax"):
        code = main(case.words)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    assert line.startswith("ringjax")
    assert case.option in line
    assert case.shown in line
    assert line.isprintable()
    assert len(line) < 1200
    assert sorted((path.name, path.stat().st_size) for path in folder.iterdir()) == before
    assert not [record for record in caplog.records if "Compiling" in record.message]


def test_invalid_command_lines_cover_every_command():
    assert len(CASES) >= 80
    assert {"plan", "draw", "doctor", "tune", "aot"} <= {case.words[0] for case in CASES if case.words}
