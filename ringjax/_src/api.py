"""Public entry points: dilated attention on one device, on a ring, and inside a user's `shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from ringjax._src import debug, dropout, vjp
from ringjax._src.branches.protocol import Shard
from ringjax._src.comm.layout import layout_for, layout_named
from ringjax._src.comm.mesh import Ring, RingInfo, abstract_platform, axes, check_ring_options
from ringjax._src.comm.ring_comm import AxisName, StrategyName
from ringjax._src.kernels.dispatch import Implementation, check_implementation
from ringjax._src.kernels.interface import BlockSizes
from ringjax._src.pattern import DilationPattern
from ringjax._src.planning.plan import checked_plan
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.validation import AttentionShape, check_dropout, check_inputs, check_instance, check_positions
from ringjax._src.vma import match_vma

# An `AttentionSpec` that lacks what depends on the arrays of a device.
_MakeSpec = functools.partial[AttentionSpec]


def dilated_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    pattern: DilationPattern,
    *,
    is_causal: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    ring: Ring | None = None,
    implementation: Implementation | None = None,
    block_sizes: BlockSizes | None = None,
) -> Float[Array, "B T N H"]:
    """Computes exact dilated self-attention on one device or on a ring.

    In every branch of the pattern that selects its position, a query attends to the selected keys of its segment.
    The keys of all branches share one softmax, so a key selected by two branches counts twice. The output is 0 for a
    (position, head) pair that no branch selects. Time and memory are linear in T for patterns with constant work per
    token, such as `DilationPattern.geometric`.

    Supports reverse-mode differentiation, but not forward mode (`jax.jvp`). To avoid recomputing attention under
    `jax.checkpoint`, use a policy that saves the names ``"ringjax_out"`` and ``"ringjax_lse"``.

    Args:
        query: Queries. The number of query heads N must be a multiple of K.
        key: Keys. Query head ``n`` uses key/value head ``n // (N // K)``.
        value: Values.
        pattern: Segment lengths and dilation rates of the branches.
        is_causal: Whether a query attends only to keys at its own and earlier positions.
        segment_ids: Document ids: a query attends only to keys with its own id. Negative ids mark padding, which
            attends to nothing, is never attended to, and has output 0. Rows are selected by their position in the
            sequence, so a packed document gives the same result as the document alone only if it starts at a multiple
            of every segment length.
        seq_len: Length of the sequence without padding, at most T. Rows from `seq_len` on are padding as above, and
            segments are clamped to `seq_len`.
        scale: Factor applied to the scores; ``1 / sqrt(H)`` by default.
        dropout_rate: Probability of dropping an attention weight, in [0, 1). The remaining weights are divided by
            ``1 - dropout_rate``. The mask depends only on `dropout_rng`, batch entry, head, query, key and branch, so
            it is the same on every ring and in every layout. Dropout always runs in plain XLA.
        dropout_rng: A `jax.random` key; required if `dropout_rate` is above 0.
        ring: The devices that share the sequence, or None for a single device. With a ring, all arrays are in the
            ring's layout (see `to_layout`) and stay sharded over it.
        implementation: None selects the kernels of the platform that the program runs on where they apply, and plain
            XLA elsewhere (see `plan`). ``"xla"``, ``"pallas"`` (TPU and GPU) and ``"native"`` (CPU, compiled on first
            use) force one implementation. ``"interpret_tpu"`` and ``"interpret_gpu"`` interpret the Pallas kernels on
            any platform, slowly, for testing. The CPU kernels cannot be exported, so `jax.export` for CPU requires
            ``"xla"``. (Exporting for CUDA on a machine without a GPU requires an abstract device in the mesh and
            `DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")`.)
        block_sizes: Rows per block of the Pallas kernels, or None for the defaults.

    Returns:
        The attention output in the dtype of `query`, accumulated in at least float32.

    Raises:
        ValueError: If the arrays differ in dtype, `key` and `value` differ in shape, `query` differs from them in
            batch, length or head dimension, or N is not a multiple of K; if `seq_len` exceeds T; if an option is out
            of range; if `dropout_rng` is missing; or if the arrays do not fit the ring (length, batch or heads do not
            divide evenly, wrong devices or sharding, `memory_budget` too small).
        NotImplementedError: If `implementation` does not support the dtype, sizes, platform or dropout, or if a
            pattern with ``heads="split"`` runs with heads sharded over a mesh axis.

    Example:
        >>> import jax, ringjax as rj
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 8))
        >>> pattern = rj.DilationPattern(segment_lengths=(16, 64), dilation_rates=(1, 4))
        >>> rj.dilated_attention(q, k, v, pattern, is_causal=True).shape
        (1, 64, 4, 8)
    """
    shape = check_inputs(query, key, value, pattern, is_causal, segment_ids, seq_len, scale)
    make_spec = _spec_maker(pattern, is_causal, shape, dropout_rate, dropout_rng, implementation, block_sizes)
    if ring is None:
        check_positions(shape.batch, shape.length)
    else:
        check_instance("ring", ring, Ring).check(query, key, value, segment_ids)
    key_bits = _dropout_key_bits(dropout_rate, dropout_rng)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    debug.report_nan(query=query, key=key, value=value)
    if ring is None:
        out = _on_one_device(make_spec, shape, query, key, value, ids, key_bits)
    else:
        out = _sharded_attention(ring, make_spec, shape, query, key, value, ids, key_bits)
    debug.report_nan(output=out)
    return out


def count_tiles(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    pattern: DilationPattern,
    *,
    ring: Ring,
    is_causal: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    seq_len: int | None = None,
) -> Int[Array, "batch_shards ring_size head_shards"]:
    """Counts the score tiles that each device computes in the forward pass of `dilated_attention` in plain XLA.

    Args:
        query, key, value, pattern, ring, is_causal, segment_ids, seq_len: See `dilated_attention`.

    Returns:
        The number of tiles computed by each device. The tile size is fixed within a branch but differs between
        patterns, so compare devices with each other and not patterns.

    Raises:
        ValueError: If `ring` is not a `Ring`, or under the same conditions as `dilated_attention`.

    Example:
        >>> import jax, ringjax as rj
        >>> ring = rj.Ring(jax.sharding.Mesh(jax.devices()[:1], ("ring",)))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 8))
        >>> rj.count_tiles(q, k, v, rj.DilationPattern((16,), (1,)), ring=ring)
        Array([[[16]]], dtype=int32)
    """
    shape = check_inputs(query, key, value, pattern, is_causal, segment_ids, seq_len, None)
    check_instance("ring", ring, Ring).check(query, key, value, segment_ids)
    make_spec = _spec_maker(pattern, is_causal, shape, 0.0, None, "xla", None)

    def count(query: Array, key: Array, value: Array, ids: Array | None, key_bits: None) -> Array:
        spec, shard = _on_ring(make_spec, ring.info(), shape, query, key, value, ids, None)
        return vjp.count_tiles(spec, shard).reshape(1, 1, 1)

    return _sharded(ring, count, PartitionSpec(*ring.spec()[:3]), (query, key, value), segment_ids)


def ring_dilated_attention(
    query: Float[Array, "B T_local N H"],
    key: Float[Array, "B T_local K H"],
    value: Float[Array, "B T_local K H"],
    pattern: DilationPattern,
    *,
    axis_name: AxisName = "ring",
    layout: str = "contiguous",
    head_axis: AxisName | None = None,
    batch_axis: AxisName | None = None,
    is_causal: bool = False,
    segment_ids: Int[Array, "B T_local"] | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    strategy: StrategyName = "auto",
    memory_budget: int | None = None,
    implementation: Implementation | None = None,
    block_sizes: BlockSizes | None = None,
) -> Float[Array, "B T_local N H"]:
    """Computes dilated self-attention over a ring, for use inside your own `jax.shard_map`.

    Each device passes its shard of the sequence, of length ``T_local = T / ring_size``.

    Args:
        query: Queries of this device.
        key: Keys of this device.
        value: Values of this device.
        pattern: Segment lengths and dilation rates of the branches.
        axis_name: The mesh axis, or tuple of axes, over which the sequence is sharded.
        layout: Order of the sequence over the devices, ``"contiguous"`` or ``"zigzag"``.
        head_axis: The mesh axis over which the heads are sharded, if any.
        batch_axis: The mesh axis over which the batch is sharded, if any. Only dropout uses it.
        segment_ids: Document ids of this device's rows, see `dilated_attention`.
        seq_len: Length of the whole sequence without padding.
        is_causal, scale, implementation, block_sizes: See `dilated_attention`. Interpreted kernels require
            `check_vma=False`.
        dropout_rate, dropout_rng: See `dilated_attention`. All devices must pass the same key.
        strategy, memory_budget: See `Ring`.

    Returns:
        The attention output of this device's queries.

    Raises:
        ValueError: If `axis_name`, `head_axis` or `batch_axis` is not an axis of the surrounding `shard_map`, if
            two of them share an axis, if ``T_local`` is odd with the zigzag layout, or under the same conditions as
            `dilated_attention`.
        NotImplementedError: If `implementation` does not support the dtype, sizes, platform or dropout.

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
    make_spec = _spec_maker(pattern, is_causal, shape, dropout_rate, dropout_rng, implementation, block_sizes)
    key_bits = _dropout_key_bits(dropout_rate, dropout_rng)
    check_positions(*query.shape[:2])
    layout = layout_for(layout, ring_size)
    chunks = layout_named(layout).chunks
    if query.shape[1] % chunks:
        raise ValueError(
            f"`query` length per device must be a multiple of {chunks} for layout {layout!r}, got {query.shape[1]}."
        )
    platform = abstract_platform(jax.sharding.get_abstract_mesh())
    info = RingInfo(axis_name, ring_size, layout, strategy, memory_budget, head_axis, head_shards, platform)
    seeds = _seeds(key_bits, query, batch_axis, head_axis)
    debug.report_nan(query=query, key=key, value=value)
    spec, shard = _on_ring(make_spec, info, shape, query, key, value, segment_ids, seeds)
    out = vjp.attention(spec, *shard).reshape(query.shape)
    debug.report_nan(output=out)
    return out


def _on_one_device(
    make_spec: _MakeSpec,
    shape: AttentionShape,
    query: Array,
    key: Array,
    value: Array,
    ids: Array | None,
    key_bits: Array | None,
) -> Array:
    """Computes attention on one device, skipping the padding at the end of the sequence."""
    query, key, value = (x[:, : shape.length] for x in (query, key, value))
    ids = None if ids is None else ids[:, : shape.length]
    shard = _shard(query, key, value, ids, _seeds(key_bits, query, None, None))
    out = vjp.attention(_spec(make_spec, shard), *shard).reshape(query.shape)
    padding = shape.stored_length - shape.length
    return jnp.pad(out, [(0, 0), (0, padding), (0, 0), (0, 0)]) if padding else out


def _sharded_attention(
    ring: Ring,
    make_spec: _MakeSpec,
    shape: AttentionShape,
    query: Array,
    key: Array,
    value: Array,
    ids: Array | None,
    key_bits: Array | None,
) -> Array:
    """Computes attention of global arrays on the devices of a ring."""
    info = ring.info()
    is_checked = make_spec.keywords["implementation"] not in (
        "interpret_tpu",
        "interpret_gpu",
    )  # interpreted kernels lose the varying axes of their operands
    if all(ring.size(name) == 1 for name in ("axis_name", "batch_axis", "head_axis")):
        shard = jax.eval_shape(_shard, query, key, value, ids, None)
        checked_plan(_spec(make_spec, shard, info))  # checks the memory budget
        if not any(axis for x in (query, key, value) for axis in jax.typeof(x).sharding.spec):
            return _on_one_device(make_spec, shape, query, key, value, ids, key_bits)
        local = functools.partial(_on_one_device, make_spec, shape)  # shard_map removes explicit axes from the types
        return _sharded(ring, local, ring.spec(), (query, key, value), ids, key_bits, is_checked)

    def on_device(query: Array, key: Array, value: Array, ids: Array | None, key_bits: Array | None) -> Array:
        seeds = _seeds(key_bits, query, ring.batch_axis, ring.head_axis)
        spec, shard = _on_ring(make_spec, info, shape, query, key, value, ids, seeds)
        return vjp.attention(spec, *shard).reshape(query.shape)

    return _sharded(ring, on_device, ring.spec(), (query, key, value), ids, key_bits, is_checked)


def _sharded(
    ring: Ring,
    local: Callable[..., Array],
    out_spec: PartitionSpec,
    arrays: tuple[Array, Array, Array],
    ids: Array | None,
    key_bits: Array | None = None,
    check_vma: bool = True,
) -> Array:
    """Runs `local` on each device's shards of query, key, value and ids; the dropout key bits are replicated."""
    spec = ring.spec()
    specs = (spec, spec, spec, PartitionSpec(*spec[:2]), PartitionSpec())
    sharded = jax.shard_map(local, mesh=ring.mesh, in_specs=specs, out_specs=out_spec, check_vma=check_vma)
    return sharded(*arrays, ids, key_bits)


def _on_ring(
    make_spec: _MakeSpec,
    info: RingInfo,
    shape: AttentionShape,
    query: Array,
    key: Array,
    value: Array,
    ids: Array | None,
    seeds: Array | None,
) -> tuple[AttentionSpec, Shard]:
    """Returns spec and shard of one device inside `shard_map`, with padding marked by negative ids."""
    if ids is not None:
        if not jnp.can_cast(ids.dtype, jnp.int32):
            raise ValueError(f"`segment_ids` must have an integer dtype that fits int32 on a ring, got {ids.dtype}.")
        ids = ids.astype(jnp.int32)
    (query, key, value, _), ids = match_vma((query, key, value, lax.axis_index(info.axis_name)), ids)
    spec = _spec(make_spec, _shard(query, key, value, ids, seeds), info)
    if shape.length < shape.stored_length:
        spec = spec._replace(seq_len=shape.length, has_ids=True)
        given = jnp.zeros_like(query, shape=query.shape[:2], dtype=jnp.int32) if ids is None else ids
        ids = jnp.where(spec.local_positions()[None, :] < shape.length, given, -1)
    return spec, _shard(query, key, value, ids, seeds)


def _spec(make_spec: _MakeSpec, shard: Shard, info: RingInfo | None = None) -> AttentionSpec:
    """Returns the spec of an attention call of which a device holds this shard."""
    batch, length, kv_heads, q_per_kv, dim = shard.query.shape
    ring = {} if info is None else dataclasses.asdict(info)
    ring_size, head_shards = ring.pop("axis_size", 1), ring.get("head_shards", 1)
    return make_spec(
        seq_len=length * ring_size,
        stored_length=length * ring_size,
        batch=batch,
        kv_heads=kv_heads * head_shards,
        q_per_kv=q_per_kv,
        head_dim=dim,
        dtype=shard.query.dtype.name,
        has_ids=shard.ids is not None,
        ring_size=ring_size,
        **ring,
    )


def _shard(query: Array, key: Array, value: Array, ids: Array | None, seeds: Array | None) -> Shard:
    """Reshapes queries (B, T, N, H) to (B, T, K, G, H) and seeds (B, N) to (B, K, G)."""
    batch, length, _, dim = query.shape
    query = query.reshape(batch, length, key.shape[2], -1, dim)
    return Shard(query, key, value, ids, None if seeds is None else seeds.reshape(batch, key.shape[2], -1))


def _dropout_key_bits(rate: float, rng: Array | None) -> Array | None:
    """Returns the random bits of the dropout key, or None if dropout is inactive."""
    return None if rng is None or rate == 0 else dropout.key_bits(rng)


def _seeds(
    key_bits: Array | None, query: Array, batch_axis: AxisName | None, head_axis: AxisName | None
) -> Array | None:
    """Returns the seeds of this device's batch entries and heads, which are sharded over the given axes."""
    if key_bits is None:
        return None
    batch, _, heads, _ = query.shape
    batch_index, head_index = (0 if axis is None else lax.axis_index(axis) for axis in (batch_axis, head_axis))
    return dropout.seeds_of(
        key_bits, batch=batch, heads=heads, first_entry=batch_index * batch, first_head=head_index * heads
    )


def _axis_size(name: str, value: AxisName | None) -> int:
    try:
        return 1 if value is None else lax.axis_size(value)
    except NameError:
        raise ValueError(f"`{name}` must name axes of the `shard_map` around the call, got {axes(value)}.") from None


def _spec_maker(
    pattern: DilationPattern,
    is_causal: bool,
    shape: AttentionShape,
    dropout_rate: float,
    dropout_rng: Array | None,
    implementation: Implementation | None,
    block_sizes: BlockSizes | None,
) -> _MakeSpec:
    check_dropout(dropout_rate, dropout_rng)
    check_implementation(implementation, block_sizes)
    if dropout_rate > 0:
        if implementation not in (None, "xla"):
            raise NotImplementedError(
                '`implementation` must be None or "xla" with `dropout_rate` above 0, as the kernels do not support '
                f"dropout, got {implementation!r}."
            )
        if block_sizes is not None:
            raise ValueError(
                "`block_sizes` must be None with `dropout_rate` above 0, as the kernels do not support dropout, got "
                f"{block_sizes}."
            )
        implementation = "xla"
    return functools.partial(
        AttentionSpec,
        pattern=pattern,
        is_causal=is_causal,
        scale=shape.scale,
        dropout_rate=float(dropout_rate),
        implementation=implementation,
        block_sizes=block_sizes,
    )
