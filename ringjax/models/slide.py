"""A slide encoder: tile embeddings and coordinates of whole slides to slide embeddings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int, Real

from ringjax._src import debug
from ringjax._src.attention_rows import check_rows
from ringjax._src.comm.mesh import Ring, stored_positions
from ringjax._src.flax.placement import on_mesh, param_on_mesh
from ringjax._src.online_softmax import accumulator
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import check_bool, check_choice, check_int, check_key, check_optional
from ringjax.models.attention_map import AttentionMap, layer_weights, rollout
from ringjax.models.block import Block, check_model, tree_index
from ringjax.models.config import LongNetConfig
from ringjax.models.gigapath import convert_gigapath
from ringjax.models.model import LongNetEncoder
from ringjax.models.slide_inputs import SlideInputs, position_embedding, prepare, segment_ids, warn_if_misplaced
from ringjax.models.weights import load_params

Pool = Literal["cls", "mean"]


class SlideEncoder(nnx.Module):
    """An encoder of whole-slide images: the slide encoder of Prov-GigaPath.

    Tile embeddings are projected, 2-D sine-cosine embeddings of their coordinates are added, a CLS token is put in
    front, and a `LongNetEncoder` follows. Slides of different lengths form a batch, and each slide gives the same
    embedding as alone. Inputs are padded to one of a few lengths, so that many slides share a compiled program.

    `from_gigapath` creates an encoder with the weights of Prov-GigaPath, see [Prov-GigaPath](
    https://www.nature.com/articles/s41586-024-07441-w).

    Args:
        config: The configuration, with `input_features` and without `vocab_size` and `positions`; the number of
            features is a multiple of 4. `LongNetConfig.gigapath()` has the sizes of Prov-GigaPath.
        ring: The devices that share the slides, or None. Inputs and outputs remain in sequence order.
        rngs: Random number generators for the parameters.

    Attributes:
        unused_weights: Names of the arrays of a state dict that `from_gigapath` did not use.

    Raises:
        ValueError: If `config` has no `input_features`, has a `vocab_size` or `positions`, or its `features` are not a
            multiple of 4; or if an argument has the wrong type.

    Example:
        >>> import numpy as np, ringjax as rj
        >>> from flax import nnx
        >>> from ringjax.models import LongNetConfig, SlideEncoder
        >>> pattern = rj.DilationPattern((64, 256), (1, 4))
        >>> config = LongNetConfig.tiny(input_features=24, positions=None, pattern=pattern)
        >>> encoder = SlideEncoder(config, rngs=nnx.Rngs(0))
        >>> tiles, coordinates = np.ones((2, 100, 24), np.float32), np.zeros((2, 100, 2), np.int32)
        >>> encoder(tiles, coordinates, lengths=[100, 60]).shape
        (2, 64)
    """

    def __init__(self, config: LongNetConfig, *, ring: Ring | None = None, rngs: nnx.Rngs) -> None:
        check_model(config, ring, rngs)
        if ring is not None and ring.seq_len is not None:
            raise ValueError(
                f"`ring` must not have a `seq_len`, as slides differ in length and are padded by the encoder, got "
                f"{ring.seq_len}."
            )
        if config.input_features is None:
            raise ValueError("`input_features` must be given for a slide encoder, got None.")
        for name in ("vocab_size", "positions"):
            if getattr(config, name) is not None:
                raise ValueError(f"`{name}` must be None for a slide encoder, got {getattr(config, name)!r}.")
        if config.features % 4:
            raise ValueError(f"`features` must be a multiple of 4 for a slide encoder, got {config.features}.")
        self.encoder = LongNetEncoder(dataclasses.replace(config, input_features=None), ring=ring, rngs=rngs)
        dtype = jnp.dtype(self.encoder.config.dtype)
        types: dict[str, Any] = {"param_dtype": config.param_dtype, "rngs": rngs}
        self.embed = nnx.Linear(config.input_features, config.features, dtype=dtype, **types)
        initial = nnx.initializers.normal(0.02)(rngs.params(), (config.features,), config.param_dtype)
        self.cls_token = nnx.Param(initial)
        self.norm = nnx.LayerNorm(
            config.features, epsilon=1e-6, dtype=accumulator(dtype), use_fast_variance=False, **types
        )
        self.config = dataclasses.replace(config, dtype=dtype)
        self.ring = ring
        self.unused_weights: tuple[str, ...] = ()

    @classmethod
    def from_gigapath(
        cls,
        state_dict: Mapping[str, Any],
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ring: Ring | None = None,
        num_heads: int = 16,
        pattern: DilationPattern | None = None,
        **changes: Any,  # noqa: ANN401
    ) -> SlideEncoder:
        """Creates an encoder with the weights of Prov-GigaPath's slide encoder, of any depth and width.

        Outputs and gradients are those of the original package, also where it pads segments with zero keys, with two
        exceptions: slides of 185,363 tiles and more, where the original misplaces rows (the encoder warns), and
        coordinates beyond its grid of 1000 x 1000 tiles, which are refused.

        Args:
            state_dict: Arrays by name, as in the file ``slide_encoder.pth``: anything that `numpy.asarray` accepts, and
                tensors of PyTorch. A mapping with one entry ``"model"`` is unwrapped, and a common prefix of the names
                is removed. Arrays of other parts of the model (the decoder of its pretraining, a table of positions, a
                classification head) are not used; see the attribute `unused_weights`.
            dtype: Dtype of the computation, `ringjax.compute_dtype()` by default.
            param_dtype: Dtype of the parameters.
            ring: The devices that share the slides, or None.
            num_heads: Number of heads: 16 for all published sizes.
            pattern: The dilation pattern, by default that of Prov-GigaPath for slides of up to 262,144 pixels.
            **changes: Further fields of `LongNetConfig`, such as `dropout_rate` and `drop_path_rate` (0.25 and 0.1 by
                default, in calls with a `dropout_rng`), `remat` and `scan_layers`.

        Raises:
            ValueError: If `state_dict` lacks arrays of the encoder or has unknown ones (the error lists their names),
                an array has the wrong shape or is not finite, or `changes` contain a field that the state dict
                determines.

        Example:
            >>> import numpy as np, ringjax as rj
            >>> from flax import nnx
            >>> from ringjax.models import SlideEncoder
            >>> try:
            ...     SlideEncoder.from_gigapath({"blocks.0.attn.qkv.weight": np.ones((8, 8))})
            ... except ValueError as error:
            ...     print(str(error)[:62])
            `state_dict` must be that of Prov-GigaPath's slide encoder, wi
        """
        fields = {"dtype": dtype, "param_dtype": param_dtype, "num_heads": num_heads, **changes}
        fields.setdefault("rows_at_once", 1024 if ring is None else None)
        config, parameters, unused = convert_gigapath(state_dict, fields, pattern)
        empty = nnx.eval_shape(lambda: cls(config, ring=ring, rngs=nnx.Rngs(0)))
        encoder = load_params(empty, parameters, empty.encoder.blocks.attention.core.mesh)
        encoder.unused_weights = unused
        return encoder

    def __call__(
        self,
        tiles: Float[Array, "B L input_features"],
        coordinates: Real[Array, "B L 2"],
        lengths: Int[ArrayLike, " B"] | None = None,
        *,
        pool: Pool = "cls",
        all_layers: bool = False,
        return_tiles: bool = False,
        tile_size: float = 256,
        dropout_rng: Array | None = None,
    ) -> Any:  # noqa: ANN401
        """Computes the embeddings of slides.

        Args:
            tiles: Embeddings of the tiles of each slide, in any order, padded to a common length.
            coordinates: Coordinates of each tile in pixels, from 0 to below ``1000 * tile_size``.
            lengths: Number of tiles of each slide, at least 1; the others are padding and may have any value. L by
                default.
            pool: ``"cls"`` returns the output of the CLS token, ``"mean"`` the mean over the tiles (the original's
                `global_pool`).
            all_layers: Whether to return the pooled inputs of the first block and outputs of all blocks, before the
                final norm of the encoder and after that of the slide encoder. The last of these therefore differs from
                the embedding without `all_layers`, as in the original.
            return_tiles: Whether to return the outputs of the tiles too.
            tile_size: Distance of neighboring tiles in the unit of the coordinates.
            dropout_rng: A key for dropout and drop path; without a key, or after `eval()`, there is neither.

        Returns:
            Embeddings of shape (B, F) in at least float32, or (num_layers + 1, B, F) with `all_layers`. With
            `return_tiles`, a tuple of the embeddings and the outputs of the tiles (B, L, F), which are 0 at padding.

        Raises:
            ValueError: If an array has the wrong shape or dtype; if known values of `tiles` are not finite, those of
                `coordinates` are outside the grid, or those of `lengths` are not between 1 and L; or if an option is
                not one of its choices.
        """
        options = _Options(
            check_choice("pool", pool, get_args(Pool)),
            check_bool("all_layers", all_layers),
            check_bool("return_tiles", return_tiles),
            debug.is_enabled(),
        )
        check_optional(check_key, "dropout_rng", dropout_rng)
        inputs = self._prepare(tiles, coordinates, lengths, tile_size)
        graph, state = nnx.split(self)
        rows, counts = _embed(graph, state, inputs), inputs.lengths
        del inputs  # the encoder needs the memory
        pooled, outputs = _encode(graph, state, rows, counts, dropout_rng, options)
        return (pooled, outputs[:, 1 : tiles.shape[1] + 1]) if return_tiles else pooled

    def attention_inputs(
        self,
        tiles: Float[Array, "B L input_features"],
        coordinates: Real[Array, "B L 2"],
        lengths: Int[ArrayLike, " B"] | None = None,
        *,
        layer: int,
        tile_size: float = 256,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"], Float[Array, "B T N"]]:
        """Computes queries, keys and log-sum-exp of one layer, from which `ringjax.attention_rows` computes weights.

        Args:
            tiles, coordinates, lengths, tile_size: As in a call.
            layer: Index of the layer, from 0 to ``num_layers - 1``.

        Returns:
            Queries, keys and the log-sum-exp of the scores. Row 0 is the CLS token and row ``i + 1`` is tile ``i``.

        Raises:
            ValueError: As in a call, or if `layer` is out of range.
        """
        layer = check_int("layer", layer, 0, self.config.num_layers - 1)
        inputs = self._prepare(tiles, coordinates, lengths, tile_size)
        found = _attention_inputs(*nnx.split(self), inputs, layer, debug.is_enabled())
        query, key, lse = (x[:, : tiles.shape[1] + 1] for x in found)
        return query, key, lse

    def attention_map(
        self,
        tiles: Float[Array, "B L input_features"],
        coordinates: Real[Array, "B L 2"],
        lengths: Int[ArrayLike, " B"] | None = None,
        *,
        queries: Int[ArrayLike, " R"] | None = None,
        tile_size: float = 256,
    ) -> AttentionMap:
        """Computes the attention weights of the CLS token, or of chosen tiles, in all layers and heads.

        The weights are exact. In a layer and head, a query attends to the tiles of its segments only, so many weights
        are 0; see `attention_rollout` for a map over all layers.

        Args:
            tiles, coordinates, lengths, tile_size: As in a call.
            queries: Indices of tiles whose weights are computed, the same in all slides; the CLS token by default.

        Returns:
            The weights of the tiles (B, R, num_layers, N, L), of the CLS token and of zero keys, with R = 1 for the CLS
            token.

        Raises:
            ValueError: As in a call, or if `queries` are not indices of tiles.
        """
        rows = np.zeros(1, np.int32) if queries is None else 1 + check_rows("queries", queries, tiles.shape[1])
        inputs = self._prepare(tiles, coordinates, lengths, tile_size)
        weights, zero_keys = layer_weights(*nnx.split(self), inputs, rows, debug.is_enabled())
        weights, zero_keys = (jnp.moveaxis(x, 0, 2) for x in (weights, zero_keys))
        return AttentionMap(weights[..., 1 : tiles.shape[1] + 1], weights[..., 0], zero_keys)

    def attention_rollout(
        self,
        tiles: Float[Array, "B L input_features"],
        coordinates: Real[Array, "B L 2"],
        lengths: Int[ArrayLike, " B"] | None = None,
        *,
        pool: Pool = "cls",
        relative: bool = False,
        tile_size: float = 256,
    ) -> Float[Array, "B L"]:
        """Computes how much of the slide embedding comes from each tile through the attention of all layers.

        This is [attention rollout](https://arxiv.org/abs/2005.00928): each layer keeps half of what a row holds, and
        takes the other half from the rows that it attends to, by the mean weight of all heads. Values, feed-forward
        layers and norms do not count. The result is exact, takes a few times the time of a call, and keeps the states
        of all layers in memory.

        The pattern alone favors some tiles: the CLS token has the first position, so most heads attend to the first
        segment of the shortest branch only, the first 1023 tiles with the pattern of Prov-GigaPath. With `relative`,
        shares are divided by those for equal scores, which leaves what the encoder prefers, between tiles and between
        tiles and zero keys.

        Args:
            tiles, coordinates, lengths, pool, tile_size: As in a call.
            relative: Whether to divide by the shares for equal scores.

        Returns:
            The share of each tile, 0 at padding. The shares of a slide sum to less than 1: the rest comes from the CLS
            token and from zero keys. With `relative`, above 1 for tiles that the encoder prefers.

        Raises:
            ValueError: As in a call.
        """
        is_cls = jnp.asarray(check_choice("pool", pool, get_args(Pool)) == "cls")
        inputs = self._prepare(tiles, coordinates, lengths, tile_size)
        shares = rollout(*nnx.split(self), inputs, is_cls, check_bool("relative", relative), debug.is_enabled())
        return shares[:, 1 : tiles.shape[1] + 1]

    def _prepare(self, tiles: Array, coordinates: Array, lengths: ArrayLike | None, tile_size: float) -> SlideInputs:
        inputs = prepare(tiles, coordinates, lengths, tile_size, self.embed.in_features, self.ring)
        warn_if_misplaced(self.config.pattern, inputs.lengths, tiles.shape[1])
        return inputs

    def rows(self, inputs: SlideInputs) -> tuple[Array, Array]:
        """Returns the embeddings (B, T, F) of the CLS token and the tiles, and the position of each stored row."""
        position = stored_positions(self.ring, inputs.tiles.shape[1])[None]
        is_tile = ((position > 0) & (position <= inputs.lengths[:, None]))[..., None]
        tiles = jnp.where(is_tile, inputs.tiles, jnp.zeros_like(inputs.tiles))  # padding may contain NaN
        grid = jnp.where(is_tile, inputs.grid, 0)
        sharding = self.encoder.sharding(tiles)
        x = on_mesh(self.embed, self.ring, tiles)(tiles, out_sharding=sharding)
        x = x + position_embedding(grid, self.config.features, x.dtype, sharding)
        cls_token = param_on_mesh(self.cls_token[...], PartitionSpec(), self.ring, x).astype(x.dtype)[None, None]
        return jnp.where(position[..., None] == 0, cls_token, x), position


class _Options(NamedTuple):
    """Static arguments of `_encode`."""

    pool: Pool
    all_layers: bool
    return_tiles: bool
    reports: bool  # whether debug reports are enabled, see `ringjax._src.debug`


@jax.jit
def _embed(graph: nnx.GraphDef[SlideEncoder], state: Any, inputs: SlideInputs) -> Array:  # noqa: ANN401
    """Computes the inputs of the first block."""
    return nnx.merge(graph, state).rows(inputs)[0]


@functools.partial(jax.jit, static_argnames="options")
def _encode(
    graph: nnx.GraphDef[SlideEncoder],
    state: Any,  # noqa: ANN401
    x: Array,
    lengths: Array,
    dropout_rng: Array | None,
    options: _Options,
) -> tuple[Array, Array | None]:
    """Computes the pooled outputs and, if `return_tiles`, the outputs of all rows in sequence order."""
    model = nnx.merge(graph, state)
    encoder = model.encoder
    position = stored_positions(model.ring, x.shape[1])[None]
    ids = segment_ids(position, lengths)
    is_pooled = (position == 0) & (ids == 0) if options.pool == "cls" else (position > 0) & (ids == 0)
    pooled = functools.partial(_mean, is_real=is_pooled)
    report = pooled if options.all_layers else lambda _: None
    x, first, reports = encoder.states(x, dropout_rng, report, segment_ids=ids, seq_len=None)
    if options.all_layers:
        embedding = jnp.concatenate([first[None], reports])
    elif options.pool == "cls":
        embedding = encoder.normalized(pooled(x))  # the norm of one row instead of all
    else:
        embedding = pooled(encoder.normalized(x))
    norm = on_mesh(model.norm, model.ring, x)
    if not options.return_tiles:
        return norm(embedding), None
    outputs = norm(encoder.normalized(x)).astype(x.dtype)
    outputs = jnp.where((ids == 0)[..., None], outputs, jnp.zeros_like(outputs))
    return norm(embedding), outputs if model.ring is None else model.ring.unshard(outputs)


@functools.partial(jax.jit, static_argnames="reports")
def _attention_inputs(
    graph: nnx.GraphDef[SlideEncoder],
    state: Any,  # noqa: ANN401
    inputs: SlideInputs,
    layer: Array,
    reports: bool,
) -> tuple[Array, Array, Array]:
    """Computes queries, keys and log-sum-exp of one layer, in sequence order."""
    del reports  # programs with and without debug reports differ
    model = nnx.merge(graph, state)
    x, position = model.rows(inputs)
    ids = segment_ids(position, inputs.lengths)
    block_graph, blocks = nnx.split(model.encoder.blocks)

    def block(index: Array) -> Block:
        return on_mesh(nnx.merge(block_graph, tree_index(blocks, index)), model.ring, x)

    def step(index: Array, x: Array) -> Array:
        return block(index)(x, segment_ids=ids)

    x = lax.fori_loop(jnp.zeros_like(layer), layer, step, x)
    query, key, lse = block(layer).attention_inputs(x, segment_ids=ids, seq_len=None)
    if model.ring is None:
        return query, key, lse
    return model.ring.unshard(query), model.ring.unshard(key), model.ring.unshard(lse)


def _mean(x: Array, is_real: Array) -> Array:
    """Returns the mean of some rows of (B, T, F), in at least float32."""
    dtype = accumulator(x.dtype)
    masked = jnp.where(is_real[..., None], x.astype(dtype), 0)
    return masked.sum(axis=1) / is_real.sum(axis=1, dtype=dtype)[:, None]
