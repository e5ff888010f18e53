"""Locks and prepares the folder of a run, and writes its config and profile."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from lm.agreement import all_or_none
from lm.flags import UserError, as_user_error
from lm.lock import FolderLock
from lm.records import write_file

PROFILED_STEPS = 3
_RUN = ("checkpoints", "metrics.jsonl")  # these mark the folder of a run; --overwrite deletes them


@contextlib.contextmanager
def run_folder(folder: pathlib.Path, *, resume: bool, overwrite: bool, report: Callable[[str], None]) -> Iterator[None]:
    """Creates the folder of a run and locks it for the duration of the run; deletes an earlier run on request.

    Args:
        folder: Folder of the run, shared by all processes; the first one does the work.
        resume: Whether an earlier run may be continued.
        overwrite: Whether to delete an earlier run. Damaged checkpoints are kept in ``damaged/``.
        report: Receives messages for the user.

    Raises:
        UserError: If both `resume` and `overwrite` are set, another run uses the folder, the folder contains an earlier
            run and neither is set, or the folder cannot be prepared.
    """
    if overwrite and resume:
        raise UserError("--overwrite and --resume are mutually exclusive")
    lock: FolderLock | None = None
    try:
        with all_or_none("prepare the folder"):
            if jax.process_index() == 0:
                with as_user_error(OSError):
                    folder.mkdir(parents=True, exist_ok=True)
                    lock = FolderLock(folder, report)
                    _prepare(folder, resume, overwrite, report)
        yield
    finally:
        if lock:
            lock.release()


def _prepare(folder: pathlib.Path, resume: bool, overwrite: bool, report: Callable[[str], None]) -> None:
    earlier = [folder / name for name in _RUN if os.path.lexists(folder / name)]
    if overwrite:
        for path in earlier:
            _delete(path, report)
        for left in folder.glob(".deleted-*"):  # left by a run that was killed while deleting
            _remove(left, report)
    elif earlier and not resume:
        raise UserError(
            f"{folder} contains an earlier run: pass --resume to continue it, --overwrite to delete it, "
            f"or another --out"
        )


def _delete(path: pathlib.Path, report: Callable[[str], None]) -> None:
    """Deletes part of an earlier run, atomically for later runs and without following links."""
    if path.is_symlink() and path.name == "checkpoints":
        raise UserError(
            f"--overwrite: {path} is a link to {os.readlink(path)}, whose target is not deleted: "
            f"remove the link or pass another --out"
        )
    _keep_damaged(path, report)
    gone = pathlib.Path(tempfile.mkdtemp(prefix=".deleted-", dir=path.parent))
    path.rename(gone / path.name)
    _remove(gone, report)


def _keep_damaged(checkpoints: pathlib.Path, report: Callable[[str], None]) -> None:
    """Moves damaged checkpoints to ``damaged/``: only the user deletes them."""
    aside = sorted(checkpoints.glob("damaged-*")) if checkpoints.is_dir() else []
    kept = checkpoints.with_name("damaged")
    for path in aside:
        kept.mkdir(exist_ok=True)
        path.rename(unused(kept / path.name))
    if aside:
        report(f"--overwrite: damaged checkpoints are kept in {kept}: {', '.join(x.name for x in aside)}")


def unused(path: pathlib.Path) -> pathlib.Path:
    """Returns the path, with a number appended if it already exists."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _remove(path: pathlib.Path, report: Callable[[str], None]) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        report(f"{path} could not be deleted: {error.strerror or error}; it is no longer used")


def write_config(folder: pathlib.Path, config: Any) -> None:
    """Writes a config (a dataclass) to the folder; raises `OSError` on failure."""
    if jax.process_index() == 0:
        write_file(folder / "config.json", (json.dumps(dataclasses.asdict(config), indent=2) + "\n").encode())


class Profile:
    """Writes a profile of a few steps, after the first two, if a folder is given.

    Args:
        folder: Output folder, or an empty string for no profile.
        problem: Receives a message if the profile cannot be written; the run continues.

    Raises:
        UserError: If the folder is not writable.
    """

    def __init__(self, folder: str, problem: Callable[[str], None]) -> None:
        self.folder, self.problem, self._is_on = folder, problem, False
        if folder:
            try:
                os.makedirs(folder, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise UserError(f"--profile {folder} cannot be written to: {error.strerror}") from error

    def before_step(self, done: int) -> None:
        """Starts or stops the profile, depending on the number of completed steps."""
        if self.folder and done == 2:
            with self._reported():
                jax.profiler.start_trace(self.folder)
                self._is_on = True
        if done == 2 + PROFILED_STEPS:
            self.__exit__()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            self._is_on = False
            with self._reported():
                jax.profiler.stop_trace()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self.problem(f"--profile {self.folder}: {' '.join(str(error).split())[:200]}")
