"""Integer arithmetic and slices for indices that are never negative.

On traced arrays, `//` and `%` take several operations to round negative numbers down, and slices take several to count
negative indices from the end. A program has hundreds of them, so these functions omit both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

dynamic_slice = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
dynamic_update_slice = functools.partial(lax.dynamic_update_slice, allow_negative_indices=False)
dynamic_slice_in_dim = functools.partial(lax.dynamic_slice_in_dim, allow_negative_indices=False)
dynamic_update_slice_in_dim = functools.partial(lax.dynamic_update_slice_in_dim, allow_negative_indices=False)
dynamic_index_in_dim = functools.partial(lax.dynamic_index_in_dim, allow_negative_indices=False)
dynamic_update_index_in_dim = functools.partial(lax.dynamic_update_index_in_dim, allow_negative_indices=False)


def quotient(a: Any, b: Any) -> Any:  # noqa: ANN401 - integers or arrays
    """Returns ``a // b`` for non-negative integers or arrays."""
    if not isinstance(a, jax.Array) and not isinstance(b, jax.Array):
        return a // b
    if isinstance(b, int) and b == 1:
        return a
    return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.result_type(a))))


def remainder(a: Any, b: Any) -> Any:  # noqa: ANN401 - integers or arrays
    """Returns ``a % b`` for non-negative integers or arrays."""
    if not isinstance(a, jax.Array) and not isinstance(b, jax.Array):
        return a % b
    return lax.rem(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.result_type(a))))


def ceil_div(a: Any, b: int) -> Any:  # noqa: ANN401 - an array or an int
    """Returns the quotient of non-negative integers, rounded up."""
    return quotient(a + b - 1, b)
