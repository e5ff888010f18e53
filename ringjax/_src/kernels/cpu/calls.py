"""Calls the C++ kernels on CPU, which read the rows of a task in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringjax._src.kernels.blocks import Blocks, KernelConfig, flat, kernel_config, pair_ranges, strided_rows
from ringjax._src.kernels.cpu import build
from ringjax._src.kernels.interface import AttendConfig, Backend, Grads, Limits, Operands, Residuals
from ringjax._src.kernels.platform import on_its_platform
from ringjax._src.online_softmax import PartialSoftmax

LIMITS = Limits(("bfloat16", "float16", "float32", "float64"), min_dim=1, min_rows=1, min_block=64)
_KEY_ROWS = LIMITS.min_block  # per block; a constant of the kernels, which check it
_QUERY_ROWS, _QUERY_ROWS_BWD = 512, 256  # per block; the operands of a block fit in the L2 cache of a core


def attend(prior: PartialSoftmax, operands: Operands, config: AttendConfig) -> PartialSoftmax:
    """Merges the attention of the selected rows into `prior`."""
    kernel = kernel_config(operands, config, Blocks(_QUERY_ROWS, _KEY_ROWS))
    out, lse = flat(prior.out), prior.lse.reshape(-1)
    for inputs in _inputs(operands, kernel):
        out, lse = _call("forward", (*inputs, out, lse), sums=2, **_attributes(kernel))
    return PartialSoftmax(out.reshape(prior.out.shape), lse.reshape(prior.lse.shape))


def attend_bwd(grads: Grads, operands: Operands, residuals: Residuals, config: AttendConfig) -> Grads:
    """Adds the gradients of the selected rows to `grads`."""
    kernel = kernel_config(operands, config, Blocks(_QUERY_ROWS_BWD, _KEY_ROWS))
    given = flat(residuals.dout), residuals.lse.reshape(-1), residuals.delta.reshape(-1)
    arrays = grads.query, *grads.kv
    sums = [flat(x) for x in arrays]
    for inputs in _inputs(operands, kernel):
        sums = _call("backward", (*inputs, *given, *sums), sums=len(sums), **_attributes(kernel))
    dq, *dkv = (x.reshape(y.shape) for x, y in zip(sums, arrays, strict=True))
    return Grads(dq, tuple(dkv))


def delta(dout: Array, out: Array, dtype: jnp.dtype) -> Array:
    """Computes `softmax.delta`, summed in the order in which the backward kernel sums products with values.

    If a query attends to a single key, its output equals the value (except for rounding if the output divisor is not a
    power of two), so both sums are bitwise identical, and their difference, the gradient of the score, is exactly 0.
    """
    rows = [flat(x) for x in (dout, out)]
    (sums,) = _call("delta", (*rows, jnp.zeros_like(rows[0][:, 0], dtype=dtype)), sums=1)
    return sums.reshape(dout.shape[:-1])


def _inputs(operands: Operands, config: KernelConfig) -> Iterator[tuple[Array, ...]]:
    """Yields the inputs of the calls for each pair of chunks, or of the one call for dense operands."""
    none = jnp.zeros((0, 0), jnp.int32)
    for rows, ranges in zip(strided_rows(operands, config), pair_ranges(operands, config), strict=True):
        mask_inputs = (none if x is None else x for x in (rows.query_inputs, rows.key_inputs))
        yield rows.tasks, ranges, rows.query, rows.kv[0], rows.kv[-1], *mask_inputs


def _attributes(config: KernelConfig) -> dict[str, np.integer | np.floating]:
    """Returns the attributes that the kernels read, see attention.cc."""
    integers = {
        "num_rows": config.num_rows,
        "q_per_kv": config.q_per_kv,
        "tasks_per_head": config.tasks_per_head,
        "is_causal": config.is_causal,
        "before_rules": sum(1 << i for i, rule in enumerate(config.mask_rules) if rule == "before"),
        "query_block": config.blocks.query,
        "key_block": config.blocks.key,
        "output_divisor": config.output_divisor,
        "stride": config.stride,
        "kv_heads": config.kv_heads,
        "value_shift": config.value_shift,
    }
    return {"scale": np.float64(config.scale), **{name: np.int64(integer) for name, integer in integers.items()}}


def _call(name: str, arrays: tuple[Array, ...], *, sums: int, **attributes: np.integer | np.floating) -> list[Array]:
    """Calls a kernel whose results alias the last `sums` arrays."""
    return on_its_platform("cpu", _kernel(name, sums, tuple(attributes.items())), *arrays, sums=sums)


# cached, because JAX finds compiled programs by the identity of the function
@functools.lru_cache(maxsize=256)
def _kernel(
    name: str, sums: int, attributes: tuple[tuple[str, np.integer | np.floating], ...]
) -> Callable[..., Sequence[Array]]:
    def call(*arrays: Array) -> Sequence[Array]:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[-sums:]]
        aliases = {len(arrays) - sums + i: i for i in range(sums)}
        ffi_call = jax.ffi.ffi_call(f"ringjax_{name}", shapes, vmap_method="sequential", input_output_aliases=aliases)
        return ffi_call(*arrays, **dict(attributes))

    return call


def _unavailable(is_requested: bool) -> str:
    if not is_requested and jax.default_backend() != "cpu":
        return "another platform is the default"  # nothing is compiled for CPU unless asked for
    reason = build.why_not()
    if reason and not is_requested:
        build.warn_once(reason)
    return reason and f"the CPU kernels are unavailable: {reason}"


BACKEND = Backend("cpu", "native", "cpu", attend, attend_bwd, LIMITS, _unavailable, delta)
