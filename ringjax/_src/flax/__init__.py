"""Flax layers, positional encodings and the `attention_fn` adapter."""
