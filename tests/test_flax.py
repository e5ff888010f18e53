"""Flax layers, stock ones with `attention_fn` and our own, equal their definitions on one device and on rings."""

import functools
import math
import re
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, error, ring_mesh, stored_on
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from test_rotary import random, rotated

import ringjax as rj
import ringjax.linen
import ringjax.nnx
from ringjax._src.flax.self_attention import flat_initializer

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 64, 4, 2, 8
FEATURES = HEADS * DIM
PATTERN = rj.DilationPattern((16, 64), (1, 4))
LIMIT = 2e-6
OPTIONS = {"num_kv_heads": KV_HEADS, "is_causal": True, "positions": "rotary", "sub_norm": True}


X, COTANGENT = random(BATCH, LENGTH, FEATURES), random(BATCH, LENGTH, FEATURES, seed=1)


def run(layer, parameters, x, cotangent):
    """Returns output and gradients of a layer, which is a function of parameters and input."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(parameters, x, cotangent):
        out, pull = jax.vjp(layer, parameters, x)
        return out, *pull(cotangent)

    return both(parameters, x, cotangent)


def assert_close(got, expected):
    """Compares outputs, gradients of parameters and gradients of inputs.

    The gradients of parameters are compared as one vector: that of a key bias is a sum that cancels to 0.
    """
    chex.assert_trees_all_equal_shapes(got, expected)
    for name, x, reference in zip(("out", "parameters", "x"), got, expected, strict=True):
        flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (x, reference)]
        assert error(*flat) <= LIMIT, (name, error(*flat))


def in_float64(layer, *arguments):
    """Returns the result of `run` in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arguments)
        return jax.tree.map(np.asarray, run(layer, *wide))


def drawn(shapes):
    """Draws parameters that are neither 0 nor 1; compiling the initializers would take seconds."""
    return jax.tree.map(lambda p: 0.2 * random(*p.shape, seed=math.prod(p.shape)) + (len(p.shape) == 1), shapes)


def functional(make):
    """Returns an nnx layer as a function of a dict of parameters, and the shapes of the parameters."""
    graph, state, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def layer(parameters, x, **keywords):
        restored = nnx.State(jax.tree.map(lambda x: x, state))
        nnx.replace_by_pure_dict(restored, parameters)
        return nnx.merge(graph, restored, rest)(x, **keywords)

    return layer, nnx.to_pure_dict(state)


@functools.cache
def own_parameters():
    make = lambda: ringjax.nnx.DilatedSelfAttention(HEADS, FEATURES, PATTERN, rngs=nnx.Rngs(0), **OPTIONS)  # noqa: E731
    return drawn(functional(make)[1])


def definition(p, x):
    """Computes our layer with the dense oracle."""
    q, k, v = (
        jnp.einsum("btf,fnh->btnh", x, p[n]["kernel"]) + p[n]["bias"][None, None] for n in ("query", "key", "value")
    )
    q, k = rotated(q, np.arange(LENGTH)), rotated(k, np.arange(LENGTH))
    out = rj.reference_attention(q, k, v, PATTERN, is_causal=True).reshape(BATCH, LENGTH, -1)
    out = (out - out.mean(-1, keepdims=True)) / jnp.sqrt(out.var(-1, keepdims=True) + 1e-6)
    out = out * p["sub_norm"]["scale"][None, None] + p["sub_norm"]["bias"][None, None]
    return jnp.einsum("btc,cf->btf", out, p["out"]["kernel"].reshape(-1, FEATURES)) + p["out"]["bias"][None, None]


@functools.cache
def expected():
    return in_float64(definition, own_parameters(), X, COTANGENT)


ONE_BRANCH = rj.DilationPattern((16,), (2,))  # compiles faster


def oracle(query, key, value, **keywords):
    del keywords
    return rj.reference_attention(query, key, value, ONE_BRANCH, is_causal=True)


def stock_nnx(attention):
    options = {"num_kv_heads": KV_HEADS, "attention_fn": attention, "decode": False, "keep_rngs": False}
    return functional(lambda: nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **options))


def stock_linen(attention):
    module = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention)
    return module.apply, jax.eval_shape(module.init, jax.random.key(0), X)


@pytest.mark.parametrize("stock", [stock_nnx, stock_linen])
def test_stock_layers_with_our_attention_equal_the_oracle(stock):
    (layer, shapes), (dense, _) = stock(rj.attention_fn(ONE_BRANCH, is_causal=True)), stock(oracle)
    parameters = drawn(shapes)
    assert_close(run(layer, parameters, X, COTANGENT), in_float64(dense, parameters, X, COTANGENT))


def ours(framework: str, pattern: rj.DilationPattern = PATTERN, **options):
    options = {**OPTIONS, **options}
    if framework == "nnx":
        return functional(
            lambda: ringjax.nnx.DilatedSelfAttention(HEADS, FEATURES, pattern, rngs=nnx.Rngs(0), **options)
        )[0]
    module = ringjax.linen.DilatedSelfAttention(HEADS, pattern, **options)
    return lambda parameters, x, **keywords: module.apply({"params": parameters}, x, **keywords)


@pytest.mark.parametrize(
    ("framework", "size"),
    [
        ("nnx", 1),
        ("linen", 2),
        ("nnx", 4),
        pytest.param("linen", 1, marks=pytest.mark.slow),
        pytest.param("nnx", 2, marks=pytest.mark.slow),
        pytest.param("linen", 4, marks=pytest.mark.slow),
    ],
)
def test_our_layers_equal_the_definition_on_any_ring(framework, size):
    ring = None if size == 1 else rj.Ring(ring_mesh(size), layout="zigzag")
    layer, given = ours(framework, ring=ring), (X, COTANGENT)
    if ring is not None:
        given = [stored_on(ring, ring.mesh, x) for x in given]
    out, gradient, dx = run(layer, own_parameters(), *given)
    if ring is not None:
        assert out.sharding.is_equivalent_to(NamedSharding(ring.mesh, PartitionSpec(None, "ring")), 3)
        out, dx = (rj.from_layout(np.asarray(x), "zigzag", size) for x in (out, dx))
    assert_close((out, gradient, dx), expected())


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["nnx", "linen"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layers_with_sharded_heads_equal_the_definition(framework, kind):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("ring", "tensor"), axis_types=(kind, kind))
    ring = rj.Ring(mesh, layout="zigzag", head_axis="tensor")
    layer, place = ours(framework, ring=ring), lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    over = {name: PartitionSpec(None, "tensor", None) for name in ("query", "key", "value")}
    over["out"] = PartitionSpec("tensor", None, None)
    parameters = {
        name: {
            leaf: place(x, over[name] if leaf == "kernel" else PartitionSpec(*over[name][1:]))
            if name in over and (leaf == "kernel" or name != "out")
            else place(x, PartitionSpec())
            for leaf, x in leaves.items()
        }
        for name, leaves in own_parameters().items()
    }
    given = [place(np.asarray(rj.to_layout(x, "zigzag", 2)), PartitionSpec(None, "ring", None)) for x in (X, COTANGENT)]
    with jax.set_mesh(mesh):
        out, gradient, dx = run(layer, parameters, *given)
    out, dx = (rj.from_layout(np.asarray(x), "zigzag", 2) for x in (out, dx))
    assert_close(jax.tree.map(np.asarray, (out, gradient, dx)), expected())


def test_norm_epsilon_has_the_same_effect_in_both_frameworks():
    options = {"pattern": ONE_BRANCH, "norm_epsilon": 0.5}
    by_nnx, by_linen = (
        jax.jit(ours(framework, **options), compiler_options=QUICK)(own_parameters(), X)
        for framework in ("nnx", "linen")
    )
    usual = jax.jit(ours("nnx", pattern=ONE_BRANCH), compiler_options=QUICK)(own_parameters(), X)
    assert error(by_nnx, by_linen) < LIMIT and error(by_nnx, usual) > 0.01


@pytest.mark.slow
def test_xpos_on_a_ring_equals_one_device():
    layer = ours("linen", positions="xpos")
    ring = rj.Ring(ring_mesh(2), layout="zigzag")
    out, gradient, dx = run(layer, own_parameters(), X, COTANGENT)
    stored = [stored_on(ring, ring.mesh, x) for x in (X, COTANGENT)]
    on_ring = run(ours("linen", positions="xpos", ring=ring), own_parameters(), *stored)
    whole = [rj.from_layout(np.asarray(x), "zigzag", 2) for x in (on_ring[0], on_ring[2])]
    assert_close((whole[0], on_ring[1], whole[1]), (out, gradient, dx))
    assert error(out, expected()[0]) > 1e-3  # rotary positions differ


@pytest.mark.slow
def test_each_device_computes_the_angles_of_its_own_rows_only():
    ring = rj.Ring(ring_mesh(4), layout="zigzag")
    layer = jax.jit(ours("linen", ring=ring), compiler_options=QUICK)
    program = layer.lower(own_parameters(), stored_on(ring, ring.mesh, X)).compile().as_text()
    angles = set(re.findall(r"= (\S+)\{\S* (?:cosine|sine)\(", program))
    assert angles == {f"f32[1,{LENGTH // 4},1,{DIM // 2}]"}


def test_parameters_are_annotated_with_the_head_axis():
    ring = rj.Ring(ring_mesh(2, 2, names=("ring", "tensor")), head_axis="tensor")
    layer = ringjax.nnx.DilatedSelfAttention(HEADS, FEATURES, PATTERN, ring=ring, rngs=nnx.Rngs(0))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    assert layer.query.kernel[...].sharding.spec == PartitionSpec(None, "tensor", None)
    module = ringjax.linen.DilatedSelfAttention(HEADS, PATTERN, ring=ring)
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    in_linen = linen.get_partition_spec(variables)["params"]
    for name in ("query", "key", "value"):
        for where in (specs, in_linen):
            assert where[name]["kernel"] == PartitionSpec(None, "tensor", None)
            assert where[name]["bias"] == PartitionSpec("tensor", None)
    for where in (specs, in_linen):
        assert where["out"]["kernel"] == PartitionSpec("tensor", None, None)
        assert where["out"]["bias"] == PartitionSpec()


def test_parameters_of_both_frameworks_have_the_same_names_and_shapes():
    options = {**OPTIONS, "head_dim": 6, "out_features": 10, "use_bias": False}
    make = lambda: ringjax.nnx.DilatedSelfAttention(HEADS, FEATURES, PATTERN, rngs=nnx.Rngs(0), **options)  # noqa: E731
    _, in_nnx = functional(make)
    module = ringjax.linen.DilatedSelfAttention(HEADS, PATTERN, **options)
    in_linen = jax.eval_shape(module.init, jax.random.key(0), X)["params"]
    chex.assert_trees_all_equal_shapes(in_nnx, in_linen)
    assert sorted(in_nnx) == ["key", "out", "query", "sub_norm", "value"]


def test_kernels_are_initialized_as_matrices():
    kernel = flat_initializer(nnx.initializers.lecun_normal(), 2)(jax.random.key(0), (16, 16, 64), jnp.float32)
    assert abs(float(np.std(kernel)) * 16 - 1) < 0.05


def test_layers_accept_leading_axes_segment_ids_and_positions():
    module = ringjax.linen.DilatedSelfAttention(HEADS, ONE_BRANCH, **OPTIONS)
    layer = jax.jit(lambda p, x, **keywords: module.apply({"params": p}, x, **keywords), compiler_options=QUICK)
    ids, within = np.repeat([[0, 1]], LENGTH // 2, 1).repeat(BATCH, 0), np.tile(np.arange(LENGTH // 2), (BATCH, 2))
    # rotary positions are relative, so the second document may start at 0
    plain = layer(own_parameters(), X, segment_ids=ids, positions=np.arange(LENGTH))
    many = layer(own_parameters(), X[None, :, None], segment_ids=ids[None, :, None], positions=within[None, :, None])
    assert error(many[0, :, 0], plain) <= LIMIT


def test_outputs_have_the_requested_dtype():
    attention = rj.attention_fn(PATTERN)
    arrays = [jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, DIM), jnp.float32)] * 3
    assert jax.eval_shape(attention, *arrays).dtype == jnp.float32
    assert jax.eval_shape(functools.partial(attention, dtype=jnp.bfloat16), *arrays).dtype == jnp.bfloat16
    for framework in ("nnx", "linen"):
        layer = ours(framework, dtype=jnp.bfloat16)
        with jax.numpy_dtype_promotion("standard"):  # the layer norm of Flax needs it
            assert jax.eval_shape(layer, own_parameters(), X).dtype == jnp.bfloat16
        assert jax.eval_shape(ours(framework), own_parameters(), X).dtype == jnp.float32


def test_equal_attention_fns_compare_and_hash_equal():
    one, same = (rj.attention_fn(PATTERN, is_causal=True) for _ in range(2))
    assert one == same and hash(one) == hash(same) and one != rj.attention_fn(PATTERN)
    assert repr(one).startswith("AttentionFn(pattern=DilationPattern(")


Q = np.zeros((1, 16, 2, 4), np.float32)
UNSUPPORTED = [
    ({"mask": np.ones((1, 1, 16, 16), bool)}, r"`mask` must be None \(use `is_causal`.*shape \(1, 1, 16, 16\)\."),
    ({"bias": np.ones((1, 1, 16, 16))}, r"`bias` must be None \(.*never computed\), got an array of shape"),
    ({"dropout_rate": 0.1}, r"`broadcast_dropout` must be False with active dropout \(.*got True\."),
    ({"module": object()}, r"`module` must be None \(.*never stored\), got object\."),
    ({"precision": "highest"}, r"`precision` must be None or the default, got 'highest'\."),
    ({"precision": ("highest", "highest")}, r"`precision` must be None or the default, got \('highest'"),
    ({"qk_attn_weights_einsum": jnp.einsum}, r"`qk_attn_weights_einsum` must be None"),
    ({"attn_weights_value_einsum": jnp.einsum}, r"`attn_weights_value_einsum` must be None"),
    ({"einsum_dot_general": jax.lax.dot_general}, r"`einsum_dot_general` must be None"),
    ({"input_positions": np.arange(16)}, r"`input_positions` must be None \(rotate .*got an array of shape \(16,\)\."),
]


@pytest.mark.parametrize(("keywords", "text"), UNSUPPORTED)
def test_unsupported_arguments_of_attention_fn_raise(keywords, text):
    with pytest.raises(NotImplementedError, match=text):
        rj.attention_fn(PATTERN)(Q, Q, Q, **keywords)


def test_unsupported_arguments_of_stock_layers_raise():
    mask = np.ones((1, 1, 16, 16), bool)
    x = X[:1, :16]
    attention = rj.attention_fn(PATTERN)
    layer = nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=attention, decode=False, rngs=nnx.Rngs(0))
    module = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention)
    dropping = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention, dropout_rate=0.5)
    init = lambda module, **keywords: jax.eval_shape(  # noqa: E731
        lambda key: module.init({"params": key, "dropout": key}, x, **keywords), jax.random.key(0)
    )
    with pytest.raises(NotImplementedError, match="`mask` must be None"):
        layer(x, mask=mask)
    with pytest.raises(NotImplementedError, match="`module` must be None"):
        layer(x, sow_weights=True)
    with pytest.raises(ValueError, match=r"`is_causal` must be False in calls of .*, got True\."):
        layer(x, is_causal=True)
    with pytest.raises(NotImplementedError, match="`mask` must be None"):
        init(module, mask=mask)
    with pytest.raises(NotImplementedError, match="`module` must be None"):
        init(module, sow_weights=True)
    with pytest.raises(NotImplementedError, match="`broadcast_dropout` must be False"):
        init(dropping, deterministic=False)
    init(dropping, deterministic=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_kv_heads": 3}, "`num_heads` must be a multiple of `num_kv_heads`, got 4 and 3"),
        (
            {"num_heads": 5},
            "`in_features` must be a multiple of `num_heads` if `head_dim` is not given, got 32 and 5",
        ),
        ({"positions": "sine"}, r"`positions` must be None or one of \('rotary', 'xpos'\), got 'sine'"),
        ({"positions": "rotary", "head_dim": 5}, "`head_dim` must be even for `positions='rotary'`, got 5"),
        ({"positions": "xpos"}, '`is_causal` must be True for `positions="xpos"`'),
        ({"pattern": 3}, "`pattern` must be a DilationPattern, got int"),
        ({"is_causal": 1}, "`is_causal` must be a bool, got 1"),
        ({"ring": "ring"}, "`ring` must be a Ring, got str"),
    ],
)
def test_invalid_arguments_of_layers_raise(options, text):
    options = {"num_heads": HEADS, "pattern": PATTERN, **options}
    with pytest.raises(ValueError, match=text):
        ringjax.nnx.DilatedSelfAttention(in_features=FEATURES, rngs=nnx.Rngs(0), **options)
    module = ringjax.linen.DilatedSelfAttention(**options)
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(module.init, jax.random.key(0), X)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"positions": np.arange(8)}, r"`positions` must have shape \(length,\) or \(batch, length\) = \(2, 64\)"),
        ({"positions": np.ones((3, 64), int)}, r"`positions` must have shape \(batch..., length\) = \(2, 64\)"),
        ({"positions": np.ones(64)}, "`positions` must be an integer array, got float64"),
        ({"segment_ids": np.ones((64,), int)}, r"`segment_ids` must have shape \(batch..., length\) = \(2, 64\)"),
    ],
)
def test_invalid_arguments_of_layer_calls_raise(keywords, text):
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(lambda p, x: ours("linen")(p, x, **keywords), own_parameters(), X)


def test_positions_for_a_layer_without_them_raise():
    module = ringjax.linen.DilatedSelfAttention(HEADS, PATTERN)
    with pytest.raises(ValueError, match='`positions` must be None for a layer without "rotary" or "xpos"'):
        jax.eval_shape(lambda x: module.init(jax.random.key(0), x, positions=np.arange(LENGTH)), X)


def test_xpos_layer_on_too_long_a_sequence_raises():
    with pytest.raises(ValueError, match=r"`length` must be at most 65536 for xPos, .*got 70000"):
        jax.eval_shape(ours("linen", positions="xpos"), own_parameters(), np.zeros((1, 70_000, FEATURES), np.float32))


def test_compute_dtype_is_bfloat16_where_the_hardware_supports_it():
    device = lambda platform, **more: SimpleNamespace(platform=platform, **more)  # noqa: E731
    assert rj.compute_dtype() == jnp.float32
    assert rj.compute_dtype(device("tpu")) == jnp.bfloat16
    assert rj.compute_dtype(device("gpu", compute_capability="9.0")) == jnp.bfloat16
    assert rj.compute_dtype(device("gpu", compute_capability="7.5")) == jnp.float32
    assert rj.compute_dtype(device("gpu", compute_capability="gfx90a")) == jnp.float32
