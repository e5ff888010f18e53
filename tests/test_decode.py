"""Decoding with a cache equals the attention of the whole sequence at every position."""

import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    QUICK,
    RANDOM,
    RULES,
    TOLERANCE,
    Case,
    by_definition,
    covering,
    error,
    geometries,
    pairwise,
    ring_mesh,
    slow_unless,
    stored_on,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ringjax as rj

SLOW = pytest.mark.slow
COMPILE = functools.partial(jax.jit, compiler_options=QUICK)


def cache_for(case: Case, dtype=np.float64, max_len=None, **keywords) -> rj.DecodeCache:
    max_len = case.length if max_len is None else max_len
    return rj.init_cache(
        case.pattern,
        batch=case.batch,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        max_len=max_len,
        dtype=dtype,
        **keywords,
    )


def oracle(case: Case):
    """Returns the arrays in float64 and the output for the whole sequence."""
    arrays = case.arrays(np.float64)
    return arrays[:3], by_definition(case._replace(is_causal=True), arrays)[0]


def token_by_token(case: Case, cache, q, k, v, **keywords):
    """Decodes one token after the other in one compiled loop."""

    def step(cache, new):
        out, cache = rj.decode_step(cache, *(x[:, None] for x in new), scale=case.scale, **keywords)
        return cache, out[:, 0]

    cache, outs = COMPILE(lambda *a: lax.scan(step, a[0], tuple(jnp.moveaxis(x, 1, 0) for x in a[1:])))(cache, q, k, v)
    return jnp.moveaxis(outs, 0, 1), cache


def assert_decodes(case: Case, **keywords) -> None:
    with jax.enable_x64(True):
        (q, k, v), whole = oracle(case)
        out, cache = token_by_token(case, cache_for(case), q, k, v, **keywords)
        assert error(out, whole) <= 1e-10, case
        assert cache.lengths.tolist() == [case.length] * case.batch


class Heads(NamedTuple):
    """Numbers of heads."""

    kv_heads: int
    q_per_kv: int


class Branches(NamedTuple):
    """Segment lengths and dilation rates of a pattern."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]


GRID = pairwise(
    rule=RULES,
    heads=[
        Heads(kv_heads=4, q_per_kv=1),
        Heads(kv_heads=2, q_per_kv=3),
        Heads(kv_heads=1, q_per_kv=4),
        Heads(kv_heads=5, q_per_kv=2),
    ],
    branches=[
        Branches(segment_lengths=(16, 64), dilation_rates=(1, 4)),
        Branches(segment_lengths=(8,), dilation_rates=(3,)),
        Branches(segment_lengths=(5, 12, 100), dilation_rates=(2, 5, 7)),
        Branches(segment_lengths=(1, 7, 30), dilation_rates=(1, 9, 4)),
    ],
)
DEFAULT = covering(GRID)


@pytest.mark.parametrize("row", [pytest.param(row, marks=slow_unless(row in DEFAULT)) for row in GRID])
def test_token_by_token_equals_the_whole_sequence(row):
    shape = {**row["heads"]._asdict(), **row["branches"]._asdict()}
    assert_decodes(Case(length=70, head_dim=4, rule=row["rule"], is_causal=True, **shape))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2), ("float16", 2e-3)])
def test_output_and_cache_have_the_dtype_of_the_inputs(dtype, tolerance):
    case = Case(length=40, segment_lengths=(8, 32), q_per_kv=2, is_causal=True)
    q, k, v, _ = case.arrays(dtype)
    whole = by_definition(case, (q, k, v, q))[0]
    out, cache = token_by_token(case, cache_for(case, dtype), q, k, v)
    assert out.dtype == dtype and cache.keys[0].dtype == dtype
    assert error(out.astype(np.float32), whole) <= tolerance


def assert_any_split(case: Case, sizes: list[int], prompt: int, counts_seed: int) -> None:
    """Prefills `prompt` tokens, then appends chunks of these sizes, of which each entry uses a random part."""
    rng = np.random.default_rng(counts_seed)
    with jax.enable_x64(True):
        (q, k, v), whole = oracle(case)
        start = rng.integers(0, prompt + 1, case.batch).astype(np.int32)
        fill = COMPILE(lambda k, v, n: rj.prefill(cache_for(case), k, v, n))
        cache = fill(k[:, :prompt], v[:, :prompt], start) if prompt else cache_for(case)
        at, got = start.copy() if prompt else np.zeros(case.batch, int), np.array(whole)
        step = COMPILE(functools.partial(rj.decode_step, scale=case.scale))
        entry = np.arange(case.batch)[:, None]
        for n in sizes:
            counts = np.minimum(rng.integers(0, n + 1, case.batch), case.length - at).astype(np.int32)
            where = at[:, None] + np.arange(n)
            is_real = np.arange(n) < counts[:, None]
            index = (entry, np.minimum(where, case.length - 1))
            chunk = [np.where(is_real[..., None, None], np.asarray(x)[index], np.nan) for x in (q, k, v)]
            out, cache = step(cache, *chunk, counts=counts)
            out = np.asarray(out)
            assert not out[~is_real].any(), "padding must return 0"
            got[entry.repeat(n, 1)[is_real], where[is_real]] = out[is_real]
            at += counts
            assert cache.lengths.tolist() == at.tolist()
        assert error(got, whole) <= 1e-10, (case, sizes, prompt)


def test_chunks_that_cross_several_segments_equal_the_whole_sequence():
    case = Case(
        length=90,
        batch=3,
        q_per_kv=2,
        head_dim=4,
        segment_lengths=(6, 20, 64),
        dilation_rates=(1, 3, 5),
        is_causal=True,
    )
    assert_any_split(case, [30, 1, 30, 1, 30, 30], prompt=31, counts_seed=0)


def test_appending_the_whole_sequence_as_one_chunk_equals_prefill():
    case = Case(
        length=60, kv_heads=3, head_dim=4, segment_lengths=(7, 25), dilation_rates=(2, 3), rule="block", is_causal=True
    )
    with jax.enable_x64(True):
        (q, k, v), whole = oracle(case)
        out, cache = COMPILE(rj.decode_step)(cache_for(case), q, k, v)
        assert error(out, whole) <= 1e-10
        filled = COMPILE(rj.prefill)(cache, k, v)
    chex.assert_trees_all_equal(cache, filled)


@st.composite
def splits(draw, longest: int):
    case = draw(geometries(most_branches=3, longest=longest))._replace(is_causal=True, ids=False, seq_len=None)
    sizes = [1, draw(st.integers(2, longest))]
    sizes = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=8))
    return case, sizes, draw(st.integers(0, case.length)), draw(st.integers(0, 9))


@settings(max_examples=3, **RANDOM)
@given(splits(longest=40))
def test_random_geometries_and_splits_equal_the_whole_sequence(drawn):
    assert_any_split(*drawn)


@SLOW
@settings(max_examples=60, **RANDOM)
@given(splits(longest=80))
def test_many_random_geometries_and_splits_equal_the_whole_sequence(drawn):
    assert_any_split(*drawn)


@SLOW
@settings(max_examples=60, **RANDOM)
@given(geometries(most_branches=4, longest=80))
def test_many_random_geometries_equal_the_whole_sequence(case):
    assert_decodes(case._replace(is_causal=True, ids=False, seq_len=None))


def test_segments_are_clipped_to_max_len():
    case = Case(length=70, segment_lengths=(8, 64), dilation_rates=(1, 3), is_causal=True)
    with jax.enable_x64(True):
        (q, k, v), whole = oracle(case)
        out, _ = token_by_token(case, cache_for(case, max_len=32), q, k, v)
        assert error(out[:, :32], whole[:, :32]) <= 1e-10
        cut = case._replace(segment_lengths=(8, 32))
        assert error(out, oracle(cut)[1]) <= 1e-10


@pytest.mark.parametrize(
    ("segment_length", "dilation_rate", "heads"), [(2048, 4, "all"), (32, 5, "all"), (1000, 3, "split")]
)
def test_cache_bytes_equal_the_formula_and_do_not_grow_with_the_context(segment_length, dilation_rate, heads):
    pattern = rj.DilationPattern((16, segment_length), (1, dilation_rate), heads=heads)
    batch, kv_heads, head_dim, itemsize = 3, 4, 8, 2
    init = functools.partial(
        rj.init_cache, pattern, batch=batch, num_kv_heads=kv_heads, head_dim=head_dim, dtype=jnp.bfloat16
    )
    sizes = []
    for max_len in (24, 4096, 1 << 20):
        cache = jax.eval_shape(lambda max_len=max_len: init(max_len=max_len))
        rows = [-(-min(w, max_len) // r) for w, r in ((16, 1), (segment_length, dilation_rate))]
        heads_per_branch = kv_heads // 2 if heads == "split" else kv_heads
        row_bytes = 2 * itemsize * head_dim * batch  # keys and values
        assert cache.nbytes == row_bytes * heads_per_branch * sum(rows) + 4 * batch  # and the int32 lengths
        sizes.append(cache.nbytes)
    assert sizes[1] == sizes[2]


def test_program_does_not_grow_with_the_context_and_updates_the_cache_in_place():
    pattern = rj.DilationPattern((64, 512), (1, 8))
    programs = []
    for max_len in (1024, 1 << 20):
        cache = rj.init_cache(pattern, batch=1, num_kv_heads=8, head_dim=64, max_len=max_len)
        new = jnp.zeros((1, 1, 8, 64))
        step = jax.jit(rj.decode_step, donate_argnums=0).lower(cache, new, new, new).compile()
        programs.append(step)
        memory = step.memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes
        assert memory.temp_size_in_bytes < cache.nbytes / 8  # a branch of rate 8 selects one of the 8 heads
    assert len(programs[0].as_text().splitlines()) == len(programs[1].as_text().splitlines())


class DecodeRing(NamedTuple):
    """A ring that holds a cache, and the call that runs on it."""

    layout: str
    rule: str = "mod"
    dtype: str = "float64"
    axis_type: AxisType = AxisType.Auto
    other_axes: dict[str, Any] = {}  # noqa: RUF012
    is_default: bool = False


SHARDED = {"batch_axis": "data", "head_axis": "tensor"}
RINGS = {
    "contiguous": DecodeRing(layout="contiguous", is_default=True),
    "zigzag, split": DecodeRing(layout="zigzag", rule="split"),
    "batch and heads sharded": DecodeRing(layout="zigzag", rule="block", other_axes=SHARDED, is_default=True),
    "explicit mesh": DecodeRing(layout="zigzag", axis_type=AxisType.Explicit),
    "all axes explicit": DecodeRing(layout="zigzag", axis_type=AxisType.Explicit, other_axes=SHARDED),
    "float32": DecodeRing(layout="zigzag", dtype="float32"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(RINGS[name].is_default)) for name in RINGS])
def test_ring_decodes_a_prompt_and_tokens_as_the_whole_sequence(name):
    layout, rule, dtype, axis_type, other_axes, _ = RINGS[name]
    case = Case(
        length=50,
        kv_heads=4,
        q_per_kv=2,
        head_dim=4,
        segment_lengths=(6, 40),
        dilation_rates=(1, 4),
        rule=rule,
        is_causal=True,
    )
    sizes = {"ring": 2, "data": 2, "tensor": 2} if other_axes else {"ring": 4}
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes), axis_types=(axis_type,) * len(sizes))
    ring = rj.Ring(mesh, layout=layout, **other_axes)
    with jax.enable_x64(True):
        (q, k, v), whole = oracle(case)
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
        cache = empty = cache_for(case, dtype, ring=ring)
        lengths = np.array([23, 30])
        rows = NamedSharding(mesh, PartitionSpec(ring.batch_axis, ring.head_axis, "ring", None))
        stored = [stored_on(ring, mesh, x[:, :30], fill=np.nan) for x in (k, v)]
        cache = COMPILE(functools.partial(rj.prefill, ring=ring))(cache, *stored, lengths)
        filled = COMPILE(rj.prefill)(empty, k[:, :30], v[:, :30], lengths)
        chex.assert_trees_all_equal(cache, filled)
        each = [lengths + i for i in range(20)]
        new = [np.stack([np.asarray(x)[[0, 1], at] for at in each], axis=1) for x in (q, k, v)]
        out, cache = token_by_token(case, cache, *(x[:, :15] for x in new), ring=ring)
        assert all(x.sharding.is_equivalent_to(rows, 4) for x in (*cache.keys, *cache.values))
        more, _ = COMPILE(functools.partial(rj.decode_step, ring=ring))(cache, *(x[:, 15:] for x in new))
        expected = np.stack([np.asarray(whole)[[0, 1], at] for at in each], axis=1)
        assert error(np.concatenate([out, more], axis=1), expected) <= TOLERANCE[dtype]


def test_ring_rounds_up_the_slots_and_sends_no_cache_rows():
    ring = rj.Ring(ring_mesh(4))
    cache = rj.init_cache(
        rj.DilationPattern((6, 40), (1, 3)), batch=1, num_kv_heads=2, head_dim=64, max_len=1000, ring=ring
    )
    assert [k.shape[2] for k in cache.keys] == [8, 16]
    assert all(s.data.shape[2] * 4 == k.shape[2] for k in cache.keys for s in k.addressable_shards)
    new = jnp.zeros((1, 1, 2, 64))
    program = jax.jit(functools.partial(rj.decode_step, ring=ring)).lower(cache, new, new, new).compile().as_text()
    assert "all-gather" not in program and "collective-permute" not in program and "all-to-all" not in program
    assert program.count(" all-reduce(") + program.count(" all-reduce-start(") <= 3


def test_decode_step_compiles_once_for_all_positions():
    case = Case(length=100, segment_lengths=(4, 16))
    cache = cache_for(case, np.float32)
    q, k, v, _ = case.arrays(np.float32)
    step = COMPILE(chex.assert_max_traces(rj.decode_step, n=1))
    for i in range(40):
        _, cache = step(cache, *(x[:, i : i + 1] for x in (q, k, v)))
    assert cache.lengths.tolist() == [40, 40]


def test_vmap_over_caches_equals_each_cache():
    case = Case(length=20, segment_lengths=(4, 16), is_causal=True)
    q, k, v, _ = case.arrays(np.float32)
    cache = COMPILE(rj.prefill)(cache_for(case, np.float32), k[:, :9], v[:, :9])
    new = [x[:, 9:10] for x in (q, k, v)]
    out, after = COMPILE(rj.decode_step)(cache, *new)
    twice = jax.tree.map(lambda x: np.stack([x, x]), (cache, *new))
    outs, afters = COMPILE(jax.vmap(rj.decode_step))(*twice)
    assert error(outs[1], out) <= 1e-6
    assert jax.tree.map(jnp.shape, afters.keys) == tuple((2, *x.shape) for x in after.keys)


CASE = Case(length=8, segment_lengths=(4, 8), dilation_rates=(1, 2))
NEW = np.zeros((2, 3, 2, 8), np.float32)


def test_invalid_arguments_raise_and_name_the_argument():
    q = jnp.asarray(NEW)
    cache = cache_for(CASE, np.float32)
    calls = {
        r"`max_len` must be at least 1, got 0": lambda: cache_for(CASE, max_len=0),
        r"`pattern` must be a DilationPattern, got int": lambda: rj.init_cache(
            3, batch=1, num_kv_heads=1, head_dim=1, max_len=1
        ),
        r"`dtype` must be floating point .*, got int32": lambda: cache_for(CASE, np.int32),
        r"`ring` must be a Ring, got str": lambda: cache_for(CASE, np.float32, ring="ring"),
        r"`cache` must be a DecodeCache, got int": lambda: rj.decode_step(1, q, q, q),
        r"`key` must have the shape \(batch, heads, dim\) of `cache`.*\(1, 2, 8\) and": lambda: rj.decode_step(
            cache, *[q[:1]] * 3
        ),
        r"`key` must have the dtype of `cache`, got float16 and float32": lambda: rj.decode_step(
            cache, *[q.astype(np.float16)] * 3
        ),
        r"`counts` must be between 0 and 3, got \[1, 4\]": lambda: rj.decode_step(
            cache, q, q, q, counts=jnp.array([1, 4])
        ),
        r"`counts` must be integers of shape \(2,\)": lambda: rj.decode_step(cache, q, q, q, counts=jnp.array([0])),
        r"`scale` must be a finite Python number": lambda: rj.decode_step(cache, q, q, q, scale=np.nan),
        r"`cache` slots must divide evenly over the ring of 8, got 4": lambda: rj.decode_step(
            cache, q, q, q, ring=rj.Ring(ring_mesh(8))
        ),
        r"`value` must have the shape of `key`": lambda: rj.prefill(cache, q, q[:, :2]),
        r"`key` must have the shape \(2, length, 2, 8\), got \(2, 3, 1, 8\)": lambda: rj.prefill(
            cache, q[:, :, :1], q[:, :, :1]
        ),
        r"`lengths` must be between 0 and 3, got \[3, 5\]": lambda: rj.prefill(cache, q, q, np.array([3, 5])),
        r"`lengths` must be between 0 and 3, got \[3, 4\]": lambda: rj.prefill(cache, q, q, [3, 4]),
        r"`lengths` must be integers of shape \(2,\), got <U1": lambda: rj.prefill(cache, q, q, ["a", "b"]),
        r"`key` length must be a multiple of 2 .*got 3": lambda: rj.prefill(cache, q, q, ring=rj.Ring(ring_mesh(2))),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    ring = rj.Ring(ring_mesh(1, 2, names=("ring", "tensor")), head_axis="tensor")
    with pytest.raises(NotImplementedError, match=r'`heads="split"` does not support a `head_axis`'):
        cache_for(CASE._replace(rule="split"), np.float32, ring=ring)
