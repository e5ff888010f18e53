"""The folder of a training run: used by one run at a time, and a failed write costs no more than itself."""

import dataclasses
import errno
import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from lm import display as display_module
from lm import lock
from lm.display import Display
from lm.flags import RunError, UserError
from lm.folder import Profile, run_folder, write_config
from lm.lock import FolderLock
from lm.records import Metrics, write_file
from lm.signals import StopRequest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


class Lines(list):
    def __call__(self, text):
        self.append(text)


@pytest.fixture
def lines():
    return Lines()


def used(folder, lines, resume=False, overwrite=False):
    with run_folder(folder, resume=resume, overwrite=overwrite, report=lines):
        return sorted(x.name for x in folder.iterdir())


def record(step):
    return {"step": step, "loss": 1 / step, "seconds_per_step": 0.1, "tokens_per_second": 10.0}


# ---- the folder ----


def earlier_run(folder):
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


@pytest.mark.parametrize("left", ["checkpoints", "metrics.jsonl"])
def test_an_earlier_run_is_neither_deleted_nor_continued_unasked(tmp_path, lines, left):
    earlier_run(tmp_path)
    other = {"checkpoints": "metrics.jsonl", "metrics.jsonl": "checkpoints"}[left]
    (tmp_path / other).rename(tmp_path / "elsewhere")
    with pytest.raises(
        UserError, match="contains an earlier run: pass --resume to continue it, --overwrite to delete it"
    ):
        used(tmp_path, lines)
    assert (tmp_path / left).exists()


def test_overwriting_deletes_an_earlier_run_and_nothing_else(tmp_path, lines):
    earlier_run(tmp_path)
    (tmp_path / "notes").write_text("mine")
    (tmp_path / ".deleted-of-a-killed-run").mkdir()
    assert used(tmp_path, lines, overwrite=True) == ["lock", "notes"]
    assert not lines


def test_overwriting_keeps_damaged_checkpoints_and_says_where(tmp_path, lines):
    for _ in range(2):
        earlier_run(tmp_path)
        (tmp_path / "checkpoints" / "damaged-3").mkdir()
        used(tmp_path, lines, overwrite=True)
    assert sorted(x.name for x in (tmp_path / "damaged").iterdir()) == ["damaged-3", "damaged-3-2"]
    assert lines[0] == f"--overwrite: damaged checkpoints are kept in {tmp_path / 'damaged'}: damaged-3"
    assert not (tmp_path / "checkpoints").exists()


def test_overwriting_does_not_follow_a_link_to_checkpoints(tmp_path, lines):
    theirs = earlier_run(tmp_path / "theirs")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "checkpoints").symlink_to(theirs / "checkpoints")
    (mine / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(
        UserError, match=r"checkpoints is a link to .*theirs/checkpoints, whose target is not deleted: remove"
    ):
        used(mine, lines, overwrite=True)
    assert (theirs / "checkpoints" / "4").is_dir()
    assert (mine / "metrics.jsonl").exists()
    (mine / "checkpoints").unlink()
    (mine / "checkpoints").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a link to"):
        used(mine, lines, overwrite=True)


def test_overwriting_removes_links_to_files_and_leaves_the_files(tmp_path, lines):
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text("theirs")
    mine = earlier_run(tmp_path / "mine")
    for name in ("metrics.jsonl", "config.json"):
        (mine / name).unlink(missing_ok=True)
        (mine / name).symlink_to(theirs)
    (tmp_path / "link").symlink_to(mine)  # the folder itself is where the user says that it is
    assert used(tmp_path / "link", lines, overwrite=True) == ["config.json", "lock"]
    write_config(mine, dataclasses.make_dataclass("C", [("a", int)])(1))
    assert theirs.read_text() == "theirs"
    assert json.loads((mine / "config.json").read_text()) == {"a": 1}


# ---- the lock ----


def test_a_second_run_is_refused_with_the_process_that_holds_the_folder(tmp_path, lines):
    earlier_run(tmp_path)
    with run_folder(tmp_path, resume=True, overwrite=False, report=lines):
        for way in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(UserError, match=rf"is used by another run \(process {os.getpid()} on .+\)"):
                used(tmp_path, lines, **way)
        assert (tmp_path / "checkpoints" / "4").is_dir()
    assert used(tmp_path, lines, resume=True)


def test_a_killed_run_releases_the_folder(tmp_path, lines):
    code = f"""
import pathlib, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
from lm.lock import FolderLock
lock = FolderLock(pathlib.Path({str(tmp_path)!r}), print)
print("locked", flush=True)
time.sleep(600)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on "):
            FolderLock(tmp_path, lines)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    FolderLock(tmp_path, lines).release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(tmp_path, lines, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    used(tmp_path, lines)
    (line,) = lines
    assert line == f"{tmp_path} cannot be locked ({os.strerror(number)}): make sure that no other run uses this folder"


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_lock_that_is_no_plain_file_is_refused(tmp_path, lines, kind):
    path = tmp_path / "lock"
    {"link": lambda: path.symlink_to("x"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(UserError, match=r"lock (cannot be opened: |must be a regular file)"):
        used(tmp_path, lines)


# ---- records ----


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b'{"step": 3}', b"\0\0\0\0", b'{"step"\n{"step": 4}\n', b"\xff\xfe\n", b"3\n", b"{}\n"]
)
def test_records_are_read_up_to_the_first_torn_line(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole + torn)
    metrics = Metrics(path)
    records, line = metrics.begin(9)
    assert records == [{"step": 1}, {"step": 2}]
    assert line == f"{path}: line 3 is not a valid record; it is removed with everything after it"
    assert path.read_bytes() == whole
    metrics.add({"step": 3})
    assert path.read_bytes() == whole + b'{"step": 3}\n'


def test_records_after_the_checkpoint_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 9)) + '{"st')
    assert Metrics(path).begin(3) == ([{"step": 1}, {"step": 2}, {"step": 3}], "")
    assert Metrics(path).begin(0) == ([], "")
    assert path.read_bytes() == b""


def test_a_file_of_records_that_cannot_be_used_stops_the_run(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match=r"metrics\.jsonl must be a file"):
        Metrics(tmp_path / "metrics.jsonl").begin(3)
    (tmp_path / "old").write_text("{}\n")
    monkeypatch.setattr("lm.records.os.truncate", lambda *_: os.open(tmp_path / "gone" / "x", os.O_RDONLY))
    with pytest.raises(RunError, match="old cannot be used: No such file or directory"):
        Metrics(tmp_path / "old").begin(3)


def test_a_record_that_a_full_disk_refused_is_written_later(tmp_path, monkeypatch, capsys):
    """Half a record reaches the disk, as with ENOSPC; training goes on, and the run fails at its end."""
    display = Display(tmp_path, steps=9, tokens=1, as_json=False)
    display.begin(0)
    display.log(record(1))

    class Full(io.FileIO):
        def write(self, content):
            super().write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lm.records.os.fdopen", Full)
        display.log(record(2))
        display.log(record(3))
    assert (tmp_path / "metrics.jsonl").stat().st_size > len(json.dumps(record(1))) + 1  # torn
    display.log(record(4))
    display.sync()
    assert Metrics(tmp_path / "metrics.jsonl").begin(9) == ([record(step) for step in (1, 2, 3, 4)], "")
    said = f"metrics.jsonl could not be written to {tmp_path}: no space left on device"
    assert capsys.readouterr().out.replace("\n", " ").count(said) == 1
    with pytest.raises(RunError, match="the run is complete, but some output could not be written: " + said):
        display.raise_problems()


@pytest.mark.parametrize("name", ["sample.txt", "loss.png"])
def test_a_sample_or_curve_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(display_module, "loss_curve", lambda records, entropy: b"PNG")
    (tmp_path / name).mkdir()  # cannot be replaced by a file
    display = Display(tmp_path, steps=1, tokens=1, as_json=False)
    display.begin(0)
    display.log(record(1))
    display.finish("löss ×", 1.0)
    with pytest.raises(RunError, match=f"{name} could not be written to .*: is a directory"):
        display.raise_problems()
    other = {"sample.txt": "loss.png", "loss.png": "sample.txt"}[name]
    assert (tmp_path / other).read_bytes() == {"sample.txt": "löss ×".encode(), "loss.png": b"PNG"}[other]
    assert not list(tmp_path.glob(".*"))
    assert "wrote metrics, checkpoints, loss curve and sample to" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True])
def test_nobody_reading_the_lines_does_not_end_a_run(tmp_path, monkeypatch, as_json):
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    display = Display(tmp_path, steps=2, tokens=1, as_json=as_json)
    display.begin(0)
    for step in (1, 2):
        display.log(record(step))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert all(problem.endswith("Broken pipe") for problem in display.problems)
    assert len(display.problems) == 1 + as_json
    display_module.flush_stdout()
    monkeypatch.undo()
    stream.close()


def test_an_interrupted_write_leaves_the_earlier_file(tmp_path, monkeypatch):
    write_file(tmp_path / "a", b"before")

    def replace(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("lm.records.os.replace", replace)
    with pytest.raises(OSError, match="Disk quota exceeded"):
        write_file(tmp_path / "a", b"after")
    assert [(x.name, x.read_bytes()) for x in tmp_path.iterdir()] == [("a", b"before")]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the C locale
def test_characters_that_stdout_cannot_encode_are_replaced(monkeypatch, errors):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", stream)
    display_module.never_fail_to_encode()
    print("1 × \udcfc")
    stream.flush()
    assert stream.buffer.getvalue() == b"1 ? ?\n"


# ---- profile and signals ----


def test_a_profile_that_cannot_be_written_is_refused_before_training(tmp_path, lines):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--profile .*file/x cannot be written to: Not a directory"):
        Profile(str(tmp_path / "file" / "x"), lines)


@pytest.mark.parametrize("fails", ["start_trace", "stop_trace"])
def test_a_profile_that_fails_later_does_not_end_training(tmp_path, lines, monkeypatch, fails):
    def fail(*_):
        raise RuntimeError("No space\nleft on device")

    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(f"lm.folder.jax.profiler.{name}", fail if name == fails else lambda *_: None)
    with Profile(str(tmp_path), lines) as profile:
        for done in range(9):
            profile.before_step(done)
    assert lines == [f"--profile {tmp_path}: No space left on device"]


def test_a_closed_terminal_is_a_request_to_stop_unless_it_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.at(1)
            assert stop.signal == signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.at(1)
    finally:
        signal.signal(signal.SIGHUP, before)
