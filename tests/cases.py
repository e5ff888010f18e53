"""Cases, oracles and error measures shared by the test files."""

import collections
import dataclasses
import functools
import itertools
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

# Compilation dominates the cost of a test, so most programs are compiled without optimizations. JAX 0.10 can also turn
# off the fusion emitters, which take almost half of the time of the compiler.
QUICK: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False
NAMES = ("out", "dq", "dk", "dv")
# Settings of property-based tests: every run tests the same cases.
RANDOM = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
# Upper bounds of `error` against a float64 computation on the same inputs.
TOLERANCE = {"float64": 1e-10, "float32": 2e-6, "bfloat16": 1e-2}
RULES = ("mod", "block", "none", "split", "detached")


class Case(NamedTuple):
    """One attention call: shapes, pattern and masks. Tests pass every field by name."""

    length: int = 64
    batch: int = 2
    kv_heads: int = 2
    q_per_kv: int = 1
    head_dim: int = 8
    segment_lengths: tuple[int, ...] = (16, 64)
    dilation_rates: tuple[int, ...] = (1, 4)
    rule: str = "mod"  # a value of `offsets`, or `heads="split"`, or `mixing="detached"`
    is_causal: bool = False
    ids: bool = False  # whether the call passes segment ids
    seq_len: int | None = None
    scale: float | None = None
    dropout_rate: float = 0.0

    def __str__(self) -> str:
        """Returns the fields that differ from their defaults."""
        changed = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return ",".join(f"{name}={value}" for name, value in changed.items()).replace(" ", "")

    @property
    def pattern(self) -> rj.DilationPattern:
        keywords = {"split": {"heads": "split"}, "detached": {"mixing": "detached"}}
        return rj.DilationPattern(
            self.segment_lengths, self.dilation_rates, **keywords.get(self.rule, {"offsets": self.rule})
        )

    def keywords(self) -> dict:
        """Returns the keyword arguments of the attention call."""
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
        """Returns query, key, value and a cotangent."""
        rng = np.random.default_rng(seed)
        heads = (self.kv_heads * self.q_per_kv, self.kv_heads, self.kv_heads, self.kv_heads * self.q_per_kv)
        shapes = ((self.batch, self.length, num, self.head_dim) for num in heads)
        return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def pairwise(**choices) -> list[dict]:
    """Returns a few combinations that contain every pair of values of two parameters.

    Greedy: each row starts with a missing pair, and every other parameter takes the value that adds most missing pairs.
    """
    names = list(choices)
    values = [[(i, j) for j in range(len(choices[name]))] for i, name in enumerate(names)]
    missing = {pair for some, others in itertools.combinations(values, 2) for pair in itertools.product(some, others)}
    times_used: collections.Counter = collections.Counter()
    rows = []
    while missing:
        row = list(min(missing))
        for options in values:
            if options[0][0] not in dict(row):
                gains = {new: sum(tuple(sorted((new, old))) in missing for old in row) for new in options}
                row.append(max(options, key=lambda new: (gains[new], -times_used[new])))
        row.sort()
        missing -= set(itertools.combinations(row, 2))
        times_used.update(row)
        rows.append({names[i]: choices[names[i]][j] for i, j in row})
    return rows


def covering(rows: list[dict], *pairs: tuple[str, str]) -> list[dict]:
    """Returns a few of the rows that contain every value of every parameter, and all value pairs of the named `pairs`.

    The default test suite runs these rows of a grid; the slow one runs the others.
    """

    def contents(row: dict) -> set:
        return {*row.items(), *((pair, (row[pair[0]], row[pair[1]])) for pair in pairs)}

    missing, chosen = set().union(*map(contents, rows)), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(contents(row) & missing)))
        missing -= contents(chosen[-1])
    return chosen


def slow_unless(is_default: bool) -> list:
    """Returns the marks of a test case that the default suite runs only if `is_default`."""
    return [] if is_default else [pytest.mark.slow]


@st.composite
def geometries(draw, most_branches: int, longest: int) -> Case:
    """Draws cases of any length up to `longest`, with segments and rates that need not divide it or each other."""
    branches = draw(st.integers(1, most_branches))
    length = draw(st.integers(1, longest))
    return Case(
        length=length,
        batch=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 5)),
        q_per_kv=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 4, 8])),
        segment_lengths=tuple(draw(st.lists(st.integers(1, longest + 20), min_size=branches, max_size=branches))),
        dilation_rates=tuple(draw(st.lists(st.integers(1, 17), min_size=branches, max_size=branches))),
        rule=draw(st.sampled_from(RULES)),
        is_causal=draw(st.booleans()),
        ids=draw(st.booleans()),
        seq_len=draw(st.one_of(st.none(), st.integers(1, length))),
        scale=draw(st.sampled_from([None, 0.2, -1.5])),
    )


def error(x, reference) -> float:
    """Returns max|x - reference| / max(1, max|reference|)."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.abs(x - reference).max() / max(1.0, np.abs(reference).max()))


def with_gradients(attention, pattern, *, compiler_options=None, **keywords):
    """Returns a compiled function from query, key, value and cotangent to the output and the three gradients."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def both(q, k, v, g):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, pattern, **keywords), q, k, v)
        return out, *pull(g)

    return both


def run(attention, arrays, pattern, **keywords):
    """Returns the output and the three gradients of one attention call."""
    return with_gradients(attention, pattern, **keywords)(*arrays)


def attended_keys(case: Case, ids: np.ndarray | None, head: int) -> list[np.ndarray]:
    """Returns, for each branch, whether each query (row) of a key/value head attends to each key (column)."""
    at, length, num = np.arange(case.length), case.seq_len or case.length, len(case.segment_lengths)
    visible = np.tril(np.ones((case.length, case.length), bool)) if case.is_causal else True
    visible = visible if ids is None else visible & (ids[:, None] == ids) & (ids >= 0)
    owner = [i for i in range(num) for _ in range(case.kv_heads // num + (i < case.kv_heads % num))][head]
    branches = []
    for i, (w, r) in enumerate(zip(np.minimum(case.segment_lengths, length), case.dilation_rates, strict=True)):
        rules = {"block": head // -(-case.kv_heads // r), "none": 0, "split": i % r}
        selected = (at < length) & (at % w % r == rules.get(case.rule, head % r))
        selected = selected & (case.rule != "split" or i == owner)
        branches.append(selected[:, None] & selected & (at[:, None] // w == at // w) & visible)
    return branches


def by_definition(case: Case, arrays) -> tuple[np.ndarray, ...]:
    """Computes output and gradients in float64 with numpy; `test_reference.py` compares it with the oracle.

    It compiles nothing, and compilation is most of the cost of the oracle for small shapes.
    """
    q, k, v, g = (np.asarray(x, np.float64) for x in arrays)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    ids = case.keywords()["segment_ids"]
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for b, n in np.ndindex(case.batch, case.kv_heads * case.q_per_kv):
        h = n // case.q_per_kv
        branches = attended_keys(case, None if ids is None else np.asarray(ids[b]), h)
        count, scores = sum(x.astype(float) for x in branches), scale * q[b, :, n] @ k[b, :, h].T
        weights = np.exp(
            scores - np.where(count > 0, scores, -1e300).max(1, keepdims=True), where=count > 0, out=0 * count
        )
        total = (count * weights).sum(1, keepdims=True)
        weights /= np.where(total > 0, total, 1)
        slope = g[b, :, n] / (len(branches) if case.rule == "split" else 1)
        combined = count * weights @ v[b, :, h]
        out[b, :, n] = combined / (len(branches) if case.rule == "split" else 1)
        mean = (slope * combined).sum(1, keepdims=True)
        dscores = count * weights * (slope @ v[b, :, h].T - mean)
        if case.rule == "detached":  # the mixing weight of each branch is a constant
            for x in branches:
                share = (x * weights).sum(1, keepdims=True)
                branch = (slope * (x * weights @ v[b, :, h])).sum(1, keepdims=True) / np.where(share > 0, share, 1)
                dscores += x * weights * (mean - branch)
        dq[b, :, n] = scale * dscores @ k[b, :, h]
        dk[b, :, h] += scale * dscores.T @ q[b, :, n]
        dv[b, :, h] += (count * weights).T @ slope
    return out, dq, dk, dv


# Only a missing compiler or the explicit switch skips the kernel tests: a failed build is a failure.
_REASON = build.why_not()
NEEDS_KERNELS = pytest.mark.skipif(
    _REASON in (build.NO_COMPILER, f"{build.SWITCH}=0 is set"), reason=_REASON or "compiled"
)
# The default on a CPU (native kernels where a compiler is installed), and plain XLA. The kernels are named because None
# traces those of all platforms, which takes longer.
IMPLEMENTATIONS = ("xla",) if _REASON else ("native", "xla")


def available(implementation: str) -> str:
    """Returns the implementation, or plain XLA if it is not available on this machine."""
    return implementation if implementation in IMPLEMENTATIONS else "xla"


def by_implementation(default: str) -> pytest.MarkDecorator:
    """Parametrizes a test over the implementations on a CPU, of which the default suite runs only `default`.

    For tests of what surrounds the kernels, for which one implementation is as good as the other.
    """
    rows = [pytest.param(x, marks=slow_unless(x == available(default))) for x in IMPLEMENTATIONS]
    return pytest.mark.parametrize("implementation", rows)


def alternating(names: str, default: list[tuple], slow: list[tuple]) -> pytest.MarkDecorator:
    """Parametrizes a test by the fixture `either_implementation` ("default" or "plain XLA") and by other arguments."""
    rows = [*default, *(pytest.param(*row, marks=pytest.mark.slow) for row in slow)]
    return pytest.mark.parametrize(f"either_implementation, {names}", rows, indirect=["either_implementation"])


def expected_results(case: Case, arrays) -> tuple[np.ndarray, ...]:
    """Returns output and gradients of these arrays in float64."""
    if not case.dropout_rate:
        return by_definition(case, arrays)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), np.float64) for x in arrays]
        return run(rj.reference_attention, wide, case.pattern, **case.keywords(), compiler_options=QUICK)


def assert_equals_oracle(
    case: Case,
    dtype: str,
    attention=rj.dilated_attention,
    *,
    implementations=IMPLEMENTATIONS,
    compiler_options=None,
) -> None:
    """Asserts that output and gradients in `dtype` equal the float64 oracle on the same inputs.

    Only float32 is compiled with `compiler_options`, by default as users compile; other dtypes are compiled quickly.
    """
    implementations = (None,) if case.dropout_rate else implementations  # None selects XLA for dropout
    keywords = {"compiler_options": compiler_options if dtype == "float32" else QUICK}
    with jax.enable_x64(dtype == "float64"):
        arrays = case.arrays(dtype)
        oracle = expected_results(case, arrays)
        for implementation in implementations:
            results = run(attention, arrays, case.pattern, implementation=implementation, **keywords, **case.keywords())
            for name, x, reference in zip(NAMES, results, oracle, strict=True):
                assert x.dtype == dtype, name
                assert error(x, reference) <= TOLERANCE[dtype], (name, implementation, error(x, reference), case)


def ring_mesh(*sizes: int, names: tuple[str, ...] = ("ring",)) -> Mesh:
    """Returns a mesh of the first devices, with automatic axes."""
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), names)


def on_ring(ring: rj.Ring, fill: float = 0):
    """Returns `dilated_attention` on a ring for arrays in sequence order; padding is set to `fill`."""

    def attention(q, k, v, pattern, *, segment_ids=None, seq_len=None, **keywords):
        padded = dataclasses.replace(ring, seq_len=q.shape[1])
        stored = [padded.shard(x, fill=fill) for x in (q, k, v)]
        if segment_ids is not None:
            segment_ids = padded.shard(segment_ids, fill=-1)
        used, keywords = (padded, keywords) if seq_len is None else (ring, keywords | {"seq_len": seq_len})
        return padded.unshard(rj.dilated_attention(*stored, pattern, segment_ids=segment_ids, ring=used, **keywords))

    return attention


def stored_on(ring: rj.Ring, mesh: Mesh, x, fill: float = 0) -> jax.Array:
    """Puts an array in sequence order on the mesh, in the layout and sharding of the ring."""
    stored = np.asarray(rj.to_layout(x, ring.layout, ring.size("axis_name"), fill=fill))
    return jax.device_put(stored, NamedSharding(mesh, PartitionSpec(*ring.spec()[: stored.ndim])))


def assert_sharded_equals_oracle(
    case: Case,
    ring: rj.Ring,
    mesh: Mesh | None = None,
    attention=None,
    *,
    dtype: str = "float64",
    fill: float = 0,
    implementations=IMPLEMENTATIONS,
) -> None:
    """Asserts that results of arrays sharded over the mesh are exact and keep their sharding; padding holds `fill`."""
    mesh = ring.mesh if mesh is None else mesh
    attention = functools.partial(rj.dilated_attention, ring=ring) if attention is None else attention
    implementations = (None,) if case.dropout_rate else implementations  # None selects XLA for dropout
    with jax.enable_x64(dtype == "float64"):
        arrays = case.arrays(dtype)
        oracle = expected_results(case, arrays)
        stored = [stored_on(ring, mesh, x, fill) for x in arrays]
        keywords = case.keywords()
        if case.ids:
            keywords["segment_ids"] = stored_on(ring, mesh, keywords["segment_ids"], -1)
        if case.seq_len is None and stored[0].shape[1] > case.length:
            keywords["seq_len"] = case.length
        every = [
            run(attention, stored, case.pattern, compiler_options=QUICK, implementation=implementation, **keywords)
            for implementation in implementations
        ]
        for name, x, reference in (row for results in every for row in zip(NAMES, results, oracle, strict=True)):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, ring.spec()), 4), (name, x.sharding)
            assert all(s.data.size * mesh.size == x.size for s in x.addressable_shards), name
            assert x.dtype == dtype, name
            ordered = np.asarray(rj.from_layout(np.asarray(x), ring.layout, ring.size("axis_name")))
            assert error(ordered[:, : case.length], reference) <= TOLERANCE[dtype], (name, case, ring)
            assert not ordered[:, case.length :].any(), name


def count_matrix(case: Case) -> np.ndarray:
    """Counts in plain loops how often query p of key/value head h attends to key s: (B, K, T, T)."""
    length = case.length if case.seq_len is None else case.seq_len
    ids = case.keywords()["segment_ids"]
    ids = np.zeros((case.batch, case.length), int) if ids is None else np.asarray(ids)
    count = np.zeros((case.batch, case.kv_heads, case.length, case.length), int)
    num = len(case.segment_lengths)
    owners = np.repeat(np.arange(num), [case.kv_heads // num + (i < case.kv_heads % num) for i in range(num)])
    for i, (w, r) in enumerate(zip(case.segment_lengths, case.dilation_rates, strict=True)):
        w = min(w, length)  # noqa: PLW2901
        for h in range(case.kv_heads):
            if case.rule == "split" and owners[h] != i:
                continue
            rules = {"block": h // -(-case.kv_heads // r), "none": 0, "split": i % r}
            offset = rules.get(case.rule, h % r)
            chosen = [p for p in range(length) if p % w % r == offset]
            for b, p, s in itertools.product(range(case.batch), chosen, chosen):
                visible = p // w == s // w and ids[b, p] == ids[b, s] >= 0
                count[b, h, p, s] += visible and (s <= p or not case.is_causal)
    return count


def naive(case: Case, dtype):
    """Returns the definition with every array and every sum in `dtype`."""
    count = jnp.asarray(count_matrix(case))[:, :, None]

    def attention(q, k, v, pattern):
        del pattern  # the counts contain it
        q = q.reshape(*q.shape[:2], case.kv_heads, case.q_per_kv, case.head_dim)
        scores = jnp.einsum("bpkgh,bskh->bkgps", q * jnp.asarray(case.head_dim**-0.5, dtype), k).astype(dtype)
        scores = jnp.where(count > 0, scores + jnp.log(jnp.maximum(count, 1)).astype(dtype), -jnp.inf)
        top = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(dtype).min)  # a row may attend to nothing
        weights = jnp.exp(scores - top)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(dtype).tiny)
        weights = weights / (len(case.segment_lengths) if case.rule == "split" else 1)
        return jnp.einsum("bkgps,bskh->bpkgh", weights, v).astype(dtype).reshape(*q.shape[:2], -1, case.head_dim)

    return attention


def low_precision_errors(
    case: Case, dtype, attention=rj.dilated_attention, compiler_options=None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns errors of output and gradients, summed over five seeds: of `attention`, and of the naive computation."""
    contenders = [
        with_gradients(attention, case.pattern, compiler_options=compiler_options, is_causal=case.is_causal),
        with_gradients(naive(case, dtype), case.pattern, compiler_options=compiler_options),
    ]
    errors = np.zeros((2, 4))
    for seed in range(5):
        low = case.arrays(dtype, seed)
        expected = by_definition(case, low)
        for i, f in enumerate(contenders):
            results = [np.asarray(x, np.float64) for x in f(*low)]
            errors[i] += [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(results, expected, strict=True)]
    return errors[0], errors[1]
