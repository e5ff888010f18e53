"""Attention maps of slide encoders equal dense attention, and are drawn where the tiles are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, error, ring_mesh
from flax import nnx
from test_attention_rows import expected_rows

import ringjax as rj
from ringjax.models import LongNetConfig, SlideEncoder, save_heatmap

LENGTHS = (50, 33)
PATTERN = rj.DilationPattern((16, 40, 64), (1, 2, 3), offsets="block", mixing="detached", padding="zeros")


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly():
    """Compiling is most of what these tests cost, and methods of models take no compiler options."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def encoder_on(ring: rj.Ring | None = None) -> SlideEncoder:
    config = LongNetConfig.tiny(
        features=32, input_features=12, positions=None, use_bias=True, pattern=PATTERN, dtype="float32"
    )
    return SlideEncoder(config, ring=ring, rngs=nnx.Rngs(0))


@functools.cache
def slides() -> dict:
    rng = np.random.default_rng(0)
    tiles = 2 * rng.standard_normal((2, 50, 12)).astype(np.float32)
    tiles[1, LENGTHS[1] :] = np.nan  # padding
    return {"tiles": tiles, "coordinates": 256 * rng.integers(0, 99, (2, 50, 2)), "lengths": list(LENGTHS)}


@functools.cache
def map_of_all_tiles():
    return jax.tree.map(np.asarray, encoder_on().attention_map(**slides(), queries=np.arange(50)))


@functools.cache
def map_of_cls_token():
    return jax.tree.map(np.asarray, encoder_on().attention_map(**slides()))


def dense_weights(slide: int) -> np.ndarray:
    """Returns the weights (layers, T, N, T + 1) of all rows of a slide in all layers; the last key is the zero keys."""
    length = LENGTHS[slide] + 1
    case = Case(
        length=length,
        batch=1,
        kv_heads=4,
        head_dim=8,
        segment_lengths=PATTERN.segment_lengths,
        dilation_rates=PATTERN.dilation_rates,
        rule="block",
    )
    layers = []
    for layer in range(2):
        inputs = encoder_on().attention_inputs(**slides(), layer=layer)
        query, key, _ = (np.asarray(x)[slide : slide + 1, :length] for x in inputs)
        layers.append(expected_rows(case, query, key, zero_keys=True)[0][0])
    return np.stack(layers)


@pytest.mark.parametrize("slide", [0, 1])
def test_weights_equal_dense_attention_with_zero_keys(slide):
    num, expected = LENGTHS[slide], dense_weights(slide).transpose(1, 0, 2, 3)  # (T, layers, N, T + 1)
    for found, rows in ((map_of_cls_token(), expected[:1]), (map_of_all_tiles(), expected[1:])):
        assert error(found.tiles[slide, : len(rows), ..., :num], rows[..., 1:-1]) < 2e-6
        assert error(found.cls_token[slide, : len(rows)], rows[..., 0]) < 2e-6
        assert error(found.zero_keys[slide, : len(rows)], rows[..., -1]) < 2e-6
        assert not found.tiles[slide, ..., num:].any()
    assert (expected[..., -1] > 0.01).any()


def test_all_weights_of_a_query_sum_to_one():
    found = map_of_all_tiles()
    sums = found.tiles.sum(-1) + found.cls_token + found.zero_keys
    assert np.abs(sums[0] - 1).max() < 1e-5
    assert np.abs(sums[1, : LENGTHS[1]] - 1).max() < 1e-5
    assert not sums[1, LENGTHS[1] :].any()  # padding


def test_rollout_is_the_product_of_all_layers():
    for pool in ("cls", "mean"):
        found = np.asarray(encoder_on().attention_rollout(**slides(), pool=pool))
        for slide, num in enumerate(LENGTHS):
            one, two = dense_weights(slide)[..., :-1].mean(axis=2)  # layers of (T, T), mean of heads
            identity = np.eye(num + 1)
            product = (two + identity) / 2 @ (one + identity) / 2
            expected = product[0] if pool == "cls" else product[1:].mean(axis=0)
            assert error(found[slide, :num] * num, expected[1:] * num) < 5e-6
            assert not found[slide, num:].any()


def test_relative_rollout_is_one_for_equal_scores():
    encoder = encoder_on()
    shares, relative = (np.asarray(encoder.attention_rollout(**slides(), relative=x)) for x in (False, True))
    graph, parameters = nnx.split(encoder)
    flat = dict(nnx.to_flat_state(parameters))
    for path, variable in flat.items():
        if "query" in path:
            flat[path] = variable.replace(0 * variable[...])
    equal = nnx.merge(graph, nnx.from_flat_state(flat))
    expected = np.asarray(equal.attention_rollout(**slides()))
    assert error(relative * np.where(expected > 0, expected, 1), shares) < 1e-6
    assert np.ptp(relative[0]) > 0.05
    ones = np.asarray(equal.attention_rollout(**slides(), relative=True))
    assert error(ones, np.arange(50) < np.array(LENGTHS)[:, None]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_ring_gives_the_same_maps(layout):
    encoder = encoder_on(rj.Ring(ring_mesh(2), layout=layout))
    found = encoder.attention_map(**slides())
    for x, expected in zip(found, map_of_cls_token(), strict=True):
        assert error(x, expected) < 2e-6
    shares = encoder.attention_rollout(**slides())
    assert error(50 * shares, 50 * encoder_on().attention_rollout(**slides())) < 2e-6


def test_bad_queries_are_refused():
    for queries in ([50], [-1], [0.5], 3, []):
        with pytest.raises(ValueError, match="`queries` must"):
            encoder_on().attention_map(**slides(), queries=queries)
    with pytest.raises(ValueError, match="`pool` must be one of"):
        encoder_on().attention_rollout(**slides(), pool="max")


def test_heatmap_is_bright_where_weights_are_large(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "map.png"
    cells = np.stack(np.meshgrid(np.arange(8), np.arange(6)), -1).reshape(-1, 2)
    weights = np.where((cells[:, 0] >= 4) & (cells[:, 1] < 3), 3.0, 1.0)  # the upper right quarter
    save_heatmap(path, jnp.asarray(weights), 512 * cells, tile_size=512, title="slide")
    pixels = np.round(255 * image.imread(path)[..., :3]).astype(int)
    pixels = pixels[:, : int(0.75 * pixels.shape[1])]  # without the color bar
    bright, dark = (np.argwhere((pixels == color).all(-1)) for color in ((252, 254, 164), (0, 0, 3)))
    assert len(dark) / len(bright) == pytest.approx(3, rel=0.1)
    assert bright[:, 0].max() < np.median(dark[:, 0])  # above the lower half
    assert bright[:, 1].min() > np.quantile(dark[:, 1], 0.4)  # right of the left half


BAD_HEATMAPS = {
    "suffix": ({"path": "map.jpg"}, r"`path` must end in \.png, got 'map\.jpg'"),
    "weights": ({"weights": [1.0, 2.0]}, r"`weights` must have shape \(tiles,\) = \(3,\), got \(2,\)"),
    "NaN": ({"weights": [1.0, np.nan, 2.0]}, "`weights` must be finite, got nan"),
    "words": ({"weights": ["a", "b", "c"]}, "`weights` must be an array of numbers, got"),
    "coordinates": ({"coordinates": np.ones((3, 3))}, r"`coordinates` must have shape \(tiles, 2\), got \(3, 3\)"),
    "infinite": ({"coordinates": np.full((3, 2), np.inf)}, "`coordinates` must be finite, got inf"),
    "large": ({"coordinates": [(0, 0), (0, 1), (0, 1e9)]}, "`coordinates` must extend over at most 10000 tiles"),
    "size": ({"tile_size": 0}, "`tile_size` must be a finite number above 0, got 0"),
}


@pytest.mark.parametrize("name", BAD_HEATMAPS)
def test_bad_heatmap_is_refused(tmp_path, name):
    changes, message = BAD_HEATMAPS[name]
    good = {"path": tmp_path / "map.png", "weights": [1.0, 2.0, 3.0], "coordinates": [(0, 0), (256, 0), (0, 256)]}
    with pytest.raises(ValueError, match=message):
        save_heatmap(**good | changes)
    assert list(tmp_path.iterdir()) == []


def test_equal_and_zero_weights_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for weights in ([1.0, 1.0], [0.0, 0.0]):
        save_heatmap(tmp_path / "map.png", weights, [(0, 0), (256, 256)])
        assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
