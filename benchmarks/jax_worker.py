"""A worker with JAX: ringjax on one device, on heads, on rings, and other JAX libraries beside it."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from types import SimpleNamespace

# a device that waits for others on busy cores is not stuck
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=600")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from serving import PeakMemory, confine, for_comparing, host_arrays, serve
from workloads import Case

import ringjax as rj


def with_gradient(attention, grad: bool):
    """A function of q, k, v and a cotangent: the output, and with `grad` the three gradients."""

    def both(q, k, v, g):
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(g)

    return jax.jit(both if grad else lambda q, k, v, g: (attention(q, k, v),))


def pattern_of(case: Case) -> rj.DilationPattern:
    return rj.DilationPattern(case.segment_lengths, case.dilation_rates, heads="grouped" if case.grouped else "all")


class Placement:
    """Where arrays stand: on one device, or along the axes of a mesh, in a layout."""

    def __init__(self, mesh: Mesh | None = None, spec: PartitionSpec | None = None, layout="contiguous", size=1):
        self.mesh, self.spec, self.layout, self.size = mesh, spec, layout, size

    def put(self, x: np.ndarray, dtype) -> jax.Array:
        x = np.asarray(rj.to_layout(x, self.layout, self.size)).astype(dtype)
        return jnp.asarray(x) if self.mesh is None else jax.device_put(x, NamedSharding(self.mesh, self.spec))

    def take(self, x: jax.Array) -> np.ndarray:
        return np.asarray(rj.from_layout(np.asarray(x.astype(jnp.float32)), self.layout, self.size))


def ringjax_on(case: Case, ring: rj.Ring | None = None, implementation: str | None = None):
    options = {"is_causal": case.causal, "ring": ring, "implementation": implementation}
    return functools.partial(rj.dilated_attention, pattern=pattern_of(case), **options)


def one_device(case: Case, implementation: str | None = None, **_):
    return ringjax_on(case, implementation=implementation), Placement()


def dense(case: Case, **_):
    """What JAX has itself."""
    return functools.partial(jax.nn.dot_product_attention, is_causal=case.causal), Placement()


def heads(case: Case, size: int, **_):
    """Devices that share the heads, which need no communication."""
    mesh = Mesh(np.array(jax.devices()[:size]).reshape(1, size), ("ring", "heads"))
    return ringjax_on(case, rj.Ring(mesh, head_axis="heads")), Placement(mesh, PartitionSpec(None, "ring", "heads"))


def ring(case: Case, size: int, strategy: str = "auto", **_):
    mesh = Mesh(np.array(jax.devices()[:size]), ("ring",))
    layout = "zigzag" if case.causal else "contiguous"
    chosen = rj.Ring(mesh, layout=layout, strategy=strategy)
    return ringjax_on(case, chosen), Placement(mesh, PartitionSpec(None, "ring"), layout, size)


def ringattention(case: Case, size: int, folder: str, **_):
    """ringattention 0.1.2: dense, causal."""
    sys.path.insert(0, folder)
    if not hasattr(jax.lib, "xla_bridge"):  # what it asks for is gone
        jax.lib.xla_bridge = SimpleNamespace(get_backend=lambda: SimpleNamespace(platform="cpu"))
    attention = importlib.import_module("ringattention.ringattention_jax").ring_attention
    mesh, spec = Mesh(np.array(jax.devices()[:size]), ("ring",)), PartitionSpec(None, "ring")
    blocks = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": 512,
        "key_chunk_size": 512,
        "dtype": jnp.dtype(case.dtype),
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }
    local = lambda q, k, v: attention(q, k, v, None, None, None, "ring", True, blocks)  # noqa: E731
    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return sharded, Placement(mesh, spec)


KINDS = {
    f.__name__.replace("_", " "): f for f in (one_device, dense, heads, ring, ringattention)
}  # "one device", "dense", ...


class Contender:
    """A compiled program with its arrays in place."""

    def __init__(self, kind: str, case: Case, grad: bool, options: dict):
        attention, self.placement = KINDS[kind](case, **options)
        self.grad = grad
        self.args = [self.placement.put(x, jnp.dtype(case.dtype)) for x in host_arrays(case)]
        begin = time.perf_counter()
        self.program = with_gradient(attention, grad).lower(*self.args).compile()
        self.compile_s = time.perf_counter() - begin

    def run(self) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(self.program(*self.args))
        return time.perf_counter() - begin

    def facts(self) -> dict:
        m = self.program.memory_analysis()
        parts = (m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes)
        return {"compile_s": self.compile_s, "device_bytes": sum(parts), "temp_bytes": parts[-1]}


def info() -> dict:
    devices = jax.devices()
    versions = {"jax": jax.__version__, "ringjax": rj.__version__}
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "number": len(devices),
        "versions": versions,
    }


def main() -> None:
    confine()
    if sys.argv[1] != "devices":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    contenders: dict[str, Contender] = {}

    def prepare(key: str, kind: str, case: dict, grad: bool, path: str | None = None, **options: object) -> dict:
        contenders[key] = c = Contender(kind, Case.from_dict(case), grad, options)
        begin = time.perf_counter()
        outputs = jax.block_until_ready(c.program(*c.args))
        seconds = time.perf_counter() - begin
        if path:
            np.savez(path, *(for_comparing(c.placement.take(x)) for x in outputs))
        return {"first_s": seconds, **c.facts()}

    def memory(key: str) -> dict:
        inputs = sum(x.nbytes for x in contenders[key].args[: 4 if contenders[key].grad else 3])
        with PeakMemory() as peak:
            contenders[key].run()
        return {"bytes": inputs + peak.bytes}

    def call(function: str, **arguments: object) -> dict:
        """A function of a module of this folder, as `module:function`."""
        module, name = function.split(":")
        return {"result": getattr(importlib.import_module(module), name)(**arguments)}

    serve(
        {
            "info": info,
            "prepare": prepare,
            "run": lambda key: {"seconds": contenders[key].run()},
            "memory": memory,
            "drop": lambda key: {"dropped": contenders.pop(key, None) is not None},
            "call": call,
        }
    )


if __name__ == "__main__":
    main()
