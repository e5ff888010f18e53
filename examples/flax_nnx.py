"""A small causal language model with `ringjax.nnx.DilatedSelfAttention`, trained for a few steps.

Each sequence counts by ones, twos or threes, modulo 16, so the model must look back to predict the next number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ringjax as rj
from ringjax.nnx import DilatedSelfAttention

VOCABULARY, LENGTH, FEATURES, HEADS, STEPS = 16, 64, 32, 4, 60
PATTERN = rj.DilationPattern(segment_lengths=(16, 64), dilation_rates=(1, 4))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        dtype = rj.compute_dtype()
        self.embed = nnx.Embed(VOCABULARY, FEATURES, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(FEATURES, dtype=dtype, rngs=rngs)
        self.attention = DilatedSelfAttention(
            HEADS, FEATURES, PATTERN, num_kv_heads=2, is_causal=True, positions="rotary", dtype=dtype, rngs=rngs
        )
        self.wide = nnx.Linear(FEATURES, 4 * FEATURES, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(4 * FEATURES, VOCABULARY, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        return self.head(nnx.gelu(self.wide(x))).astype(jnp.float32)


def sequences(key, batch=8):
    start, step = jax.random.randint(key, (2, batch, 1), 1, 4)
    return (start + step * jnp.arange(LENGTH + 1)[None]) % VOCABULARY


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_of(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradient = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradient)
    return loss


def main() -> None:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for i, key in enumerate(jax.random.split(jax.random.key(1), STEPS)):
        losses.append(float(train_step(model, optimizer, sequences(key))))
        if i % 10 == 0 or i == STEPS - 1:
            print(f"step {i:3d}   loss {losses[-1]:.3f}")
    if not losses[-1] < losses[0] / 2:
        raise SystemExit("the loss did not fall by half")


if __name__ == "__main__":
    main()
