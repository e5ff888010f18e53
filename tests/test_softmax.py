"""Merging partial softmax results keeps full precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    IMPLEMENTATIONS,
    NAMES,
    QUICK,
    Case,
    assert_equals_oracle,
    available,
    on_ring,
    ring_mesh,
    run,
    slow_unless,
    with_gradients,
)

import ringjax as rj
from ringjax._src import online_softmax as softmax
from ringjax._src.online_softmax import PartialSoftmax


def partial(values, weights):
    return PartialSoftmax(jnp.asarray(values, jnp.float32)[:, None], jnp.log(jnp.asarray(weights, jnp.float32)))


def test_merging_equal_outputs_changes_nothing():
    values, weights = jax.random.normal(jax.random.key(0), (2, 1000))
    a, b = partial(values, jnp.exp(weights)), partial(values, jnp.exp(3 * weights[::-1]))
    np.testing.assert_array_equal(softmax.merge(a, b).out, a.out)


@pytest.mark.parametrize("swapped", [False, True])
def test_merging_a_large_output_of_tiny_weight_loses_no_precision(swapped):
    large, small = partial([1e4, 1e4, 1e4], [1e-30, 0.0, 1e-12]), partial([1e-3, 1e-3, 1e-3], [1.0, 1.0, 1.0])
    out = softmax.merge(*((small, large) if swapped else (large, small))).out
    np.testing.assert_allclose(np.asarray(out)[:, 0], [1e-3, 1e-3, 1e-3 + 1e-8], rtol=3e-7)  # a few roundings


@pytest.mark.parametrize("ring_size", [1, 2])
def test_a_key_in_every_branch_loses_no_precision(ring_size):
    ones = (1, 1, 1, 1)
    case = Case(
        length=22, batch=1, kv_heads=1, q_per_kv=1, head_dim=8, segment_lengths=ones, dilation_rates=ones, scale=-1.5
    )
    assert_equals_oracle(case, "float32", on_ring(rj.Ring(ring_mesh(ring_size))))  # dq and dk are 0


@pytest.mark.parametrize(
    ("rule", "implementation"),
    [
        pytest.param(rule, implementation, marks=slow_unless(implementation == available(default)))
        for rule, default in {"mod": "xla", "detached": "native", "split": "xla"}.items()
        for implementation in IMPLEMENTATIONS
    ],
)
def test_a_query_with_one_key_has_a_gradient_of_exactly_zero(implementation, rule):
    """The gradient of its score is the difference of two equal sums."""
    case = Case(
        length=200,
        batch=2,
        kv_heads=2,
        q_per_kv=2,
        head_dim=64,
        segment_lengths=(1,) * 4,
        dilation_rates=(1,) * 4,
        rule=rule,
    )
    arrays = case.arrays(np.float32)
    _, dq, dk, _ = run(rj.dilated_attention, arrays, case.pattern, implementation=implementation)
    assert not np.asarray(dq).any() and not np.asarray(dk).any()


NAN_CASE = Case(length=12, batch=1, kv_heads=1, q_per_kv=1, head_dim=4, segment_lengths=(6,), dilation_rates=(2,))


def with_nan(which: str, position: int):
    """Arrays of which one holds a single NaN, and the cotangent."""
    names = ("query", "key", "value")
    arrays = [np.array(x) for x in NAN_CASE.arrays(np.float32)]
    arrays[names.index(which)][0, position, 0, 0] = np.nan
    return arrays


def depends_on_nan(which: str, position: int) -> dict[str, np.ndarray]:
    """Which positions of the output and of the gradients depend on a NaN at this position of one array."""
    seen = np.zeros((12, 12), bool)
    for w, r in zip(NAN_CASE.segment_lengths, NAN_CASE.dilation_rates, strict=True):
        at = np.arange(12)
        chosen = at % w % r == 0
        seen |= (at[:, None] // w == at // w) & chosen & chosen[:, None]
    rows = np.arange(12) == position if which == "query" else seen[:, position]  # queries whose softmax is NaN
    keys = seen[rows].any(axis=0)  # what they see
    found = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
    return found if which != "value" else found | {"dv": np.zeros(12, bool)}


@pytest.mark.parametrize("implementation", ["xla", pytest.param(None, marks=pytest.mark.slow)])
def test_nan_reaches_everything_that_depends_on_it(implementation):
    options = {"implementation": implementation, "compiler_options": QUICK}
    both = with_gradients(rj.dilated_attention, NAN_CASE.pattern, **options)
    for which in ("query", "key", "value"):
        for (name, rows), x in zip(depends_on_nan(which, 4).items(), both(*with_nan(which, 4)), strict=True):
            has_nan = np.isnan(np.asarray(x)[0]).any(axis=(1, 2))
            assert has_nan[rows].all(), (which, name, has_nan)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["interpret_tpu", "interpret_gpu"])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nan_reaches_everything_that_depends_on_it_in_kernels(which, implementation):
    case = NAN_CASE._replace(length=64, head_dim=16, segment_lengths=(32, 64), dilation_rates=(1, 2))
    arrays = [np.array(x) for x in case.arrays(np.float32)]
    arrays[("query", "key", "value").index(which)][0, 4, 0, 0] = np.nan
    ours = run(rj.dilated_attention, arrays, case.pattern, implementation=implementation)
    plain = run(rj.dilated_attention, arrays, case.pattern, implementation="xla")
    for name, x, y in zip(NAMES, ours, plain, strict=True):
        has_nan, wanted = (np.isnan(np.asarray(a)[0]).any(axis=(1, 2)) for a in (x, y))
        assert (has_nan == wanted).all(), (name, has_nan, wanted)
        assert wanted.any() == ((which, name) != ("value", "dv")), name  # which does not depend on values


def test_nan_is_not_an_empty_row():
    """An empty row has a total of 0; a NaN total is neither 0 nor above it."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def states(acc, peak, total):
        part = softmax.finish(softmax.SoftmaxState(acc, peak, total))
        other = PartialSoftmax(jnp.ones_like(acc), jnp.zeros_like(total))
        return part, softmax.finish(softmax.resume(part)), softmax.merge(part, other), softmax.for_backward(part.lse)

    given = [[1.0], [0.0]], [np.nan, -np.inf], [np.nan, 0.0]
    part, resumed, merged, backward = states(*(np.array(x, np.float32) for x in given))
    np.testing.assert_array_equal(part.lse, [np.nan, -np.inf])
    np.testing.assert_array_equal(part.out, [[np.nan], [0.0]])
    np.testing.assert_array_equal(resumed.lse, part.lse)
    np.testing.assert_array_equal(merged.out, [[np.nan], [1.0]])
    np.testing.assert_array_equal(merged.lse, [np.nan, 0.0])
    np.testing.assert_array_equal(backward, [np.nan, np.inf])
