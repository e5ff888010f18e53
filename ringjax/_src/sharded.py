"""Attention on arrays that several devices share: the custom VJP around `shard_map` or the compiler's partitioning.

Where the shardings of arrays are known (a `Ring`, or the types of arrays on an explicit mesh), each pass runs in
`jax.shard_map`. On an automatic mesh the compiler chooses shardings when it partitions the program, so each pass is a
`custom_partitioning`: given how the compiler shards batch, sequence and heads, it returns the program of one device,
with all communication. Both get the leading axes of `jax.vmap` from `batched_call`.

Shapes: query, out (..., B, T, N, H); key, value (..., B, T, K, H); lse (..., B, T, N); ids (..., B, T);
seeds and sinks (..., B, N).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ringjax._src import vjp
from ringjax._src.batched_call import Leading, batched_call
from ringjax._src.branches.protocol import Shard
from ringjax._src.comm.axes import abstract_device, axes, explicit_axes, inner_size, reshard_explicit
from ringjax._src.comm.devices import device_named, device_of_kind
from ringjax._src.comm.mesh import Ring, RingInfo
from ringjax._src.comm.ordering import after
from ringjax._src.comm.ring_comm import AxisName
from ringjax._src.device_shard import device_shard, narrow_ids, ring_spec
from ringjax._src.planning.plan import checked_plan
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.validation import check_positions

_QUERY, _KEY, _LSE, _IDS, _HEADS = "b t n h", "b t k h", "b t n", "b t", "b n"  # axes of arrays, see above
_LOGGER = logging.getLogger("ringjax")
_SHARD = {"query": _QUERY, "key": _KEY, "value": _KEY, "ids": _IDS, "seeds": _HEADS, "sink": _HEADS}  # of a `Shard`


@dataclasses.dataclass(frozen=True)
class ShardedCall:
    """An attention call on arrays that several devices share."""

    spec: AttentionSpec  # the call; its sizes are those of the whole arrays
    mesh: Mesh | AbstractMesh | None = None  # the mesh, or None if the compiler decides
    info: RingInfo | None = None  # the ring, or None if the compiler decides
    batch_axis: AxisName | None = None  # mesh axes of the batch

    def placed(self, shard: Shard) -> Shard:
        """Shards arrays that are replicated on an explicit mesh, as `shard_map` requires the sharding of its specs."""
        shard = shard._replace(ids=None if shard.ids is None else narrow_ids(shard.ids))
        mesh = self.mesh
        if mesh is None or not explicit_axes(mesh):
            return shard
        place = lambda name: reshard_explicit(getattr(shard, name), mesh, self.partition_spec(_SHARD[name]))  # noqa: E731
        return shard._replace(**{name: place(name) for name in _given(shard)})

    def partition_spec(self, array: str, leading: Leading = ()) -> PartitionSpec:
        """Returns how an array with these axes is sharded."""
        names = self.names()
        return PartitionSpec(*leading, *(names.get(axis) for axis in array.split()))

    def names(self) -> dict[str, AxisName | None]:
        """Returns the mesh axes of each array axis, where they are known."""
        assert self.info is not None
        heads = self.info.head_axis
        return {"b": self.batch_axis, "t": self.info.axis_name, "n": heads, "k": heads}


def on_ring(spec: AttentionSpec, ring: Ring, shard: Shard) -> ShardedCall | None:
    """Returns the call on the devices of a ring, or None if that is a single device."""
    info = ring.info()
    if all(ring.size(name) == 1 for name in ("axis_name", "batch_axis", "head_axis")):
        checked_plan(ring_spec(spec, info, batch=spec.batch))  # checks the memory budget
        if not any(axis for x in shard[:3] for axis in jax.typeof(x).sharding.spec):
            return None  # otherwise, shard_map removes the explicit axes from the types
    return ShardedCall(spec, ring.resolve(), info, ring.batch_axis)


def from_types(spec: AttentionSpec, shard: Shard) -> ShardedCall | None:
    """Returns the call on the mesh of the arrays, or None if they are on a single device or inside `shard_map`."""
    ambient = jax.sharding.get_abstract_mesh()  # the types of arguments of `jit(in_shardings=...)` have no mesh
    mesh = next((m for x in shard[:3] if not (m := jax.typeof(x).sharding.mesh).empty), ambient)
    if mesh.empty or mesh.size == 1 or mesh.manual_axes or ambient.manual_axes:
        return None
    if not mesh.explicit_axes:
        device = mesh.abstract_device
        return ShardedCall(spec) if device is not None and _is_partitioned(device.platform) else None
    query, *others = (_padded_spec(x) for x in shard[:3])
    for name, given in zip(("key", "value"), others, strict=True):
        if given != query:
            raise ValueError(
                f"`{name}` must be sharded like `query` over an explicit mesh, got {given} and {query}: use "
                "`jax.reshard`, or pass `out_sharding` where it is computed."
            )
    batch, sequence, heads, dim = query
    if dim is not None:
        raise ValueError(f"`query` must not be sharded along its last axis, got {query}: use `jax.reshard`.")
    info = _ring_info(mesh, abstract_device(mesh), sequence, heads)
    for what, size, devices in (
        ("length", spec.stored_length, info.axis_size),
        ("heads", spec.kv_heads, info.head_shards),
    ):
        if size % devices:
            raise ValueError(f"`key` {what} must divide evenly over the {devices} devices of {query}, got {size}.")
    return ShardedCall(spec, mesh, info, batch)


def _is_partitioned(platform: str) -> bool:
    """Returns whether compilers of a platform call partitioning rules.

    Those for TPUs do not (https://github.com/jax-ml/jax/issues/38196); there, the kernels raise an error.
    """
    return platform != "tpu"


def _padded_spec(x: Array) -> PartitionSpec:
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: ShardedCall, shard: Shard) -> vjp.Result:
    call = dataclasses.replace(call, spec=vjp.without_gradient(call.spec))
    return _attention_fwd(call, shard)[0]


attention = jax.jit(_attention, static_argnums=(0,), inline=True)


def _attention_fwd(call: ShardedCall, shard: Shard) -> tuple[vjp.Result, Any]:
    out, lse, *kept = batched_call(_Pass(call, _given(shard), is_backward=False), (), *jax.tree.leaves(shard))
    kept = [checkpoint_name(x, "ringjax_out") for x in kept]
    out, lse = checkpoint_name(out, "ringjax_out"), checkpoint_name(lse, "ringjax_lse")
    return (out, lse) if call.spec.returns_lse else out, (shard, out, lse, kept)


def _attention_bwd(call: ShardedCall, saved: Any, cotangents: vjp.Result) -> tuple[Shard]:  # noqa: ANN401
    shard, out, lse, kept = saved
    backward = _Pass(call, _given(shard), is_backward=True)
    given = cotangents if call.spec.returns_lse else [cotangents]
    dq, dk, dv, *dsink = batched_call(backward, (), *jax.tree.leaves(shard), out, lse, *given, *kept)
    return (Shard(dq, dk, dv, sink=dsink[0] if dsink else None),)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _given(shard: Shard) -> tuple[str, ...]:
    """Returns the names of the arrays that are not None."""
    return tuple(name for name in _SHARD if getattr(shard, name) is not None)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The forward or the backward pass as a function of arrays with any number of leading axes."""

    call: ShardedCall
    given: tuple[str, ...]  # names of the arrays of the `Shard`
    is_backward: bool

    def with_leading(self, leading: Leading) -> Callable[..., Sequence[Array]]:
        """Returns the pass in `shard_map` if all shardings are known, else partitioned by the compiler."""
        call = self.call
        if call.info is None:
            return _partitioned(self, len(leading))
        assert call.mesh is not None
        is_known = None not in leading or AxisType.Auto not in call.mesh.axis_types
        is_known = is_known or not _is_partitioned(device_named(call.info.device).platform)
        # No transformation of the pass itself needs varying axes, and `vmap(spmd_axis_name=...)` adds axes to them.
        return _in_shard_map(self, leading, False) if is_known else _partitioned(self, len(leading))

    def differentiable(self, leading: Leading) -> Callable[..., Sequence[Array]]:
        """Returns the pass in `shard_map`, or of a single device."""
        if self.call.info is None:
            return _on_one_device(self, len(leading))
        is_checked = not self.call.spec.attend_config.is_interpreted  # interpreted kernels lose varying axes
        return _in_shard_map(self, leading, is_checked)

    @property
    def arguments(self) -> list[str]:
        """The axes of the arguments, except for output rows that branches keep."""
        residuals = [_QUERY, _LSE, _QUERY] if self.is_backward else []
        if self.is_backward and self.call.spec.returns_lse:
            residuals.append(_LSE)
        return [*(_SHARD[name] for name in self.given), *residuals]

    @property
    def results(self) -> list[str]:
        """The axes of the results, except for output rows that branches keep."""
        if not self.is_backward:
            return [_QUERY, _LSE]
        return [_QUERY, _KEY, _KEY, *([_HEADS] if "sink" in self.given else [])]

    def on_device(self, info: RingInfo | None, leading: int, *arrays: Array, keeps: bool) -> list[Array]:
        """Runs the pass on the arrays of a device.

        Args:
            info: The ring, or None.
            leading: Number of leading axes; they are merged with the batch.
            *arrays: The arrays that `arguments` lists, and what branches kept.
            keeps: Whether branches keep output rows with ``mixing="detached"``; otherwise they are recomputed.
        """
        num, shapes = len(self.arguments), [x.shape for x in arrays]
        found = iter([*(x.reshape(-1, *x.shape[leading + 1 :]) for x in arrays[:num]), *arrays[num:]])
        given = Shard(**{name: next(found) for name in self.given})
        check_positions(*given.query.shape[:2])
        spec, shard = device_shard(self.call.spec, info, given)
        query_shape = shard.query.shape
        if not self.is_backward:
            saved = vjp.forward(spec, shard)
            kept = jax.tree.leaves(saved.kept) if keeps else []
            return [saved.out.reshape(shapes[0]), saved.lse.reshape(shapes[0][:-1]), *kept]
        out, lse, dout = (next(found) for _ in range(3))
        dlse = next(found).reshape(query_shape[:-1]) if spec.returns_lse else None
        of_branches: Any = []
        if spec.pattern.mixing == "detached":
            forward = functools.partial(vjp.forward, spec)
            of_branches = (
                jax.tree.unflatten(jax.tree.structure(jax.eval_shape(forward, shard).kept), found)
                if keeps
                else (forward(shard).kept)
            )
        saved = vjp.Saved(shard, out.reshape(query_shape), lse.reshape(query_shape[:-1]), of_branches)
        *grads, _, _, dsink, _ = vjp.backward(spec, saved, dout.reshape(query_shape), dlse)
        grads = [x.reshape(shape) for x, shape in zip(grads, shapes, strict=False)]
        if dsink is None:
            return grads
        dsink = dsink.reshape(shapes[self.given.index("sink")])
        if spec.axis_name is None:
            return [*grads, dsink]
        dsink = lax.psum(dsink, spec.axis_name)
        return [*after(grads, dsink, spec.axis_name), dsink]


# The functions below are cached, because JAX finds traced functions by their identity.


@functools.lru_cache(maxsize=256)
def _on_one_device(run: _Pass, leading: int) -> Callable[..., Sequence[Array]]:
    return lambda *arrays: run.on_device(None, leading, *arrays, keeps=False)


@functools.lru_cache(maxsize=256)
def _in_shard_map(run: _Pass, leading: Leading, is_checked: bool) -> Callable[..., Sequence[Array]]:
    call = run.call
    used = tuple(axis for name in (*leading, *call.names().values()) for axis in axes(name))
    everywhere = PartitionSpec(tuple(dict.fromkeys(used)) or None)  # rows that a device keeps for itself

    def local(arrays: Sequence[Array], kept: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        keeps = call.spec.pattern.mixing == "detached"
        found = run.on_device(call.info, len(leading), *arrays, *kept, keeps=keeps)
        return found[: len(run.results)], found[len(run.results) :]

    sharded = jax.shard_map(
        local,
        mesh=call.mesh,
        in_specs=([call.partition_spec(x, leading) for x in run.arguments], everywhere),
        out_specs=([call.partition_spec(x, leading) for x in run.results], everywhere),
        check_vma=is_checked,
    )

    def apply(*arrays: Array) -> list[Array]:
        num = len(run.arguments)
        found, kept = sharded(list(arrays[:num]), list(arrays[num:]))
        return [*found, *kept]

    return apply


@functools.lru_cache(maxsize=256)
def _partitioned(run: _Pass, leading: int) -> Callable[..., Sequence[Array]]:
    """Returns the pass as an operation whose sharding the compiler chooses."""
    partition = custom_partitioning(jax.jit(run.differentiable((None,) * leading)))  # jit hides constants
    q_per_kv = run.call.spec.q_per_kv
    heads = {"n": "(k g)" if q_per_kv > 1 else "k"}
    factors = lambda array: " ".join([*(f"v{i}" for i in range(leading)), *(heads.get(x, x) for x in array.split())])  # noqa: E731
    rule = f"{', '.join(map(factors, run.arguments))} -> {', '.join(map(factors, run.results))}"
    is_split = run.call.spec.pattern.heads == "split"
    whole = (*(("k",) if is_split else ()), *(("g",) if q_per_kv > 1 else ()), "h")  # in the order of the rule
    partition.def_partition(
        functools.partial(_partition, run, leading),
        sharding_rule=rule,
        need_replication_factors=whole,
        **({"g": q_per_kv} if q_per_kv > 1 else {}),
    )
    return partition


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Logs errors of a partitioning rule, which the compiler hides in the middle of a long message."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        _LOGGER.error("ringjax: %s", error)
        raise


@_logged()
def _partition(
    run: _Pass, leading: int, mesh: Mesh, arguments: Sequence[jax.ShapeDtypeStruct], results: object
) -> tuple[Mesh, Callable[..., Sequence[Array]], list[NamedSharding], tuple[NamedSharding, ...]]:
    """Returns the program of a device for the shardings that the compiler has chosen."""
    del results  # sharded like the arguments
    call, query, sharding = run.call, arguments[0], arguments[0].sharding
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            "`query` must be sharded over a mesh that JAX knows of when it traces `dilated_attention`: use "
            f"`jax.set_mesh(mesh)`, got {sharding}."
        )
    spec = [*sharding.spec, *(None,) * (query.ndim - len(sharding.spec))]
    if call.info is None:
        names = dict(zip("btn", spec[leading:], strict=False)) | {"k": spec[leading + 2]}
        first = mesh.devices.flat[0]
        info = _ring_info(mesh, device_of_kind(first.platform, first.device_kind), names["t"], names["k"])
    else:
        names, info = call.names(), call.info
    taken = {axis for name in names.values() for axis in axes(name)}
    front = [tuple(axis for axis in axes(name) if axis not in taken) for name in spec[:leading]]
    _check_divides(mesh, dict(zip(("batch", "length"), query.shape[leading:], strict=False)), names)
    place = lambda array: NamedSharding(mesh, PartitionSpec(*front, *(names.get(x) for x in array.split())))  # noqa: E731
    local = _logged()(functools.partial(run.on_device, info, leading, keeps=False))
    return mesh, local, [place(x) for x in run.results], tuple(place(x) for x in run.arguments)


def _ring_info(mesh: Mesh | AbstractMesh, device: str, sequence: AxisName | None, heads: AxisName | None) -> RingInfo:
    """Returns the ring of a sequence and heads that are sharded over these axes, in contiguous order."""
    size = lambda name: math.prod(mesh.shape[axis] for axis in axes(name))  # noqa: E731
    return RingInfo(
        axis_name=sequence or None,
        axis_size=size(sequence),
        layout="contiguous",
        strategy="auto",
        memory_budget=None,
        head_axis=heads or None,
        head_shards=size(heads),
        device=device,
        inner_devices=inner_size(sequence, dict(mesh.shape)) if sequence else None,
    )


def _check_divides(mesh: Mesh, sizes: dict[str, int], names: dict[str, AxisName | None]) -> None:
    for (what, size), name in zip(sizes.items(), (names["b"], names["t"]), strict=True):
        devices = math.prod(mesh.shape[axis] for axis in axes(name))
        if size % devices:
            raise ValueError(
                f"`query` {what} must divide evenly over the {devices} devices of the mesh axes {axes(name)}, over "
                f"which the compiler shards it, got {size}: pad it, or constrain the sharding of `query`."
            )
