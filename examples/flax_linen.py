"""A small causal language model with `ringjax.linen.DilatedSelfAttention`, trained for a few steps.

Each sequence counts by ones, twos or threes, modulo 16, so the model must look back to predict the next number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import ringjax as rj
from ringjax.linen import DilatedSelfAttention

VOCABULARY, LENGTH, FEATURES, HEADS, STEPS = 16, 64, 32, 4, 60
PATTERN = rj.DilationPattern(segment_lengths=(16, 64), dilation_rates=(1, 4))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        dtype = rj.compute_dtype()
        x = nn.Embed(VOCABULARY, FEATURES, dtype=dtype)(tokens)
        attention = DilatedSelfAttention(
            HEADS, PATTERN, num_kv_heads=2, is_causal=True, positions="rotary", dtype=dtype, name="attention"
        )
        x = x + attention(nn.LayerNorm(dtype=dtype)(x))
        x = nn.gelu(nn.Dense(4 * FEATURES, dtype=dtype)(x))
        return nn.Dense(VOCABULARY, dtype=dtype)(x).astype(jnp.float32)


def sequences(key, batch=8):
    start, step = jax.random.randint(key, (2, batch, 1), 1, 4)
    return (start + step * jnp.arange(LENGTH + 1)[None]) % VOCABULARY


def main() -> None:
    model, optimizer = Model(), optax.adam(1e-2)

    @jax.jit
    def start(key):
        parameters = model.init(key, jnp.zeros((1, LENGTH), int))
        return parameters, optimizer.init(parameters)

    @jax.jit
    def train_step(parameters, state, tokens):
        def loss_of(parameters):
            logits = model.apply(parameters, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradient = jax.value_and_grad(loss_of)(parameters)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(parameters, updates), state, loss

    parameters, state = start(jax.random.key(0))
    losses = []
    for i, key in enumerate(jax.random.split(jax.random.key(1), STEPS)):
        parameters, state, loss = train_step(parameters, state, sequences(key))
        losses.append(float(loss))
        if i % 10 == 0 or i == STEPS - 1:
            print(f"step {i:3d}   loss {losses[-1]:.3f}")
    if not losses[-1] < losses[0] / 2:
        raise SystemExit("the loss did not fall by half")


if __name__ == "__main__":
    main()
