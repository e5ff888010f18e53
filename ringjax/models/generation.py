"""Text generation with a decoder: prefill of the prompt, then one token at a time."""

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

from ringjax._src import debug
from ringjax._src.comm.layout import to_layout
from ringjax._src.comm.mesh import Ring
from ringjax._src.decode import DecodeCache, generate
from ringjax._src.decode.cache import clipped_counts, reshard
from ringjax._src.decode.sampling import check_sampling
from ringjax._src.validation import MOST_POSITIONS, check_counts, check_int, check_tokens, known
from ringjax.models.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from ringjax.models.model import LongNetDecoder


class Choice(NamedTuple):
    """Static arguments of the compiled program."""

    num_tokens: int
    max_len: int
    temperature: float | None  # None if it is an array
    top_k: int | None
    greedy: bool
    reports: bool  # whether debug reports are enabled, see `ringjax._src.debug`


def generate_tokens(
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
    """Implements `LongNetDecoder.generate`."""
    if len(getattr(prompt, "shape", (0, 0))) != 2:
        raise ValueError(f"`prompt` must have the shape (batch, length), got {prompt.shape}.")
    check_tokens("prompt", prompt)
    batch, length = prompt.shape
    num_tokens = check_int("num_tokens", num_tokens, most=MOST_POSITIONS)
    max_len = length + num_tokens if max_len is None else check_int("max_len", max_len, length, MOST_POSITIONS)
    lengths = np.full(batch, length, np.int32) if lengths is None else check_counts("lengths", lengths, batch, length)
    ends = known(lengths)
    if ends is not None and ends.min() < 1:
        raise ValueError(f"`lengths` must be at least 1 for `generate`, got {ends.tolist()}.")
    check_vocabulary("prompt", prompt, model.embed.num_embeddings, lengths)
    top_k = check_sampling(rng, temperature, top_k, greedy)
    if top_k is not None and top_k > model.embed.num_embeddings:
        raise ValueError(f"`top_k` must be at most the vocabulary size {model.embed.num_embeddings}, got {top_k}.")
    dynamic, static = (temperature, None) if isinstance(temperature, Array) else (None, float(temperature))
    choice = Choice(num_tokens, max_len, static, top_k, greedy, debug.is_enabled())
    given = clipped_counts("lengths", lengths, batch, length, least=1)
    graph, state = nnx.split(model)
    return _run(graph, state, prompt, given, rng, dynamic, choice)


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
        last = reshard(model.ring, last, PartitionSpec(model.ring.batch_axis))
    _, caches = model.prefill(_stored(prompt, model.ring), choice.max_len, lengths=lengths - 1)

    def step(caches: tuple[DecodeCache, ...], tokens: Array) -> tuple[Array, tuple[DecodeCache, ...]]:
        logits, caches = model.extend(tokens, caches)
        return logits[:, 0], caches

    used: Any = temperature if choice.temperature is None else choice.temperature
    tokens, _ = generate(
        step, caches, last, choice.num_tokens, rng=rng, temperature=used, top_k=choice.top_k, greedy=choice.greedy
    )
    return tokens


def _stored(prompt: Array, ring: Ring | None) -> Array:
    """Pads a prompt and permutes it into the layout of the ring."""
    if ring is None:
        return prompt
    stored = to_layout(prompt, ring.layout, ring.size("axis_name"))
    return reshard(ring, stored, PartitionSpec(ring.batch_axis, ring.axis_name))
