"""What the kernels compute and move, counted from their grids: useful against issued flops, bytes against the least."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringjax._src.kernels import pallas_tpu as tpu
from ringjax._src.kernels.backend import Case, Target
from ringjax._src.kernels.kernel import BlockSizes, Look
from ringjax._src.kernels.tpu_call import Call, Joint, Rows
from ringjax._src.online_softmax import PartialSoftmax

_PASSES = ("forward", "query_gradient", "key_gradient")
_MULTIPLIES = {"forward": 2, "query_gradient": 3, "key_gradient": 4}


class KernelCost(NamedTuple):
    """What one kernel does for all its tasks.

    Attributes:
        name: Of the pass.
        useful_flops: Of the pairs of query and key that see each other.
        issued_flops: Of all pairs in the blocks that meet.
        moved_bytes: Between HBM and the kernel: a block counts each time that it is not the one of the step before.
        least_bytes: Every row read or written once.
    """

    name: str
    useful_flops: int
    issued_flops: int
    moved_bytes: int
    least_bytes: int


def kernel_costs(
    target: Target,
    *,
    rows: int,
    head_dim: int,
    tasks: int = 1,
    group: int = 1,
    dtype: str = "bfloat16",
    is_causal: bool = False,
    block_sizes: BlockSizes | None = None,
) -> list[KernelCost]:
    """The costs of the three kernels for segments of so many selected rows.

    Args:
        target: ``"tpu"`` or ``"gpu"``.
        rows: Key rows of a task.
        head_dim: Dimensions per head.
        tasks: Key/value heads times segments times batch.
        group: Query heads per key/value head.
        dtype: Of query, key and value.
        is_causal: Whether a query sees only keys up to its own.
        block_sizes: Blocks, or None for our choice.

    Example:
        >>> forward, *_ = kernel_costs("tpu", rows=16384, head_dim=128, is_causal=True)
        >>> forward.useful_flops / forward.issued_flops > 0.9
        True
    """
    case = Case(dtype, head_dim, rows, group)
    pairs = (rows * (rows + 1) // 2 if is_causal else rows**2) * group * tasks
    costs = []
    for name in _PASSES:
        blocks = case.blocks(target, block_sizes, is_gradient=name != "forward")
        look = Look(blocks, rows, group, tasks, is_causal, bool(rows % blocks.key), (), 1.0)
        query_spans = look.query_spans(jnp.array([rows], jnp.int32), None, None)
        spans = look.key_spans(query_spans) if name == "key_gradient" else query_spans
        met = int((spans[:, 2] - spans[:, 0]).sum()) * tasks
        flops = 2 * _MULTIPLIES[name] * head_dim
        moved = (
            _tpu_bytes(name, look, tasks, head_dim, dtype, spans)
            if target == "tpu"
            else _gpu_bytes(name, look, tasks, head_dim, dtype, met)
        )
        least = _array_bytes(name, tasks, rows, group, head_dim, dtype)
        costs.append(KernelCost(name, flops * pairs, flops * met * blocks.query * blocks.key, moved, least))
    return costs


def _arrays(name: str, tasks: int, rows: int, group: int, head_dim: int, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a pass, before chunks, spans and marks; what is summed up comes first."""
    shape = jax.ShapeDtypeStruct
    query, kv = (tasks, 1, rows * group, head_dim), (2, tasks, 1, rows, head_dim)
    inputs = [shape(query, dtype), shape(kv, dtype)]
    if name == "forward":
        return [shape(query, jnp.float32), shape(query[:3], jnp.float32), *inputs]
    sums = shape(kv if name == "key_gradient" else query, jnp.float32)
    return [sums, *inputs, shape(query, dtype), shape((tasks, 1, 2, rows * group), jnp.float32)]


def _array_bytes(name: str, tasks: int, rows: int, group: int, head_dim: int, dtype: str) -> int:
    """Every array read once, and what is summed up written once."""
    arrays = _arrays(name, tasks, rows, group, head_dim, dtype)
    sums = arrays[:2] if name == "forward" else arrays[:1]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in [*arrays, *sums])


def _tpu_bytes(name: str, look: Look, tasks: int, head_dim: int, dtype: str, spans: Array) -> int:
    """Bytes of the blocks that change from one step of the grid to the next."""
    arrays = _arrays(name, tasks, look.rows, look.group, head_dim, dtype)
    chunks = jnp.zeros((2,), jnp.int32)
    found: list[Call] = []

    def build(*arrays: Array) -> None:
        if name == "forward":
            out, lse, q, kv = arrays
            found.append(tpu.forward_call(PartialSoftmax(out, lse), Rows(q, kv, chunks, spans, None), look))
        else:
            sums, q, kv, dout, stats = arrays
            make = tpu.query_gradient_call if name == "query_gradient" else tpu.key_gradient_call
            found.append(make(sums, Rows(q, kv, chunks, spans, None), Joint(dout, stats), look))

    jax.eval_shape(build, *arrays)
    call = found[0]
    steps = [jnp.asarray(x.ravel(), jnp.int32) for x in np.indices(call.specs.grid)]
    moved = 0
    for array, spec in [*call.inputs, *call.outputs]:
        assert spec.index_map is not None and spec.block_shape is not None
        index = spec.index_map(*steps, chunks, spans)
        places = np.stack([np.broadcast_to(np.asarray(x), steps[0].shape) for x in index])
        fetches = 1 + int((places[:, 1:] != places[:, :-1]).any(axis=0).sum())
        moved += fetches * int(np.prod(np.array(spec.block_shape, int))) * array.dtype.itemsize
    return moved


def _gpu_bytes(name: str, look: Look, tasks: int, head_dim: int, dtype: str, met: int) -> int:
    """Bytes that the programs load and store, whatever of them the cache of the device keeps."""
    size = jnp.dtype(dtype).itemsize
    query, key = look.blocks.query * head_dim, look.blocks.key * head_dim
    numbers = 2 * look.blocks.query * 4
    programs = tasks * (look.key_blocks if name == "key_gradient" else look.query_blocks)
    if name == "forward":
        return programs * (query * (size + 8) + numbers) + met * 2 * key * size
    if name == "query_gradient":
        return programs * (query * (2 * size + 8) + numbers) + met * 2 * key * size
    return programs * 2 * key * (size + 8) + met * (2 * query * size + numbers)
