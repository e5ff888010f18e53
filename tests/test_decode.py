"""Decoding with a cache says at every position what the attention of the whole sequence says."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, RANDOM, Case, by_definition, error, geometries, pairwise, ring_mesh, stored_on
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ringjax as rj

SLOW = pytest.mark.slow
COMPILE = functools.partial(jax.jit, compiler_options=QUICK)


def cache_for(case: Case, dtype=np.float64, max_len=None, **keywords) -> rj.DecodeCache:
    max_len = case.length if max_len is None else max_len
    return rj.init_cache(case.pattern, case.batch, case.kv_heads, case.dim, max_len, dtype, **keywords)


def oracle(case: Case):
    """The arrays in float64, and what the whole sequence gives."""
    arrays = case.arrays(np.float64)
    return arrays[:3], by_definition(case._replace(is_causal=True), arrays)[0]


def token_by_token(case: Case, cache, q, k, v, **keywords):
    """All tokens, one after the other, in one compiled loop."""

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


GRID = pairwise(
    rule=["mod", "block", "none", "grouped", "detached"],
    shape=[(4, 1), (2, 3), (1, 4), (5, 2)],
    branches=[((16, 64), (1, 4)), ((8,), (3,)), ((5, 12, 100), (2, 5, 7)), ((1, 7, 30), (1, 9, 4))],
)


def case_of(row: dict, **keywords) -> Case:
    (kv_heads, group), (lengths, rates) = row["shape"], row["branches"]
    return Case(70, 2, kv_heads, group, 4, lengths, rates, row["rule"], is_causal=True, **keywords)


@pytest.mark.parametrize("row", [*GRID[:5], *(pytest.param(x, marks=SLOW) for x in GRID[5:])])
def test_token_by_token_equals_the_whole(row):
    assert_decodes(case_of(row))


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 2e-6), (jnp.bfloat16, 1e-2), (np.float16, 2e-3)])
def test_dtypes(dtype, tolerance):
    case = Case(40, segment_lengths=(8, 32), kv_heads=2, group=2)
    q, k, v, _ = case.arrays(dtype)
    whole = functools.partial(rj.reference_attention, pattern=case.pattern, is_causal=True)
    whole = COMPILE(whole)(*(x.astype(np.float32) for x in (q, k, v)))
    out, cache = token_by_token(case, cache_for(case, dtype), q, k, v)
    assert out.dtype == dtype and cache.keys[0].dtype == dtype
    assert error(out.astype(np.float32), whole) <= tolerance


def assert_any_split(case: Case, sizes: list[int], prompt: int, counts_seed: int) -> None:
    """A prefill of `prompt` tokens, then chunks of these sizes, of which each entry really has a random part."""
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
            assert not out[~is_real].any(), "padding gives 0"
            got[entry.repeat(n, 1)[is_real], where[is_real]] = out[is_real]
            at += counts
            assert cache.lengths.tolist() == at.tolist()
        assert error(got, whole) <= 1e-10, (case, sizes, prompt)


def test_chunks_cross_several_segments_from_any_prompt():
    case = Case(90, 3, 2, 2, 4, (6, 20, 64), (1, 3, 5), is_causal=True)
    assert_any_split(case, [30, 1, 30, 1, 30, 30], prompt=31, counts_seed=0)


def test_whole_sequence_as_one_chunk():
    case = Case(60, 2, 3, 1, 4, (7, 25), (2, 3), "block", is_causal=True)
    with jax.enable_x64(True):
        (q, k, v), whole = oracle(case)
        out, cache = COMPILE(rj.decode_step)(cache_for(case), q, k, v)
        assert error(out, whole) <= 1e-10
        filled = COMPILE(rj.prefill)(cache, k, v)
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(filled), strict=True):
        np.testing.assert_array_equal(ours, theirs)  # appending and prefilling leave the same rows


@st.composite
def splits(draw, longest: int):
    case = draw(geometries(most_branches=3, longest=longest))._replace(is_causal=True, ids=False, seq_len=None)
    sizes = [1, draw(st.integers(2, longest))]
    sizes = draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=8))
    return case, sizes, draw(st.integers(0, case.length)), draw(st.integers(0, 9))


@settings(max_examples=3, **RANDOM)
@given(splits(longest=40))
def test_random_geometries_and_splits(drawn):
    assert_any_split(*drawn)


@SLOW
@settings(max_examples=60, **RANDOM)
@given(splits(longest=80))
def test_many_random_geometries_and_splits(drawn):
    assert_any_split(*drawn)


@SLOW
@settings(max_examples=60, **RANDOM)
@given(geometries(most_branches=4, longest=80))
def test_many_random_geometries_token_by_token(case):
    assert_decodes(case._replace(is_causal=True, ids=False, seq_len=None))


def test_beyond_max_len_segments_are_those_of_max_len():
    case = Case(70, segment_lengths=(8, 64), dilation_rates=(1, 3), is_causal=True)
    with jax.enable_x64(True):
        (q, k, v), whole = oracle(case)
        out, _ = token_by_token(case, cache_for(case, max_len=32), q, k, v)
        assert error(out[:, :32], whole[:, :32]) <= 1e-10
        cut = case._replace(segment_lengths=(8, 32))
        assert error(out, oracle(cut)[1]) <= 1e-10


@pytest.mark.parametrize("length, rate, heads", [(2048, 4, "all"), (32, 5, "all"), (1000, 3, "grouped")])
def test_bytes_are_those_of_the_formula_and_do_not_grow(length, rate, heads):
    pattern = rj.DilationPattern((16, length), (1, rate), heads=heads)
    sizes = []
    for max_len in (24, 4096, 1 << 20):
        cache = jax.eval_shape(lambda n=max_len: rj.init_cache(pattern, 3, 4, 8, n, jnp.bfloat16))
        rows = [-(-min(w, max_len) // r) for w, r in ((16, 1), (length, rate))]
        each = [2, 2] if heads == "grouped" else [4, 4]
        assert cache.nbytes == 2 * 2 * 8 * 3 * sum(h * s for h, s in zip(each, rows, strict=True)) + 4 * 3
        sizes.append(cache.nbytes)
    assert sizes[1] == sizes[2]


def test_the_program_does_not_grow_with_the_context_and_keeps_the_cache_in_place():
    pattern = rj.DilationPattern((64, 512), (1, 8))
    programs = []
    for max_len in (1024, 1 << 20):
        cache = rj.init_cache(pattern, 1, 8, 64, max_len)
        new = jnp.zeros((1, 1, 8, 64))
        step = jax.jit(rj.decode_step, donate_argnums=0).lower(cache, new, new, new).compile()
        programs.append(step)
        memory = step.memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes
        assert memory.temp_size_in_bytes < cache.nbytes / 8  # of a branch with rate 8, one of the 8 heads is picked out
    assert len(programs[0].as_text().splitlines()) == len(programs[1].as_text().splitlines())


RINGS = [
    pytest.param("contiguous", "mod", {}, id="contiguous"),
    pytest.param("zigzag", "grouped", {}, id="zigzag, grouped", marks=SLOW),
    pytest.param("zigzag", "block", {"batch_axis": "data", "head_axis": "tensor"}, id="batch and heads sharded"),
    pytest.param("zigzag", "mod", {"kind": AxisType.Explicit}, id="explicit mesh", marks=SLOW),
    pytest.param(
        "zigzag",
        "mod",
        {"kind": AxisType.Explicit, "batch_axis": "data", "head_axis": "tensor"},
        id="all axes explicit",
        marks=SLOW,
    ),
    pytest.param("zigzag", "mod", {"dtype": np.float32}, id="float32", marks=SLOW),
]


@pytest.mark.parametrize("layout, rule, axes", RINGS)
def test_on_a_ring(layout, rule, axes):
    """A prompt in the layout of the ring, then tokens over a cache whose slots are sharded."""
    case = Case(50, 2, 4, 2, 4, (6, 40), (1, 4), rule, is_causal=True)
    axes = dict(axes)
    kind, dtype = axes.pop("kind", AxisType.Auto), axes.pop("dtype", np.float64)
    sizes = {"ring": 2, "data": 2, "tensor": 2} if axes else {"ring": 4}
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))
    ring = rj.Ring(mesh, layout=layout, **axes)
    with jax.enable_x64(True):
        (q, k, v), whole = oracle(case)
    with jax.enable_x64(dtype == np.float64):
        q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
        cache = empty = cache_for(case, dtype, ring=ring)
        lengths = np.array([23, 30])
        rows = NamedSharding(mesh, PartitionSpec(ring.batch_axis, ring.head_axis, "ring", None))
        stored = [stored_on(ring, mesh, x[:, :30], fill=np.nan) for x in (k, v)]
        cache = COMPILE(functools.partial(rj.prefill, ring=ring))(cache, *stored, lengths)
        filled = COMPILE(rj.prefill)(empty, k[:, :30], v[:, :30], lengths)
        for ours, plain in zip(jax.tree.leaves(cache), jax.tree.leaves(filled), strict=True):
            np.testing.assert_array_equal(ours, plain)
        each = [lengths + i for i in range(20)]
        new = [np.stack([np.asarray(x)[[0, 1], at] for at in each], axis=1) for x in (q, k, v)]
        out, cache = token_by_token(case, cache, *(x[:, :15] for x in new), ring=ring)
        assert all(x.sharding.is_equivalent_to(rows, 4) for x in (*cache.keys, *cache.values))
        more, _ = COMPILE(functools.partial(rj.decode_step, ring=ring))(cache, *(x[:, 15:] for x in new))
        expected = np.stack([np.asarray(whole)[[0, 1], at] for at in each], axis=1)
        limit = {np.float64: 1e-10, np.float32: 2e-6}[dtype]
        assert error(np.concatenate([out, more], axis=1), expected) <= limit


def test_a_ring_rounds_slots_up_and_sends_no_rows_of_the_cache():
    ring = rj.Ring(ring_mesh(4))
    cache = rj.init_cache(rj.DilationPattern((6, 40), (1, 3)), 1, 2, 64, 1000, ring=ring)
    assert [k.shape[2] for k in cache.keys] == [8, 16]
    assert all(s.data.shape[2] * 4 == k.shape[2] for k in cache.keys for s in k.addressable_shards)
    new = jnp.zeros((1, 1, 2, 64))
    program = jax.jit(functools.partial(rj.decode_step, ring=ring)).lower(cache, new, new, new).compile().as_text()
    assert "all-gather" not in program and "collective-permute" not in program and "all-to-all" not in program
    assert program.count(" all-reduce(") + program.count(" all-reduce-start(") <= 3


def toy_model(num_layers=2, vocabulary=11, width=8, heads=2):
    """Embeddings, layers of attention alone, logits: as a whole, and step by step."""
    pattern = rj.DilationPattern((4, 16), (1, 2))
    rng = np.random.default_rng(0)
    embed = jnp.asarray(rng.standard_normal((vocabulary, heads, width)), jnp.float32)

    def layers(x, attend):
        for i in range(num_layers):
            x = x + attend(i, x, x * 0.5, jnp.roll(x, i + 1, -1))
        return jnp.einsum("btnh,vnh->btv", x, embed)

    def whole(tokens):
        return layers(embed[tokens], lambda i, q, k, v: rj.reference_attention(q, k, v, pattern, is_causal=True))

    def step(caches, tokens):
        new = list(caches)

        def attend(i, q, k, v):
            out, new[i] = rj.decode_step(new[i], q, k, v)
            return out

        return layers(embed[tokens], attend)[:, -1], tuple(new)

    empty = tuple(rj.init_cache(pattern, 2, heads, width, 64) for _ in range(num_layers))
    return whole, step, empty


def test_generate_greedily_is_the_argmax_of_the_whole():
    whole, step, caches = toy_model()
    first = jnp.array([3, 7])
    made, caches = COMPILE(lambda *a: rj.generate(step, *a, 30, greedy=True))(caches, first)
    tokens = np.concatenate([first[:, None], made], axis=1)
    np.testing.assert_array_equal(COMPILE(whole)(tokens[:, :-1]).argmax(-1), made)
    assert caches[0].lengths.tolist() == [30, 30]


def test_generate_is_traced_once_for_all_tokens_and_calls():
    _, step, caches = toy_model()
    traces = []

    def counted(state, tokens):
        traces.append(tokens.shape)
        return step(state, tokens)

    @COMPILE
    def run(caches, tokens, rng, temperature):
        return rj.generate(counted, caches, tokens, 40, rng=rng, temperature=temperature, top_k=3)

    for seed in range(3):
        made, caches = run(caches, jnp.array([1, 2]), jax.random.key(seed), jnp.float32(0.5 + seed))
    assert made.shape == (2, 40) and len(traces) == 1
    assert caches[0].lengths.tolist() == [120, 120]
    assert run._cache_size() == 1


def test_decode_step_is_traced_once_for_all_positions():
    case = Case(100, segment_lengths=(4, 16))
    cache, traces = cache_for(case, np.float32), []
    q, k, v, _ = case.arrays(np.float32)

    @COMPILE
    def step(cache, *new):
        traces.append(1)
        return rj.decode_step(cache, *new)

    for i in range(40):
        _, cache = step(cache, *(x[:, i : i + 1] for x in (q, k, v)))
    assert len(traces) == 1


def test_sampling_follows_temperature_and_top_k():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    step = lambda state, tokens: (jnp.tile(logits[None], (tokens.shape[0], 1)), state)  # noqa: E731
    first = jnp.zeros(2000, jnp.int32)

    def shares(**keywords):
        draw = COMPILE(lambda rng: rj.generate(step, (), first, 4, rng=rng, **keywords)[0])
        made = draw(jax.random.key(0))
        return np.bincount(np.asarray(made).ravel(), minlength=4) / made.size

    np.testing.assert_allclose(shares(), [0.5, 0.25, 0.15, 0.1], atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_k=1), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(temperature=0.5), np.array([100, 25, 9, 4]) / 138, atol=0.03)


def test_vmap_over_caches():
    case = Case(20, segment_lengths=(4, 16), is_causal=True)
    q, k, v, _ = case.arrays(np.float32)
    cache = COMPILE(rj.prefill)(cache_for(case, np.float32), k[:, :9], v[:, :9])
    new = [x[:, 9:10] for x in (q, k, v)]
    out, after = COMPILE(rj.decode_step)(cache, *new)
    twice = jax.tree.map(lambda x: np.stack([x, x]), (cache, *new))
    outs, afters = COMPILE(jax.vmap(rj.decode_step))(*twice)
    assert error(outs[1], out) <= 1e-6
    assert jax.tree.map(jnp.shape, afters.keys) == tuple((2, *x.shape) for x in after.keys)


CASE = Case(8, segment_lengths=(4, 8), dilation_rates=(1, 2))
NEW = np.zeros((2, 3, 2, 8), np.float32)


def test_mistakes_are_told():
    q = jnp.asarray(NEW)
    cache, step = cache_for(CASE, np.float32), lambda state, tokens: (jnp.zeros((2, 5)), state)
    tokens = jnp.array([0, 1])
    calls = {
        r"`max_len` must be at least 1, got 0": lambda: cache_for(CASE, max_len=0),
        r"`pattern` must be a DilationPattern, got int": lambda: rj.init_cache(3, 1, 1, 1, 1),
        r"`dtype` must be floating point .*, got int32": lambda: cache_for(CASE, np.int32),
        r"`ring` must be a Ring, got str": lambda: cache_for(CASE, np.float32, ring="ring"),
        r"`cache` must be a DecodeCache, got int": lambda: rj.decode_step(1, q, q, q),
        r"`key` must have the \(batch, heads, dim\) of `cache`.*\(1, 2, 8\) and": lambda: rj.decode_step(
            cache, *[q[:1]] * 3
        ),
        r"`key` must have the dtype of `cache`, got float16 and float32": lambda: rj.decode_step(
            cache, *[q.astype(np.float16)] * 3
        ),
        r"`counts` must be between 0 and 3, got \[1, 4\]": lambda: rj.decode_step(
            cache, q, q, q, counts=tokens * 3 + 1
        ),
        r"`counts` must be integers of shape \(2,\)": lambda: rj.decode_step(cache, q, q, q, counts=tokens[:1]),
        r"`scale` must be a finite number": lambda: rj.decode_step(cache, q, q, q, scale=np.nan),
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
        r"`tokens` must be an integer array of shape \(batch,\)": lambda: rj.generate(
            step, (), tokens[:, None], 3, greedy=True
        ),
        r"`num_tokens` must be at least 1": lambda: rj.generate(step, (), tokens, 0, greedy=True),
        r"`rng` must be given unless": lambda: rj.generate(step, (), tokens, 3),
        r"must not be given with `greedy=True`": lambda: rj.generate(step, (), tokens, 3, greedy=True, top_k=2),
        r"`temperature` must be a finite number above 0, got 0": lambda: rj.generate(
            step, (), tokens, 3, rng=jax.random.key(0), temperature=0.0
        ),
        r"`top_k` must be at most the vocabulary 5, got 6": lambda: rj.generate(
            step, (), tokens, 3, rng=jax.random.key(0), top_k=6
        ),
        r"`step` must give logits of shape \(2, vocabulary\)": lambda: rj.generate(
            lambda s, t: (jnp.zeros(2), s), (), tokens, 3, greedy=True
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    ring = rj.Ring(ring_mesh(1, 2, names=("ring", "tensor")), head_axis="tensor")
    with pytest.raises(NotImplementedError, match=r'`heads="grouped"` does not go with a `head_axis`'):
        cache_for(CASE._replace(rule="grouped"), np.float32, ring=ring)
