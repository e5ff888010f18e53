"""The slide encoder gives the embeddings and gradients of Prov-GigaPath for slides and batches of any length."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torchscale_reference as reference
from cases import QUICK, error
from flax import nnx
from jax.sharding import AxisType, Mesh

import ringjax as rj
from ringjax.models import LongNetConfig, SlideEncoder, slide, slide_inputs

WEIGHTS = reference.gigapath_weights()
COMPILE = functools.partial(jax.jit, compiler_options=QUICK)
SEGMENTS, RATES = (32, 96, 256), (1, 2, 16)  # several segments in short slides


def torchscale_pattern(segment_lengths=SEGMENTS, rates=RATES) -> rj.DilationPattern:
    return rj.DilationPattern(segment_lengths, rates, offsets="block", mixing="detached", padding="zeros")


def slide_of(length, width=24, seed=1, dtype=np.float64):
    rng = np.random.default_rng([seed, length])
    return rng.standard_normal((length, width)).astype(dtype), rng.integers(0, 256_000, (length, 2))


@contextlib.contextmanager
def float64():
    """Enables float64, and the promotions that the norms of Flax need then."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def load(weights, dtype, **options) -> SlideEncoder:
    return SlideEncoder.from_gigapath(weights, dtype=dtype, param_dtype=dtype, **options)


def errors_in_float64(weights, length, *, pattern=None, rows_at_once=1024, **options):
    """Returns the errors of the embedding and of the gradients of tiles and weights."""
    tiles, coordinates = slide_of(length, weights["patch_embed.proj.weight"].shape[1])
    branches = None if pattern is None else (pattern.segment_lengths, pattern.dilation_rates)
    cotangent = np.random.default_rng(0).standard_normal(weights["norm.bias"].shape[0])

    def with_gradients(encode):
        def loss(parameters, tiles):
            embedding = encode(parameters, tiles)
            return jnp.tensordot(embedding, cotangent, axes=1).sum(), embedding

        return COMPILE(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    with float64():
        exact = {name: jnp.asarray(x, jnp.float64) for name, x in weights.items()}
        theirs = with_gradients(lambda w, x: reference.gigapath(w, x, coordinates, options=branches, **options))
        (_, expected), (weight_gradients, tile_gradients) = theirs(exact, tiles)
        encoder = load(weights, np.float64, pattern=pattern, rows_at_once=rows_at_once)
        graph, parameters = nnx.split(encoder)

        def encode(parameters, tiles):
            embedding = nnx.merge(graph, parameters)(tiles[None], coordinates[None], **options)
            return embedding[..., 0, :]

        (_, embedding), (gradients, ours) = with_gradients(encode)(parameters, tiles)
        # conversion only permutes, so gradients are converted like weights
        converted = load(jax.tree.map(np.asarray, weight_gradients), np.float64, pattern=pattern)
        each = jax.tree.map(error, *(nnx.to_pure_dict(x) for x in (gradients, nnx.split(converted)[1])))
    return [error(embedding, expected), error(ours, tile_gradients), *jax.tree.leaves(each)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (1, {}),
        (14, {"pool": "mean"}),
        (100, {"all_layers": True}),
        (777, {}),
        (777, {"pool": "mean", "all_layers": True}),
    ],
)
def test_embedding_and_gradients_are_those_of_gigapath(length, options):
    assert max(errors_in_float64(WEIGHTS, length, **options)) <= 1e-9


def test_embeddings_of_short_slides_are_those_of_gigapath():
    """Lengths in one batch, so that one program computes all of them."""
    lengths = np.array([1, 14, 100, 777])
    tiles, coordinates = batch_of(lengths, fill=0.0)
    with float64():
        encoder = load(WEIGHTS, np.float64)
        found = COMPILE(functools.partial(encoder, all_layers=True))(tiles.astype(np.float64), coordinates, lengths)
        assert found.dtype == np.float64
    for i, length in enumerate(lengths):
        inputs = tiles[i, :length], coordinates[i, :length]
        assert error(found[:, i], expected_embedding(WEIGHTS, *inputs, all_layers=True)) <= 1e-9


@pytest.mark.parametrize("length", [pytest.param(99, marks=pytest.mark.slow), 150])
def test_several_segments_are_padded_as_in_torchscale(length):
    options = {"pattern": torchscale_pattern(), "rows_at_once": 64}
    assert max(errors_in_float64(WEIGHTS, length, **options, pool="mean", all_layers=True)) <= 1e-9


@functools.cache
def full_size(num_layers):
    return reference.gigapath_weights(num_layers, features=768, hidden=3072, input_features=1536)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "pool"), [(1, "mean"), (14, "cls"), (100, "mean"), (777, "cls"), (1500, "mean"), (5000, "cls")]
)
def test_gradients_are_those_of_gigapath_at_full_width(length, pool):
    assert max(errors_in_float64(full_size(2), length, pool=pool)) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("length", [6000])
def test_gradients_are_those_of_gigapath_beyond_a_segment(length):
    assert max(errors_in_float64(full_size(2), length)) <= 1e-9


def expected_embedding(weights, tiles, coordinates, **options):
    with float64():
        exact = {name: jnp.asarray(x, jnp.float64) for name, x in weights.items()}
        encode = COMPILE(lambda w, x: reference.gigapath(w, x, coordinates, **options))
        return np.asarray(encode(exact, np.asarray(tiles, np.float64)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (1, {}),
        (14, {"pool": "mean"}),
        (100, {"all_layers": True}),
        (777, {}),
        (1500, {"pool": "mean"}),
        (5000, {"all_layers": True}),
        (6000, {"pool": "mean"}),
    ],
)
def test_float32_embeddings_are_those_of_gigapath_at_full_depth(length, options):
    weights = full_size(12)
    tiles, coordinates = slide_of(length, 1536, dtype=np.float32)
    found = load(weights, np.float32)(tiles[None], coordinates[None], **options)
    expected = expected_embedding(weights, tiles, coordinates, **options)
    assert error(np.squeeze(found, axis=-2), expected) <= 2e-5


@pytest.mark.slow
def test_twenty_thousand_tiles_give_the_embedding_of_gigapath():
    weights = full_size(2)
    tiles, coordinates = slide_of(20_000, 1536, dtype=np.float32)
    expected = expected_embedding(weights, tiles, coordinates)
    with float64():
        found = load(weights, np.float64)(tiles[None].astype(np.float64), coordinates[None])[0]
    assert error(found, expected) <= 1e-9
    assert error(load(weights, np.float32)(tiles[None], coordinates[None])[0], expected) <= 2e-5


def small_encoder(**options) -> SlideEncoder:
    return load(WEIGHTS, np.float32, pattern=torchscale_pattern((32, 256), (1, 4)), **options)


def batch_of(lengths, fill=np.nan):
    """Returns a padded batch of slides."""
    tiles = np.full((len(lengths), max(lengths), 24), fill, np.float32)
    coordinates = np.full((len(lengths), max(lengths), 2), -7, np.int32)
    for i, length in enumerate(lengths):
        tiles[i, :length], coordinates[i, :length] = slide_of(length)
    return tiles, coordinates


SHORT, LONG = torchscale_pattern((32, 256), (1, 4)), None  # None is the pattern of GigaPath


@pytest.mark.parametrize(
    ("pool", "lengths", "pattern"),
    [
        ("mean", [1, 60, 150, 255], SHORT),
        pytest.param("cls", [1, 60, 150, 255], SHORT, marks=pytest.mark.slow),
        pytest.param("mean", [300, 1100, 2300, 4000], LONG, marks=pytest.mark.slow),
    ],
)
def test_a_slide_gives_the_same_outputs_in_a_batch_and_alone(pool, lengths, pattern):
    lengths = np.array(lengths)
    tiles, coordinates = batch_of(lengths)
    encoder = load(WEIGHTS, np.float32, pattern=pattern)
    encode = functools.partial(encoder, pool=pool, all_layers=True, return_tiles=True)
    together = encode(tiles, coordinates, lengths)
    for i, length in enumerate(lengths):
        alone = encode(tiles[i : i + 1, :length], coordinates[i : i + 1, :length])
        assert error(together[0][:, i], alone[0][:, 0]) <= 1e-6
        assert error(together[1][i, :length], alone[1][0]) <= 1e-6
        assert not np.any(together[1][i, length:])


def test_a_cohort_shares_a_few_programs():
    encoder = small_encoder()
    before = slide._encode._cache_size()
    for length in (3, 17, 100, 255):
        tiles, coordinates = slide_of(length, dtype=np.float32)
        encoder(tiles[None], coordinates[None])
    assert slide._encode._cache_size() - before <= 1
    lengths = np.random.default_rng(0).integers(500, 50_000, 1000) + 1
    buckets = [slide_inputs.bucket_length(int(n)) for n in lengths]
    assert len(set(buckets)) <= 22
    assert all(
        n <= bucket <= max(512, 2 * n) and bucket <= max(2048, 1.25 * n)
        for n, bucket in zip(lengths, buckets, strict=True)
    )


def arrays_of(jaxpr):
    """Yields the shapes of all arrays of a program and of the programs inside it."""
    for variable in (*jaxpr.constvars, *jaxpr.invars):
        yield variable.aval
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from arrays_of(getattr(value, "jaxpr", value))


def test_no_array_has_a_row_per_place_of_the_grid_or_the_square_of_the_length():
    encoder, length = small_encoder(), 99_999
    shapes = {"tiles": (1, length, 24), "coordinates": (1, length, 2)}
    arguments = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    traced = jax.make_jaxpr(encoder)(**arguments)
    largest = max(getattr(x, "size", 0) for x in arrays_of(traced.jaxpr))
    rows = slide_inputs.bucket_length(length + 1)
    assert rows * 64 <= largest <= rows * 96 * 2
    assert max(x.size for x in traced.consts) <= 1000 * 32


def test_bfloat16_is_close_to_float32():
    lengths = np.array([60, 200])
    tiles, coordinates = batch_of(lengths)
    expected = COMPILE(functools.partial(small_encoder(), pool="mean"))(tiles, coordinates, lengths)
    with jax.numpy_dtype_promotion("standard"):
        encoder = SlideEncoder.from_gigapath(WEIGHTS, dtype=jnp.bfloat16, pattern=torchscale_pattern((32, 256), (1, 4)))
        found = COMPILE(functools.partial(encoder, pool="mean"))(tiles, coordinates, lengths)
    assert encoder.cls_token.dtype == found.dtype == np.float32
    assert np.linalg.norm(found - expected) <= 0.05 * np.linalg.norm(expected)


def test_config_of_gigapath_has_its_sizes():
    config = LongNetConfig.gigapath()
    assert (config.num_layers, config.features, config.num_heads, config.input_features) == (12, 768, 16, 1536)
    assert config.pattern == torchscale_pattern(reference.GIGAPATH_SEGMENTS, reference.GIGAPATH_RATES)
    assert (config.dropout_rate, config.drop_path_rate, config.norm_epsilon) == (0.25, 0.1, 1e-5)


def test_tile_outputs_without_pooling_are_those_of_the_encoder():
    encoder = small_encoder()
    tiles, coordinates = slide_of(40, dtype=np.float32)
    embedding, outputs = encoder(tiles[None], coordinates[None], pool="mean", return_tiles=True)
    assert outputs.shape == (1, 40, 64)
    # the norm of the mean is not the mean of the norm, so only rows are compared
    alone, one = encoder(tiles[None, :1], coordinates[None, :1], pool="mean", return_tiles=True)
    assert error(alone, one[:, 0]) <= 1e-6 and error(embedding, outputs.mean(1)) > 1e-3


MESH = {"contiguous": (4, 1), "zigzag": (2, 2)}


@pytest.mark.parametrize(
    ("layout", "strategy", "grad", "axis_type"),
    [
        ("zigzag", "ring", False, AxisType.Explicit),
        pytest.param("contiguous", "all_to_all", True, AxisType.Auto, marks=pytest.mark.slow),
        pytest.param("zigzag", "all_to_all", False, AxisType.Auto, marks=pytest.mark.slow),
        pytest.param("contiguous", "all_gather", True, AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param("zigzag", "ring", True, AxisType.Auto, marks=pytest.mark.slow),
    ],
)
def test_a_ring_gives_the_embeddings_of_one_device(layout, strategy, grad, axis_type):
    lengths = np.array([300, 90])
    tiles, coordinates = batch_of(lengths, fill=0.0)
    size, batch = MESH[layout]
    devices = np.array(jax.devices()[: size * batch]).reshape(batch, size)
    mesh = Mesh(devices, ("batch", "ring"), axis_types=(axis_type, axis_type))
    ring = rj.Ring(mesh, layout=layout, strategy=strategy, batch_axis="batch")

    def outputs(ring):
        encoder = small_encoder(ring=ring)
        graph, parameters = nnx.split(encoder)

        def encode(parameters, tiles):
            options = {"pool": "mean", "return_tiles": True}
            return nnx.merge(graph, parameters)(tiles, coordinates, lengths, **options)

        if not grad:
            return COMPILE(encode)(parameters, tiles)
        loss = lambda parameters, tiles: sum((x * x).sum() for x in encode(parameters, tiles))  # noqa: E731
        return COMPILE(jax.grad(loss))(parameters, tiles)

    one, many = (nnx.to_pure_dict(x) if grad else x for x in (outputs(None), outputs(ring)))
    assert max(jax.tree.leaves(jax.tree.map(error, many, one))) <= (2e-5 if grad else 2e-6)


def test_attention_inputs_have_the_log_sum_exp_of_all_branches():
    encoder, lengths = small_encoder(), np.array([30, 12])
    tiles, coordinates = batch_of(lengths)
    inputs = COMPILE(functools.partial(encoder.attention_inputs, layer=1))(tiles, coordinates, lengths)
    query, key, lse = (np.asarray(x) for x in inputs)
    assert query.shape == key.shape == (2, 31, 16, 4) and lse.shape == (2, 31, 16)
    assert error(lse[1, :13], expected_lse(query[1, :13], key[1, :13], encoder.config.pattern)) <= 1e-5
    assert np.all(lse[1, 13:] == -np.inf)


def expected_lse(query, key, pattern):
    """Returns the log-sum-exp of all branches and their zero keys."""
    length, heads, dim = query.shape
    total = np.zeros((length, heads))
    for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        assert w >= length
        padded = -(-length // r) * r
        for h in range(heads):
            rows = np.arange(h // -(-heads // r), padded, r)
            real = rows[rows < length]
            scores = np.exp(query[real, h] @ key[real, h].T / np.sqrt(dim))
            total[real, h] += scores.sum(1) + len(rows) - len(real)
    return np.log(total)


def test_inputs_that_are_traced_and_outside_the_grid_give_nan():
    encoder = small_encoder()
    tiles, coordinates = slide_of(20, dtype=np.float32)
    encode = COMPILE(encoder)
    assert np.isfinite(encode(tiles[None], coordinates[None])).all()
    assert np.isnan(encode(tiles[None], coordinates[None] + 200_000)).all()


def test_misplaced_rows_warn_once():
    slide_inputs._warn_once.cache_clear()
    options = {"offsets": "block", "mixing": "detached", "padding": "zeros"}
    encoder = load(WEIGHTS, np.float32, pattern=rj.DilationPattern((64, 100), (1, 8), **options))
    tiles, coordinates = slide_of(100, dtype=np.float32)
    encoder(tiles[None, :99], coordinates[None, :99])  # one segment with the CLS token
    with pytest.warns(UserWarning, match="branch 100/8 .* slides with 100 tiles or more differ") as caught:
        encoder(tiles[None], coordinates[None])
    assert len(caught) == 1
    encoder(tiles[None], coordinates[None])


GOOD = dict(zip(("tiles", "coordinates"), batch_of([5, 5]), strict=True))
NAN_TILES = np.where(np.arange(24) == 3, np.nan, GOOD["tiles"]).astype(np.float32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tiles": GOOD["tiles"][..., :20]}, r"`tiles` must have 24 features in the last axis, got shape \(2, 5, 20\)"),
        ({"tiles": GOOD["tiles"][0]}, r"`tiles` must have rank 3 \(slides, tiles, features\)"),
        ({"tiles": GOOD["coordinates"]}, "`tiles` must be floating point, got int32"),
        ({"tiles": NAN_TILES}, "`tiles` must be finite, got NaN or infinite features in slide 0"),
        ({"tiles": jnp.asarray(NAN_TILES)}, "`tiles` must be finite"),
        ({"coordinates": None}, "`coordinates` must be an array, got NoneType"),
        (
            {"coordinates": GOOD["coordinates"][:, :4]},
            r"`coordinates` must have shape .* = \(2, 5, 2\), got \(2, 4, 2\)",
        ),
        (
            {"coordinates": GOOD["coordinates"] * 0 + 256_000},
            "`coordinates` .* below 1000 times `tile_size` 256, .* 256000",
        ),
        ({"coordinates": GOOD["coordinates"] * 0 - 1}, "`coordinates` .* got -1 to -1 in slide 0"),
        ({"coordinates": GOOD["coordinates"] * np.nan}, "`coordinates` .* got nan to nan"),
        ({"lengths": [5]}, r"`lengths` must be integers of shape \(2,\)"),
        ({"lengths": [5, 6]}, r"`lengths` must be between 1 and 5, got \[5, 6\]"),
        ({"lengths": [0, 5]}, "`lengths` must be between 1 and 5"),
        ({"pool": "max"}, "`pool` must be one of"),
        ({"all_layers": 1}, "`all_layers` must be a bool"),
        ({"return_tiles": None}, "`return_tiles` must be a bool"),
        ({"tile_size": 0}, "`tile_size` must be"),
        ({"dropout_rng": 3}, "`dropout_rng` must be"),
    ],
)
def test_bad_inputs_raise_one_line(changes, text):
    with pytest.raises(ValueError, match=text) as caught:
        small_encoder()(**{**GOOD, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layer", [-1, 2, None])
def test_layers_out_of_range_raise(layer):
    with pytest.raises(ValueError, match="`layer` must be"):
        small_encoder().attention_inputs(**GOOD, layer=layer)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input_features": None}, "`input_features` must be given"),
        ({"vocab_size": 5}, "`vocab_size` must be None"),
        ({"positions": "rotary"}, "`positions` must be None"),
        ({"features": 18, "num_heads": 2}, "`features` must be a multiple of 4"),
    ],
)
def test_bad_configs_raise(changes, text):
    sizes = {"input_features": 8, "positions": None, **changes}
    with pytest.raises(ValueError, match=text):
        SlideEncoder(LongNetConfig.tiny(**sizes), rngs=nnx.Rngs(0))
