"""Calls the C++ kernels on CPU, which read the rows of a branch in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ringjax._src.kernels.platform import on_its_platform
from ringjax._src.kernels.strided import How, Joint, Rows
from ringjax._src.online_softmax import PartialSoftmax

KEY_ROWS = 64  # of a block, as the kernels are written; they refuse another number


def forward(prior: PartialSoftmax, rows: Rows, spans: Array, how: How) -> PartialSoftmax:
    """Merges what the queries of all tasks find among their keys into `prior`, (rows, H) and (rows,)."""
    return PartialSoftmax(*_call("forward", (*_inputs(rows, spans), *prior), sums=2, **_numbers(how)))


def backward(
    dq: Array, dkv: tuple[Array, ...], rows: Rows, joint: Joint, spans: Array, how: How
) -> tuple[Array, tuple[Array, ...]]:
    """Adds the gradients to `dq` (rows, H) and `dkv`, one array or two like `rows.kv`, from the joint lse and delta."""
    given = (*_inputs(rows, spans), *joint, dq, *dkv)
    dq, *sums = _call("backward", given, sums=1 + len(dkv), **_numbers(how))
    return dq, tuple(sums)


def delta(dout: Array, out: Array, dtype: jnp.dtype) -> Array:
    """The same as `softmax.delta`, summed in the order in which `backward` sums products with values.

    Where a query sees one key, output and value are equal (but for rounding, where grouped heads divide by a number
    that is no power of two), and so are the two sums, to the last bit: their difference, the gradient of the score,
    is 0.
    """
    rows = [x.reshape(-1, x.shape[-1]) for x in (dout, out)]
    (found,) = _call("delta", (*rows, jnp.zeros_like(rows[0][:, 0], dtype=dtype)), sums=1)
    return found.reshape(dout.shape[:-1])


def _inputs(rows: Rows, spans: Array) -> tuple[Array, ...]:
    none = jnp.zeros((0, 0), jnp.int32)
    marks = (none if x is None else x for x in (rows.query_marks, rows.key_marks))
    return rows.tasks, spans, rows.query, rows.kv[0], rows.kv[-1], *marks


def _numbers(how: How) -> dict[str, np.integer | np.floating]:
    """What the kernels read besides arrays."""
    look = how.look
    numbers = {
        "rows": look.rows,
        "group": look.group,
        "head_tasks": look.head_tasks,
        "is_causal": look.is_causal,
        "before": sum(1 << i for i, line in enumerate(look.lines) if line == "before"),
        "block": look.blocks.query,
        "tile": look.blocks.key,
        "divisor": look.divisor,
        **how.strides._asdict(),
    }
    return {"scale": np.float64(look.scale), **{name: np.int64(number) for name, number in numbers.items()}}


def _call(name: str, arrays: tuple[Array, ...], *, sums: int, **numbers: np.integer | np.floating) -> list[Array]:
    """Calls a kernel whose results take the place of the last `sums` arrays."""
    return on_its_platform("cpu", _kernel(name, sums, tuple(numbers.items())), *arrays, sums=sums)


# the same function for the same call, so that what JAX compiled for it is found again
@functools.lru_cache(maxsize=256)
def _kernel(
    name: str, sums: int, numbers: tuple[tuple[str, np.integer | np.floating], ...]
) -> Callable[..., Sequence[Array]]:
    def call(*arrays: Array) -> Sequence[Array]:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[-sums:]]
        aliases = {len(arrays) - sums + i: i for i in range(sums)}
        made = jax.ffi.ffi_call(f"ringjax_{name}", shapes, vmap_method="sequential", input_output_aliases=aliases)
        return made(*arrays, **dict(numbers))

    return call
