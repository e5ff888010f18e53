"""A decoder continues prompts: the whole prompt at once, then token by token."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ringjax.decode import DecodeCache, generate
from ringjax.decode.cache import check_numbers, placed
from ringjax.devices import Ring
from ringjax.layout import to_layout
from ringjax.pattern import whole_number

if TYPE_CHECKING:
    from ringjax.models.model import LongNetDecoder


class Choice(NamedTuple):
    """What is part of the compiled program."""

    num_tokens: int
    max_len: int
    temperature: float | None  # None where it is an array
    top_k: int | None
    greedy: bool


def continued(
    model: LongNetDecoder,
    prompt: Array,
    num_tokens: int,
    lengths: ArrayLike | None,
    max_len: int | None,
    *,
    rng: Array | None,
    temperature: float | Array,
    top_k: int | None,
    greedy: bool,
) -> Array:
    """What `LongNetDecoder.generate` gives."""
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(f"`prompt` must have the shape (batch, length), got {prompt.shape}.")
    batch, length = prompt.shape
    num_tokens = whole_number("num_tokens", num_tokens)
    if lengths is None:
        lengths = np.full(batch, length, np.int32)
    if not isinstance(lengths, jax.core.Tracer) and np.min(np.asarray(lengths)) < 1:
        raise ValueError(f"`lengths` must be at least 1 for `generate`, got {np.asarray(lengths).tolist()}.")
    given = check_numbers("lengths", lengths, batch, length)
    max_len = length + num_tokens if max_len is None else whole_number("max_len", max_len, least=length)
    heat, fixed_heat = (temperature, None) if isinstance(temperature, Array) else (None, temperature)
    graph, state = nnx.split(model)
    return _run(graph, state, prompt, given, rng, heat, Choice(num_tokens, max_len, fixed_heat, top_k, greedy))


@functools.partial(jax.jit, static_argnames="choice")
def _run(
    graph: nnx.GraphDef[LongNetDecoder],
    state: Any,  # noqa: ANN401
    prompt: Array,
    lengths: Array,
    rng: Array | None,
    temperature: Array | None,
    choice: Choice,
) -> Array:
    model = nnx.merge(graph, state)
    last = jnp.take_along_axis(prompt, lengths[:, None] - 1, axis=1)[:, 0]
    if model.ring is not None:
        last = placed(model.ring, last, PartitionSpec(model.ring.batch_axis))
    _, caches = model.prefill(_stored(prompt, model.ring), choice.max_len, lengths=lengths - 1)

    def step(caches: tuple[DecodeCache, ...], tokens: Array) -> tuple[Array, tuple[DecodeCache, ...]]:
        logits, caches = model.extend(tokens, caches)
        return logits[:, 0], caches

    heat: Any = temperature if choice.temperature is None else choice.temperature
    tokens, _ = generate(
        step, caches, last, choice.num_tokens, rng=rng, temperature=heat, top_k=choice.top_k, greedy=choice.greedy
    )
    return tokens


def _stored(prompt: Array, ring: Ring | None) -> Array:
    """A prompt in the layout of the ring, padded."""
    if ring is None:
        return prompt
    stored = to_layout(prompt, ring.layout, ring.size("axis_name"))
    return placed(ring, stored, PartitionSpec(ring.batch_axis, ring.axis_name))
