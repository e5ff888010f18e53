"""Closed and limited output streams, interrupts, machine errors, and invalid tuning files."""

import dataclasses
import errno
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

from ringjax.cli import main as command
from ringjax.cli.arguments import parse_count
from ringjax.cli.draw import in_text
from ringjax.cli.files import check_output, write_output
from ringjax.cli.main import COMMANDS, main
from ringjax.cli.plan import PlanOptions, longest_that_fits
from ringjax.cli.tune import Trial, Tuning, load

PLAN = ["plan", "--seq-len", "64K", "--heads", "2", "--pattern", "2K/1,T/16", "--ring", "2"]


@pytest.mark.parametrize("words", [PLAN, [*PLAN, "--json"], ["--help"], ["plan", "--help"], ["--version"]])
def test_closed_pipe_ends_a_command_without_a_message(words, monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as stdout:  # a pipe without a reader
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(words) == 141
        stdout.flush()  # as Python does at exit, where it reports errors
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_closed_pipe_ends_a_process_without_a_message():
    line = f"{sys.executable} -m ringjax plan | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.parametrize("words", [PLAN, ["--help"]])
def test_full_disk_is_a_one_line_error(words, monkeypatch, capfd):
    with open("/dev/full", "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"error: standard output cannot be written: {os.strerror(errno.ENOSPC)}" in line


def test_closed_standard_output_is_a_one_line_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["tune"]) == 2
    assert capsys.readouterr().err == "ringjax tune: error: standard output is closed (see ringjax tune --help)\n"


@pytest.mark.parametrize("words", [["plan", "--ring", "0"], ["plan", "--kv-heads", "3"]])
def test_errors_are_not_printed_to_standard_output(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(words) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        [*PLAN, "--device", "h100"],
        [*PLAN, "--sweep", "ring=1,2"],
        ["draw", "ring", "--ascii", "--causal"],
        *([name, "--help"] for name in COMMANDS),
    ],
)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_is_ascii_in_a_limited_locale(words, encoding, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    assert main(words) == 0
    text = written.getvalue().decode("ascii")
    assert "\\u" not in text
    assert len(text.splitlines()) > 5


def test_non_utf8_file_name_is_written_and_escaped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ringjax.cli.tune.tune", lambda *_: Tuning("cpu", 1, "contiguous", "auto", None))
    path = f"{tmp_path}/tuning-\udcff.json"
    assert main(["tune", "-o", path]) == 0
    assert load(path).device == "cpu"
    assert "tuning-\\udcff.json" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_works_in_one_column(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1")
    assert main([name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_plan_output_is_independent_of_the_terminal_width(monkeypatch, capsys):
    assert main(PLAN) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "1")
    assert main(PLAN) == 0
    assert capsys.readouterr().out == wide


def test_interrupt_is_a_one_line_message(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ringjax.cli.plan.plan_report", interrupted)
    assert main(PLAN) == 130
    assert capsys.readouterr() == ("", "ringjax plan: interrupted\n")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "out of memory: choose a smaller --seq-len"),
        (command.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED:\nout of memory"), "RESOURCE_EXHAUSTED: out of memory"),
    ],
)
def test_machine_errors_are_one_line(error, text, monkeypatch, capsys):
    def failing(*_):
        raise error

    monkeypatch.setattr("ringjax.cli.plan.plan_report", failing)
    assert main(PLAN) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_device_initialization_error_is_one_line(monkeypatch, capsys):
    def failing():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr("ringjax.cli.doctor.jax.devices", failing)
    assert main(["doctor"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: JAX cannot initialize its devices: Unable to initialize backend 'tpu'" in line


GOOD = Tuning("cpu", 2, "zigzag", "ring", None, "x", (Trial("zigzag", "ring", None, True, 1.5),)).to_dict()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        '"text"',
        "{}",
        "[" * 100_000,
        '{"version": 99}',
        '{"version": 1}',
        b"\xff\xfe\x00",
        {**GOOD, "layout": "spiral"},
        {**GOOD, "layout": ["zigzag"]},
        {**GOOD, "strategy": "psychic"},
        {**GOOD, "ring_size": 0},
        {**GOOD, "ring_size": "2"},
        {**GOOD, "device": 7},
        {**GOOD, "about": None},
        {**GOOD, "block_sizes": {"query": 17, "key": 16}},
        {**GOOD, "block_sizes": [128, 128]},
        {**GOOD, "trials": 5},
        {**GOOD, "trials": [{}]},
        {**GOOD, "trials": [{**GOOD["trials"][0], "seconds": "fast"}]},
        {**GOOD, "trials": [{**GOOD["trials"][0], "seconds": -1.0}]},
        {**GOOD, "trials": [{**GOOD["trials"][0], "seconds": float("nan")}]},
        {**GOOD, "trials": [{**GOOD["trials"][0], "layout": "spiral"}]},
        {**GOOD, "surprise": 1},
        {name: value for name, value in GOOD.items() if name != "layout"},
    ],
)
def test_invalid_tuning_file_raises(content, tmp_path):
    path = tmp_path / "tuning.json"
    data = (
        content
        if isinstance(content, bytes)
        else (json.dumps(content) if isinstance(content, dict) else content).encode()
    )
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"`path` must be a file written by this version of `ringjax tune`, got '.*json'"
    ):
        load(path)


def test_tuning_file_of_this_version_is_loaded(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(GOOD))
    assert load(path).trials[0].seconds == 1.5


def test_failed_write_keeps_the_existing_file(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    path.write_text("older")

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_output(path, b"newer")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("tuning.json", "older")]


def test_write_replaces_the_target_of_a_symbolic_link(tmp_path):
    (tmp_path / "real.json").write_text("older")
    (tmp_path / "link.json").symlink_to("real.json")
    check_output(tmp_path / "link.json")
    write_output(tmp_path / "link.json", b"newer")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "newer"


def test_output_to_a_character_device_keeps_the_device():
    check_output(pathlib.Path("/dev/null"))
    write_output(pathlib.Path("/dev/null"), b"data")
    assert pathlib.Path("/dev/null").is_char_device()


def test_counts_are_exact():
    assert parse_count("9,007,199,254,740,993", most=2**60) == 9007199254740993
    assert parse_count("1.0009765625K") == 1025
    assert parse_count("1_048_576") == 2**20


def test_every_branch_has_a_distinct_symbol_in_text():
    job = PlanOptions(12, num_heads=1, pattern_text=",".join(f"{w}/1" for w in range(1, 13)))
    legend, *_, last = in_text("mask", job).splitlines()
    assert "9: 9/1, a: 10/1, b: 11/1, c: 12/1" in legend
    assert last == "c c c c c c 6 6 4 3 2 1"


def test_longest_sequence_can_be_planned():
    job = PlanOptions(65536, num_heads=1, head_dim=1, pattern_text="T/1", ring_size=8, memory=10**18)
    longest = longest_that_fits(job)
    assert 0.99 * 2**31 < longest < 2**31
    assert dataclasses.replace(job, seq_len=longest).plan().spec.seq_len == longest
