"""Rings whose gradients rotate in two directions: the oracle, the planned messages, and when the plan chooses them."""

import jax
import jax.numpy as jnp
import pytest
from cases import QUICK, Case, assert_sharded_equals_oracle, on_ring, ring_mesh, run, slow_unless
from test_ring import RingCase, assert_ring_equals_oracle, unordered_loops
from test_ring_meshes import ALL, SHARED, explicit_mesh, in_shard_map
from test_ring_program import Program, executed

import ringjax as rj
from ringjax._src.aot.schedule import parse
from ringjax._src.branches import registry
from ringjax._src.branches.ring import RingBranch
from ringjax._src.comm import axes, mesh
from ringjax._src.planning import branch_plan, costs


@pytest.fixture(autouse=True)
def _plans_are_those_of_gpus(monkeypatch):
    """Makes CPU devices run what the plan chooses for GPUs: on CPU devices, gradients rotate in one direction."""
    monkeypatch.setattr(mesh, "device_of_kind", lambda platform, kind: "h100")


def ring_case(ring_size, layout="contiguous", strategy="ring", **options) -> RingCase:
    given = {"length": 192, "kv_heads": 2, "segment_lengths": (48, 192), "dilation_rates": (1, 2), **options}
    case = Case(**given)
    return RingCase(case, ring_size=ring_size, layout=layout, strategy=strategy, device="h100")


CASES = {
    "3, queries": ring_case(3),
    "3, keys, causal, zigzag": ring_case(3, q_per_kv=2, layout="zigzag", is_causal=True),
    "4, keys, causal, zigzag, segment ids": ring_case(4, q_per_kv=3, layout="zigzag", is_causal=True, ids=True),
    "4, queries, causal": ring_case(4, is_causal=True),
    "6, queries, segment ids": ring_case(6, ids=True),
    "6, teams, causal": ring_case(6, strategy="all_to_all_ring", is_causal=True, segment_lengths=(192, 192)),
    "8, keys": ring_case(8, q_per_kv=2),
    "8, queries, causal, zigzag, detached": ring_case(8, layout="zigzag", is_causal=True, rule="detached"),
    "8, teams, zigzag": ring_case(8, q_per_kv=3, strategy="all_to_all_ring", layout="zigzag"),
    "8, dropout": ring_case(8, dropout_rate=0.3),
}
DEFAULT = (
    "3, queries",
    "4, keys, causal, zigzag, segment ids",
    "6, teams, causal",
    "8, queries, causal, zigzag, detached",
)
ROWS = [
    pytest.param(name, dtype, marks=slow_unless(name in DEFAULT and dtype == ("float64", "float32")[nth % 2]))
    for nth, name in enumerate(CASES)
    for dtype in ("float64", "float32")
]


@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_gradients_from_both_sides_equal_the_oracle(name, dtype):
    given = CASES[name]
    assert given.branches[-1].directions == 2
    assert_ring_equals_oracle(given, dtype)


@pytest.mark.slow
def test_gradients_from_both_sides_in_pieces_equal_the_oracle(monkeypatch):
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 512)
    given = ring_case(5, layout="zigzag", is_causal=True, length=320, segment_lengths=(64, 320))
    assert [(b.pieces, b.directions) for b in given.branches if b.where != "local"] == [(2, 2)] * 2
    assert_ring_equals_oracle(given, "float64")


MESHES = {
    "ring": (ring_mesh, (1, 4, 2), ALL, SHARED),
    "explicit ring": (explicit_mesh, (1, 4, 2), ALL, SHARED),
    "two axes": (ring_mesh, (2, 4), ("node", "device"), {"axis_name": ("node", "device")}),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", [False, True], ids=["ring", "shard_map"])
@pytest.mark.parametrize("name", MESHES)
def test_gradients_from_both_sides_on_every_mesh_equal_the_oracle(name, is_inside, monkeypatch):
    monkeypatch.setattr(axes, "device_of_kind", lambda platform, kind: "h100")
    rotations, original = [], RingBranch._rotate_both_ways

    def rotate_both_ways(self, *arguments):
        rotations.append(self.comm.ring_devices)
        return original(self, *arguments)

    monkeypatch.setattr(RingBranch, "_rotate_both_ways", rotate_both_ways)
    jax.clear_caches()  # inside of a `shard_map`, automatic and explicit meshes share a trace
    make_mesh, sizes, names, options = MESHES[name]
    case = Case(length=144, kv_heads=2, q_per_kv=2, segment_lengths=(144,), dilation_rates=(3,), is_causal=True)
    ring = rj.Ring(make_mesh(*sizes, names=names), layout="zigzag", strategy="ring", **options)
    inside = {"head_axis": "tensor"} if "head_axis" in options else {}
    attention = in_shard_map(ring, strategy="ring", **inside) if is_inside else None
    assert_sharded_equals_oracle(case, ring, attention=attention)
    assert set(rotations) == {8 if name == "two axes" else 4}


PROGRAMS = {
    "3": {"ring_size": 3, "length": 192},
    "4, grouped queries": {"ring_size": 4, "q_per_kv": 4, "is_causal": True},
    "5, segment ids": {"ring_size": 5, "length": 320, "ids": True},
    "8, float16": {"ring_size": 8, "dtype": "float16", "layout": "zigzag", "is_causal": True},
    "8, teams": {"ring_size": 8, "kv_heads": 2, "strategy": "all_to_all_ring"},
    "7, two branches": {"ring_size": 7, "length": 448, "q_per_kv": 2, "segments": (448, 448)},
    "8, two branches": {"ring_size": 8, "q_per_kv": 2, "segments": (256, 256)},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow_unless(name in ("4, grouped queries", "8, teams"))) for name in PROGRAMS]
)
def test_both_directions_send_what_is_planned_in_a_fixed_order(name):
    options = dict(PROGRAMS[name])
    segments = options.pop("segments", (options.get("length", 256),))
    pattern = rj.DilationPattern(segments, (4, 2)[: len(segments)])
    program = Program(pattern, is_gradient=True, device="h100", **options)
    assert [branch.directions for branch in program.plan.branches] == [2] * len(segments)
    compiled = [compiled.as_text() for compiled in program.passes()]
    assert [executed(text) for text in compiled] == [program.planned("forward"), program.planned("backward")]
    assert [unordered_loops(parse(text)) for text in compiled] == [[], []]


@pytest.mark.slow
def test_bfloat16_error_does_not_grow_with_two_directions():
    case = CASES["8, keys"].case
    low = case.arrays("bfloat16")
    exact = run(rj.dilated_attention, [x.astype(jnp.float32) for x in low], case.pattern)
    errors = []
    assert CASES["8, keys"].branches[-1].directions == 2
    for ring_size in (1, 8):
        attention = on_ring(rj.Ring(ring_mesh(ring_size), strategy="ring"))
        found = run(attention, low, case.pattern, compiler_options=QUICK)
        errors.append([float(jnp.linalg.norm(x.astype(jnp.float32) - y)) for x, y in zip(found, exact, strict=True)])
    assert all(many <= 1.1 * one for one, many in zip(*errors, strict=True))


def plan_of(*, ring_size=8, device="v5p", rate=16, **options) -> rj.Plan:
    pattern = rj.DilationPattern((options["seq_len"],), (rate,))
    given = {"num_heads": 8, "head_dim": 128, "strategy": "ring", "dtype": "bfloat16", **options}
    return rj.plan(pattern, ring_size=ring_size, device=device, **given)


def directions(**options) -> int:
    return plan_of(**options).branches[0].directions


def test_plan_rotates_both_ways_where_communication_takes_longer_than_computation():
    assert directions(seq_len=65536) == 2
    assert directions(seq_len=2**20) == 1
    assert directions(seq_len=65536, device="cpu") == 1
    assert directions(seq_len=65536, ring_size=2) == 1


def test_plan_rotates_one_way_if_rows_from_both_sides_exceed_the_memory_budget():
    options = {"seq_len": 16384, "rate": 4}
    both = plan_of(**options)
    needed = both.memory("tpu").gradient
    assert both.branches[0].directions == 2
    assert directions(**options, memory_budget=needed) == 2
    tight = plan_of(**options, memory_budget=needed - 1)
    assert tight.branches[0].directions == 1
    assert tight.spec == both.spec._replace(memory_budget=needed - 1)
    least = tight.memory("tpu").gradient
    assert least < needed
    assert directions(**options, memory_budget=least) == 1
    with pytest.raises(ValueError, match=rf"`memory_budget` must be at least \d+ .* got {least - 1};"):
        plan_of(**options, memory_budget=least - 1)


def test_a_strategy_that_rotates_one_way_is_planned_in_one_direction(monkeypatch):
    monkeypatch.setitem(costs.SHARING, "ring", costs.ROTATION._replace(is_two_way=False))
    rj.pattern_cache_clear()
    one = plan_of(seq_len=65536)
    rj.pattern_cache_clear()
    assert one.branches[0].directions == 1
    assert one.branches[0].backward == plan_of(seq_len=65536, device="cpu").branches[0].backward


def test_a_strategy_cannot_be_added_twice():
    with pytest.raises(ValueError, match="`name` must be new, got 'ring'"):
        registry.add_strategy("ring", registry.RingBranch, costs.ROTATION)


def test_two_directions_send_one_sum_less():
    one, two = plan_of(seq_len=65536, device="cpu"), plan_of(seq_len=65536)
    (before,), (after,) = one.branches, two.branches
    sums = [m for m in before.backward if m.dtype == "float32"][-1]
    assert before.sent(before.backward) - after.sent(after.backward) == before.pieces * sums.bytes
    assert before.forward == after.forward
    assert ("<>" in str(two)) > ("<>" in str(one))
