"""The processes of `examples/train_lm.py`: how they meet, compare their data, and end when one of them is lost."""

import argparse
import ast
import bisect
import contextlib
import heapq
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from lm import devices, documents, peers, relay
from lm.flags import UserError
from lm.peers import Address, Peers

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def address():
    return Address.parse(f"127.0.0.1:{free_port()}")


def meet(*processes, timeout=5.0):
    """What comes of it for each process: None, or the error; processes are (address, count, rank)."""
    results, met = [None] * len(processes), [Peers(*process) for process in processes]

    def one(i):
        try:
            met[i].rendezvous(timeout)
        except UserError as error:
            results[i] = str(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in met:
        for connection in process.connections:
            connection.socket.close()
    return results


def test_all_meet_whatever_else_connects(address):
    results = []
    all_three = threading.Thread(target=lambda: results.extend(meet(*((address, 3, i) for i in (1, 2)))))
    all_three.start()
    first = Peers(address, 3, 0)

    def strangers():
        for text in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"x" * 5000, b"ringjax-lm hello x 3\n"):
            with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), 2) as stranger:
                stranger.sendall(text)

    with pytest.MonkeyPatch.context() as patch:
        plain = peers._Rendezvous.gather
        patch.setattr(peers._Rendezvous, "gather", lambda self, deadline: (strangers(), plain(self, deadline))[1])
        first.rendezvous(5)
    all_three.join()
    assert results == [None, None]
    assert [connection.rank for connection in first.connections] == [1, 2]
    with address.listen():  # JAX listens on the same port while the connections last
        pass
    for connection in first.connections:
        connection.socket.close()


def test_too_few_processes_are_one_line_that_counts_them(address):
    first, second = meet((address, 4, 0), (address, 4, 2), timeout=1)
    assert first == (
        f"--coordinator {address.text}: 2 of 4 processes joined within 1 s (--start-timeout); missing: 1, 3"
    )
    assert second == first


def test_a_first_process_that_never_comes_is_one_line(address):
    (line,) = meet((address, 2, 1), timeout=0.5)
    assert line == (
        f"--coordinator {address.text}: process 1 could not reach process 0 of 2 within 0.5 s (--start-timeout): "
        "connection refused"
    )


def test_a_taken_port_is_one_line_at_once(address, monkeypatch):
    monkeypatch.setattr(peers, "_SLACK", 0.0)
    with socket.create_server((address.host, address.port)):
        began = time.monotonic()
        (line,) = meet((address, 2, 0), timeout=60)
        assert time.monotonic() - began < 10
        assert line == f"--coordinator {address.text} cannot be bound: address already in use"
        (line,) = meet((address, 2, 1), timeout=0.5)
        assert "connected, but no answer" in line


def test_another_program_at_the_address_is_one_line(address):
    with socket.create_server((address.host, address.port)) as server:

        def answer():
            with server.accept()[0] as accepted:
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (line,) = meet((address, 2, 1))
        thread.join()
    assert line == f"--coordinator {address.text}: another program uses this address"


def test_the_same_process_twice_is_one_line_in_all(address):
    lines = meet((address, 4, 0), (address, 4, 1), (address, 4, 1))
    assert lines[0] == f"--coordinator {address.text}: two processes have --process-id 1"
    assert lines == [lines[0]] * 3


def test_another_number_of_processes_is_one_line_in_all(address):
    lines = meet((address, 2, 0), (address, 3, 1))
    assert lines == [f"--coordinator {address.text}: process 1 has --num-processes 3, process 0 has 2"] * 2


@pytest.mark.parametrize("text", ["nonsense", "host:", ":1234", "host:0", "host:65536", "host:x", "[]:12"])
def test_addresses_that_make_no_sense(text):
    with pytest.raises(UserError, match=rf"--coordinator must be HOST:PORT .*, got {re.escape(repr(text))}"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("127.0.0.1:12", "127.0.0.1:12"),
        ("127.1.2.3:12", "127.1.2.3:12"),
        ("localhost:12", "127.0.0.1:12"),
        ("[::1]:12", "[::1]:12"),
        ("10.0.0.1:12", None),
        ("host0:12", None),
    ],
)
def test_only_loopback_addresses_are_bound_alone(text, bind, monkeypatch):
    address = Address.parse(text)
    assert address.bind == bind
    monkeypatch.setattr(Peers, "rendezvous", lambda self, timeout: None)
    monkeypatch.setattr(Peers, "__enter__", lambda self: self)
    given = {}
    monkeypatch.setattr(devices.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(devices.jax.distributed, "initialize", lambda *args, **options: given.update(options))
    with devices.started(0, False, text, 2, 0, 7.5):
        assert given["coordinator_bind_address"] == bind
        assert given["initialization_timeout"] == 8


def slurm(address, rank, count=2):
    """The environment of a process of a SLURM job on this machine."""
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": address.host, "SLURM_NTASKS": str(count)}
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    return {**job, **place, "JAX_COORDINATOR_PORT": str(address.port)}


def test_processes_of_a_cluster_are_detected(address, monkeypatch):
    for name, value in slurm(address, 0, count=1).items():
        monkeypatch.setenv(name, value)
    given = []
    monkeypatch.setattr(devices.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(devices.jax.distributed, "initialize", lambda *args, **options: given.append((args, options)))
    with devices.started(0, True, "", 1, -1, 7.5):
        ((args, options),) = given
        assert args == (address.text, 1, 0)
        assert (options["coordinator_bind_address"], options["initialization_timeout"]) == (address.text, 8)


def test_no_cluster_is_one_line(monkeypatch):
    monkeypatch.setattr(devices.jax.config, "update", lambda *_: None)
    message = "--distributed: JAX detects no cluster (SLURM, Open MPI, Cloud TPU, ...); use --coordinator"
    with pytest.raises(UserError, match=re.escape(message)), devices.started(0, True, "", 1, -1, 7.5):
        pass
    message, endless = "--start-timeout must be a number of seconds, got inf", float("inf")
    with pytest.raises(UserError, match=message), devices.started(0, True, "", 1, -1, endless):
        pass


def test_a_cluster_that_cannot_be_read_is_one_line(address, monkeypatch):
    for name, value in (slurm(address, 0) | {"SLURM_NTASKS": "two"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices.jax.config, "update", lambda *_: None)
    message = "--distributed: JAX cannot detect the other processes: invalid literal for int"
    with pytest.raises(UserError, match=message), devices.started(0, True, "", 1, -1, 7.5):
        pass


@pytest.fixture
def two_processes(monkeypatch):
    """As in process 1 of 2: gives what the first process has sent, and takes what this one sends."""
    first = {}

    def gather(sent):
        return np.stack([first["digest"], sent])

    monkeypatch.setattr(devices.jax, "process_count", lambda: 2)
    monkeypatch.setattr(devices.multihost_utils, "process_allgather", gather)
    return first


def split_of(path):
    return documents.read_documents([str(path)])


def test_processes_that_find_other_files_are_one_line(two_processes, tmp_path):
    for folder, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / folder).mkdir()
        for name in ("x", "y"):
            (tmp_path / folder / name).write_text(text)
    ours, copy, other = (split_of(tmp_path / folder) for folder in "abc")
    two_processes["digest"] = np.frombuffer(bytes.fromhex(copy.contents), np.int32)
    assert devices.read_same_data(lambda: ours) == ours
    two_processes["digest"] = np.frombuffer(bytes.fromhex(other.contents), np.int32)
    with pytest.raises(UserError, match="process 1 found different files than process 0"):
        devices.read_same_data(lambda: ours)
    two_processes["digest"] = np.zeros(4, np.int32)
    with pytest.raises(UserError, match="process 0 cannot read the files; see its message"):
        devices.read_same_data(lambda: ours)
    with pytest.raises(UserError, match="no such file or folder"):
        devices.read_same_data(lambda: split_of(tmp_path / "gone"))


def test_a_relay_forwards_and_closes_late(monkeypatch):
    monkeypatch.setattr(relay, "_DELAY", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = relay.relayed("127.0.0.1", server.getsockname()[1]).split(":")
        with socket.create_connection((host, int(port)), 5) as near:
            far = server.accept()[0]
            near.sendall(b"there")
            assert far.recv(10) == b"there"
            far.sendall(b"back")
            assert near.recv(10) == b"back"
            began = time.monotonic()
            far.close()
            assert near.recv(10) == b""
            assert time.monotonic() - began >= 0.3


# Processes that watch each other, without JAX: what a process does between meeting the others and its end.
WATCH = """
import sys, time
sys.path.insert(0, {examples!r})
from lm import peers
from lm.flags import RunError
peers._BEAT, peers._SILENCE, peers._OWN_ERROR = 0.2, {silence}, 0.4
rank = int(sys.argv[1])
process = peers.Peers(peers.Address.parse({address!r}), 3, rank)
process.rendezvous(20)
try:
    with process:
        print("met", flush=True)
        if rank == {failing}:
            raise RunError("no luck")
        sys.stdin.readline()
except RunError as error:
    print("train_lm:", error, file=sys.stderr)
    sys.exit(1)
"""


@contextlib.contextmanager
def three_that_watch(address, failing=-1, silence=40.0):
    script = WATCH.format(examples=str(EXAMPLES), address=address.text, failing=failing, silence=silence)
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    processes = [subprocess.Popen([sys.executable, "-c", script, str(i)], text=True, **pipes) for i in range(3)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(process):
    return process.wait(timeout=20), process.stderr.read()  # its stdin stays open


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_others_with_one_line(address, lost):
    with three_that_watch(address) as processes:
        for process in processes:
            assert process.stdout.readline() == "met\n"
        processes[lost].kill()
        line = f"train_lm: process {lost} of 3 was killed or its host is down; exiting (continue with --resume)\n"
        assert [ended(x) for i, x in enumerate(processes) if i != lost] == [(1, line)] * 2


@pytest.mark.slow
def test_a_silent_process_ends_the_others_with_one_line(address):
    with three_that_watch(address, silence=5) as processes:
        for process in processes:
            assert process.stdout.readline() == "met\n"
        os.kill(processes[2].pid, signal.SIGSTOP)
        line = "train_lm: process 2 of 3 has not responded for 5 s; exiting (continue with --resume)\n"
        assert [ended(x) for x in processes[:2]] == [(1, line)] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_ends_the_others_with_one_line(address, failing):
    with three_that_watch(address, failing) as processes:
        others = (1, f"train_lm: process {failing} of 3 failed (see its message); exiting\n")
        expected = [(1, "train_lm: no luck\n") if i == failing else others for i in range(3)]
        assert [ended(process) for process in processes] == expected


def test_processes_that_have_done_their_part_leave_in_any_order(address):
    with three_that_watch(address) as processes:
        for process in processes:
            assert process.stdout.readline() == "met\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
            assert ended(process) == (0, "")


# Real runs

TINY = shlex.split(
    "--layers 1 --features 32 --heads 2 --segments 16,64 --rates 1,2 --seq-len 64 --batch 4 --log-every 1 --devices 1 "
    "--save-every 5 --eval-every 0 --sample-bytes 0 --steps 100000 --warmup 2"
)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts").mkdir()
    for module in (argparse, ast, bisect, heapq):
        shutil.copy(module.__file__, tmp_path / "texts")
    return tmp_path / "texts"


@contextlib.contextmanager
def training(script, *options, env=None):
    """A process of a script, killed at the end."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, options)]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **(env or {})}  # compiles faster
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def result(process, timeout=120):
    """Exit code and the lines on stderr."""
    _, errors = process.communicate(timeout=timeout)
    return process.returncode, errors.splitlines()


def wait_for_steps(folder, steps):
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 900
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def joined(address, rank, *options):
    return "--coordinator", address.text, "--num-processes", 2, "--process-id", rank, *TINY, *options


@pytest.mark.slow
def test_training_with_a_taken_port_or_a_missing_process_is_one_line(address, texts, tmp_path):
    options = joined(address, 0, "--data-path", texts, "--out", tmp_path / "out", "--start-timeout", 2)
    with socket.create_server((address.host, address.port)), training("train_lm.py", *options) as process:
        line = f"train_lm: --coordinator {address.text} cannot be bound: address already in use"
        assert result(process) == (2, [line])
    with training("train_lm.py", *options) as process:
        line = f"{address.text}: 1 of 2 processes joined within 2 s (--start-timeout); missing: 1"
        assert result(process) == (2, [f"train_lm: --coordinator {line}"])


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_killed_in_training_ends_the_other_with_one_line(address, texts, tmp_path, lost):
    options = ("--data-path", texts, "--out", tmp_path / "out")
    commands = [("train_lm.py", *joined(address, rank, *options)) for rank in range(2)]
    with training(*commands[0]) as first, training(*commands[1]) as second:
        wait_for_steps(tmp_path / "out", 8)
        killed, other = (first, second) if lost == 0 else (second, first)
        killed.kill()
        line = f"process {lost} of 2 was killed or its host is down; exiting (continue with --resume)"
        assert result(other, 60) == (1, [f"train_lm: {line}"])


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_killed_in_a_cluster_ends_the_other_with_one_line(address, texts, tmp_path, lost):
    command = "train_lm.py", "--distributed", *TINY, "--data-path", texts, "--out", tmp_path / "out"
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(training(*command, env=slurm(address, rank))) for rank in range(2)]
        wait_for_steps(tmp_path / "out", 8)
        both[lost].kill()
        line = f"process {lost} of 2 was killed or its host is down; exiting (continue with --resume)"
        assert result(both[1 - lost], 60) == (1, [f"train_lm: {line}"])


@pytest.mark.slow
def test_a_missing_process_of_a_cluster_is_one_line(address, texts, tmp_path):
    options = "--distributed", *TINY, "--data-path", texts, "--out", tmp_path / "out", "--start-timeout", 2
    with training("train_lm.py", *options, env=slurm(address, 0)) as process:
        line = f"{address.text}: 1 of 2 processes joined within 2 s (--start-timeout); missing: 1"
        assert result(process) == (2, [f"train_lm: --distributed {line}"])


@pytest.mark.slow
def test_processes_that_find_other_files_end_with_one_line(address, texts, tmp_path):
    other = tmp_path / "copy"
    other.mkdir()
    for path in texts.iterdir():
        (other / path.name).write_bytes(path.read_bytes().replace(b"import", b"export"))
    commands = [
        ("train_lm.py", *joined(address, rank, "--data-path", path, "--out", tmp_path / "out"))
        for rank, path in enumerate((texts, other))
    ]
    with training(*commands[0]) as first, training(*commands[1]) as second:
        for process in (first, second):
            code, lines = result(process)
            assert len(lines) == 1
            assert (code, lines[0].endswith("process 1 found different files than process 0")) in (
                (2, True),
                (1, False),
            )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_run_saves_and_ends_with_its_launcher(texts, tmp_path, number):
    out = tmp_path / "out"
    options = ("--processes", 2, "--devices", 1, "--", *TINY, "--data-path", texts, "--out", out)
    with training("launch_local.py", *options) as launcher:
        wait_for_steps(out, 3)
        children = [path for path in pathlib.Path("/proc").iterdir() if f"--out\0{out}\0--devices" in _command(path)]
        assert len(children) == 2
        try:
            launcher.send_signal(number)
            deadline = time.monotonic() + 60
            while any(str(out) in _command(path) for path in children):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            for path in children:
                if str(out) in _command(path):
                    os.kill(int(path.name), signal.SIGKILL)
    last = (out / "metrics.jsonl").read_text().splitlines()[-1]
    assert f'{{"step": {max(int(x.name) for x in (out / "checkpoints").iterdir() if x.name.isdigit())},' in last


def _command(process):
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""
