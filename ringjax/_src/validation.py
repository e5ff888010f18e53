"""Argument checks and their error messages.

Every check raises a one-line `ValueError` that names the argument, the rule and the value given. Checks inspect types,
shapes, dtypes and concrete values only; they trace and compile nothing. Conditions that are known only at run time are
reported by `debug.py`.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ringjax._src.online_softmax import accumulator

if TYPE_CHECKING:
    from ringjax._src.pattern import DilationPattern

MOST_POSITIONS = 2**31 - 1  # programs count positions in int32
MOST_COUNTED = 2**53  # integers up to here are exact in float64 and in JSON
MOST_HEADS = 2**16  # tables have an entry per head
MOST_DEVICES = 2**20  # tables have an entry per chunk
MOST_BYTES = 2**47  # per array: the address space of a process; XLA aborts on sizes that overflow 64 bits
FLOATS = ("float16", "bfloat16", "float32", "float64")
_KEY_SHAPES = {"threefry2x32": (2,), "rbg": (4,), "unsafe_rbg": (4,)}  # of keys created by `jax.random.PRNGKey`

Kind = TypeVar("Kind")
Choice = TypeVar("Choice", bound=str)


def shown(value: object) -> str:
    """Formats a value for an error message, on one line of bounded length.

    Example:
        >>> shown("x"), shown(10**5000)
        ("'x'", 'an integer of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 14_000:  # Python limits int-to-string conversion
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_int(name: str, value: object, least: int = 1, most: int = MOST_COUNTED) -> int:
    """Checks that a value is an integer between `least` and `most`, and returns it as a Python int.

    Example:
        >>> check_int("seq_len", 0)
        Traceback (most recent call last):
        ValueError: `seq_len` must be at least 1, got 0.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"`{name}` must be an integer, got {shown(value)}.")
    if number < least:
        raise ValueError(f"`{name}` must be at least {least}, got {shown(number)}.")
    if number > most:
        raise ValueError(f"`{name}` must be at most {most}, got {shown(number)}.")
    return number


def check_ints(name: str, values: object) -> tuple[int, ...]:
    """Checks a list of integers of at least 1. Order matters, so sets and mappings are rejected."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | set | frozenset | Mapping):
        raise ValueError(f"`{name}` must be a list of integers, got {shown(values)}.")
    result = tuple(check_int(f"{name}[{i}]", value) for i, value in enumerate(values))
    if not result:
        raise ValueError(f"`{name}` must not be empty, got {result!r}.")
    return result


def check_bool(name: str, value: object) -> bool:
    """Checks that a value is a bool. Other truthy or falsy values are more likely mistakes."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be a bool, got {shown(value)}.")
    return value


def check_float(name: str, value: object, rule: str, allowed: Callable[[float], bool]) -> float:
    """Checks a concrete number with the predicate `allowed`, which `rule` describes."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if allowed(number):
            return number
    raise ValueError(f"`{name}` must be {rule}, got {shown(value)}.")


def check_positive(name: str, value: object, least: float = 0) -> float:
    """Checks that a value is a finite number above 0 and at least `least`."""
    rule = f"a finite number of at least {least}" if least else "a finite number above 0"
    return check_float(name, value, rule, lambda x: least <= x < math.inf and x > 0)


def check_rate(rate: object, name: str = "dropout_rate") -> float:
    """Checks a dropout rate."""
    rule = "a Python number (not a JAX array) of at least 0 and below 1"
    return check_float(name, rate, rule, lambda x: 0 <= x < 1)


def check_scale(scale: object, dtype: DTypeLike = np.float32) -> float:
    """Checks a factor for the scores of arrays of this dtype."""
    largest = float(jnp.finfo(accumulator(jnp.dtype(dtype))).max)
    rule = f"a finite Python number (not a JAX array) of at most {largest:.1e}"
    return check_float("scale", scale, rule, lambda x: abs(x) <= largest)


def check_optional(check: Callable[..., Kind], name: str, value: object, *options: Any) -> Kind | None:  # noqa: ANN401
    """Checks a value unless it is None; `check` is called with the name, the value and the options."""
    return None if value is None else check(name, value, *options)


def check_choice(name: str, value: object, choices: tuple[Choice, ...], rule: str = "one of") -> Choice:
    """Checks that a string is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` must be {rule} {choices}, got {shown(value)}.")
    return value


def check_instance(name: str, value: object, kind: type[Kind] | tuple[type[Kind], ...]) -> Kind:
    """Checks the type of an argument."""
    if not isinstance(value, kind):
        kinds = " or ".join(x.__name__ for x in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"`{name}` must be a {kinds}, got {type(value).__name__}.")
    return value


def check_callable(name: str, value: object) -> None:
    """Checks that an argument is callable."""
    if not callable(value):
        raise ValueError(f"`{name}` must be callable, got {shown(value)}.")


def check_dtype(name: str, dtype: object) -> np.dtype:
    """Checks a floating-point dtype, given in any form that `jax.numpy.dtype` accepts."""
    try:
        found = None if dtype is None else jnp.dtype(cast(Any, dtype))
    except (TypeError, ValueError):
        found = None
    if found is None or found.name not in FLOATS:
        given = dtype.__name__ if isinstance(dtype, type) else shown(dtype)
        raise ValueError(f"`{name}` must be floating point ({', '.join(FLOATS)}), got {given}.")
    return found


def check_size(names: str, shape: tuple[int, ...], itemsize: int = 4) -> None:
    """Checks that an array of this shape, which follows from the arguments `names`, can be allocated."""
    if math.prod(shape) * itemsize > MOST_BYTES:
        raise ValueError(f"{names} must give arrays of at most {MOST_BYTES} bytes, got shape {shape}.")


def check_array(
    name: str, x: object, kind: Literal["floating point", "integer", "number"], axes: tuple[str, ...] = ()
) -> None:
    """Checks that `x` is a non-empty array with a dtype of this kind and these axes (any if empty).

    Rejects 64-bit integers that JAX would truncate to 32 bits, see `check_fits`.
    """
    array = check_is_array(name, x, "an integer array" if kind == "integer" else "an array")
    if axes and len(array.shape) != len(axes):
        raise ValueError(f"`{name}` must have rank {len(axes)} ({', '.join(axes)}), got shape {array.shape}.")
    if kind == "integer" and not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"`{name}` must be an integer array, got {array.dtype}.")
    if kind == "floating point" and getattr(array.dtype, "name", "") not in FLOATS:
        raise ValueError(f"`{name}` must be floating point, got {array.dtype}.")
    if kind == "number" and not any(jnp.issubdtype(array.dtype, x) for x in (jnp.integer, jnp.floating, jnp.bool_)):
        raise ValueError(f"`{name}` must contain real numbers or bools, got {array.dtype}.")
    if 0 in array.shape:
        raise ValueError(f"`{name}` must not be empty, got shape {array.shape}.")
    check_fits(name, array)


def check_is_array(name: str, x: object, what: str = "an array") -> Array:
    """Checks that `x` is an array, of JAX or numpy."""
    if not isinstance(x, np.ndarray | np.generic | jax.Array) and not hasattr(x, "__jax_array__"):
        raise ValueError(f"`{name}` must be {what}, got {type(x).__name__}.")
    return cast(Array, x)


def check_fits(name: str, x: object) -> None:
    """Rejects 64-bit integers that JAX would truncate: distinct document ids could collide or become padding."""
    if not isinstance(x, np.ndarray | np.generic) or not jnp.issubdtype(x.dtype, jnp.integer) or x.size == 0:
        return
    narrow = jax.dtypes.canonicalize_dtype(x.dtype)
    limits = np.iinfo(narrow)
    if x.min() < limits.min or x.max() > limits.max:
        raise ValueError(
            f"`{name}` must fit {narrow} unless `jax_enable_x64` is set, got {x.dtype} from {x.min()} to {x.max()}."
        )


def check_ids(name: str, ids: object, shape: tuple[int, ...], axes: str = "(batch, length)") -> None:
    """Checks an integer array of this shape, with one entry per position."""
    given = getattr(ids, "shape", None)
    if given is not None and jnp.issubdtype(cast(Array, ids).dtype, jnp.integer) and given != shape:
        raise ValueError(f"`{name}` must have shape {axes} = {shape}, got {given}.")
    check_array(name, ids, "integer")


def check_row_positions(positions: object, batch: int, length: int) -> None:
    """Checks the positions of rows, shared by all batch entries or one row of positions per entry."""
    check_array("positions", positions, "integer")
    shape = cast(Array, positions).shape
    if shape not in ((length,), (batch, length)):
        raise ValueError(f"`positions` must have shape (length,) or (batch, length) = {(batch, length)}, got {shape}.")


def check_seq_len(seq_len: object, stored_length: int) -> int:
    """Checks the length of a sequence stored in arrays of `stored_length`, which is the length if None is given."""
    length = stored_length if seq_len is None else check_int("seq_len", seq_len)
    if length > stored_length:
        raise ValueError(f"`seq_len` must be between 1 and the stored length {stored_length}, got {seq_len}.")
    return length


def known(x: object) -> np.ndarray | None:
    """Returns the values of a concrete, fully addressable array as numpy, or None for any other array."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def check_integers(name: str, values: object, axes: str, shape: tuple[int, ...] | None = None) -> np.ndarray | Array:
    """Checks integers of this shape, or with this number of `axes`, and returns them as an array. Accepts lists."""
    try:
        given = values if isinstance(values, jax.Array) else np.asarray(values)
    except ValueError:  # lists of different lengths
        given = None
    has_shape = given is not None and (given.shape == shape if shape else given.ndim == axes.count(",") + 1)
    if given is None or not has_shape or not jnp.issubdtype(given.dtype, jnp.integer):
        found = "" if given is None else f"{given.dtype} of {given.shape}"
        found += "" if isinstance(values, np.ndarray | jax.Array) else f" {shown(values)}"
        raise ValueError(f"`{name}` must be integers of shape {shape or axes}, got {found.strip()}.")
    check_array(name, given, "integer")
    return given


def check_counts(name: str, values: object, batch: int, most: int, least: int = 0) -> np.ndarray | Array:
    """Checks one count per batch entry, and its range if the values are concrete. Accepts lists."""
    given = check_integers(name, values, "(batch,)", (batch,))
    found = known(given)
    if found is not None and (found.min() < least or found.max() > most):
        raise ValueError(f"`{name}` must be between {least} and {most}, got {shown(found.tolist())}.")
    return given


def check_tokens(name: str, tokens: object) -> None:
    """Checks that tokens are integers of shape (batch, length)."""
    check_array(name, tokens, "integer", ("batch", "length"))


def check_key(name: str, rng: object, rule: str = "a `jax.random` key") -> None:
    """Checks a single `jax.random` key, typed or legacy."""
    dtype, shape = getattr(rng, "dtype", None), getattr(rng, "shape", None)
    is_key = False
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        is_key = shape == ()
    elif isinstance(rng, np.ndarray | jax.Array):
        implementation = str(getattr(jax.config, "jax_default_prng_impl", "threefry2x32"))  # untyped in jax 0.10
        is_key = dtype == jnp.uint32 and shape == _KEY_SHAPES.get(implementation, shape)
    if not is_key:
        given = shown(rng) if shape is None else f"{dtype} of shape {shape}"
        raise ValueError(f"`{name}` must be {rule}, got {given}.")


def check_dropout(rate: object, rng: object) -> float:
    """Checks the dropout arguments and returns the rate."""
    number = check_rate(rate)
    if rng is not None or number > 0:
        check_key("dropout_rng", rng, "a `jax.random` key (or None with `dropout_rate=0`)")
    return number


def check_heads(num_heads: object, num_kv_heads: object) -> tuple[int, int]:
    """Checks and returns the numbers of query and key/value heads, which are equal if `num_kv_heads` is None."""
    heads = check_int("num_heads", num_heads, most=MOST_HEADS)
    kv_heads = heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads, most=MOST_HEADS)
    if heads % kv_heads:
        raise ValueError(f"`num_heads` must be a multiple of `num_kv_heads`, got {heads} and {kv_heads}.")
    return heads, kv_heads


class AttentionShape(NamedTuple):
    """Sizes of one attention call."""

    batch: int
    stored_length: int  # length of the arrays
    length: int  # length of the sequence; later positions are padding
    kv_heads: int
    q_per_kv: int  # query heads per key/value head
    dim: int
    scale: float


def check_inputs(
    query: Array,
    key: Array,
    value: Array,
    pattern: DilationPattern,
    is_causal: bool,
    segment_ids: Array | None,
    seq_len: int | None,
    scale: float | None,
    shards: int = 1,
) -> AttentionShape:
    """Checks the arguments of an attention call and returns its sizes.

    `shards` is the number of devices that each hold arrays of this shape, their parts of the sequence.
    """
    check_pattern(pattern)
    check_bool("is_causal", is_causal)
    _check_query_key_value(query, key, value)
    batch, length, heads, dim = query.shape
    if segment_ids is not None:
        check_ids("segment_ids", segment_ids, (batch, length))
    length *= shards
    if length > MOST_POSITIONS:
        raise ValueError(f"`query` must have a length of at most {MOST_POSITIONS} on all devices, got {length}.")
    true_length = check_seq_len(seq_len, length)
    factor = 1 / math.sqrt(dim) if scale is None else check_scale(scale, query.dtype)
    kv_heads = key.shape[2]
    return AttentionShape(batch, length, true_length, kv_heads, heads // kv_heads, dim, factor)


def check_extra_keys(sink_logits: object, return_lse: object, num_heads: int, pattern: DilationPattern) -> None:
    """Checks the logits of attention sinks, one per query head, and whether the log-sum-exp is returned."""
    check_bool("return_lse", return_lse)
    if sink_logits is None:
        return
    check_array("sink_logits", sink_logits, "floating point", ("heads",))
    shape = cast(Array, sink_logits).shape
    if shape != (num_heads,):
        raise ValueError(f"`sink_logits` must have shape (query heads,) = ({num_heads},), got {shape}.")
    if pattern.mixing == "detached":
        raise ValueError(f'`sink_logits` must be None with `mixing="detached"`, got an array of shape {shape}.')


def check_positions(batch: int, length: int) -> None:
    """Checks that one device can index the rows of its batch with int32."""
    if batch * length > MOST_POSITIONS:
        raise ValueError(
            f"`query` must have at most {MOST_POSITIONS} positions (batch times length) on a device, got {batch} times "
            f"{length}."
        )


def check_pattern(pattern: object) -> None:
    """Checks that an argument is a `DilationPattern`."""
    from ringjax._src.pattern import DilationPattern  # noqa: PLC0415 - avoids a cycle: patterns use these checks

    check_instance("pattern", pattern, DilationPattern)


def _check_query_key_value(query: Array, key: Array, value: Array) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_array(name, x, "floating point", ("batch", "length", "heads", "dim"))
        if x.dtype != query.dtype:
            raise ValueError(f"`{name}` must have the dtype of `query`, got {x.dtype} and {query.dtype}.")
    if key.shape != value.shape:
        raise ValueError(f"`value` must have the shape of `key`, got {value.shape} and {key.shape}.")
    for axis, name in ((0, "batch"), (1, "length"), (3, "dim")):
        if key.shape[axis] != query.shape[axis]:
            raise ValueError(
                f"`key` must have the {name} of `query` (self-attention), got {key.shape} and {query.shape}."
            )
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(f"`query` heads must be a multiple of `key` heads, got {heads} and {kv_heads}.")
