"""Saves checkpoints in the background, atomically, and verifies them on restore.

A checkpoint is a pytree of arrays (each process writes the shards of its devices) and a small dict of facts (metadata).
The facts contain a fingerprint of every array that is the same on every mesh, so a checkpoint is verified bit by bit on
whatever mesh it is restored. A damaged checkpoint is reported and renamed, and the previous one is used. If one cannot
be read for another reason (permissions, an I/O error, too little memory), the run stops and leaves it in place.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pathlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from lm.agreement import all_or_none, highest
from lm.flags import RunError, UserError
from lm.folder import unused
from lm.integrity import Diagnosis, Facts, Tree, diagnose, digest, fingerprint, reason, signature, summarize

__all__ = ["WAIT_SECONDS", "CheckpointError", "Checkpoints", "Restored", "fingerprint", "is_stuck"]

WAIT_SECONDS = 60.0  # how long a failing run waits for the checkpoint that is being written
is_stuck = threading.Event()  # set if a checkpoint was abandoned: its writer would keep the process from exiting
_MIDWAY = ".orbax-checkpoint-tmp"  # in the names of checkpoints that are being written
_ATTEMPTS, _PAUSE = (
    3,
    0.1,
)  # attempts to remove one: writers that orbax abandoned may still add files; the next start removes the rest
_READABLE, _DAMAGED, _UNREADABLE = range(3)


class CheckpointError(RunError):
    """Raised if a checkpoint cannot be written; the message is one line."""


class Damaged(ValueError):
    """Raised if the content of a checkpoint was read and is wrong."""


class Restored(NamedTuple):
    """Content of a checkpoint."""

    step: int
    state: Tree
    facts: Facts


class Checkpoints:
    """Manages the newest `keep` checkpoints in a folder.

    As a context manager, it waits on exit for the checkpoint that is being written, for a limited time after an error.

    Args:
        folder: Folder of the checkpoints, shared by all processes.
        keep: Number of checkpoints to keep.
        report: Receives messages for the user.

    Raises:
        UserError: If the folder cannot be created.
    """

    def __init__(self, folder: pathlib.Path, keep: int, report: Callable[[str], None]) -> None:
        _quiet()
        self.folder, self.report = folder.absolute(), report
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise UserError(f"{self.folder} cannot hold checkpoints: {error.strerror or reason(error)}") from error
        self._writing: int | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, Exception):  # a second Ctrl-C ends the run at once
            self._wait_briefly()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint."""
        return sorted(int(x.name) for x in self._entries() if re.fullmatch("[0-9]+", x.name))

    def _entries(self) -> list[pathlib.Path]:
        try:
            return list(self.folder.iterdir())
        except OSError as error:
            raise RunError(f"{self.folder} cannot be read: {error.strerror}") from error

    def save(self, step: int, state: Tree, facts: Facts) -> None:
        """Starts writing a checkpoint and returns; the arrays may be donated afterwards.

        Raises:
            CheckpointError: If this checkpoint or the previous one cannot be written.
            RunError: If a value is not finite; such a state is never saved.
        """
        self.wait()
        if step in self.steps():
            return
        found = summarize(state)
        if not found.is_finite:
            raise RunError(
                f"the parameters or moments of step {step} are not finite and are not saved; "
                f"{self._kept('no earlier checkpoint exists')}"
            )
        facts = {**facts, "step": step, "fingerprint": found.fingerprint, "arrays": signature(state)}
        facts = json.loads(json.dumps(facts))  # as it will be read back
        facts["digest"] = digest(facts)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        with self._explained(step):
            if not self.manager.save(step, args=items):
                raise ValueError("a later checkpoint exists")
        self._writing = step

    def wait(self) -> None:
        """Waits until the pending checkpoint is on disk; raises `CheckpointError` if it cannot be written."""
        if self._writing is not None:
            with self._explained(self._writing):
                self.manager.wait_until_finished()
                self.manager.check_for_errors()
                if self._writing not in self.steps():
                    raise ValueError("it has disappeared")
            self._writing = None

    def _wait_briefly(self) -> None:
        """Waits for the pending checkpoint after an error; never raises, so as not to hide that error."""
        if (step := self._writing) is None:
            return
        failed: list[str] = []

        def wait() -> None:
            try:
                self.wait()
            except Exception as error:
                failed.append(str(error))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(WAIT_SECONDS)
        if waiting.is_alive():
            is_stuck.set()
            failed.append(
                f"the checkpoint of step {step} was not written within {WAIT_SECONDS:.0f} s and was abandoned"
            )
        for line in failed:
            self.report(line)

    def close(self) -> None:
        """Waits for the pending checkpoint and stops the background threads."""
        self.wait()
        self.manager.close()

    def restore(self, wanted: Tree, check: Callable[[Facts], None]) -> Restored | None:
        """Returns the newest intact checkpoint, or None if the folder has none.

        Args:
            wanted: Pytree of `jax.ShapeDtypeStruct` with the desired shardings.
            check: Raises `UserError` if the facts do not belong to this run.

        Raises:
            UserError: If `check` raises it, if the arrays differ in name, shape or dtype, or if every checkpoint is
                damaged.
            RunError: If a checkpoint cannot be read for a reason other than damage.
        """
        steps = self.steps()
        for step in reversed(steps):
            facts, damage = self._attempt(step, lambda step=step: self._facts(step))
            if not damage:
                check(facts)
                _check_arrays(facts["arrays"], signature(wanted))
                state, damage = self._attempt(step, lambda step=step, facts=facts: self._state(step, wanted, facts))
            if not damage:
                return Restored(step, state, facts)
            self._set_aside(step, damage)
        aside = sorted(x.name for x in self._entries() if x.name.startswith("damaged-"))
        if aside:
            raise UserError(
                f"{self.folder}: no checkpoint is intact (kept: {', '.join(aside)}): to start over, pass --overwrite "
                f"or another --out; to retry one, rename it to its step"
            )
        return None

    def _read(self, step: int, **items: Any) -> Any:
        return self.manager.restore(step, args=ocp.args.Composite(**items))

    def _facts(self, step: int) -> Facts:
        facts = self._read(step, facts=ocp.args.JsonRestore()).facts
        if not isinstance(facts, dict) or facts.get("digest") != digest(facts):
            raise Damaged("its metadata differs from what was saved")
        if facts["step"] != step:
            raise Damaged(f"it belongs to step {facts['step']}")
        return facts

    def _state(self, step: int, wanted: Tree, facts: Facts) -> Tree:
        state = self._read(step, state=ocp.args.StandardRestore(wanted)).state
        found = summarize(state)
        if found.fingerprint != facts["fingerprint"]:
            raise Damaged("its arrays differ from those that were saved")
        if not found.is_finite:
            raise Damaged("not all of its values are finite")
        return state

    def _attempt(self, step: int, read: Callable[[], Any]) -> tuple[Any, str]:
        """Returns what `read` returns, and a description of the damage that any process found ("" if none).

        Raises:
            RunError: If a process could not read the checkpoint.
        """
        found, outcome, text = None, _READABLE, ""
        try:
            found = read()
        except Exception as error:  # orbax and tensorstore raise many types
            is_certain = isinstance(error, Damaged)
            damage = Diagnosis(True, str(error)) if is_certain else diagnose(error, self.folder / str(step))
            outcome, text = (_DAMAGED if damage.is_damage else _UNREADABLE), damage.reason
        worst = highest(outcome)
        if worst > outcome:
            text = "another process could not read its part"
        if worst == _UNREADABLE:
            raise RunError(
                f"the checkpoint of step {step} in {self.folder} cannot be read: {text}; "
                f"it is kept: --resume tries again"
            )
        return found, text

    def _set_aside(self, step: int, damage: str) -> None:
        self.report(f"the checkpoint of step {step} in {self.folder} is damaged and is not used: {damage}")
        with all_or_none("set a checkpoint aside"):
            if jax.process_index() == 0:
                try:
                    (self.folder / str(step)).rename(unused(self.folder / f"damaged-{step}"))
                except OSError as error:
                    raise RunError(f"{self.folder / str(step)} cannot be renamed: {error.strerror}") from error
        self.manager.reload()

    def _kept(self, otherwise: str) -> str:
        try:
            kept = ", ".join(map(str, self.steps()))
        except RunError as error:
            return str(error)
        return f"steps with a checkpoint: {kept}" if kept else otherwise

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._writing = None
            for _ in range(_ATTEMPTS):
                for left in self.folder.glob(f"{step}{_MIDWAY}*"):
                    shutil.rmtree(left, ignore_errors=True)
                time.sleep(_PAUSE)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {reason(error)}; "
                f"{self._kept('steps with a checkpoint: none')}"
            ) from error


def _check_arrays(found: dict[str, str], wanted: dict[str, str]) -> None:
    """Raises `UserError` if a checkpoint has other arrays, for example those of another optimizer."""
    other = [x for x in sorted(found.keys() | wanted.keys()) if found.get(x) != wanted.get(x)]
    if other:
        first = f"{other[0]} is {found.get(other[0], 'missing')} instead of {wanted.get(other[0], 'missing')}"
        raise UserError(
            f"--resume: the checkpoint belongs to another model or optimizer: {first} ({len(other)} arrays differ)"
        )


@functools.cache  # runs once
def _quiet() -> None:
    """Silences tracebacks of errors that are handled here: those that orbax logs, and those of the coroutines that
    orbax abandons when one of many files cannot be read or written.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    plain = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_abandoned = code is not None and "orbax" in code.co_filename
        if not is_abandoned and str(unraisable.exc_value) != "Event loop is closed":
            plain(unraisable)

    sys.unraisablehook = hook
