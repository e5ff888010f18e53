"""Checkpoints that are written in the background, appear whole or not at all, and are checked when they are read.

A checkpoint is a pytree of arrays (each process writes the parts that its devices hold) and a small dict of facts.
Among them is a fingerprint of every array, which is the same on every mesh, so that a checkpoint is checked bit by bit
wherever it is read. A damaged one is reported, set aside, and the one before it is used. One that cannot be read for
another reason (permissions, a failing disk, too little memory) stops the run and stays where it is.
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

WAIT_SECONDS = 60.0  # for a checkpoint that is being written when the run fails
is_stuck = threading.Event()  # whether one was given up; its writer would keep the process from ending
_MIDWAY = ".orbax-checkpoint-tmp"  # in the names of checkpoints that are being written
_ATTEMPTS, _PAUSE = 3, 0.1  # to remove one: writers that orbax gave up may still add to it, the next start removes it
_READABLE, _DAMAGED, _UNREADABLE = range(3)


class CheckpointError(RunError):
    """A checkpoint could not be written; the text is one line."""


class Damaged(ValueError):
    """What was read of a checkpoint is wrong."""


class Restored(NamedTuple):
    """What a checkpoint holds."""

    step: int
    state: Tree
    facts: Facts


class Checkpoints:
    """The checkpoints in a folder, the newest `keep` of them.

    As a context manager it waits for the one that is being written, for a limited time if an error is on its way.

    Args:
        folder: Where they are; all processes see the same.
        keep: How many stay.
        report: Takes a line for the user.

    Raises:
        UserError: If there can be no such folder.
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
        """The steps of which there is a checkpoint."""
        return sorted(int(x.name) for x in self._entries() if re.fullmatch("[0-9]+", x.name))

    def _entries(self) -> list[pathlib.Path]:
        try:
            return list(self.folder.iterdir())
        except OSError as error:
            raise RunError(f"{self.folder} cannot be read: {error.strerror}") from error

    def save(self, step: int, state: Tree, facts: Facts) -> None:
        """Begins to write a checkpoint and returns; the arrays may be donated afterwards.

        Raises:
            CheckpointError: If this one, or the one before it, cannot be written.
            RunError: If not all numbers are finite: such a state is not saved.
        """
        self.wait()
        if step in self.steps():
            return
        found = summarize(state)
        if not found.is_finite:
            raise RunError(
                f"the parameters or moments of step {step} are not finite; they are not saved, "
                f"{self._kept('and no checkpoint is before them')}"
            )
        facts = {**facts, "step": step, "fingerprint": found.fingerprint, "arrays": signature(state)}
        facts = json.loads(json.dumps(facts))  # as it will be read
        facts["digest"] = digest(facts)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        with self._explained(step):
            if not self.manager.save(step, args=items):
                raise ValueError("there is a later one")
        self._writing = step

    def wait(self) -> None:
        """Waits until what was begun is on disk; `CheckpointError` if it cannot be."""
        if self._writing is not None:
            with self._explained(self._writing):
                self.manager.wait_until_finished()
                self.manager.check_for_errors()
                if self._writing not in self.steps():
                    raise ValueError("it is gone")
            self._writing = None

    def _wait_briefly(self) -> None:
        """Waits for what was begun while an error is on its way, which is not to be replaced by another one."""
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
            failed.append(f"the checkpoint of step {step} was not written within {WAIT_SECONDS:.0f} s and is given up")
        for line in failed:
            self.report(line)

    def close(self) -> None:
        """Waits, and ends what works in the background."""
        self.wait()
        self.manager.close()

    def restore(self, wanted: Tree, check: Callable[[Facts], None]) -> Restored | None:
        """The newest checkpoint that is whole, or None where there is none at all.

        Args:
            wanted: `jax.ShapeDtypeStruct`s with the shardings that the arrays shall have.
            check: Raises `UserError` if the facts are those of something else.

        Raises:
            UserError: If `check` does, if the arrays have other names, shapes or dtypes, or if there are checkpoints
                and none is whole.
            RunError: If one cannot be read, for a reason that says nothing about its content.
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
                f"{self.folder}: no checkpoint is whole (kept: {', '.join(aside)}): to begin anew, use --overwrite or "
                f"another --out; to try one again, rename it to its step"
            )
        return None

    def _read(self, step: int, **items: Any) -> Any:
        return self.manager.restore(step, args=ocp.args.Composite(**items))

    def _facts(self, step: int) -> Facts:
        facts = self._read(step, facts=ocp.args.JsonRestore()).facts
        if not isinstance(facts, dict) or facts.get("digest") != digest(facts):
            raise Damaged("its facts are not those that were saved")
        if facts["step"] != step:
            raise Damaged(f"it is of step {facts['step']}")
        return facts

    def _state(self, step: int, wanted: Tree, facts: Facts) -> Tree:
        state = self._read(step, state=ocp.args.StandardRestore(wanted)).state
        found = summarize(state)
        if found.fingerprint != facts["fingerprint"]:
            raise Damaged("its arrays are not those that were saved")
        if not found.is_finite:
            raise Damaged("not all of its numbers are finite")
        return state

    def _attempt(self, step: int, read: Callable[[], Any]) -> tuple[Any, str]:
        """What was read, and what was wrong with it on any of the processes.

        Raises:
            RunError: If it could not be read on one of them.
        """
        found, outcome, text = None, _READABLE, ""
        try:
            found = read()
        except Exception as error:  # orbax and tensorstore raise many kinds
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
    """Refuses a checkpoint with other arrays, for example of another optimizer."""
    other = [x for x in sorted(found.keys() | wanted.keys()) if found.get(x) != wanted.get(x)]
    if other:
        first = f"{other[0]} is {found.get(other[0], 'missing')} instead of {wanted.get(other[0], 'missing')}"
        raise UserError(f"--resume: the checkpoint is of another model or optimizer: {first}, {len(other)} in all")


@functools.cache  # once
def _quiet() -> None:
    """Silences tracebacks of what is handled here: those that orbax logs, and those of the coroutines that it abandons
    when the first of many files cannot be read or written.
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
