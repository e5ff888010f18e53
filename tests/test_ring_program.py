"""Compiled ring programs: collectives, their bytes and dtypes, memory, balance, program size."""

import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, QUICK, available, by_implementation, ring_mesh, slow_unless
from jax.sharding import NamedSharding, PartitionSpec

import ringjax as rj
from ringjax._src.planning import branch_plan

BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "s32": 4}
DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "s32": "int32", "i32": "int32"}
COLLECTIVES = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all")

ALIGNED = rj.DilationPattern((64, 256), (4, 8))


class RingProgram(NamedTuple):
    """A pattern, a ring, and options of `Program` that differ from its defaults."""

    ring_size: int
    options: dict[str, Any]
    pattern: rj.DilationPattern = ALIGNED


CASES = {
    "contiguous 2": RingProgram(ring_size=2, options={}),
    "zigzag 2": RingProgram(ring_size=2, options={"layout": "zigzag", "is_causal": True}),
    "contiguous 4, grouped queries": RingProgram(ring_size=4, options={"is_causal": True, "q_per_kv": 4}),
    "zigzag 4, float16": RingProgram(ring_size=4, options={"layout": "zigzag", "is_causal": True, "dtype": "float16"}),
    "zigzag 8, segment ids": RingProgram(ring_size=8, options={"layout": "zigzag", "is_causal": True, "ids": True}),
    "contiguous 8, gather": RingProgram(ring_size=8, options={"strategy": "all_gather"}),
    "unaligned 3, short segments": RingProgram(
        ring_size=3, options={"length": 258}, pattern=rj.DilationPattern((50,), (3,))
    ),
    "unaligned 3, a long segment": RingProgram(
        ring_size=3, options={"length": 258}, pattern=rj.DilationPattern((256,), (7,))
    ),
    "zigzag 4, a rate that does not divide the chunk": RingProgram(
        ring_size=4, options={"layout": "zigzag"}, pattern=rj.DilationPattern((16, 128), (1, 6))
    ),
    "zigzag 8, all branches local": RingProgram(
        ring_size=8, options={"layout": "zigzag", "is_causal": True}, pattern=rj.DilationPattern((8, 16), (1, 2))
    ),
}


class Program:
    """The lowered program of a ring attention or of its gradient."""

    def __init__(
        self,
        pattern,
        *,
        ring_size,
        is_gradient,
        length=256,
        kv_heads=4,
        head_dim=8,
        q_per_kv=1,
        ids=False,
        **options,
    ):
        dtype, is_causal = options.pop("dtype", "float32"), options.pop("is_causal", False)
        implementation, device = options.pop("implementation", None), options.pop("device", "cpu")
        options = {"strategy": "ring", **options}
        mesh = ring_mesh(ring_size)
        ring = rj.Ring(mesh, **options)
        sharding = NamedSharding(mesh, PartitionSpec(None, "ring"))
        shaped = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # noqa: E731
        q, k = shaped(1, length, kv_heads * q_per_kv, head_dim), shaped(1, length, kv_heads, head_dim)
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
            num_heads=kv_heads * q_per_kv,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ring_size=ring_size,
            is_causal=is_causal,
            dtype=dtype,
            has_segment_ids=ids,
            device=device,
            **options,
        )

    def passes(self):
        """Compiles the forward and the backward pass separately: in one program they share some messages."""
        q, k, v, *ids = (jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding) for x in self.given)
        forward = jax.jit(lambda q, k, v, *ids: jax.vjp(lambda *x: self.attention(*x, *ids), q, k, v))
        forward = forward.lower(q, k, v, *ids).compile(compiler_options=QUICK)
        out, pull = forward(q, k, v, *ids)
        return forward, jax.jit(lambda pull, g: pull(g)).lower(pull, out).compile(compiler_options=QUICK)

    def planned(self, *passes: str) -> Counter:
        """Returns how often the plan executes each (collective, dtype, bytes)."""
        counts: Counter = Counter()
        for branch in self.plan.branches:
            for name in passes:
                for message in getattr(branch, name):
                    counts[message.op, message.dtype, message.bytes] += message.number
        return counts


def executed(text: str) -> Counter:
    """Returns how often compiled HLO executes each (collective, dtype, operand bytes), with loop trip counts."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
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
                assert trips or not inner, "a collective in a loop of unknown trip count"
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
                split = len(re.findall(r"\w+\[[\d,]*\]", line.split(f" {op}")[0])) if op == "all-to-all" else 1
                scale = {"all-gather": 1 / members, "reduce-scatter": members, "all-to-all": split}.get(op, 1)
                total[op, DTYPES[dtype], int(size * scale)] += times
        return total

    return count(entry, 1)


# The implementation with which the default suite compiles each case; the other one is slow.
NATIVE = available("native")
FORWARD = {
    "contiguous 2": "xla",
    "zigzag 4, float16": NATIVE,
    "unaligned 3, a long segment": NATIVE,
    "zigzag 4, a rate that does not divide the chunk": "xla",
}
GRADIENT = {  # checks the forward pass as well
    "zigzag 2": "xla",
    "contiguous 4, grouped queries": "xla",
    "zigzag 8, segment ids": NATIVE,
    "contiguous 8, gather": NATIVE,
    "unaligned 3, short segments": NATIVE,
    "zigzag 8, all branches local": "xla",
}


def each_case(default: dict[str, str]):
    """Parametrizes a test over all cases and implementations; only those in `default` are not slow."""
    rows = [
        pytest.param(name, implementation, marks=slow_unless((name, implementation) in default.items()))
        for name in CASES
        for implementation in IMPLEMENTATIONS
    ]
    return pytest.mark.parametrize(("name", "implementation"), rows)


def test_default_suite_compiles_every_case_once():
    assert sorted([*FORWARD, *GRADIENT]) == sorted(CASES)
    assert {*FORWARD.values(), *GRADIENT.values()} == set(IMPLEMENTATIONS)


def program_of(name: str, implementation: str) -> Program:
    case = CASES[name]
    return Program(
        case.pattern, ring_size=case.ring_size, is_gradient=False, implementation=implementation, **case.options
    )


@each_case(FORWARD)
def test_forward_collectives_equal_the_plan(name, implementation):
    program = program_of(name, implementation)
    counts = executed(program.lowered.compile(compiler_options=QUICK).as_text())
    assert counts == program.planned("forward")
    assert bool(counts) == ("local" not in name)


@each_case(GRADIENT)
def test_gradient_collectives_equal_the_plan(name, implementation):
    program = program_of(name, implementation)
    forward, backward = (executed(compiled.as_text()) for compiled in program.passes())
    assert forward == program.planned("forward")
    assert backward == program.planned("backward")
    assert bool(forward) == bool(backward) == ("local" not in name)
    moves = {b.moves for b in program.plan.branches if b.where == "ring"}
    assert moves <= ({"keys"} if "grouped queries" in name else {"queries"})


@by_implementation("native")
def test_long_messages_are_cut_as_planned(monkeypatch, implementation):
    monkeypatch.setattr(branch_plan, "_LONG_MESSAGE", 512)
    program = Program(ALIGNED, ring_size=4, is_gradient=True, implementation=implementation)
    assert [b.pieces for b in program.plan.branches] == [1, 4]
    counts = executed(program.lowered.compile(compiler_options=QUICK).as_text())
    assert counts == program.planned("forward", "backward")


def test_bfloat16_is_sent_as_bfloat16_and_accumulated_in_float32():
    options = {"layout": "zigzag", "is_causal": True, "dtype": "bfloat16", "implementation": "xla"}
    program = Program(ALIGNED, ring_size=4, is_gradient=True, **options)
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


@by_implementation("native")
def test_memory_per_device_falls_with_the_ring_size(implementation):
    assert_memory_falls(is_gradient=False, layout="zigzag", ring_size=8, implementation=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ring_size", [2, 4, 8])
@pytest.mark.parametrize("is_gradient", [False, True])
def test_memory_per_device_falls_with_every_ring_size(is_gradient, ring_size, layout, implementation):
    assert_memory_falls(is_gradient=is_gradient, layout=layout, ring_size=ring_size, implementation=implementation)


def assert_memory_falls(*, is_gradient: bool, layout: str, ring_size: int, implementation: str) -> None:
    length, kv_heads, head_dim = 65536, 8, 64
    pattern = rj.DilationPattern((2048, 8192, length), (1, 4, 16))
    keywords = {"is_gradient": is_gradient, "length": length, "kv_heads": kv_heads, "head_dim": head_dim}
    keywords |= {"is_causal": True, "layout": layout, "strategy": "ring", "implementation": implementation}
    one, many = (Program(pattern, ring_size=n, **keywords).lowered.compile(QUICK) for n in (1, ring_size))
    assert device_bytes(many) * ring_size <= (1.25 if is_gradient else 1.15) * device_bytes(one)
    arrays = 8 if is_gradient else 4
    array_bytes = length * kv_heads * head_dim * 4
    assert device_bytes(many) * ring_size <= (2.2 if is_gradient else 2.0) * arrays * array_bytes


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_planned_memory_is_close_to_compiled_memory(implementation):
    pattern = rj.DilationPattern((512, 2048, 16384), (1, 4, 16))
    program = Program(
        pattern,
        ring_size=4,
        is_gradient=False,
        length=16384,
        kv_heads=8,
        head_dim=64,
        implementation=implementation,
    )
    real = device_bytes(program.lowered.compile())
    assert 0.7 * real <= program.plan.forward_memory <= 2 * real


@pytest.mark.parametrize("ring_size", [2, 8])
def test_zigzag_shares_causal_work_evenly(ring_size):
    counts = {}
    for layout in ("contiguous", "zigzag"):
        ring = rj.Ring(ring_mesh(ring_size), layout=layout, strategy="ring")
        q = ring.shard(jnp.ones((1, 256, 4, 8)))
        count = jax.jit(
            lambda q, ring=ring: rj.count_tiles(q, q, q, ALIGNED, ring=ring, is_causal=True),
            compiler_options=QUICK,
        )
        counts[layout] = np.asarray(count(q)).ravel()
        assert counts[layout].shape == (ring_size,)
    assert (counts["zigzag"] == counts["zigzag"][0]).all()
    assert counts["contiguous"].max() > counts["contiguous"].mean()


def test_program_size_does_not_grow_with_the_length_or_the_ring():
    sizes = []
    for ring_size, length in ((4, 262144), (8, 524288), (8, 1048576)):
        pattern = rj.DilationPattern((length // 64, length), (1, 16))
        options = {"length": length, "layout": "zigzag", "is_causal": True, "implementation": "xla"}
        program = Program(pattern, ring_size=ring_size, is_gradient=True, **options)
        sizes.append(len(program.lowered.as_text()))
    assert max(sizes) <= 1.2 * min(sizes)
