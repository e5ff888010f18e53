"""The folder of a run: who may use it, what is deleted from it, and a profile of a few steps."""

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
_RUN = ("checkpoints", "metrics.jsonl")  # what makes a folder that of a run; --overwrite deletes them


@contextlib.contextmanager
def run_folder(folder: pathlib.Path, *, resume: bool, overwrite: bool, report: Callable[[str], None]) -> Iterator[None]:
    """Makes and locks the folder of a run while the run lasts; deletes an earlier run if the user asks for it.

    Args:
        folder: Of the run; all processes see the same, and the first one does the work.
        resume: Whether an earlier run may be continued.
        overwrite: Whether an earlier run is deleted. Checkpoints that were set aside as damaged are kept, in
            ``damaged/``.
        report: Takes a line for the user.

    Raises:
        UserError: If the folder is used by another run, holds an earlier one, or cannot be prepared.
    """
    if overwrite and resume:
        raise UserError("--overwrite and --resume exclude each other")
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
        for left in folder.glob(".deleted-*"):  # of a run that was killed while it deleted
            _remove(left, report)
    elif earlier and not resume:
        raise UserError(
            f"{folder} holds an earlier run: --resume goes on with it, --overwrite deletes it, --out names another"
        )


def _delete(path: pathlib.Path, report: Callable[[str], None]) -> None:
    """Deletes a part of an earlier run: at once, as far as a later start is concerned, and without following links."""
    if path.is_symlink() and path.name == "checkpoints":
        raise UserError(
            f"--overwrite: {path} is a link to {os.readlink(path)}, and what it leads to is not deleted: "
            f"remove the link, or --out names another folder"
        )
    _keep_damaged(path, report)
    gone = pathlib.Path(tempfile.mkdtemp(prefix=".deleted-", dir=path.parent))
    path.rename(gone / path.name)
    _remove(gone, report)


def _keep_damaged(checkpoints: pathlib.Path, report: Callable[[str], None]) -> None:
    """Moves the checkpoints that were set aside out of the way: whoever wants them deleted does so."""
    aside = sorted(checkpoints.glob("damaged-*")) if checkpoints.is_dir() else []
    kept = checkpoints.with_name("damaged")
    for path in aside:
        kept.mkdir(exist_ok=True)
        path.rename(unused(kept / path.name))
    if aside:
        report(f"--overwrite: damaged checkpoints are kept in {kept}: {', '.join(x.name for x in aside)}")


def unused(path: pathlib.Path) -> pathlib.Path:
    """Returns the path, with a number behind it if something has its name already."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _remove(path: pathlib.Path, report: Callable[[str], None]) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        report(f"{path} could not be deleted: {error.strerror or error}; it is not used any more")


def write_config(folder: pathlib.Path, config: Any) -> None:
    """Writes a config, a dataclass, to the folder; raises `OSError` if it cannot."""
    if jax.process_index() == 0:
        write_file(folder / "config.json", (json.dumps(dataclasses.asdict(config), indent=2) + "\n").encode())


class Profile:
    """Writes a profile of a few steps to a folder, if one is named: after the first two, or until the run ends.

    Args:
        folder: Where it goes, or an empty string.
        problem: Takes a line for the user if it cannot be written; the run continues.

    Raises:
        UserError: If the folder cannot be written to.
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
        """Begins or ends the profile, if so many steps are done."""
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
