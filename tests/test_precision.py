"""Low precision, extreme scores, fully masked rows and single tokens."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, Case, alternating, by_definition, error, low_precision_errors, run, with_gradients

import ringjax as rj

pytestmark = pytest.mark.usefixtures("either_implementation")
SLOW = pytest.mark.slow


AS_USERS_COMPILE = ("bfloat16", True, "mod", None)
QUICKLY = [
    (dtype, is_causal, rule, QUICK)
    for dtype in ("float16", "bfloat16")
    for is_causal, rule in ((False, "mod"), (True, "mod"), (False, "split"))
    if (dtype, is_causal) != ("bfloat16", True)
]


@alternating(
    "dtype, is_causal, rule, compiler_options",
    default=[("default", *QUICKLY[0]), ("plain XLA", *AS_USERS_COMPILE)],
    slow=[
        *(("default", *row) for row in [*QUICKLY[1:], AS_USERS_COMPILE]),
        *(("plain XLA", *row) for row in QUICKLY),
    ],
)
def test_low_precision_error_is_at_most_twice_that_of_the_naive_computation(dtype, is_causal, rule, compiler_options):
    case = Case(
        length=160,
        q_per_kv=2,
        head_dim=32,
        segment_lengths=(32, 160),
        dilation_rates=(1, 2),
        rule=rule,
        is_causal=is_causal,
    )
    ours, theirs = low_precision_errors(case, dtype, compiler_options=compiler_options)
    assert (ours > 0).all()
    assert ours[0] <= 2 * theirs[0]
    assert (ours[1:] <= 3 * theirs[1:]).all(), (ours, theirs)


@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=SLOW), True])
def test_extreme_scores_give_finite_and_exact_results(is_causal):
    case = Case(length=96, segment_lengths=(32, 96), dilation_rates=(1, 3), is_causal=is_causal, scale=1.0)
    q, k, v, g = case.arrays(np.float32)
    ours = with_gradients(rj.dilated_attention, case.pattern, compiler_options=QUICK, **case.keywords())
    for size in (1e4, -1e4):
        pushed = (q.at[..., 0].set(size), k.at[..., 0].set(jnp.sign(k[..., 0])), v, g)
        for x, y in zip(ours(*pushed), by_definition(case, pushed), strict=True):
            assert np.isfinite(x).all()
            # float32 rounds scores of 1e4 to 1e-3, which is the relative error of a softmax weight
            assert error(x, y) < 2e-3


def test_fully_masked_rows_are_zero():
    case = Case(length=48)
    q, k, v, g = case.arrays(np.float32)
    ids = jnp.full((case.batch, case.length), -1, jnp.int32).at[0, 5].set(0)
    masked = {"segment_ids": ids, "is_causal": True}
    found = run(rj.dilated_attention, (q, k, v, g), case.pattern, **masked, compiler_options=QUICK)
    for x in found:
        assert np.isfinite(x).all()
        assert not np.asarray(x)[1].any()
    out = found[0]
    assert error(out[0, 5], v[0, 5]) < 1e-6  # attends only to itself
    assert not np.delete(np.asarray(out[0]), 5, axis=0).any()


@alternating(
    "is_causal, dilation_rates",
    default=[
        ("default", False, (1, 1)),
        ("default", True, (1, 7)),
        ("plain XLA", True, (1, 1)),
        ("plain XLA", False, (1, 7)),
    ],
    slow=[
        ("default", True, (1, 1)),
        ("default", False, (1, 7)),
        ("plain XLA", False, (1, 1)),
        ("plain XLA", True, (1, 7)),
    ],
)
def test_one_token_returns_its_value_and_passes_its_gradient_on(is_causal, dilation_rates):
    case = Case(length=1, dilation_rates=dilation_rates)
    q, k, v, g = case.arrays(np.float32)
    out, dq, dk, dv = run(rj.dilated_attention, (q, k, v, g), case.pattern, is_causal=is_causal, compiler_options=QUICK)
    chex.assert_trees_all_close((out, dv), (v, g), atol=1e-6, rtol=0)
    chex.assert_trees_all_close((dq, dk), (jnp.zeros_like(q), jnp.zeros_like(k)), atol=1e-6, rtol=0)
