"""A new kernel implementation is one `Backend`, a new way to share a segment one branch class and one line."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cases import QUICK, Case, assert_equals_oracle, on_ring, ring_mesh, run

import ringjax as rj
from ringjax._src import online_softmax as softmax
from ringjax._src.branches import registry
from ringjax._src.branches.shared import KeySendingBranch
from ringjax._src.comm import ring_comm
from ringjax._src.kernels import dispatch, packing
from ringjax._src.kernels.interface import Backend, Grads
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.planning import costs

calls = []


def naive_pairs(operands, config):
    """Yields query chunk, key chunk and mask (tasks, n * G, n) of every pair of packed chunks."""
    pairs, is_causal, row = operands.pairs, operands.is_causal(config), jnp.arange(operands.rows.num_rows)
    head = jnp.arange(operands.batch) // operands.tasks_per_head
    for which, (q_chunk, k_chunk) in enumerate(zip(pairs.query, pairs.key, strict=True)):
        exists = row[None] < jnp.asarray(operands.rows.counts)[head][:, None]
        mask = exists[:, :, None] & exists[:, None, :]
        if pairs.active is not None:
            mask &= pairs.active[which]
        if pairs.positions is not None:
            of_query, of_key = pairs.positions.query[q_chunk][head], pairs.positions.key[k_chunk][head]  # (tasks, n, 2)
            mask &= of_query[:, :, None, 0] == of_key[:, None, :, 0]
            mask &= (of_key[:, None, :, 1] <= of_query[:, :, None, 1]) | (not is_causal)
        elif is_causal:
            mask &= (row[None, :] <= row[:, None])[None]
        if operands.query_ids is not None:
            of_query, of_key = operands.query_ids[:, q_chunk, :, None], operands.key_ids[:, k_chunk, None]
            mask &= (of_query == of_key) & (of_key >= 0)
        yield q_chunk, k_chunk, jnp.repeat(mask, operands.q_per_kv, axis=1)


def naive_attend(prior, operands, config):
    """Computes all scores at once."""
    if operands.pairs is None:
        return packing.attend_packed(naive_attend, prior, operands, config)
    calls.append("attend")
    (k, v), out, lse = operands.kv[0], *prior
    for q_chunk, k_chunk, mask in naive_pairs(operands, config):
        scores = jnp.einsum("tmh,tsh->tms", operands.query[:, q_chunk], k[:, k_chunk]) * config.scale
        scores = jnp.where(mask, scores, -jnp.inf)
        found_lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - softmax.for_backward(found_lse)[..., None])
        found = PartialSoftmax(jnp.einsum("tms,tsh->tmh", weights, v[:, k_chunk]), found_lse)
        merged = softmax.merge(PartialSoftmax(out[:, q_chunk], lse[:, q_chunk]), found)
        out, lse = out.at[:, q_chunk].set(merged.out), lse.at[:, q_chunk].set(merged.lse)
    return PartialSoftmax(out, lse)


def naive_attend_bwd(grads, operands, residuals, config):
    """Computes all scores at once."""
    if operands.pairs is None:
        return packing.attend_bwd_packed(naive_attend_bwd, grads, operands, residuals, config)
    calls.append("attend_bwd")
    dq, ((dk, dv),) = grads.query, grads.kv
    (k, v), q, dout = operands.kv[0], operands.query, residuals.dout / config.output_divisor
    for q_chunk, k_chunk, mask in naive_pairs(operands, config):
        scores = jnp.einsum("tmh,tsh->tms", q[:, q_chunk], k[:, k_chunk]) * config.scale
        probs = jnp.where(mask, jnp.exp(scores - residuals.lse[:, q_chunk, :, None]), 0)
        dprobs = jnp.einsum("tmh,tsh->tms", dout[:, q_chunk], v[:, k_chunk])
        dscores = probs * (dprobs - residuals.delta[:, q_chunk, :, None]) * config.scale
        dq = dq.at[:, q_chunk].add(jnp.einsum("tms,tsh->tmh", dscores, k[:, k_chunk]))
        dk = dk.at[:, k_chunk].add(jnp.einsum("tms,tmh->tsh", dscores, q[:, q_chunk]))
        dv = dv.at[:, k_chunk].add(jnp.einsum("tms,tmh->tsh", probs, dout[:, q_chunk]))
    return Grads(dq, (jnp.stack([dk, dv]),))


class BroadcastBranch(KeySendingBranch):
    """Shares a segment by summing arrays that hold each device's keys in its own slot."""

    def send(self, keys):
        return jax.tree.map(lambda x: jax.lax.psum(self.in_slot(x, self.comm.device()), self.comm.axis_name), keys)

    def in_slot(self, x, device):
        return jnp.zeros_like(x, shape=(self.comm.axis_size, *x.shape)).at[device].set(x)

    def attend_all(self, queries, keys, in_flight):
        calls.append("broadcast")
        partial, me = self.empty_partial(queries), self.comm.device()
        for hop in range(self.plan.ring_devices):
            source = self.comm.source(hop)
            keys = jax.tree.map(lambda x, source=source: x[source], in_flight)
            partial = self.attend_chunks(partial, queries, keys, query_device=me, key_device=source, is_own=hop == 0)
        return partial

    def attend_all_bwd(self, queries, keys):
        me, sent = self.comm.device(), self.send(keys)
        dq, zero = self.zero_grads(queries, keys)
        every = self.in_slot(zero, me)
        for hop in range(self.plan.ring_devices):
            source = self.comm.source(hop)
            keys = jax.tree.map(lambda x, source=source: x[source], sent)
            dq, dkv = self.attend_chunks_bwd(
                (dq, zero), queries, keys, query_device=me, key_device=source, is_own=hop == 0
            )
            every = every.at[source].set(dkv)
        return dq, jax.lax.psum(every, self.comm.axis_name)[me]


@pytest.fixture(autouse=True)
def _forget_calls():
    calls.clear()


@pytest.mark.parametrize(
    ("ring_size", "case"),
    [
        (1, Case(q_per_kv=2, is_causal=True)),
        (4, Case(q_per_kv=2, is_causal=True)),
        (4, Case(segment_lengths=(16, 25), dilation_rates=(1, 3), rule="split", ids=True, is_causal=True)),
    ],
)
def test_new_backend_is_one_registry_entry(ring_size, case, monkeypatch):
    toy = Backend("toy", "toy", None, naive_attend, naive_attend_bwd)
    ring = rj.Ring(ring_mesh(ring_size), strategy="ring")
    attention = functools.partial(on_ring(ring), implementation="toy")
    with pytest.raises(ValueError, match="`implementation` must be"):
        run(attention, case.arrays("float32"), case.pattern)
    monkeypatch.setitem(dispatch.BACKENDS, "toy", toy)
    assert_equals_oracle(case, "float32", on_ring(ring), implementations=("toy",), compiler_options=QUICK)
    assert {"attend", "attend_bwd"} <= set(calls)


def forget_broadcast():
    ring_comm.STRATEGIES.remove("broadcast")
    del registry.SHARED_BRANCHES["broadcast"], costs.SHARING["broadcast"]


def test_new_way_to_share_a_segment_is_one_class_and_one_line(request):
    case = Case(is_causal=True)
    with pytest.raises(ValueError, match="`strategy` must be"):
        rj.Ring(ring_mesh(4), strategy="broadcast")
    registry.add_strategy("broadcast", BroadcastBranch, costs.GATHERING)
    request.addfinalizer(forget_broadcast)
    ring = rj.Ring(ring_mesh(4), layout="zigzag", strategy="broadcast")
    assert_equals_oracle(case, "float32", on_ring(ring), implementations=("xla",), compiler_options=QUICK)
    assert "broadcast" in calls
