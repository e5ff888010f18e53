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


def profile(folder: str, done: int) -> None:
    """Writes a profile of a few steps to a folder, if there is one: call it before each step, with the steps done."""
    if folder and done == 2:
        jax.profiler.start_trace(folder)
    if folder and done == 2 + PROFILED_STEPS:
        jax.profiler.stop_trace()
