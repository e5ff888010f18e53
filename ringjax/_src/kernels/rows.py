"""Some query rows of one head against some key rows, in plain XLA: a scan-based online softmax and its gradient.

Legend: ``M`` query rows (times the query heads of a group), ``S`` key rows, ``H`` head dim, all in the accumulator's
dtype and padded to whole blocks.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ringjax._src import online_softmax as softmax
from ringjax._src.kernels.walk import Keys, Sight, Walk, replaced
from ringjax._src.online_softmax import PartialSoftmax


def attend(q: Array, k: Array, v: Array, *, sight: Sight, walk: Walk) -> PartialSoftmax:
    """The partial of q (M, H), already scaled, over k and v (S, H)."""

    def block(whole: PartialSoftmax, index: Array | int) -> PartialSoftmax:
        q_block = walk.query_block(q, index)

        def step(state: softmax.Running, keys: Keys) -> softmax.Running:
            first = keys.first_row * walk.group
            scores = walk.masked(_dot(q_block[first:], walk.key_block(k, keys), 1, 1), sight, index, keys)
            rest, weights = softmax.rescale(softmax.Running(*(x[first:] for x in state)), scores)
            weights = lax.optimization_barrier(weights)  # one pass of exp, read by the sum and by the multiply
            kept = walk.dropped(weights, sight, index, keys)
            acc = rest.acc + _dot(kept, walk.key_block(v, keys), 1, 0)
            rest = softmax.Running(acc, rest.peak, rest.total + weights.sum(axis=1))
            return softmax.Running(*(replaced(x, y, first) for x, y in zip(state, rest, strict=True)))

        state = walk.over_keys(step, softmax.start(q_block), index, sight)
        part = softmax.finish(state)
        return PartialSoftmax(*(walk.with_query_block(x, y, index) for x, y in zip(whole, part, strict=True)))

    return walk.over_queries(block, softmax.empty_like(q), sight)


def gradients(
    q: Array, k: Array, v: Array, dout: Array, lse: Array, delta: Array, *, sight: Sight, walk: Walk
) -> tuple[Array, Array, Array]:
    """The gradients (M, H), (S, H) and (S, H), of q already scaled, from the joint lse and delta (M,).

    dk and dv are summed transposed: XLA:CPU multiplies (H, M) by (M, S) twice as fast as (S, M) by (M, H).
    """

    def block(grads: tuple[Array, Array, Array], index: Array | int) -> tuple[Array, Array, Array]:
        q_block, dout_block, lse_block, delta_block = (walk.query_block(x, index) for x in (q, dout, lse, delta))

        def step(state: tuple[Array, Array, Array], keys: Keys) -> tuple[Array, Array, Array]:
            dq, dk, dv = state
            first = keys.first_row * walk.group
            q_rows, dout_rows = q_block[first:], dout_block[first:]
            k_block, v_block = walk.key_block(k, keys), walk.key_block(v, keys)
            scores = walk.masked(_dot(q_rows, k_block, 1, 1), sight, index, keys)
            probs = lax.optimization_barrier(jnp.exp(scores - lse_block[first:, None]))
            dprobs = walk.dropped(_dot(dout_rows, v_block, 1, 1), sight, index, keys)
            dscores = probs * (dprobs - delta_block[first:, None])
            dq = replaced(dq, dq[first:] + _dot(dscores, k_block, 1, 0), first)
            dk = walk.add_keys(dk, _dot(q_rows, dscores, 0, 0), keys)
            kept = walk.dropped(probs, sight, index, keys)
            dv = walk.add_keys(dv, _dot(dout_rows, kept, 0, 0), keys)
            return dq, dk, dv

        dq, dk, dv = grads
        dq_block, dk, dv = walk.over_keys(step, (jnp.zeros_like(q_block), dk, dv), index, sight)
        return walk.with_query_block(dq, dq_block, index), dk, dv

    dq, dk, dv = walk.over_queries(block, (jnp.zeros_like(q), jnp.zeros_like(k.T), jnp.zeros_like(v.T)), sight)
    return dq, dk.T, dv.T


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))
