"""Dilated attention, the verb: branches put together, one custom VJP for all of them.

Legend: ``B`` batch, ``T`` length, ``N`` query heads, ``K`` key/value heads, ``G = N / K``, ``H`` head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ringjax import softmax
from ringjax.block import xla
from ringjax.checks import check_inputs
from ringjax.indices import PartTable, part_tables
from ringjax.pattern import DilationPattern
from ringjax.select import segmented, to_bits
from ringjax.softmax import Partial

Implementation = Literal["xla", "pallas"]


@dataclasses.dataclass(frozen=True)
class _Config:
    """The static side of a call."""

    pattern: DilationPattern
    is_causal: bool
    scale: float

    def options(self, query: Array) -> xla.BlockOptions:
        """Sizes and options for a query (B, T, K, G, H)."""
        batch, length, kv_heads, group, _ = query.shape
        return xla.BlockOptions(batch, length, kv_heads, group, self.is_causal, self.scale, self.divisor)

    def tables(self, query: Array) -> tuple[PartTable, ...]:
        """The parts of all branches for a query (B, T, K, G, H)."""
        _, length, kv_heads, group, _ = query.shape
        return part_tables(self.pattern, length, kv_heads, group)

    @property
    def divisor(self) -> int:
        """Grouped heads share the output out among the branches."""
        return len(self.pattern.segment_lengths) if self.pattern.heads == "grouped" else 1


def dilated_attention(
    query: Array,
    key: Array,
    value: Array,
    pattern: DilationPattern,
    *,
    is_causal: bool = False,
    segment_ids: Array | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Dilated self-attention, exact and linear in the length for patterns of constant work per token.

    Each query sees, in every branch of the pattern that selects its position, the selected keys of its own
    segment; all these keys enter one softmax, and a key seen in two branches counts twice. A (position, head)
    that no branch selects gives 0. Reverse-mode differentiable; forward mode (`jax.jvp`) is not defined. Under
    `jax.checkpoint`, the names "ringjax_out" and "ringjax_lse" tell a policy what to keep to save the recomputation.

    Args:
        query: Queries (B, T, N, H).
        key: Keys (B, T, K, H), N a multiple of K: query head ``n`` uses key/value head ``n // (N // K)``.
        value: Values, the shape of `key`.
        pattern: The branches.
        is_causal: Whether a query sees only keys at its own position and before.
        segment_ids: Integers (B, T): a query sees only keys with its own id; ids below 0 are padding, which sees
            nothing, is seen by nobody and gives 0. Rows are selected by position in the sequence, so a packed document
            equals the same document alone only if it starts at a multiple of every segment length.
        seq_len: True length, at most T: later rows are padding as above, and segments are clamped to it.
        scale: Factor on the scores, ``1 / sqrt(H)`` by default.
        implementation: ``"xla"``, or None to let ringjax choose.

    Returns:
        The attention (B, T, N, H) in the dtype of `query`; sums are taken in at least float32.

    Raises:
        ValueError: If an argument is not as described.
        NotImplementedError: If `implementation` cannot do this case.

    Example:
        >>> import jax, ringjax as rj
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 8))
        >>> pattern = rj.DilationPattern(segment_lengths=(16, 64), dilation_rates=(1, 4))
        >>> rj.dilated_attention(q, k, v, pattern, is_causal=True).shape
        (1, 64, 4, 8)
    """
    shape = check_inputs(query, key, value, pattern, is_causal, segment_ids, seq_len, scale)
    _check_implementation(implementation)
    query, key, value = (jnp.asarray(x)[:, : shape.length] for x in (query, key, value))
    ids = None if segment_ids is None else jnp.asarray(segment_ids)[:, : shape.length]
    grouped = query.reshape(*query.shape[:2], shape.kv_heads, shape.group, shape.dim)
    out = _attention(_Config(pattern, is_causal, shape.scale), grouped, key, value, ids)
    out = out.reshape(query.shape)
    padding = shape.stored_length - shape.length
    return jnp.pad(out, [(0, 0), (0, padding), (0, 0), (0, 0)]) if padding else out


def _check_implementation(implementation: Implementation | None) -> None:
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"`implementation` must be None or one of {get_args(Implementation)}, got {implementation!r}.")
    if implementation == "pallas":
        raise NotImplementedError('`implementation="pallas"` is not there yet; "xla" runs on every platform.')


Residuals = tuple[Array, Array, Array, Array | None, Array, Array, tuple[Array, ...]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: _Config, query: Array, key: Array, value: Array, ids: Array | None) -> Array:
    return _forward(config, query, key, value, ids)[0]


def _forward(
    config: _Config, query: Array, key: Array, value: Array, ids: Array | None
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Output (B, T, K, G, H), joint lse (B, T, K, G) and, for detached mixing, each branch's own rows."""
    merged = softmax.empty(query.shape, softmax.accumulator(query.dtype))
    shapes = [x.shape for x in merged]
    inputs = xla.Inputs(to_bits(query), to_bits(key), to_bits(value), ids)
    rows = []
    for table in config.tables(query):
        with jax.named_scope(_name("branch", table)):
            merged, own = xla.forward(
                _segmented(inputs, table),
                Partial(*(segmented(x, table) for x in merged)),
                table,
                config.options(query),
                is_first=table.branch == 0,
                keep_rows=config.pattern.mixing == "detached",
            )
            merged = Partial(*(x.reshape(shape) for x, shape in zip(merged, shapes, strict=True)))
            rows += [] if own is None else [checkpoint_name(own.astype(query.dtype), "ringjax_out")]
    out = (merged.out / config.divisor).astype(query.dtype)
    return checkpoint_name(out, "ringjax_out"), checkpoint_name(merged.lse, "ringjax_lse"), tuple(rows)


def _attention_fwd(
    config: _Config, query: Array, key: Array, value: Array, ids: Array | None
) -> tuple[Array, Residuals]:
    out, lse, rows = _forward(config, query, key, value, ids)
    return out, (query, key, value, ids, out, lse, rows)


def _attention_bwd(config: _Config, residuals: Residuals, dout: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, ids, out, lse, rows = residuals
    inputs = xla.Inputs(to_bits(query), to_bits(key), to_bits(value), ids)
    out, dout, rows = to_bits(out), to_bits(dout), tuple(to_bits(x) for x in rows)
    shapes = [x.shape for x in (query, key, value)]
    grads = xla.Grads(*(jnp.zeros(shape, lse.dtype) for shape in shapes))
    for number, table in enumerate(config.tables(query)):
        with jax.named_scope(_name("branch_grad", table)):
            grads = xla.backward(
                _segmented(inputs, table),
                rows[number] if rows else segmented(out, table),
                segmented(lse, table),
                segmented(dout, table),
                xla.Grads(*(segmented(x, table) for x in grads)),
                table,
                config.options(query),
                is_first=table.branch == 0,
                own_rows=bool(rows),
            )
            grads = xla.Grads(*(x.reshape(shape) for x, shape in zip(grads, shapes, strict=True)))
    dq, dk, dv = (g.astype(query.dtype) for g in grads)
    return dq, dk, dv, None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _segmented(inputs: xla.Inputs, table: PartTable) -> xla.Inputs:
    q, k, v = (segmented(x, table) for x in inputs[:3])
    return xla.Inputs(q, k, v, None if inputs.ids is None else segmented(inputs.ids, table))


def _name(what: str, table: PartTable) -> str:
    return f"{what}{table.branch}_w{table.segment_length}_r{table.rate}"
