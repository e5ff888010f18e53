"""Interrupts tiny training runs in every way for some minutes, and compares their losses with uninterrupted runs.

    python tests/soak.py --minutes 30 --seed 0        # `make soak`

Each worker trains one run after the other (`examples/train_lm.py --resume`), and injects a fault into each start of it:
kills, requests to stop, full disks, damaged and unreadable checkpoints, torn metrics, second runs, other meshes. After
every fault it checks that no complete checkpoint was lost, and that all losses are those of the uninterrupted run, to
the last bit on the same mesh. The exit code is 1 if anything was not as it should be. It ends in time, and so do its
children.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time

from soak_faults import FAULTS, ROOT, STEPS, Child, Ended, Run, Violation, read_losses


class Soak:
    """Everything that the workers share."""

    def __init__(
        self, folder: pathlib.Path, minutes: float, seed: int, workers: int, kinds: list[str], most: int
    ) -> None:
        self.folder, self.seed, self.kinds, self.most = folder, seed, kinds, most
        self.deadline = time.monotonic() + 60 * minutes
        self.texts = folder / "texts"
        self.texts.mkdir()
        for name in ("argparse.py", "ast.py", "heapq.py", "bisect.py"):
            shutil.copy(pathlib.Path(sysconfig.get_paths()["stdlib"]) / name, self.texts)
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.children: set[Child] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.complete, self.compared = 0, 0
        self._losses: dict[str, dict[int, float]] = {}
        self.violations: list[str] = []
        self.disks = [self._small_disk(worker) for worker in range(workers)]
        self._lock, self._training = threading.Lock(), threading.Lock()

    def _small_disk(self, worker: int) -> pathlib.Path | None:
        """Returns a disk of 16 MiB, if we may mount one."""
        disk = self.folder / f"disk-{worker}"
        disk.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=False, capture_output=True
        )
        return disk if made.returncode == 0 else None

    def count(self, kind: str, number: int = 1) -> None:
        with self._lock:
            self.counts[kind] += number

    def reference(self, mesh: str) -> dict[int, float]:
        """Returns the losses of an uninterrupted run, which is trained when a mesh is first needed."""
        with self._training:
            if mesh not in self._losses:
                out = self.folder / f"reference-{len(self._losses)}"
                Child(self, out, mesh).expect(0, "wrote metrics, checkpoints, loss curve and sample to")
                self._losses[mesh] = read_losses(out / "metrics.jsonl")
                if list(self._losses[mesh]) != list(range(1, STEPS + 1)):
                    raise Violation(f"the uninterrupted run on {mesh}: {self._losses[mesh]}")
            return self._losses[mesh]

    def work(self, worker: int) -> None:
        """Interrupts one run after the other, until the time is over."""
        for number in range(10**6):
            draw = random.Random(f"{self.seed} {worker} {number}")
            out = (self.disks[worker] or self.folder) / f"run-{worker}-{number}"
            run = Run(self, out, self.disks[worker], draw)
            try:
                while not run.live():
                    if time.monotonic() > self.deadline or self.is_enough():
                        return
                if len(read_losses(run.metrics)) != STEPS:
                    raise Violation(f"complete after {len(read_losses(run.metrics))} steps")
                self.complete += 1
            except Ended:
                return
            except Exception as error:  # also of this script: it is not to end as if all were well
                self.violations.append(f"run {worker}-{number} (seed {self.seed}): {type(error).__name__}: {error}")
                print(self.violations[-1], flush=True)
            shutil.rmtree(out, ignore_errors=True)

    def kills(self) -> int:
        return sum(number for kind, number in self.counts.items() if kind.startswith("killed"))

    def other_faults(self) -> int:
        return sum(self.counts[kind] for kind in FAULTS if not kind.startswith("killed"))

    def is_enough(self) -> bool:
        return self.kills() + self.other_faults() >= self.most

    def close(self) -> None:
        for child in list(self.children):
            child.kill()
        for disk in filter(None, self.disks):
            subprocess.run(["umount", "--lazy", disk], check=False)

    def summary(self) -> str:
        killed = sorted(kind for kind in self.counts if kind.startswith("killed"))
        other = [kind for kind in FAULTS if not kind.startswith("killed")]
        rows = [("kills", self.kills()), *((f"  {kind}", self.counts[kind]) for kind in killed)]
        rows += [("  in the middle of a save", self.counts["  in the middle of a save"])]
        rows += [("other faults", self.other_faults()), *((f"  {kind}", self.counts[kind]) for kind in other)]
        rows += [("runs complete", self.complete), ("losses compared", self.compared)]
        rows += [("violations", len(self.violations))]
        return "\n".join(f"{name:<32}{number:>8,}" for name, number in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="runs at the same time")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which, separated by commas")
    parser.add_argument("--most", type=int, default=10**6, help="ends after so many faults")
    given = parser.parse_args(argv)
    kinds = given.faults.split(",")
    if unknown := set(kinds) - set(FAULTS):
        parser.error(f"--faults must be some of {', '.join(FAULTS)}, got {', '.join(unknown)}")
    if not given.minutes > 0 or given.workers < 1:
        parser.error(f"--minutes and --workers must be above 0, got {given.minutes} and {given.workers}")
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        soak = Soak(pathlib.Path(folder), given.minutes, given.seed, given.workers, kinds, given.most)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            threads = [threading.Thread(target=soak.work, args=(i,), daemon=True) for i in range(given.workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            soak.close()
            print(soak.summary(), flush=True)
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
