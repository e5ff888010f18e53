"""The runs that `soak.py` interrupts, and the ways in which it does."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soak import Soak

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_lm.py"
STEPS = 24
OPTIONS = "--layers 1 --features 16 --heads 2 --segments 16 --rates 1 --seq-len 32 --batch 4 --log-every 1"
OPTIONS += f" --save-every 2 --eval-every 0 --sample-bytes 0 --steps {STEPS} --devices 2 --keep 3"
MESHES = ("--ring 1", "--data 2 --ring 1", "--ring 2")
TOLERANCE = 1e-4  # of losses on another mesh, as in tests/test_train.py
LIFE_SECONDS = 240.0  # of a process, on a machine that is busy with other things
REFUSED, FAILED, TERMINATED = 2, 1, 128 + signal.SIGTERM
# the errors of a disk that fails: nothing on a healthy machine raises them, so the reader of orbax is replaced
FAILING_DISK = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from lm.checkpoints import Checkpoints
import train_lm
def read(self, step, **items):
    raise OSError({errno.EIO}, "Input/output error")
Checkpoints._read = read
sys.exit(train_lm.main(sys.argv[1:]))
"""


class Violation(Exception):
    """Something was not as it should be."""


class Ended(Exception):
    """The time is over."""


_libc = ctypes.CDLL(None)


def _prepare_child() -> None:
    """Makes the child die with this process, and, of root, obey permissions."""
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            _libc.prctl(24, capability)  # PR_CAPBSET_DROP


class Child:
    """A start of the training script."""

    def __init__(self, soak: Soak, out: pathlib.Path, mesh: str, *, failing_disk: bool = False) -> None:
        self.soak, self.out, self.deadline = soak, out, time.monotonic() + LIFE_SECONDS
        start = ["-c", FAILING_DISK] if failing_disk else [str(SCRIPT)]
        given = [*OPTIONS.split(), *mesh.split(), "--data-path", str(soak.texts), "--out", str(out), "--resume"]
        # not on the disk that is made full; the file is gone when nobody has it open
        self.log = tempfile.TemporaryFile("w+", dir=soak.folder)  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *start, *given],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=soak.environment,
            start_new_session=True,
            preexec_fn=_prepare_child,  # noqa: PLW1509 - it only calls the system
        )
        soak.children.add(self)

    def text(self) -> str:
        return os.pread(self.log.fileno(), 2**20, 0).decode()

    def wait_for(self, is_there, pause: float = 0.01) -> bool:
        """Waits until something is there; returns False if the process ends before."""
        while not is_there():
            if self.process.poll() is not None:
                return False
            self.check_time()
            time.sleep(pause)
        return True

    def check_time(self) -> None:
        if time.monotonic() > self.soak.deadline:
            raise Ended
        if time.monotonic() > self.deadline:
            raise Violation(f"still running after {LIFE_SECONDS:.0f} s: {self.text()[-300:]}")

    def trains(self) -> bool:
        return "memory per device" in self.text()

    def wait_for_steps(self, number: int) -> bool:
        """Waits until so many steps are done; returns False if the process ends before."""
        return self.wait_for(lambda: len(re.findall("^step ", self.text(), re.MULTILINE)) >= number, pause=0.005)

    def end(self) -> int:
        """Waits for the end, and returns the exit code."""
        self.wait_for(lambda: self.process.poll() is not None, pause=0.05)
        self.soak.children.discard(self)
        if "Traceback" in self.text():
            raise Violation(f"a traceback: {self.text()[-1500:]}")
        return self.process.returncode

    def kill(self) -> bool:
        """Kills the process, and returns whether it was alive."""
        is_alive = self.process.poll() is None
        if is_alive:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.soak.children.discard(self)
        return is_alive and self.process.returncode == -signal.SIGKILL

    def expect(self, code: int, text: str) -> None:
        found = self.end()
        if found != code or text not in self.text():
            raise Violation(f"expected code {code} and {text!r}, got {found}: {self.text()[-600:]}")


class Run:
    """A run that is interrupted until it is complete."""

    def __init__(self, soak: Soak, folder: pathlib.Path, disk: pathlib.Path | None, draw: random.Random) -> None:
        self.soak, self.out, self.disk, self.draw = soak, folder, disk, draw
        self.checkpoints, self.metrics = folder / "checkpoints", folder / "metrics.jsonl"
        self.mesh = draw.choice(MESHES)
        self.is_exact = True  # whether it was on one mesh only
        self.damaged: set[int] = set()

    def steps(self) -> list[int]:
        if not self.checkpoints.exists():
            return []
        return sorted(int(x.name) for x in self.checkpoints.iterdir() if x.name.isdigit())

    def is_saving(self) -> bool:
        return any("orbax-checkpoint-tmp" in name for name in os.listdir(self.checkpoints))

    def start(self, **options) -> Child:
        return Child(self.soak, self.out, self.mesh, **options)

    def live(self) -> bool:
        """Starts the run once, with a fault; returns whether it is complete."""
        kind = self.draw.choices(self.soak.kinds, weights=[FAULTS[kind][0] for kind in self.soak.kinds])[0]
        before = self.steps()
        if FAULTS[kind][1] in AT_REST and len(before) < 2:
            kind = "killed"
        self.damaged.clear()
        child = FAULTS[kind][1](self)
        was_killed = child is not None and child.kill()
        if not kind.startswith("killed"):
            self.soak.count(kind)
        if was_killed:
            self.soak.count(kind if kind.startswith("killed") else "killed after another fault")
            self.soak.count("  in the middle of a save", self.checkpoints.exists() and self.is_saving())
        if child is None:  # it did not train
            return False
        self.check(child, before)
        return child.process.returncode == 0

    def check(self, child: Child, before: list[int]) -> None:
        """Checks that the start went on from the newest whole checkpoint, and that all losses are right."""
        text = child.text()
        found = re.search(r"resuming from the checkpoint of step (\d+)", text)
        whole = [step for step in before if step not in self.damaged]
        if child.trains():
            start = int(found[1]) if found else 0
            # damage may be in a file that is not needed
            if start not in (max(whole, default=0), max(before, default=0)):
                raise Violation(f"checkpoints {before}, damaged {self.damaged}, went on from step {start}")
        lost = set(whole[-1:]) - set(self.steps())
        if lost and max(self.steps(), default=0) < max(lost):
            raise Violation(f"the checkpoint of step {max(lost)} is lost: {self.steps()}")
        self.check_losses()

    def check_losses(self) -> None:
        found = read_losses(self.metrics)
        if list(found) != list(range(1, len(found) + 1)):
            raise Violation(f"steps are missing: {list(found)}")
        expected = self.soak.reference(self.mesh)
        for step, loss in found.items():
            error = abs(loss / expected[step] - 1)
            if error > (0.0 if self.is_exact else TOLERANCE):
                raise Violation(f"step {step} on {self.mesh}: loss {loss} instead of {expected[step]}")
        self.soak.compared += len(found)


def read_losses(path: pathlib.Path) -> dict[int, float]:
    """Returns the losses of all records up to one that is torn."""
    losses: dict[int, float] = {}
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            record = json.loads(line)
            losses[record["step"]] = record["loss"]
        except (ValueError, KeyError):
            break
    return losses


# ---- faults: each starts the run, interrupts it, and returns the process ----


def killed(run: Run) -> Child:
    child = run.start()
    if child.wait_for_steps(run.draw.randrange(1, 9)):
        time.sleep(run.draw.uniform(0, 0.3))
    return child


def killed_early(run: Run) -> Child:
    child = run.start()
    time.sleep(run.draw.uniform(0.5, 8))
    return child


def killed_while_saving(run: Run) -> Child:
    child = run.start()
    if child.wait_for_steps(run.draw.randrange(1, 9)):
        child.wait_for(run.is_saving, pause=0.001)
        time.sleep(run.draw.uniform(0, 0.15))
    return child


def asked_to_stop(run: Run) -> Child:
    child = run.start()
    if child.wait_for_steps(run.draw.randrange(1, 6)):
        child.process.send_signal(signal.SIGTERM)
        if child.end() not in (0, TERMINATED):
            raise Violation(f"asked to stop, ended with {child.process.returncode}: {child.text()[-500:]}")
        if child.process.returncode == TERMINATED and max(run.steps()) != max(read_losses(run.metrics)):
            raise Violation(f"asked to stop, saved {run.steps()} of {max(read_losses(run.metrics))} steps")
    return child


def full_disk(run: Run) -> Child:
    """The disk is full for some time; without a small disk of our own, no file may grow."""
    child = run.start()
    if not child.wait_for_steps(run.draw.randrange(1, 6)):
        return child
    filler = run.disk / "filler" if run.disk and run.draw.random() < 0.7 else None
    try:
        if filler:
            fill(filler)
        elif child.process.poll() is None:
            limit = len(child.text()) + 2**13  # enough for lines and metrics
            resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        code = child.end()
    finally:
        if filler:
            filler.unlink(missing_ok=True)
    lines = [line for line in child.text().splitlines() if line.startswith("train_lm: ")]
    if code not in (0, FAILED) or (code == FAILED and len(lines) != 1):
        raise Violation(f"full disk, ended with {code}: {child.text()[-600:]}")
    return child


def fill(path: pathlib.Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def second_run(run: Run) -> Child:
    """A second run in the same folder is refused; the first one is stopped meanwhile, and goes on."""
    child = run.start()
    if child.wait_for_steps(1):
        child.process.send_signal(signal.SIGSTOP)
        if child.process.poll() is None:
            run.start().expect(REFUSED, f"is used by another run (process {child.process.pid} on ")
        child.process.send_signal(signal.SIGCONT)
        time.sleep(run.draw.uniform(0, 1))
    return child


def damaged(run: Run) -> Child:
    newest = run.steps()[-1]
    files = [x for x in sorted((run.checkpoints / str(newest)).rglob("*")) if x.is_file()]
    needed = [x for x in files if x.stat().st_size > 2000 or x.name in ("metadata", "manifest.ocdbt", "_METADATA")]
    path = run.draw.choice(needed if run.draw.random() < 0.8 else files)
    content = path.read_bytes()
    at = run.draw.randrange(len(content))
    way = run.draw.choice(("flipped", "cut", "deleted"))
    if way == "deleted":
        path.unlink()
    else:
        flipped = content[:at] + bytes([content[at] ^ 1 << run.draw.randrange(8)]) + content[at + 1 :]
        path.write_bytes(content[:at] if way == "cut" else flipped)
    run.damaged.add(newest)
    return killed(run)


def torn_metrics(run: Run) -> Child:
    """What a crash leaves after the records of the newest checkpoint: half a line, zeros, or nothing."""
    whole = run.metrics.read_bytes()
    kept = sum(len(line) for line in whole.splitlines(keepends=True)[: run.steps()[-1]])  # one line for each step
    torn = whole[: run.draw.randrange(kept, len(whole) + 1)]
    run.metrics.write_bytes(torn + run.draw.choice((b"", b'{"step": 1', b"\0" * 50, b"\xff\xfe\n{}\n")))
    return killed(run)


def unreadable(run: Run) -> None:
    """A checkpoint that may not be read: the start fails, and changes nothing."""
    before = listing(run.checkpoints)
    newest = run.checkpoints / str(run.steps()[-1])
    path = run.draw.choice([newest, newest / "state", newest / "state" / "manifest.ocdbt", newest / "facts"])
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        run.start().expect(FAILED, "cannot be read: ")
    finally:
        path.chmod(mode)
    if listing(run.checkpoints) != before:
        raise Violation(f"unreadable: {before} became {listing(run.checkpoints)}")


def failing_disk(run: Run) -> None:
    before = listing(run.checkpoints)
    run.start(failing_disk=True).expect(FAILED, "cannot be read: input/output error; it is kept: --resume tries again")
    if listing(run.checkpoints) != before:
        raise Violation(f"failing disk: {before} became {listing(run.checkpoints)}")


def listing(folder: pathlib.Path) -> list[str]:
    names = (str(x.relative_to(folder)) for x in folder.rglob("*"))
    return sorted(name for name in names if "orbax-checkpoint-tmp" not in name)  # of a run that was killed


def other_mesh(run: Run) -> Child:
    run.mesh = run.draw.choice([mesh for mesh in MESHES if mesh != run.mesh])
    run.is_exact = False
    return killed(run)


AT_REST = (damaged, torn_metrics, unreadable, failing_disk, other_mesh)  # they need checkpoints
FAULTS = {  # how often, in parts of all
    "killed": (30, killed),
    "killed while saving": (36, killed_while_saving),
    "killed early": (8, killed_early),
    "asked to stop": (5, asked_to_stop),
    "disk full": (6, full_disk),
    "second run": (2, second_run),
    "checkpoint damaged": (7, damaged),
    "checkpoint unreadable": (4, unreadable),
    "disk failing": (2, failing_disk),
    "metrics torn": (6, torn_metrics),
    "other mesh": (3, other_mesh),
}
