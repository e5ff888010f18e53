"""`dilated_attention` equals the oracle, forward and backward, on a pairwise grid and on random geometry."""

import functools
import itertools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    IMPLEMENTATIONS,
    QUICK,
    RANDOM,
    RULES,
    TOLERANCE,
    Case,
    assert_equals_oracle,
    available,
    by_definition,
    covering,
    error,
    geometries,
    pairwise,
    run,
    slow_unless,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import ringjax as rj

ROWS = pairwise(
    dtype=["float64", "float32", "bfloat16"],
    is_causal=[False, True],
    ids=[False, True],
    rule=RULES,
    segment_lengths=[(16, 64), (7, 13), (300, 5)],
    dilation_rates=[(1, 4), (3, 2), (9, 6)],
    length=[64, 61, 200],
    kv_heads=[1, 3, 4],
    q_per_kv=[1, 2],
    scale=[None, 0.7],
)
GRID = [{**row, "implementation": implementation} for row in ROWS for implementation in IMPLEMENTATIONS]
COVERING = covering(GRID, ("dtype", "is_causal"), ("dtype", "implementation"), ("is_causal", "implementation"))


class Run(NamedTuple):
    """A case, and how it is computed."""

    dtype: str
    implementation: str
    case: Case


def run_of(row: dict) -> Run:
    fields = dict(row)
    return Run(fields.pop("dtype"), fields.pop("implementation"), Case(**fields))


# several blocks of queries and keys, full and partial, with and without grouped queries
one_head = functools.partial(Case, batch=1, kv_heads=1)
NATIVE = available("native")
LARGE = [
    Run("float64", "xla", one_head(length=2304, segment_lengths=(2304,), dilation_rates=(1,), is_causal=True)),
    Run("float32", NATIVE, one_head(length=2304, segment_lengths=(600,), dilation_rates=(2,), ids=True)),
    Run(
        "float64", "xla", one_head(length=1500, q_per_kv=4, segment_lengths=(1100,), dilation_rates=(1,), seq_len=1400)
    ),
    Run(
        "float32",
        NATIVE,
        one_head(length=1500, q_per_kv=4, segment_lengths=(1100,), dilation_rates=(1,), is_causal=True),
    ),
    Run("float64", NATIVE, one_head(length=2100, segment_lengths=(2100, 8), dilation_rates=(1, 8), rule="detached")),
    Run("float32", "xla", one_head(length=2048, segment_lengths=(2048,), dilation_rates=(1,))),
    Run(
        "float64",
        "xla",
        Case(
            length=1300, kv_heads=2, q_per_kv=4, segment_lengths=(1300,), dilation_rates=(2,), is_causal=True, ids=True
        ),
    ),
    Run(
        "float64",
        NATIVE,
        Case(
            length=700,
            batch=1,
            kv_heads=3,
            q_per_kv=5,
            segment_lengths=(700, 600),
            dilation_rates=(1, 2),
            rule="split",
        ),
    ),
]
# many short segments processed together, with and without a shorter last one
SHORT_SEGMENTS = [
    Run("float64", NATIVE, Case(length=960, segment_lengths=(16, 48), dilation_rates=(2, 5), is_causal=True)),
    Run("float64", "xla", Case(length=963, segment_lengths=(16, 48), dilation_rates=(2, 5))),
]
DEFAULT = [*map(run_of, COVERING), *LARGE, *SHORT_SEGMENTS]
SLOW_CASES = [
    one_head(length=2304, segment_lengths=(2304, 600), dilation_rates=(1, 2), is_causal=True),
    one_head(length=2304, segment_lengths=(2304, 600), dilation_rates=(1, 2), ids=True),
]
EVERY_CASE = dict.fromkeys([*(run_of(row).case for row in GRID), *(run.case for run in DEFAULT), *SLOW_CASES])


@pytest.mark.parametrize(
    ("dtype", "implementation", "case"),
    [
        pytest.param(*run, marks=slow_unless(run in DEFAULT), id="-".join(map(str, run)))
        for run in itertools.starmap(Run, itertools.product(TOLERANCE, IMPLEMENTATIONS, EVERY_CASE))
    ],
)
def test_equals_oracle(dtype, implementation, case):
    assert_equals_oracle(case, dtype, implementations=(implementation,))  # float32 is compiled as users compile it


# Compilation is all that these cost, and the float32 cases above are compiled as users compile them.
@settings(max_examples=6, **RANDOM)
@given(
    case=geometries(most_branches=4, longest=200),
    dtype=st.sampled_from(["float64", "float32"]),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
def test_random_geometry_equals_oracle(case, dtype, implementation):
    assert_equals_oracle(case, dtype, implementations=(implementation,), compiler_options=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@settings(max_examples=300, **RANDOM)
@given(case=geometries(most_branches=4, longest=200))
def test_many_random_geometries_equal_oracle(case, dtype):
    assert_equals_oracle(case, dtype, compiler_options=QUICK)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_equal_finite_differences(is_causal, implementation):
    case = Case(length=40, segment_lengths=(12, 40), dilation_rates=(2, 3), kv_heads=2, q_per_kv=2, ids=True)
    with jax.enable_x64(True):
        q, k, v, _ = case.arrays(np.float64)
        keywords = case.keywords() | {"is_causal": is_causal, "implementation": implementation}
        attention = lambda q, k, v: rj.dilated_attention(q, k, v, case.pattern, **keywords)  # noqa: E731
        check_grads(jax.jit(attention), (q, k, v), order=1, modes=["rev"])


def test_rows_outside_every_branch_have_zero_output_and_gradient():
    case = Case(length=32, kv_heads=1, segment_lengths=(16,), dilation_rates=(4,))
    covered = np.arange(32) % 4 == 0
    for x in run(rj.dilated_attention, case.arrays(np.float32), case.pattern, compiler_options=QUICK):
        assert not np.asarray(x)[:, ~covered].any()
        assert np.asarray(x)[:, covered].all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_blocks_are_not_computed(implementation):
    """NaN in keys and values after the first blocks does not reach the first query rows."""
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
def test_segment_ids_of_any_integer_dtype_give_the_same_output(dtype):
    case = Case(length=24, segment_lengths=(24,), dilation_rates=(1,), ids=True)
    arrays = case.arrays(np.float32)
    ids = 1 + np.asarray(case.keywords()["segment_ids"])  # unsigned dtypes cannot mark padding

    @functools.partial(jax.jit, compiler_options=QUICK)
    def attention(q, k, v, ids):
        return rj.dilated_attention(q, k, v, case.pattern, segment_ids=ids)

    got = attention(*arrays[:3], jnp.asarray(ids, dtype))
    padded = by_definition(case, arrays)[0]
    assert error(np.where(ids[..., None, None] > 0, got, 0), padded) < 2e-6
    assert np.asarray(got)[ids == 0].all()


def test_values_in_padding_do_not_change_the_results():
    case = Case(length=24, segment_lengths=(8, 24), dilation_rates=(1, 3))
    arrays = case.arrays(np.float32)
    ids = jnp.zeros((2, 24), jnp.int32).at[:, 5:9].set(-1)
    dirty = [x.at[:, 5:9].set(jnp.nan) for x in arrays]
    f = with_gradients(rj.dilated_attention, case.pattern, segment_ids=ids, compiler_options=QUICK)
    chex.assert_trees_all_equal(f(*dirty), f(*arrays))


def test_float64_numpy_arrays_are_computed_in_float32_without_x64():
    case = Case(length=8, segment_lengths=(8,), dilation_rates=(2,))
    q, k, v, _ = (np.asarray(x, np.float64) for x in case.arrays(np.float32))
    out, expected = (f(q, k, v, case.pattern) for f in (rj.dilated_attention, rj.reference_attention))
    assert out.dtype == expected.dtype == jnp.float32
    assert error(out, expected) < 2e-6
