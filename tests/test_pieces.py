"""The pipeline of pieces: order of stages, results, and the size, messages and order of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from cases import QUICK, Case, available, slow_unless
from test_ring import RingCase, assert_ring_equals_oracle, unordered_loops
from test_ring_program import Program, executed

import ringjax as rj
from ringjax._src.aot.schedule import parse
from ringjax._src.branches.pieces import Stages, in_turn, pipelined
from ringjax._src.planning import branch_plan


def stages(calls):
    """Returns stages that compute ``(10 * i) ** 2`` for piece `i` and log what is traced."""

    def send(i, done):
        calls.append("send")
        return 10 * i

    def attend(i, arrived):
        calls.append("attend")
        return arrived * arrived

    def collect(i, found, state):
        calls.append("collect")
        return state.at[i].add(found)

    return Stages(send, attend, collect)


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_every_piece_is_collected_once(num):
    calls = []
    traced = stages(calls)
    zeros = jnp.zeros(num, jnp.int32)
    found = pipelined(traced, num, traced.send(jnp.int32(0), None), zeros, None)
    assert found.tolist() == [(10 * i) ** 2 for i in range(num)]
    assert found.tolist() == in_turn(traced, num, zeros).tolist()


def test_next_piece_is_sent_before_results_of_the_previous_one_return():
    order = []
    logged = Stages(
        lambda i, _: order.append(f"send {i}"),
        lambda i, _: order.append(f"attend {i}"),
        lambda i, _, state: order.append(f"return {i}") or state,
    )
    with jax.disable_jit():  # runs the loop step by step
        pipelined(logged, 4, logged.send(0, None), jnp.zeros(()), None)
    expected = "send 0, attend 0, send 1, return 0, attend 1, send 2, return 1, attend 2, send 3, return 2, attend 3"
    assert order == [*expected.split(", "), "return 3"]


SIZES = {"length": 256, "strategy": "all_to_all", "is_causal": True}
# Two branches each, of which every one is sent in at least 3 pieces, so that there is a loop.
PROGRAMS = {
    "exchange": {"ring_size": 4, "kv_heads": 16},
    "exchange, segment ids": {"ring_size": 4, "kv_heads": 16, "ids": True, "layout": "zigzag"},
    "teams, segment ids": {"ring_size": 8, "kv_heads": 12, "ids": True, "strategy": "all_to_all_ring"},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(name == "exchange")) for name in PROGRAMS])
def test_exchange_in_pieces_sends_what_is_planned_in_a_fixed_order(name, monkeypatch):
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 256)
    program = Program(rj.DilationPattern((256, 256), (2, 4)), is_gradient=False, **SIZES | PROGRAMS[name])
    assert min(branch.pieces for branch in program.plan.branches) > 2
    forward, backward = (compiled.as_text() for compiled in program.passes())
    assert executed(forward) == program.planned("forward")
    assert executed(backward) == program.planned("backward")
    assert unordered_loops(parse(forward)) == unordered_loops(parse(backward)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring_size", "strategy", "kv_heads", "rule"),
    [(4, "all_to_all", 12, "detached"), (8, "all_to_all_ring", 12, "detached"), (2, "all_to_all", 8, "detached")],
)
def test_exchange_in_several_pieces_equals_oracle(ring_size, strategy, kv_heads, rule, monkeypatch):
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 256)
    case = Case(
        length=128, kv_heads=kv_heads, segment_lengths=(128, 128), dilation_rates=(1, 4), is_causal=True, rule=rule
    )
    given = RingCase(case, ring_size=ring_size, layout="zigzag", strategy=strategy)
    assert min(branch.pieces for branch in given.branches) > 2
    assert_ring_equals_oracle(given, "float64")


def test_program_size_does_not_grow_with_the_number_of_pieces(monkeypatch):
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 256)
    programs = [
        Program(rj.DilationPattern((256,), (2,)), is_gradient=True, ring_size=2, kv_heads=heads, **SIZES)
        for heads in (6, 16)
    ]
    assert [program.plan.branches[0].pieces for program in programs] == [3, 8]
    few, many = (program.lowered.as_text().count("\n") for program in programs)
    assert many <= 1.02 * few


@pytest.mark.slow
def test_results_of_repeated_runs_in_pieces_are_the_same(monkeypatch):
    # devices that reach collectives in different orders hang or mix up messages
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 256)
    options = SIZES | PROGRAMS["teams, segment ids"] | {"ids": False, "implementation": available("native")}
    program = Program(rj.DilationPattern((256, 256), (2, 4)), is_gradient=True, **options)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.device_put(jax.random.normal(key, x.shape, x.dtype), x.sharding)
        for key, x in zip(keys, [*program.given, program.given[0]], strict=True)
    ]
    compiled = program.lowered.compile(compiler_options=QUICK)
    first = jax.tree.leaves(compiled(*arrays))
    for _ in range(50):
        for x, y in zip(first, jax.tree.leaves(compiled(*arrays)), strict=True):
            assert jnp.array_equal(x, y)
