"""Rings on meshes with other axes, automatic and explicit, ambient, and inside a user's own `shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    NAMES,
    NEEDS_KERNELS,
    QUICK,
    Case,
    assert_sharded_equals_oracle,
    by_implementation,
    error,
    ring_mesh,
    stored_on,
    with_gradients,
)
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj

SLOW = pytest.mark.slow
ALL = ("data", "ring", "tensor")
SHARED = {"batch_axis": "data", "head_axis": "tensor"}
# the offsets of the four heads differ, so using those of the wrong heads would fail
CASE = Case(
    length=64, kv_heads=4, q_per_kv=2, segment_lengths=(16, 64), dilation_rates=(4, 4), is_causal=True, ids=True
)

ON_RING = CASE._replace(segment_lengths=(64,), dilation_rates=(4,))  # compiles faster


def explicit_mesh(*sizes, names=("ring",)):
    return jax.make_mesh(
        sizes,
        names,
        axis_types=(jax.sharding.AxisType.Explicit,) * len(sizes),
        devices=jax.devices()[: np.prod(sizes)],
    )


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (CASE, "zigzag"),
        # the heads of the second device select no rows, neither locally nor on the ring
        pytest.param(
            Case(length=64, kv_heads=4, segment_lengths=(2, 3), dilation_rates=(5, 5)), "contiguous", marks=SLOW
        ),
        # the rate does not divide the segment, and the length is padded
        pytest.param(
            Case(length=57, kv_heads=4, segment_lengths=(14,), dilation_rates=(3,), rule="block", is_causal=True),
            "zigzag",
            marks=SLOW,
        ),
    ],
    ids=["mod", "heads without rows", "unaligned"],
)
@by_implementation("xla")
def test_batch_and_heads_over_other_axes_equal_oracle(case, layout, implementation):
    ring = rj.Ring(ring_mesh(2, 2, 2, names=ALL), layout=layout, **SHARED)
    assert_sharded_equals_oracle(case, ring, implementations=(implementation,))


@SLOW
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("rule", ["mod", "block", "none", "detached"])
@pytest.mark.parametrize("dilation_rates", [(3, 5), (7, 2)])
def test_many_patterns_on_three_axes_equal_oracle(strategy, rule, dilation_rates):
    case = Case(
        length=90, kv_heads=4, segment_lengths=(5, 90), dilation_rates=dilation_rates, rule=rule, is_causal=True
    )
    ring = rj.Ring(ring_mesh(2, 2, 2, names=ALL), layout="zigzag", strategy=strategy, **SHARED)
    assert_sharded_equals_oracle(case, ring)


@pytest.mark.parametrize("case", [ON_RING, pytest.param(CASE, marks=SLOW)], ids=["one branch", "two branches"])
@by_implementation("native")
def test_explicit_axes_equal_oracle(case, implementation):
    mesh = explicit_mesh(2, 2, 2, names=ALL)
    ring = rj.Ring(mesh, layout="zigzag", **SHARED)
    assert_sharded_equals_oracle(case, ring, implementations=(implementation,))


@pytest.mark.parametrize(
    ("make_mesh", "implementation"),
    [
        (ring_mesh, "xla"),
        pytest.param(ring_mesh, "native", marks=[NEEDS_KERNELS, SLOW]),
        pytest.param(explicit_mesh, "xla", marks=SLOW),
        pytest.param(explicit_mesh, "native", marks=NEEDS_KERNELS),
    ],
)
def test_ambient_mesh_equals_oracle(make_mesh, implementation):
    mesh = make_mesh(4)
    case = Case(length=64, segment_lengths=(64,), dilation_rates=(2,))
    with jax.set_mesh(mesh):
        assert_sharded_equals_oracle(case, rj.Ring(strategy="ring"), mesh, implementations=(implementation,))


@pytest.mark.parametrize("make_mesh", [ring_mesh, pytest.param(explicit_mesh, marks=SLOW)])
@by_implementation("xla")
def test_ring_over_two_axes_equals_oracle(make_mesh, implementation):
    ring = rj.Ring(make_mesh(2, 3, names=("a", "b")), axis_name=("a", "b"), layout="zigzag", strategy="ring")
    case = Case(length=72, segment_lengths=(72,), dilation_rates=(2,), is_causal=True)
    assert_sharded_equals_oracle(case, ring, implementations=(implementation,))


def test_axis_names_may_be_a_list():
    assert rj.Ring(axis_name=["a", "b"]) == rj.Ring(axis_name=("a", "b"))


@pytest.mark.parametrize("make_mesh", [ring_mesh, pytest.param(explicit_mesh, marks=SLOW)])
@by_implementation("native")
def test_ring_of_one_device_beside_other_axes_equals_oracle(make_mesh, implementation):
    ring = rj.Ring(make_mesh(2, 1, 2, names=ALL), layout="zigzag", **SHARED)
    case = Case(length=45, kv_heads=4, segment_lengths=(8, 45), dilation_rates=(4, 5), ids=True)
    assert_sharded_equals_oracle(case._replace(length=46, seq_len=45), ring, implementations=(implementation,))


@pytest.mark.parametrize("make_mesh", [ring_mesh, explicit_mesh])
def test_ring_of_one_device_compiles_the_program_of_one_device(make_mesh):
    q, k, v, g = CASE.arrays(np.float32)
    ring = rj.Ring(make_mesh(1), layout="zigzag")
    on_ring, alone = (
        with_gradients(functools.partial(rj.dilated_attention, **keywords), CASE.pattern, **CASE.keywords())
        for keywords in ({"ring": ring}, {})
    )
    assert str(jax.make_jaxpr(on_ring)(q, k, v, g)) == str(jax.make_jaxpr(alone)(q, k, v, g))
    assert on_ring.lower(q, k, v, g).as_text() == alone.lower(q, k, v, g).as_text()


def in_shard_map(ring, **options):
    """Returns `ring_dilated_attention` inside a `shard_map`; gradients are taken outside it."""

    def attention(q, k, v, pattern, *, segment_ids=None, **keywords):
        def local(q, k, v, ids):
            return rj.ring_dilated_attention(
                q, k, v, pattern, segment_ids=ids, layout=ring.layout, axis_name=ring.axis_name, **keywords, **options
            )

        spec = ring.spec()
        specs = (spec, spec, spec, P(*spec[:2]))
        return jax.shard_map(local, mesh=ring.mesh, in_specs=specs, out_specs=spec)(q, k, v, segment_ids)

    return attention


@pytest.mark.parametrize(
    ("make_mesh", "case"),
    [
        (ring_mesh, ON_RING),
        pytest.param(ring_mesh, CASE, marks=SLOW),
        pytest.param(explicit_mesh, CASE, marks=SLOW),
    ],
)
@by_implementation("native")
def test_ring_inside_a_shard_map_equals_oracle(make_mesh, case, implementation):
    ring = rj.Ring(make_mesh(2, 2, 2, names=ALL), layout="zigzag", **SHARED)
    attention = in_shard_map(ring, head_axis="tensor")
    assert_sharded_equals_oracle(case, ring, attention=attention, implementations=(implementation,))


@pytest.mark.parametrize(
    ("segment_lengths", "dilation_rates"),
    [((64,), (2,)), pytest.param((16, 64), (1, 2), marks=SLOW)],
    ids=["one branch", "two branches"],
)
def test_gradients_inside_a_shard_map_are_summed_over_devices(segment_lengths, dilation_rates):
    """A weight shared by all devices, and keys shared by the batch."""
    case = Case(length=64, segment_lengths=segment_lengths, dilation_rates=dilation_rates, is_causal=True)
    ring = rj.Ring(ring_mesh(2, 4, names=("data", "ring")), batch_axis="data", layout="zigzag")
    attend = functools.partial(rj.ring_dilated_attention, pattern=case.pattern, is_causal=True)

    def local(weight, q, k, v, g):
        out, pull = jax.vjp(lambda weight, q, k, v: attend(weight * q, k, v, layout="zigzag"), weight, q, k, v)
        return out, *pull(g)

    def expected(weight, q, k, v, g):
        wide = lambda x: jnp.broadcast_to(x, q.shape)  # noqa: E731
        out, pull = jax.vjp(
            lambda weight, q, k, v: rj.reference_attention(weight * q, wide(k), wide(v), case.pattern, is_causal=True),
            weight,
            q,
            k,
            v,
        )
        return out, *pull(g)

    spec, shared = ring.spec(), P(None, "ring")
    f = jax.shard_map(
        local,
        mesh=ring.mesh,
        in_specs=(P(), spec, shared, shared, spec),
        out_specs=(spec, P(), spec, shared, shared),
    )
    with jax.enable_x64(True):
        q, k, v, g = case.arrays(np.float64)
        k, v, weight = k[:1], v[:1], jnp.asarray(1.5)
        out, dweight, *gradients = jax.jit(f, compiler_options=QUICK)(
            weight, *(rj.to_layout(x, "zigzag", 4) for x in (q, k, v, g))
        )
        found = (dweight, *(rj.from_layout(x, "zigzag", 4) for x in (out, *gradients)))
        out, dweight, *gradients = jax.jit(expected, compiler_options=QUICK)(weight, q, k, v, g)
    for name, x, y in zip(("dweight", *NAMES), found, (dweight, out, *gradients), strict=True):
        assert error(x, y) <= 1e-10, name


@SLOW
def test_ring_inside_a_scan_over_layers_equals_oracle():
    case = Case(length=64, segment_lengths=(64,), dilation_rates=(1,), is_causal=True)
    ring = rj.Ring(ring_mesh(4), layout="zigzag")

    def layers(attention):
        def f(q, k, v, pattern, **keywords):
            return lax.scan(lambda x, w: (attention(w * x, k, v, pattern, **keywords), None), q, jnp.array([0.5, 2]))[0]

        return f

    ours, oracle = (
        with_gradients(layers(attention), case.pattern, compiler_options=QUICK, is_causal=True)
        for attention in (functools.partial(rj.dilated_attention, ring=ring), rj.reference_attention)
    )
    with jax.enable_x64(True):
        stored = [stored_on(ring, ring.mesh, x) for x in case.arrays(np.float64)]
        got, reference = ours(*stored), oracle(*case.arrays(np.float64))
        ordered = [np.asarray(rj.from_layout(np.asarray(x), "zigzag", 4)) for x in got]
    for name, x, y, z in zip(NAMES, got, ordered, reference, strict=True):
        assert x.sharding.is_equivalent_to(stored[0].sharding, 4), name
        assert error(y, z) <= 1e-10, name


@pytest.mark.parametrize(
    "pattern",
    [rj.DilationPattern((2,), (5,)), rj.DilationPattern((2, 8), (1, 2), heads="split")],
    ids=["heads without rows", "split"],
)
def test_head_axis_of_one_device_equals_oracle(pattern):
    q, k, v = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, 8, 4, 2)), jnp.float32)
    ring = rj.Ring(ring_mesh(2, 1, names=("ring", "tensor")), head_axis="tensor")
    found, expected = (
        jax.jit(lambda *x, f=f: f(*x, pattern), compiler_options=QUICK)(q, k, v)
        for f in (functools.partial(rj.dilated_attention, ring=ring), rj.reference_attention)
    )
    assert error(found, expected) <= 2e-6


def test_zigzag_ring_of_one_device_takes_an_odd_length_and_uint8_ids():
    q, k, v = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 9, 2, 4)), jnp.float32)
    ids = jnp.array([[0] * 4 + [1] * 5] * 2, jnp.uint8)
    pattern = rj.DilationPattern((4, 9), (1, 2))
    keywords = {"seq_len": 7, "segment_ids": ids}
    ring = rj.Ring(ring_mesh(2, 1, names=("data", "ring")), batch_axis="data", layout="zigzag")
    found, expected = (
        jax.jit(lambda *x, f=f: f(*x, pattern, **keywords), compiler_options=QUICK)(q, k, v)
        for f in (functools.partial(rj.dilated_attention, ring=ring), rj.reference_attention)
    )
    assert error(found, expected) <= 2e-6


def test_mesh_of_automatic_and_explicit_axes_equals_oracle():
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), ("data", "ring"), axis_types=kinds)
    pattern = rj.DilationPattern((4, 16), (1, 2))
    q, k, v = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 16, 2, 4)), jnp.float32)
    ring = rj.Ring(mesh, batch_axis="data", layout="zigzag", strategy="all_gather")
    stored = [jax.device_put(rj.to_layout(x, "zigzag", 2), NamedSharding(mesh, ring.spec())) for x in (q, k, v)]
    attention = lambda *x: rj.dilated_attention(*x, pattern, ring=ring, is_causal=True)  # noqa: E731
    out = jax.jit(attention, compiler_options=QUICK)(*stored)
    oracle = jax.jit(lambda *x: rj.reference_attention(*x, pattern, is_causal=True), compiler_options=QUICK)
    assert error(rj.from_layout(out, "zigzag", 2), oracle(q, k, v)) <= 2e-6


@by_implementation("native")
def test_ring_of_one_device_takes_arrays_of_its_explicit_mesh(implementation):
    """`jax.make_mesh` on a machine with a single device returns such a mesh."""
    mesh = explicit_mesh(1)
    case = Case(length=64, segment_lengths=(64,), dilation_rates=(4,), is_causal=True, ids=True, seq_len=60)
    assert_sharded_equals_oracle(case, rj.Ring(mesh, layout="zigzag"), mesh, implementations=(implementation,))
