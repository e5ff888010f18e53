"""Ring attention equals the oracle, forward and backward: a pairwise grid, random geometry, long messages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    IMPLEMENTATIONS,
    NAMES,
    NEEDS_KERNELS,
    QUICK,
    RANDOM,
    RULES,
    Case,
    assert_equals_oracle,
    assert_sharded_equals_oracle,
    available,
    by_definition,
    by_implementation,
    covering,
    error,
    geometries,
    on_ring,
    pairwise,
    ring_mesh,
    slow_unless,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import ringjax as rj
from ringjax._src.aot import collectives
from ringjax._src.aot.schedule import COLLECTIVES, Program, parse
from ringjax._src.planning import branch_plan, spec

SLOW = pytest.mark.slow
LAYOUTS = ("contiguous", "zigzag")
STRATEGIES = ("auto", "ring", "all_gather")


class RingCase(NamedTuple):
    """An attention call and the ring on which it runs."""

    case: Case
    ring_size: int = 4
    layout: str = "contiguous"
    strategy: str = "auto"
    device: str = "cpu"  # whose plan is expected

    @property
    def ring(self) -> rj.Ring:
        return rj.Ring(ring_mesh(self.ring_size), layout=self.layout, strategy=self.strategy)

    @property
    def branches(self) -> tuple[rj.BranchPlan, ...]:
        """The plans of the branches in float32."""
        case = self.case
        plan = rj.plan(
            case.pattern,
            seq_len=case.length,
            num_heads=case.kv_heads * case.q_per_kv,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            ring_size=self.ring_size,
            batch=case.batch,
            layout=self.layout,
            is_causal=case.is_causal,
            strategy=self.strategy,
            has_segment_ids=case.ids,
            device=self.device,
        )
        return plan.branches

    def __str__(self) -> str:
        return f"ring_size={self.ring_size},{self.layout},{self.strategy},{self.case}"


def assert_ring_equals_oracle(given: RingCase, dtype: str, compiler_options=QUICK, **options) -> None:
    assert_equals_oracle(given.case, dtype, on_ring(given.ring), compiler_options=compiler_options, **options)


class Geometry(NamedTuple):
    """A sequence and a pattern whose segments and rates relate to the shards of a ring in a particular way."""

    length: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    seq_len: int | None = None


GEOMETRIES = {
    "aligned": Geometry(length=96, segment_lengths=(24, 96), dilation_rates=(1, 2)),
    "segments across shard boundaries, padded": Geometry(length=61, segment_lengths=(25, 1), dilation_rates=(3, 1)),
    "a segment beyond the length, a rate beyond the shard": Geometry(
        length=80, segment_lengths=(200, 10), dilation_rates=(45, 3), seq_len=67
    ),
    "a rate that does not divide the shard": Geometry(length=96, segment_lengths=(12, 96), dilation_rates=(1, 7)),
}
ROWS = pairwise(
    layout=LAYOUTS,
    strategy=STRATEGIES,
    is_causal=[False, True],
    geometry=list(GEOMETRIES),
    rule=RULES,
    ids=[False, True],
    ring_size=[2, 3, 4, 8],
    q_per_kv=[1, 2, 3],
    kv_heads=[2, 3],
    scale=[None, -1.5],
    dtype=["float64", "float32", "bfloat16"],
)
GRID = [{**row, "implementation": implementation} for row in ROWS for implementation in IMPLEMENTATIONS]
DEFAULT = covering(GRID, ("layout", "is_causal"), ("implementation", "is_causal"), ("implementation", "strategy"))


@pytest.mark.parametrize(
    "row", [pytest.param(row, id="-".join(map(str, row.values())), marks=slow_unless(row in DEFAULT)) for row in GRID]
)
def test_ring_equals_oracle(row):
    options = dict(row)
    ring = {name: options.pop(name) for name in ("ring_size", "layout", "strategy")}
    dtype, implementation = options.pop("dtype"), options.pop("implementation")
    case = Case(**GEOMETRIES[options.pop("geometry")]._asdict(), **options)
    assert_ring_equals_oracle(RingCase(case, **ring), dtype, implementations=(implementation,))


@pytest.mark.parametrize("layout", ["zigzag", pytest.param("contiguous", marks=SLOW)])
@by_implementation("native")
def test_ring_of_one_device_equals_oracle(layout, implementation):
    case = Case(length=45, segment_lengths=(8, 60), dilation_rates=(1, 3), ids=True)
    given = RingCase(case, ring_size=1, layout=layout)
    assert_ring_equals_oracle(given, "float64", implementations=(implementation,))


EMPTY = {
    "more branches than heads": Case(
        length=32, kv_heads=1, segment_lengths=(8, 32), dilation_rates=(1, 2), rule="split"
    ),
    "an offset beyond the segment": Case(length=30, segment_lengths=(32, 1), dilation_rates=(1, 2), rule="split"),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("more branches than heads", "ring"),
        ("an offset beyond the segment", "all_gather"),
        pytest.param("more branches than heads", "all_gather", marks=SLOW),
        pytest.param("an offset beyond the segment", "ring", marks=SLOW),
    ],
)
def test_branch_that_selects_no_rows_equals_oracle(name, strategy):
    assert_ring_equals_oracle(RingCase(EMPTY[name], ring_size=2, strategy=strategy), "float64")


@SLOW
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@settings(max_examples=60, **RANDOM)
@given(
    case=geometries(most_branches=4, longest=128),
    ring_size=st.integers(2, 8),
    layout=st.sampled_from(LAYOUTS),
    strategy=st.sampled_from(STRATEGIES),
)
def test_random_geometry_on_a_ring_equals_oracle(case, ring_size, layout, strategy, dtype):
    assert_ring_equals_oracle(RingCase(case, ring_size=ring_size, layout=layout, strategy=strategy), dtype)


# Payloads are cut into pieces, and each chunk has several blocks of queries and keys.
LONG = {
    "queries": RingCase(
        Case(length=2120, batch=1, segment_lengths=(2120,), dilation_rates=(1,), is_causal=True),
        ring_size=2,
        layout="zigzag",
        strategy="ring",
    ),
    "keys": RingCase(
        Case(length=1100, batch=1, q_per_kv=2, segment_lengths=(1100,), dilation_rates=(1,)),
        ring_size=2,
        layout="contiguous",
        strategy="ring",
    ),
}


@pytest.mark.parametrize(
    ("moves", "compiler_options", "implementation"),
    [  # None: as users compile
        pytest.param("queries", None, "native", marks=NEEDS_KERNELS),
        pytest.param("queries", None, "xla", marks=SLOW),
        pytest.param("keys", QUICK, "native", marks=[NEEDS_KERNELS, SLOW]),
        ("keys", QUICK, "xla"),
    ],
    ids=["queries-native", "queries-xla", "keys-native", "keys-xla"],
)
def test_several_blocks_in_several_pieces_equal_oracle(moves, compiler_options, implementation, monkeypatch):
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 1024)
    monkeypatch.setattr(spec, "ring_query_rows", lambda *_: 512)  # the value on rings of many devices
    (branch,) = LONG[moves].branches
    assert (branch.where, branch.moves, branch.pieces, branch.is_aligned) == ("ring", moves, 2, True)
    (rows,) = branch.selections
    assert rows.blocks.query < 512 < rows.num_rows
    assert_ring_equals_oracle(LONG[moves], "float32", compiler_options, implementations=(implementation,))


PIECES = {
    "detached": RingCase(
        Case(length=128, kv_heads=4, rule="detached", segment_lengths=(16, 128), ids=True),
        layout="zigzag",
        strategy="ring",
    ),
    "unaligned": RingCase(
        Case(length=125, q_per_kv=2, segment_lengths=(40,), dilation_rates=(3,)), layout="zigzag", strategy="ring"
    ),
    "split": RingCase(
        Case(length=120, kv_heads=4, rule="split", segment_lengths=(50, 120)),
        layout="contiguous",
        strategy="all_gather",
    ),
}


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [
        pytest.param("detached", True, marks=SLOW),
        pytest.param("unaligned", False, marks=SLOW),
        pytest.param("detached", False, marks=SLOW),
        pytest.param("unaligned", True, marks=SLOW),
        pytest.param("split", False, marks=SLOW),
        pytest.param("split", True, marks=SLOW),
    ],
)
def test_messages_in_several_pieces_equal_oracle(name, is_causal, monkeypatch):
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 256)
    given = PIECES[name]._replace(case=PIECES[name].case._replace(is_causal=is_causal))
    assert max(branch.pieces for branch in given.branches) > 1
    assert_ring_equals_oracle(given, "float64")


@SLOW
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("segment_lengths", [(4000, 700), (4096, 512)])
def test_several_blocks_per_chunk_equal_oracle(segment_lengths, is_causal, layout, dtype):
    case = Case(
        length=4096,
        batch=1,
        q_per_kv=2,
        segment_lengths=segment_lengths,
        dilation_rates=(1, 2),
        is_causal=is_causal,
    )
    assert_ring_equals_oracle(RingCase(case, ring_size=2, layout=layout, strategy="ring"), dtype)


@pytest.mark.parametrize(
    ("strategy", "segment_lengths", "dilation_rates"),
    [
        ("ring", (128,), (2,)),
        ("all_to_all", (128,), (2,)),
        pytest.param("all_to_all", (16, 50), (1, 3), marks=SLOW),
        pytest.param("all_to_all_ring", (128,), (2,), marks=SLOW),
        pytest.param("all_gather", (128,), (2,), marks=SLOW),
        pytest.param("auto", (16, 128), (1, 2), marks=SLOW),
    ],
)
def test_bfloat16_on_a_ring_is_as_exact_as_on_one_device(strategy, segment_lengths, dilation_rates):
    case = Case(
        length=128,
        kv_heads=4,
        q_per_kv=2,
        head_dim=32,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        is_causal=True,
    )
    ring = RingCase(case, ring_size=8, layout="zigzag", strategy=strategy).ring
    contenders = {
        devices: with_gradients(attention, case.pattern, compiler_options=QUICK, is_causal=True)
        for devices, attention in ((1, rj.dilated_attention), (8, on_ring(ring)))
    }
    errors = {devices: np.zeros(4) for devices in contenders}
    for seed in range(5):
        low = case.arrays("bfloat16", seed)
        expected = by_definition(case, low)
        for devices, f in contenders.items():
            results = f(*low)
            assert all(x.dtype == jnp.bfloat16 for x in results)
            errors[devices] += [
                np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)
                for x, y in zip(results, expected, strict=True)
            ]
    assert (errors[1] > 0).all()
    assert (errors[8] <= 1.1 * errors[1]).all(), errors


CASE = Case(length=64, segment_lengths=(64,), dilation_rates=(2,), q_per_kv=2, is_causal=True)


def transformed(transform: str, layout: str, implementation: str):
    """Returns output and gradients of the attention on a ring of 4, under a transform."""
    attention = on_ring(RingCase(CASE, ring_size=4, layout=layout, strategy="ring").ring)
    f = lambda *x: attention(*x, CASE.pattern, is_causal=True, implementation=implementation)  # noqa: E731
    f = jax.checkpoint(f) if transform == "checkpoint" else f

    def both(q, k, v, g):
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(g)

    return both


@pytest.mark.parametrize(
    ("transform", "layout", "implementation"),
    [("checkpoint", "contiguous", available("native")), ("vmap", "zigzag", "xla")],
)
def test_transformed_ring_equals_oracle(transform, layout, implementation):
    several = [jnp.stack([x, 2 * x, x - 1]) for x in CASE.arrays(np.float32)]
    f = transformed(transform, layout, implementation)
    f = jax.jit(jax.vmap(f) if transform == "vmap" else f, compiler_options=QUICK)
    results = f(*several) if transform == "vmap" else [jnp.stack(x) for x in zip(*map(f, *several), strict=True)]
    for i in range(3):
        for name, x, y in zip(NAMES, results, by_definition(CASE, [x[i] for x in several]), strict=True):
            assert error(x[i], y) < 2e-6, name


@SLOW
def test_ring_without_jit_equals_oracle():
    attention = on_ring(RingCase(CASE, ring_size=2).ring)
    q, k, v, _ = CASE.arrays(np.float32)
    out, expected = (f(q, k, v, CASE.pattern, is_causal=True) for f in (attention, rj.reference_attention))
    assert error(out, expected) < 2e-6


@by_implementation("xla")
def test_values_in_padding_do_not_change_the_results(implementation):
    case = Case(length=59, segment_lengths=(4, 59), dilation_rates=(1, 1), is_causal=True)
    ring = RingCase(case, layout="zigzag").ring
    assert_sharded_equals_oracle(case, ring, fill=np.nan, implementations=(implementation,))


@by_implementation("native")
def test_output_and_gradients_stay_sharded(implementation):
    ring = RingCase(CASE, layout="contiguous", strategy="ring").ring
    assert ring.spec() == PartitionSpec(None, "ring", None, None)
    assert_sharded_equals_oracle(CASE, ring, dtype="float32", implementations=(implementation,))


def unordered_loops(program: Program) -> list[tuple[str, str]]:
    """Returns each loop with collectives and each later collective, or such loop, that may start before it ends."""

    def communicates(x) -> bool:
        return x.opcode in COLLECTIVES or any(communicates(y) for name in x.callees for y in program[name])

    pairs = []
    for instructions in program.values():
        depends: dict[str, set[str]] = {}
        for x in instructions:  # in the order of the schedule
            known = [y for y in x.operands if y in depends]
            depends[x.name] = set(known).union(*(depends[y] for y in known))
        messages = [x for x in instructions if communicates(x)]
        pairs += [
            (x.name, y.name)
            for i, x in enumerate(messages)
            for y in messages[i + 1 :]
            if x.name not in depends[y.name] and x.opcode not in COLLECTIVES
        ]
    return pairs


@pytest.mark.parametrize(("head_dim", "pieces"), [(4, [1, 1]), (8, [2, 1])])
def test_branches_communicate_one_after_the_other_on_cpu(head_dim, pieces, monkeypatch):
    # CPU devices run a loop and a collective after it concurrently unless the data orders them, and then they may hang
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 2048)
    case = Case(length=64, kv_heads=2, q_per_kv=2, head_dim=head_dim, segment_lengths=(64, 64), dilation_rates=(1, 4))
    given = RingCase(case, strategy="ring")
    assert [branch.pieces for branch in given.branches] == pieces
    f = with_gradients(on_ring(given.ring), case.pattern, compiler_options=QUICK, implementation="xla")
    text = f.lower(*case.arrays("float32")).compile().as_text()
    assert sum(collectives.executed(text).values()) > 0
    assert unordered_loops(parse(text)) == []
