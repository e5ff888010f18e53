"""Cases and measures that the test files share."""

import functools
import itertools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ringjax as rj
from ringjax._src.kernels.cpu import build

# compiling is most of what a test costs: only what is measured in float32 is compiled as users compile
QUICK = {"xla_backend_optimization_level": 0}
NAMES = ("out", "dq", "dk", "dv")
# settings of tests on random cases: the same cases in every run
RANDOM = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


class Case(NamedTuple):
    """One attention call: shapes, pattern and masks."""

    length: int = 64
    batch: int = 2
    kv_heads: int = 2
    group: int = 1
    dim: int = 8
    segment_lengths: tuple[int, ...] = (16, 64)
    dilation_rates: tuple[int, ...] = (1, 4)
    rule: str = "mod"  # offsets, "grouped" or "detached"
    is_causal: bool = False
    ids: bool = False
    seq_len: int | None = None
    scale: float | None = None
    dropout_rate: float = 0.0

    @property
    def pattern(self) -> rj.DilationPattern:
        keywords = {"grouped": {"heads": "grouped"}, "detached": {"mixing": "detached"}}
        return rj.DilationPattern(
            self.segment_lengths, self.dilation_rates, **keywords.get(self.rule, {"offsets": self.rule})
        )

    def keywords(self) -> dict:
        rng = np.random.default_rng(self.length)
        ids = np.sort(rng.integers(-1, 3, (self.batch, self.length)), axis=1)
        return {
            "is_causal": self.is_causal,
            "segment_ids": jnp.asarray(ids, jnp.int32) if self.ids else None,
            "seq_len": self.seq_len,
            "scale": self.scale,
            **({"dropout_rate": self.dropout_rate, "dropout_rng": jax.random.key(5)} if self.dropout_rate else {}),
        }

    def arrays(self, dtype, seed: int = 0) -> tuple[jax.Array, ...]:
        """query, key, value and a cotangent."""
        rng = np.random.default_rng(seed)
        heads = (self.kv_heads * self.group, self.kv_heads, self.kv_heads, self.kv_heads * self.group)
        return tuple(jnp.asarray(rng.standard_normal((self.batch, self.length, n, self.dim)), dtype) for n in heads)


def pairwise(seed: int = 0, **choices) -> list[dict]:
    """Few combinations in which every pair of values of two parameters meets (greedy, deterministic)."""
    names = list(choices)
    rng = random.Random(seed)
    todo = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(choices[names[a]]))
        for y in range(len(choices[names[b]]))
    }
    rows = []
    while todo:
        (a, x), (b, y) = sorted(todo)[0]
        best, best_new = None, -1
        for _ in range(60):
            row = [rng.randrange(len(choices[n])) for n in names]
            row[a], row[b] = x, y
            new = sum(((i, row[i]), (j, row[j])) in todo for i, j in itertools.combinations(range(len(names)), 2))
            if new > best_new:
                best, best_new = row, new
        todo -= {((i, best[i]), (j, best[j])) for i, j in itertools.combinations(range(len(names)), 2)}
        rows.append({n: choices[n][i] for n, i in zip(names, best, strict=True)})
    return rows


@st.composite
def geometries(draw, most_branches: int, longest: int) -> Case:
    """Cases of any length up to `longest`, with segments and rates that need not fit it or each other."""
    branches = draw(st.integers(1, most_branches))
    length = draw(st.integers(1, longest))
    return Case(
        length=length,
        batch=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 5)),
        group=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([1, 4, 8])),
        segment_lengths=tuple(draw(st.lists(st.integers(1, longest + 20), min_size=branches, max_size=branches))),
        dilation_rates=tuple(draw(st.lists(st.integers(1, 17), min_size=branches, max_size=branches))),
        rule=draw(st.sampled_from(["mod", "block", "none", "grouped", "detached"])),
        is_causal=draw(st.booleans()),
        ids=draw(st.booleans()),
        seq_len=draw(st.one_of(st.none(), st.integers(1, length))),
        scale=draw(st.sampled_from([None, 0.2, -1.5])),
    )


def error(x, reference) -> float:
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.abs(x - reference).max() / max(1.0, np.abs(reference).max()))


def with_gradients(attention, pattern, *, compiler_options=None, **keywords):
    """A compiled function of query, key, value and cotangent: the output and the three gradients."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def both(q, k, v, g):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, pattern, **keywords), q, k, v)
        return out, *pull(g)

    return both


def run(attention, arrays, pattern, **keywords):
    return with_gradients(attention, pattern, **keywords)(*arrays)


def seen(case: Case, ids: np.ndarray | None, head: int) -> list[np.ndarray]:
    """For each branch, which query (row) of a key/value head sees which key (column)."""
    at, length, num = np.arange(case.length), case.seq_len or case.length, len(case.segment_lengths)
    visible = np.tril(np.ones((case.length, case.length), bool)) if case.is_causal else True
    visible = visible if ids is None else visible & (ids[:, None] == ids) & (ids >= 0)
    owner = [i for i in range(num) for _ in range(case.kv_heads // num + (i < case.kv_heads % num))][head]
    found = []
    for i, (w, r) in enumerate(zip(np.minimum(case.segment_lengths, length), case.dilation_rates, strict=True)):
        rules = {"block": head // -(-case.kv_heads // r), "none": 0, "grouped": i % r}
        selected = (at < length) & (at % w % r == rules.get(case.rule, head % r))
        selected = selected & (case.rule != "grouped" or i == owner)
        found.append(selected[:, None] & selected & (at[:, None] // w == at // w) & visible)
    return found


def by_definition(case: Case, arrays) -> tuple[np.ndarray, ...]:
    """Output and gradients in float64, in numpy alone: `test_reference.py` holds it against the oracle.

    Nothing is compiled, which is most of what the oracle costs where shapes are small.
    """
    q, k, v, g = (np.asarray(x, np.float64) for x in arrays)
    scale = case.dim**-0.5 if case.scale is None else case.scale
    ids = case.keywords()["segment_ids"]
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for b, n in np.ndindex(case.batch, case.kv_heads * case.group):
        h = n // case.group
        branches = seen(case, None if ids is None else np.asarray(ids[b]), h)
        count, scores = sum(x.astype(float) for x in branches), scale * q[b, :, n] @ k[b, :, h].T
        weights = np.exp(
            scores - np.where(count > 0, scores, -1e300).max(1, keepdims=True), where=count > 0, out=0 * count
        )
        total = (count * weights).sum(1, keepdims=True)
        weights /= np.where(total > 0, total, 1)
        slope = g[b, :, n] / (len(branches) if case.rule == "grouped" else 1)
        joint = count * weights @ v[b, :, h]
        out[b, :, n] = joint / (len(branches) if case.rule == "grouped" else 1)
        mean = (slope * joint).sum(1, keepdims=True)
        dscores = count * weights * (slope @ v[b, :, h].T - mean)
        if case.rule == "detached":  # each branch by itself: its share of the sum is a constant
            for x in branches:
                share = (x * weights).sum(1, keepdims=True)
                own = (slope * (x * weights @ v[b, :, h])).sum(1, keepdims=True) / np.where(share > 0, share, 1)
                dscores += x * weights * (mean - own)
        dq[b, :, n] = scale * dscores @ k[b, :, h]
        dk[b, :, h] += scale * dscores.T @ q[b, :, n]
        dv[b, :, h] += (count * weights).T @ slope
    return out, dq, dk, dv


WIDE, NARROW = (np.float64, 1e-10), (np.float32, 2e-6)
# what a CPU runs by default, which is kernels where there is a compiler, and what it runs elsewhere
IMPLEMENTATIONS = (None, "xla")
# where there is a compiler, kernels that are not there are a failure
_REASON = build.why_not()
NEEDS_KERNELS = pytest.mark.skipif(
    _REASON in (build.NO_COMPILER, f"{build.SWITCH}=0 is set"), reason=_REASON or "compiled"
)


def right_of(case: Case, arrays) -> tuple[np.ndarray, ...]:
    """Output and gradients of these arrays in float64."""
    if not case.dropout_rate:
        return by_definition(case, arrays)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), np.float64) for x in arrays]
        return run(rj.reference_attention, wide, case.pattern, **case.keywords(), compiler_options=QUICK)


def assert_equals_oracle(
    case: Case,
    tolerances=(WIDE, NARROW),
    attention=rj.dilated_attention,
    implementations=IMPLEMENTATIONS,
    **options,
) -> None:
    """Output and gradients in each dtype against the float64 oracle of the same (float32) inputs."""
    arrays = case.arrays(np.float32)
    oracle = right_of(case, arrays)
    implementations = (None,) if case.dropout_rate else implementations  # which chooses XLA
    for (dtype, tolerance), implementation in itertools.product(tolerances, implementations):
        is_wide = dtype == np.float64
        with jax.enable_x64(is_wide):
            given = [x.astype(np.float64) for x in arrays] if is_wide else arrays
            how = {"compiler_options": QUICK} if is_wide else options
            how = how | case.keywords() | {"implementation": implementation}
            ours = run(attention, given, case.pattern, **how)
        for name, x, reference in zip(NAMES, ours, oracle, strict=True):
            assert x.dtype == dtype, name
            assert error(x, reference) <= tolerance, (name, dtype, implementation, error(x, reference), case)


def ring_mesh(*sizes: int, names: tuple[str, ...] = ("ring",)) -> Mesh:
    """A mesh of the first devices, with automatic axes."""
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), names)


def on_ring(ring: rj.Ring, fill: float = 0):
    """`dilated_attention` on a ring, of arrays in the order of the sequence; `fill` is what the padding holds."""

    def attention(q, k, v, pattern, *, segment_ids=None, seq_len=None, **keywords):
        size, length = ring.size("axis_name"), q.shape[1]
        stored = [rj.to_layout(x, ring.layout, size, fill=fill) for x in (q, k, v)]
        if segment_ids is not None:
            segment_ids = rj.to_layout(segment_ids, ring.layout, size, fill=-1)
        if seq_len is None and stored[0].shape[1] > length:
            seq_len = length
        out = rj.dilated_attention(*stored, pattern, segment_ids=segment_ids, seq_len=seq_len, ring=ring, **keywords)
        return rj.from_layout(out, ring.layout, size, length=length)

    return attention


def stored_on(ring: rj.Ring, mesh: Mesh, x, fill: float = 0) -> jax.Array:
    """An array in the order of the sequence, as the ring stores it, on the mesh."""
    stored = np.asarray(rj.to_layout(x, ring.layout, ring.size("axis_name"), fill=fill))
    return jax.device_put(stored, NamedSharding(mesh, PartitionSpec(*ring.spec()[: stored.ndim])))


def assert_stored_equals_oracle(
    case: Case,
    ring: rj.Ring,
    mesh: Mesh | None = None,
    attention=None,
    fill: float = 0,
    limit=WIDE,
    implementations=IMPLEMENTATIONS,
) -> None:
    """Arrays that are on the mesh before, and stay sharded as they were; `fill` is what their padding holds."""
    mesh, (dtype, tolerance) = ring.mesh if mesh is None else mesh, limit
    attention = functools.partial(rj.dilated_attention, ring=ring) if attention is None else attention
    implementations = (None,) if case.dropout_rate else implementations  # which chooses XLA
    with jax.enable_x64(True):
        oracle = right_of(case, case.arrays(np.float64))
    with jax.enable_x64(dtype == np.float64):
        stored = [stored_on(ring, mesh, x, fill) for x in case.arrays(dtype)]
        keywords = case.keywords()
        if case.ids:
            keywords["segment_ids"] = stored_on(ring, mesh, keywords["segment_ids"], -1)
        if case.seq_len is None and stored[0].shape[1] > case.length:
            keywords["seq_len"] = case.length
        every = [
            run(attention, stored, case.pattern, compiler_options=QUICK, implementation=implementation, **keywords)
            for implementation in implementations
        ]
    for name, x, reference in (row for got in every for row in zip(NAMES, got, oracle, strict=True)):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, ring.spec()), 4), (name, x.sharding)
        assert all(s.data.size * mesh.size == x.size for s in x.addressable_shards), name
        assert x.dtype == dtype, name
        with jax.enable_x64(dtype == np.float64):
            ordered = np.asarray(rj.from_layout(np.asarray(x), ring.layout, ring.size("axis_name")))
        assert error(ordered[:, : case.length], reference) <= tolerance, (name, case, ring)
        assert not ordered[:, case.length :].any(), name


def count_matrix(case: Case) -> np.ndarray:
    """How often query p of key/value head h sees key s, (B, K, T, T), in plain loops over the definition."""
    length = case.length if case.seq_len is None else case.seq_len
    ids = case.keywords()["segment_ids"]
    ids = np.zeros((case.batch, case.length), int) if ids is None else np.asarray(ids)
    count = np.zeros((case.batch, case.kv_heads, case.length, case.length), int)
    num = len(case.segment_lengths)
    groups = np.repeat(np.arange(num), [case.kv_heads // num + (i < case.kv_heads % num) for i in range(num)])
    for i, (w, r) in enumerate(zip(case.segment_lengths, case.dilation_rates, strict=True)):
        w = min(w, length)  # noqa: PLW2901
        for h in range(case.kv_heads):
            if case.rule == "grouped" and groups[h] != i:
                continue
            rules = {"block": h // -(-case.kv_heads // r), "none": 0, "grouped": i % r}
            offset = rules.get(case.rule, h % r)
            chosen = [p for p in range(length) if p % w % r == offset]
            for b, p, s in itertools.product(range(case.batch), chosen, chosen):
                visible = p // w == s // w and ids[b, p] == ids[b, s] >= 0
                count[b, h, p, s] += visible and (s <= p or not case.is_causal)
    return count


def naive(case: Case, dtype):
    """The definition with every array and every sum in `dtype`."""
    count = jnp.asarray(count_matrix(case))[:, :, None]

    def attention(q, k, v, pattern):
        del pattern  # the counts hold it
        q = q.reshape(*q.shape[:2], case.kv_heads, case.group, case.dim) * jnp.asarray(case.dim**-0.5, dtype)
        scores = jnp.einsum("bpkgh,bskh->bkgps", q, k).astype(dtype)
        scores = jnp.where(count > 0, scores + jnp.log(jnp.maximum(count, 1)).astype(dtype), -jnp.inf)
        top = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(dtype).min)  # a row may see nothing
        weights = jnp.exp(scores - top)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(dtype).tiny)
        weights = weights / (len(case.segment_lengths) if case.rule == "grouped" else 1)
        return jnp.einsum("bkgps,bskh->bpkgh", weights, v).astype(dtype).reshape(*q.shape[:2], -1, case.dim)

    return attention


def low_precision_errors(
    case: Case, dtype, attention=rj.dilated_attention, compiler_options=None
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of output and gradients, summed over five seeds: of `attention`, and of the naive computation."""
    oracle = with_gradients(rj.reference_attention, case.pattern, compiler_options=QUICK, is_causal=case.is_causal)
    contenders = [
        with_gradients(attention, case.pattern, compiler_options=compiler_options, is_causal=case.is_causal),
        with_gradients(naive(case, dtype), case.pattern, compiler_options=compiler_options),
    ]
    errors = np.zeros((2, 4))
    for seed in range(5):
        low = case.arrays(dtype, seed)
        right = [np.asarray(x) for x in oracle(*(x.astype(jnp.float32) for x in low))]
        for i, f in enumerate(contenders):
            got = [np.asarray(x, np.float32) for x in f(*low)]
            errors[i] += [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(got, right, strict=True)]
    return errors[0], errors[1]
