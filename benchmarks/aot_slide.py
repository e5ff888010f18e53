"""Compiles the slide encoder ahead of time for one slide of a million tiles, and reports its memory per device.

The encoder has the sizes of Prov-GigaPath (12 layers of 768 features, 16 heads of 48, five branches) and embeds a slide
that all devices of a target share. The command exits with status 1 if a program does not compile or fit, or has no
kernel.

    python benchmarks/aot_slide.py --target H100         # part of `make aot-cuda`
    python benchmarks/aot_slide.py --target v5e:4x4      # part of `make aot-tpu`
    python benchmarks/aot_slide.py --target v5e:4x4 --tiles 100000 --dtype float32
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from compilers import compiler_versions
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import ringjax as rj
from ringjax._src.aot.collectives import executed
from ringjax._src.aot.compile import ENVIRONMENT, ring_mesh
from ringjax._src.aot.schedule import schedule
from ringjax._src.aot.targets import CudaTarget, Target, target_named
from ringjax.models import LongNetConfig, SlideEncoder

GIB = 2**30


def lowered(mesh: Mesh, tiles: int, dtype: str, layers: int) -> jax.stages.Lowered:
    """Lowers a call of the encoder; its weights are replicated, and the slide is sharded over all devices."""
    ring = rj.Ring(mesh)
    config = LongNetConfig.gigapath(num_layers=layers, dtype=dtype)
    graph, state = nnx.split(nnx.eval_shape(lambda: SlideEncoder(config, ring=ring, rngs=nnx.Rngs(0))))

    def encode(state: Any, features: Array, coordinates: Array) -> Array:
        return nnx.merge(graph, state)(features[:, :tiles], coordinates[:, :tiles])

    def shaped(spec: PartitionSpec, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = jax.tree.map(lambda x: shaped(PartitionSpec(), x.shape, x.dtype), state)
    stored, rows = ring.stored_length(tiles), PartitionSpec(None, "ring")
    slide = shaped(rows, (1, stored, 1536), jnp.dtype(dtype)), shaped(rows, (1, stored, 2), jnp.float32)
    return jax.jit(encode).lower(weights, *slide)


def report(target: Target, tiles: int, dtype: str, layers: int, console: Console) -> list[str]:
    """Compiles one program, prints its properties, and returns the failed checks."""
    begin = time.perf_counter()
    compiled = lowered(ring_mesh(target), tiles, dtype, layers).compile(compiler_options=dict(target.options))
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    needed, kernels = sum(parts.values()), schedule(text).kernels
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    console.print(f"  {dtype}: compiled in {time.perf_counter() - begin:.0f} s, {len(kernels)} kernels")
    console.print(f"    memory {needed / GIB:.2f} of {target.memory_bytes / GIB:.0f} GiB per device ({listed})")
    for message, number in sorted(executed(text).items(), key=str):
        console.print(f"    {number} {message.op} of {message.bytes / 2**20:.2f} MiB")
    failures = [] if kernels else [f"{dtype}: has no kernel"]
    if needed > target.memory_bytes:
        failures.append(f"{dtype}: needs {needed / GIB:.1f} of {target.memory_bytes / GIB:.1f} GiB")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="H100", help="devices that share the slide, such as v5e:4x4 (%(default)s)")
    parser.add_argument("--tiles", type=int, default=1_000_000, help="tiles of the slide (%(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the encoder (%(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), action="append", help="default: both")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    target = target_named(options.target)
    platform = "cuda" if isinstance(target, CudaTarget) else "tpu"
    console.print(f"{options.tiles:,} tiles on {target.devices} x {options.target}, {compiler_versions(platform)}")
    failures = []
    for dtype in options.dtype or ("bfloat16", "float32"):
        try:
            failures += report(target, options.tiles, dtype, options.layers, console)
        except jax.errors.JaxRuntimeError as error:
            failures.append(f"{dtype}: does not compile: {str(error).splitlines()[0]}")
    for failure in failures:
        console.print(f"FAILED {failure}", style="red")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
