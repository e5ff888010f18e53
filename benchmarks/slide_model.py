"""The slide encoder that `slide.py` measures: sizes, random weights with Prov-GigaPath's names, and a slide."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Slide:
    """A slide and the sizes of its encoder."""

    tiles: int = 10_000
    layers: int = 12
    features: int = 768
    heads: int = 16
    hidden: int = 3072
    input_features: int = 1536
    segment_lengths: tuple[int, ...] = (1024, 5792, 32768, 185363, 1048576)
    dilation_rates: tuple[int, ...] = (1, 2, 4, 8, 16)

    @staticmethod
    def from_dict(fields: dict) -> Slide:
        return Slide(**{name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()})

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns tile embeddings (tiles, input_features) and coordinates (tiles, 2), identical in every process."""
        rng = np.random.default_rng(1)
        tiles = rng.standard_normal((self.tiles, self.input_features), np.float32)
        return tiles, rng.integers(0, 256_000, (self.tiles, 2)).astype(np.float32)

    def weights(self) -> dict[str, np.ndarray]:
        """Returns random weights, identical in every process."""
        rng, features = np.random.default_rng(0), self.features
        weights = {"cls_token": rng.standard_normal((1, 1, features), np.float32)}

        def linear(name: str, rows: int, columns: int) -> None:
            weights[f"{name}.weight"] = rng.standard_normal((rows, columns), np.float32) / math.sqrt(columns)
            weights[f"{name}.bias"] = rng.standard_normal(rows, np.float32) / 10

        def norm(name: str, width: int) -> None:
            weights[f"{name}.weight"] = 1 + rng.standard_normal(width, np.float32) / 10
            weights[f"{name}.bias"] = rng.standard_normal(width, np.float32) / 10

        linear("patch_embed.proj", features, self.input_features)
        for i in range(self.layers):
            prefix = f"encoder.layers.{i}."
            for name in ("q", "k", "v", "out"):
                linear(f"{prefix}self_attn.{name}_proj", features, features)
            linear(f"{prefix}ffn.fc1", self.hidden, features)
            linear(f"{prefix}ffn.fc2", features, self.hidden)
            for name in ("self_attn_layer_norm", "final_layer_norm", "self_attn.inner_attn_ln"):
                norm(prefix + name, features)
            norm(f"{prefix}ffn.ffn_layernorm", self.hidden)
        norm("encoder.layer_norm", features)
        norm("norm", features)
        return weights
