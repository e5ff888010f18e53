"""`dilated_attention` against the oracle, forward and gradients, over a pairwise grid and random geometry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    IMPLEMENTATIONS,
    NARROW,
    QUICK,
    RANDOM,
    WIDE,
    Case,
    assert_equals_oracle,
    by_definition,
    error,
    geometries,
    pairwise,
    run,
    with_gradients,
)
from hypothesis import given, settings
from jax.test_util import check_grads

import ringjax as rj

GRID = [
    (row.pop("limit"), Case(**row))
    for row in pairwise(
        seed=10,
        is_causal=[False, True],
        ids=[False, True],
        limit=[WIDE, NARROW],
        rule=["mod", "block", "none", "grouped", "detached"],
        segment_lengths=[(16, 64), (7, 13), (300, 5)],
        dilation_rates=[(1, 4), (3, 2), (9, 6)],
        length=[64, 61, 200],
        kv_heads=[1, 3, 4],
        group=[1, 2],
        scale=[None, 0.7],
    )
]
LARGE = [
    # more than one block of queries and of keys, whole and ragged, with and without a group
    Case(length=2304, batch=1, kv_heads=1, segment_lengths=(2304,), dilation_rates=(1,), is_causal=True),
    Case(length=2304, batch=1, kv_heads=1, segment_lengths=(600,), dilation_rates=(2,), ids=True),
    Case(length=1500, batch=1, kv_heads=1, group=4, segment_lengths=(1100,), dilation_rates=(1,), seq_len=1400),
    Case(length=1500, batch=1, kv_heads=1, group=4, segment_lengths=(1100,), dilation_rates=(1,), is_causal=True),
    Case(length=2100, batch=1, kv_heads=1, segment_lengths=(2100, 8), dilation_rates=(1, 8), rule="detached"),
    Case(length=2048, batch=1, kv_heads=1, segment_lengths=(2048,), dilation_rates=(1,)),
    Case(length=1300, kv_heads=2, group=4, segment_lengths=(1300,), dilation_rates=(2,), is_causal=True, ids=True),
    Case(length=700, batch=1, kv_heads=3, group=5, segment_lengths=(700, 600), dilation_rates=(1, 2), rule="grouped"),
    # many short segments, taken together, with and without a last shorter one
    Case(length=960, kv_heads=2, segment_lengths=(16, 48), dilation_rates=(2, 5), is_causal=True),
    Case(length=963, kv_heads=2, segment_lengths=(16, 48), dilation_rates=(2, 5)),
]
LARGER = [
    Case(length=2304, batch=1, kv_heads=1, segment_lengths=(2304, 600), dilation_rates=(1, 2), is_causal=True),
    Case(length=2304, batch=1, kv_heads=1, segment_lengths=(2304, 600), dilation_rates=(1, 2), ids=True),
]
# the large cases in the other dtype are slow
QUICKLY = GRID + [(NARROW if i in (1, 3, 5) else WIDE, case) for i, case in enumerate(LARGE)]
CASES = [case for _, case in GRID] + LARGE + LARGER
SLOWLY = [(limit, case) for case in CASES for limit in (WIDE, NARROW) if (limit, case) not in QUICKLY]


@pytest.mark.parametrize(
    ("limit", "case"),
    [*QUICKLY, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOWLY)],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, Case) else x[0].__name__,
)
def test_equals_oracle(limit, case):
    assert_equals_oracle(case, [limit])  # float32 is compiled as users compile


# compiling is all that these cost, and float32 in the grid above is compiled as users compile
@settings(max_examples=20, **RANDOM)
@given(geometries(most_branches=4, longest=200))
def test_random_geometry(case):
    assert_equals_oracle(case, tolerances=(WIDE if case.length % 2 else NARROW,), compiler_options=QUICK)


@pytest.mark.slow
@settings(max_examples=300, **RANDOM)
@given(geometries(most_branches=4, longest=200))
def test_random_geometry_long(case):
    assert_equals_oracle(case, compiler_options=QUICK)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_check_grads(is_causal, implementation):
    case = Case(length=40, segment_lengths=(12, 40), dilation_rates=(2, 3), kv_heads=2, group=2, ids=True)
    with jax.enable_x64(True):
        q, k, v, _ = case.arrays(np.float64)
        keywords = case.keywords() | {"is_causal": is_causal, "implementation": implementation}
        attention = lambda q, k, v: rj.dilated_attention(q, k, v, case.pattern, **keywords)  # noqa: E731
        check_grads(jax.jit(attention), (q, k, v), order=1, modes=["rev"])


def test_uncovered_rows_give_zero_and_no_gradient():
    case = Case(length=32, kv_heads=1, segment_lengths=(16,), dilation_rates=(4,))
    covered = np.arange(32) % 4 == 0
    for x in run(rj.dilated_attention, case.arrays(np.float32), case.pattern, compiler_options=QUICK):
        assert not np.asarray(x)[:, ~covered].any()
        assert np.asarray(x)[:, covered].all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_blocks_are_not_computed(implementation):
    """NaN in keys and values after the first blocks never meets the first query rows."""
    length, first = 4096, 256
    case = Case(length=length, batch=1, kv_heads=1, segment_lengths=(length,), dilation_rates=(1,))
    q, k, v, g = case.arrays(np.float32)
    k, v = (x.at[:, first:].set(jnp.nan) for x in (k, v))
    keywords = {"is_causal": True, "implementation": implementation, "compiler_options": QUICK}
    out, dq, _, _ = run(rj.dilated_attention, (q, k, v, g), case.pattern, **keywords)
    for x in (out, dq):
        assert np.isfinite(x[:, :first]).all()
        assert np.isnan(x[:, first:]).any()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.uint32])
def test_ids_of_any_integer_dtype(dtype):
    case = Case(length=24, segment_lengths=(24,), dilation_rates=(1,), ids=True)
    arrays = case.arrays(np.float32)
    ids = 1 + np.asarray(case.keywords()["segment_ids"])  # none is below 0

    @functools.partial(jax.jit, compiler_options=QUICK)
    def attention(q, k, v, ids):
        return rj.dilated_attention(q, k, v, case.pattern, segment_ids=ids)

    got = attention(*arrays[:3], jnp.asarray(ids, dtype))
    padded = by_definition(case, arrays)[0]
    assert error(np.where(ids[..., None, None] > 0, got, 0), padded) < 2e-6
    assert np.asarray(got)[ids == 0].all()


def test_padding_may_hold_anything():
    case = Case(length=24, segment_lengths=(8, 24), dilation_rates=(1, 3))
    arrays = case.arrays(np.float32)
    ids = jnp.zeros((2, 24), jnp.int32).at[:, 5:9].set(-1)
    dirty = [x.at[:, 5:9].set(jnp.nan) for x in arrays]
    f = with_gradients(rj.dilated_attention, case.pattern, segment_ids=ids, compiler_options=QUICK)
    for x, y in zip(f(*dirty), f(*arrays), strict=True):
        assert error(x, y) == 0


def test_numpy_arrays_are_taken_as_jax_takes_them():
    case = Case(length=8, segment_lengths=(8,), dilation_rates=(2,))
    q, k, v, _ = (np.asarray(x, np.float64) for x in case.arrays(np.float32))
    out, expected = (f(q, k, v, case.pattern) for f in (rj.dilated_attention, rj.reference_attention))
    assert out.dtype == expected.dtype == jnp.float32
    assert error(out, expected) < 2e-6
