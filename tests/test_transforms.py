"""The transforms that people use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, Case, error, run, with_gradients
from jax import lax

import ringjax as rj

CASE = Case(length=40, kv_heads=2, group=2, segment_lengths=(8, 40), dilation_rates=(1, 3))


def attention(q, k, v):
    return rj.dilated_attention(q, k, v, CASE.pattern, is_causal=True)


def gradient(f, q, k, v, g):
    return jax.vjp(f, q, k, v)[1](g)


def test_without_jit_as_with():
    q, k, v, g = CASE.arrays(np.float32)
    expected = run(rj.reference_attention, (q, k, v, g), CASE.pattern, is_causal=True, compiler_options=QUICK)
    assert error(attention(q, k, v), expected[0]) < 2e-6
    for x, y in zip(gradient(attention, q, k, v, g), expected[1:], strict=True):
        assert error(x, y) < 2e-6


def test_pattern_is_a_static_argument():
    f = jax.jit(rj.dilated_attention, static_argnames=("pattern", "is_causal"))
    q, k, v, _ = CASE.arrays(np.float32)
    assert error(f(q, k, v, pattern=CASE.pattern, is_causal=True), attention(q, k, v)) < 1e-6
    before = f._cache_size()
    f(q, k, v, pattern=rj.DilationPattern((8, 40), (1, 3)), is_causal=True)
    assert f._cache_size() == before


@pytest.mark.parametrize("axis", [0, 2])
def test_vmap(axis):
    arrays = [jnp.stack([x, 2 * x, x - 1], axis) for x in CASE.arrays(np.float32)]
    f = jax.vmap(lambda *a: (attention(*a[:3]), *gradient(attention, *a)), axis, axis)
    got = jax.jit(f, compiler_options=QUICK)(*arrays)
    alone = with_gradients(rj.dilated_attention, CASE.pattern, is_causal=True, compiler_options=QUICK)
    for i in range(3):
        for x, y in zip(got, alone(*(jnp.take(x, i, axis) for x in arrays)), strict=True):
            assert error(jnp.take(x, i, axis), y) < 2e-6


def test_vmap_over_the_query_alone():
    q, k, v, _ = CASE.arrays(np.float32)
    got = jax.vmap(lambda q: attention(q, k, v))(jnp.stack([q, -q]))
    assert error(got[1], attention(-q, k, v)) < 2e-6


@pytest.mark.parametrize("policy", ["nothing_saveable", "out_and_lse"])
def test_checkpoint(policy):
    q, k, v, g = CASE.arrays(np.float32)
    policies = jax.checkpoint_policies
    chosen = (
        policies.save_only_these_names("ringjax_out", "ringjax_lse")
        if policy == "out_and_lse"
        else policies.nothing_saveable
    )
    f = jax.checkpoint(attention, policy=chosen)
    loops = {h: str(jax.make_jaxpr(lambda *a, h=h: gradient(h, *a))(q, k, v, g)).count("scan[") for h in (f, attention)}
    branches = len(CASE.segment_lengths)
    assert loops[attention] == 2 * branches  # a loop per branch, forward and backward
    # the forward loops run once more unless out and lse are kept
    assert loops[f] == loops[attention] + (0 if policy == "out_and_lse" else branches)
    got, expected = (
        jax.jit(lambda *a, h=h: gradient(h, *a), compiler_options=QUICK)(q, k, v, g) for h in (f, attention)
    )
    for x, y in zip(got, expected, strict=True):
        assert error(x, y) < 2e-6


def test_scan_over_layers():
    q, k, v, g = CASE.arrays(np.float32)
    weights = jnp.array([0.5, 2.0])

    def scanned(q, k, v):
        return lax.scan(lambda x, w: (attention(w * x, k, v), None), q, weights)[0]

    def unrolled(q, k, v):
        for w in weights:
            q = attention(w * q, k, v)
        return q

    got, expected = (
        jax.jit(lambda *a, f=f: (f(*a[:3]), *gradient(f, *a)), compiler_options=QUICK)(q, k, v, g)
        for f in (scanned, unrolled)
    )
    for x, y in zip(got, expected, strict=True):
        assert error(x, y) < 2e-6


def test_forward_mode_says_that_it_is_not_defined():
    q, k, v, _ = CASE.arrays(np.float32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attention, (q, k, v), (q, k, v))


def test_residuals_are_inputs_output_and_lse_only():
    q, k, v, _ = CASE.arrays(np.float32)
    ids = jnp.zeros((CASE.batch, CASE.length), jnp.int32)
    _, pull = jax.vjp(lambda q, k, v: rj.dilated_attention(q, k, v, CASE.pattern, segment_ids=ids), q, k, v)
    kept = sum(x.size for x in jax.tree.leaves(pull))
    assert kept == q.size + k.size + v.size + q.size + q.size // CASE.dim + ids.size


@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_without_jit(is_causal):
    """Loops run in Python then, with Python's integers."""
    case = Case(6, 1, 1, 1, 4, (6,), (2,), is_causal=is_causal)
    q, k, v, _ = case.arrays(np.float32)
    right = rj.reference_attention(q, k, v, case.pattern, is_causal=is_causal)
    with jax.disable_jit():
        out = rj.dilated_attention(q, k, v, case.pattern, is_causal=is_causal)
        slope = jax.grad(lambda q: rj.dilated_attention(q, k, v, case.pattern, is_causal=is_causal).sum())(q)
    assert error(out, right) < 2e-6
    expected = jax.grad(lambda q: rj.reference_attention(q, k, v, case.pattern, is_causal=is_causal).sum())(q)
    assert error(slope, expected) < 2e-6
