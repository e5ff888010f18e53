"""Checkpoints that are written in the background, appear whole or not at all, and are checked when they are read.

A checkpoint is a pytree of arrays (each process writes the parts that its devices hold) and a small dict of facts. One
of them is a *fingerprint*: the sum of the bits of every array, which is the same on every mesh, so that a checkpoint is
checked bit by bit wherever it is read. A damaged one is reported, set aside, and the one before it is used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array, lax
from jax.experimental import multihost_utils

from lm.flags import RunError, UserError

Tree = Any
Facts = dict[str, Any]
_MIDWAY = ".orbax-checkpoint-tmp"  # in the names of checkpoints that are being written
_ATTEMPTS, _PAUSE = 3, 0.1  # to remove one: writers that orbax gave up may still add to it, the next start removes it


class CheckpointError(RunError):
    """A checkpoint could not be written; the text is one line."""


class Restored(NamedTuple):
    """What a checkpoint holds."""

    step: int
    state: Tree
    facts: Facts


class Checkpoints:
    """The checkpoints in a folder, the newest `keep` of them.

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
            raise UserError(f"{self.folder} cannot hold checkpoints: {error.strerror}") from error
        self._writing: int | None = None

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def save(self, step: int, state: Tree, facts: Facts) -> None:
        """Begins to write a checkpoint and returns; the arrays may be donated afterwards.

        Raises:
            CheckpointError: If this one, or the one before it, cannot be written.
        """
        self.wait()
        if step in self.steps():
            return
        facts = {**facts, "step": step, "fingerprint": fingerprint(state)}
        with self._explained(step):
            self.manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
            )
        self._writing = step

    def wait(self) -> None:
        """Waits until what was begun is on disk; `CheckpointError` if it cannot be."""
        if self._writing is not None:
            with self._explained(self._writing):
                self.manager.wait_until_finished()
                self.manager.check_for_errors()
            self._writing = None

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
            UserError: If `check` does, or there are checkpoints and none is whole.
        """
        steps = self.steps()
        for step in reversed(steps):
            facts, damage = self._attempt(lambda step=step: self._read(step, facts=ocp.args.JsonRestore()).facts)
            if not damage:
                check(facts)
                state, damage = self._attempt(lambda step=step, facts=facts: self._checked(step, wanted, facts))
            if not damage:
                return Restored(step, state, facts)
            self._set_aside(step, damage)
        if steps:
            raise UserError(f"{self.folder}: no checkpoint is whole; they are kept, under the name damaged-STEP")
        return None

    def _read(self, step: int, **items: Any) -> Any:
        return self.manager.restore(step, args=ocp.args.Composite(**items))

    def _checked(self, step: int, wanted: Tree, facts: Facts) -> Tree:
        state = self._read(step, state=ocp.args.StandardRestore(wanted)).state
        if fingerprint(state) != facts["fingerprint"]:
            raise ValueError("its arrays are not those that were saved")
        return state

    def _attempt(self, read: Callable[[], Any]) -> tuple[Any, str]:
        """What was read, and what was wrong with it on any of the processes."""
        found, damage = None, ""
        try:
            found = read()
        except Exception as error:  # orbax and tensorstore raise many kinds, for files that are cut, changed or gone
            damage = _root(error)
        if jax.process_count() > 1 and np.any(multihost_utils.process_allgather(np.array([bool(damage)]))):
            damage = damage or "another process could not read its part"
        return found, damage

    def _set_aside(self, step: int, damage: str) -> None:
        self.report(f"the checkpoint of step {step} in {self.folder} is damaged and is not used: {damage}")
        if jax.process_index() == 0:
            aside = self.folder / f"damaged-{step}"
            shutil.rmtree(aside, ignore_errors=True)
            (self.folder / str(step)).rename(aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("set aside")
        self.manager.reload()

    @contextlib.contextmanager
    def _explained(self, step: int) -> Any:
        try:
            yield
        except Exception as error:
            self._writing = None
            for _ in range(_ATTEMPTS):
                for left in self.folder.glob(f"{step}{_MIDWAY}*"):
                    shutil.rmtree(left, ignore_errors=True)
                time.sleep(_PAUSE)
            kept = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {_reason(error)}; "
                f"steps with a checkpoint: {kept}"
            ) from error


@functools.cache  # once
def _quiet() -> None:
    """Silences tracebacks of what is handled here: those that orbax logs, and those of the coroutines that it abandons
    when the first of many files cannot be read or written.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    plain = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_abandoned = code is not None and "orbax" in code.co_filename
        if not is_abandoned and str(unraisable.exc_value) != "Event loop is closed":
            plain(unraisable)

    sys.unraisablehook = hook


def fingerprint(tree: Tree) -> list[int]:
    """The sum of the bits of each array, modulo 2**32: the same on every mesh."""
    return np.asarray(_bit_sums(tree)).tolist()


@jax.jit
def _bit_sums(tree: Tree) -> Array:
    def bits(x: Array) -> Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        return lax.bitcast_convert_type(x, kind).astype(jnp.uint32).sum(dtype=jnp.uint32)

    return jnp.stack([bits(x) for x in jax.tree.leaves(tree)])


def _reason(error: Exception) -> str:
    """What the system said, without the names of orbax's files."""
    for text in ("No space left on device", "File too large", "Permission denied", "Disk quota exceeded"):
        if text in str(error):
            return text.lower()
    return _root(error)


def _root(error: BaseException) -> str:
    """What went wrong first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__
