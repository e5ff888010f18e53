"""Attention dropout equals the oracle and drops the same weights on every ring, layout, block and pass."""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    NAMES,
    QUICK,
    RANDOM,
    Case,
    assert_equals_oracle,
    assert_sharded_equals_oracle,
    error,
    geometries,
    on_ring,
    ring_mesh,
    run,
    slow_unless,
)
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flax import BATCH, FEATURES, HEADS, LENGTH, X, ours, own_parameters
from test_models import TOKENS, config_of, drawn, functional
from test_ring_meshes import in_shard_map

import ringjax as rj
import ringjax.linen
import ringjax.nnx
from ringjax._src import dropout
from ringjax.models import LongNetDecoder

BASE = Case(length=64, q_per_kv=2, segment_lengths=(16, 64), dilation_rates=(1, 4), dropout_rate=0.3)
KEY = jax.random.key(5)


def weights(q, k, case: Case, **options):
    """Returns the attention weights (B, N, T, T): the attention over values that are unit vectors."""
    ones = np.broadcast_to(np.eye(case.length)[None, :, None], (case.batch, case.length, case.kv_heads, case.length))
    wide = [np.pad(x, [(0, 0)] * 3 + [(0, case.length - case.head_dim)]) for x in (q, k)]
    given = {**case.keywords(), "scale": 1.0, **options}
    attend = jax.jit(lambda *x: rj.dilated_attention(*x, case.pattern, **given), compiler_options=QUICK)
    out = attend(*wide, ones.astype(np.float32))
    return np.asarray(out.transpose(0, 2, 1, 3))


def plain_hash(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def test_dropped_weights_are_the_documented_hash_of_entry_head_query_key_and_branch():
    """The hash is computed with Python integers from the two 32-bit words of the key."""
    case = Case(
        length=12,
        q_per_kv=2,
        head_dim=4,
        segment_lengths=(4, 12),
        dilation_rates=(1, 3),
        is_causal=True,
        dropout_rate=0.4,
    )
    q, k, *_ = case.arrays(np.float32)
    got = weights(q, k, case)
    whole = weights(q, k, case, dropout_rate=0.0)
    first, second = (int(x) for x in np.asarray(jax.random.bits(KEY, (2,), jnp.uint32)))
    odd, limit = 0x9E3779B9, round(0.4 * 2**32)
    drops = 0
    for b, n, p, s in np.ndindex(*got.shape):
        seed = plain_hash(plain_hash((first + b * odd) % 2**32) ^ plain_hash(second ^ n))
        attended = kept = 0
        for i, (w, r) in enumerate(zip(case.segment_lengths, case.dilation_rates, strict=True)):
            if p // w == s // w and s <= p and p % w % r == s % w % r == (n // 2) % r:
                mine = plain_hash(plain_hash((seed + (i + 1) * odd) % 2**32) ^ plain_hash(p))
                attended += 1
                kept += plain_hash((mine + plain_hash(s ^ odd)) % 2**32) >= limit
        drops += attended - kept
        factor = kept / attended / 0.6 if attended else 0
        np.testing.assert_allclose(got[b, n, p, s], whole[b, n, p, s] * factor, rtol=1e-5)
    assert drops > 20


CASES = {
    "causal": BASE._replace(is_causal=True, ids=True),
    "full": BASE._replace(length=61, segment_lengths=(15, 70), dilation_rates=(2, 3), scale=0.5),
    "detached": BASE._replace(rule="detached", is_causal=True, seq_len=60),
    "split": BASE._replace(rule="split", kv_heads=4, q_per_kv=1, ids=True),
    "several blocks": Case(
        length=2304,
        batch=1,
        kv_heads=1,
        segment_lengths=(2304, 600),
        dilation_rates=(1, 2),
        is_causal=True,
        dropout_rate=0.1,
    ),
}
DEFAULT = [("causal", "float32"), ("detached", "float64")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=slow_unless((name, dtype) in DEFAULT))
        for name in CASES
        for dtype in ("float64", "float32")
    ],
)
def test_equals_oracle(name, dtype):
    assert_equals_oracle(CASES[name], dtype, compiler_options=QUICK)


@settings(max_examples=60, **RANDOM)
@given(case=geometries(most_branches=3, longest=40), rate=st.sampled_from([0.01, 0.5, 0.95]))
@pytest.mark.slow
def test_random_geometry_equals_oracle(case, rate):
    assert_equals_oracle(case._replace(dropout_rate=rate), "float64")


class DropoutRing(NamedTuple):
    """An attention call with dropout and its ring."""

    case: Case
    ring_size: int
    layout: str
    strategy: str = "ring"
    is_default: bool = False


RINGS = {
    "one branch, zigzag": DropoutRing(
        BASE._replace(segment_lengths=(64,), dilation_rates=(4,), is_causal=True),
        ring_size=2,
        layout="zigzag",
        is_default=True,
    ),
    "zigzag": DropoutRing(BASE._replace(is_causal=True), ring_size=2, layout="zigzag"),
    "unaligned": DropoutRing(
        BASE._replace(length=59, segment_lengths=(20, 59), dilation_rates=(2, 3), ids=True),
        ring_size=3,
        layout="zigzag",
    ),
    "gathered": DropoutRing(
        BASE._replace(rule="split", kv_heads=4, is_causal=True),
        ring_size=4,
        layout="contiguous",
        strategy="all_gather",
    ),
    "detached": DropoutRing(BASE._replace(rule="detached", is_causal=True), ring_size=8, layout="contiguous"),
    "queries move": DropoutRing(
        Case(length=2120, batch=1, segment_lengths=(2120,), dilation_rates=(1,), is_causal=True, dropout_rate=0.2),
        ring_size=2,
        layout="zigzag",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(RINGS[name].is_default)) for name in RINGS])
def test_ring_equals_oracle(name):
    given = RINGS[name]
    ring = rj.Ring(ring_mesh(given.ring_size), layout=given.layout, strategy=given.strategy)
    assert_equals_oracle(given.case, "float64", on_ring(ring))


@pytest.mark.slow
def test_batch_and_heads_over_other_axes_equal_oracle():
    mesh = ring_mesh(2, 2, 2, names=("data", "ring", "tensor"))
    ring = rj.Ring(mesh, batch_axis="data", head_axis="tensor", layout="zigzag")
    case = BASE._replace(is_causal=True)
    assert_sharded_equals_oracle(case, ring)


@pytest.mark.slow
def test_ring_inside_a_shard_map_equals_oracle():
    mesh = ring_mesh(2, 2, 2, names=("data", "ring", "tensor"))
    ring = rj.Ring(mesh, batch_axis="data", head_axis="tensor", layout="zigzag")
    case = BASE._replace(is_causal=True)
    shared = in_shard_map(ring, head_axis="tensor", batch_axis="data")
    assert_sharded_equals_oracle(case, ring, attention=shared)


@pytest.mark.slow
def test_bfloat16_on_a_ring_drops_the_same_weights_as_the_oracle():
    case = BASE._replace(is_causal=True)
    arrays = case.arrays("bfloat16")
    ring = rj.Ring(ring_mesh(4), layout="zigzag")
    ours = run(on_ring(ring), arrays, case.pattern, **case.keywords(), compiler_options=QUICK)
    wide = [x.astype(jnp.float32) for x in arrays]
    oracle = run(rj.reference_attention, wide, case.pattern, **case.keywords(), compiler_options=QUICK)
    for name, x, reference in zip(NAMES, ours, oracle, strict=True):
        assert x.dtype == jnp.bfloat16
        assert error(x, reference) < 0.01, name


def test_weights_are_dropped_independently_at_the_given_rate():
    """Fractions of dropped weights, and of dropped neighbor pairs along each axis, within 5 standard deviations."""
    rate, batch, heads, rows = 0.25, 2, 3, 256
    seeds = dropout.seeds_of(dropout.key_bits(KEY), batch, heads)
    places = jnp.arange(rows)
    dropped = []
    for branch in range(2):
        mine = dropout.query_hashes(seeds[..., None], places[None, None], branch).ravel()
        found = dropout.factors(mine, dropout.key_hashes(places), rate, jnp.float32)
        assert set(np.unique(found)) == {0, np.float32(1 / (1 - rate))}
        dropped.append(np.asarray(found).reshape(batch, heads, rows, rows) == 0)
    dropped = np.stack(dropped)
    assert abs(dropped.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / dropped.size)
    for axis in range(dropped.ndim):
        first, second = (
            np.take(dropped, range(*span), axis) for span in ((0, dropped.shape[axis] - 1), (1, dropped.shape[axis]))
        )
        both, share = (first & second).mean(), rate**2
        assert abs(both - share) < 5 * np.sqrt(share * (1 - share) / first.size), axis
    per_row = dropped.mean(axis=-1)
    assert per_row.std() == pytest.approx(np.sqrt(rate * (1 - rate) / rows), rel=0.1)


def test_rate_0_traces_the_program_without_dropout():
    case = BASE._replace(dropout_rate=0.0)
    q, k, v, _ = case.arrays(np.float32)
    attend = functools.partial(rj.dilated_attention, pattern=case.pattern)
    plain, off = (
        jax.make_jaxpr(functools.partial(attend, **options))(q, k, v) for options in ({}, {"dropout_rng": KEY})
    )
    assert str(plain) == str(off)


def test_one_program_serves_every_dropout_key():
    q, k, v, _ = BASE.arrays(np.float32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    @chex.assert_max_traces(n=1)
    def attend(q, k, v, rng):
        return rj.dilated_attention(q, k, v, BASE.pattern, dropout_rate=0.5, dropout_rng=rng)

    first, other, again = (np.asarray(attend(q, k, v, jax.random.key(seed))) for seed in (0, 1, 0))
    chex.assert_trees_all_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("rate", [1.0, -0.1, "half", float("nan"), True])
def test_rate_outside_0_to_1_raises(rate):
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"`dropout_rate` must be .* of at least 0 and below 1, got "):
        rj.dilated_attention(x, x, x, BASE.pattern, dropout_rate=rate, dropout_rng=KEY)


def test_dropout_requires_a_key_and_plain_xla():
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"`dropout_rng` must be a `jax.random` key .*got None"):
        rj.dilated_attention(x, x, x, BASE.pattern, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"`dropout_rng` must be a `jax.random` key"):
        rj.dilated_attention(x, x, x, BASE.pattern, dropout_rate=0.5, dropout_rng=jnp.ones(3))
    with pytest.raises(ValueError, match=r"`block_sizes` must be None with `dropout_rate` above 0"):
        sizes = rj.BlockSizes(query=16, key=16)
        rj.dilated_attention(x, x, x, BASE.pattern, dropout_rate=0.5, dropout_rng=KEY, block_sizes=sizes)
    assert not rj.dilated_attention(x, x, x, BASE.pattern, dropout_rate=1 - 1e-12, dropout_rng=KEY).any()
    with pytest.raises(NotImplementedError, match=r'`implementation` must be None or "xla" .*got \'interpret_tpu\''):
        rj.dilated_attention(x, x, x, BASE.pattern, dropout_rate=0.5, dropout_rng=KEY, implementation="interpret_tpu")


LAYER = {"dropout_rate": 0.3, "positions": None, "sub_norm": False}
ONE_BRANCH = rj.DilationPattern((64,), (4,))  # compiles faster


def layer_of(framework, **options):
    """Returns a compiled layer: a function of input and key."""
    layer = ours(framework, pattern=ONE_BRANCH, **LAYER, **options)
    parameters = {name: p for name, p in own_parameters().items() if name != "sub_norm"}
    name = {"nnx": "rngs", "linen": "dropout_rng"}[framework]
    return jax.jit(lambda x, key: layer(parameters, x, **{name: key}), compiler_options=QUICK)


@pytest.mark.slow
def test_nnx_linen_and_ring_layers_drop_the_same_weights():
    by_nnx = layer_of("nnx")(X, KEY)
    ring = rj.Ring(ring_mesh(2), layout="zigzag")
    stored = layer_of("nnx", ring=ring)(ring.shard(X), KEY)
    for other in (layer_of("linen")(X, KEY), ring.unshard(stored)):
        assert error(other, by_nnx) < 2e-6
    assert error(layer_of("nnx")(X, jax.random.key(1)), by_nnx) > 0.1


def test_layers_drop_nothing_in_evaluation():
    layer, same = (
        ringjax.nnx.DilatedSelfAttention(HEADS, FEATURES, ONE_BRANCH, dropout_rate=rate, rngs=nnx.Rngs(0))
        for rate in (0.3, 0.0)
    )
    with pytest.raises(ValueError, match=r"`rngs` must be given if dropout is active .*got None"):
        layer(X)
    plain = same(X)
    rngs = nnx.Rngs(dropout=3)
    first, second = layer(X, rngs=rngs), layer(X, rngs=rngs.dropout)
    assert (first != second).any()  # each call draws a new key
    assert (layer(X, deterministic=True) == plain).all()
    layer.eval()
    assert (layer(X) == plain).all()


def test_linen_layer_draws_keys_from_its_dropout_stream():
    module = ringjax.linen.DilatedSelfAttention(HEADS, ONE_BRANCH, dropout_rate=0.3)
    parameters = module.init(jax.random.key(0), X, deterministic=True)
    plain = module.apply(parameters, X, deterministic=True)
    dropped = module.apply(parameters, X, rngs={"dropout": KEY})
    assert (plain != dropped).any()
    assert (plain == ringjax.linen.DilatedSelfAttention(HEADS, ONE_BRANCH).apply(parameters, X)).all()


def test_stock_linen_layer_drops_the_weights_of_the_oracle():
    pattern = rj.DilationPattern((16,), (2,))
    options = {"dropout_rate": 0.3, "broadcast_dropout": False, "deterministic": False}
    stock = linen.MultiHeadDotProductAttention(HEADS, attention_fn=rj.attention_fn(pattern, is_causal=True), **options)
    parameters = stock.init({"params": KEY, "dropout": KEY}, X)
    p = parameters["params"]
    q, k, v = (jnp.einsum("btf,fnh->btnh", X, p[name]["kernel"]) for name in ("query", "key", "value"))
    options = {"is_causal": True, "dropout_rate": 0.3, "dropout_rng": KEY}
    oracle = jax.jit(lambda *x: rj.reference_attention(*x, pattern, **options), compiler_options=QUICK)
    out = oracle(q, k, v)
    out = jnp.einsum("btnh,nhf->btf", out, p["out"]["kernel"])
    assert out.shape == (BATCH, LENGTH, FEATURES)
    apply = jax.jit(lambda p, x, key: stock.apply(p, x, dropout_rng=key), compiler_options=QUICK)
    assert error(apply(parameters, X, KEY), out) < 2e-6


def logits_of(config, ring=None):
    """Returns a compiled decoder: a function of tokens (in sequence order) and key."""
    model, shapes = functional(LongNetDecoder, config, ring)
    parameters = drawn(shapes)

    def logits(tokens, key):
        out = model(parameters)(tokens if ring is None else ring.shard(tokens), dropout_rng=key)
        return out if ring is None else ring.unshard(out)

    return jax.jit(logits, compiler_options=QUICK)


@pytest.mark.slow
def test_models_drop_with_a_new_key_per_layer_and_only_in_training():
    config = config_of(attention_dropout_rate=0.3)
    dropped = logits_of(config)(TOKENS, KEY)
    _, shapes = functional(LongNetDecoder, config)
    keys = []

    def recorded(query, *_, dropout_rng, **__):
        keys.append(dropout_rng)
        return query

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringjax._src.flax.self_attention.dilated_attention", recorded)
        plainly = dataclasses.replace(config, scan_layers=False, remat=False)
        unrolled, _ = functional(LongNetDecoder, plainly)
        with jax.disable_jit():
            layers = unrolled(drawn(shapes))
            layers(TOKENS[:1, :8], dropout_rng=KEY)
            layers.eval()
            layers(TOKENS[:1, :8], dropout_rng=KEY)
    given, in_evaluation = keys[:2], keys[2:]
    assert [jax.random.key_data(x).tolist() for x in given] == jax.random.key_data(jax.random.split(KEY, 2)).tolist()
    assert in_evaluation == [None, None]
    assert error(logits_of(dataclasses.replace(config, scan_layers=False))(TOKENS, KEY), dropped) < 1e-5
    plain = logits_of(config_of())(TOKENS, None)
    assert (logits_of(config)(TOKENS, None) == plain).all()
    assert error(dropped, plain) > 0.01


@pytest.mark.slow
def test_models_on_a_ring_drop_the_same_weights():
    config = config_of(attention_dropout_rate=0.3)
    ring = rj.Ring(ring_mesh(2, 2, names=("ring", "tensor")), layout="zigzag", head_axis="tensor")
    assert error(logits_of(config, ring)(TOKENS, KEY), logits_of(config)(TOKENS, KEY)) < 1e-5
