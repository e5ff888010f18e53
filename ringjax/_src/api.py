"""Public entry points: dilated attention on one device, on a ring, and inside a user's `shard_map`."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from ringjax._src import debug, sharded, vjp
from ringjax._src.branches.protocol import Shard
from ringjax._src.comm.axes import abstract_device, axes, check_ring_options, inner_size
from ringjax._src.comm.layout import layout_for, layout_named
from ringjax._src.comm.mesh import Ring, RingInfo
from ringjax._src.comm.order_checks import report_early_padding, report_split_documents
from ringjax._src.comm.ring_comm import AxisName, StrategyName
from ringjax._src.device_shard import by_kv_head, device_shard, dropout_seeds, wide_sinks
from ringjax._src.kernels.dispatch import Implementation, check_implementation
from ringjax._src.kernels.interface import BlockSizes
from ringjax._src.options import CallOptions, RingOptions
from ringjax._src.pattern import DilationPattern
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.validation import (
    AttentionShape,
    check_dropout,
    check_extra_keys,
    check_inputs,
    check_instance,
    check_positions,
)


@overload
def dilated_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    pattern: DilationPattern,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Float[Array, "B T N H"]: ...


@overload
def dilated_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    pattern: DilationPattern,
    *,
    return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]: ...


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
    sink_logits: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    ring: Ring | None = None,
    implementation: Implementation | None = None,
    block_sizes: BlockSizes | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
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
        seq_len: Length of the sequence without padding, at most T; `ring.seq_len` by default. Rows from `seq_len` on
            are padding as above, and segments are clamped to `seq_len`.
        scale: Factor applied to the scores; ``1 / sqrt(H)`` by default.
        dropout_rate: Probability of dropping an attention weight, in [0, 1). The remaining weights are divided by
            ``1 - dropout_rate``. The mask depends only on `dropout_rng`, batch entry, head, query, key and branch, so
            it is the same on every ring and in every layout. Dropout always runs in plain XLA.
        dropout_rng: A `jax.random` key; required if `dropout_rate` is above 0.
        sink_logits: Logit of an *attention sink* per query head, or None: an extra key whose value is zero, to which
            every query attends once, not once per branch. Differentiable. ``-inf`` is no sink. Dropout does not affect
            sinks.
        return_lse: Whether to return the log-sum-exp of each query's scores too. Differentiable, so that attention to
            other keys can be merged with it. Dropout does not affect it, and ``mixing="detached"`` does not detach it.
        ring: The devices that share the sequence. With a ring, all arrays are in its layout (see `Ring.shard`) and stay
            sharded over it. Without one, arrays on several devices are computed where they are: a sharded batch or
            sharded heads need no communication, and a sharded sequence is in sequence order. Under `jax.jit`, the
            arrays must have been placed on the devices, or their mesh set by `jax.set_mesh`.
        implementation: None selects the kernels of the platform that the program runs on where they apply, and plain
            XLA elsewhere (see `plan`). ``"xla"``, ``"pallas"`` (TPU and GPU) and ``"native"`` (CPU, compiled on first
            use) force one implementation. ``"interpret_tpu"`` and ``"interpret_gpu"`` interpret the Pallas kernels on
            any platform, slowly, for testing. The CPU kernels cannot be exported, so `jax.export` for CPU requires
            ``"xla"``. (Exporting for CUDA on a machine without a GPU requires an abstract device in the mesh and
            `DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")`.)
        block_sizes: Rows per block of the Pallas kernels, or None for the defaults.

    Returns:
        The attention output in the dtype of `query`, accumulated in at least float32. With `return_lse`, a tuple of the
        output and the log-sum-exp, which includes sinks and zero keys, in the dtype of the accumulator (at least
        float32); ``-inf`` for a query that attends to nothing, as padding.

    Raises:
        ValueError: If the arrays differ in dtype, `key` and `value` differ in shape, `query` differs from them in
            batch, length or head dimension, or N is not a multiple of K; if `seq_len` exceeds T or is not that of the
            ring; if an option is out of range; if `dropout_rng` is missing; if `sink_logits` does not have one entry
            per query head, or is used with ``mixing="detached"``; or if the arrays do not fit the ring (length, batch
            or heads do not divide evenly, wrong devices or sharding, not on a mesh in the zigzag layout,
            `memory_budget` too small).
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
    check_extra_keys(sink_logits, return_lse, query.shape[2], pattern)
    if ring is not None:
        length = check_instance("ring", ring, Ring).sequence_length(shape.stored_length, seq_len)
        shape = shape._replace(length=length or shape.length)
    spec = _spec(query, pattern, is_causal, shape, dropout_rate, dropout_rng, implementation, block_sizes)
    spec = spec._replace(has_sinks=sink_logits is not None, returns_lse=return_lse)
    if ring is not None:
        ring.check(query, key, value, segment_ids)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    seeds = dropout_seeds(dropout_rate, dropout_rng, query)
    debug.report_nan(query=query, key=key, value=value)
    if ids is not None:
        if ring is not None:
            report_split_documents(ring, ids)
        if pattern.padding == "zeros" and not is_causal:
            report_early_padding(ring, ids)
    shard = Shard(query, key, value, ids, seeds, wide_sinks(sink_logits, query))
    call = sharded.from_types(spec, shard) if ring is None else sharded.on_ring(spec, ring, shard)
    out = _on_one_device(spec, shard) if call is None else sharded.attention(call, call.placed(shard))
    debug.report_nan(output=jax.tree.leaves(out)[0])
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
    length = check_instance("ring", ring, Ring).sequence_length(shape.stored_length, seq_len)
    shape = shape._replace(length=length or shape.length)
    ring.check(query, key, value, segment_ids)
    spec, info = _spec(query, pattern, is_causal, shape, 0.0, None, "xla", None), ring.info()

    def count(query: Array, key: Array, value: Array, ids: Array | None) -> Array:
        return vjp.count_tiles(*device_shard(spec, info, Shard(query, key, value, ids))).reshape(1, 1, 1)

    arrays = ring.spec()
    specs = (arrays, arrays, arrays, PartitionSpec(*arrays[:2]))
    out_spec = PartitionSpec(*arrays[:3])
    return jax.shard_map(count, mesh=ring.mesh, in_specs=specs, out_specs=out_spec)(query, key, value, segment_ids)


@overload
def ring_dilated_attention(
    query: Float[Array, "B T_local N H"],
    key: Float[Array, "B T_local K H"],
    value: Float[Array, "B T_local K H"],
    pattern: DilationPattern,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[RingOptions],
) -> Float[Array, "B T_local N H"]: ...


@overload
def ring_dilated_attention(
    query: Float[Array, "B T_local N H"],
    key: Float[Array, "B T_local K H"],
    value: Float[Array, "B T_local K H"],
    pattern: DilationPattern,
    *,
    return_lse: Literal[True],
    **options: Unpack[RingOptions],
) -> tuple[Float[Array, "B T_local N H"], Float[Array, "B T_local N"]]: ...


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
    sink_logits: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    strategy: StrategyName = "auto",
    memory_budget: int | None = None,
    implementation: Implementation | None = None,
    block_sizes: BlockSizes | None = None,
) -> Float[Array, "B T_local N H"] | tuple[Float[Array, "B T_local N H"], Float[Array, "B T_local N"]]:
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
        sink_logits: See `dilated_attention`: the logits of this device's query heads.
        return_lse: See `dilated_attention`.
        strategy, memory_budget: See `Ring`.

    Returns:
        The attention output of this device's queries, and with `return_lse` their log-sum-exp.

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
    check_extra_keys(sink_logits, return_lse, query.shape[2], pattern)
    spec = _spec(query, pattern, is_causal, shape, dropout_rate, dropout_rng, implementation, block_sizes)
    spec = spec._replace(has_sinks=sink_logits is not None, returns_lse=return_lse)
    check_positions(*query.shape[:2])
    layout = layout_for(layout, ring_size)
    chunks = layout_named(layout).chunks
    if query.shape[1] % chunks:
        raise ValueError(
            f"`query` length per device must be a multiple of {chunks} for layout {layout!r}, got {query.shape[1]}."
        )
    device = abstract_device(jax.sharding.get_abstract_mesh())
    inner = inner_size(axis_name, {axis: lax.axis_size(axis) for axis in axes(axis_name)})
    info = RingInfo(axis_name, ring_size, layout, strategy, memory_budget, head_axis, head_shards, device, inner)
    seeds = dropout_seeds(dropout_rate, dropout_rng, query, batch_axis, head_axis)
    debug.report_nan(query=query, key=key, value=value)
    local_spec = spec._replace(kv_heads=spec.kv_heads * head_shards)
    given = Shard(query, key, value, segment_ids, seeds, wide_sinks(sink_logits, query))
    local_spec, shard = device_shard(local_spec, info, given)
    found = vjp.attention(local_spec, shard)
    debug.report_nan(output=jax.tree.leaves(found)[0])
    if not return_lse:
        return found.reshape(query.shape)
    return found[0].reshape(query.shape), found[1].reshape(query.shape[:3])


def _on_one_device(spec: AttentionSpec, given: Shard) -> vjp.Result:
    """Computes attention on one device, skipping the padding at the end of the sequence."""
    shape, length = given.query.shape, spec.seq_len
    check_positions(shape[0], length)
    query, key, value = (x[:, :length] for x in (given.query, given.key, given.value))
    ids = None if given.ids is None else given.ids[:, :length]
    shard = by_kv_head(given._replace(query=query, key=key, value=value, ids=ids))
    spec = spec._replace(stored_length=length, has_ids=ids is not None)
    padding = [(0, 0), (0, shape[1] - length), (0, 0), (0, 0)]
    pad = lambda x, fill: jnp.pad(x, padding[: x.ndim], constant_values=fill) if length < shape[1] else x  # noqa: E731
    found = vjp.attention(spec, shard)
    out = pad((found[0] if spec.returns_lse else found).reshape(shape[0], length, *shape[2:]), 0)
    return (out, pad(found[1].reshape(shape[0], length, shape[2]), -jnp.inf)) if spec.returns_lse else out


def _axis_size(name: str, value: AxisName | None) -> int:
    try:
        return 1 if value is None else lax.axis_size(value)
    except NameError:
        raise ValueError(f"`{name}` must name axes of the `shard_map` around the call, got {axes(value)}.") from None


def _spec(
    query: Array,
    pattern: DilationPattern,
    is_causal: bool,
    shape: AttentionShape,
    dropout_rate: float,
    dropout_rng: Array | None,
    implementation: Implementation | None,
    block_sizes: BlockSizes | None,
) -> AttentionSpec:
    """Checks the options of a call and returns its description, for one device."""
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
    return AttentionSpec(
        pattern=pattern,
        seq_len=shape.length,
        stored_length=shape.stored_length,
        batch=shape.batch,
        kv_heads=shape.kv_heads,
        q_per_kv=shape.q_per_kv,
        head_dim=shape.dim,
        is_causal=is_causal,
        dtype=query.dtype.name,
        has_ids=False,
        scale=shape.scale,
        dropout_rate=float(dropout_rate),
        implementation=implementation,
        block_sizes=block_sizes,
    )
