"""Runs `train_lm.py` as several processes on this machine, connected by `jax.distributed` as on several hosts.

    python examples/launch_local.py --processes 2 --devices 2 -- --steps 30 --out runs/two

Each process has `--devices` simulated CPU devices; options after `--` are passed to `train_lm.py`. The first process
prints the progress. SIGTERM, SIGHUP and Ctrl-C are forwarded to all processes, which save a checkpoint and exit; so do
they if the launcher is killed. If one process fails, the others are stopped.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from lm import LAUNCHER_PIPE

GRACE_SECONDS = 10.0  # for the other processes, after one has failed
SCRIPT = pathlib.Path(__file__).with_name("train_lm.py")


def launch(processes: int, devices: int, options: Sequence[str]) -> int:
    """Runs the processes and returns the exit code of the first one that failed, or 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, str(SCRIPT), *options, "--devices", str(devices), "--coordinator", address]
    command += ["--num-processes", str(processes), "--process-id"]
    watched, held = os.pipe()  # `held` closes when this process ends for any reason, which children notice in `watched`
    environment = {**os.environ, LAUNCHER_PIPE: str(watched)}
    children = [
        subprocess.Popen([*command, str(rank)], start_new_session=True, pass_fds=[watched], env=environment)
        for rank in range(processes)
    ]
    os.close(watched)

    def forward(number: int, _: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    failed, deadline = 0, float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        codes = [child.returncode for child in children if child.returncode]
        if codes and not failed:
            failed, deadline = codes[0], time.monotonic() + GRACE_SECONDS
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
    os.close(held)
    failed = failed or next((child.returncode for child in children if child.returncode), 0)
    return failed if failed >= 0 else 128 - failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="number of processes")
    parser.add_argument("--devices", type=int, default=2, help="simulated CPU devices per process")
    parser.add_argument("options", nargs="*", help="options of train_lm.py, after --")
    given = parser.parse_args(argv)
    if min(given.processes, given.devices) < 1:
        parser.error(f"--processes and --devices must be at least 1, got {given.processes} and {given.devices}")
    return launch(given.processes, given.devices, given.options)


if __name__ == "__main__":
    sys.exit(main())
