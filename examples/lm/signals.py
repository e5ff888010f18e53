"""Handles requests to stop (SIGTERM, Ctrl-C, a closed terminal) between steps, at the same step in all processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

import jax
from jax.experimental import multihost_utils

from lm import LAUNCHER_PIPE

_GRACE_SECONDS = 60.0  # to save and exit, once the launcher has exited


def end_with_launcher() -> None:
    """Stops this process when `launch_local.py`, which started it, exits for any reason."""
    pipe = os.environ.pop(LAUNCHER_PIPE, "")
    if pipe:
        threading.Thread(target=_watch_launcher, args=(int(pipe),), name="launcher", daemon=True).start()


def _watch_launcher(pipe: int) -> None:
    with contextlib.suppress(OSError):
        os.read(pipe, 1)  # nothing is ever written
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os._exit(128 + signal.SIGTERM)


class StopRequest:
    """Records a request to stop; a second signal stops the run immediately.

    With several processes, the preemption watcher of JAX handles SIGTERM and agrees on a common step.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # for example under nohup
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, self._before[number])

    def at(self, step: int) -> bool:
        """Returns whether to stop after this step; all processes must call it at every step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal is not None
