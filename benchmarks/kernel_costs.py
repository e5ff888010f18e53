"""Costs of the kernels, counted from their grids: useful and issued flops, moved and minimal bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringjax._src.kernels import pallas_gpu
from ringjax._src.kernels.blocks import KernelConfig, given_blocks
from ringjax._src.kernels.dispatch import Target
from ringjax._src.kernels.interface import BlockSizes, Case
from ringjax._src.kernels.tpu import calls as tpu
from ringjax._src.kernels.tpu.kernels import tiles
from ringjax._src.kernels.tpu.tiling import tiling
from ringjax._src.online_softmax import PartialSoftmax

_PASSES = {"tpu": ("forward", "gradient"), "gpu": ("forward", "query_gradient", "key_gradient")}
_MULTIPLIES = {"forward": 2, "gradient": 5, "query_gradient": 3, "key_gradient": 4}


class KernelCost(NamedTuple):
    """Costs of one kernel over all its tasks.

    Attributes:
        name: Name of the pass.
        useful_flops: Flops of the attended (query, key) pairs.
        issued_flops: Flops of all pairs in the active blocks.
        moved_bytes: Bytes moved between HBM and the kernel; a block is fetched if it differs from that of the last
            step.
        least_bytes: Bytes moved if every row were read or written once.
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
    q_per_kv: int = 1,
    dtype: str = "bfloat16",
    is_causal: bool = False,
    block_sizes: BlockSizes | None = None,
) -> list[KernelCost]:
    """Computes the costs of the kernels.

    Args:
        target: ``"tpu"`` or ``"gpu"``.
        rows: Number of key rows per task.
        head_dim: Head dimension.
        tasks: Number of tasks: key/value heads times segments times batch.
        q_per_kv: Number of query heads per key/value head.
        dtype: Dtype of query, key and value.
        is_causal: Whether attention is causal.
        block_sizes: Block sizes, or None for the defaults.

    Example:
        >>> forward, *_ = kernel_costs("tpu", rows=16384, head_dim=128, is_causal=True)
        >>> forward.useful_flops / forward.issued_flops > 0.9
        True
    """
    case = Case(dtype, head_dim, rows, q_per_kv)
    pairs = (rows * (rows + 1) // 2 if is_causal else rows**2) * q_per_kv * tasks
    costs = []
    for name in _PASSES[target]:
        module, is_bwd = tpu if target == "tpu" else pallas_gpu, name != "forward"
        blocks = module.default_blocks(case, is_bwd=is_bwd)
        if block_sizes is not None:
            blocks = given_blocks(block_sizes, rows, q_per_kv, module.LIMITS.min_block, is_bwd=is_bwd)
        config = KernelConfig(blocks, rows, q_per_kv, tasks, is_causal, bool(rows % blocks.key), (), 1.0)
        kv_ranges = config.kv_block_ranges(jnp.array([rows], jnp.int32))
        ranges = config.q_block_ranges(kv_ranges) if name in ("gradient", "key_gradient") else kv_ranges
        num_pairs = int((ranges[:, 2] - ranges[:, 0]).sum()) * tasks
        issued = num_pairs * blocks.query * blocks.key
        if target == "tpu":
            issued = _tpu_pairs(config, tasks, ranges, is_masked_first=is_bwd)
        flops = 2 * _MULTIPLIES[name] * head_dim
        moved = (
            _tpu_bytes(name, config, tasks, head_dim, dtype, ranges)
            if target == "tpu"
            else _gpu_bytes(name, config, tasks, head_dim, dtype, num_pairs)
        )
        least = _array_bytes(name, tasks, rows, q_per_kv, head_dim, dtype)
        costs.append(KernelCost(name, flops * pairs, flops * issued, moved, least))
    return costs


def _tpu_pairs(config: KernelConfig, tasks: int, ranges: Array, *, is_masked_first: bool) -> int:
    """Returns the computed pairs of all tiles; on the diagonal, tiles end where the mask does."""
    tiling_of = tiling(config, tasks, device_kind="TPU v5p")
    first, whole, end = (int(ranges[:, i].sum()) for i in range(3))
    masked = whole - first if is_masked_first else end - whole
    pairs = [
        sum(tile.num_rows * tile.num_keys for tile in tiles(config, tiling_of, is_masked=is_masked)) // tiling_of.tasks
        for is_masked in (True, False)
    ]
    return (masked * pairs[0] + (end - first - masked) * pairs[1]) * tasks


def _arrays(name: str, tasks: int, rows: int, q_per_kv: int, head_dim: int, dtype: str) -> list[jax.ShapeDtypeStruct]:
    """Returns the arrays of a pass, accumulators first, without chunks and mask inputs."""
    shape = jax.ShapeDtypeStruct
    query, kv = (tasks, 1, rows * q_per_kv, head_dim), (2, tasks, 1, rows, head_dim)
    inputs = [shape(query, dtype), shape(kv, dtype)]
    if name == "forward":
        return [shape(query, jnp.float32), shape(query[:3], jnp.float32), *inputs]
    sums = {"gradient": (query, kv), "query_gradient": (query,), "key_gradient": (kv,)}[name]
    given = [shape(query, dtype), shape((tasks, 1, 2, rows * q_per_kv), jnp.float32)]
    return [*(shape(x, jnp.float32) for x in sums), *inputs, *given]


def _array_bytes(name: str, tasks: int, rows: int, q_per_kv: int, head_dim: int, dtype: str) -> int:
    """Returns the bytes of reading every array once and writing the accumulators once."""
    arrays = _arrays(name, tasks, rows, q_per_kv, head_dim, dtype)
    sums = arrays[:2] if name in ("forward", "gradient") else arrays[:1]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in [*arrays, *sums])


def _tpu_bytes(name: str, config: KernelConfig, tasks: int, head_dim: int, dtype: str, ranges: Array) -> int:
    """Returns the bytes of the blocks that change from one grid step to the next."""
    arrays = _arrays(name, tasks, config.num_rows, config.q_per_kv, head_dim, dtype)
    chunks = jnp.zeros((3,), jnp.int32)
    tiling_of = tiling(config, tasks, device_kind="TPU v5p")
    found: list[tpu.Call] = []

    def build(first: Array, second: Array, q: Array, kv: Array, *given: Array) -> None:
        rows = tpu.PackedRows(q, kv, chunks, ranges, None)
        if name == "forward":
            found.append(tpu.forward_call(PartialSoftmax(first, second), rows, config, tiling_of))
        else:
            group = config.query_blocks
            found.append(tpu.gradient_call(first, second, rows, tpu.OutputGrads(*given), config, tiling_of, group))

    jax.eval_shape(build, *arrays)
    call = found[0]
    steps = [jnp.asarray(x.ravel(), jnp.int32) for x in np.indices(call.specs.grid)]
    moved = 0
    for array, spec in [*call.inputs, *call.sums, *call.sums]:  # sums are read and written
        assert spec.index_map is not None and spec.block_shape is not None
        index = spec.index_map(*steps, chunks, ranges)
        indices = np.stack([np.broadcast_to(np.asarray(x), steps[0].shape) for x in index])
        fetches = 1 + int((indices[:, 1:] != indices[:, :-1]).any(axis=0).sum())
        moved += fetches * int(np.prod(np.array(spec.block_shape, int))) * array.dtype.itemsize
    return moved


def _gpu_bytes(name: str, config: KernelConfig, tasks: int, head_dim: int, dtype: str, num_pairs: int) -> int:
    """Returns the bytes that the programs load and store, ignoring the caches of the device."""
    size = jnp.dtype(dtype).itemsize
    query, key = config.blocks.query * head_dim, config.blocks.key * head_dim
    stats = 2 * config.blocks.query * 4
    programs = tasks * (config.key_blocks if name == "key_gradient" else config.query_blocks)
    if name == "forward":
        return programs * (query * (size + 8) + stats) + num_pairs * 2 * key * size
    if name == "query_gradient":
        return programs * (query * (2 * size + 8) + stats) + num_pairs * 2 * key * size
    return programs * 2 * key * (size + 8) + num_pairs * (2 * query * size + stats)
