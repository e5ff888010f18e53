"""Text generation with a decoder: prefill of the prompt, then one token at a time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from ringjax._src.comm.layout import to_layout
from ringjax._src.decode import DecodeCache, generate
from ringjax._src.decode.cache import reshard

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


@functools.partial(jax.jit, static_argnames="choice")
def generate_tokens(
    graph: nnx.GraphDef[LongNetDecoder],
    state: Any,  # noqa: ANN401
    prompt: Array,
    lengths: Array,
    rng: Array | None,
    temperature: Array | None,
    choice: Choice,
) -> Array:
    """Fills the caches with all tokens of the prompts but the last, and generates from there."""
    model = nnx.merge(graph, state)
    last = jnp.take_along_axis(prompt, lengths[:, None] - 1, axis=1)[:, 0]
    if (ring := model.ring) is not None:
        last = reshard(ring, last, PartitionSpec(ring.batch_axis))
        prompt = to_layout(prompt, ring.layout, ring.size("axis_name"))
        prompt = reshard(ring, prompt, PartitionSpec(ring.batch_axis, ring.axis_name))
    _, caches = model.prefill(prompt, choice.max_len, lengths=lengths - 1)

    def step(caches: tuple[DecodeCache, ...], tokens: Array) -> tuple[Array, tuple[DecodeCache, ...]]:
        logits, caches = model.extend(tokens, caches)
        return logits[:, 0], caches

    used: Any = temperature if choice.temperature is None else choice.temperature
    tokens, _ = generate(
        step, caches, last, choice.num_tokens, rng=rng, temperature=used, top_k=choice.top_k, greedy=choice.greedy
    )
    return tokens
