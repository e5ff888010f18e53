"""The loop that turns a step of a model into text: one `lax.scan`, one program for all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringjax.pattern import whole_number

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
        tokens: The last token of each prompt, integers (B,): the first that `step` is given.
        num_tokens: How many tokens to make.
        rng: A key of `jax.random`; needed unless `greedy`.
        temperature: Logits are divided by it before a token is drawn; above 0.
        top_k: Draw only from the `top_k` likeliest tokens, or None for all.
        greedy: Take the likeliest token instead of drawing one.

    Returns:
        The new tokens (B, num_tokens), in the dtype of `tokens`, and the state, which has seen all but the last.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import jax, jax.numpy as jnp, ringjax as rj
        >>> step = lambda count, tokens: (jax.nn.one_hot(tokens[:, 0] + 1, 10), count + 1)
        >>> tokens, count = rj.generate(step, jnp.int32(0), jnp.array([2, 5]), 4, greedy=True)
        >>> tokens.tolist(), int(count)
        ([[3, 4, 5, 6], [6, 7, 8, 9]], 4)
    """
    tokens, num_tokens = _check_tokens(tokens), whole_number("num_tokens", num_tokens)
    top_k = None if top_k is None else whole_number("top_k", top_k)
    _check_choice(rng, temperature, top_k, greedy)

    def choose(logits: Array, key: Array | None) -> Array:
        if key is None:
            return logits.argmax(axis=-1)
        heat = jnp.asarray(temperature).astype(logits.dtype)
        if top_k is None:
            return jax.random.categorical(key, logits / heat)
        likeliest, which = lax.top_k(logits, top_k)
        drawn = jax.random.categorical(key, likeliest / heat)
        return jnp.take_along_axis(which, drawn[:, None], axis=1)[:, 0]

    def advance(carry: tuple[State, Array], key: Array | None) -> tuple[tuple[State, Array], Array]:
        state, last = carry
        logits, state = step(state, last[:, None])
        if logits.ndim != 2 or logits.shape[0] != tokens.shape[0]:
            raise ValueError(f"`step` must give logits of shape ({tokens.shape[0]}, vocabulary), got {logits.shape}.")
        if top_k is not None and top_k > logits.shape[1]:
            raise ValueError(f"`top_k` must be at most the vocabulary {logits.shape[1]}, got {top_k}.")
        if logits.shape[1] - 1 > jnp.iinfo(tokens.dtype).max:
            raise ValueError(f"`tokens` must have a dtype that holds {logits.shape[1]} tokens, got {tokens.dtype}.")
        chosen = choose(logits, key).astype(tokens.dtype)
        return (state, chosen), chosen

    keys = None if greedy or rng is None else jax.random.split(rng, num_tokens)
    (state, _), made = lax.scan(advance, (state, tokens), keys, length=num_tokens)
    return made.T, state


def _check_tokens(tokens: Array) -> Array:
    if not hasattr(tokens, "dtype") or not jnp.issubdtype(tokens.dtype, jnp.integer) or len(tokens.shape) != 1:
        given = f"{tokens.dtype} of {tokens.shape}" if hasattr(tokens, "dtype") else type(tokens).__name__
        raise ValueError(f"`tokens` must be an integer array of shape (batch,), got {given}.")
    return jnp.asarray(tokens)


def _check_choice(rng: Array | None, temperature: float | Array, top_k: int | None, greedy: bool) -> None:
    if not isinstance(greedy, bool):
        raise ValueError(f"`greedy` must be a bool, got {greedy!r}.")
    if not _is_positive(temperature):
        raise ValueError(f"`temperature` must be a finite number above 0, got {temperature!r}.")
    if greedy and not (rng is None and top_k is None and not isinstance(temperature, Array) and temperature == 1):
        raise ValueError("`rng`, `temperature` and `top_k` must not be given with `greedy=True`, which draws nothing.")
    if not greedy and rng is None:
        raise ValueError("`rng` must be given unless `greedy=True`, got None.")


def _is_positive(x: object) -> bool:
    """Whether `x` is a finite number above 0, as far as that is known before the program runs."""
    if isinstance(x, Array):
        return x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)
    if isinstance(x, bool) or not isinstance(x, int | float | np.number):
        return False
    return 0 < float(x) < math.inf
