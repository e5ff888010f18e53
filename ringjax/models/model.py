"""LongNet: pre-norm blocks of dilated attention and feed-forward layers.

Computation, with ``L`` layers and ``F`` features:

    x = embed(tokens)
    L times:  x = x + attention(norm(x))
              x = x + feed_forward(norm(x))
    logits = norm(x) @ embedding.T

Initialization: kernels are normal with variance ``1 / fan_in``, and output projections of attention and feed-forward
layers are divided by ``sqrt(2 L)``; embeddings are normal with variance ``1 / F``; scales of norms are 1, biases are 0.
The parameters of the blocks are stacked along a leading axis of size ``L``, with or without `scan_layers`, and do not
depend on the ring.

On a ring with a `head_axis`, the heads of the attention and the hidden axis of the feed-forward layers are sharded over
it (as metadata of the parameters); all other parameters are replicated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from ringjax._src import debug
from ringjax._src.comm.layout import to_layout
from ringjax._src.comm.mesh import Ring, stored_positions
from ringjax._src.decode import DecodeCache, generate, init_cache
from ringjax._src.decode.cache import cache_specs, clipped_counts, reshard
from ringjax._src.decode.sampling import check_sampling
from ringjax._src.flax.placement import on_mesh
from ringjax._src.validation import (
    MOST_POSITIONS,
    check_array,
    check_bool,
    check_counts,
    check_instance,
    check_int,
    check_tokens,
    known,
)
from ringjax.models.block import BlockStack, check_model, tree_index
from ringjax.models.config import LongNetConfig
from ringjax.models.vocabulary import check_vocabulary, lookup


class LongNetDecoder(BlockStack):
    """A causal language model with dilated attention.

    The same parameters give the same logits on any ring.

    Args:
        config: The configuration, with a `vocab_size`.
        ring: The devices that share the sequence, or None.
        rngs: Random number generators for the parameters.

    Raises:
        ValueError: If `config` has no `vocab_size` or has `input_features`, or an argument has the wrong type.

    Example:
        >>> import jax.numpy as jnp, ringjax as rj
        >>> from flax import nnx
        >>> from ringjax.models import LongNetConfig, LongNetDecoder
        >>> config = LongNetConfig.tiny(vocab_size=16, pattern=rj.DilationPattern((16, 64), (1, 4)))
        >>> model = LongNetDecoder(config, rngs=nnx.Rngs(0))
        >>> model(jnp.ones((2, 64), int)).shape
        (2, 64, 16)
    """

    def __init__(self, config: LongNetConfig, *, ring: Ring | None = None, rngs: nnx.Rngs) -> None:
        check_model(config, ring, rngs)
        if config.vocab_size is None:
            raise ValueError("`vocab_size` must be given for a decoder, got None.")
        if config.input_features is not None:
            raise ValueError(f"`input_features` must be None for a decoder, got {config.input_features}.")
        super().__init__(config, is_causal=True, ring=ring, rngs=rngs)
        self.embed = _embedding(self.config, config.vocab_size, rngs)
        self.head: nnx.Linear | None = nnx.data(None)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.features, config.vocab_size, use_bias=False, param_dtype=config.param_dtype, rngs=rngs
            )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        seq_len: int | None = None,
        positions: Int[Array, " T"] | Int[Array, "B T"] | None = None,
        dropout_rng: Array | None = None,
    ) -> Float[Array, "B T V"]:
        """Computes the float32 logits of the next token at each position.

        Args:
            tokens: Tokens from 0 to V - 1, in the layout of the ring if there is one. Other values give NaN, except at
                padding, where any value is allowed.
            segment_ids, seq_len: Documents and padding, as for `dilated_attention`.
            positions: Position of each token; by default its index in the sequence.
            dropout_rng: A key for dropout and drop path; without a key, or after `eval()`, there is neither.

        Raises:
            ValueError: If an array has the wrong shape or dtype, or `seq_len` exceeds the length of `tokens`.
        """
        check_tokens("tokens", tokens)
        self.check_rows("tokens", tokens, segment_ids, seq_len, positions, dropout_rng)
        is_real = self.is_real(segment_ids, seq_len, tokens.shape[1])
        x = self._embedded(tokens, is_real)
        x = self.features(x, dropout_rng, segment_ids=segment_ids, seq_len=seq_len, positions=positions)
        return self._logits(x)

    def init_caches(self, batch: int, max_len: int) -> tuple[DecodeCache, ...]:
        """Returns empty caches, one per block, for sequences of up to `max_len` tokens; see `ringjax.init_cache`."""
        return tuple(self._empty_cache(batch, max_len) for _ in range(self.config.num_layers))

    def prefill(
        self, tokens: Int[Array, "B T"], max_len: int, *, lengths: Int[ArrayLike, " B"] | None = None
    ) -> tuple[Float[Array, "B T V"], tuple[DecodeCache, ...]]:
        """Computes the logits of a prompt, as a call does, and fills the caches.

        Args:
            tokens: Tokens, as in a call.
            max_len: As for `init_caches`, at least T.
            lengths: Length of each prompt without padding, from 0 to T; T by default.

        Returns:
            The logits and one cache per block.

        Raises:
            ValueError: If `tokens` is not an integer array of two axes, `max_len` is less than T, or `lengths` are out
                of range.
        """
        check_tokens("tokens", tokens)
        batch, length = tokens.shape
        core, is_real = self.blocks.attention.core, None
        core.check_prompt(length, check_int("max_len", max_len, most=MOST_POSITIONS), lengths)
        self.check_placement(max_len)
        if lengths is not None:
            ends = jnp.asarray(check_counts("lengths", lengths, batch, length))
            is_real = stored_positions(self.ring, length)[None] < ends[:, None]
        empty = self._empty_cache(batch, max_len)
        x = self._embedded(tokens, is_real)
        x, stacked = self.run(lambda block, x, _: block.prefill(x, empty, lengths), x)
        return self._logits(self.normalized(x)), tuple(tree_index(stacked, i) for i in range(self.config.num_layers))

    def extend(
        self,
        tokens: Int[Array, "B n"],
        caches: tuple[DecodeCache, ...],
        counts: Int[ArrayLike, " B"] | None = None,
    ) -> tuple[Float[Array, "B n V"], tuple[DecodeCache, ...]]:
        """Computes the logits of one or more tokens that follow those in the caches, and updates the caches.

        The blocks are unrolled, so that their caches are updated in place.

        Args:
            tokens: Tokens as in a call, replicated over the ring if there is one.
            caches: Caches from `init_caches`, `prefill` or the previous call.
            counts: Number of tokens of each sequence without padding, as for `ringjax.decode_step`.

        Returns:
            The logits and the updated caches.

        Raises:
            ValueError: If `tokens` is not an integer array of two axes, `caches` does not hold one cache per block, or
                `counts` are out of range.
        """
        check_tokens("tokens", tokens)
        if not isinstance(caches, tuple | list) or len(caches) != self.config.num_layers:
            given = len(caches) if isinstance(caches, tuple | list) else type(caches).__name__
            raise ValueError(f"`caches` must be {self.config.num_layers} caches, one per block, got {given}.")
        for i, cache in enumerate(caches):
            check_instance(f"caches[{i}]", cache, DecodeCache)
        is_real = None
        if counts is not None:
            ends = jnp.asarray(check_counts("counts", counts, *tokens.shape))
            is_real = jnp.arange(tokens.shape[1], dtype=ends.dtype)[None] < ends[:, None]
        graph, state = nnx.split(self.blocks)
        x, after = self._embedded(tokens, is_real, over_ring=False), []
        for i, cache in enumerate(caches):
            block = on_mesh(nnx.merge(graph, tree_index(state, i)), self.ring, x)
            x, cache = block.extend(x, cache, counts)  # noqa: PLW2901
            after.append(cache)
        return self._logits(self.normalized(x)), tuple(after)

    def generate(
        self,
        prompt: Int[Array, "B T"],
        num_tokens: int,
        *,
        lengths: Int[ArrayLike, " B"] | None = None,
        max_len: int | None = None,
        rng: Array | None = None,
        temperature: float | Float[Array, ""] = 1.0,
        top_k: int | None = None,
        greedy: bool = False,
    ) -> Int[Array, "B num_tokens"]:
        """Generates tokens that continue prompts. It is compiled once for all tokens and calls.

        Args:
            prompt: Prompts in sequence order, also on a ring. Tokens outside the vocabulary raise an error if their
                values are known; if they are traced, all new tokens are -1, see `ringjax.generate`.
            num_tokens: Number of tokens to generate.
            lengths: Length of each prompt without padding, from 1 to T; T by default.
            max_len: As for `init_caches`, ``T + num_tokens`` by default.
            rng, temperature, top_k, greedy: As for `ringjax.generate`. A Python number as `temperature` is a
                compile-time constant, an array is not.

        Returns:
            The new tokens of each prompt.

        Raises:
            ValueError: If `prompt` is not an integer array of two axes or has tokens outside the vocabulary, `lengths`
                are out of range, `max_len` is less than T, or the sampling arguments are invalid, see
                `ringjax.generate`.
        """
        if len(getattr(prompt, "shape", (0, 0))) != 2:
            raise ValueError(f"`prompt` must have the shape (batch, length), got {prompt.shape}.")
        check_tokens("prompt", prompt)
        batch, length = prompt.shape
        num_tokens = check_int("num_tokens", num_tokens, most=MOST_POSITIONS)
        max_len = length + num_tokens if max_len is None else check_int("max_len", max_len, length, MOST_POSITIONS)
        given = np.full(batch, length, np.int32) if lengths is None else lengths
        ends = check_counts("lengths", given, batch, length)
        if (found := known(ends)) is not None and found.min() < 1:
            raise ValueError(f"`lengths` must be at least 1 for `generate`, got {found.tolist()}.")
        check_vocabulary("prompt", prompt, self.embed.num_embeddings, ends)
        top_k = check_sampling(rng, temperature, top_k, greedy)
        if top_k is not None and top_k > self.embed.num_embeddings:
            raise ValueError(f"`top_k` must be at most the vocabulary size {self.embed.num_embeddings}, got {top_k}.")
        ends = clipped_counts("lengths", ends, batch, length, least=1)
        options: dict[str, Any] = {"num_tokens": num_tokens, "top_k": top_k, "greedy": greedy, "max_len": max_len}
        options["reports"] = debug.is_enabled()
        arrays = *nnx.split(self), prompt, ends, rng
        if isinstance(temperature, Array):
            return _generate(*arrays, temperature, **options)
        return _generate_at(*arrays, float(temperature), **options)

    def _empty_cache(self, batch: int, max_len: int) -> DecodeCache:
        core, dtype = self.blocks.attention.core, jnp.dtype(self.config.dtype)
        cache = init_cache(core.pattern, batch, core.num_kv_heads, core.head_dim, max_len, dtype, ring=self.ring)
        return cache if self.ring is None else reshard(self.ring, cache, cache_specs(cache, self.ring))

    def _embedded(self, tokens: Array, is_real: Array | None, over_ring: bool = True) -> Array:
        embed = on_mesh(self.embed, self.ring, tokens)
        return lookup(embed, "tokens", tokens, is_real, self.sharding(tokens, over_ring))

    def _logits(self, x: Array) -> Array:
        if self.head is None:
            kernel = on_mesh(self.embed, self.ring, x).embedding[...].T
        else:
            kernel = on_mesh(self.head, self.ring, x).kernel[...]
        return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


class LongNetEncoder(BlockStack):
    """A bidirectional encoder of tokens or vectors with dilated attention.

    Args:
        config: The configuration, with a `vocab_size` if the inputs are tokens, with `input_features` if they are
            vectors to project (such as image patches), with neither if they are embeddings of `features` dimensions.
            ``positions="xpos"`` is not supported.
        ring, rngs: As for `LongNetDecoder`.

    Raises:
        ValueError: If `config` has both `vocab_size` and `input_features`, ``positions="xpos"`` is used, or an argument
            has the wrong type.

    Example:
        >>> import jax.numpy as jnp, ringjax as rj
        >>> from flax import nnx
        >>> from ringjax.models import LongNetConfig, LongNetEncoder
        >>> config = LongNetConfig.tiny(input_features=24, pattern=rj.DilationPattern((16, 64), (1, 4)))
        >>> encoder = LongNetEncoder(config, rngs=nnx.Rngs(0))
        >>> encoder(jnp.ones((2, 64, 24))).shape
        (2, 64, 64)
    """

    def __init__(self, config: LongNetConfig, *, ring: Ring | None = None, rngs: nnx.Rngs) -> None:
        check_model(config, ring, rngs)
        if config.vocab_size is not None and config.input_features is not None:
            raise ValueError(
                "only one of `vocab_size` and `input_features` may be given for an encoder, got "
                f"{config.vocab_size} and {config.input_features}."
            )
        super().__init__(config, is_causal=False, ring=ring, rngs=rngs)
        self.embed: nnx.Embed | nnx.Linear | None = nnx.data(None)
        if config.vocab_size is not None:
            self.embed = _embedding(self.config, config.vocab_size, rngs)
        elif config.input_features is not None:
            types: dict[str, Any] = {"dtype": self.config.dtype, "param_dtype": config.param_dtype}
            self.embed = nnx.Linear(config.input_features, config.features, rngs=rngs, **types)

    def __call__(
        self,
        inputs: Int[Array, "B T"] | Float[Array, "B T input_features"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        seq_len: int | None = None,
        positions: Int[Array, " T"] | Int[Array, "B T"] | None = None,
        dropout_rng: Array | None = None,
        pool: bool = False,
    ) -> Float[Array, "B T F"] | Float[Array, "B F"]:
        """Computes features, or their mean over all positions that are not padding.

        Args:
            inputs: Tokens from 0 to V - 1 (other values give NaN, except at padding), vectors of `input_features`, or
                embeddings of `features` dimensions, in the layout of the ring if there is one.
            segment_ids, seq_len, positions, dropout_rng: As for `LongNetDecoder`.
            pool: Whether to return the mean over positions.

        Raises:
            ValueError: If an array has the wrong shape or dtype, or `seq_len` exceeds the length of `inputs`.
        """
        check_bool("pool", pool)
        shape = self._check_inputs(inputs)
        self.check_rows("inputs", inputs, segment_ids, seq_len, positions, dropout_rng)
        is_real = self.is_real(segment_ids, seq_len, shape[1])
        if isinstance(self.embed, nnx.Embed):
            embed = on_mesh(self.embed, self.ring, inputs)
            x = lookup(embed, "inputs", inputs, is_real, self.sharding(inputs))
        elif self.embed is not None:
            x = on_mesh(self.embed, self.ring, inputs)(inputs, out_sharding=self.sharding(inputs))
        else:
            x = jnp.asarray(inputs).astype(jnp.dtype(self.config.dtype))
        x = self.features(x, dropout_rng, segment_ids=segment_ids, seq_len=seq_len, positions=positions)
        return self._mean(x, is_real) if pool else x

    def _check_inputs(self, inputs: Array) -> tuple[int, int]:
        """Checks the inputs and returns their batch size and length."""
        if self.config.vocab_size is not None:
            check_tokens("inputs", inputs)
            return inputs.shape[0], inputs.shape[1]
        check_array("inputs", inputs, "floating point", ("batch", "length", "features"))
        width = self.config.input_features or self.config.features
        if inputs.shape[2] != width:
            raise ValueError(f"`inputs` must have {width} features in the last axis, got shape {inputs.shape}.")
        return inputs.shape[0], inputs.shape[1]

    def _mean(self, x: Array, is_real: Array | None) -> Array:
        is_real = jnp.broadcast_to(True if is_real is None else is_real, x.shape[:2])
        masked = jnp.where(is_real[..., None], x.astype(jnp.float32), 0)  # padding may contain NaN
        count = jnp.maximum(is_real.sum(axis=1, dtype=jnp.float32), 1)
        return (masked.sum(axis=1) / count[:, None]).astype(x.dtype)


def _embedding(config: LongNetConfig, vocab_size: int, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        vocab_size,
        config.features,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        embedding_init=nnx.initializers.normal(config.features**-0.5),
        rngs=rngs,
    )


def _generate_tokens(
    graph: nnx.GraphDef[LongNetDecoder],
    state: Any,  # noqa: ANN401
    prompt: Array,
    lengths: Array,
    rng: Array | None,
    temperature: Array | float,
    *,
    max_len: int,
    reports: bool,
    **sampling: Any,  # noqa: ANN401
) -> Array:
    """Fills the caches with all tokens of the prompts but the last, and generates from there."""
    del reports  # programs with and without debug reports differ
    model = nnx.merge(graph, state)
    last = jnp.take_along_axis(prompt, lengths[:, None] - 1, axis=1)[:, 0]
    if (ring := model.ring) is not None:
        last = reshard(ring, last, PartitionSpec(ring.batch_axis))
        prompt = to_layout(prompt, ring.layout, ring.size("axis_name"))
        prompt = reshard(ring, prompt, PartitionSpec(ring.batch_axis, ring.axis_name))
    _, caches = model.prefill(prompt, max_len, lengths=lengths - 1)

    def step(caches: tuple[DecodeCache, ...], tokens: Array) -> tuple[Array, tuple[DecodeCache, ...]]:
        logits, caches = model.extend(tokens, caches)
        return logits[:, 0], caches

    return generate(step, caches, last, rng=rng, temperature=temperature, **sampling)[0]


_CONSTANTS = ("num_tokens", "top_k", "greedy", "max_len", "reports")
_generate = jax.jit(_generate_tokens, static_argnames=_CONSTANTS)
_generate_at = jax.jit(_generate_tokens, static_argnames=(*_CONSTANTS, "temperature"))
