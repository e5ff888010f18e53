"""Flax layers and what they share: projections, positional encodings, the `attention_fn` adapter."""
