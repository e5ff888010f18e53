"""Every mistake with a ring names the argument, the rule and what was given."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ring_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj

PATTERN = rj.DilationPattern((4, 16), (1, 2))
Q = np.zeros((2, 16, 4, 4), np.float32)
ALL = ("data", "ring", "tensor")


def call(ring, q=Q, k=Q, v=Q, pattern=PATTERN, **keywords):
    return rj.dilated_attention(*(jnp.asarray(x) for x in (q, k, v)), pattern, ring=ring, **keywords)


def says(text, kind=ValueError):
    return pytest.raises(kind, match=re.escape(text))


AXES = "`axis_name`, `batch_axis` and `head_axis` must not share a mesh axis, got "
STRATEGY = "`strategy` must be one of ('auto', 'ring', 'all_gather', 'all_to_all', 'all_to_all_ring'), got 'all'."
LAYOUT = "`layout` must be one of ('contiguous', 'zigzag'), got 'striped'."
NO_AXIS = "(None if the sequence is not sharded)"
BAD_RINGS = {
    "axis": (
        {"axis_name": "x"},
        f"`axis_name` must name axes of the mesh {ALL} {NO_AXIS}, got 'x'.",
    ),
    "one of two": (
        {"axis_name": ("ring", "x")},
        f"`axis_name` must name axes of the mesh {ALL} {NO_AXIS}, got 'x'.",
    ),
    "batch axis": ({"batch_axis": "x"}, f"`batch_axis` must name axes of the mesh {ALL}, got 'x'."),
    "head axis": ({"head_axis": "x"}, f"`head_axis` must name axes of the mesh {ALL}, got 'x'."),
    "not a name": ({"axis_name": (0,)}, "`axis_name` must be a mesh axis or a tuple of them, got (0,)."),
    "a number": ({"axis_name": 0}, "`axis_name` must be a mesh axis or a tuple of them, got 0."),
    "empty axis": ({"axis_name": ()}, "`axis_name` must be a mesh axis or a tuple of them, got ()."),
    "a number of heads": ({"head_axis": 2}, "`head_axis` must be a mesh axis or a tuple of them, got 2."),
    "twice": ({"batch_axis": "ring"}, f"{AXES}['ring', 'ring']."),
    "twice in one": ({"axis_name": ("ring", "ring")}, f"{AXES}['ring', 'ring']."),
    "heads and batch": ({"batch_axis": "data", "head_axis": "data"}, f"{AXES}['ring', 'data', 'data']."),
    "layout": ({"layout": "striped"}, LAYOUT),
    "strategy": ({"strategy": "all"}, STRATEGY),
    "budget": ({"memory_budget": 1e9}, "`memory_budget` must be an integer, got 1000000000.0."),
    "no budget": ({"memory_budget": 0}, "`memory_budget` must be at least 1, got 0."),
}


@pytest.mark.parametrize("name", BAD_RINGS)
def test_bad_ring(name):
    keywords, text = BAD_RINGS[name]
    with says(text):
        rj.Ring(ring_mesh(2, 2, 2, names=ALL), **keywords)


def test_not_a_ring():
    with says("`ring` must be a Ring, got Mesh."):
        call(ring_mesh(2))
    with says("`ring` must be a Ring, got str."):
        call("ring")


def test_no_ambient_mesh():
    with says("`mesh` must be given if no mesh is set by `jax.set_mesh`, got None."):
        call(rj.Ring())


def test_ambient_mesh_without_the_axis():
    with (
        jax.set_mesh(ring_mesh(2, names=("data",))),
        says(f"`axis_name` must name axes of the mesh ('data',) {NO_AXIS}, got 'ring'."),
    ):
        call(rj.Ring())


BAD_CALLS = {
    "length": (
        {"layout": "contiguous"},
        {"q": Q[:, :15], "k": Q[:, :15], "v": Q[:, :15]},
        "`query` length must be a multiple of 2 for layout 'contiguous' on a ring of 2, got 15: use "
        "`Ring(..., seq_len=15)` and its `shard`, which pads.",
    ),
    "zigzag length": (
        {"layout": "zigzag"},
        {"q": Q[:, :14], "k": Q[:, :14], "v": Q[:, :14]},
        "`query` length must be a multiple of 4 for layout 'zigzag' on a ring of 2, got 14: use "
        "`Ring(..., seq_len=14)` and its `shard`, which pads.",
    ),
    "heads": (
        {"head_axis": "tensor"},
        {"k": Q[:, :, :1], "v": Q[:, :, :1]},
        "key/value heads must divide evenly over the 2 devices of `head_axis` 'tensor', got 1.",
    ),
    "batch": (
        {"batch_axis": "data"},
        {"q": Q[:1], "k": Q[:1], "v": Q[:1]},
        "batch must divide evenly over the 2 devices of `batch_axis` 'data', got 1.",
    ),
    "seq_len": ({}, {"seq_len": 17}, "`seq_len` must be between 1 and the stored length 16, got 17."),
    "ids": (
        {},
        {"segment_ids": np.zeros((2, 8), np.int32)},
        "`segment_ids` must have shape (batch, length) = (2, 16), got (2, 8).",
    ),
    "value": ({}, {"v": Q[:, :, :2]}, "`value` must have the shape of `key`, got (2, 16, 2, 4) and (2, 16, 4, 4)."),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name):
    options, keywords, text = BAD_CALLS[name]
    with says(text):
        call(rj.Ring(ring_mesh(2, 2, 2, names=ALL), **options), **keywords)


def test_grouped_heads_over_devices():
    split = rj.DilationPattern((4, 16), (1, 2), heads="split")
    with says(
        '`heads="split"` does not support heads sharded over a mesh axis: replicate them, or use `heads="all"`.',
        NotImplementedError,
    ):
        call(rj.Ring(ring_mesh(2, 2, 2, names=ALL), head_axis="tensor"), pattern=split)


def put(mesh, *spec):
    return jax.device_put(Q, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("name", ["key", "value"])
def test_arrays_sharded_otherwise(name):
    mesh = ring_mesh(2, 2, names=("data", "ring"))
    good, bad = put(mesh, None, "ring"), put(mesh, "data", "ring")
    arrays = {"k": good, "v": good} | {name[0]: bad}
    with says(f"`{name}` must be sharded like `query`, got {bad.sharding.spec} and {good.sharding.spec}."):
        call(rj.Ring(mesh), good, **arrays)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("jit", [False, True])
def test_arrays_sharded_otherwise_over_explicit_axes(name, jit):
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "ring"), axis_types=explicit, devices=jax.devices()[:4])
    arrays = {"q": put(mesh, None, "ring"), "k": put(mesh, None, "ring"), "v": put(mesh, None, "ring")}
    arrays[name[0]] = put(mesh, "ring", None)
    f = lambda arrays: call(rj.Ring(mesh), **arrays)  # noqa: E731
    wanted = P(None, "ring", None, None)
    with says(
        f"`{name}` must be sharded as {wanted} over an explicit mesh, or replicated, got "
        f"{jax.typeof(arrays[name[0]]).sharding.spec}"
    ):
        (jax.jit(f) if jit else f)(arrays)


def test_budget_that_nothing_meets():
    mesh = ring_mesh(2)
    with pytest.raises(
        ValueError, match=r"`memory_budget` must be at least \d+ bytes per device .*, got 1000;"
    ) as caught:
        call(rj.Ring(mesh, memory_budget=1000))
    assert "a larger ring, a smaller batch or heads sharded over `head_axis` may need less." in str(caught.value)
    enough = int(re.search(r"at least (\d+)", str(caught.value))[1])
    f = lambda budget: jax.eval_shape(lambda q: call(rj.Ring(mesh, memory_budget=budget), q, q, q), Q)  # noqa: E731
    assert f(enough).shape == Q.shape
    with says(f"`memory_budget` must be at least {enough} bytes per device"):
        f(enough - 1)


def inside(q=Q, mesh=None, **keywords):
    """`ring_dilated_attention` in a `shard_map` over a ring of 2."""
    mesh = ring_mesh(2) if mesh is None else mesh
    f = lambda q: rj.ring_dilated_attention(q, q, q, PATTERN, **keywords)  # noqa: E731
    spec = P(None, "ring")
    return jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec), q)


BAD_INSIDE = {
    "axis": ({"axis_name": "x"}, "`axis_name` must name axes of the `shard_map` around the call, got ('x',)."),
    "two": (
        {"axis_name": ("ring", "x")},
        "`axis_name` must name axes of the `shard_map` around the call, got ('ring', 'x').",
    ),
    "head axis": ({"head_axis": "x"}, "`head_axis` must name axes of the `shard_map` around the call, got ('x',)."),
    "batch axis": ({"batch_axis": "x"}, "`batch_axis` must name axes of the `shard_map` around the call, got ('x',)."),
    "layout": ({"layout": "striped"}, LAYOUT),
    "strategy": ({"strategy": "all"}, STRATEGY),
    "budget": ({"memory_budget": "1GB"}, "`memory_budget` must be an integer, got '1GB'."),
    "small budget": ({"memory_budget": 1}, "`memory_budget` must be at least "),
    "length": (
        {"q": Q[:, :14], "layout": "zigzag"},
        "`query` length per device must be a multiple of 2 for layout 'zigzag', got 7.",
    ),
    "seq_len": ({"seq_len": 17}, "`seq_len` must be between 1 and the stored length 16, got 17."),
    "heads twice": ({"head_axis": "ring"}, "must not share a mesh axis"),
}


@pytest.mark.parametrize("name", BAD_INSIDE)
def test_bad_call_inside_shard_map(name):
    keywords, text = BAD_INSIDE[name]
    with says(text):
        inside(**keywords)


def test_good_call_inside_shard_map():
    assert inside(layout="zigzag", seq_len=16).shape == Q.shape


@pytest.mark.parametrize("jit", [False, True])
def test_outside_of_shard_map(jit):
    f = lambda q: rj.ring_dilated_attention(q, q, q, PATTERN)  # noqa: E731
    with says("`axis_name` must name axes of the `shard_map` around the call, got ('ring',)."):
        (jax.jit(f) if jit else f)(jnp.asarray(Q))
