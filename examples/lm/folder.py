"""The folder of a run, and a profile of a few of its steps."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax

from lm.devices import wait_for_all
from lm.flags import UserError, as_user_error

PROFILED_STEPS = 3


def prepare_folder(folder: pathlib.Path, config: Any, *, resume: bool, overwrite: bool) -> None:
    """Makes the folder and writes the config, a dataclass, to it; deletes an earlier run only if the user says so."""
    if overwrite and resume:
        raise UserError("--overwrite and --resume exclude each other")
    has_run = (folder / "checkpoints").exists()
    wait_for_all("looked into the folder")
    if has_run and not resume and not overwrite:
        raise UserError(
            f"{folder} holds an earlier run: --resume goes on with it, --overwrite deletes it, --out names another"
        )
    if jax.process_index() == 0:
        with as_user_error(OSError):
            if overwrite:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
                (folder / "metrics.jsonl").unlink(missing_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    wait_for_all("the folder is ready")


class Profile:
    """Writes a profile of a few steps to a folder, if one is named: after the first two, or until the run ends."""

    def __init__(self, folder: str) -> None:
        self.folder, self._is_on = folder, False

    def before_step(self, done: int) -> None:
        """Begins or ends the profile, if so many steps are done."""
        if self.folder and done == 2:
            jax.profiler.start_trace(self.folder)
            self._is_on = True
        if done == 2 + PROFILED_STEPS:
            self.__exit__()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            jax.profiler.stop_trace()
        self._is_on = False
