"""Ring attention against the oracle, forward and gradients: a pairwise grid, random geometry, long messages."""

import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    NAMES,
    NARROW,
    QUICK,
    RANDOM,
    WIDE,
    Case,
    assert_equals_oracle,
    assert_stored_equals_oracle,
    error,
    geometries,
    on_ring,
    pairwise,
    ring_mesh,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import ringjax as rj
from ringjax._src.planning import geometry

PLAN = importlib.import_module("ringjax._src.planning.plan")  # `ringjax._src.planning.plan` is the function

SLOW = pytest.mark.slow


class RingCase(NamedTuple):
    """An attention call and the ring that it runs on."""

    case: Case
    size: int = 4
    layout: str = "contiguous"
    strategy: str = "auto"

    @property
    def ring(self) -> rj.Ring:
        return rj.Ring(ring_mesh(self.size), layout=self.layout, strategy=self.strategy)

    @property
    def branches(self) -> tuple[rj.BranchPlan, ...]:
        """The plan of its branches, in float32."""
        case = self.case
        plan = rj.plan(
            case.pattern,
            seq_len=case.length,
            num_heads=case.kv_heads * case.group,
            num_kv_heads=case.kv_heads,
            head_dim=case.dim,
            ring_size=self.size,
            batch=case.batch,
            layout=self.layout,
            is_causal=case.is_causal,
            strategy=self.strategy,
            has_segment_ids=case.ids,
        )
        return plan.branches

    def __str__(self) -> str:
        return "-".join(map(str, (*self[1:], *self.case)))


def assert_ring_equals_oracle(given: RingCase, *tolerances, **options) -> None:
    options = {"compiler_options": QUICK} | options
    assert_equals_oracle(given.case, tolerances, on_ring(given.ring), **options)


# length, segments, rates and `seq_len`
GEOMETRIES = {
    "aligned": (96, (24, 96), (1, 2), None),
    "straddling": (61, (25, 1), (3, 1), None),  # padded, segments over the borders of shards
    "wide": (80, (200, 10), (45, 3), 67),  # segments beyond the length, a rate beyond the shard
    "rates": (96, (12, 96), (1, 7), None),  # a rate that does not divide the shard
}


def ring_case(geometry, size, layout, strategy, **keywords) -> RingCase:
    length, segments, rates, seq_len = GEOMETRIES[geometry]
    case = Case(length, segment_lengths=segments, dilation_rates=rates, seq_len=seq_len, **keywords)
    return RingCase(case, size, layout, strategy)


GRID = [
    ring_case(**row)
    for row in pairwise(
        seed=26,
        layout=["contiguous", "zigzag"],
        strategy=["auto", "ring", "gather"],
        is_causal=[False, True],
        geometry=list(GEOMETRIES),
        rule=["mod", "block", "none", "grouped", "detached"],
        ids=[False, True],
        size=[2, 3, 4, 8],
        group=[1, 2, 3],
        kv_heads=[2, 3],
        scale=[None, -1.5],
    )
]
# the first rows hold every value and most pairs; the others are slow
ROWS = [pytest.param(i, id=str(row), marks=[] if i < 8 else SLOW) for i, row in enumerate(GRID)]


@pytest.mark.parametrize("number", ROWS)
def test_equals_oracle(number):
    assert_ring_equals_oracle(GRID[number], WIDE if number % 2 else NARROW)


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("contiguous", marks=SLOW)])
def test_ring_of_one(layout):
    case = Case(45, segment_lengths=(8, 60), dilation_rates=(1, 3), ids=True)
    assert_ring_equals_oracle(RingCase(case, 1, layout), WIDE)


EMPTY = {
    "more branches than heads": Case(32, kv_heads=1, segment_lengths=(8, 32), dilation_rates=(1, 2), rule="grouped"),
    "an offset beyond the segment": Case(30, segment_lengths=(32, 1), dilation_rates=(1, 2), rule="grouped"),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("more branches than heads", "ring"),
        ("an offset beyond the segment", "gather"),
        pytest.param("more branches than heads", "gather", marks=SLOW),
        pytest.param("an offset beyond the segment", "ring", marks=SLOW),
    ],
)
def test_grouped_branch_that_selects_nothing(name, strategy):
    case = EMPTY[name]
    assert_ring_equals_oracle(RingCase(case, 2, strategy=strategy), WIDE)


@SLOW
@settings(max_examples=60, **RANDOM)
@given(
    geometries(most_branches=4, longest=128),
    st.integers(2, 8),
    st.sampled_from(["contiguous", "zigzag"]),
    st.sampled_from(["auto", "ring", "gather"]),
)
def test_random_geometry(case, size, layout, strategy):
    assert_ring_equals_oracle(RingCase(case, size, layout, strategy), WIDE, NARROW)


# what travels is cut, several blocks of queries and keys per chunk, each with its plan
LONG = {
    "queries": RingCase(
        Case(2120, 1, 2, 1, segment_lengths=(2120,), dilation_rates=(1,), is_causal=True), 2, "zigzag", "ring"
    ),
    "keys": RingCase(Case(1100, 1, 2, 2, segment_lengths=(1100,), dilation_rates=(1,)), 2, "contiguous", "ring"),
}


@pytest.mark.parametrize("moves", LONG)
def test_several_blocks_in_several_pieces(moves, monkeypatch):
    monkeypatch.setattr(PLAN, "_LONG_MESSAGE", 1024)
    monkeypatch.setattr(geometry, "ring_query_rows", lambda *_: 512)  # as on rings of many devices
    (branch,) = LONG[moves].branches
    assert (branch.where, branch.moves, branch.pieces, branch.is_aligned) == ("ring", moves, 2, True)
    assert branch.shard.rows > 512
    assert branch.shard.sizes.query < branch.shard.rows
    # one of them is compiled as users compile
    assert_ring_equals_oracle(LONG[moves], NARROW, compiler_options=None if moves == "queries" else QUICK)


PIECES = {
    "detached": (Case(128, kv_heads=4, rule="detached", segment_lengths=(16, 128), ids=True), "zigzag", "ring"),
    "unaligned": (Case(125, kv_heads=2, group=2, segment_lengths=(40,), dilation_rates=(3,)), "zigzag", "ring"),
    "grouped": (Case(120, kv_heads=4, rule="grouped", segment_lengths=(50, 120)), "contiguous", "gather"),
}


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [
        ("detached", True),
        ("unaligned", False),
        pytest.param("detached", False, marks=SLOW),
        pytest.param("unaligned", True, marks=SLOW),
        pytest.param("grouped", False, marks=SLOW),
        pytest.param("grouped", True, marks=SLOW),
    ],
)
def test_pieces(name, is_causal, monkeypatch):
    monkeypatch.setattr(PLAN, "_LONG_MESSAGE", 256)
    case, layout, strategy = PIECES[name]
    given = RingCase(case._replace(is_causal=is_causal), 4, layout, strategy)
    assert max(branch.pieces for branch in given.branches) > 1
    assert_ring_equals_oracle(given, WIDE)


@SLOW
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("segments", [(4000, 700), (4096, 512)])
def test_several_blocks(layout, is_causal, segments):
    case = Case(4096, 1, 2, 2, segment_lengths=segments, dilation_rates=(1, 2), is_causal=is_causal)
    assert_ring_equals_oracle(RingCase(case, 2, layout, "ring"), WIDE, NARROW)


@pytest.mark.parametrize("segments", [(128,), pytest.param((16, 128), marks=SLOW)], ids=["one branch", "two branches"])
def test_bfloat16_is_as_exact_as_on_one_device(segments):
    rates = (1, 2)[-len(segments) :]
    case = Case(128, 2, 2, 2, 32, segment_lengths=segments, dilation_rates=rates, is_causal=True)
    contenders = {
        size: with_gradients(attention, case.pattern, compiler_options=QUICK, is_causal=True)
        for size, attention in ((1, rj.dilated_attention), (8, on_ring(RingCase(case, 8, "zigzag").ring)))
    }
    oracle = with_gradients(rj.reference_attention, case.pattern, compiler_options=QUICK, is_causal=True)
    errors = {size: np.zeros(4) for size in contenders}
    for seed in range(5):
        low = case.arrays(jnp.bfloat16, seed)
        right = [np.asarray(x) for x in oracle(*(x.astype(jnp.float32) for x in low))]
        for size, f in contenders.items():
            got = f(*low)
            assert all(x.dtype == jnp.bfloat16 for x in got)
            errors[size] += [
                np.linalg.norm(np.asarray(x, np.float32) - y) / np.linalg.norm(y)
                for x, y in zip(got, right, strict=True)
            ]
    assert (errors[1] > 0).all()
    assert (errors[8] <= 1.1 * errors[1]).all(), errors


CASE = Case(64, segment_lengths=(64,), dilation_rates=(2,), group=2, is_causal=True)


def transformed(how: str):
    attention = on_ring(RingCase(CASE, 4, "zigzag" if how == "vmap" else "contiguous", "ring").ring)
    f = lambda q, k, v: attention(q, k, v, CASE.pattern, is_causal=True)  # noqa: E731
    f = jax.checkpoint(f) if how == "checkpoint" else f

    def both(q, k, v, g):
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(g)

    return both


@pytest.mark.parametrize("how", ["checkpoint", "vmap"])
def test_transforms(how):
    several = [jnp.stack([x, 2 * x, x - 1]) for x in CASE.arrays(np.float32)]
    f = jax.vmap(transformed(how)) if how == "vmap" else transformed(how)
    f = jax.jit(f, compiler_options=QUICK)
    got = f(*several) if how == "vmap" else [jnp.stack(x) for x in zip(*map(f, *several), strict=True)]
    oracle = with_gradients(rj.reference_attention, CASE.pattern, compiler_options=QUICK, is_causal=True)
    for i in range(3):
        for name, x, y in zip(NAMES, got, oracle(*(x[i] for x in several)), strict=True):
            assert error(x[i], y) < 2e-6, name


@SLOW
def test_without_jit_as_with():
    attention = on_ring(RingCase(CASE, 2).ring)
    q, k, v, _ = CASE.arrays(np.float32)
    out, expected = (f(q, k, v, CASE.pattern, is_causal=True) for f in (attention, rj.reference_attention))
    assert error(out, expected) < 2e-6


def test_padding_may_hold_anything():
    """And what is on the ring stays sharded over it."""
    case = Case(59, segment_lengths=(4, 59), dilation_rates=(1, 1), is_causal=True)
    assert_stored_equals_oracle(case, RingCase(case, 4, "zigzag").ring, fill=np.nan)


def test_output_and_gradients_stay_sharded():
    ring = RingCase(CASE, 4, "contiguous", "ring").ring
    assert ring.spec() == PartitionSpec(None, "ring", None, None)
    assert_stored_equals_oracle(CASE, ring, limit=NARROW)
