"""Checks what kernels under plain `jit` send if arrays are sharded and no ring is given, as compiled for 8 devices.

Arrays are sharded by batch, heads, sequence, batch and sequence, and all of them, on explicit meshes and, on GPUs, on
automatic ones. Batch and heads must send nothing. With a sharded sequence, the forward pass must send what the plan
lists, and the gradient what the program of a `Ring` sends. Failed checks are listed, and the command then exits with
status 1.

    python benchmarks/aot_sharding.py                # part of `make aot-cuda`
    python benchmarks/aot_sharding.py --target v5e:2x4   # part of `make aot-tpu`
    python benchmarks/aot_sharding.py --target A100 --mesh auto --shards sequence
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from compilers import compiler_versions
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import ringjax as rj
from ringjax._src.aot.collectives import executed
from ringjax._src.aot.compile import ENVIRONMENT, ring_mesh
from ringjax._src.aot.schedule import schedule
from ringjax._src.aot.targets import CudaTarget, target_named

BATCH, LENGTH, HEADS, HEAD_DIM = 4, 4096, 8, 64
PATTERN = rj.DilationPattern((1024, 4096), (1, 4))
AXES = ("data", "ring", "tensor")  # two devices each
MESHES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SHARDS = {
    "batch": ("data", None, None),
    "heads": (None, None, "tensor"),
    "sequence": (None, "ring", None),
    "batch and sequence": ("data", "ring", None),
    "all": AXES,
}
PASSES = ("forward", "gradient")


class Sent(NamedTuple):
    """What a program sends, per collective and operand size, and how many kernels it calls."""

    messages: Counter[tuple[str, int]]
    kernels: int

    def __str__(self) -> str:
        if not self.messages:
            return "nothing"
        return ", ".join(f"{number} {op} of {size} bytes" for (op, size), number in sorted(self.messages.items()))


def attention(query: Array, key: Array, value: Array, *, ring: rj.Ring | None) -> Array:
    return rj.dilated_attention(query, key, value, PATTERN, is_causal=True, ring=ring, implementation="pallas")


def gradient(query: Array, key: Array, value: Array, dout: Array, *, ring: rj.Ring | None) -> tuple[Array, ...]:
    return jax.vjp(functools.partial(attention, ring=ring), query, key, value)[1](dout)


def sent(mesh: Mesh, spec: tuple[str | None, ...], part: str, ring: rj.Ring | None = None) -> Sent:
    """Compiles a pass for arrays that are sharded like `spec` and returns what it sends."""
    x = jax.ShapeDtypeStruct(
        (BATCH, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    function, operands = (attention, (x, x, x)) if part == "forward" else (gradient, (x, x, x, x))
    text = jax.jit(functools.partial(function, ring=ring)).lower(*operands).compile().as_text()
    assert text is not None
    messages: Counter[tuple[str, int]] = Counter()
    for message, number in executed(text).items():
        messages[message.op, message.bytes] += number
    return Sent(messages, len(schedule(text).kernels))


def planned(spec: tuple[str | None, ...], device: str) -> Counter[tuple[str, int]]:
    """Returns what the plan sends in the forward pass."""
    batch, sequence, heads = (1 if name is None else 2 for name in spec)
    plan = rj.plan(
        PATTERN,
        seq_len=LENGTH,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        ring_size=sequence,
        batch=BATCH // batch,
        head_shards=heads,
        is_causal=True,
        dtype="bfloat16",
        device=device,
    )
    messages: Counter[tuple[str, int]] = Counter()
    for message in (x for branch in plan.branches for x in branch.forward):
        messages[message.op, message.bytes] += message.number
    return messages


def check(mesh: Mesh, shards: str, part: str, device: str) -> tuple[Sent, list[str]]:
    """Returns what a program sends, and the failed checks as messages."""
    spec = SHARDS[shards]
    found = sent(mesh, spec, part)
    failures = [] if found.kernels else ["has no kernel"]
    if part == "forward" or "ring" not in spec:
        wanted = planned(spec, device) if part == "forward" else Counter()
    else:
        ring = rj.Ring(mesh, axis_name=spec[1], batch_axis=spec[0], head_axis=spec[2])
        wanted = sent(mesh, spec, part, ring).messages
    if bool(wanted) != ("ring" in spec):
        failures.append("is compared with a wrong plan")
    if found.messages != wanted:
        failures.append(f"sends {found}, planned: {Sent(wanted, 0)}")
    return found, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="H100", help="target of 8 devices, such as v5e:2x4 or H100 (%(default)s)")
    parser.add_argument("--mesh", choices=MESHES, action="append", help="kind of mesh (default: both)")
    parser.add_argument("--shards", choices=SHARDS, action="append", help="what is sharded (default: each in turn)")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    target = target_named(options.target)
    platform = "cuda" if isinstance(target, CudaTarget) else "tpu"
    console.print(f"Sharded arrays without a ring: {options.target}, {compiler_versions(platform)}")
    devices = ring_mesh(target).devices.reshape(2, 2, 2)
    device = options.target.partition(":")[0].lower()
    failures = []
    for kind in options.mesh or (MESHES if platform == "cuda" else ["explicit"]):  # see `sharded.py`
        mesh = Mesh(devices, AXES, axis_types=(MESHES[kind],) * len(AXES))
        for shards in options.shards or SHARDS:
            for part in PASSES:
                name = f"{kind} mesh, {shards} sharded, {part}"
                console.print(f"  {name}: compiling")
                begin = time.perf_counter()
                found, failed = check(mesh, shards, part, device)
                console.print(f"  {name}: {time.perf_counter() - begin:.0f} s, sends {found}")
                failures += [f"{name}: {failure}" for failure in failed]
    for failure in failures:
        console.print(f"FAILED {failure}", style="red")
    if failures:
        sys.exit(1)
    console.print("All checks passed.")


if __name__ == "__main__":
    main()
