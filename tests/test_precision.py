"""Low precision, extreme inputs, tiny shapes."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, Case, error, low_precision_errors, run, with_gradients

import ringjax as rj

pytestmark = pytest.mark.usefixtures("either_implementation")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "is_causal", "rule"),
    [
        (jnp.bfloat16, True, "mod"),
        (jnp.bfloat16, False, "grouped"),
        (jnp.float16, False, "mod"),
        pytest.param(jnp.bfloat16, False, "mod", marks=SLOW),
        pytest.param(jnp.float16, True, "mod", marks=SLOW),
        pytest.param(jnp.float16, False, "grouped", marks=SLOW),
    ],
)
def test_low_precision_error_is_that_of_the_naive_computation(dtype, is_causal, rule):
    case = Case(160, 2, 2, 2, 32, segment_lengths=(32, 160), dilation_rates=(1, 2), rule=rule, is_causal=is_causal)
    # one of them is compiled as users compile
    options = None if (dtype, is_causal) == (jnp.bfloat16, True) else QUICK
    ours, theirs = low_precision_errors(case, dtype, compiler_options=options)
    assert (ours > 0).all()
    assert ours[0] <= 2 * theirs[0]
    assert (ours[1:] <= 3 * theirs[1:]).all(), (ours, theirs)


@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=SLOW), True])
def test_extreme_logits_are_finite_and_right(is_causal):
    case = Case(length=96, segment_lengths=(32, 96), dilation_rates=(1, 3), is_causal=is_causal)
    q, k, v, g = case.arrays(np.float32)
    ours, oracle = (
        with_gradients(f, case.pattern, compiler_options=options, is_causal=is_causal, scale=1.0)
        for f, options in ((rj.dilated_attention, QUICK), (rj.reference_attention, QUICK))
    )
    for size in (1e4, -1e4):
        pushed = (q.at[..., 0].set(size), k.at[..., 0].set(jnp.sign(k[..., 0])), v, g)
        for x, y in zip(ours(*pushed), oracle(*pushed), strict=True):
            assert np.isfinite(x).all()
            # scores of 1e4 are rounded to 1e-3 in float32, and a softmax weight by as much
            assert error(x, y) < 2e-3


def test_all_masked_rows_are_zero():
    case = Case(length=48)
    q, k, v, g = case.arrays(np.float32)
    ids = jnp.full((case.batch, case.length), -1, jnp.int32).at[0, 5].set(0)
    masked = {"segment_ids": ids, "is_causal": True}
    found = run(rj.dilated_attention, (q, k, v, g), case.pattern, **masked, compiler_options=QUICK)
    for x in found:
        assert np.isfinite(x).all()
        assert not np.asarray(x)[1].any()
    out = found[0]
    assert error(out[0, 5], v[0, 5]) < 1e-6  # sees itself only
    assert not np.delete(np.asarray(out[0]), 5, axis=0).any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rates", [(1, 1), (1, 7)])
def test_one_token(is_causal, rates):
    case = Case(length=1, dilation_rates=rates)
    q, k, v, g = case.arrays(np.float32)
    out, dq, dk, dv = run(rj.dilated_attention, (q, k, v, g), case.pattern, is_causal=is_causal, compiler_options=QUICK)
    assert error(out, v) < 1e-6
    assert error(dv, g) < 1e-6
    assert error(dq, jnp.zeros_like(q)) < 1e-6
    assert error(dk, jnp.zeros_like(k)) < 1e-6
