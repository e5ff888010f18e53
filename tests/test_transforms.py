"""`dilated_attention` under `jit`, `vmap`, `checkpoint`, `scan` and `grad`."""

import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, Case, alternating, by_definition, error
from jax import lax

import ringjax as rj
from ringjax._src.kernels.cpu import build

pytestmark = pytest.mark.usefixtures("either_implementation")
SLOW = pytest.mark.slow
CASE = Case(length=40, kv_heads=2, q_per_kv=2, segment_lengths=(8, 40), dilation_rates=(1, 3))
ONE_BRANCH = Case(length=40, kv_heads=2, q_per_kv=2, segment_lengths=(20,), dilation_rates=(2,))  # compiles faster


def attention(q, k, v):
    return rj.dilated_attention(q, k, v, CASE.pattern, is_causal=True)


def gradient(f, q, k, v, g):
    return jax.vjp(f, q, k, v)[1](g)


def test_eager_calls_equal_the_definition():
    q, k, v, g = ONE_BRANCH.arrays(np.float32)
    out, pull = jax.vjp(lambda *x: rj.dilated_attention(*x, ONE_BRANCH.pattern), q, k, v)
    for x, y in zip((out, *pull(g)), by_definition(ONE_BRANCH, (q, k, v, g)), strict=True):
        assert error(x, y) < 2e-6


def test_equal_patterns_are_one_static_argument():
    traced_once = chex.assert_max_traces(rj.dilated_attention, n=1)
    f = jax.jit(traced_once, static_argnames=("pattern", "is_causal"), compiler_options=QUICK)
    q, k, v, _ = CASE.arrays(np.float32)
    whole = by_definition(CASE._replace(is_causal=True), CASE.arrays(np.float32))[0]
    assert error(f(q, k, v, pattern=CASE.pattern, is_causal=True), whole) < 2e-6
    f(q, k, v, pattern=rj.DilationPattern((8, 40), (1, 3)), is_causal=True)


@alternating("axis", default=[("default", 2), ("plain XLA", 0)], slow=[("default", 0), ("plain XLA", 2)])
def test_vmap_equals_each_call(axis):
    arrays = [np.stack([x, 2 * x, x - 1], axis) for x in CASE.arrays(np.float32)]
    f = jax.vmap(lambda *a: (attention(*a[:3]), *gradient(attention, *a)), axis, axis)
    got = jax.jit(f, compiler_options=QUICK)(*arrays)
    for i in range(3):
        reference = by_definition(CASE._replace(is_causal=True), [np.take(x, i, axis) for x in arrays])
        for x, y in zip(got, reference, strict=True):
            assert error(np.take(np.asarray(x), i, axis), y) < 2e-6


def test_vmap_over_the_query_alone_equals_each_call():
    q, k, v, g = CASE.arrays(np.float32)
    mapped = jax.jit(jax.vmap(lambda q: attention(q, k, v)), compiler_options=QUICK)
    reference = by_definition(CASE._replace(is_causal=True), (-q, k, v, g))[0]
    assert error(mapped(jnp.stack([q, -q]))[1], reference) < 2e-6


@alternating(
    "policy",
    default=[("default", "nothing_saveable"), ("plain XLA", "out_and_lse")],
    slow=[("default", "out_and_lse"), ("plain XLA", "nothing_saveable")],
)
def test_checkpoint_recomputes_only_what_its_policy_drops(policy):
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
    assert loops[attention] == 2 * branches  # one loop per branch, forward and backward
    # the forward loops run again unless the policy saves out and lse
    assert loops[f] == loops[attention] + (0 if policy == "out_and_lse" else branches)
    got = jax.jit(lambda *a: gradient(f, *a), compiler_options=QUICK)(q, k, v, g)
    for x, y in zip(got, by_definition(CASE._replace(is_causal=True), (q, k, v, g))[1:], strict=True):
        assert error(x, y) < 2e-6


@pytest.mark.parametrize("case", [ONE_BRANCH, pytest.param(CASE, marks=SLOW)], ids=["one", "several"])
def test_scan_over_layers_equals_unrolled_layers(case):
    q, k, v, g = case.arrays(np.float32)
    weights = jnp.array([0.5, 2.0])

    def attention(q, k, v):
        return rj.dilated_attention(q, k, v, case.pattern)

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


def test_forward_mode_raises():
    q, k, v, _ = CASE.arrays(np.float32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attention, (q, k, v), (q, k, v))


def test_second_derivatives_equal_the_oracle_or_name_the_implementation_that_has_them():
    case = Case(length=8, batch=1, kv_heads=1, head_dim=4, segment_lengths=(8,), dilation_rates=(1,))
    q, k, v, _ = case.arrays(np.float32)
    slope = lambda f: jax.grad(lambda q: jnp.sum(f(q, k, v, case.pattern) ** 2))  # noqa: E731
    ours, reference = (
        jax.jit(lambda f=f: jax.jvp(slope(f), (q,), (v,))[1], compiler_options=QUICK)
        for f in (rj.dilated_attention, rj.reference_attention)
    )
    if os.environ.get("RINGJAX_NATIVE") == "0" or build.why_not():
        assert error(ours(), reference()) < 1e-5  # sums of products of gradients
    else:
        with pytest.raises(NotImplementedError, match='use `implementation="xla"` for second derivatives'):
            ours()


def test_eager_calls_compile_once(caplog):
    q, k, v, _ = ONE_BRANCH.arrays(np.float32)
    attend = lambda *x: rj.dilated_attention(*x, ONE_BRANCH.pattern)  # noqa: E731
    for f in (attend, jax.vmap(attend)):
        arrays = [x[None] for x in (q, k, v)] if f is not attend else (q, k, v)
        compiled = []
        for _ in range(2):
            caplog.clear()
            with jax.log_compiles():
                f(*arrays)
            compiled.append(sum("Finished XLA compilation" in record.message for record in caplog.records))
        assert compiled[0] > 0
        assert compiled[1] == 0


@pytest.mark.parametrize("rule", ["mod", "detached"])
def test_residuals_are_only_inputs_output_and_lse(rule):
    case = CASE._replace(rule=rule)
    q, k, v, _ = case.arrays(np.float32)
    ids = jnp.zeros((case.batch, case.length), jnp.int32)
    attend = lambda q, k, v: rj.dilated_attention(q, k, v, case.pattern, segment_ids=ids)  # noqa: E731
    _, pull = jax.eval_shape(lambda *x: jax.vjp(attend, *x), q, k, v)
    kept = sum(x.size for x in jax.tree.leaves(pull))
    branch_rows = 0  # detached mixing keeps each branch's selected rows, padded to whole segments
    if rule == "detached":
        rows = (-(-w // r) * (case.length // w) for w, r in zip(case.segment_lengths, case.dilation_rates, strict=True))
        branch_rows = sum(rows) * q.size // case.length
    assert kept == q.size + k.size + v.size + q.size + q.size // case.head_dim + ids.size + branch_rows


@pytest.mark.parametrize(
    ("is_causal", "segment_lengths", "dilation_rates"),
    [
        (True, (6,), (2,)),
        pytest.param(False, (6,), (2,), marks=SLOW),
        pytest.param(True, (3, 6), (1, 2), marks=SLOW),
    ],
)
def test_disabled_jit_equals_the_definition(is_causal, segment_lengths, dilation_rates):
    """Loops then run in Python, with Python integers."""
    case = Case(
        length=6,
        batch=1,
        kv_heads=1,
        head_dim=4,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        is_causal=is_causal,
    )
    q, k, v, _ = case.arrays(np.float32)
    expected = by_definition(case, (q, k, v, np.ones_like(q)))
    with jax.disable_jit():
        out, pull = jax.vjp(lambda q: rj.dilated_attention(q, k, v, case.pattern, is_causal=is_causal), q)
        (slope,) = pull(jnp.ones_like(q))
    assert error(out, expected[0]) < 2e-6
    assert error(slope, expected[1]) < 2e-6
