"""Attention to dense operands through packed copies of the selected rows, for implementations that need them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ringjax._src import online_softmax as softmax
from ringjax._src.kernels.interface import AttendConfig, ChunkPairs, Grads, Operands, Residuals
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.rows.packing import RowPacker


def attend_packed(
    attend: Callable[..., PartialSoftmax], prior: PartialSoftmax, operands: Operands, config: AttendConfig
) -> PartialSoftmax:
    """Merges the attention of the selected rows into `prior`, by an implementation for packed rows."""
    packed, packer = _packed(operands)
    empty = softmax.empty_like(jnp.zeros_like(packed.query, dtype=prior.lse.dtype))
    part = attend(empty, packed, dataclasses.replace(config, is_prior_empty=True))
    merged = packer.merge(PartialSoftmax(*(packer.rows.view(x) for x in prior)), part)
    return PartialSoftmax(*(packer.rows.put_view(x, y) for x, y in zip(prior, merged, strict=True)))


def attend_bwd_packed(
    attend_bwd: Callable[..., Grads], grads: Grads, operands: Operands, residuals: Residuals, config: AttendConfig
) -> Grads:
    """Adds the gradients of the selected rows to `grads`, by an implementation for packed rows."""
    packed, packer = _packed(operands)
    q_per_kv, ids = operands.q_per_kv, packed.query_ids
    dout, lse, delta = (packer.pack(packer.view(x), ids, q_per_kv) for x in residuals[:3])
    given = Residuals(dout, lse[..., 0], delta[..., 0])
    zero_dq, zero_dkv = (jnp.zeros_like(x, dtype=lse.dtype) for x in (packed.query, packed.kv[0]))
    empty = Grads(zero_dq, (zero_dkv,))
    dq, (dkv,) = attend_bwd(empty, packed, given, dataclasses.replace(config, is_prior_empty=True))
    dense = grads.query, *grads.kv
    sums = packer.add(tuple(packer.rows.view(x) for x in dense), (dq, *dkv))
    dq, *dense_kv = (packer.rows.put_view(x, y) for x, y in zip(dense, sums, strict=True))
    return Grads(dq, tuple(dense_kv))


def _packed(operands: Operands) -> tuple[Operands, RowPacker]:
    rows = operands.rows
    packer = RowPacker.of_segments(rows, operands.kv_heads)
    ids = None if operands.query_ids is None else packer.pack_ids(packer.view(operands.query_ids.astype(jnp.int32)))
    query = packer.pack(packer.view(operands.query), ids, operands.q_per_kv)
    kv = jnp.stack([packer.pack(packer.view(x), ids, 1) for x in operands.kv])
    zero = np.zeros((1,), np.int32)
    pairs = ChunkPairs(jnp.asarray(zero), jnp.asarray(zero), is_diagonal=True)
    return Operands(query, (kv,), rows, pairs, ids, ids), packer
