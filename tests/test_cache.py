import threading

import jax
import numpy as np
from cases import Case, error

import ringjax as rj
from ringjax.indices import _TableCache, part_tables

CASE = Case(length=32)


def test_layers_over_one_pattern_make_one_miss():
    q, k, v, g = CASE.arrays(np.float32)

    def model(q, k, v):
        for _ in range(5):
            q = rj.dilated_attention(q, k, v, rj.DilationPattern((16, 32), (1, 4)))
        return q

    out = jax.jit(lambda *a: jax.vjp(model, *a[:3])[1](a[3]))(q, k, v, g)
    info = rj.pattern_cache_info()
    assert (info.misses, info.hits, info.entries) == (1, 9, 1)  # five layers, forward and backward
    assert info.bytes > 0
    # entries made under a trace serve the next trace and eager calls
    again = jax.jit(lambda *a: jax.vjp(model, *a[:3])[1](a[3]))(q, k, v, g)
    assert error(again[0], out[0]) == 0
    assert rj.pattern_cache_info().misses == 1


def test_entries_are_read_only_numpy_and_do_not_grow_with_the_length():
    small, large = (part_tables(CASE.pattern, length, 4, 1) for length in (64, 1 << 30))
    for table in (*small, *large):
        assert isinstance(table.offsets, np.ndarray)
        assert not table.offsets.flags.writeable
        assert not table.counts.flags.writeable
    assert sum(t.nbytes for t in large) == sum(t.nbytes for t in small)


def test_other_shapes_are_other_entries():
    for length, heads, group in ((64, 4, 1), (65, 4, 1), (64, 2, 1), (64, 4, 2), (64, 4, 1)):
        part_tables(CASE.pattern, length, heads, group)
    info = rj.pattern_cache_info()
    assert (info.misses, info.hits, info.entries) == (4, 1, 4)
    rj.pattern_cache_clear()
    assert rj.pattern_cache_info() == (0, 0, 0, 0)


def test_is_bounded_and_drops_the_least_recently_used():
    cache = _TableCache(capacity=2)
    a, b, c = ((CASE.pattern, length, 1, 1) for length in (8, 9, 10))
    cache.get(a), cache.get(b), cache.get(a), cache.get(c)
    assert cache.info()[:3] == (1, 3, 2)
    cache.get(a)
    assert cache.info().hits == 2
    cache.get(b)
    assert cache.info().misses == 4


def test_threads_share_entries():
    tables, start = [], threading.Barrier(8)

    def work():
        start.wait()
        for length in range(1, 50):
            tables.append((length, part_tables(CASE.pattern, length, 2, 1)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    info = rj.pattern_cache_info()
    assert (info.misses, info.hits) == (49, 7 * 49)
    for length, table in tables:
        assert table is part_tables(CASE.pattern, length, 2, 1)
