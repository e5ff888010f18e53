"""A branch whose keys are gathered at once by all devices that share a segment: for short, latency-bound messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ringjax._src import indexing
from ringjax._src.branches.shared import KeySendingBranch, PackedKeys, PackedQueries
from ringjax._src.comm.ring_comm import scan_range
from ringjax._src.online_softmax import PartialSoftmax


class AllGatherBranch(KeySendingBranch):
    """Gathers the keys of all devices that share a segment; their gradients are summed by a reduce-scatter."""

    def send(self, keys: PackedKeys) -> PackedKeys:
        """Gathers the keys."""
        return self.comm.all_gather(keys)

    def attend_all(self, queries: PackedQueries, keys: PackedKeys, in_flight: PackedKeys) -> PartialSoftmax:
        """Computes the attention of the packed queries to the keys of all devices."""
        me = self.comm.device()
        partial = self.empty_partial(queries)
        partial = self.attend_chunks(partial, queries, keys, query_device=me, key_device=me, is_own=True)

        def step(partial: PartialSoftmax, hop: Array) -> PartialSoftmax:
            source = self.comm.source(hop)
            keys = self._keys_of(in_flight, source)
            return self.attend_chunks(partial, queries, keys, query_device=me, key_device=source)

        return scan_range(step, partial, 1, self.plan.ring_devices)

    def attend_all_bwd(self, queries: PackedQueries, keys: PackedKeys) -> tuple[Array, Array]:
        """Computes the packed gradients: of the queries, and of keys and values."""
        me, size = self.comm.device(), self.plan.ring_devices
        gathered = self.send(keys)
        zero_dq, zero_dkv = self.zero_grads(queries, keys)
        dq, dkv = self.attend_chunks_bwd(
            (zero_dq, zero_dkv), queries, keys, query_device=me, key_device=me, is_own=True
        )
        every = jnp.zeros_like(dkv, shape=(size, *dkv.shape))
        every = indexing.dynamic_update_index_in_dim(every, dkv, indexing.remainder(me, size), axis=0)

        def step(carry: tuple[Array, Array], hop: Array) -> tuple[Array, Array]:
            dq, every = carry
            source = self.comm.source(hop)
            keys = self._keys_of(gathered, source)
            dq, dkv = self.attend_chunks_bwd((dq, zero_dkv), queries, keys, query_device=me, key_device=source)
            return dq, indexing.dynamic_update_index_in_dim(every, dkv, indexing.remainder(source, size), axis=0)

        dq, every = scan_range(step, (dq, every), 1, size)
        return dq, self.comm.reduce_scatter(every)

    def _keys_of(self, gathered: PackedKeys, device: Array) -> PackedKeys:
        index = indexing.remainder(device, self.plan.ring_devices)
        return jax.tree.map(lambda x: indexing.dynamic_index_in_dim(x, index, keepdims=False), gathered)
