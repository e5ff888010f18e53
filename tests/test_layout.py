"""Layouts: storage order, padding, gradients, sharding and errors of `to_layout` and `from_layout`."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ringjax._src.comm.layout import CONTIGUOUS, ZIGZAG, from_layout, layout_named, positions, to_layout

LAYOUTS = ("contiguous", "zigzag")
RING_SIZES = (1, 2, 3, 4, 5, 8)


def stored_positions(layout, stored_length, ring_size):
    """Returns the positions of the stored rows, device by device, by the definition."""
    if layout == "contiguous":
        return list(range(stored_length))
    c = stored_length // (2 * ring_size)
    chunks = [chunk for i in range(ring_size) for chunk in (i, 2 * ring_size - 1 - i)]
    return [p for chunk in chunks for p in range(chunk * c, (chunk + 1) * c)]


def test_layouts_are_hashable_and_immutable():
    assert layout_named("contiguous") is CONTIGUOUS
    assert layout_named("zigzag") is ZIGZAG
    assert len({CONTIGUOUS, ZIGZAG, layout_named("zigzag")}) == 2
    with pytest.raises(AttributeError):
        ZIGZAG.chunks = 3


def test_zigzag_gives_device_i_chunks_i_and_2n_minus_1_minus_i():
    assert (CONTIGUOUS.multiple(4), ZIGZAG.multiple(4)) == (4, 8)
    assert [CONTIGUOUS.chunk_of(i, 0, 4) for i in range(4)] == [0, 1, 2, 3]
    assert [(ZIGZAG.chunk_of(i, 0, 4), ZIGZAG.chunk_of(i, 1, 4)) for i in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert ZIGZAG.order(4) == (0, 7, 1, 6, 2, 5, 3, 4)
    traced = jax.jit(lambda device: (ZIGZAG.chunk_of(device, 0, 4), ZIGZAG.chunk_of(device, 1, 4)))
    assert [int(chunk) for chunk in traced(1)] == [1, 6]


@pytest.mark.parametrize("ring_size", RING_SIZES)
def test_zigzag_storage_puts_both_chunks_on_their_device(ring_size):
    c = 3
    chunks = np.arange(2 * ring_size * c).reshape(2 * ring_size, c)
    devices = to_layout(chunks.reshape(-1), "zigzag", ring_size, axis=0).reshape(ring_size, 2, c)
    for i in range(ring_size):
        np.testing.assert_array_equal(devices[i], chunks[[i, 2 * ring_size - 1 - i]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring_size", RING_SIZES)
def test_positions_equal_the_definition(layout, ring_size):
    stored_length = 6 * ring_size
    result = positions(layout, stored_length, ring_size)
    assert result.dtype == jnp.int32
    assert result.tolist() == stored_positions(layout, stored_length, ring_size)
    assert result.tolist() == to_layout(np.arange(stored_length), layout, ring_size, axis=0).tolist()


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(LAYOUTS), st.sampled_from(RING_SIZES), st.integers(0, 70), st.integers(-3, 2))
def test_round_trip_is_exact(layout, ring_size, length, axis):
    shape = [2, 3, 4]
    shape[axis] = length
    x = np.random.default_rng(length).standard_normal(shape, np.float32)
    stored = to_layout(x, layout, ring_size, axis, fill=-1)
    stored_length = stored.shape[axis]
    assert length <= stored_length < length + 2 * ring_size
    assert stored_length % layout_named(layout).multiple(ring_size) == 0
    padded = np.concatenate([np.moveaxis(x, axis, 0), -np.ones_like(np.moveaxis(stored, axis, 0)[length:])])
    expected = padded[stored_positions(layout, stored_length, ring_size)]
    np.testing.assert_array_equal(np.moveaxis(stored, axis, 0), expected)
    np.testing.assert_array_equal(from_layout(stored, layout, ring_size, axis, length), x)
    np.testing.assert_array_equal(np.moveaxis(from_layout(stored, layout, ring_size, axis), axis, 0), padded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "int32", "int8", "uint8", "bool"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_dtype_is_preserved(layout, dtype):
    x = jnp.arange(13).astype(dtype)
    stored = to_layout(x, layout, 3, axis=0, fill=1)
    assert stored.dtype == x.dtype
    expected = np.pad(np.asarray(x), (0, stored.size - 13), constant_values=1)
    np.testing.assert_array_equal(stored, expected[stored_positions(layout, stored.size, 3)])
    np.testing.assert_array_equal(from_layout(stored, layout, 3, axis=0, length=13), x)


def test_segment_ids_are_padded_with_minus_one():
    assert to_layout(np.zeros((1, 5), np.int32), "zigzag", 2, fill=-1).tolist() == [[0, 0, -1, -1, 0, 0, 0, -1]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [24, 21])
def test_gradient_is_the_inverse_permutation(layout, length):
    x, weights = jax.random.normal(jax.random.key(0), (2, 2, 24, 3))
    x = x[:, :length]
    gradient = jax.jit(jax.grad(lambda x: (to_layout(x, layout, 4) * weights).sum()))(x)
    np.testing.assert_array_equal(gradient, from_layout(weights, layout, 4, length=length))
    gradient = jax.grad(lambda w: (from_layout(w, layout, 4, length=length) * x).sum())(weights)
    np.testing.assert_array_equal(gradient, to_layout(x, layout, 4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec("data", "ring")], ids=["whole", "sharded"])
def test_gradient_on_an_explicit_mesh_keeps_the_sharding(layout, spec):
    """No mesh is set around the `jit`: the sharding comes from the arrays."""
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Explicit,) * 2)
    host = np.random.default_rng(0).standard_normal((2, 2, 24, 3), np.float32)
    x, weights = (jax.device_put(rows, NamedSharding(mesh, spec)) for rows in host)
    stored, whole = NamedSharding(mesh, PartitionSpec("data", "ring")), NamedSharding(mesh, PartitionSpec("data"))

    def stored_sum(x, weights):
        return (jax.reshard(to_layout(x, layout, 4), stored) * jax.reshard(weights, stored)).sum()

    def ordered_sum(weights, x):
        return (from_layout(weights, layout, 4) * jax.reshard(x, whole)).sum()

    gradients = jax.jit(jax.grad(stored_sum))(x, weights), jax.jit(jax.grad(ordered_sum))(weights, x)
    assert all(g.sharding.is_equivalent_to(x.sharding, 3) for g in gradients)
    chex.assert_trees_all_equal(gradients, (from_layout(host[1], layout, 4), to_layout(host[0], layout, 4)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jit_vmap_and_jvp_equal_plain_calls(layout):
    x = jax.random.normal(jax.random.key(0), (2, 13, 3))
    expected = to_layout(x, layout, 3)
    np.testing.assert_array_equal(jax.jit(to_layout, static_argnums=(1, 2))(x, layout, 3), expected)
    np.testing.assert_array_equal(jax.vmap(lambda row: to_layout(row, layout, 3, axis=0))(x), expected)
    np.testing.assert_array_equal(jax.vmap(lambda row: from_layout(row, layout, 3, axis=0, length=13))(expected), x)
    primal, tangent = jax.jvp(lambda x: to_layout(x, layout, 3), (x,), (x,))
    np.testing.assert_array_equal(primal, tangent)


def constant_sizes(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* constant\(", text)
    return [int(np.prod([int(n) for n in shape.split(",") if n], initial=1)) for shape in shapes]


@pytest.mark.parametrize("length", [1024, 65536])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_constants_do_not_grow_with_the_length(layout, length):
    x = jax.ShapeDtypeStruct((1, length, 2), jnp.float32)
    sizes = [
        *constant_sizes(lambda x: to_layout(x, layout, 4), x),
        *constant_sizes(lambda x: from_layout(x, layout, 4), x),
        *constant_sizes(jax.grad(lambda x: (to_layout(x, layout, 4) ** 2).sum()), x),
        *constant_sizes(lambda: positions(layout, length, 4)),
    ]
    assert max(sizes, default=0) <= 1
    assert 8 in constant_sizes(
        lambda x: x * np.float32([3, 1, 4, 1, 5, 9, 2, 6]), jax.ShapeDtypeStruct((8,), jnp.float32)
    )


@pytest.mark.parametrize("ring_size", [2, 8])
@pytest.mark.parametrize("function", [to_layout, from_layout])
def test_no_device_gathers_a_sharded_sequence(function, ring_size):
    mesh = jax.make_mesh((ring_size,), ("ring",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "ring"))
    x = jax.ShapeDtypeStruct((1, 4096, 64), jnp.float32, sharding=sharding)
    compiled = jax.jit(lambda x: function(x, "zigzag", ring_size), out_shardings=sharding).lower(x).compile()
    assert "all-gather" not in compiled.as_text()
    shard_bytes = 4096 * 64 * 4 // ring_size
    # at most three shards: one received, one sent, one assembled
    assert compiled.memory_analysis().temp_size_in_bytes <= 3.1 * shard_bytes


X = np.zeros((2, 12, 3))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: layout_named("x"), "`layout` must be one of ('contiguous', 'zigzag'), got 'x'."),
        (lambda: to_layout(X, "x", 2), "`layout` must be one of ('contiguous', 'zigzag'), got 'x'."),
        (lambda: from_layout(X, ["zigzag"], 2), "`layout` must be one of ('contiguous', 'zigzag'), got ['zigzag']."),
        (lambda: positions(None, 8, 2), "`layout` must be one of ('contiguous', 'zigzag'), got None."),
        (lambda: to_layout(X, "zigzag", 0), "`ring_size` must be at least 1, got 0."),
        (lambda: from_layout(X, "zigzag", 2.0), "`ring_size` must be an integer, got 2.0."),
        (lambda: positions("zigzag", 8, True), "`ring_size` must be an integer, got True."),
        (lambda: to_layout(X.tolist(), "zigzag", 2), "`x` must be an array, got list."),
        (lambda: to_layout(X, "zigzag", 2, axis=3), "`axis` must be less than the rank 3 of `x`, got 3."),
        (lambda: to_layout(X, "zigzag", 2, axis=-4), "`axis` must be at least -3, got -4."),
        (lambda: from_layout(X[0, 0, 0], "zigzag", 2, axis=0), "`axis` must be less than the rank 0 of `x`, got 0."),
        (lambda: from_layout(X, "zigzag", 2, axis=1.0), "`axis` must be an integer, got 1.0."),
        (
            lambda: from_layout(X, "zigzag", 4, axis=-2),
            "`x` along axis 1 must be a multiple of 8 (zigzag, ring of 4), got 12.",
        ),
        (lambda: from_layout(X, "zigzag", 3, length=13), "`length` must be at most the stored length 12, got 13."),
        (lambda: from_layout(X, "zigzag", 3, length=-1), "`length` must be at least 0, got -1."),
        (
            lambda: positions("contiguous", 9, 2),
            "`stored_length` must be a multiple of 2 (contiguous, ring of 2), got 9.",
        ),
        (lambda: positions("zigzag", 0, 2), "`stored_length` must be at least 1, got 0."),
    ],
)
def test_invalid_arguments_raise_and_name_the_argument(call, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call()


def test_to_layout_pads_to_a_given_length():
    stored = to_layout(np.arange(5), "zigzag", 2, axis=0, fill=-1, length=12)
    assert stored.tolist() == [0, 1, 2, -1, -1, -1, 3, 4, -1, -1, -1, -1]
    assert from_layout(stored, "zigzag", 2, axis=0, length=5).tolist() == list(range(5))
    with pytest.raises(ValueError, match="`length` must be at least that of the sequence, 5, got 4"):
        to_layout(np.arange(5), "zigzag", 2, axis=0, length=4)
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        to_layout(np.arange(5), "zigzag", 2, axis=0, length=10)
