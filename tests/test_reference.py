"""The oracle equals the definition in plain loops, and its gradients equal those of numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NAMES, QUICK, Case, by_definition, count_matrix, error, run

import ringjax as rj

CASES = [
    Case(length=12, segment_lengths=(4, 12), dilation_rates=(1, 3), kv_heads=3),
    Case(length=13, segment_lengths=(5, 9), dilation_rates=(2, 3), rule="block", is_causal=True, q_per_kv=2),
    Case(length=11, segment_lengths=(4, 20), dilation_rates=(5, 2), rule="none", ids=True, scale=0.3),
    Case(length=14, segment_lengths=(4, 6, 7), dilation_rates=(1, 2, 3), rule="split", kv_heads=5, is_causal=True),
    Case(length=12, segment_lengths=(4, 8), dilation_rates=(1, 2), rule="detached", seq_len=9, ids=True),
]


def in_plain_loops(case: Case) -> np.ndarray:
    q, k, v, _ = (np.asarray(x, np.float64) for x in case.arrays(np.float64))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    count = count_matrix(case)
    out = np.zeros_like(q)
    for b, n, p in np.ndindex(case.batch, case.kv_heads * case.q_per_kv, case.length):
        h = n // case.q_per_kv
        weights = count[b, h, p] * np.exp(scale * k[b, :, h] @ q[b, p, n])
        if weights.sum() > 0:
            out[b, p, n] = weights @ v[b, :, h] / weights.sum()
    return out / len(case.segment_lengths) if case.rule == "split" else out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.rule)
def test_reference_equals_the_definition(case):
    with jax.enable_x64(True):
        q, k, v, _ = case.arrays(np.float64)
        rows = [3, 0, case.length - 1]

        @functools.partial(jax.jit, compiler_options=QUICK)
        def both(q, k, v):
            oracle = functools.partial(rj.reference_attention, q, k, v, case.pattern, **case.keywords())
            return oracle(), oracle(rows=rows)

        out, some = both(q, k, v)
        assert error(out, in_plain_loops(case)) < 1e-14
        assert error(some, np.asarray(out)[:, rows]) < 1e-15


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.rule)
def test_reference_and_gradients_equal_numpy(case):
    """Other tests use `by_definition`, which compiles nothing, in place of the oracle."""
    with jax.enable_x64(True):
        arrays = case.arrays(np.float64)
        found = run(rj.reference_attention, arrays, case.pattern, compiler_options=QUICK, **case.keywords())
        for name, x, y in zip(NAMES, found, by_definition(case, arrays), strict=True):
            assert np.abs(y).max() > 0.1
            assert error(x, y) < 1e-14, name


def test_detached_mixing_treats_branch_weights_as_constants():
    case = Case(length=12, segment_lengths=(4, 12), dilation_rates=(1, 2), kv_heads=1, batch=1)
    with jax.enable_x64(True):
        q, k, v, g = case.arrays(np.float64)

        def branch(q, k, v, w, r):
            p = jnp.arange(12)
            attended = (p[:, None] // w == p[None] // w) & ((p % w % r)[:, None] == 0) & ((p % w % r)[None] == 0)
            scores = jnp.where(attended, q[0, :, 0] @ k[0, :, 0].T * case.head_dim**-0.5, -1e30)
            total = jnp.where(attended, jnp.exp(scores), 0).sum(1, keepdims=True)
            weights = jnp.where(attended, jnp.exp(scores), 0) / jnp.where(total > 0, total, 1)
            return weights @ v[0, :, 0], total

        @functools.partial(jax.jit, compiler_options=QUICK)
        def expected(q, k, v, g):
            totals = [branch(q, k, v, w, r)[1] for w, r in ((4, 1), (12, 2))]
            mix = [t / (totals[0] + totals[1]) for t in totals]

            def frozen(q, k, v):
                return sum(m * branch(q, k, v, w, r)[0] for m, (w, r) in zip(mix, ((4, 1), (12, 2)), strict=True))

            return jax.vjp(frozen, q, k, v)[1](g[0, :, 0])

        reference = expected(q, k, v, g)
        detached, exact = (
            run(rj.reference_attention, (q, k, v, g), case.pattern, compiler_options=QUICK)
            for case in (case._replace(rule="detached"), case)
        )
        for x, y in zip(detached[1:], reference, strict=True):
            assert error(x, y) < 1e-14
        assert error(exact[1], reference[0]) > 1e-3
