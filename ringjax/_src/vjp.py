"""All branches of an attention call on one device. Each pass starts all branches, then finishes one after the other.

`sharded.py` calls `forward` and `backward` on each of several devices. The custom VJP here serves calls on one device
and inside the caller's own `shard_map`.

Legend: ``B`` batch, ``c`` rows that the device holds (all ``T`` without a ring), ``K`` key/value heads, ``G`` query
heads per key/value head, ``H`` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ringjax._src import online_softmax as softmax
from ringjax._src.branches.extra_keys import count_lengths, joint_start
from ringjax._src.branches.protocol import InFlight, Kept, Shard
from ringjax._src.branches.registry import make_branches, ordered_axis
from ringjax._src.comm.ordering import after
from ringjax._src.kernels.dispatch import delta
from ringjax._src.kernels.interface import Grads, Residuals
from ringjax._src.planning.spec import AttentionSpec


class Saved(NamedTuple):
    """What the forward pass saves for the backward pass."""

    shard: Shard  # query, key and value, segment ids, dropout seeds and attention sinks
    out: Array  # the output (B, c, K, G, H)
    lse: Array  # the log-sum-exp over all branches and extra keys (B, c, K, G)
    kept: list[Kept]  # output rows of each branch on its own, with ``mixing="detached"``; otherwise empty


Result = Array | tuple[Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(spec: AttentionSpec, shard: Shard) -> Result:
    """Computes attention (B, c, K, G, H), and the log-sum-exp if asked for."""
    return _attention_fwd(without_gradient(spec), shard)[0]


# Calls outside of `jit` compile once, and equal layers are traced once. Inlined, because plain XLA holds more in memory
# otherwise.
attention = jax.jit(_attention, static_argnums=(0,), inline=True)


def without_gradient(spec: AttentionSpec) -> AttentionSpec:
    """Returns a spec with the same output that keeps no output rows of branches, as ``mixing="detached"`` does."""
    return spec._replace(pattern=dataclasses.replace(spec.pattern, mixing="exact"))


def count_tiles(spec: AttentionSpec, shard: Shard) -> Array:
    """Counts the score tiles that this device computes in the forward pass in plain XLA."""
    tiles = jnp.zeros_like(shard.query, shape=(), dtype=jnp.int32)
    for branch in make_branches(spec, shard):
        tiles += branch.count_tiles()
    return tiles


def forward(spec: AttentionSpec, shard: Shard) -> Saved:
    """Computes the output of this device's queries, and what the backward pass needs."""
    branches = make_branches(spec, shard)
    axis_name, given = ordered_axis(spec, branches), shard
    shard = count_lengths(spec, given, ordered_axis(spec, branches, others=1))
    in_flight: list[InFlight] = []
    for branch in branches:
        with jax.named_scope(branch.name):
            in_flight.append(branch.start(shard))
    merged = joint_start(spec, shard)
    kept: list[Kept] = []
    for branch, started in zip(branches, in_flight, strict=True):
        order = functools.partial(after, done=(in_flight, merged.lse), axis_name=axis_name)
        sent, merged = order(started), merged._replace(lse=order(merged.lse))
        with jax.named_scope(branch.name):
            merged, rows = branch.finish(shard, sent, merged)
        if spec.pattern.mixing == "detached":
            kept.append(jax.tree.map(lambda x: checkpoint_name(x.astype(shard.query.dtype), "ringjax_out"), rows))
    out = (merged.out / spec.attend_config.output_divisor).astype(shard.query.dtype)
    lse = checkpoint_name(merged.lse, "ringjax_lse")
    return Saved(given, checkpoint_name(out, "ringjax_out"), lse, kept)


def _attention_fwd(spec: AttentionSpec, shard: Shard) -> tuple[Result, Saved]:
    saved = forward(spec, shard)
    return (saved.out, saved.lse) if spec.returns_lse else saved.out, saved


def backward(spec: AttentionSpec, saved: Saved, dout: Array, dlse: Array | None) -> Shard:
    """Computes the gradients, given those of the output and of the log-sum-exp if it was returned.

    That of sinks, (B, K, G), is the sum over the rows of this device.
    """
    shard, _, lse, kept = saved
    branches = make_branches(spec, shard)
    kept = kept or [None] * len(branches)
    axis_name = ordered_axis(spec, branches)
    residuals = _residuals(spec, saved, dout, dlse)
    in_flight: list[InFlight] = []
    for branch, rows in zip(branches, kept, strict=True):
        residuals = residuals._replace(lse=after(residuals.lse, in_flight, axis_name))
        with jax.named_scope(f"{branch.name}_bwd"):
            in_flight.append(branch.start_bwd(shard, residuals, rows))
    dq, dk, dv = (jnp.zeros_like(x, dtype=lse.dtype) for x in shard[:3])
    grads = Grads(dq, (dk, dv))
    for branch, rows, started in zip(branches, kept, in_flight, strict=True):
        order = functools.partial(after, done=in_flight, axis_name=axis_name)
        sent, residuals = order(started), residuals._replace(lse=order(residuals.lse))
        with jax.named_scope(f"{branch.name}_bwd"):
            grads = branch.finish_bwd(shard, residuals, rows, sent, grads)
    dq, dk, dv = (x.astype(shard.query.dtype) for x in (grads.query, *grads.kv))
    if shard.sink is None:
        return Shard(dq, dk, dv)
    dsink = -jnp.sum(jnp.exp(shard.sink[:, None] - residuals.lse) * residuals.delta, axis=1)
    # devices add their shares, which must not overlap with the communication of a branch
    return Shard(dq, dk, dv, sink=after(dsink, grads, ordered_axis(spec, branches, others=1)))


def _residuals(spec: AttentionSpec, saved: Saved, dout: Array, dlse: Array | None) -> Residuals:
    """Returns what all branches need: ``dscores = p * (dp - delta)`` with ``delta = sum(dout * out) - dlse``.

    With ``mixing="detached"`` the first term differs between branches, and each adds it itself.
    """
    _, out, lse, _ = saved
    if spec.pattern.mixing == "detached":
        shift = jnp.zeros_like(lse)
    else:
        shift = delta(dout, out, lse.dtype, spec.attend_config)
    if dlse is None:
        return Residuals(dout, softmax.for_backward(lse), shift, out)
    shift -= jnp.where(lse == -jnp.inf, 0, dlse)  # the log-sum-exp of an empty row is a constant
    return Residuals(dout, softmax.for_backward(lse), shift)


def _attention_bwd(spec: AttentionSpec, saved: Saved, cotangents: Result) -> tuple[Shard]:
    dout, dlse = cotangents if isinstance(cotangents, tuple | list) else (cotangents, None)
    return (backward(spec, saved, dout, dlse),)


_attention.defvjp(_attention_fwd, _attention_bwd)
