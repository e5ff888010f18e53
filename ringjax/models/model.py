"""LongNet: pre-norm blocks of dilated attention and feed-forward layers.

Legend: ``B`` batch, ``T`` length, ``F`` features, ``V`` vocabulary, ``L`` layers.

    x = embed(tokens)
    L times:  x = x + attention(norm(x))
              x = x + feed_forward(norm(x))
    logits = norm(x) @ embedding.T

Initial weights: kernels are normal with variance ``1 / fan_in``, those that write to the residual stream (the last of
attention and feed-forward layers) divided by ``sqrt(2 L)``; embeddings are normal with variance ``1 / F``; norms start
at scale 1, biases at 0. The parameters of the blocks are stacked along a leading axis of size ``L``, whether they run
in a loop or not, and do not depend on the ring.

On a ring with a `head_axis`, the heads of the attention and the hidden axis of the feed-forward layers are sharded over
it (as metadata of the parameters); everything else is whole on each device.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from ringjax._src.comm.mesh import Ring
from ringjax._src.decode import DecodeCache, init_cache
from ringjax._src.decode.cache import cache_specs, placed
from ringjax._src.validation import (
    MOST_POSITIONS,
    check_array,
    check_bool,
    check_counts,
    check_instance,
    check_int,
    check_tokens,
)
from ringjax.models.block import BlockStack, check_model, nth
from ringjax.models.config import LongNetConfig
from ringjax.models.generation import continued
from ringjax.models.vocabulary import lookup


class LongNetDecoder(BlockStack):
    """A causal language model with dilated attention.

    The same parameters give the same logits on any ring.

    Args:
        config: The sizes, with a `vocab_size`.
        ring: The devices that share the sequence, or None.
        rngs: Where the parameters come from.

    Raises:
        ValueError: If an argument is not as described.

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
            param_dtype = config.param_dtype
            self.head = nnx.Linear(
                config.features, config.vocab_size, use_bias=False, param_dtype=param_dtype, rngs=rngs
            )

    def __call__(
        self,
        tokens: Array,
        *,
        segment_ids: Array | None = None,
        seq_len: int | None = None,
        positions: Array | None = None,
        dropout_rng: Array | None = None,
    ) -> Array:
        """Logits (B, T, V) of what follows each token, in float32.

        Args:
            tokens: Integers (B, T) from 0 to V - 1, in the layout of the ring if there is one. Others give NaN, except
                where they are padding, which may hold anything.
            segment_ids, seq_len: Documents and padding, as for `dilated_attention`.
            positions: Position of each token, integers (T,) or (B, T); by default that in the sequence.
            dropout_rng: A key for the dropout of attention weights; without one, or after `eval()`, nothing is dropped.
        """
        check_tokens("tokens", tokens)
        self.check_rows(tokens.shape, segment_ids, seq_len, positions, dropout_rng)
        is_real = self.is_real(segment_ids, seq_len, tokens.shape[1])
        x = lookup(self.embed, "tokens", tokens, is_real, self.sharding())
        x = self.features(x, dropout_rng, segment_ids=segment_ids, seq_len=seq_len, positions=positions)
        return self._logits(x)

    def init_caches(self, batch: int, max_len: int) -> tuple[DecodeCache, ...]:
        """Empty caches, one for each block, for sequences of up to `max_len` tokens; see `ringjax.init_cache`."""
        return tuple(self._empty_cache(batch, max_len) for _ in range(self.config.num_layers))

    def prefill(
        self, tokens: Array, max_len: int, *, lengths: ArrayLike | None = None
    ) -> tuple[Array, tuple[DecodeCache, ...]]:
        """Logits (B, T, V) of a whole prompt, as a call gives them, and the caches after it.

        Args:
            tokens: Integers (B, T), as in a call.
            max_len: As for `init_caches`, at least T.
            lengths: True length of each prompt, integers (B,) from 0 to T; T by default. Later tokens are padding.
        """
        check_tokens("tokens", tokens)
        batch, length = tokens.shape
        core, is_real = self.blocks.attention.core, None
        core.check_prompt(length, check_int("max_len", max_len, most=MOST_POSITIONS), lengths)
        if lengths is not None:
            ends = jnp.asarray(check_counts("lengths", lengths, batch, length))
            is_real = self.stored_positions(length)[None] < ends[:, None]
        empty = self._empty_cache(batch, max_len)
        x = lookup(self.embed, "tokens", tokens, is_real, self.sharding())
        x, stacked = self.run(lambda block, x, _: block.prefill(x, empty, lengths), x)
        return self._logits(self.norm(x)), tuple(nth(stacked, i) for i in range(self.config.num_layers))

    def extend(
        self, tokens: Array, caches: tuple[DecodeCache, ...], counts: ArrayLike | None = None
    ) -> tuple[Array, tuple[DecodeCache, ...]]:
        """Logits (B, n, V) of the next tokens, one or several, after those of the caches, and the caches after them.

        The blocks run one after the other, so that the rows of their caches are overwritten where they stand.

        Args:
            tokens: Integers (B, n), as in a call, whole on each device of the ring if there is one.
            caches: From `init_caches`, `prefill` or the tokens before.
            counts: How many of the n tokens each entry really has, as for `ringjax.decode_step`.
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
        x, after = lookup(self.embed, "tokens", tokens, is_real, self.sharding(over_ring=False)), []
        for i, cache in enumerate(caches):
            x, cache = nnx.merge(graph, nth(state, i)).extend(x, cache, counts)  # noqa: PLW2901
            after.append(cache)
        return self._logits(self.norm(x)), tuple(after)

    def generate(
        self,
        prompt: Array,
        num_tokens: int,
        *,
        lengths: ArrayLike | None = None,
        max_len: int | None = None,
        rng: Array | None = None,
        temperature: float | Array = 1.0,
        top_k: int | None = None,
        greedy: bool = False,
    ) -> Array:
        """Continues prompts: `num_tokens` tokens (B, num_tokens) after each. Compiled once for all tokens and calls.

        Args:
            prompt: Integers (B, T), in the order of the sequence, on a ring too. Tokens outside the vocabulary are an
                error where they are known; where they are traced, all new tokens are -1, see `ringjax.generate`.
            num_tokens: How many tokens to make.
            lengths: True length of each prompt, integers (B,) from 1 to T; T by default. Later tokens are padding.
            max_len: As for `init_caches`, ``T + num_tokens`` by default.
            rng, temperature, top_k, greedy: As for `ringjax.generate`. A number as `temperature` is part of the
                program, an array is not.
        """
        draw: dict[str, Any] = {"rng": rng, "temperature": temperature, "top_k": top_k, "greedy": greedy}
        return continued(self, prompt, num_tokens, lengths, max_len, **draw)

    def _empty_cache(self, batch: int, max_len: int) -> DecodeCache:
        core, dtype = self.blocks.attention.core, jnp.dtype(self.config.dtype)
        cache = init_cache(core.pattern, batch, core.num_kv_heads, core.head_dim, max_len, dtype, ring=self.ring)
        return cache if self.ring is None else placed(self.ring, cache, cache_specs(cache, self.ring))

    def _logits(self, x: Array) -> Array:
        kernel = self.embed.embedding[...].T if self.head is None else self.head.kernel[...]
        return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


class LongNetEncoder(BlockStack):
    """The same blocks, in which every position sees those before and after it: features of tokens or of vectors.

    Args:
        config: The sizes, with a `vocab_size` if the inputs are tokens, with `input_features` if they are vectors that
            are to be projected (of image patches, say), with neither if they are the stream itself; not with
            ``positions="xpos"``.
        ring: The devices that share the sequence, or None.
        rngs: Where the parameters come from.

    Raises:
        ValueError: If an argument is not as described.

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
        inputs: Array,
        *,
        segment_ids: Array | None = None,
        seq_len: int | None = None,
        positions: Array | None = None,
        dropout_rng: Array | None = None,
        pool: bool = False,
    ) -> Array:
        """Features (B, T, F), or their mean (B, F) over all positions that are not padding.

        Args:
            inputs: Integers (B, T) from 0 to V - 1 (others give NaN, except where they are padding), vectors
                (B, T, input_features) or the stream (B, T, F), in the layout of the ring if there is one.
            segment_ids, seq_len: Documents and padding, as for `dilated_attention`.
            positions: Position of each row, integers (T,) or (B, T); by default that in the sequence.
            dropout_rng: A key for the dropout of attention weights; without one nothing is dropped.
            pool: Whether the mean is taken.
        """
        check_bool("pool", pool)
        rows = self._check_inputs(inputs)
        self.check_rows(rows, segment_ids, seq_len, positions, dropout_rng)
        is_real = self.is_real(segment_ids, seq_len, rows[1])
        if isinstance(self.embed, nnx.Embed):
            x = lookup(self.embed, "inputs", inputs, is_real, self.sharding())
        elif self.embed is not None:
            x = self.embed(inputs, out_sharding=self.sharding())
        else:
            x = jnp.asarray(inputs).astype(jnp.dtype(self.config.dtype))
        x = self.features(x, dropout_rng, segment_ids=segment_ids, seq_len=seq_len, positions=positions)
        return self._mean(x, is_real) if pool else x

    def _check_inputs(self, inputs: Array) -> tuple[int, int]:
        """Checks the inputs, and returns batch and length."""
        if self.config.vocab_size is not None:
            check_tokens("inputs", inputs)
            return inputs.shape[0], inputs.shape[1]
        check_array("inputs", inputs, "floating point", ("batch", "length", "features"))
        width = self.config.input_features or self.config.features
        if inputs.shape[2] != width:
            raise ValueError(f"`inputs` must have {width} features in their last axis, got shape {inputs.shape}.")
        return inputs.shape[0], inputs.shape[1]

    def _mean(self, x: Array, is_real: Array | None) -> Array:
        is_real = jnp.broadcast_to(True if is_real is None else is_real, x.shape[:2])
        rows = jnp.where(is_real[..., None], x.astype(jnp.float32), 0)  # padding may hold NaN
        count = jnp.maximum(is_real.sum(axis=1, dtype=jnp.float32), 1)
        return (rows.sum(axis=1) / count[:, None]).astype(x.dtype)


def _embedding(config: LongNetConfig, vocab_size: int, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        vocab_size,
        config.features,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        embedding_init=nnx.initializers.normal(config.features**-0.5),
        rngs=rngs,
    )
