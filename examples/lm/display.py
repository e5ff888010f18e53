"""Shows the progress of a run as log lines, a progress bar, JSON lines and a loss curve, in the first process."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lm.flags import RunError
from lm.records import Metrics, Record, write_file

GIB = 2**30


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # by default rich exits the program, but training should continue when nobody reads its output
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Display:
    """Shows a run and writes its records to ``metrics.jsonl``.

    Args:
        folder: Output folder.
        steps: Number of steps of the whole run.
        tokens: Tokens per step.
        as_json: Whether to write only the records to stdout, and everything else to stderr.
    """

    def __init__(self, folder: pathlib.Path, steps: int, tokens: int, as_json: bool) -> None:
        self.folder, self.steps, self.as_json = folder, steps, as_json
        self.is_first = jax.process_index() == 0
        self.console = _Console(stderr=as_json, quiet=not self.is_first, highlight=False, soft_wrap=True)
        self.records: list[Record] = []
        self.problems: list[str] = []
        self.clock = Clock(tokens)
        self._metrics = Metrics(folder / "metrics.jsonl")
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}")
        self._bar = Progress(*columns, TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("training", total=steps, figures="compiling")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a message."""
        try:
            self.console.print(text, markup=False)
        except OSError as error:  # a closed pipe, or a log file on a full disk
            self._note(f"messages for the user: {error.strerror}")

    def problem(self, text: str) -> None:
        """Reports a problem once; training continues, and the run fails at its end."""
        if self._note(text):
            self.say(text)

    def _note(self, text: str) -> bool:
        is_new = text not in self.problems
        if is_new:
            self.problems.append(text)
        return is_new

    def raise_problems(self) -> None:
        """Raises `RunError` if problems were reported."""
        if self.problems:
            raise RunError(f"the run is complete, but some output could not be written: {'; '.join(self.problems)}")

    def begin(self, step: int) -> None:
        """Keeps the records up to this step and drops later ones, which a resumed run writes again.

        Raises:
            RunError: If the metrics file cannot be read or modified.
        """
        if not self.is_first:
            return
        self.records, torn = self._metrics.begin(step)
        if torn:
            self.say(torn)
        self._bar.update(self._task, completed=step)

    def advance(self, step: int) -> None:
        """Updates the progress bar."""
        self._bar.update(self._task, completed=step)

    def attempt(self, what: str, write: Callable[[], None]) -> None:
        """Calls `write` and reports an `OSError` as a problem instead of raising it."""
        try:
            write()
        except OSError as error:
            self.problem(f"{what} could not be written to {self.folder}: {(error.strerror or str(error)).lower()}")

    def log(self, record: Record) -> None:
        """Writes the record of a step as a JSON line and shows its main figures."""
        if not self.is_first:
            return
        self.records.append(record)
        self.attempt("metrics.jsonl", lambda: self._metrics.add(record))
        if self.as_json:
            try:
                print(json.dumps(record), flush=True)
            except OSError as error:
                self._note(f"records on stdout: {error.strerror}")
        left = (self.steps - record["step"]) * record["seconds_per_step"]
        figures = f"loss {record['loss']:.4f}, {record['tokens_per_second']:,.0f} tokens/s, {_duration(left)} left"
        self._bar.update(self._task, completed=record["step"], figures=figures)
        held_out = f", held out {record['validation_loss']:.4f}" if "validation_loss" in record else ""
        if not self.console.is_terminal or held_out:
            self.say(f"step {record['step']:>6} of {self.steps}: {figures}{held_out}")

    def sync(self) -> None:
        """Flushes the records to disk; called before a checkpoint, which must not be newer than the records."""
        if self.is_first:
            self.attempt("metrics.jsonl", lambda: self._metrics.flush(to_disk=True))

    def finish(self, sample: str, entropy: float) -> None:
        """Writes the sample and the loss curve, and compares the loss with the unigram entropy."""
        if not self.is_first:
            return
        if sample:
            self.attempt("sample.txt", lambda: write_file(self.folder / "sample.txt", sample.encode()))
            self.say(f"\nsample:\n{sample}\n")
        if self.records:
            curve = loss_curve(self.records, entropy)
            self.attempt("loss.png", lambda: write_file(self.folder / "loss.png", curve))
            last = self.records[-1]
            held_out = f", held out {last['validation_loss']:.4f}" if "validation_loss" in last else ""
            verdict = "below" if last["loss"] < entropy else "NOT below"
            nats = f"{entropy:.4f} nats per byte"
            self.say(f"loss {last['loss']:.4f}{held_out}: {verdict} the unigram entropy of the corpus, {nats}")
        self.say(f"wrote metrics, checkpoints, loss curve and sample to {self.folder}")


class Clock:
    """Measures the speed since the last reset, which excludes evaluation and checkpoints.

    Args:
        tokens: Tokens per step.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens, self._since, self._step = tokens, time.perf_counter(), 0

    def reset(self, step: int) -> None:
        self._since, self._step = time.perf_counter(), step

    def speed(self, step: int) -> Record:
        seconds = (time.perf_counter() - self._since) / max(1, step - self._step)
        return {"seconds_per_step": seconds, "tokens_per_second": self._tokens / seconds}


def keep_stdout_for_records() -> None:
    """Redirects to stderr what libraries write to stdout (the CPU collectives log connections there)."""
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)


def never_fail_to_encode() -> None:
    """Shows a question mark for characters that the locale cannot encode, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def complain(text: str) -> None:
    """Writes a line to stderr and ignores errors: stderr may be a file on a full disk."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def flush_stdout() -> None:
    """Flushes stdout and drops what cannot be written; otherwise Python exits with a message and code 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def memory_line(compiled: jax.stages.Compiled) -> str:
    """Returns the memory that the program needs per device, as counted by the compiler."""
    arguments, results, temporaries = device_bytes(compiled)
    total = arguments + results + temporaries
    return (
        f"memory per device in a training step: {_size(total)} ({_size(arguments)} state and batch, "
        f"{_size(results)} results, {_size(temporaries)} temporaries)"
    )


def device_bytes(compiled: jax.stages.Compiled) -> tuple[int, int, int]:
    """Returns the bytes of arguments, of results that do not alias arguments, and of temporaries."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes, max(0, results), memory.temp_size_in_bytes


def loss_curve(records: Sequence[Record], unigram_entropy: float) -> bytes:
    """Plots the losses of the records and the unigram entropy as a PNG."""
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
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format="png")
    return content.getvalue()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _size(number: int) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"
