"""Sharded arrays under plain `jit`, `vmap` and rings: no collective but those of the plan, on both kinds of mesh."""

import functools
import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NEEDS_KERNELS, QUICK, Case, available, slow_unless
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import ringjax as rj
from ringjax import linen
from ringjax.models import LongNetConfig, LongNetDecoder
from ringjax.nnx import DilatedSelfAttention

CASE = Case(length=64, batch=4, kv_heads=4, q_per_kv=2, head_dim=8, segment_lengths=(16, 64), dilation_rates=(1, 4))
AXES = ("data", "ring", "tensor")
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SPECS = {
    "batch": ("data", None, None),
    "heads": (None, None, "tensor"),
    "sequence": (None, "ring", None),
    "batch and sequence": ("data", "ring", None),
    "all": AXES,
}


def mesh_of(kind, sizes=(2, 2, 2), names=AXES):
    return jax.make_mesh(sizes, names, axis_types=(KINDS[kind],) * len(names))


def collectives(compiled) -> Counter:
    """Returns the collectives of a compiled program, with their result types."""
    found = re.findall(r" = (.*?) (all-[a-z-]+|collective-[a-z-]+|reduce-scatter)\(", compiled.as_text())
    return Counter(f"{name} {kind}" for kind, name in found)


def attention(q, k, v, ring=None, implementation="xla", **options):
    return rj.dilated_attention(
        q, k, v, CASE.pattern, is_causal=True, ring=ring, implementation=implementation, **options
    )


def gradients(q, k, v, dout, **options):
    return jax.vjp(functools.partial(attention, **options), q, k, v)[1](dout)


def ring_for(mesh, spec):
    return rj.Ring(mesh, axis_name=spec[1], batch_axis=spec[0], head_axis=spec[2])


@functools.cache
def expected():
    """Returns the output and the gradients of the oracle."""
    q, k, v, dout = CASE.arrays(np.float32)
    out, vjp = jax.vjp(lambda *x: rj.reference_attention(*x, CASE.pattern, is_causal=True), q, k, v)
    return out, vjp(dout)


DEFAULT_ROWS = {
    ("auto", "batch", "native"),
    ("auto", "sequence", "xla"),
    ("auto", "all", "native"),
    ("explicit", "heads", "native"),
    ("explicit", "batch and sequence", "xla"),
    ("explicit", "batch", "xla"),
}
ROWS = [
    pytest.param(kind, name, available(implementation), marks=slow_unless((kind, name, implementation) in DEFAULT_ROWS))
    for kind in KINDS
    for name in SPECS
    for implementation in ("xla", "native")
]


@pytest.mark.parametrize(("kind", "name", "implementation"), ROWS)
def test_sharded_arrays_without_a_ring_run_the_program_of_a_ring(kind, name, implementation):
    mesh, spec = mesh_of(kind), SPECS[name]
    arrays = jax.device_put(CASE.arrays(np.float32), jax.NamedSharding(mesh, jax.P(*spec)))
    out, grads = expected()
    for f, operands, wanted in ((attention, arrays[:3], (out,)), (gradients, arrays, grads)):
        run = functools.partial(f, implementation=implementation)
        compiled = jax.jit(run).lower(*operands).compile(QUICK)
        with_ring = jax.jit(functools.partial(run, ring=ring_for(mesh, spec))).lower(*operands).compile(QUICK)
        assert collectives(compiled) == collectives(with_ring)
        assert bool(collectives(compiled)) == ("ring" in spec)
        results = jax.tree.leaves(compiled(*operands))
        assert all(x.sharding.is_equivalent_to(operands[0].sharding, 4) for x in results)
        chex.assert_trees_all_close(results, list(wanted), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("platform", "is_partitioned"), [("gpu", True), ("tpu", False)])
def test_rules_for_the_compiler_are_used_where_it_calls_them(platform, is_partitioned):
    device = AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    x = jax.ShapeDtypeStruct((4, 64, 4, 8), np.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
    assert ("ringjax_call" in str(jax.jit(attention).trace(x, x, x).jaxpr)) == is_partitioned


@NEEDS_KERNELS
def test_shardings_that_are_unknown_when_traced_are_reported():
    sharding = jax.NamedSharding(mesh_of("auto"), jax.P("data"))
    f = jax.jit(functools.partial(attention, implementation="native"), in_shardings=(sharding,) * 3)
    with pytest.warns(UserWarning, match=r"compiled for 8 devices, but the sharding .* place the arrays with"):
        f.lower(*CASE.arrays(np.float32)[:3])


@pytest.mark.parametrize("name", ["batch", "sequence"])
def test_shardings_of_jit_count_where_the_mesh_is_set(name):
    mesh, spec = mesh_of("auto"), SPECS[name]
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    arrays = CASE.arrays(np.float32)[:3]
    with jax.set_mesh(mesh):
        compiled = jax.jit(attention, in_shardings=(sharding,) * 3).lower(*arrays).compile(QUICK)
        out = compiled(*jax.device_put(arrays, sharding))
    assert {x.split()[0] for x in collectives(compiled)} == ({"all-to-all"} if name == "sequence" else set())
    assert out.sharding.is_equivalent_to(sharding, 4)
    chex.assert_trees_all_close(out, expected()[0], atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "has_ids"), [("split", False), ("detached", True)])
def test_other_calls_on_a_sharded_batch_equal_one_device(kind, rule, has_ids):
    case = CASE._replace(rule=rule, ids=has_ids, seq_len=61, dropout_rate=0.3)
    arrays = case.arrays(np.float32)
    keywords = case.keywords()
    f = lambda q, k, v, dout: jax.vjp(lambda *x: rj.dilated_attention(*x, case.pattern, **keywords), q, k, v)[1](dout)  # noqa: E731
    alone = jax.jit(f, compiler_options=QUICK)(*arrays)
    sharded = jax.device_put(arrays, jax.NamedSharding(mesh_of(kind), jax.P("data")))
    compiled = jax.jit(f).lower(*sharded).compile(QUICK)
    assert not collectives(compiled)
    chex.assert_trees_all_close(compiled(*sharded), alone, atol=2e-6, rtol=2e-6)


def test_sequence_that_does_not_divide_raises_instead_of_gathering(caplog):
    mesh = mesh_of("auto", (4, 2), ("ring", "data"))
    x = jax.device_put(jnp.ones((2, 62, 2, 8)), jax.NamedSharding(mesh, jax.P("data")))

    def f(x):
        x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("data", "ring")))
        return attention(x, x, x)

    with pytest.raises(Exception, match="length must divide evenly over the 4 devices"):
        jax.jit(f).lower(x).compile(QUICK)
    (line,) = caplog.messages  # the exception has it between two tracebacks of the compiler
    assert line.startswith("ringjax: `query` length must divide") and line.endswith("the sharding of `query`.")


def test_errors_of_the_program_of_a_device_are_logged_on_one_line(caplog):
    pattern = rj.DilationPattern((16, 64), (1, 4), heads="split")
    mesh = mesh_of("auto", (8,), ("model",))
    x = jax.device_put(jnp.ones((1, 64, 8, 8)), jax.NamedSharding(mesh, jax.P(None, None, "model")))
    with pytest.raises(Exception, match="does not support heads sharded"):
        jax.jit(lambda x: rj.dilated_attention(x, x, x, pattern)).lower(x).compile(QUICK)
    assert caplog.messages[0].endswith('sharded over a mesh axis: replicate them, or use `heads="all"`.')


@pytest.mark.parametrize("kind", KINDS)
def test_differently_sharded_keys_on_an_explicit_mesh_raise_and_on_an_automatic_one_follow_queries(kind):
    mesh = mesh_of(kind)
    q, k, v, _ = CASE.arrays(np.float32)
    q = jax.device_put(q, jax.NamedSharding(mesh, jax.P("data")))
    k, v = jax.device_put((k, v), jax.NamedSharding(mesh, jax.P(None, None, "tensor")))
    if kind == "explicit":
        with pytest.raises(ValueError, match="`key` must be sharded like `query` over an explicit mesh"):
            jax.jit(attention)(q, k, v)
    else:
        chex.assert_trees_all_close(jax.jit(attention, compiler_options=QUICK)(q, k, v), expected()[0], atol=2e-6)


# ---------------------------------------------------------------------------------------------------------------- vmap


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("has_ring", "name"),
    [(False, None), (False, "data"), (True, None), (True, "data")],
    ids=["shards", "shards, spmd_axis_name", "ring", "ring, spmd_axis_name"],
)
def test_vmap_over_examples_keeps_the_batch_sharded(kind, has_ring, name):
    mesh = mesh_of(kind)
    ring = rj.Ring(mesh) if has_ring else None
    one = lambda *x: attention(*(a[None] for a in x), ring=ring)[0]  # noqa: E731
    f = lambda q, k, v, dout: jax.vjp(jax.vmap(one, spmd_axis_name=name), q, k, v)[1](dout)  # noqa: E731
    sharding = jax.NamedSharding(mesh, jax.P("data", "ring" if has_ring else None))
    arrays = jax.device_put(CASE.arrays(np.float32), sharding)
    compiled = jax.jit(f).lower(*arrays).compile(QUICK)
    assert {x.split()[0] for x in collectives(compiled)} == ({"all-to-all"} if has_ring else set())
    results = compiled(*arrays)
    assert all(x.sharding.is_equivalent_to(sharding, 4) for x in results)
    chex.assert_trees_all_close(results, expected()[1], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_nested_vmap_keeps_the_batch_sharded(kind):
    mesh = mesh_of(kind)
    one = lambda *x: attention(*(a[None] for a in x), ring=rj.Ring(mesh))[0]  # noqa: E731
    arrays = [x.reshape(2, 2, *x.shape[1:]) for x in CASE.arrays(np.float32)[:3]]
    arrays = jax.device_put(arrays, jax.NamedSharding(mesh, jax.P("data", None, "ring")))
    compiled = jax.jit(jax.vmap(jax.vmap(one))).lower(*arrays).compile(QUICK)
    assert {x.split()[0] for x in collectives(compiled)} == {"all-to-all"}
    out = compiled(*arrays)
    assert out.sharding.is_equivalent_to(arrays[0].sharding, 5)
    chex.assert_trees_all_close(np.asarray(out).reshape(expected()[0].shape), expected()[0], atol=2e-6)


# --------------------------------------------------------------------------------------------------------------- rings


@pytest.mark.parametrize("kind", KINDS)
def test_ring_of_batch_and_heads_alone_sends_nothing(kind):
    mesh = mesh_of(kind, (2, 4), ("data", "tensor"))
    ring = rj.Ring(mesh, axis_name=None, batch_axis="data", head_axis="tensor")
    arrays = [ring.shard(x) for x in CASE.arrays(np.float32)]
    compiled = jax.jit(functools.partial(gradients, ring=ring)).lower(*arrays).compile(QUICK)
    assert not collectives(compiled)
    chex.assert_trees_all_close(compiled(*arrays), expected()[1], atol=2e-6, rtol=2e-6)


def test_ring_of_a_mesh_without_its_axis_names_the_remedy():
    with pytest.raises(
        ValueError, match=r"`axis_name` must name axes of the mesh .*None if the sequence is not sharded"
    ):
        rj.Ring(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), batch_axis="data")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shard_and_unshard_invert_each_other_in_and_outside_of_jit(kind, layout):
    ring = rj.Ring(mesh_of(kind), layout=layout, batch_axis="data", head_axis="tensor", seq_len=61)
    stored = rj.to_layout(x := np.arange(2 * 61 * 2 * 3).reshape(2, 61, 2, 3), layout, 2)
    for given in (x, jnp.asarray(x)):
        found = ring.shard(given)
        assert found.sharding.spec == jax.P("data", "ring", "tensor")
        np.testing.assert_array_equal(found, stored)
        np.testing.assert_array_equal(ring.unshard(found), x)
        np.testing.assert_array_equal(ring.unshard(found, length=7), x[:, :7])
    whole = jax.device_put(x, jax.NamedSharding(ring.mesh, jax.P()))
    traced = jax.jit(ring.shard, compiler_options=QUICK)(whole)
    assert traced.sharding.is_equivalent_to(jax.NamedSharding(ring.mesh, jax.P("data", "ring", "tensor")), 4)
    np.testing.assert_array_equal(traced, stored)
    for positions in (ring.positions(), ring.positions(61)):
        np.testing.assert_array_equal(positions, rj.positions(layout, ring.stored_length(61), 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": [1, 2]}, "`x` must be an array, got list"),
        ({"x": np.ones((3, 8))}, "batch of `x` must divide evenly over the 2 devices of `batch_axis` 'data', got 3"),
        ({"x": np.ones((2, 8, 3, 1))}, "heads of `x` must divide evenly over the 2 devices of `head_axis`"),
        ({"x": np.ones(8)}, "`axis` must be 0 or 1 and an axis of `x`, got 1"),
        ({"x": np.ones((2, 8)), "axis": 2}, "`axis` must be 0 or 1 and an axis of `x`, got 2"),
        ({"x": np.ones((2, 7), np.uint8), "fill": -1}, "`fill` must be a number that uint8 can hold"),
    ],
)
def test_arguments_of_shard_that_raise(arguments, message):
    ring = rj.Ring(mesh_of("auto"), batch_axis="data", head_axis="tensor")
    with pytest.raises(ValueError, match=re.escape(message)):
        ring.shard(**arguments)


# ---------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("kind", "is_fsdp", "has_ring"),
    [
        ("explicit", False, True),
        pytest.param("explicit", False, False, marks=pytest.mark.slow),
        pytest.param("explicit", True, True, marks=pytest.mark.slow),
        pytest.param("explicit", True, False, marks=pytest.mark.slow),
        pytest.param("auto", False, False, marks=pytest.mark.slow),
        pytest.param("auto", True, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_model_need_no_placement_of_its_parameters(kind, is_fsdp, has_ring):
    ring = rj.Ring(mesh_of(kind, (2, 4), ("data", "ring")), batch_axis="data")
    config = LongNetConfig.tiny(vocab_size=32, num_layers=1, pattern=rj.DilationPattern((16, 64), (1, 4)))
    tokens = np.random.default_rng(0).integers(32, size=(4, 64)).astype(np.int32)

    def run(ring, place, tokens):
        model = LongNetDecoder(config, ring=ring, rngs=nnx.Rngs(0))
        graph, params = nnx.split(model)
        f = lambda p, tokens: nnx.merge(graph, p)(tokens).mean()  # noqa: E731
        return jax.jit(jax.value_and_grad(f), compiler_options=QUICK)(jax.tree.map(place, params), tokens)

    def fsdp(x):
        return jax.device_put(x, jax.NamedSharding(ring.mesh, jax.P(*(None,) * (x.ndim - 1), "data")))

    got = run(ring if has_ring else None, fsdp if is_fsdp else lambda x: x, ring.shard(tokens))
    chex.assert_trees_all_close(got, run(None, lambda x: x, tokens), atol=2e-6, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_gradients_of_a_layer_need_no_placement_of_its_parameters(framework):
    ring = rj.Ring(mesh_of("explicit", (2, 4), ("data", "ring")), batch_axis="data")
    x = np.random.default_rng(0).normal(size=(2, 64, 16)).astype(np.float32)

    def run(ring, x):
        options = {"is_causal": True, "sub_norm": True, "sinks": True, "ring": ring}
        if framework == "linen":
            alone = linen.DilatedSelfAttention(2, CASE.pattern, **(options | {"ring": None}))
            params = alone.init(jax.random.key(0), jnp.ones((1, 64, 16)))
            apply = linen.DilatedSelfAttention(2, CASE.pattern, **options).apply
        else:
            graph, params = nnx.split(DilatedSelfAttention(2, 16, CASE.pattern, **options, rngs=nnx.Rngs(0)))
            apply = lambda p, x: nnx.merge(graph, p)(x)  # noqa: E731
        f = jax.value_and_grad(lambda p, x: (apply(p, x) ** 2).mean())
        return jax.jit(f, compiler_options=QUICK)(params, x)

    chex.assert_trees_all_close(run(ring, ring.shard(x)), run(None, x), atol=2e-6, rtol=2e-5)
