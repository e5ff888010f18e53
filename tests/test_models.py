"""LongNet models: outputs and gradients on one device and on rings, parameters, rematerialization, the loss."""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import QUICK, error, ring_mesh, slow_unless
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from test_rotary import random, rotated

import ringjax as rj
from ringjax.models import LongNetConfig, LongNetDecoder, LongNetEncoder, block, next_token_targets, token_loss

SLOW = pytest.mark.slow
BATCH, LENGTH, VOCABULARY, LAYERS, FEATURES, HEADS, KV_HEADS, DIM = 2, 48, 11, 2, 16, 4, 2, 4
LIMIT = 1e-5  # error of logits and gradients after two layers in float32
ONE_BRANCH, TWO_BRANCHES = rj.DilationPattern((24,), (2,)), rj.DilationPattern((8, 40), (1, 3))
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
IDS = np.repeat([[0, 1, 2, -1], [3, 3, 1, 1]], LENGTH // 4, axis=1).astype(np.int32)
COMPILE = functools.partial(jax.jit, compiler_options=QUICK)


def config_of(**changes) -> LongNetConfig:
    sizes = {"num_layers": LAYERS, "features": FEATURES, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    return LongNetConfig(**{**sizes, "hidden_features": 24, "vocab_size": VOCABULARY, "pattern": ONE_BRANCH, **changes})


def functional(kind, config: LongNetConfig, ring=None):
    """Returns a function from a dict of parameters to the model, and the shapes of the parameters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: kind(config, ring=ring, rngs=nnx.Rngs(0))), nnx.Param)[:2]

    def model(parameters):
        restored = nnx.State(jax.tree.map(lambda x: x, state))
        nnx.replace_by_pure_dict(restored, parameters)
        return nnx.merge(graph, restored)

    return model, nnx.to_pure_dict(state)


def drawn(shapes):
    """Draws distinct parameters that are neither 0 nor 1; compiling the initializers would take seconds."""
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [0.4 * random(*x.shape, seed=i) + 0.1 for i, x in enumerate(leaves)])


def norm(p, x):
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * p["scale"][None, None] + p["bias"][None, None]


def linear(p, x):
    out = jnp.tensordot(x, p["kernel"], axes=1)
    return out + p["bias"][None, None] if "bias" in p else out


def definition(p, x, pattern, *, is_causal=True, segment_ids=None, seq_len=None):
    """Computes all blocks and the final norm with the dense oracle."""
    for i in range(LAYERS):
        b = jax.tree.map(lambda x: x[i], p["blocks"])  # noqa: B023
        a, normed = b["attention"], norm(b["attention_norm"], x)
        q, k, v = (linear(a[name], normed) for name in ("query", "key", "value"))
        q, k = rotated(q, np.arange(x.shape[1])), rotated(k, np.arange(x.shape[1]))
        options = {"is_causal": is_causal, "segment_ids": segment_ids, "seq_len": seq_len}
        attended = rj.reference_attention(q, k, v, pattern, **options).reshape(*x.shape[:2], -1)
        attended = norm(a["sub_norm"], attended) if "sub_norm" in a else attended
        out = {**a["out"], "kernel": a["out"]["kernel"].reshape(-1, x.shape[-1])}
        x = x + linear(out, attended)
        hidden = linear(b["expand"], norm(b["feed_forward_norm"], x))
        hidden = hidden * (1 + jax.lax.erf(hidden / math.sqrt(2))) / 2
        hidden = norm(b["hidden_norm"], hidden) if "hidden_norm" in b else hidden
        x = x + linear(b["contract"], hidden)
    return norm(p["norm"], x)


def logits_by_definition(p, tokens, pattern, **options):
    x = definition(p, p["embed"]["embedding"][tokens], pattern, **options)
    return x @ (p["head"]["kernel"] if "head" in p else p["embed"]["embedding"].T)


def with_gradient(logits_of):
    """Returns a function that computes the logits and the gradient of the loss."""

    @COMPILE
    def both(parameters, tokens, targets, weights):
        def loss(parameters):
            logits = logits_of(parameters, tokens)
            total, count = token_loss(logits, targets, weights)
            return total / count, logits

        gradient, logits = jax.grad(loss, has_aux=True)(parameters)
        return logits, gradient

    return both


def assert_close(got, expected):
    chex.assert_trees_all_equal_shapes(got, expected)
    for name, x, reference in zip(("logits", "gradient"), got, expected, strict=True):
        flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (x, reference)]
        assert error(*flat) <= LIMIT, (name, error(*flat))


@functools.cache
def expected(pattern=ONE_BRANCH, seq_len=None, packed=False, **changes):
    """Returns parameters, and the logits and gradient of the definition in float64."""
    parameters = drawn(functional(LongNetDecoder, config_of(pattern=pattern, **changes))[1])
    ids = IDS if packed else None
    targets, weights = next_token_targets(TOKENS, ids, seq_len)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
        masks = {"segment_ids": ids, "seq_len": seq_len}
        call = with_gradient(lambda p, t: logits_by_definition(p, t, pattern, **masks))
        return parameters, jax.tree.map(np.asarray, call(wide, TOKENS, targets, weights))


WITH_BIAS = {"use_bias": True, "tie_embeddings": False, "sub_norm": False}


@pytest.mark.parametrize(
    ("pattern", "packed", "changes"),
    [
        pytest.param(ONE_BRANCH, True, {}, marks=SLOW),  # the default suite runs it on a ring, below
        pytest.param(TWO_BRANCHES, True, {"scan_layers": False}, marks=SLOW),
        pytest.param(TWO_BRANCHES, False, WITH_BIAS, marks=SLOW),
    ],
)
def test_decoder_equals_its_definition(pattern, packed, changes):
    sizes = {name: value for name, value in changes.items() if name != "scan_layers"}
    parameters, definition = expected(pattern, packed=packed, **sizes)
    ids = IDS if packed else None
    model, _ = functional(LongNetDecoder, config_of(pattern=pattern, **changes))
    call = with_gradient(lambda p, tokens: model(p)(tokens, segment_ids=ids))
    assert_close(call(parameters, TOKENS, *next_token_targets(TOKENS, ids)), definition)


def stored(ring, x, fill=0):
    """Puts an array in sequence order on the mesh, in the layout of the ring."""
    laid_out = np.asarray(rj.to_layout(x, ring.layout, ring.size("axis_name"), fill=fill))
    return jax.device_put(laid_out, NamedSharding(ring.mesh, PartitionSpec(*ring.spec()[: laid_out.ndim])))


def placed(parameters, ring):
    """Puts parameters on the mesh, with the sharding that the model annotates."""
    model = nnx.eval_shape(lambda: LongNetDecoder(config_of(), ring=ring, rngs=nnx.Rngs(0)))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(ring.mesh, spec)), parameters, specs)


def mesh_of(sizes: dict[str, int], kind=AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


ALL_AXES = {"data": 2, "ring": 2, "tensor": 2}


class ModelRing(NamedTuple):
    """A mesh and a layout, and what the model gets on it."""

    sizes: dict[str, int]
    layout: str
    kind: AxisType = AxisType.Auto
    seq_len: int | None = None
    packed: bool = False
    is_default: bool = False


RINGS = {
    "2 devices": ModelRing({"ring": 2}, layout="zigzag", is_default=True),
    "3 devices, padded": ModelRing({"ring": 3}, layout="zigzag", seq_len=44),
    "4 devices, packed": ModelRing({"ring": 4}, layout="contiguous", packed=True),
    "three axes, padded and packed": ModelRing(ALL_AXES, layout="zigzag", seq_len=44, packed=True),
    "three explicit axes": ModelRing(ALL_AXES, layout="contiguous", kind=AxisType.Explicit),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_unless(RINGS[name].is_default)) for name in RINGS])
def test_decoder_on_a_ring_equals_its_definition(name):
    sizes, layout, kind, seq_len, packed, _ = RINGS[name]
    axes = {"batch_axis": "data", "head_axis": "tensor"} if "data" in sizes else {}
    ring = rj.Ring(mesh_of(sizes, kind), layout=layout, **axes)
    parameters, (logits, gradient) = expected(seq_len=seq_len, packed=packed)
    model, _ = functional(LongNetDecoder, config_of(), ring)
    given = [stored(ring, x) for x in (TOKENS, *next_token_targets(TOKENS, IDS if packed else None, seq_len))]
    ids = stored(ring, IDS, fill=-1) if packed else None
    call = with_gradient(lambda p, tokens: model(p)(tokens, segment_ids=ids, seq_len=seq_len))
    with jax.set_mesh(ring.mesh):
        got, slopes = call(placed(parameters, ring), *given)
    assert got.sharding.is_equivalent_to(NamedSharding(ring.mesh, PartitionSpec(*ring.spec()[:2])), 3)
    got = rj.from_layout(np.asarray(got), layout, sizes["ring"])
    kept = slice(seq_len)  # the rest is padding
    assert_close((got[:, kept], jax.tree.map(np.asarray, slopes)), (logits[:, kept], gradient))


@SLOW
def test_initial_parameters_do_not_depend_on_the_ring():
    whole = nnx.to_pure_dict(nnx.state(LongNetDecoder(config_of(num_layers=1), rngs=nnx.Rngs(3)), nnx.Param))
    ring = rj.Ring(ring_mesh(2, 2, names=("ring", "tensor")), head_axis="tensor")
    model = LongNetDecoder(config_of(num_layers=1), ring=ring, rngs=nnx.Rngs(3))
    chex.assert_trees_all_equal(whole, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    query = model.blocks.attention.query.kernel[...]
    assert query.sharding.is_equivalent_to(NamedSharding(ring.mesh, PartitionSpec(None, None, "tensor")), 4)


def test_parameters_are_annotated_with_the_head_axis():
    ring = rj.Ring(ring_mesh(2, 2, names=("ring", "tensor")), head_axis="tensor")
    model = nnx.eval_shape(lambda: LongNetDecoder(config_of(use_bias=True), ring=ring, rngs=nnx.Rngs(0)))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    block_specs, heads = specs["blocks"], PartitionSpec(None, None, "tensor", None)
    assert block_specs["attention"]["query"]["kernel"] == heads
    assert block_specs["attention"]["out"]["kernel"] == PartitionSpec(None, "tensor", None, None)
    assert block_specs["expand"]["kernel"] == PartitionSpec(None, None, "tensor")
    assert block_specs["expand"]["bias"] == PartitionSpec(None, "tensor")
    assert block_specs["contract"]["kernel"] == PartitionSpec(None, "tensor", None)
    assert specs["embed"]["embedding"] == block_specs["contract"]["bias"] == PartitionSpec()


@SLOW
def test_initial_weights_have_the_documented_scales():
    config = LongNetConfig(num_layers=8, features=64, num_heads=4, vocab_size=500, pattern=ONE_BRANCH, use_bias=True)
    p = nnx.to_pure_dict(nnx.state(LongNetDecoder(config, rngs=nnx.Rngs(0)), nnx.Param))
    b = p["blocks"]
    spread = {"query": b["attention"]["query"], "out": b["attention"]["out"], "expand": b["expand"]}
    spread = {name: float(np.std(x["kernel"])) for name, x in {**spread, "contract": b["contract"]}.items()}
    reference = {"query": 1 / 8, "out": 1 / 8 / 4, "expand": 1 / 8, "contract": 1 / 16 / 4}
    assert all(abs(spread[name] / reference[name] - 1) < 0.03 for name in reference), spread
    assert abs(float(np.std(p["embed"]["embedding"])) * 8 - 1) < 0.03
    assert len(np.unique(b["expand"]["kernel"])) > 0.9 * b["expand"]["kernel"].size  # layers differ
    for name in ("attention_norm", "feed_forward_norm", "hidden_norm"):
        assert (b[name]["scale"] == 1).all() and not b[name]["bias"].any()
    assert not b["expand"]["bias"].any()


def test_backward_pass_does_not_recompute_the_attention(monkeypatch):
    ring = rj.Ring(ring_mesh(2), strategy="ring")
    config = config_of(pattern=rj.DilationPattern((LENGTH,), (1,)))  # one hop forward
    model, shapes = functional(LongNetEncoder, config, ring)
    tokens = jax.ShapeDtypeStruct(
        TOKENS.shape, jnp.int32, sharding=NamedSharding(ring.mesh, PartitionSpec(None, "ring"))
    )

    def hops() -> int:
        gradient = jax.jit(jax.grad(lambda p, tokens: model(p)(tokens).sum()))
        return gradient.lower(shapes, tokens).as_text().count("collective_permute")

    kept = hops()
    monkeypatch.setattr(block, "KEEP_ATTENTION", jax.checkpoint_policies.nothing_saveable)
    assert hops() == kept + 1


def test_remat_saves_only_the_stream_and_the_attention_output():
    def kept_bytes(**changes) -> int:
        model, shapes = functional(LongNetDecoder, config_of(**changes))
        _, pull = jax.eval_shape(lambda p: jax.vjp(lambda p: model(p)(TOKENS), p), shapes)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    row = BATCH * LENGTH * 4 * LAYERS  # bytes of one feature of each token in each layer
    parameters = sum(x.size * 4 for x in jax.tree.leaves(functional(LongNetDecoder, config_of())[1]))
    kept = FEATURES + HEADS * DIM + HEADS  # the stream, and out and lse of the attention
    few = kept_bytes()
    assert few <= parameters + row * kept + 4 * row * FEATURES  # the last is for embedding, last norm and logits
    assert kept_bytes(remat=False) > 3 * few


def test_scanned_blocks_are_compiled_once():
    def size(num_layers, scan_layers):
        model, shapes = functional(LongNetDecoder, config_of(num_layers=num_layers, scan_layers=scan_layers))
        return len(jax.jit(lambda p: model(p)(TOKENS)).lower(shapes).as_text())

    assert size(4, True) < 1.02 * size(2, True)
    assert size(4, False) > 1.05 * size(2, False)  # some versions of jax write a function and call it four times


def test_targets_do_not_cross_document_boundaries():
    tokens, ids = np.arange(1, 13).reshape(1, 12), np.array([[0, 0, 0, 4, 4, 0, 0, -1, -1, 2, 2, 2]])
    targets, weights = next_token_targets(tokens, ids, seq_len=11)
    assert targets.tolist() == [[2, 3, 0, 5, 0, 7, 0, 0, 0, 11, 0, 0]]
    assert weights.tolist() == [[1, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0]]
    targets, weights = next_token_targets(tokens)
    assert targets.tolist() == [[*range(2, 13), 0]] and weights.tolist() == [[1] * 11 + [0]]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_loss_in_any_layout_equals_a_loop_over_documents(layout):
    logits, ring = random(BATCH, LENGTH, VOCABULARY), rj.Ring(ring_mesh(4), layout=layout)
    reference, count = 0.0, 0
    for b in range(BATCH):
        for document in set(IDS[b].tolist()) - {-1}:
            at = np.flatnonzero(IDS[b] == document)
            for p in at[:-1]:
                scores = logits[b, p].astype(np.float64)
                reference += math.log(np.exp(scores).sum()) - scores[TOKENS[b, p + 1]]
                count += 1
    logits[IDS < 0] = np.nan  # values in padding do not matter
    given = [stored(ring, x) for x in (logits, *next_token_targets(TOKENS, IDS))]
    total, weight = jax.jit(token_loss)(*given)
    assert abs(float(total) / reference - 1) < 1e-6 and float(weight) == count
    slope = jax.jit(jax.grad(lambda logits, *rest: token_loss(logits, *rest)[0]))(*given)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("kind", ["tokens", pytest.param("vectors", marks=SLOW), pytest.param("stream", marks=SLOW)])
def test_encoder_equals_its_definition(kind):
    widths = {"tokens": {}, "vectors": {"vocab_size": None, "input_features": 6}, "stream": {"vocab_size": None}}
    model, shapes = functional(LongNetEncoder, config_of(**widths[kind]))
    p = drawn(shapes)
    inputs = {"tokens": TOKENS, "vectors": random(BATCH, LENGTH, 6), "stream": random(BATCH, LENGTH, FEATURES)}[kind]
    got = COMPILE(lambda p, x: model(p)(x, seq_len=40))(p, inputs)
    x = p["embed"]["embedding"][inputs] if kind == "tokens" else inputs
    x = linear(p["embed"], x) if kind == "vectors" else x
    reference = COMPILE(lambda p, x: definition(p, x, ONE_BRANCH, is_causal=False, seq_len=40))(p, x)
    assert error(got[:, :40], reference[:, :40]) <= LIMIT


@SLOW
def test_pooled_encoder_on_a_ring_equals_one_device():
    config, ring = config_of(pattern=TWO_BRANCHES), rj.Ring(ring_mesh(4), layout="zigzag")
    (model, shapes), (on_ring, _) = functional(LongNetEncoder, config), functional(LongNetEncoder, config, ring)
    p, masks = drawn(shapes), {"seq_len": 44}
    reference = np.asarray(COMPILE(lambda p, x, ids: model(p)(x, segment_ids=ids, **masks))(p, TOKENS, IDS))
    is_real = (IDS >= 0) & (np.arange(LENGTH) < 44)
    reference = np.stack([x[real].mean(axis=0) for x, real in zip(reference, is_real, strict=True)])
    given = stored(ring, TOKENS), stored(ring, IDS, fill=-1)
    got = COMPILE(lambda p, x, ids: on_ring(p)(x, segment_ids=ids, pool=True, **masks))(p, *given)
    assert error(got, reference) <= LIMIT


@SLOW
def test_no_device_gathers_the_residual_stream():
    ring = rj.Ring(mesh_of({"data": 2, "ring": 4}), layout="zigzag", batch_axis="data", strategy="ring")
    model, shapes = functional(LongNetDecoder, config_of(), ring)
    call = with_gradient(lambda p, tokens: model(p)(tokens))
    program = call.lower(drawn(shapes), *(stored(ring, x) for x in (TOKENS, *next_token_targets(TOKENS)))).compile()
    assert "all-gather" not in program.as_text() and "all-to-all" not in program.as_text()


def test_logits_and_parameters_are_float32_in_any_compute_dtype():
    for dtype in (jnp.bfloat16, jnp.float32, None):
        model, shapes = functional(LongNetDecoder, config_of(dtype=dtype))
        with jax.numpy_dtype_promotion("standard"):  # the layer norm of Flax needs it
            logits = jax.eval_shape(lambda p: model(p)(TOKENS), shapes)  # noqa: B023
            stream = jax.eval_shape(lambda p: model(p).features(jnp.zeros((1, 8, FEATURES), dtype), None), shapes)  # noqa: B023
        assert logits.dtype == jnp.float32 and logits.shape == (BATCH, LENGTH, VOCABULARY)
        assert stream.dtype == (jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(shapes))


def test_presets_have_the_documented_sizes_and_accept_changes():
    sizes = [getattr(LongNetConfig, name)(vocab_size=9) for name in ("tiny", "small", "base", "large")]
    assert [(c.num_layers, c.features, c.num_heads) for c in sizes] == [
        (2, 64, 4),
        (6, 512, 8),
        (12, 768, 12),
        (24, 1024, 16),
    ]
    assert LongNetConfig.base(num_layers=3).num_layers == 3
    assert hash(sizes[0]) == hash(LongNetConfig.tiny(vocab_size=9)) and sizes[0] == LongNetConfig.tiny(vocab_size=9)


def make(kind=LongNetDecoder, **changes):
    return nnx.eval_shape(lambda: kind(config_of(**changes), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: config_of(num_kv_heads=3), "`num_heads` must be a multiple of `num_kv_heads`, got 4 and 3"),
        (lambda: config_of(features=18), "`features` must be a multiple of `num_heads` unless .* got 18 and 4"),
        (lambda: config_of(positions="sine"), "`positions` must be None or one of .* got 'sine'"),
        (lambda: config_of(pattern=3), "`pattern` must be a DilationPattern, got int"),
        (lambda: config_of(remat=1), "`remat` must be a bool, got 1"),
        (lambda: config_of(norm_epsilon=0), "`norm_epsilon` must be a finite number above 0, got 0"),
        (lambda: config_of(num_layers=0), "`num_layers` must be .* got 0"),
        (lambda: make(vocab_size=None), "`vocab_size` must be given for a decoder, got None"),
        (
            lambda: make(LongNetEncoder, input_features=3),
            "only one of `vocab_size` and `input_features` .* got 11 and 3",
        ),
        (lambda: make(LongNetEncoder, positions="xpos"), "`is_causal` must be True for `positions=.xpos.`"),
        (lambda: make().extend(TOKENS, ()), "`caches` must be 2 caches, one per block, got 0"),
        (lambda: make().generate(TOKENS[0], 3), r"`prompt` must have the shape \(batch, length\), got \(48,\)"),
        (lambda: make().generate(TOKENS, 3, lengths=np.array([0, 3])), r"`lengths` must be at least 1 .* got \[0, 3\]"),
        (lambda: make().generate(TOKENS, 3, max_len=20), "`max_len` must be .* 48.* got 20"),
        (lambda: next_token_targets(TOKENS[0]), r"`tokens` must be integers of shape .* got int32 of \(48,\)"),
        (lambda: next_token_targets(TOKENS, IDS[:1]), r"`segment_ids` must be integers of shape \(2, 48\)"),
        (lambda: next_token_targets(TOKENS, seq_len=49), "`seq_len` must be at most the length 48 of `tokens`, got 49"),
        (lambda: token_loss(jnp.ones((2, 3, 4)), TOKENS, TOKENS), r"`targets` and `weights` must have .* \(2, 3, 4\)"),
    ],
)
def test_invalid_arguments_raise_and_name_the_argument(call, text):
    with pytest.raises(ValueError, match=text):
        call()
