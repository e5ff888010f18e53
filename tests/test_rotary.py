"""Rotary positions and xPos equal their definitions."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import error

from ringjax._src.flax.rotary import rotary, xpos


def random(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rotated(x, positions):
    """Applies the definition of rotary positions, with angles in float64."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions, np.float64)[..., None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angles).astype(x.dtype).reshape(1, -1, 1, half) for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    join = np.concatenate if isinstance(x, np.ndarray) else jnp.concatenate
    return join([a * cos - b * sin, a * sin + b * cos], axis=-1)


def test_rotary_equals_its_definition_and_is_relative_at_large_positions():
    x = random(1, 64, 2, 16)
    near = np.arange(64)
    assert error(rotary(x, near), rotated(x.astype(np.float64), near)) <= 1e-6
    far = rotary(x, near + 10_000_000)
    scores = lambda y: jnp.einsum("btnh,bsnh->bnts", y, y, precision="highest")  # noqa: E731
    assert error(scores(far), scores(rotary(x, near))) <= 1e-6
    assert rotary(x.astype(jnp.bfloat16), near).dtype == jnp.bfloat16


def test_xpos_scores_decay_with_the_distance_as_defined():
    q, k = random(1, 64, 2, 16), random(1, 64, 2, 16, seed=1)
    at, zeta = np.arange(64) * 1000, (np.arange(8) / 8 + 0.4) / 1.4
    qx, kx = xpos(q, k, at, length=65_536)
    got = np.einsum("btnh,bsnh->bnts", np.float64(qx), np.float64(kx))
    pair = lambda x: (y := np.asarray(rotated(x.astype(np.float64), at)))[..., :8] + 1j * y[..., 8:]  # noqa: E731
    decay = zeta ** ((at[:, None, None] - at[None, :, None]) / 512)
    wanted = np.einsum("btni,bsni,tsi->bnts", pair(q), pair(k).conj(), decay).real
    causal = np.tril(np.ones((64, 64), bool))
    assert error(got[..., causal], wanted[..., causal]) <= 1e-5
    assert np.isfinite(qx).all() and np.isfinite(kx).all()


def test_xpos_beyond_the_range_of_its_dtype_raises():
    q = np.zeros((1, 16, 2, 4), np.float32)
    with pytest.raises(ValueError, match=r"`length` must be at most 65536 for xPos, .*got 65537"):
        xpos(q, q, np.arange(16), length=65_537)
    with pytest.raises(ValueError, match="`positions` must be from 0 to 15 for xPos, got 1 to 16: increase `length`"):
        xpos(q, q, np.arange(16) + 1, length=16)
    with pytest.raises(ValueError, match="`query` must have the range of float32 for xPos, got float16"):
        xpos(q.astype(np.float16), q.astype(np.float16), np.arange(16), length=16)
    with pytest.raises(
        ValueError, match=r"\(batch, length, heads, even dim\) for rotary positions, got shape \(1, 16, 2, 3\)"
    ):
        rotary(q[..., :3], np.arange(16))
