import threading

import jax
import numpy as np
from cases import QUICK, Case, error

import ringjax as rj
from ringjax._src.rows.indices import _TableCache

CASE = Case(length=32)


def tables(length, kv_heads, group=1):
    made = rj.plan(
        CASE.pattern, seq_len=length, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=8, ring_size=1
    )
    return [table for branch in made.branches for table in branch.tables]


def test_layers_over_one_pattern_make_one_miss():
    q, k, v, g = CASE.arrays(np.float32)
    jax.clear_caches()  # an attention like this one may have been traced before

    def model(q, k, v):
        for _ in range(3):
            q = rj.dilated_attention(q, k, v, rj.DilationPattern((16, 32), (1, 4)))
        return q

    out = jax.jit(lambda *a: jax.vjp(model, *a[:3])[1](a[3]), compiler_options=QUICK)(q, k, v, g)
    info = rj.pattern_cache_info()
    # the attention and its forward rule are traced once for all layers, and so is its backward rule (not by jax 0.10)
    assert (info.misses, info.entries) == (1, 1)
    assert info.hits in (2, 4)
    assert info.bytes > 0
    # entries made under a trace serve the next trace and eager calls
    jax.clear_caches()
    again = jax.jit(lambda *a: jax.vjp(model, *a[:3])[1](a[3]), compiler_options=QUICK)(q, k, v, g)
    assert error(again[0], out[0]) == 0
    assert rj.pattern_cache_info()[:3] == (2 * info.hits + 1, 1, 1)


def test_entries_are_read_only_numpy_and_do_not_grow_with_the_length():
    small, large = (tables(length, 4) for length in (64, 1 << 30))
    for table in (*small, *large):
        assert isinstance(table.offsets, np.ndarray)
        assert not table.offsets.flags.writeable
        assert not table.counts.flags.writeable
    assert sum(t.nbytes for t in large) == sum(t.nbytes for t in small)


def test_other_shapes_are_other_entries():
    for length, heads, group in ((64, 4, 1), (65, 4, 1), (64, 2, 1), (64, 4, 2), (64, 4, 1)):
        tables(length, heads, group)
    info = rj.pattern_cache_info()
    assert (info.misses, info.hits, info.entries) == (4, 1, 4)
    rj.pattern_cache_clear()
    assert rj.pattern_cache_info() == (0, 0, 0, 0)


def test_is_bounded_and_drops_the_least_recently_used():
    cache = _TableCache(capacity=2)
    for key in "abac":
        cache.get(key, lambda key: np.zeros(2, np.int32))
    assert cache.info() == (1, 3, 2, 16)
    cache.get("a", np.zeros)
    assert cache.info().hits == 2
    cache.get("b", lambda key: np.zeros(2, np.int32))
    assert cache.info().misses == 4


def test_threads_share_entries():
    made, start = [], threading.Barrier(8)

    def work():
        start.wait()
        for length in range(1, 50):
            made.append((length, tables(length, 2)[0]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    info = rj.pattern_cache_info()
    assert (info.misses, info.hits) == (49, 7 * 49)
    for length, table in made:
        assert table is tables(length, 2)[0]
