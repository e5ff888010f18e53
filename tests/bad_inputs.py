"""The table of bad inputs: for every public callable, values of its arguments that it must refuse.

`ROWS` is data. A value that is a function is called first: meshes and jax arrays are made when a row runs. `Also` holds
a value with further arguments that make it bad.
"""

import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import ring_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj

PATTERN = rj.DilationPattern((4, 8), (1, 2))
Q = np.zeros((2, 8, 4, 4), np.float32)
HUGE, LONG = 2**60, np.full((2, 8), 2**40)
NAN, INF = float("nan"), float("inf")


class Also(NamedTuple):
    """A value that is bad together with other arguments."""

    value: object
    others: dict


class Row(NamedTuple):
    """One bad value of one argument of one callable."""

    function: str
    argument: str
    call: Callable
    value: object
    named: str  # the argument that the message names

    def run(self):
        value, others = self.value if isinstance(self.value, Also) else (self.value, {})
        value = value() if isinstance(value, types.FunctionType) else value
        others = {name: x() if isinstance(x, types.FunctionType) else x for name, x in others.items()}
        return value, lambda: self.call(**{self.argument: value}, **others)


ROWS: list[Row] = []


def bad(function: str, call: Callable, named: dict[str, str] | None = None, **values: list) -> None:
    """Adds rows: each of the values, given as this argument, is refused; `named` is for messages that name another."""
    for argument, each in values.items():
        ROWS.extend(Row(function, argument, call, value, (named or {}).get(argument, argument)) for value in each)


def on_device(x):
    return jnp.asarray(x)


def struct():
    return jax.ShapeDtypeStruct(Q.shape, np.float32)


def mesh():
    return ring_mesh(2)


def typed_keys():
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))


BOOLS = [1, 0, "yes", None, [True]]
COUNTS = [0, -1, 1.5, "8", True, [4], np.ones(2, int), HUGE * 2**10]
FLOATS = [NAN, INF, "x", None, True, 1j, [1.0]]
DTYPES = ["float33", "int32", np.int8, "complex64", 3, "float8_e4m3fn", (4, 8)]
ARRAYS = [[1.0], "x", 3.0, None, Q[0], Q[None], Q.astype(np.int32), Q.astype(complex), Q[:0], Q[..., :0], struct]
IDS = [[0], 3, np.zeros((2, 8)), np.zeros((2, 4), int), np.zeros(8, int), np.zeros((2, 8, 1), int), LONG, -LONG]
IDS += [LONG.astype(np.uint64), np.zeros((2, 8), bool)]
RINGS = ["ring", 2, mesh]
KEYS = [0, "abc", 1.0, [0, 1], np.zeros(5, np.uint32), np.zeros(2, np.int32), np.zeros((2, 2), np.uint32), typed_keys]
CHOICES = ["other", 1, ["x"], np.zeros(2)]
BLOCK_SIZES = [(16, 16), 128, "big"]
RATES = [-0.1, 1.0, 2, NAN, "half", None, True]
TOKENS = [[[1, 2]], 5, np.zeros(8, int), np.zeros((2, 8, 1), int), np.zeros((2, 8)), np.zeros((0, 8), int)]
TOKENS += [np.zeros((2, 0), int), LONG, LONG.astype(np.uint64), np.zeros((2, 8), bool)]


# patterns
def pattern(segment_lengths=(4, 8), dilation_rates=(1, 2), **keywords):
    return rj.DilationPattern(segment_lengths, dilation_rates, **keywords)


LISTS = [{4, 8}, frozenset((4, 8)), {4: 1, 8: 2}, "48", b"48", 4, None, (), (4.0, 8), (4, 0), (4, -8), (4, "8")]
LISTS += [(4, True), (4, 2**60), np.ones((2, 2)), [[4, 8]], (4, NAN)]
bad("DilationPattern", pattern, segment_lengths=LISTS, dilation_rates=LISTS)
bad("DilationPattern", pattern, segment_lengths=[(4,), (4, 8, 16)], offsets=CHOICES, heads=CHOICES, mixing=CHOICES)
bad("DilationPattern", pattern, padding=CHOICES)
bad("DilationPattern", lambda **k: pattern(heads="split", **k), offsets=["block", "none"], mixing=["detached"])
bad("DilationPattern", lambda **k: pattern(heads="split", **k), padding=["zeros"])
bad("geometric", lambda first=4, last=16, ratio=2: rj.DilationPattern.geometric(first, last, ratio), first=COUNTS)
bad("geometric", lambda **k: rj.DilationPattern.geometric(**{"first": 4, "last": 16, "ratio": 2} | k), last=COUNTS)
bad("geometric", lambda **k: rj.DilationPattern.geometric(**{"first": 4, "last": 16, "ratio": 2} | k), ratio=COUNTS)
bad("geometric", lambda last: rj.DilationPattern.geometric(4, last, 2), last=[10, 2**200])
bad("longnet", rj.DilationPattern.longnet, offsets=CHOICES, heads=CHOICES, mixing=CHOICES, padding=CHOICES)
bad("for_length", rj.DilationPattern.for_length, max_len=[*COUNTS, 2**200, 10**5000])
bad("for_length", lambda **k: rj.DilationPattern.for_length(4096, **k), first=COUNTS, branches=[*COUNTS, 1, 10**6])
bad("branches", lambda **k: PATTERN.branches(**{"num_kv_heads": 2} | k), num_kv_heads=COUNTS, seq_len=COUNTS)
bad("coverage", lambda **k: PATTERN.coverage(**{"num_heads": 2} | k), num_heads=COUNTS, seq_len=COUNTS)
bad("BlockSizes", lambda **k: rj.BlockSizes(**{"query": 16, "key": 16} | k), query=[*COUNTS, 8, 24], key=[15, None])
bad("BlockSizes", lambda **k: rj.BlockSizes(16, 16, **k), grad_query=[-16, 24, "x"], grad_key=[1, 2.0, False])


# attention
def attend(query=Q, key=Q, value=Q, pattern=PATTERN, **keywords):
    return rj.dilated_attention(query, key, value, pattern, **keywords)


def reference(query=Q, key=Q, value=Q, pattern=PATTERN, **keywords):
    return rj.reference_attention(query, key, value, pattern, **keywords)


def rows_of(query=Q, key=Q, lse=Q[..., 0], pattern=PATTERN, rows=(0,), **keywords):
    return rj.attention_rows(query, key, lse, pattern, rows=rows, **keywords)


def tiles(query=Q, key=Q, value=Q, pattern=PATTERN, ring=None, **keywords):
    return rj.count_tiles(query, key, value, pattern, ring=ring or rj.Ring(ring_mesh(2)), **keywords)


def traced(batch, length, heads=2, dim=4, ring=None, pattern=PATTERN):
    x = jax.ShapeDtypeStruct((batch, length, heads, dim), np.float32)
    return jax.eval_shape(lambda x: rj.dilated_attention(x, x, x, pattern, ring=ring), x)


def other_mesh():
    return jax.device_put(Q, NamedSharding(jax.sharding.Mesh(jax.devices()[2:4], ("ring",)), P(None, "ring")))


SCALES = [NAN, INF, -INF, "big", 1e39, 10**400, True, 1j, [1.0], lambda: on_device(np.float32(0.5))]
SINKS = [[1.0], "x", 3.0, Q[0, 0], Q[0, 0, 0, :3], np.zeros(4, int), np.zeros(4, complex), np.float32(0)]
DETACHED = rj.DilationPattern((4, 8), (1, 2), mixing="detached")
MASKS = {"is_causal": BOOLS, "segment_ids": IDS, "seq_len": [*COUNTS, 9]}
for name, call in {"dilated_attention": attend, "reference_attention": reference, "count_tiles": tiles}.items():
    bad(name, call, query=ARRAYS, key=ARRAYS, value=ARRAYS, pattern=[None, (4, 8), "longnet"], **MASKS)
for name, call in {"dilated_attention": attend, "reference_attention": reference}.items():
    bad(name, call, scale=SCALES, dropout_rate=RATES, dropout_rng=KEYS)
    bad(name, call, {"dropout_rate": "dropout_rng"}, dropout_rate=[0.5])
    bad(name, call, sink_logits=[*SINKS, Also(Q[0, 0, 0], {"pattern": DETACHED})], return_lse=BOOLS)
bad("dilated_attention", attend, key=[Q[:1], Q[:, :4], Q[..., :2], Q[:, :, :3], Q.astype(np.float16)])
bad("dilated_attention", attend, value=[Q[:, :, :2], Q.astype(np.float16)], ring=RINGS, block_sizes=BLOCK_SIZES)
bad("dilated_attention", attend, implementation=CHOICES)
blocks = rj.BlockSizes(16, 16)
bad("dilated_attention", attend, block_sizes=[Also(blocks, {"implementation": "xla"})])
key = {"dropout_rng": np.zeros(2, np.uint32), "dropout_rate": 0.5}
bad("dilated_attention", attend, implementation=[Also("native", key)], block_sizes=[Also(blocks, key)])
bad(
    "dilated_attention",
    lambda **k: attend(ring=rj.Ring(ring_mesh(2)), **k),
    query=[Q[:, :7], other_mesh],
    key=[other_mesh],
    value=[other_mesh],
    segment_ids=[lambda: jax.device_put(np.zeros((2, 8), np.int32), jax.devices()[5])],
)
bad("dilated_attention", lambda **k: traced(**{"batch": 1, "length": 8} | k), {"length": "query", "batch": "query"},
    length=[2**31, 2**40, HUGE], batch=[2**28])  # fmt: skip
bad("reference_attention", reference, rows=[[-1], [8], [0.5], 3, [], [True], "x", [2**70], None.__class__])
ROW_LISTS = [[-1], [8], [0.5], 3, [], [[0]], [True], "x", [2**70], None, np.zeros(2), np.array([2**40])]
LSES = [None, [1.0], Q, Q[..., 0].astype(int), Q[:, :4, :, 0], Q[:, :, :2, 0]]
bad("attention_rows", rows_of, query=ARRAYS, key=ARRAYS, lse=LSES, pattern=[None, (4, 8)], rows=ROW_LISTS, **MASKS)
bad("attention_rows", rows_of, scale=SCALES, key=[Q[:1], Q[:, :4], Q[..., :2], Q[:, :, :3], Q.astype(np.float16)])
bad("count_tiles", lambda **k: rj.count_tiles(Q, Q, Q, PATTERN, **k), ring=[None, *RINGS])


def in_ring(query=Q, key=None, value=None, pattern=PATTERN, **keywords):
    """`ring_dilated_attention` in a `shard_map` over two devices, traced only."""
    f = lambda q: rj.ring_dilated_attention(  # noqa: E731
        query if query is not Q else q, q if key is None else key, q if value is None else value, pattern, **keywords
    )
    spec = P(None, "ring")
    return jax.eval_shape(jax.shard_map(f, mesh=ring_mesh(2), in_specs=spec, out_specs=spec), Q)


bad("ring_dilated_attention", in_ring, query=[[1.0], "x"], key=[[1.0], Q[0]], value=[3.0], pattern=[None, (4, 8)])
bad(
    "ring_dilated_attention",
    in_ring,
    axis_name=["x", 0, (), None, ("ring", "x")],
    head_axis=["x", 2],
    is_causal=[1],
    seq_len=[0, 17],
)
bad(
    "ring_dilated_attention",
    in_ring,
    layout=CHOICES[:2],
    batch_axis=["x", 0],
    strategy=CHOICES[:2],
    memory_budget=COUNTS[:3],
)
bad("ring_dilated_attention", in_ring, scale=SCALES[:2], dropout_rate=RATES[:2], dropout_rng=KEYS[:2])
bad("ring_dilated_attention", in_ring, block_sizes=BLOCK_SIZES[:1], implementation=CHOICES[:2])
bad("ring_dilated_attention", in_ring, sink_logits=SINKS[:5], return_lse=BOOLS[:2])


# rings, layouts and plans
def ring(**keywords):
    return rj.Ring(keywords.pop("mesh", None) or ring_mesh(2), **keywords)


bad("Ring", ring, mesh=["x", 2, ("ring",), jax.devices, rj.Ring], axis_name=["x", 0, (), (0,), ("ring", "x")])
bad("Ring", ring, batch_axis=["x", 1, ""], head_axis=["x", 1, ("ring",)], layout=CHOICES, strategy=CHOICES)
bad("Ring", ring, memory_budget=COUNTS[:6])
bad("Ring.size", lambda name: ring().size(name), name=["ring", 0, "mesh"])


def to_layout(x=Q, layout="zigzag", ring_size=2, **keywords):
    return rj.to_layout(x, layout, ring_size, **keywords)


def from_layout(x=Q, layout="zigzag", ring_size=2, **keywords):
    return rj.from_layout(x, layout, ring_size, **keywords)


for name, call in {"to_layout": to_layout, "from_layout": from_layout}.items():
    bad(name, call, x=[[1, 2], 3, "x", None, LONG, -LONG, LONG.astype(np.uint64), struct], layout=CHOICES)
    bad(name, call, ring_size=[*COUNTS, HUGE], axis=[4, -5, 1.0, "x", None])
bad("to_layout", to_layout, length=[*COUNTS, 4, 9, HUGE, 2**31], fill=["x", None, [0], 1j])
bad("to_layout", lambda fill: rj.to_layout(np.zeros((2, 7), np.int32), "zigzag", 2, fill=fill), fill=[0.5, 2**40, NAN])
bad("from_layout", from_layout, length=[-1, 9, 1.5, "8", True, HUGE], x=[Q[:, :7]])
bad(
    "Ring.shard", lambda fill: rj.Ring(ring_mesh(2)).shard(np.zeros((2, 8), np.int32), fill=fill), fill=["x", None, 0.5]
)
bad("positions", lambda **k: rj.positions(**{"layout": "zigzag", "stored_length": 8, "ring_size": 2} | k),
    layout=CHOICES, stored_length=[*COUNTS, 7, 2**31, 2**32, HUGE], ring_size=[*COUNTS, HUGE])  # fmt: skip


def plan(pattern=PATTERN, **keywords):
    return rj.plan(pattern, **{"seq_len": 64, "num_heads": 4, "head_dim": 8, "ring_size": 2} | keywords)


bad("plan", plan, pattern=[None, (4, 8)], seq_len=COUNTS, num_heads=[*COUNTS, HUGE], head_dim=COUNTS, batch=COUNTS)
bad("plan", plan, ring_size=[*COUNTS, HUGE], stored_length=[*COUNTS, 8, 65], num_kv_heads=[*COUNTS, 3], layout=CHOICES)
bad("plan", plan, is_causal=BOOLS, dtype=[*DTYPES, None], strategy=CHOICES, memory_budget=[*COUNTS[:6], 10])
bad("plan", plan, has_segment_ids=BOOLS, has_sinks=BOOLS, head_shards=[*COUNTS, 3], inner_devices=[*COUNTS, 3])
bad("Plan.memory", lambda platform: plan().memory(platform), platform=["gpu", 1, None])
bad("compute_dtype", rj.compute_dtype, device=["cpu", 0, mesh])

# decoding
CACHE = {"batch": 2, "num_kv_heads": 4, "head_dim": 4, "max_len": 16}


def cache(pattern=PATTERN, **keywords):
    return rj.init_cache(pattern, **CACHE | keywords)


def made(**keywords):
    return jax.eval_shape(lambda: cache(**keywords))


bad("init_cache", cache, pattern=[None, (4, 8)], batch=[*COUNTS, HUGE], num_kv_heads=[*COUNTS, HUGE])
bad("init_cache", cache, head_dim=[*COUNTS, HUGE], max_len=[*COUNTS, 2**31, HUGE], dtype=[*DTYPES, None], ring=RINGS)
bad("init_cache", lambda **k: cache(ring=rj.Ring(ring_mesh(2, 2, names=("ring", "data")), batch_axis="data"), **k),
    named={"batch": "batch_axis"}, batch=[3])  # fmt: skip
LENGTHS = [[1], [1, 2, 3], 3, "x", [0.5, 1.0], [-1, 1], [1, 99], [1, 2**40], [True, True], [[1, 1]], [[1], [1, 2]]]


def prefill(key=Q, value=Q, lengths=None, **keywords):
    given = keywords.pop("cache") if "cache" in keywords else made()
    return rj.prefill(given, key, value, lengths, **keywords)


def step(query=Q, key=Q, value=Q, **keywords):
    given = keywords.pop("cache") if "cache" in keywords else made()
    return rj.decode_step(given, query, key, value, **keywords)


KV = [[1.0], None, "x", Q[0], Q[:, :, :2], Q[..., :2], Q[:1], Q[:0], Q.astype(np.float16), Q.astype(int), struct]
bad("prefill", prefill, cache=[None, {}, "x", Q], key=KV, value=KV, lengths=LENGTHS, ring=RINGS)
bad("decode_step", step, cache=[None, {}, "x", Q], query=ARRAYS, key=KV, value=KV, counts=LENGTHS, ring=RINGS)
bad("decode_step", step, scale=SCALES, sink_logits=SINKS)


def generate(**keywords):
    defaults = {"step": lambda s, t: (jnp.zeros((2, 4)), s), "state": (), "tokens": np.zeros(2, np.int32)}
    given = defaults | {"num_tokens": 2, "rng": np.zeros(2, np.uint32)} | keywords
    if given.get("greedy") is True:
        given.setdefault("rng", None)
    return rj.generate(**given)


bad("generate", generate, step=[None, "x", 3], num_tokens=[*COUNTS, HUGE], rng=[None, *KEYS], greedy=BOOLS)
bad("generate", generate, tokens=[[0, 1], 3, None, np.zeros((2, 1), int), np.zeros(2), np.zeros(0, int), LONG[0]])
bad("generate", generate, tokens=[np.array([0, -1]), np.zeros(2, bool)], top_k=COUNTS)
HEATS = [0, -1, 0.0, -1.0, NAN, INF, "hot", None, True, [1.0], np.ones(2), np.float32(0), np.array(-1.0), np.array(1)]
HEATS += [lambda x=x: on_device(np.asarray(x)) for x in (np.float32(0), np.float32(-1), np.float32(NAN), np.int32(1))]
bad("generate", generate, temperature=HEATS)
bad("generate", lambda **k: generate(greedy=True, rng=None, **k), top_k=[2], temperature=[0.5])
