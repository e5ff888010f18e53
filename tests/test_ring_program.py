"""What can be counted in the compiled ring: collectives, their bytes and dtypes, memory, balance, size."""

import itertools
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, QUICK, ring_mesh
from jax.sharding import NamedSharding, PartitionSpec

import ringjax as rj

BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "s32": 4}
DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "s32": "int32", "i32": "int32"}
COLLECTIVES = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all")

ALIGNED = rj.DilationPattern((64, 256), (4, 8))
CASES = {
    "contiguous 2": (ALIGNED, 2, {}),
    "zigzag 2": (ALIGNED, 2, {"layout": "zigzag", "is_causal": True}),
    "contiguous 4, grouped queries": (ALIGNED, 4, {"is_causal": True, "group": 4}),
    "zigzag 4, float16": (ALIGNED, 4, {"layout": "zigzag", "is_causal": True, "dtype": "float16"}),
    "zigzag 8, segment ids": (ALIGNED, 8, {"layout": "zigzag", "is_causal": True, "ids": True}),
    "contiguous 8, gather": (ALIGNED, 8, {"strategy": "gather"}),
    "unaligned 3, short segments": (rj.DilationPattern((50,), (3,)), 3, {"length": 258}),
    "unaligned 3, a long segment": (rj.DilationPattern((256,), (7,)), 3, {"length": 258}),
    "rates that do not fit 4": (rj.DilationPattern((16, 128), (1, 6)), 4, {"layout": "zigzag"}),
    "local": (rj.DilationPattern((8, 16), (1, 2)), 8, {"layout": "zigzag", "is_causal": True}),
}


class Program:
    """A ring attention or its vjp, lowered."""

    def __init__(self, pattern, p, *, is_gradient, length=256, heads=4, dim=8, group=1, ids=False, **options):
        dtype, is_causal = options.pop("dtype", "float32"), options.pop("is_causal", False)
        implementation = options.pop("implementation", None)
        options = {"strategy": "ring", **options}
        mesh = ring_mesh(p)
        ring = rj.Ring(mesh, **options)
        sharding = NamedSharding(mesh, PartitionSpec(None, "ring"))
        shaped = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
        q, k = shaped(1, length, heads * group, dim), shaped(1, length, heads, dim)
        segment_ids = [shaped(1, length, dtype="int32")] if ids else []

        def attention(q, k, v, *ids):
            keywords = {"segment_ids": ids[0] if ids else None, "implementation": implementation}
            return rj.dilated_attention(q, k, v, pattern, ring=ring, is_causal=is_causal, **keywords)

        def both(q, k, v, g, *ids):
            out, pull = jax.vjp(lambda *x: attention(*x, *ids), q, k, v)
            return out, pull(g)

        given = (q, k, k, q) if is_gradient else (q, k, k)
        self.lowered = jax.jit(both if is_gradient else attention).lower(*given, *segment_ids)
        self.attention, self.given = attention, (q, k, k, *segment_ids)
        self.plan = rj.plan(
            pattern,
            seq_len=length,
            num_heads=heads * group,
            num_kv_heads=heads,
            head_dim=dim,
            ring_size=p,
            is_causal=is_causal,
            dtype=dtype,
            has_segment_ids=ids,
            **options,
        )
        self.ring_size = p

    def passes(self):
        """Both passes, compiled, each by itself: in one program some of their messages are shared."""
        q, k, v, *ids = (jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding) for x in self.given)
        forward = jax.jit(lambda q, k, v: jax.vjp(lambda *x: self.attention(*x, *ids), q, k, v))
        forward = forward.lower(q, k, v).compile(compiler_options=QUICK)
        out, pull = forward(q, k, v)
        return forward, jax.jit(lambda pull, g: pull(g)).lower(pull, out).compile(compiler_options=QUICK)

    def planned(self, *passes: str) -> Counter:
        """Executions of each (collective, dtype, bytes)."""
        counts: Counter = Counter()
        for branch in self.plan.branches:
            for name in passes:
                for message in getattr(branch, name):
                    counts[message.op, message.dtype, message.bytes] += message.number
        return counts


def executed(text: str) -> Counter:
    """Executions of each (collective, dtype, operand bytes) in compiled HLO, loop trip counts included."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        opening = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if opening:
            name = opening[2]
            entry = name if opening[1] else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)

    def count(name: str, times: int) -> Counter:
        total: Counter = Counter()
        for line in bodies[name]:
            loop = re.search(r" while\(.*body=%?([\w.\-]+)", line)
            if loop:
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                inner = count(loop[1], 1)
                assert trips or not inner, "a collective in a loop of unknown length"
                for key, number in inner.items():
                    total[key] += times * int(trips[1]) * number
                continue
            for callee in re.findall(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line):
                total += count(callee, times)
            for callees in re.findall(r"branch_computations=\{([^}]*)\}", line):
                for callee in callees.split(","):
                    assert not count(callee.strip().lstrip("%"), 1), "a collective that only some devices execute"
            found = re.search(rf"= \(?(\w+)\[([\d,]*)\][^=]* ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
            if found:
                dtype, shape, op = found.groups()
                size = BYTES[dtype] * int(np.prod([int(n) for n in shape.split(",") if n]))
                groups = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", line)
                members = len(groups[1].split(",")) if groups and groups[1] else int(groups[2]) if groups else 1
                scale = {"all-gather": 1 / members, "reduce-scatter": members}.get(op, 1)
                total[op, DTYPES[dtype], int(size * scale)] += times
        return total

    return count(entry, 1)


FORWARD = ("contiguous 2", "zigzag 4, float16", "unaligned 3, a long segment", "rates that do not fit 4")


def each_case(*quick: str):
    """All cases in both implementations: those named by default, in one and the other by turns, the rest slow."""
    rows = []
    for (i, name), (j, implementation) in itertools.product(enumerate(CASES), enumerate(IMPLEMENTATIONS)):
        marks = [] if name in quick and (i + j) % 2 else [pytest.mark.slow]
        rows.append(pytest.param(name, implementation, marks=marks))
    return pytest.mark.parametrize(("name", "implementation"), rows)


@each_case(*FORWARD)
def test_forward_collectives_are_those_of_the_plan(name, implementation):
    pattern, p, options = CASES[name]
    program = Program(pattern, p, is_gradient=False, implementation=implementation, **options)
    counts = executed(program.lowered.compile(compiler_options=QUICK).as_text())
    assert counts == program.planned("forward")
    assert bool(counts) == (name != "local")


@each_case(*(name for name in CASES if name not in FORWARD))  # the gradient says as much of the forward pass
def test_gradient_collectives_are_those_of_the_plan(name, implementation):
    pattern, p, options = CASES[name]
    program = Program(pattern, p, is_gradient=False, implementation=implementation, **options)
    forward, backward = (executed(compiled.as_text()) for compiled in program.passes())
    assert forward == program.planned("forward")
    assert backward == program.planned("backward")
    assert bool(forward) == bool(backward) == (name != "local")
    moves = {b.moves for b in program.plan.branches if b.where == "ring"}
    assert moves <= ({"keys"} if "grouped queries" in name else {"queries"})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_messages_are_cut_as_planned(monkeypatch, implementation):
    monkeypatch.setattr(sys.modules["ringjax._src.planning.plan"], "_LONG_MESSAGE", 512)
    program = Program(ALIGNED, 4, is_gradient=True, implementation=implementation)
    assert [b.pieces for b in program.plan.branches] == [1, 4]
    counts = executed(program.lowered.compile(compiler_options=QUICK).as_text())
    assert counts == program.planned("forward", "backward")


def test_bfloat16_travels_as_bfloat16_and_sums_as_float32():
    program = Program(ALIGNED, 4, is_gradient=True, layout="zigzag", is_causal=True, dtype="bfloat16")
    sent = set()
    for shape in re.findall(r"collective_permute.*-> tensor<([\dx]+x\w+)>", program.lowered.as_text()):
        *dims, dtype = shape.split("x")
        dtype = DTYPES[dtype]
        sent.add((dtype, int(np.prod([int(n) for n in dims])) * (2 if dtype == "bfloat16" else 4)))
    assert sent == {(dtype, size) for _, dtype, size in program.planned("forward", "backward")}
    assert {dtype for dtype, _ in sent} == {"bfloat16", "float32"}


def device_bytes(compiled) -> int:
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_memory_falls_with_the_ring(implementation):
    assert_memory_falls_with_the_ring(False, 1.15, "zigzag", 8, 65536, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("is_gradient", [False, True])
def test_memory_falls_with_every_ring(is_gradient, p, layout, implementation):
    share = 1.25 if is_gradient else 1.15
    assert_memory_falls_with_the_ring(is_gradient, share, layout, p, 65536, implementation)


def assert_memory_falls_with_the_ring(is_gradient, share, layout, p, length, implementation):
    pattern = rj.DilationPattern((2048, 8192, length), (1, 4, 16))
    keywords = {"is_gradient": is_gradient, "length": length, "heads": 8, "dim": 64, "is_causal": True}
    keywords |= {"layout": layout, "strategy": "auto", "implementation": implementation}
    one, many = (Program(pattern, n, **keywords).lowered.compile(QUICK) for n in (1, p))
    assert device_bytes(many) * p <= share * device_bytes(one)
    arrays = 8 if is_gradient else 4
    assert device_bytes(many) * p <= (2.2 if is_gradient else 2.0) * arrays * length * 8 * 64 * 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_memory_estimate_of_the_plan_is_close(implementation):
    pattern = rj.DilationPattern((512, 2048, 16384), (1, 4, 16))
    program = Program(pattern, 4, is_gradient=False, length=16384, heads=8, dim=64, implementation=implementation)
    real = device_bytes(program.lowered.compile())
    assert 0.7 * real <= program.plan.forward_memory <= 2 * real


@pytest.mark.parametrize("p", [2, 8])
def test_zigzag_shares_causal_work_evenly(p):
    counts = {}
    for layout in ("contiguous", "zigzag"):
        ring = rj.Ring(ring_mesh(p), layout=layout)
        q = jnp.ones((1, 256, 4, 8))
        count = jax.jit(
            lambda q, ring=ring: rj.count_tiles(q, q, q, ALIGNED, ring=ring, is_causal=True),
            compiler_options=QUICK,
        )
        counts[layout] = np.asarray(count(q)).ravel()
        assert counts[layout].shape == (p,)
    assert (counts["zigzag"] == counts["zigzag"][0]).all()
    assert counts["contiguous"].max() > counts["contiguous"].mean()


def test_program_does_not_grow_with_length_or_ring():
    sizes = []
    for p, length in ((4, 262144), (8, 524288), (8, 1048576)):
        pattern = rj.DilationPattern((length // 64, length), (1, 16))
        program = Program(pattern, p, is_gradient=True, length=length, layout="zigzag", is_causal=True)
        sizes.append(len(program.lowered.as_text()))
    assert max(sizes) <= 1.2 * min(sizes)
