"""Torchscale's LongNet and Prov-GigaPath's slide encoder in plain JAX, independent of ringjax.

Written from what these packages compute, with their names of the weights. Every segment is padded with zeros to a
multiple of the rate, as in torchscale, and the softmax is over all rows of a padded segment. Memory is that of one
segment of one head. For float64, run under `jax.enable_x64(True)`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GIGAPATH_SEGMENTS, GIGAPATH_RATES = (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16)
UNSELECTED = -1e8  # torchscale's log-sum-exp of rows that a branch does not select


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"].reshape((1,) * (x.ndim - 1) + (-1,))


def norm(w, name, x, epsilon=1e-5):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    shape = (1,) * (x.ndim - 1) + (-1,)
    return x * w[f"{name}.weight"].reshape(shape) + w[f"{name}.bias"].reshape(shape)


@functools.partial(jax.checkpoint, static_argnums=1)
def segment_attention(qkv, is_causal):
    """Attends within one padded segment: q, k, v of shape (rows, dim)."""
    q, k, v = qkv
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    top = lax.stop_gradient(scores.max(-1, keepdims=True))
    total = jnp.exp(scores - top).sum(-1, keepdims=True)
    return jnp.exp(scores - top) / total @ v, (jnp.log(total) + top)[:, 0]


def branch_attention(qkv, segment_length, rate, offset, is_causal):
    """Attends in one branch of one head; `offset` may be traced. Returns (T, dim) and the log-sum-exp (T,)."""
    length, dim = qkv[0].shape
    w = min(segment_length, length)
    num, padded = -(-length // w), -(-w // rate) * rate

    def select(x):
        x = jnp.pad(x, ((0, num * w - length), (0, 0))).reshape(num, w, dim)
        x = jnp.pad(x, ((0, 0), (0, padded - w), (0, 0))).reshape(num, padded // rate, rate, dim)
        return lax.dynamic_index_in_dim(x, offset, axis=2, keepdims=False)

    out, lse = lax.map(lambda each: segment_attention(each, is_causal), tuple(select(x) for x in qkv))
    is_own = (jnp.arange(rate) == offset)[None, None, :, None]
    out = jnp.where(is_own, out[:, :, None], 0).reshape(num, padded, dim)
    lse = jnp.where(is_own[..., 0], lse[:, :, None], UNSELECTED).reshape(num, padded)
    return out[:, :w].reshape(-1, dim)[:length], lse[:, :w].reshape(-1)[:length]


def dilated_attention(q, k, v, segment_lengths, rates, is_causal=False):
    """Computes torchscale's dilated attention of one sequence (T, heads, dim), head by head."""
    heads = q.shape[1]
    offsets = jnp.asarray([[h // -(-heads // r) for r in rates] for h in range(heads)])

    @jax.checkpoint
    def head(each):
        *qkv, offset = each
        branches = [
            branch_attention(qkv, w, r, offset[i], is_causal)
            for i, (w, r) in enumerate(zip(segment_lengths, rates, strict=True))
        ]
        lse = lax.stop_gradient(jnp.stack([lse for _, lse in branches]))  # the weights of branches have no gradient
        weights = jnp.exp(lse - lse.max(0, keepdims=True))
        weights = weights / weights.sum(0, keepdims=True)
        return sum(weight[:, None] * out for weight, (out, _) in zip(weights, branches, strict=True))

    return lax.map(head, (*(jnp.moveaxis(x, 1, 0) for x in (q, k, v)), offsets)).swapaxes(0, 1)


def xpos(x, zeta, is_key):
    """Rotates adjacent dimensions of (T, heads, dim) and scales them with the position."""
    length, _, dim = x.shape
    at = jnp.arange(length)[:, None].astype(x.dtype)
    angle = at * 10_000.0 ** (-jnp.arange(dim // 2) / (dim // 2)).astype(x.dtype)[None]
    scale = zeta[None] ** ((at - length // 2) / 512)
    scale = (1 / scale if is_key else scale)[:, None]
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1) * scale[..., None]
    return rotated.reshape(x.shape)


def layer(w, x, num_heads, segment_lengths, rates, is_causal):
    """Computes one layer of torchscale for one sequence (T, features)."""
    normed = norm(w, "self_attn_layer_norm", x)
    q, k, v = (linear(w, f"self_attn.{n}_proj", normed).reshape(len(x), num_heads, -1) for n in "qkv")
    if "self_attn.xpos.scale" in w:
        zeta = w["self_attn.xpos.scale"]
        q, k = xpos(q, zeta, is_key=False), xpos(k, zeta, is_key=True)
    attended = dilated_attention(q, k, v, segment_lengths, rates, is_causal).reshape(x.shape)
    if "self_attn.inner_attn_ln.weight" in w:
        attended = norm(w, "self_attn.inner_attn_ln", attended)
    x = x + linear(w, "self_attn.out_proj", attended)
    hidden = linear(w, "ffn.fc1", norm(w, "final_layer_norm", x))
    hidden = hidden * (1 + lax.erf(hidden / math.sqrt(2))) / 2
    if "ffn.ffn_layernorm.weight" in w:
        hidden = norm(w, "ffn.ffn_layernorm", hidden)
    return x + linear(w, "ffn.fc2", hidden)


def states(w, prefix, x, num_heads, segment_lengths, rates, is_causal=False):
    """Returns the embeddings (T, features) of one sequence and the outputs of all layers, stacked."""
    first = f"{prefix}layers.0."
    inner = [name.removeprefix(first) for name in w if name.startswith(first)]
    count = sum(name.endswith("fc1.bias") and name.startswith(f"{prefix}layers.") for name in w)
    stacked = {name: jnp.stack([w[f"{prefix}layers.{i}.{name}"] for i in range(count)]) for name in inner}

    def step(x, each):
        x = layer(each, x, num_heads, segment_lengths, rates, is_causal)
        return x, x

    return jnp.concatenate([x[None], lax.scan(jax.checkpoint(step), x, stacked)[1]])


def outputs(w, prefix, x, *options, is_causal=False):
    """Returns the output of the last layer, normalized if there are weights for it."""
    x = states(w, prefix, x, *options, is_causal=is_causal)[-1]
    return norm(w, f"{prefix}layer_norm", x) if f"{prefix}layer_norm.weight" in w else x


def grid_embedding(coordinates, features, tile_size=256):
    grid = np.floor(np.asarray(coordinates, np.float64) / tile_size)
    frequency = 10_000.0 ** (-np.arange(features // 4) / (features // 4))

    def one_axis(index):
        return np.concatenate([np.sin(index[:, None] * frequency), np.cos(index[:, None] * frequency)], axis=1)

    return np.concatenate([one_axis(grid[:, 1]), one_axis(grid[:, 0])], axis=1)


def gigapath(w, tiles, coordinates, *, pool="cls", all_layers=False, num_heads=16, options=None):
    """Returns the embedding of one slide (features,), or (layers + 1, features) with `all_layers`."""
    x = linear(w, "patch_embed.proj", tiles)
    x = x + jnp.asarray(grid_embedding(coordinates, x.shape[1]), x.dtype)
    x = jnp.concatenate([w["cls_token"][0], x])
    each = states(w, "encoder.", x, num_heads, *(options or (GIGAPATH_SEGMENTS, GIGAPATH_RATES)))
    if not all_layers:
        each = [norm(w, "encoder.layer_norm", each[-1])]
    pooled = jnp.stack([x[0] if pool == "cls" else x[1:].mean(0) for x in each])
    embedding = norm(w, "norm", pooled, epsilon=1e-6)
    return embedding if all_layers else embedding[0]


def stack_weights(rng, num_layers, features, hidden, prefix, *, sub_norm=True, final_norm=True, xpos_dim=0):
    """Returns random weights of an encoder or decoder with torchscale's names."""
    linears = {f"self_attn.{name}_proj": (features, features) for name in ("q", "k", "v", "out")}
    linears |= {"ffn.fc1": (hidden, features), "ffn.fc2": (features, hidden)}
    norms = {"self_attn_layer_norm": features, "final_layer_norm": features}
    norms |= {"self_attn.inner_attn_ln": features, "ffn.ffn_layernorm": hidden} if sub_norm else {}
    w = {}
    for i in range(num_layers):
        for name, shape in linears.items():
            w |= linear_weights(rng, f"{prefix}layers.{i}.{name}", *shape)
        for name, width in norms.items():
            w |= norm_weights(rng, f"{prefix}layers.{i}.{name}", width)
        if xpos_dim:
            zeta = (np.arange(0, xpos_dim, 2) + 0.4 * xpos_dim) / (1.4 * xpos_dim)
            w[f"{prefix}layers.{i}.self_attn.xpos.scale"] = zeta
    return w | (norm_weights(rng, f"{prefix}layer_norm", features) if final_norm else {})


def linear_weights(rng, name, rows, columns):
    kernel = rng.standard_normal((rows, columns)) * (1.5 / math.sqrt(columns))
    return {
        f"{name}.weight": kernel.astype(np.float32),
        f"{name}.bias": (0.2 * rng.standard_normal(rows)).astype(np.float32),
    }


def norm_weights(rng, name, width):
    return {
        f"{name}.weight": (1 + 0.2 * rng.standard_normal(width)).astype(np.float32),
        f"{name}.bias": (0.2 * rng.standard_normal(width)).astype(np.float32),
    }


def gigapath_weights(num_layers=2, features=64, hidden=96, input_features=24, seed=0):
    """Returns random weights with the names and shapes of Prov-GigaPath's slide encoder."""
    rng = np.random.default_rng(seed)
    w = {"cls_token": rng.standard_normal((1, 1, features)).astype(np.float32)}
    w |= linear_weights(rng, "patch_embed.proj", features, input_features)
    w |= stack_weights(rng, num_layers, features, hidden, "encoder.")
    return w | norm_weights(rng, "norm", features)
