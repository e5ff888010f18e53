"""A branch whose segments lie within the chunks of a device: nothing is sent."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from ringjax._src import dropout
from ringjax._src import online_softmax as softmax
from ringjax._src.branches.extra_keys import branch_start
from ringjax._src.branches.protocol import InFlight, Kept, Shard
from ringjax._src.dropout import RowHashes
from ringjax._src.kernels.dispatch import attend, attend_bwd, delta
from ringjax._src.kernels.interface import AttendConfig, Grads, Operands, Residuals
from ringjax._src.kernels.xla import block_loop
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.planning.spec import AttentionSpec
from ringjax._src.rows.packing import RowPacker
from ringjax._src.rows.selection import RowSelection


@dataclasses.dataclass(frozen=True, eq=False)
class LocalBranch:
    """Attends within the segments of a device."""

    spec: AttentionSpec  # the attention call
    name: str  # name of the branch in profiles
    selections: tuple[RowSelection, ...]  # of its whole segments, and of its shorter last one
    is_first: bool  # whether no branch runs before this one
    starts_empty: bool = True  # whether the first branch is merged into an empty partial softmax
    first_head: Array | int = 0  # index of the first key/value head of the device

    def start(self, shard: Shard) -> InFlight:
        """Sends nothing."""

    def finish(self, shard: Shard, in_flight: InFlight, merged: PartialSoftmax) -> tuple[PartialSoftmax, Kept]:
        """Merges the branch into `merged`."""
        kept = []
        for rows in self.selections:
            operands = self._operands(shard, rows)
            if self.spec.pattern.mixing == "detached":
                part = self._own_start(shard, rows)
                part = attend(part, operands, self._config(is_prior_empty=not self.spec.has_zero_keys))
                merged = softmax.merge(merged, part)
                packer = RowPacker.of_segments(rows, self.spec.local_kv_heads)
                kept.append(packer.pack(packer.view(part.out.astype(shard.query.dtype)), None, self.spec.q_per_kv))
            else:
                merged = attend(merged, operands, self._config(is_prior_empty=self.is_first and self.starts_empty))
        return merged, kept

    def start_bwd(self, shard: Shard, residuals: Residuals, kept: Kept) -> InFlight:
        """Sends nothing."""

    def finish_bwd(self, shard: Shard, residuals: Residuals, kept: Kept, in_flight: InFlight, grads: Grads) -> Grads:
        """Adds the gradients of the branch to `grads`."""
        for i, rows in enumerate(self.selections):
            operands, of_rows = self._operands(shard, rows), residuals
            if self.spec.pattern.mixing == "detached":
                packer = RowPacker.of_segments(rows, self.spec.local_kv_heads)
                zeros = jnp.zeros_like(residuals.dout)
                out = rows.put_view(zeros, *packer.add((rows.view(zeros),), (kept[i],)))
                own_delta = delta(residuals.dout, out, residuals.lse.dtype, self.spec.attend_config)
                of_rows = residuals._replace(delta=own_delta + residuals.delta)
                of_rows = of_rows._replace(out=None if residuals.out is None else out)
            grads = attend_bwd(grads, operands, of_rows, self._config(is_prior_empty=self.is_first))
        return grads

    def count_tiles(self) -> int:
        """Counts the score tiles that this device computes."""
        loops = [block_loop(rows, self.spec.q_per_kv, self.spec.is_causal) for rows in self.selections]
        tasks = [self.spec.batch * rows.chunks * len(rows.heads) for rows in self.selections]
        return sum(num * int(loop.count_tiles()) for num, loop in zip(tasks, loops, strict=True))

    def _own_start(self, shard: Shard, rows: RowSelection) -> PartialSoftmax:
        """Returns the partial softmax over the zero keys in one selection of the branch."""
        start = branch_start(self.spec, shard, rows.branch, self.first_head)
        if len(self.selections) == 1:
            return start
        at = jnp.arange(shard.query.shape[1], dtype=jnp.int32)[None, :, None, None]
        is_inside = (at >= rows.first) & (at < rows.first + rows.chunks * rows.chunk_length)
        return start._replace(lse=jnp.where(is_inside, start.lse, -jnp.inf))

    def _config(self, *, is_prior_empty: bool) -> AttendConfig:
        return dataclasses.replace(self.spec.attend_config, is_prior_empty=is_prior_empty)

    def _operands(self, shard: Shard, rows: RowSelection) -> Operands:
        kv = shard.key, shard.value
        return Operands(shard.query, kv, rows, None, shard.ids, shard.ids, self._hashes(shard, rows.branch))

    def _hashes(self, shard: Shard, branch: int) -> RowHashes | None:
        if shard.seeds is None:
            return None
        batch, length = shard.query.shape[:2]
        positions = self.spec.local_positions()
        queries = dropout.query_hashes(shard.seeds[:, None], positions[None, :, None, None], branch)
        return RowHashes(queries, jnp.broadcast_to(dropout.key_hashes(positions), (batch, length)))
