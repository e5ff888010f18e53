"""Synthetic slides and random weights, to try everything without patient data and without a license for weights."""

from __future__ import annotations

import numpy as np

from slides.tiles import Slide
from slides.weights import Weights

TILE_SIZE = 256


def synthetic_slide(
    rng: np.random.Generator, num_tiles: int, width: int = 1536, lesion: np.ndarray | None = None, share: float = 0.08
) -> Slide:
    """Returns the tiles of one or two pieces of tissue, scanned column by column.

    Features are noise around the mean of a few tissue types, which cover connected regions.

    Args:
        rng: Random numbers; slides of one cohort use the same generator.
        num_tiles: Number of tiles.
        width: Number of features per tile.
        lesion: A direction (width,) that is added to the features of tiles near a random one, or None.
        share: Fraction of tiles in the lesion.
    """
    cells = _tissue(rng, num_tiles)
    centers = cells[rng.integers(num_tiles, size=4)]
    tissue_type = ((cells[:, None] - centers) ** 2).sum(-1).argmin(1)  # regions closest to each center
    types = np.random.default_rng(0).standard_normal((4, width))  # the same in all slides
    features = 0.5 * types[tissue_type] + rng.standard_normal((num_tiles, width))
    if lesion is not None:
        distance = ((cells - cells[rng.integers(num_tiles)]) ** 2).sum(-1)
        features[np.argsort(distance)[: max(1, round(share * num_tiles))]] += lesion
    return Slide(features.astype(np.float32), cells * TILE_SIZE, float(TILE_SIZE))


def _tissue(rng: np.random.Generator, num_tiles: int) -> np.ndarray:
    """Returns the grid cells (num_tiles, 2) of tissue with a wavy outline, ordered by column and row."""
    side = int(3 * num_tiles**0.5) + 4
    x, y = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    radius = np.full((side, side), np.inf)
    for center in rng.uniform(0.35, 0.65, (2, 2)) * side:
        dx, dy = (x - center[0]) / rng.uniform(0.7, 1.4), (y - center[1]) / rng.uniform(0.7, 1.4)
        angle, waves = np.arctan2(dy, dx), rng.integers(2, 6)
        outline = 1 + 0.15 * np.sin(waves * angle + rng.uniform(0, 6)) + 0.05 * np.sin(11 * angle)
        radius = np.minimum(radius, np.hypot(dx, dy) / outline)
    nearest = np.sort(np.argsort(radius, axis=None, kind="stable")[:num_tiles])
    return np.stack(np.unravel_index(nearest, radius.shape), axis=1)


def random_weights(rng: np.random.Generator, *, layers: int = 12, features: int = 768, width: int = 1536) -> Weights:
    """Returns random weights with the names and shapes of Prov-GigaPath's slide encoder."""
    hidden = 4 * features
    matrices = {f"self_attn.{x}_proj": (features, features) for x in ("q", "k", "v", "out")}
    matrices |= {"ffn.fc1": (hidden, features), "ffn.fc2": (features, hidden)}
    norms = {"self_attn_layer_norm": features, "self_attn.inner_attn_ln": features}
    norms |= {"final_layer_norm": features, "ffn.ffn_layernorm": hidden}
    weights = {"cls_token": rng.standard_normal((1, 1, features)) * 0.02}
    weights |= _linear(rng, "patch_embed.proj", (features, width))
    for layer in range(layers):
        for name, shape in matrices.items():
            weights |= _linear(rng, f"encoder.layers.{layer}.{name}", shape)
        for name, size in norms.items():
            weights |= _norm(f"encoder.layers.{layer}.{name}", size)
    weights |= _norm("encoder.layer_norm", features) | _norm("norm", features)
    return {name: x.astype(np.float32) for name, x in weights.items()}


def _linear(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> Weights:
    kernel = rng.standard_normal(shape, np.float32) * (2 / sum(shape)) ** 0.5
    return {f"{name}.weight": kernel, f"{name}.bias": np.zeros(shape[0], np.float32)}


def _norm(name: str, size: int) -> Weights:
    return {f"{name}.weight": np.ones(size, np.float32), f"{name}.bias": np.zeros(size, np.float32)}
