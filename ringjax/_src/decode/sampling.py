"""The loop that turns a step of a model into text: one `lax.scan`, one program for all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

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
    step: Callable[[State, Array], tuple[Array, State]],
    state: State,
    tokens: Array,
    num_tokens: int,
    *,
    rng: Array | None = None,
    temperature: float | Array = 1.0,
    top_k: int | None = None,
    greedy: bool = False,
) -> tuple[Array, State]:
    """Continues a prompt token by token.

    All tokens run in one `lax.scan`, so that `step` is traced and compiled once. To compile once for many calls as
    well, call it inside your own `jax.jit`, with parameters and caches as its arguments (and the state donated).

    Args:
        step: A function of the state and tokens (B, 1) that gives the logits (B, V) of what follows, and the state
            after them, of the same shapes and dtypes.
        state: What `step` needs: the caches of all layers (`DecodeCache`), and parameters where it does not hold them.
        tokens: The last token of each prompt, integers (B,): the first that `step` is given. Tokens outside the
            vocabulary are an error where they are known; a model gives NaN for them where they are traced.
        num_tokens: How many tokens to make.
        rng: A key of `jax.random`; needed unless `greedy`.
        temperature: Logits are divided by it before a token is drawn; finite and above 0.
        top_k: Draw only from the `top_k` likeliest tokens, or None for all.
        greedy: Take the likeliest token instead of drawing one.

    Returns:
        The new tokens (B, num_tokens), in the dtype of `tokens`, and the state, which has seen all but the last. Where
        logits hold NaN, or a traced `temperature` is not finite and above 0, there is nothing to choose: the token is
        -1 (in an unsigned dtype its largest value).

    Raises:
        ValueError: If an argument is not as described.

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
    heat = None if greedy else _checked_heat(temperature)

    def choose(logits: Array, key: Array | None) -> Array:
        if key is None or heat is None:
            return logits.argmax(axis=-1)
        if top_k is None:
            return jax.random.categorical(key, logits / heat.astype(logits.dtype))
        likeliest, which = lax.top_k(logits, top_k)
        drawn = jax.random.categorical(key, likeliest / heat.astype(logits.dtype))
        return jnp.take_along_axis(which, drawn[:, None], axis=1)[:, 0]

    def advance(carry: tuple[State, Array], key: Array | None) -> tuple[tuple[State, Array], Array]:
        state, last = carry
        logits, state = step(state, last[:, None])
        _check_logits(logits, tokens, top_k)
        is_nan = jnp.isnan(logits).any(axis=-1)
        is_nan = is_nan | jnp.isnan(heat) if isinstance(heat, jax.core.Tracer) else is_nan
        debug.report("logits", "NaN (rows of a batch)", lambda: is_nan)
        chosen = jnp.where(is_nan, -1, choose(logits, key)).astype(tokens.dtype)
        return (state, chosen), chosen

    keys = None if greedy or rng is None else jax.random.split(rng, num_tokens)
    (state, _), made = lax.scan(advance, (state, tokens), keys, length=num_tokens)
    return made.T, state


def check_sampling(rng: object, temperature: object, top_k: object, greedy: object) -> int | None:
    """Checks how tokens are chosen, and returns `top_k`."""
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
                    "`rng`, `temperature` and `top_k` must not be given with `greedy=True`, which draws nothing, got "
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
    """Checks what `step` returned against the arguments."""
    if not hasattr(logits, "shape") or len(logits.shape) != 2 or logits.shape[0] != tokens.shape[0]:
        given = getattr(logits, "shape", type(logits).__name__)
        raise ValueError(f"`step` must give logits of shape ({tokens.shape[0]}, vocabulary), got {given}.")
    size = logits.shape[1]
    if top_k is not None and top_k > size:
        raise ValueError(f"`top_k` must be at most the vocabulary {size}, got {top_k}.")
    if size - 1 > jnp.iinfo(tokens.dtype).max:
        raise ValueError(f"`tokens` must have a dtype that holds {size} tokens, got {tokens.dtype}.")
    found = known(tokens)
    if found is not None and found.max() >= size:
        raise ValueError(f"`tokens` must be below the vocabulary {size}, got {shown(found.tolist())}.")


def _checked_heat(temperature: float | Array) -> Array:
    """The temperature as an array, NaN where it turns out to be unfit at run time."""
    heat = jnp.asarray(temperature)
    if not isinstance(temperature, jax.core.Tracer):
        return heat
    is_fit = (heat > 0) & (heat < jnp.inf)
    debug.report("temperature", "not finite numbers above 0", lambda: ~is_fit)
    return jnp.where(is_fit, heat, jnp.nan)


def _is_positive_scalar(x: Array) -> bool:
    """Whether this is a floating-point scalar, finite and above 0 if its value is known."""
    if x.ndim != 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    found = known(x)
    return found is None or 0 < float(found) < math.inf
