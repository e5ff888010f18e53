import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, NARROW, Case, assert_equals_oracle, on_ring, ring_mesh, run

import ringjax as rj
from ringjax import softmax
from ringjax.softmax import Partial


def partial(values, weights):
    return Partial(jnp.asarray(values, jnp.float32)[:, None], jnp.log(jnp.asarray(weights, jnp.float32)))


def test_merging_equal_outputs_changes_nothing():
    values, weights = jax.random.normal(jax.random.key(0), (2, 1000))
    a, b = partial(values, jnp.exp(weights)), partial(values, jnp.exp(3 * weights[::-1]))
    np.testing.assert_array_equal(softmax.merge(a, b).out, a.out)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_large_output_of_no_weight_costs_no_exactness(swapped):
    large, small = partial([1e4, 1e4, 1e4], [1e-30, 0.0, 1e-12]), partial([1e-3, 1e-3, 1e-3], [1.0, 1.0, 1.0])
    out = softmax.merge(*((small, large) if swapped else (large, small))).out
    np.testing.assert_allclose(np.asarray(out)[:, 0], [1e-3, 1e-3, 1e-3 + 1e-8], rtol=3e-7)  # a few roundings


@pytest.mark.parametrize("ring_size", [1, 2])
def test_a_key_that_every_branch_sees_costs_no_exactness(ring_size):
    ones = (1, 1, 1, 1)
    case = Case(length=22, batch=1, kv_heads=1, group=1, dim=8, segment_lengths=ones, dilation_rates=ones, scale=-1.5)
    assert_equals_oracle(case, [NARROW], on_ring(rj.Ring(ring_mesh(ring_size))))  # query and key have no gradient


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", ["mod", "detached", "grouped"])
def test_a_query_with_one_key_has_no_gradient(implementation, rule):
    """Whatever the scores and values are: the gradient of a score is the difference of two equal sums."""
    case = Case(200, 2, 2, 2, 64, segment_lengths=(1,) * 4, dilation_rates=(1,) * 4, rule=rule)
    arrays = case.arrays(np.float32)
    _, dq, dk, _ = run(rj.dilated_attention, arrays, case.pattern, implementation=implementation)
    assert not np.asarray(dq).any() and not np.asarray(dk).any()
