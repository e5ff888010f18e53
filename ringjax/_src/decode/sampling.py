"""Token generation: one `lax.scan` over the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from ringjax._src import debug
from ringjax._src.validation import (
    MOST_POSITIONS,
    check_array,
    check_bool,
    check_callable,
    check_int,
    check_key,
    check_positive,
    known,
    shown,
)

State = TypeVar("State")


def generate(
    step: Callable[[State, Int[Array, "B 1"]], tuple[Float[Array, "B V"], State]],
    state: State,
    tokens: Int[Array, " B"],
    num_tokens: int,
    *,
    rng: Array | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | None = None,
    greedy: bool = False,
) -> tuple[Int[Array, "B num_tokens"], State]:
    """Generates tokens one at a time.

    The tokens are generated in one `lax.scan`, so `step` is traced and compiled once. To compile once for many calls,
    call this function inside `jax.jit`, with parameters and caches as arguments (and the state donated).

    Args:
        step: A function from the state and the last tokens to the logits of the next tokens and the next state, which
            must have the same shapes and dtypes.
        state: The state of `step`: the caches of all layers (`DecodeCache`), and parameters unless `step` captures
            them.
        tokens: The last token of each prompt, which is the first input of `step`. Tokens outside the vocabulary raise
            an error if their values are known; for traced tokens, a model returns NaN.
        num_tokens: Number of tokens to generate.
        rng: A `jax.random` key; required unless `greedy`.
        temperature: Divisor of the logits before sampling; finite and positive.
        top_k: Number of most likely tokens to sample from, or None for all.
        greedy: Whether to take the most likely token instead of sampling.

    Returns:
        The new tokens, in the dtype of `tokens`, and the state after all but the last of them. If logits contain NaN,
        or a traced `temperature` is not finite and positive, the token is -1 (the largest value of an unsigned dtype).

    Raises:
        ValueError: If `tokens` is not an integer array of one axis or has tokens outside the vocabulary, `step` returns
            logits of the wrong shape, `rng` is missing, `temperature` is not finite and positive, `top_k` exceeds the
            vocabulary size, or `rng`, `temperature` or `top_k` is given with `greedy`.

    Example:
        >>> import jax, jax.numpy as jnp, ringjax as rj
        >>> step = lambda count, tokens: (jax.nn.one_hot(tokens[:, 0] + 1, 10), count + 1)
        >>> tokens, count = rj.generate(step, jnp.int32(0), jnp.array([2, 5]), 4, greedy=True)
        >>> tokens.tolist(), int(count)
        ([[3, 4, 5, 6], [6, 7, 8, 9]], 4)
    """
    check_callable("step", step)
    _check_tokens(tokens)
    num_tokens = check_int("num_tokens", num_tokens, most=MOST_POSITIONS)
    top_k = check_sampling(rng, temperature, top_k, greedy)
    tokens = jnp.asarray(tokens)
    divisor = None if greedy else _checked_temperature(temperature)

    def choose(logits: Array, key: Array | None) -> Array:
        if key is None or divisor is None:
            return logits.argmax(axis=-1)
        if top_k is None:
            return jax.random.categorical(key, logits / divisor.astype(logits.dtype))
        likeliest, index = lax.top_k(logits, top_k)
        drawn = jax.random.categorical(key, likeliest / divisor.astype(logits.dtype))
        return jnp.take_along_axis(index, drawn[:, None], axis=1)[:, 0]

    def advance(carry: tuple[State, Array], key: Array | None) -> tuple[tuple[State, Array], Array]:
        state, last = carry
        logits, state = step(state, last[:, None])
        _check_logits(logits, tokens, top_k)
        is_nan = jnp.isnan(logits).any(axis=-1)
        is_nan = is_nan | jnp.isnan(divisor) if isinstance(divisor, jax.core.Tracer) else is_nan
        debug.report("logits", "NaN (rows of a batch)", lambda: is_nan)
        chosen = jnp.where(is_nan, -1, choose(logits, key)).astype(tokens.dtype)
        return (state, chosen), chosen

    keys = None if greedy or rng is None else jax.random.split(rng, num_tokens)
    (state, _), generated = lax.scan(advance, (state, tokens), keys, length=num_tokens)
    return generated.T, state


def check_sampling(rng: object, temperature: object, top_k: object, greedy: object) -> int | None:
    """Checks the sampling arguments and returns `top_k`."""
    is_greedy = check_bool("greedy", greedy)
    is_array = isinstance(temperature, jax.Array)
    if not is_array:
        check_positive("temperature", temperature)
    elif not _is_positive_scalar(cast(Array, temperature)):
        raise ValueError(f"`temperature` must be a finite number above 0, got {shown(temperature)}.")
    count = None if top_k is None else check_int("top_k", top_k)
    if is_greedy:
        given = {"rng": rng, "top_k": top_k, "temperature": None if not is_array and temperature == 1 else temperature}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    "`rng`, `temperature` and `top_k` must not be given with `greedy=True`, got "
                    f"`{name}` {shown(value)}."
                )
    elif rng is None:
        raise ValueError("`rng` must be given unless `greedy=True`, got None.")
    else:
        check_key("rng", rng)
    return count


def _check_tokens(tokens: object) -> None:
    if not isinstance(tokens, np.ndarray | jax.Array) or len(tokens.shape) != 1:
        given = f"{tokens.dtype} of {tokens.shape}" if isinstance(tokens, np.ndarray | jax.Array) else shown(tokens)
        raise ValueError(f"`tokens` must be an integer array of shape (batch,), got {given}.")
    check_array("tokens", tokens, "integer")
    found = known(tokens)
    if found is not None and found.min() < 0:
        raise ValueError(f"`tokens` must be at least 0, got {shown(found.tolist())}.")


def _check_logits(logits: Array, tokens: Array, top_k: int | None) -> None:
    """Checks the logits that `step` returned."""
    if not hasattr(logits, "shape") or len(logits.shape) != 2 or logits.shape[0] != tokens.shape[0]:
        given = getattr(logits, "shape", type(logits).__name__)
        raise ValueError(f"`step` must return logits of shape ({tokens.shape[0]}, vocabulary), got {given}.")
    size = logits.shape[1]
    if top_k is not None and top_k > size:
        raise ValueError(f"`top_k` must be at most the vocabulary size {size}, got {top_k}.")
    if size - 1 > jnp.iinfo(tokens.dtype).max:
        raise ValueError(f"`tokens` must have a dtype that can represent {size} tokens, got {tokens.dtype}.")
    found = known(tokens)
    if found is not None and found.max() >= size:
        raise ValueError(f"`tokens` must be below the vocabulary size {size}, got {shown(found.tolist())}.")


def _checked_temperature(temperature: float | Array) -> Array:
    """Returns the temperature as an array, NaN for invalid traced values."""
    divisor = jnp.asarray(temperature)
    if not isinstance(temperature, jax.core.Tracer):
        return divisor
    is_valid = (divisor > 0) & (divisor < jnp.inf)
    debug.report("temperature", "not finite numbers above 0", lambda: ~is_valid)
    return jnp.where(is_valid, divisor, jnp.nan)


def _is_positive_scalar(x: Array) -> bool:
    """Returns whether `x` is a floating-point scalar, finite and positive if its value is known."""
    if x.ndim != 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    found = known(x)
    return found is None or 0 < float(found) < math.inf
