"""The cache of index tables: shared entries, bounded size, thread safety."""

import threading

import chex
import jax
import numpy as np
from cases import QUICK, Case

import ringjax as rj

CASE = Case(length=32)


def tables(*, length, kv_heads, q_per_kv=1):
    plan = rj.plan(
        CASE.pattern, seq_len=length, num_heads=kv_heads * q_per_kv, num_kv_heads=kv_heads, head_dim=8, ring_size=1
    )
    return [table for branch in plan.branches for table in branch.selections]


def test_layers_with_one_pattern_share_one_entry():
    q, k, v, g = CASE.arrays(np.float32)
    jax.clear_caches()  # another test may have traced the same attention

    def model(q, k, v):
        for _ in range(3):
            q = rj.dilated_attention(q, k, v, rj.DilationPattern((16, 32), (1, 4)))
        return q

    out = jax.jit(lambda *a: jax.vjp(model, *a[:3])[1](a[3]), compiler_options=QUICK)(q, k, v, g)
    info = rj.pattern_cache_info()
    # all layers share one trace of the forward rule; jax 0.10 traces the backward rule once per layer
    assert (info.misses, info.entries) == (1, 1)
    assert info.hits in (2, 4)
    assert info.bytes > 0
    # later traces use the entries of the first
    jax.clear_caches()
    again = jax.jit(lambda *a: jax.vjp(model, *a[:3])[1](a[3]), compiler_options=QUICK)(q, k, v, g)
    chex.assert_trees_all_equal(again, out)
    assert rj.pattern_cache_info()[:3] == (2 * info.hits + 1, 1, 1)


def test_entries_are_read_only_and_do_not_grow_with_the_length():
    small, large = (tables(length=length, kv_heads=4) for length in (64, 1 << 30))
    for table in (*small, *large):
        assert isinstance(table.offsets, np.ndarray)
        assert not table.offsets.flags.writeable
        assert not table.counts.flags.writeable
    assert sum(t.nbytes for t in large) == sum(t.nbytes for t in small)


def test_each_shape_has_its_own_entry():
    first = {"length": 64, "kv_heads": 4}
    for change in ({}, {"length": 65}, {"kv_heads": 2}, {"q_per_kv": 2}, {}):
        tables(**{**first, **change})
    info = rj.pattern_cache_info()
    assert (info.misses, info.hits, info.entries) == (4, 1, 4)
    rj.pattern_cache_clear()
    assert rj.pattern_cache_info() == (0, 0, 0, 0)


def test_full_cache_drops_the_least_recently_used_entry():
    for length in range(1, 257):
        tables(length=length, kv_heads=2)
    full = rj.pattern_cache_info()
    assert full.entries == 256
    tables(length=1, kv_heads=2)  # now length 2 is the oldest
    tables(length=257, kv_heads=2)
    info = rj.pattern_cache_info()
    assert (info.hits, info.misses, info.entries) == (1, 257, 256)
    assert abs(info.bytes - full.bytes) <= full.bytes / 50
    tables(length=1, kv_heads=2)
    assert rj.pattern_cache_info().misses == 257
    tables(length=2, kv_heads=2)
    assert rj.pattern_cache_info().misses == 258


def test_threads_share_entries():
    results, start = [], threading.Barrier(8)

    def work():
        start.wait()
        for length in range(1, 50):
            results.append((length, tables(length=length, kv_heads=2)[0]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    info = rj.pattern_cache_info()
    assert (info.misses, info.hits) == (49, 7 * 49)
    for length, table in results:
        assert table is tables(length=length, kv_heads=2)[0]
