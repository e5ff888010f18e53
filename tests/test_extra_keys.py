"""Attention sinks, zero keys (`padding="zeros"`) and the log-sum-exp, against the oracle and padded segments."""

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    IMPLEMENTATIONS,
    QUICK,
    RANDOM,
    TOLERANCE,
    Case,
    available,
    error,
    geometries,
    pairwise,
    ring_mesh,
)
from hypothesis import given, settings
from jax.sharding import NamedSharding, PartitionSpec

import ringjax as rj
from ringjax._src.aot.collectives import executed

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
UNALIGNED = {"length": 61, "segment_lengths": (16, 24, 64, 8), "dilation_rates": (3, 2, 4, 1)}
COMMON = Case(length=64, seq_len=61, kv_heads=4, segment_lengths=(24, 64), dilation_rates=(2, 4), ids=True)


class Call(NamedTuple):
    """An attention call with extra keys. Sequences of the batch have documents and padding if the case has ids."""

    case: Case
    padding: str = "zeros"
    sinks: bool = True

    @property
    def pattern(self) -> rj.DilationPattern:
        return dataclasses.replace(self.case.pattern, padding=self.padding)

    def keywords(self) -> dict:
        at, length = np.arange(self.case.length), self.case.length
        lengths = [length, length // 3, *(1,) * self.case.batch][: self.case.batch]
        ids = np.stack([np.where(at < end, at // 20, -1) for end in lengths])
        return {**self.case.keywords(), "segment_ids": jnp.asarray(ids, jnp.int32) if self.case.ids else None}

    def arrays(self, dtype) -> tuple[jax.Array, ...]:
        """Returns query, key, value and sink logits (of which one is -inf), and cotangents of output and lse."""
        q, k, v, g = self.case.arrays(dtype)
        rng = np.random.default_rng(7)
        sinks = rng.standard_normal(q.shape[2])
        sinks[1::3] = -np.inf
        return q, k, v, jnp.asarray(sinks, dtype), g, jnp.asarray(rng.standard_normal(q.shape[:3]), dtype)


def run(attention, call: Call, arrays, *, pattern=None, **options) -> dict[str, np.ndarray]:
    """Returns output, log-sum-exp and all gradients."""
    keywords = {**call.keywords(), **options, "return_lse": True}
    pattern = pattern or call.pattern

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(q, k, v, sinks, *cotangents):
        def attend(q, k, v, sinks):
            return attention(q, k, v, pattern, sink_logits=sinks if call.sinks else None, **keywords)

        found, pull = jax.vjp(attend, q, k, v, sinks)
        return *found, *pull(cotangents)

    return dict(zip(NAMES, map(np.asarray, both(*arrays)), strict=True))


def assert_equal(found: dict, expected: dict, tolerance: float, *about) -> None:
    for name in NAMES:
        x, y = found[name], expected[name]
        is_finite = np.isfinite(y)
        assert x.shape == y.shape
        assert (np.isfinite(x) == is_finite).all(), (name, *about)
        assert (x[~is_finite] == -np.inf).all(), (name, *about)
        assert error(np.where(is_finite, x, 0), np.where(is_finite, y, 0)) <= tolerance, (name, *about)


@functools.lru_cache(maxsize=8)
def oracle(call: Call, dtype: str) -> dict[str, np.ndarray]:
    """Returns the results of the oracle in float64, for arrays of this dtype; several tests share a call."""
    with jax.enable_x64(True):
        return run(rj.reference_attention, call, [x.astype(np.float64) for x in call.arrays(dtype)])


def assert_equals_oracle(call: Call, attention=rj.dilated_attention, dtype="float64", **options) -> None:
    with jax.enable_x64(dtype == "float64"):
        found = run(attention, call, call.arrays(dtype), **options)
    assert {x.dtype.name for x in found.values()} == {dtype}
    assert_equal(found, oracle(call, dtype), TOLERANCE[dtype], call, options)


def on_ring(ring: rj.Ring):
    """Returns `dilated_attention` on a ring for arrays in sequence order."""

    def attention(q, k, v, pattern, *, segment_ids, seq_len, **keywords):
        padded = dataclasses.replace(ring, seq_len=q.shape[1])
        ids = None if segment_ids is None else padded.shard(segment_ids, fill=-1)
        keywords |= {"segment_ids": ids, "seq_len": seq_len or q.shape[1], "ring": ring}
        found = rj.dilated_attention(*(padded.shard(x) for x in (q, k, v)), pattern, **keywords)
        return tuple(padded.unshard(x) for x in found)

    return attention


def in_padded_segments(q, k, v, pattern, *, segment_ids, sink_logits, **_):
    """Computes non-causal attention as torchscale does: in each branch over segments that are padded with zeros.

    The branches of a sequence are combined by their softmax denominators. Nothing is masked; padding is cut off.
    """
    kv_heads, q_per_kv, scale = k.shape[2], q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    outs, lses = jnp.zeros_like(q), jnp.full_like(q[..., 0], -jnp.inf)
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        length = q.shape[1] if segment_ids is None else int((np.asarray(segment_ids[b]) >= 0).sum())
        parts = []
        for branch in pattern.branches(kv_heads, length):
            w, r, o = branch.segment_length, branch.rate, branch.offsets[n // q_per_kv]
            of_head = q[b, :length, n] * scale, k[b, :length, n // q_per_kv], v[b, :length, n // q_per_kv]
            segments = [jnp.pad(x, ((0, -length % w), (0, 0))).reshape(-1, w, x.shape[1]) for x in of_head]
            rows = [jnp.pad(x, ((0, 0), (0, -w % r), (0, 0)))[:, o::r] for x in segments]
            scores = jnp.einsum("smh,snh->smn", *rows[:2])
            lse = jax.nn.logsumexp(scores, axis=-1)
            out = jnp.einsum("smn,snh->smh", jnp.exp(scores - lse[..., None]), rows[2])
            segment, inside = np.divmod(np.arange(length), w)
            is_selected = inside % r == o
            row = inside // r * is_selected
            parts.append((jnp.where(is_selected, lse[segment, row], -jnp.inf), out[segment, row]))
        logits = [x for x, _ in parts] + ([jnp.full(length, sink_logits[n])] if sink_logits is not None else [])
        joint = jax.nn.logsumexp(jnp.stack(logits), axis=0)
        is_covered = joint > -jnp.inf
        weights = [jnp.where(is_covered, jnp.exp(x - jnp.where(is_covered, joint, 0)), 0) for x, _ in parts]
        weights = [jax.lax.stop_gradient(x) for x in weights] if pattern.mixing == "detached" else weights
        mixed = sum(weight[:, None] * out for weight, (_, out) in zip(weights, parts, strict=True))
        outs, lses = outs.at[b, :length, n].set(mixed), lses.at[b, :length, n].set(joint)
    return outs, lses


@pytest.mark.parametrize("mixing", ["detached", pytest.param("exact", marks=pytest.mark.slow)])
def test_reference_equals_segments_padded_with_zeros(mixing):
    """As in torchscale: where a sequence has several segments, the rate divides them; otherwise it need not."""
    case = Case(length=21, head_dim=4, segment_lengths=(6, 8, 40), dilation_rates=(1, 2, 4))
    pattern = dataclasses.replace(case.pattern, offsets="block", mixing=mixing)
    call, at, ends = Call(case, sinks=False), np.arange(21), np.array([[21], [5]])
    with jax.enable_x64(True):
        arrays, ids = call.arrays(np.float64), np.where(at < ends, 0, -1)
        found, expected = (
            run(attention, call, arrays, segment_ids=ids, pattern=dataclasses.replace(pattern, padding="zeros"))
            for attention in (rj.reference_attention, in_padded_segments)
        )
        assert_equal(found, expected, 1e-13)
        masked = run(rj.reference_attention, call, arrays, segment_ids=ids, pattern=pattern)
        assert error(masked["out"], expected["out"]) > 0.05


def test_reference_sink_is_a_key_without_value():
    case = Case(length=12, batch=1, kv_heads=2, q_per_kv=2, segment_lengths=(12,), dilation_rates=(1,))
    sinks = np.array([0.5, -np.inf, -2.0, 30.0])
    with jax.enable_x64(True):
        q, k, v, _ = (np.asarray(x) for x in case.arrays(np.float64))
        attend = functools.partial(rj.reference_attention, pattern=case.pattern, return_lse=True)
        out, lse = jax.jit(attend, compiler_options=QUICK)(q, k, v, sink_logits=sinks)
    for n in range(4):
        logits = np.pad(q[0, :, n] @ k[0, :, n // 2].T / 8**0.5, ((0, 0), (0, 1)), constant_values=sinks[n])
        weights = np.exp(logits)
        total = weights.sum(1, keepdims=True)
        assert error(out[0, :, n], (weights / total)[:, :-1] @ v[0, :, n // 2]) < 1e-13
        assert error(lse[0, :, n], np.log(total)[:, 0]) < 1e-13


ONE_DEVICE = pairwise(
    implementation=("xla", "native"),
    padding=("zeros", "masked"),
    sinks=(True, False),
    rule=("block", "detached", "split", "mod"),
    is_causal=(False, True),
    ids=(True, False),
    dropout_rate=(0.0, 0.25),
    dtype=("float64", "float32"),
)


def slow_rows(rows: list[dict]) -> list:
    """Returns parameters for the rows, as slow tests.

    Makes them valid: sinks need exact mixing, zero keys need all heads, and kernels have no dropout.
    """
    valid = []
    for row in rows:
        if row["rule"] == "split":
            row = {**row, "padding": "masked"}  # noqa: PLW2901
        if row["rule"] == "detached":
            row = {**row, "sinks": False}  # noqa: PLW2901
        if row.get("dropout_rate"):
            row = {**row, "implementation": "xla"}  # noqa: PLW2901
        valid.append(row)
    return [pytest.param(row, marks=pytest.mark.slow, id="-".join(map(str, row.values()))) for row in valid]


def call_of(row: dict, **sizes) -> Call:
    fields = {name: row[name] for name in ("rule", "is_causal", "ids", "dropout_rate") if name in row}
    return Call(Case(**UNALIGNED, **fields, **sizes), row["padding"], row["sinks"])


@pytest.mark.parametrize("row", slow_rows(ONE_DEVICE))
def test_one_device_equals_the_oracle(row):
    call = call_of(row, kv_heads=3 + (row["rule"] == "split"), q_per_kv=2)
    implementation = None if row["dropout_rate"] else available(row["implementation"])
    assert_equals_oracle(call, dtype=row["dtype"], implementation=implementation)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("implementation", "rule"),
    [
        ("interpret_tpu", "mod"),
        pytest.param("interpret_gpu", "mod", marks=SLOW),
        pytest.param("interpret_tpu", "detached", marks=SLOW),
        pytest.param("interpret_gpu", "detached", marks=SLOW),
    ],
)
def test_interpreted_kernels_equal_the_oracle(implementation, rule):
    case = Case(length=39, head_dim=16, segment_lengths=(39,), dilation_rates=(2,), rule=rule)
    assert_equals_oracle(Call(case, sinks=rule == "mod"), dtype="float32", implementation=implementation)


RINGS = pairwise(
    implementation=("xla", "native"),
    padding=("zeros", "masked"),
    sinks=(True, False),
    rule=("block", "detached", "split"),
    is_causal=(False, True),
    ids=(True, False),
    mesh=((4, 1, 1), (3, 1, 1), (2, 2, 2)),  # devices of the sequence, batch and heads
    layout=("contiguous", "zigzag"),
    strategy=("ring", "all_to_all", "all_to_all_ring", "all_gather"),
)


def ring_of(row: dict) -> rj.Ring:
    mesh = ring_mesh(*row["mesh"], names=("ring", "batch", "heads"))
    return rj.Ring(mesh, batch_axis="batch", head_axis="heads", layout=row["layout"], strategy=row["strategy"])


@pytest.mark.parametrize("row", slow_rows(RINGS))
def test_rings_equal_the_oracle(row):
    ring_size, _, head_shards = row["mesh"]
    if row["rule"] == "split" and head_shards > 1:
        row = {**row, "mesh": (ring_size, 2, 1)}
    heads = 4 * ring_size if row["rule"] == "split" else 2 * head_shards * (3 if ring_size == 3 else 2)
    call = call_of(row, kv_heads=heads, q_per_kv=2)
    assert_equals_oracle(call, on_ring(ring_of(row)), implementation=available(row["implementation"]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_common_case_equals_the_oracle_on_one_device(implementation):
    assert_equals_oracle(Call(COMMON), implementation=implementation)


def test_common_case_equals_the_oracle_on_four_devices():
    ring = rj.Ring(ring_mesh(4), layout="zigzag", strategy="ring")
    assert_equals_oracle(Call(COMMON), on_ring(ring), implementation=available("native"))


def test_dense_exchange_equals_the_oracle():
    """With heads sharded over a mesh axis, and the zero keys of each branch on its own."""
    call = Call(COMMON._replace(segment_lengths=(24,), dilation_rates=(1,), rule="detached"), sinks=False)
    keywords = {"seq_len": 61, "num_heads": 4, "head_dim": 8, "ring_size": 2, "stored_length": 64, "head_shards": 2}
    plan = rj.plan(call.pattern, **keywords, strategy="all_to_all", has_segment_ids=True, device="cpu")
    assert [branch.exchange for branch in plan.branches] == ["dense"]
    mesh = ring_mesh(2, 2, names=("ring", "heads"))
    ring = rj.Ring(mesh, head_axis="heads", strategy="all_to_all")
    assert_equals_oracle(call, on_ring(ring), implementation="xla")


@SLOW
@settings(max_examples=60, **RANDOM)
@given(geometries(most_branches=3, longest=70))
def test_random_cases_equal_the_oracle(case):
    call = Call(case._replace(dropout_rate=0.0), "masked" if case.rule == "split" else "zeros", case.rule != "detached")
    for implementation in IMPLEMENTATIONS:
        assert_equals_oracle(call, implementation=implementation)


@SLOW
@settings(max_examples=12, **RANDOM)
@given(geometries(most_branches=2, longest=60))
def test_random_cases_on_a_ring_equal_the_oracle(case):
    call = Call(case, "masked" if case.rule == "split" else "zeros", case.rule != "detached")
    assert_equals_oracle(call, on_ring(rj.Ring(ring_mesh(4), layout="zigzag")), implementation=available("native"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sink_of_minus_infinity_equals_none(implementation):
    """Also where no branch selects a row: a third of the (position, head) pairs."""
    case = Case(length=30, segment_lengths=(10,), dilation_rates=(3,), ids=True)
    found = []
    for has_sinks in (True, False):
        call = Call(case, "masked", has_sinks)
        q, k, v, sinks, *cotangents = call.arrays("float32")
        arrays = [q, k, v, jnp.full_like(sinks, -jnp.inf), *cotangents]
        found.append(run(rj.dilated_attention, call, arrays, implementation=implementation))
    assert_equal(*found, 2e-6)
    assert not found[0]["dsink"].any()
    assert np.isinf(found[0]["lse"]).mean() > 0.5


def test_uncovered_row_attends_to_its_sink_and_padding_to_nothing():
    case = Case(length=8, batch=1, kv_heads=2, segment_lengths=(8,), dilation_rates=(2,))
    q, k, v, _ = case.arrays("float32")
    keywords = {"sink_logits": np.array([2.0, 3.0], np.float32), "return_lse": True, "seq_len": 7}
    attend = functools.partial(rj.dilated_attention, pattern=case.pattern, implementation="xla", **keywords)
    out, lse = map(np.asarray, jax.jit(attend, compiler_options=QUICK)(q, k, v))
    assert (lse[0, 1:7:2, 0] == 2).all()
    assert (lse[0, 0:7:2, 1] == 3).all()
    assert (lse[0, 7] == -np.inf).all()
    assert not out[0, 1:7:2, 0].any()
    assert not out[0, 7].any()


def test_partial_softmaxes_merge_with_the_log_sum_exp():
    """Two calls over parts of the branches, merged with their log-sum-exp, equal one call over all, with gradients."""
    case = Case(length=32, segment_lengths=(8, 32), dilation_rates=(1, 4))
    pattern, parts = case.pattern, [rj.DilationPattern((8,), (1,)), rj.DilationPattern((32,), (4,))]

    def merged(q, k, v):
        outs, lses = zip(
            *(rj.dilated_attention(q, k, v, x, return_lse=True, implementation="xla") for x in parts), strict=True
        )
        weights = jax.nn.softmax(jnp.stack(lses), axis=0)
        return (weights[..., None] * jnp.stack(outs)).sum(0)

    with jax.enable_x64(True):
        *arrays, g = case.arrays(np.float64)
        whole = functools.partial(rj.dilated_attention, pattern=pattern, implementation="xla")
        both = jax.jit(lambda f, *x: jax.vjp(f, *x)[1](g), static_argnums=0, compiler_options=QUICK)
        for x, y in zip(both(merged, *arrays), both(whole, *arrays), strict=True):
            assert error(x, y) < 1e-13


def test_arrays_that_the_compiler_shards_equal_the_oracle():
    mesh = ring_mesh(2, 2, 2, names=("batch", "sequence", "heads"))
    call = Call(COMMON)
    spec = PartitionSpec("batch", "sequence", "heads")

    def attention(q, k, v, pattern, *, segment_ids, **keywords):
        q, k, v = (jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) for x in (q, k, v))
        return rj.dilated_attention(q, k, v, pattern, segment_ids=segment_ids, **keywords)

    with jax.set_mesh(mesh):  # in float32, as the compiler of jax 0.10 calls back from threads without `enable_x64`
        assert_equals_oracle(call, attention, dtype="float32", implementation="xla")


@SLOW
@pytest.mark.parametrize("over", [None, "ring"])
def test_vmap_over_sinks_equals_separate_calls(over):
    case = Case(length=32, batch=1, segment_lengths=(12, 32), dilation_rates=(1, 4))
    ring = None if over is None else rj.Ring(ring_mesh(4))
    q, k, v, _ = case._replace(batch=3).arrays("float32")
    sinks = jnp.asarray(np.random.default_rng(1).standard_normal((3, q.shape[2])), np.float32)
    pattern = dataclasses.replace(case.pattern, padding="zeros")

    def loss(q, k, v, sink):
        keywords = {"sink_logits": sink, "return_lse": True, "implementation": "xla", "ring": ring}
        out, lse = rj.dilated_attention(q[None], k[None], v[None], pattern, **keywords)
        return (out**2).sum() + jnp.sin(lse).sum()

    grads = jax.grad(loss, argnums=(0, 1, 2, 3))
    mapped = jax.jit(jax.vmap(grads), compiler_options=QUICK)(q, k, v, sinks)
    one = jax.jit(grads, compiler_options=QUICK)
    for i in range(3):
        for x, y in zip(mapped, one(q[i], k[i], v[i], sinks[i]), strict=True):
            assert error(x[i], y) < 2e-6


@pytest.mark.parametrize("check_vma", [True, False])
@SLOW
def test_gradient_of_replicated_sinks_inside_shard_map(check_vma):
    mesh = ring_mesh(2, 2, 2, names=("batch", "ring", "heads"))
    call = Call(Case(**UNALIGNED | {"length": 64}, kv_heads=4, ids=True))
    arrays, ids = PartitionSpec("batch", "ring", "heads"), PartitionSpec("batch", "ring")

    def attention(q, k, v, pattern, *, segment_ids, sink_logits, scale, seq_len, **keywords):
        def local(q, k, v, segment_ids, sinks):
            axes = {"axis_name": "ring", "batch_axis": "batch", "head_axis": "heads"}
            given = {"segment_ids": segment_ids, "sink_logits": sinks}
            return rj.ring_dilated_attention(q, k, v, pattern, **axes, **given, **keywords)

        specs = (arrays, arrays, arrays, ids, PartitionSpec("heads"))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(arrays, arrays), check_vma=check_vma)
        return mapped(q, k, v, segment_ids, sink_logits)

    assert_equals_oracle(call, attention, implementation="xla")


@pytest.mark.parametrize(
    ("length", "is_causal"), [(128, False), (100, True)], ids=["no segment is short", "causal attention"]
)
def test_program_without_zero_keys_is_that_of_masked_padding(length, is_causal):
    x = jax.ShapeDtypeStruct((1, length, 4, 8), np.float32)
    texts = []
    for padding in ("zeros", "masked"):
        pattern = rj.DilationPattern((16, 64), (1, 4), padding=padding)
        attention = functools.partial(rj.dilated_attention, is_causal=is_causal, implementation="xla")
        both = jax.jit(lambda q, k, v, g, f=attention, p=pattern: jax.vjp(lambda *x: f(*x, p), q, k, v)[1](g))
        texts.append(both.lower(x, x, x, x).as_text())
    assert texts[0] == texts[1]


def test_collectives_equal_the_plan():
    """Devices count the lengths of padded sequences forward, and add the gradients of sinks backward."""
    mesh = ring_mesh(4)
    ring, pattern = rj.Ring(mesh, strategy="ring"), rj.DilationPattern((64, 256), (4, 8), padding="zeros")
    over, everywhere = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((None, "ring"), ()))
    q, ids = jax.device_put((np.zeros((2, 256, 4, 8), np.float32), np.zeros((2, 256), np.int32)), over)
    sinks = jax.device_put(np.zeros(4, np.float32), everywhere)
    keywords = {"segment_ids": ids, "ring": ring, "implementation": "xla"}
    attend = lambda q, k, v, sinks: rj.dilated_attention(q, k, v, pattern, sink_logits=sinks, **keywords)  # noqa: E731
    forward = jax.jit(lambda *x: jax.vjp(attend, *x)).lower(q, q, q, sinks).compile(compiler_options=QUICK)
    out, pull = forward(q, q, q, sinks)
    backward = jax.jit(lambda pull, g: pull(g)).lower(pull, out).compile(compiler_options=QUICK)
    plan = rj.plan(
        pattern,
        seq_len=256,
        num_heads=4,
        head_dim=8,
        ring_size=4,
        batch=2,
        strategy="ring",
        has_segment_ids=True,
        has_sinks=True,
        device="cpu",
    )
    for compiled, name in ((forward, "forward"), (backward, "backward")):
        planned: collections.Counter = collections.Counter()
        for message in (m for x in (plan, *plan.branches) for m in getattr(x, name)):
            planned[message.op, message.dtype, message.bytes] += message.number
        assert executed(compiled.as_text()) == planned, name
    assert [(m.dtype, m.bytes) for m in (*plan.forward, *plan.backward)] == [("int32", 8), ("float32", 32)]


def test_padding_before_the_end_is_reported(monkeypatch, caplog):
    monkeypatch.setenv("RINGJAX_DEBUG", "1")
    q, pattern = np.zeros((2, 8, 2, 4), np.float32), rj.DilationPattern((4,), (1,), padding="zeros")
    ids = np.where(np.arange(8) < np.array([[2], [0]]), -1, 0)
    attend = functools.partial(rj.dilated_attention, q, q, q, pattern, implementation="xla")
    jax.jit(lambda ids: attend(segment_ids=ids), compiler_options=QUICK)(ids)
    jax.effects_barrier()
    fault = 'not padded at the end only, as `padding="zeros"` requires'
    assert [x.getMessage() for x in caplog.records if x.name == "ringjax"] == [
        f"ringjax: `segment_ids`: 1 values are {fault}."
    ]
