"""Dilated attention, the verb: on one device, on a ring of them, and inside a user's own `shard_map`.

Legend: ``B`` batch, ``T`` length, ``N`` query heads, ``K`` key/value heads, ``H`` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ringjax._src import debug, dropout
from ringjax._src import vjp as joint
from ringjax._src.comm.layout import layout_for, layout_named
from ringjax._src.comm.mesh import Ring, RingPlace, axes, check_ring_options
from ringjax._src.comm.ring_comm import AxisName, StrategyName
from ringjax._src.kernels.backend import Backend, Implementation, check_backend
from ringjax._src.kernels.kernel import BlockSizes
from ringjax._src.pattern import DilationPattern
from ringjax._src.validation import AttentionShape, check_dropout, check_inputs, check_instance, check_positions
from ringjax._src.vjp import Config
from ringjax._src.vma import match_vma


def dilated_attention(
    query: Array,
    key: Array,
    value: Array,
    pattern: DilationPattern,
    *,
    is_causal: bool = False,
    segment_ids: Array | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    ring: Ring | None = None,
    implementation: Implementation | None = None,
    block_sizes: BlockSizes | None = None,
) -> Array:
    """Dilated self-attention, exact and linear in the length for patterns of constant work per token.

    Each query sees, in every branch of the pattern that selects its position, the selected keys of its own
    segment; all these keys enter one softmax, and a key seen in two branches counts twice. A (position, head)
    that no branch selects gives 0. Reverse-mode differentiable; forward mode (`jax.jvp`) is not defined. Under
    `jax.checkpoint`, the names "ringjax_out" and "ringjax_lse" tell a policy what to keep to save the recomputation.

    Args:
        query: Queries (B, T, N, H).
        key: Keys (B, T, K, H), N a multiple of K: query head ``n`` uses key/value head ``n // (N // K)``.
        value: Values, the shape of `key`.
        pattern: The branches.
        is_causal: Whether a query sees only keys at its own position and before.
        segment_ids: Integers (B, T): a query sees only keys with its own id; ids below 0 are padding, which sees
            nothing, is seen by nobody and gives 0. Rows are selected by position in the sequence, so a packed document
            equals the same document alone only if it starts at a multiple of every segment length.
        seq_len: True length, at most T: later rows are padding as above, and segments are clamped to it.
        scale: Factor on the scores, ``1 / sqrt(H)`` by default.
        dropout_rate: Share of the attention weights that is dropped, below 1; the others are divided by what is left.
            Which ones is a function of `dropout_rng`, batch entry, head, query, key and branch: the same on any ring
            and in any layout. In plain XLA only.
        dropout_rng: A key of `jax.random`, where `dropout_rate` is above 0.
        ring: The devices that share the sequence, or None for one device. All arrays are then in the ring's layout
            (`to_layout`), and stay sharded over it.
        implementation: None for the kernels of the platform on which the program runs where they apply, and plain XLA
            elsewhere (see `plan`); ``"xla"``, ``"pallas"`` (TPU and GPU) or ``"native"`` (CPU, compiled at first use)
            to insist; ``"interpret_tpu"`` and ``"interpret_gpu"`` interpret the Pallas kernels on any platform, slowly,
            to check them. The kernels on CPU cannot be exported: `jax.export` for CPU takes ``"xla"``. (To export for
            CUDA where there is no GPU, JAX wants an abstract device in the mesh, and
            `DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")`.)
        block_sizes: Rows per block of the Pallas kernels, or None for our choice.

    Returns:
        The attention (B, T, N, H) in the dtype of `query`; sums are taken in at least float32.

    Raises:
        ValueError: If an argument is not as described.
        NotImplementedError: If `implementation` cannot do this case.

    Example:
        >>> import jax, ringjax as rj
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 8))
        >>> pattern = rj.DilationPattern(segment_lengths=(16, 64), dilation_rates=(1, 4))
        >>> rj.dilated_attention(q, k, v, pattern, is_causal=True).shape
        (1, 64, 4, 8)
    """
    shape = check_inputs(query, key, value, pattern, is_causal, segment_ids, seq_len, scale)
    config = _config(pattern, is_causal, shape, dropout_rate, dropout_rng, implementation, block_sizes)
    if ring is None:
        check_positions(shape.batch, shape.length)
    else:
        check_instance("ring", ring, Ring).check(query, key, value, segment_ids)
    key_bits = _dropout_key_bits(dropout_rate, dropout_rng)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    debug.report_nan(query=query, key=key, value=value)
    if ring is None:
        out = _on_one_device(config, shape, query, key, value, ids, key_bits)
    else:
        out = _sharded_attention(ring, config, shape, query, key, value, ids, key_bits)
    debug.report_nan(output=out)
    return out


def count_tiles(
    query: Array,
    key: Array,
    value: Array,
    pattern: DilationPattern,
    *,
    ring: Ring,
    is_causal: bool = False,
    segment_ids: Array | None = None,
    seq_len: int | None = None,
) -> Array:
    """Runs the forward pass of `dilated_attention` and counts the work of each device while it runs.

    Args:
        query, key, value, pattern, ring, is_causal, segment_ids, seq_len: As for `dilated_attention`.

    Returns:
        Tiles of scores that each device computed, integers (batch shards, ring size, head shards). A tile has a fixed
        number of rows and keys within a branch; compare devices with each other, not patterns.

    Raises:
        ValueError: If an argument is not as described.

    Example:
        >>> import jax, ringjax as rj
        >>> ring = rj.Ring(jax.sharding.Mesh(jax.devices()[:1], ("ring",)))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 8))
        >>> rj.count_tiles(q, k, v, rj.DilationPattern((16,), (1,)), ring=ring)
        Array([[[16]]], dtype=int32)
    """
    shape = check_inputs(query, key, value, pattern, is_causal, segment_ids, seq_len, None)
    check_instance("ring", ring, Ring).check(query, key, value, segment_ids)
    place = ring.place()

    def local(query: Array, key: Array, value: Array, ids: Array | None, key_bits: None) -> Array:
        config = Config(pattern, is_causal, shape.scale, Backend("xla"))
        given = _prepared(config, place, shape, query, key, value, ids, key_bits)
        return joint.count_tiles(*given[:5]).reshape(1, 1, 1)

    return _sharded(ring, local, PartitionSpec(*ring.spec()[:3]), (query, key, value), segment_ids)


def ring_dilated_attention(
    query: Array,
    key: Array,
    value: Array,
    pattern: DilationPattern,
    *,
    axis_name: AxisName = "ring",
    layout: str = "contiguous",
    head_axis: AxisName | None = None,
    batch_axis: AxisName | None = None,
    is_causal: bool = False,
    segment_ids: Array | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    strategy: StrategyName = "auto",
    memory_budget: int | None = None,
    implementation: Implementation | None = None,
    block_sizes: BlockSizes | None = None,
) -> Array:
    """Dilated self-attention over a ring, for use inside your own `jax.shard_map`.

    Args:
        query: This device's queries (B, T / p, N, H).
        key: This device's keys (B, T / p, K, H).
        value: This device's values, the shape of `key`.
        pattern: The branches.
        axis_name: The mesh axis over which the sequence is sharded, or several, taken together.
        layout: Order of the sequence over the devices, ``"contiguous"`` or ``"zigzag"``.
        head_axis: The mesh axis over which the heads are sharded, if any.
        batch_axis: The mesh axis over which the batch is sharded, if any; only dropout has to know.
        segment_ids: This device's integers (B, T / p).
        seq_len: True length of the whole sequence.
        is_causal, scale, implementation, block_sizes: As for `dilated_attention`; interpreted kernels need
            `check_vma=False`.
        dropout_rate, dropout_rng: As for `dilated_attention`; the same key on all devices.
        strategy, memory_budget: As for `Ring`.

    Returns:
        This device's attention (B, T / p, N, H).

    Raises:
        ValueError: If an argument is not as described.
        NotImplementedError: If `implementation` cannot do this case.

    Example:
        >>> import jax, ringjax as rj
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("ring",))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 8))
        >>> pattern = rj.DilationPattern((16, 64), (1, 4))
        >>> spec = jax.P(None, "ring")
        >>> f = lambda q, k, v: rj.ring_dilated_attention(q, k, v, pattern, axis_name="ring")
        >>> jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(q, k, v).shape
        (1, 64, 4, 8)
    """
    named = {"axis_name": axis_name, "head_axis": head_axis, "batch_axis": batch_axis}
    check_ring_options(named, layout, strategy, memory_budget)
    ring_size, head_shards = _axis_size("axis_name", axis_name), _axis_size("head_axis", head_axis)
    _axis_size("batch_axis", batch_axis)
    shape = check_inputs(query, key, value, pattern, is_causal, segment_ids, seq_len, scale, shards=ring_size)
    config = _config(pattern, is_causal, shape, dropout_rate, dropout_rng, implementation, block_sizes)
    key_bits = _dropout_key_bits(dropout_rate, dropout_rng)
    check_positions(*query.shape[:2])
    layout = layout_for(layout, ring_size)
    chunks = layout_named(layout).chunks
    if query.shape[1] % chunks:
        raise ValueError(
            f"`query` length per device must be a multiple of {chunks} for layout {layout!r}, got {query.shape[1]}."
        )
    place = RingPlace(axis_name, ring_size, layout, strategy, memory_budget, head_axis, head_shards)
    seeds = _seeds(key_bits, query, batch_axis, head_axis)
    debug.report_nan(query=query, key=key, value=value)
    out = _on_ring(config, place, shape, query, key, value, segment_ids, seeds)
    debug.report_nan(output=out)
    return out


def _on_one_device(
    config: Config,
    shape: AttentionShape,
    query: Array,
    key: Array,
    value: Array,
    ids: Array | None,
    key_bits: Array | None,
) -> Array:
    """All arrays whole: padding at the end is left out of the work."""
    query, key, value = (x[:, : shape.length] for x in (query, key, value))
    ids = None if ids is None else ids[:, : shape.length]
    seeds = _grouped_seeds(_seeds(key_bits, query, None, None), key)
    out = joint.attention(config, _grouped(query, key), key, value, ids, seeds).reshape(query.shape)
    padding = shape.stored_length - shape.length
    return jnp.pad(out, [(0, 0), (0, padding), (0, 0), (0, 0)]) if padding else out


def _sharded_attention(
    ring: Ring,
    config: Config,
    shape: AttentionShape,
    query: Array,
    key: Array,
    value: Array,
    ids: Array | None,
    key_bits: Array | None,
) -> Array:
    """Whole arrays on the devices of a ring."""
    place = ring.place()
    if all(ring.size(name) == 1 for name in ("axis_name", "batch_axis", "head_axis")):
        whole = jax.eval_shape(_grouped, query, key)
        dataclasses.replace(config, ring=place).plan(whole, ids is not None)  # checks the memory budget
        if not any(axis for x in (query, key, value) for axis in jax.typeof(x).sharding.spec):
            return _on_one_device(config, shape, query, key, value, ids, key_bits)
        alone = functools.partial(_on_one_device, config, shape)  # explicit axes: shard_map takes them off the types
        return _sharded(ring, alone, ring.spec(), (query, key, value), ids, key_bits, not config.backend.is_interpreted)

    def local(query: Array, key: Array, value: Array, ids: Array | None, key_bits: Array | None) -> Array:
        seeds = _seeds(key_bits, query, ring.batch_axis, ring.head_axis)
        return _on_ring(config, place, shape, query, key, value, ids, seeds)

    is_checked = not config.backend.is_interpreted  # interpreted kernels lose track of what varies
    return _sharded(ring, local, ring.spec(), (query, key, value), ids, key_bits, is_checked)


def _sharded(
    ring: Ring,
    local: Callable[..., Array],
    out_spec: PartitionSpec,
    arrays: tuple[Array, Array, Array],
    ids: Array | None,
    key_bits: Array | None = None,
    check_vma: bool = True,
) -> Array:
    """`local` on each device's share of query, key, value and ids, and on the key_bits of dropout."""
    spec = ring.spec()
    specs = (spec, spec, spec, PartitionSpec(*spec[:2]), PartitionSpec())
    sharded = jax.shard_map(local, mesh=ring.mesh, in_specs=specs, out_specs=out_spec, check_vma=check_vma)
    return sharded(*arrays, ids, key_bits)


def _on_ring(
    config: Config,
    place: RingPlace,
    shape: AttentionShape,
    query: Array,
    key: Array,
    value: Array,
    ids: Array | None,
    seeds: Array | None,
) -> Array:
    """What each device does inside `shard_map`."""
    return joint.attention(*_prepared(config, place, shape, query, key, value, ids, seeds)).reshape(query.shape)


def _prepared(
    config: Config,
    place: RingPlace,
    shape: AttentionShape,
    query: Array,
    key: Array,
    value: Array,
    ids: Array | None,
    seeds: Array | None,
) -> tuple[Config, Array, Array, Array, Array | None, Array | None]:
    """A device's share as `joint` takes it; padding at the end of the sequence gets ids of its own."""
    config = dataclasses.replace(config, ring=place)
    if ids is not None:
        if not jnp.can_cast(ids.dtype, jnp.int32):
            raise ValueError(f"`segment_ids` must be of an integer dtype that fits int32 on a ring, got {ids.dtype}.")
        ids = ids.astype(jnp.int32)
    if shape.length < shape.stored_length:
        config = dataclasses.replace(config, seq_len=shape.length)
        given = jnp.zeros(query.shape[:2], jnp.int32) if ids is None else ids
        inside = place.positions(query.shape[1]) < shape.length
        ids = jnp.where(inside[None, :], given, -1)
    (query, key, value, _), ids = match_vma((query, key, value, lax.axis_index(place.axis_name)), ids)
    return config, _grouped(query, key), key, value, ids, _grouped_seeds(seeds, key)


def _grouped(query: Array, key: Array) -> Array:
    """Queries (B, T, N, H) as (B, T, K, G, H)."""
    batch, length, heads, dim = query.shape
    return query.reshape(batch, length, key.shape[2], heads // key.shape[2], dim)


def _grouped_seeds(seeds: Array | None, key: Array) -> Array | None:
    """Seeds (B, N) as (B, K, G)."""
    return None if seeds is None else seeds.reshape(seeds.shape[0], key.shape[2], -1)


def _dropout_key_bits(rate: float, rng: Array | None) -> Array | None:
    """The two key_bits to which the key of an active dropout comes down."""
    return None if rng is None or rate == 0 else dropout.key_bits(rng)


def _seeds(
    key_bits: Array | None, query: Array, batch_axis: AxisName | None, head_axis: AxisName | None
) -> Array | None:
    """The seeds of the batch entries and heads that are here, where entries and heads are sharded over these axes."""
    if key_bits is None:
        return None
    batch, _, heads, _ = query.shape
    nth = [0 if axis is None else lax.axis_index(axis) for axis in (batch_axis, head_axis)]
    return dropout.seeds_of(key_bits, batch, heads, nth[0] * batch, nth[1] * heads)


def _axis_size(name: str, value: AxisName | None) -> int:
    try:
        return 1 if value is None else lax.axis_size(value)
    except NameError:
        raise ValueError(f"`{name}` must name axes of the `shard_map` around the call, got {axes(value)}.") from None


def _config(
    pattern: DilationPattern,
    is_causal: bool,
    shape: AttentionShape,
    dropout_rate: float,
    dropout_rng: Array | None,
    implementation: Implementation | None,
    block_sizes: BlockSizes | None,
) -> Config:
    check_dropout(dropout_rate, dropout_rng)
    backend = check_backend(implementation, block_sizes)
    if dropout_rate > 0:
        if implementation not in (None, "xla"):
            raise NotImplementedError(
                f'`implementation` must be None or "xla" with `dropout_rate` above 0, which the kernels do not have, '
                f"got {implementation!r}."
            )
        if block_sizes is not None:
            raise ValueError(
                "`block_sizes` must be None with `dropout_rate` above 0, which the kernels do not have, got "
                f"{block_sizes}."
            )
        backend = Backend("xla")
    return Config(pattern, is_causal, shape.scale, backend, dropout_rate=float(dropout_rate))
