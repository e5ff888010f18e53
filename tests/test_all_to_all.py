"""Exchanges of heads, alone and with a ring of teams, equal the oracle and execute their plan."""

import functools

import jax
import numpy as np
import pytest
from cases import (
    IMPLEMENTATIONS,
    QUICK,
    RANDOM,
    RULES,
    Case,
    assert_sharded_equals_oracle,
    available,
    by_implementation,
    covering,
    geometries,
    pairwise,
    ring_mesh,
    slow_unless,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_ring import LAYOUTS, RingCase, assert_ring_equals_oracle
from test_ring_meshes import ALL, SHARED, explicit_mesh, in_shard_map
from test_ring_program import Program, device_bytes, executed

import ringjax as rj
from ringjax._src.comm.devices import DEVICES
from ringjax._src.comm.head_exchange import HeadParts, head_parts
from ringjax._src.planning import branch_plan, costs

SLOW = pytest.mark.slow
EXCHANGES = ("all_to_all", "all_to_all_ring")


def ways(given: RingCase) -> list[tuple[str, str, int]]:
    """Returns where each branch runs, what it exchanges, and among how many devices."""
    return [(b.where, b.exchange, b.exchange_devices) for b in given.branches]


@pytest.mark.parametrize(
    ("devices", "kv_heads", "q_per_kv", "parts"),
    [
        (4, 8, 1, HeadParts(4, 1)),
        (4, 8, 3, HeadParts(4, 1)),
        (8, 2, 4, HeadParts(2, 4)),
        (4, 6, 2, HeadParts(2, 2)),
        (4, 1, 4, HeadParts(1, 4)),
        (4, 2, 1, None),
        (3, 4, 2, None),
    ],
)
def test_heads_are_shared_with_the_fewest_copies_of_keys(devices, kv_heads, q_per_kv, parts):
    assert head_parts(devices, kv_heads, q_per_kv) == parts


# Named geometries: length, segments and rates; how they relate to the chunks of the devices decides what is sent.
ALIGNED = {"length": 96, "segment_lengths": (24, 96), "dilation_rates": (2, 3)}
PADDED = {"length": 91, "segment_lengths": (25, 91), "dilation_rates": (3, 7)}
SHORT_SEGMENTS = {"length": 80, "segment_lengths": (7, 50), "dilation_rates": (1, 2), "seq_len": 67}
UNEVEN_RATES = {"length": 96, "segment_lengths": (24, 48), "dilation_rates": (5, 7)}  # do not divide the chunks
GEOMETRIES = {"aligned": ALIGNED, "padded": PADDED, "short segments": SHORT_SEGMENTS, "uneven rates": UNEVEN_RATES}
HEADS = {"as many as devices": (1, 1), "twice as many": (2, 1), "shared keys": (1, 4), "one key head": (0, 1)}
GRID = pairwise(
    ring_size=[2, 3, 4, 8],
    layout=LAYOUTS,
    is_causal=[False, True],
    geometry=list(GEOMETRIES),
    heads=list(HEADS),
    rule=[rule for rule in RULES if rule != "split"],
    ids=[False, True],
    dtype=["float64", "float32", "bfloat16"],
    implementation=IMPLEMENTATIONS,
)
DEFAULT = covering(GRID, ("layout", "is_causal"))


@pytest.mark.parametrize(
    "row", [pytest.param(row, id="-".join(map(str, row.values())), marks=slow_unless(row in DEFAULT)) for row in GRID]
)
def test_all_to_all_equals_oracle(row):
    options = dict(row)
    dtype, layout, size = options.pop("dtype"), options.pop("layout"), options.pop("ring_size")
    implementation = options.pop("implementation")
    factor, q_per_kv = HEADS[options.pop("heads")]
    heads = {"kv_heads": factor * size, "q_per_kv": q_per_kv} if factor else {"kv_heads": 1, "q_per_kv": size}
    case = Case(**GEOMETRIES[options.pop("geometry")], **heads, **options, batch=1, head_dim=4)
    given = RingCase(case, ring_size=size, layout=layout, strategy="all_to_all")
    assert {where for where, _, _ in ways(given)} <= {"local", "all_to_all"}
    assert_ring_equals_oracle(given, dtype, implementations=(implementation,))


@pytest.mark.parametrize(("layout", "devices"), [("contiguous", 2), pytest.param("zigzag", 4, marks=SLOW)])
def test_rate_that_does_not_divide_the_chunk_is_exchanged_over_the_whole_ring(layout, devices):
    case = Case(length=96, batch=1, kv_heads=8, segment_lengths=(24,), dilation_rates=(5,), is_causal=True)
    given = RingCase(case, ring_size=8, layout=layout, strategy="all_to_all")
    assert [b.ring_devices for b in given._replace(strategy="ring").branches] == [devices]
    assert ways(given) == [("all_to_all", "rows", 8)]
    assert_ring_equals_oracle(given, "float64", implementations=(available("native"),))


@pytest.mark.parametrize(
    ("ring_size", "layout", "exchange", "case"),
    [
        # 3 heads on 2 devices, of which one selects no row of the last segment
        (2, "contiguous", "dense", Case(length=10, kv_heads=3, segment_lengths=(3, 3), dilation_rates=(1, 2))),
        (4, "contiguous", "rows", Case(kv_heads=2, segment_lengths=(64,), dilation_rates=(4,), is_causal=True)),
        pytest.param(4, "zigzag", "dense", Case(length=45, kv_heads=3, segment_lengths=(7, 45)), marks=SLOW),
        pytest.param(3, "zigzag", "rows", Case(length=66, kv_heads=2, segment_lengths=(66,)), marks=SLOW),
        pytest.param(8, "zigzag", "rows", Case(kv_heads=2, segment_lengths=(64,), rule="detached"), marks=SLOW),
        pytest.param(4, "contiguous", "rows", Case(kv_heads=6, segment_lengths=(64,), ids=True), marks=SLOW),
    ],
)
@by_implementation("xla")
def test_heads_that_the_devices_do_not_divide_are_copied(ring_size, layout, exchange, case, implementation):
    rates = case.dilation_rates[: len(case.segment_lengths)]
    case = case._replace(batch=1, q_per_kv=ring_size, dilation_rates=rates)
    given = RingCase(case, ring_size=ring_size, layout=layout, strategy="all_to_all")
    assert {way for way in ways(given) if way[0] != "local"} == {("all_to_all", exchange, ring_size)}
    assert_ring_equals_oracle(given, "float64", implementations=(implementation,))


@pytest.mark.parametrize(
    ("length", "segment_lengths", "strategy"),
    [(3, (3,), "all_to_all"), (5, (2, 5), "auto"), (8, (8,), "all_to_all"), (7, (7,), "all_to_all_ring")],
)
def test_devices_with_one_row_or_none_equal_oracle(length, segment_lengths, strategy):
    rates = (1, 2)[: len(segment_lengths)]
    case = Case(length=length, batch=1, kv_heads=8, segment_lengths=segment_lengths, dilation_rates=rates)
    given = RingCase(case, ring_size=8, layout="contiguous", strategy=strategy)
    assert_ring_equals_oracle(given, "float64", implementations=("xla",))


@pytest.mark.parametrize(
    ("ring_size", "layout", "case"),
    [
        (2, "zigzag", Case(length=32, batch=1, kv_heads=2, segment_lengths=(32,), dilation_rates=(2,))),
        pytest.param(4, "zigzag", Case(length=61, kv_heads=2, q_per_kv=2, is_causal=True, ids=True), marks=SLOW),
        pytest.param(3, "contiguous", Case(length=61, kv_heads=3, segment_lengths=(25, 50)), marks=SLOW),
    ],
)
def test_dropout_drops_the_same_weights_as_on_one_device(ring_size, layout, case):
    given = RingCase(case._replace(dropout_rate=0.3), ring_size=ring_size, layout=layout, strategy="all_to_all")
    assert_ring_equals_oracle(given, "float64")


@pytest.mark.parametrize(
    ("ring_size", "layout", "exchange_devices", "case"),
    [
        (4, "zigzag", 2, Case(length=64, kv_heads=2, segment_lengths=(64,), dilation_rates=(2,), is_causal=True)),
        pytest.param(
            8,
            "contiguous",
            4,
            Case(length=64, kv_heads=4, segment_lengths=(64,), dilation_rates=(4,), ids=True, rule="detached"),
            marks=SLOW,
        ),
        pytest.param(
            8,
            "zigzag",
            4,
            Case(length=128, kv_heads=2, q_per_kv=2, segment_lengths=(128,), dilation_rates=(4,), is_causal=True),
            marks=SLOW,
        ),
        pytest.param(
            8,
            "zigzag",
            2,
            Case(length=64, kv_heads=2, segment_lengths=(64,), dilation_rates=(2,), is_causal=True, dropout_rate=0.3),
            marks=SLOW,
        ),
        pytest.param(
            6,
            "contiguous",
            3,
            Case(length=96, kv_heads=3, segment_lengths=(96,), dilation_rates=(2,), is_causal=True),
            marks=SLOW,
        ),
    ],
)
@by_implementation("xla")
def test_all_to_all_with_a_ring_of_teams_equals_oracle(ring_size, layout, exchange_devices, case, implementation):
    given = RingCase(case, ring_size=ring_size, layout=layout, strategy="all_to_all_ring")
    assert ways(given) == [("all_to_all_ring", "rows", exchange_devices)]
    dtype = "float64" if implementation == "xla" else "float32"
    assert_ring_equals_oracle(given, dtype, implementations=(implementation,))


@pytest.mark.parametrize(
    ("ring_size", "rule"), [(2, "split"), pytest.param(4, "split", marks=SLOW), pytest.param(4, "none", marks=SLOW)]
)
@by_implementation("native")
def test_split_heads_are_exchanged_per_branch(ring_size, rule, implementation):
    case = Case(length=64, kv_heads=2 * ring_size, segment_lengths=(64, 40), dilation_rates=(2, 3), rule=rule)
    given = RingCase(case, ring_size=ring_size, strategy="all_to_all")
    assert_ring_equals_oracle(given, "float64", implementations=(implementation,))


@SLOW
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@settings(max_examples=25, **RANDOM)
@given(
    case=geometries(most_branches=3, longest=96),
    ring_size=st.integers(2, 8),
    layout=st.sampled_from(LAYOUTS),
    strategy=st.sampled_from(["auto", *EXCHANGES]),
    factor=st.integers(1, 2),
)
def test_random_geometry_equals_oracle(case, ring_size, layout, strategy, factor, dtype):
    case = case._replace(kv_heads=case.kv_heads if strategy == "auto" else factor * ring_size, batch=1)
    given = RingCase(case, ring_size=ring_size, layout=layout, strategy=strategy)
    try:
        assert given.branches
    except ValueError:
        assume(False)  # the heads or the geometry do not allow the strategy
    assert_ring_equals_oracle(given, dtype)


MESH_CASE = Case(
    length=64, kv_heads=4, q_per_kv=2, segment_lengths=(64,), dilation_rates=(4,), is_causal=True, ids=True
)


@pytest.mark.parametrize(
    ("make_mesh", "layout", "case"),
    [
        (ring_mesh, "contiguous", MESH_CASE),
        pytest.param(explicit_mesh, "zigzag", MESH_CASE, marks=SLOW),
        pytest.param(ring_mesh, "zigzag", MESH_CASE._replace(segment_lengths=(25,), dilation_rates=(1,)), marks=SLOW),
    ],
)
@by_implementation("native")
def test_exchange_beside_batch_and_head_axes_equals_oracle(make_mesh, layout, case, implementation):
    ring = rj.Ring(make_mesh(2, 2, 2, names=ALL), layout=layout, strategy="all_to_all", **SHARED)
    assert_sharded_equals_oracle(case, ring, implementations=(implementation,))


@SLOW
@pytest.mark.parametrize("make_mesh", [ring_mesh, explicit_mesh])
def test_exchange_inside_a_shard_map_equals_oracle(make_mesh):
    ring = rj.Ring(make_mesh(2, 2, 2, names=ALL), layout="contiguous", **SHARED)
    attention = in_shard_map(ring, head_axis="tensor", strategy="all_to_all")
    assert_sharded_equals_oracle(MESH_CASE, ring, attention=attention)


@SLOW
@pytest.mark.parametrize("make_mesh", [ring_mesh, explicit_mesh])
@pytest.mark.parametrize("is_inside", [False, True], ids=["ring", "shard_map"])
@pytest.mark.parametrize(
    ("strategy", "layout", "segment"),
    [
        ("all_to_all_ring", "contiguous", 64),
        ("all_to_all_ring", "zigzag", 64),
        ("all_to_all", "contiguous", 32),  # groups of 2 of the 4 devices
        ("all_to_all", "zigzag", 25),  # unaligned
        ("all_gather", "contiguous", 64),
    ],
)
def test_every_strategy_beside_a_head_axis_equals_oracle(make_mesh, is_inside, strategy, layout, segment):
    heads = {"all_to_all": 8, "all_to_all_ring": 4, "all_gather": 2}[strategy]
    case = MESH_CASE._replace(kv_heads=heads, segment_lengths=(segment,), dilation_rates=(2,))
    ring = rj.Ring(make_mesh(1, 4, 2, names=ALL), layout=layout, strategy=strategy, **SHARED)
    attention = in_shard_map(ring, head_axis="tensor", strategy=strategy) if is_inside else None
    assert_sharded_equals_oracle(case, ring, attention=attention, implementations=(available("native"),))


@SLOW
@pytest.mark.parametrize("strategy", [*EXCHANGES, "ring", "all_gather", "auto"])
@pytest.mark.parametrize(("layout", "segment", "rate"), [("zigzag", 64, 2), ("zigzag", 25, 3), ("contiguous", 64, 4)])
def test_every_strategy_over_two_axes_equals_oracle(strategy, layout, segment, rate):
    mesh, axes = ring_mesh(2, 4, names=("node", "device")), ("node", "device")
    ring = rj.Ring(mesh, axis_name=axes, layout=layout, strategy=strategy)
    case = MESH_CASE._replace(
        batch=1, kv_heads=8, q_per_kv=1, segment_lengths=(segment,), dilation_rates=(rate,), dropout_rate=0.2
    )
    assert_sharded_equals_oracle(case, ring, implementations=(available("native"),))


@pytest.mark.parametrize(
    ("strategy", "segment", "exchange"),
    [
        ("all_to_all", 61, "rows"),
        pytest.param("all_to_all", 25, "dense", marks=SLOW),
        pytest.param("all_to_all_ring", 61, "rows", marks=SLOW),
    ],
)
def test_nan_in_padding_is_neither_attended_to_nor_sent_on(strategy, segment, exchange):
    kv_heads = {"all_to_all": 4, "all_to_all_ring": 2}[strategy]
    case = MESH_CASE._replace(
        length=61, batch=1, kv_heads=kv_heads, q_per_kv=1, segment_lengths=(segment,), dilation_rates=(1,), ids=False
    )
    ring = rj.Ring(ring_mesh(4), strategy=strategy)
    given = RingCase(case, ring_size=4, layout="contiguous", strategy=strategy)
    assert {way[:2] for way in ways(given)} == {(strategy, exchange)}
    assert_sharded_equals_oracle(case, ring, fill=float("nan"))


@pytest.mark.parametrize(
    ("strategy", "exchange_devices"), [("all_to_all_ring", 4), pytest.param("all_to_all", 8, marks=SLOW)]
)
def test_exchange_over_two_axes_stays_on_the_inner_one(strategy, exchange_devices):
    mesh = ring_mesh(2, 4, names=("node", "device"))
    ring = rj.Ring(mesh, axis_name=("node", "device"), strategy=strategy)
    assert ring.info().inner_devices == 4
    case = Case(length=64, batch=1, kv_heads=8, segment_lengths=(64,), dilation_rates=(2,), is_causal=True)
    sizes = {"seq_len": 64, "num_heads": 8, "head_dim": 8, "ring_size": 8, "inner_devices": 4}
    (branch,) = rj.plan(case.pattern, **sizes, strategy=strategy).branches
    assert branch.exchange_devices == exchange_devices
    assert_sharded_equals_oracle(case, ring, implementations=(available("native"),))


@SLOW
def test_messages_in_several_pieces_equal_oracle(monkeypatch):
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 256)
    case = Case(length=64, kv_heads=8, segment_lengths=(64,), dilation_rates=(2,), is_causal=True, rule="detached")
    given = RingCase(case, ring_size=4, layout="zigzag", strategy="all_to_all")
    assert [b.pieces for b in given.branches] == [2]
    assert_ring_equals_oracle(given, "float64")


PATTERN = rj.DilationPattern((64, 256), (4, 8))
PROGRAMS = {
    "keys for every device": {"ring_size": 4, "is_causal": True},
    "shared keys, segment ids": {"ring_size": 8, "kv_heads": 2, "q_per_kv": 4, "ids": True, "layout": "zigzag"},
    "a ring of teams": {"ring_size": 8, "kv_heads": 2, "strategy": "all_to_all_ring"},
    "float16": {"ring_size": 4, "dtype": "float16", "pattern": rj.DilationPattern((256,), (4,))},
    "dense": {"ring_size": 4, "pattern": rj.DilationPattern((50, 100), (1, 3)), "ids": True},
    "unaligned rows": {"ring_size": 4, "pattern": rj.DilationPattern((50,), (3,)), "layout": "zigzag"},
}


BY_DEFAULT = [(name, available("native")) for name in ("keys for every device", "a ring of teams", "dense")]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, implementation, marks=slow_unless((name, implementation) in BY_DEFAULT))
        for name in PROGRAMS
        for implementation in IMPLEMENTATIONS
    ],
)
def test_collectives_of_an_exchange_equal_the_plan(name, implementation):
    options = {"pattern": PATTERN, "strategy": "all_to_all", **PROGRAMS[name]}
    program = Program(is_gradient=False, implementation=implementation, **options)
    forward, backward = (executed(compiled.as_text()) for compiled in program.passes())
    assert forward == program.planned("forward")
    assert backward == program.planned("backward")
    assert any(op == "all-to-all" for op, _, _ in forward)
    assert {b.exchange for b in program.plan.branches} - {""} == {"dense" if name == "dense" else "rows"}


def test_bfloat16_is_exchanged_as_bfloat16():
    program = Program(PATTERN, ring_size=4, is_gradient=True, strategy="all_to_all", dtype="bfloat16")
    text = program.lowered.as_text()
    shapes = [line.rsplit("tensor<", 1)[1] for line in text.splitlines() if "stablehlo.all_to_all" in line]
    sizes = {shape.rstrip(">)").split("x")[-1].rstrip(">") for shape in shapes}
    assert sizes == {"bf16", "f32"}
    assert {(op, dtype) for op, dtype, _ in program.planned("forward", "backward")} == {
        ("all-to-all", "bfloat16"),
        ("all-to-all", "float32"),
    }


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.26), ("bfloat16", 0.32)])
def test_exchange_sends_a_fraction_of_the_bytes_of_a_ring(dtype, most):
    sizes = {"seq_len": 65536, "num_heads": 8, "head_dim": 128, "ring_size": 8, "dtype": dtype}
    pattern = rj.DilationPattern((65536,), (8,))
    exchange, ring = (rj.plan(pattern, **sizes, strategy=name).branches[0] for name in ("all_to_all", "ring"))
    assert exchange.sent(exchange.forward) <= most * ring.sent(ring.forward)


@pytest.mark.parametrize(("ring_size", "layout"), [(2, "contiguous"), (4, "zigzag"), (8, "contiguous")])
def test_exchange_balances_causal_work_in_every_layout(ring_size, layout):
    pattern = rj.DilationPattern((64, 256), (4, 8))
    ring = rj.Ring(ring_mesh(ring_size), layout=layout, strategy="all_to_all")
    plan = rj.plan(
        pattern,
        seq_len=256,
        num_heads=8,
        head_dim=8,
        ring_size=ring_size,
        layout=layout,
        is_causal=True,
        strategy="all_to_all",
    )
    assert plan.balance == 1.0
    q = ring.shard(np.ones((1, 256, 8, 8), np.float32))
    count = functools.partial(rj.count_tiles, pattern=pattern, ring=ring, is_causal=True)
    counts = np.asarray(jax.jit(count, compiler_options=QUICK)(q, q, q)).ravel()
    assert counts.shape == (ring_size,)
    assert (counts == counts[0]).all()


def test_work_of_unequal_heads_is_counted_per_device():
    options = {"seq_len": 60, "num_heads": 4, "head_dim": 1, "ring_size": 4, "strategy": "all_to_all"}
    (branch,) = rj.plan(rj.DilationPattern((10,), (4,)), **options).branches
    # heads 0 and 1 select 3 of 10 positions, heads 2 and 3 select 2: 6 segments, 4 flops per pair
    assert branch.flops == (4 * 6 * 9, 4 * 6 * 9, 4 * 6 * 4, 4 * 6 * 4)
    assert branch.balance == 9 / 6.5


@pytest.mark.parametrize(
    ("strategy", "changes", "text"),
    [
        ("all_to_all", {"num_heads": 3}, "with 1 query head each on a device: use 'ring' or 'auto', or"),
        ("all_to_all", {"num_heads": 6}, "must share the heads of branch 64/4 evenly among all of the 4 devices"),
        ("all_to_all", {"num_heads": 2}, "use 'all_to_all_ring', 'ring' or 'auto'"),
        ("all_to_all_ring", {"num_heads": 3}, "evenly among teams of the 4 devices that share a segment, got 3 key"),
        ("all_to_all_ring", {"num_heads": 6, "pattern": rj.DilationPattern((50,), (3,))}, "evenly among all of the 4"),
    ],
)
def test_heads_that_do_not_allow_a_strategy_raise(strategy, changes, text):
    options = {"pattern": rj.DilationPattern((64,), (4,)), "seq_len": 64, "num_heads": 4, "head_dim": 8, "ring_size": 4}
    with pytest.raises(ValueError, match="must") as caught:
        rj.plan(**{**options, **changes}, strategy=strategy)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("device", "changes", "where"),
    [
        *((device, {}, "all_to_all") for device in ("v5e", "v5p", "v6e", "a100", "h100", "b200", "cpu")),
        ("h100", {"num_heads": 1}, "ring"),  # one head cannot be shared
        ("v6e", {"num_heads": 8, "num_kv_heads": 1}, "ring"),  # with one key/value head, a ring sends fewer bytes
        ("v5p", {"seq_len": 2048, "pattern": rj.DilationPattern((2048,), (16,)), "num_heads": 1}, "all_gather"),
        ("h100", {"ring_size": 64, "inner_devices": 8, "layout": "contiguous"}, "all_to_all_ring"),  # over a network
    ],
)
def test_auto_chooses_the_fastest_way(device, changes, where):
    options = {"pattern": rj.DilationPattern((2**20,), (8,)), "seq_len": 2**20, "num_heads": 16, "head_dim": 128}
    options |= {"ring_size": 8, "layout": "zigzag", "is_causal": True, "dtype": "bfloat16", "device": device}
    (branch,) = rj.plan(**{**options, **changes}).branches
    assert branch.where == where


@pytest.mark.parametrize(
    ("segment", "options", "where", "link"),
    [
        (2**16, {"strategy": "all_to_all_ring"}, "all_to_all_ring", "machine_link"),  # between teams of 8
        (2**16, {"strategy": "ring"}, "ring", "machine_link"),
        (2**15, {"strategy": "ring"}, "ring", "link"),
        (2**15, {"strategy": "ring", "inner_devices": 8}, "ring", "link"),
        (2**15, {"strategy": "ring", "inner_devices": 4}, "ring", "machine_link"),
    ],
)
def test_hops_that_leave_a_machine_are_counted_as_slow(segment, options, where, link):
    sizes = {"seq_len": 2**16, "num_heads": 8, "head_dim": 128, "ring_size": 16, "device": "h100"}
    (branch,) = rj.plan(rj.DilationPattern((segment,), (4,)), **sizes, **options).branches
    assert branch.where == where
    (hop,) = (message for message in branch.forward if message.op == "collective-permute")
    bandwidth = costs.message_bandwidth(branch.spec, hop, branch.exchange_devices)
    assert bandwidth == getattr(DEVICES["h100"], link)


@by_implementation("native")
@pytest.mark.parametrize(
    ("ring_size", "is_gradient"),
    [(8, False), *(pytest.param(size, grad, marks=SLOW) for size in (2, 4, 8) for grad in (False, True))],
)
def test_memory_per_device_falls_with_the_ring_size(ring_size, is_gradient, implementation):
    length = 65536
    pattern = rj.DilationPattern((2048, 8192, length), (1, 4, 16))
    keywords = {"is_gradient": is_gradient, "length": length, "kv_heads": 8, "head_dim": 64, "is_causal": True}
    keywords |= {"strategy": "auto", "implementation": implementation}
    one, many = (Program(pattern, ring_size=n, **keywords) for n in (1, ring_size))
    assert [b.where for b in many.plan.branches] == ["local", "local", "all_to_all"]
    single, each = (device_bytes(program.lowered.compile(QUICK)) for program in (one, many))
    assert each * ring_size <= (1.25 if is_gradient else 1.15) * single
