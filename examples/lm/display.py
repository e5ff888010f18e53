"""What a person sees of a run: lines, a progress bar, JSON lines, a curve; of several processes, the first shows it."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Record = dict[str, Any]
GIB = 2**30


class Display:
    """Shows a run and writes its records to ``metrics.jsonl``.

    Args:
        folder: Where the files go.
        steps: Of the whole run.
        tokens: Of a step.
        as_json: Whether stdout has the records, and nothing else: the rest goes to stderr.
    """

    def __init__(self, folder: pathlib.Path, steps: int, tokens: int, as_json: bool) -> None:
        self.folder, self.steps, self.as_json = folder, steps, as_json
        self.is_first = jax.process_index() == 0
        self.console = Console(stderr=as_json, quiet=not self.is_first, highlight=False, soft_wrap=True)
        self.records: list[Record] = []
        self.clock = Clock(tokens)
        self._file = folder / "metrics.jsonl"
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}")
        self._bar = Progress(*columns, TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("training", total=steps, figures="compiling")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line, or a few."""
        self.console.print(text, markup=False)

    def begin(self, step: int) -> None:
        """Keeps the records up to this step and forgets those after it, which a resumed run writes again."""
        if not self.is_first:
            return
        if step and self._file.exists():
            self.records = [x for x in map(json.loads, self._file.read_text().splitlines()) if x["step"] <= step]
        partial = self._file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        os.replace(partial, self._file)
        self._bar.update(self._task, completed=step)

    def advance(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=step)

    def log(self, record: Record) -> None:
        """A record of a step: a JSON line, and figures for the person."""
        if not self.is_first:
            return
        self.records.append(record)
        line = json.dumps(record)
        with self._file.open("a") as file:
            file.write(line + "\n")
        if self.as_json:
            print(line, flush=True)
        left = (self.steps - record["step"]) * record["seconds_per_step"]
        figures = f"loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s, {_duration(left)} left"
        self._bar.update(self._task, completed=record["step"], figures=figures)
        held_out = f", held out {record['validation_loss']:.4f}" if "validation_loss" in record else ""
        if not self.console.is_terminal or held_out:
            self.say(f"step {record['step']:>6} of {self.steps}: {figures}{held_out}")


class Clock:
    """Speed since the last look, without the pauses in between (evaluation, checkpoints).

    Args:
        tokens: Of a step.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens, self._since, self._step = tokens, time.perf_counter(), 0

    def reset(self, step: int) -> None:
        self._since, self._step = time.perf_counter(), step

    def speed(self, step: int) -> Record:
        seconds = (time.perf_counter() - self._since) / max(1, step - self._step)
        return {"seconds_per_step": seconds, "tokens_per_second": self._tokens / seconds}


def keep_stdout_for_records() -> None:
    """Sends to stderr what libraries write to stdout by themselves (the CPU's collectives greet their peers there)."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def memory_line(compiled: jax.stages.Compiled) -> str:
    """What a device holds while the program runs, as the compiler counts it."""
    arguments, results, temporaries = device_bytes(compiled)
    total = arguments + results + temporaries
    return (
        f"memory of a device in a training step: {_size(total)} ({_size(arguments)} state and batch, "
        f"{_size(results)} new results, {_size(temporaries)} temporaries)"
    )


def device_bytes(compiled: jax.stages.Compiled) -> tuple[int, int, int]:
    """Bytes of arguments, of results that do not take the place of arguments, and of all between."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes, max(0, results), memory.temp_size_in_bytes


def loss_curve(path: pathlib.Path, records: Sequence[Record], unigram_entropy: float) -> None:
    """Draws the losses of the records, beside the entropy of single bytes."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([x["step"] for x in records], [x["loss"] for x in records], label="training", linewidth=1.2)
    held_out = [x for x in records if "validation_loss" in x]
    if held_out:
        steps, losses = [x["step"] for x in held_out], [x["validation_loss"] for x in held_out]
        axes.plot(steps, losses, "o-", markersize=4, label="held-out documents")
    axes.axhline(unigram_entropy, color="gray", linestyle="--", linewidth=1, label="unigram entropy of the corpus")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Training of a LongNet language model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _size(number: int) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"
