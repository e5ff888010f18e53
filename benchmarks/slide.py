"""Compares the slide encoder with the same model in PyTorch over its CPU flash attention operator.

    python benchmarks/slide.py --torch-python .venv-torch/bin/python        # `make bench-slide`

Each library runs in a process of its own, with the same weights, slide and cores. Embeddings are compared first. Runs
are interleaved, and a different library starts each round. Memory is the growth of a process from the loaded weights to
the end of the second run. Ratios above 1 mean that ringjax is faster or uses less memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from slide_model import Slide
from workers import Worker

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}
TINY = Slide(300, 2, 64, 16, 96, 24, (64, 128, 512), (1, 2, 4))


def measure(slide: Slide, torch_python: str, repeats: int, dtype: str) -> dict:
    """Returns the medians and the memory of both libraries."""
    workers = {"ringjax": Worker("slide_jax_worker.py"), "PyTorch": Worker("slide_torch_worker.py", torch_python)}
    fields, results = dataclasses.asdict(slide), {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            embeddings = {}
            for name, worker in workers.items():
                options = {"dtype": dtype} if name == "ringjax" else {}
                versions = worker.request("load", slide=fields, **options)["versions"]
                path = str(Path(folder) / f"{name}.npy")
                results[name] = {**worker.request("memory", path=path), "versions": versions, "times": []}
                embeddings[name] = np.load(path)
        difference = np.abs(embeddings["ringjax"] - embeddings["PyTorch"]).max()
        difference = float(difference / max(1, np.abs(embeddings["PyTorch"]).max()))
        if not difference <= TOLERANCE[dtype]:
            raise SystemExit(f"error: the embeddings differ by {difference:.1e}, more than {TOLERANCE[dtype]:.0e}")
        for nth in range(repeats):
            for name in list(workers)[:: -1 if nth % 2 else 1]:
                results[name]["times"].append(workers[name].request("run")["seconds"])
        results["ringjax"]["temp_bytes"] = workers["ringjax"].request("temporaries")["bytes"]
    finally:
        for worker in workers.values():
            worker.close()
    return {"difference": difference, **results}


def report(slide: Slide, dtype: str, found: dict) -> str:
    """Formats the results as Markdown."""
    lines = [
        f"{slide.tiles:,} tiles, {slide.layers} layers of {slide.features}, {dtype}; embeddings differ by "
        f"{found['difference']:.1e}",
        "",
        "| | median (s) | spread | first run (s) | memory growth (MiB) | temporaries (MiB) | version |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("ringjax", "PyTorch"):
        each = found[name]
        times = each["times"]
        spread = (max(times) - min(times)) / statistics.median(times)
        temporaries = f"{each['temp_bytes'] / 2**20:.0f}" if "temp_bytes" in each else ""
        versions = ", ".join(f"{library} {version}" for library, version in each["versions"].items())
        lines.append(
            f"| {name} | {statistics.median(times):.3f} | {spread:.2f} | {each['first_s']:.3f} | "
            f"{each['bytes'] / 2**20:.0f} | {temporaries} | {versions} |"
        )
    ours, theirs = found["ringjax"], found["PyTorch"]
    speedup = statistics.median(theirs["times"]) / statistics.median(ours["times"])
    memory = theirs["bytes"] / max(1, ours["bytes"])
    return "\n".join([*lines, "", f"speedup {speedup:.2f}, memory reduction {memory:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter of an environment with torch")
    parser.add_argument("--tiles", type=int, help="number of tiles (10,000)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32", help="dtype of ringjax's computation")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test the script")
    arguments = parser.parse_args()
    slide = TINY if arguments.tiny else Slide()
    slide = dataclasses.replace(slide, tiles=arguments.tiles or slide.tiles)
    found = measure(slide, arguments.torch_python, arguments.repeats, arguments.dtype)
    print(report(slide, arguments.dtype, found))


if __name__ == "__main__":
    main()
