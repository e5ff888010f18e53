"""The types that all kernel implementations share.

An implementation has two functions:

    attend(prior, operands, config) -> PartialSoftmax       merges attention to some keys into `prior`
    attend_bwd(grads, operands, residuals, config) -> Grads  adds the gradients to `grads`

Operands come in two forms, which the kernels on GPU and CPU treat the same way, as rows at a start and a stride:

- *dense*: query (B, T, K, G, H), key and value (B, T, K, H). The rows of the selection attend to each other in place.
- *packed*: query (N, C, n * G, H), key and value stacked as (2, N, C, n, H): the rows of N = heads * batch tasks in C
  chunks of n rows. `ChunkPairs` determines which chunks of queries attend to which chunks of keys.

What an implementation takes into account, beside the rows:

- Queries are not scaled (`AttendConfig.scale`); sums are in the dtype of `prior` and `grads`.
- A head may have fewer rows than others (`RowSelection.counts`): later rows are masked.
- Causality masks where `Operands.is_causal` says so: rows by their number, or by `ChunkPairs.positions`.
- Rows with `positions` attend to rows of equal segment; `key_ranges` bounds the keys that a block of queries needs.
- Pairs that are not `active` have no work.
- Rows attend to rows of equal segment id only, and not if it is negative: such rows are padding and may hold NaN.
- `Residuals.dout` is the gradient of the output after its division by `AttendConfig.output_divisor`, so `attend_bwd`
  divides it by that. `delta` needs no change. `lse` is +inf for rows without keys.
- The arrays of a selection (`heads`, `offsets`, `counts`) may be traced.
- Nothing else: dropout is always computed in plain XLA.

Legend: ``B`` batch, ``T`` positions on the device, ``K`` key/value heads, ``G`` query heads per key/value head, ``H``
head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ringjax._src import online_softmax as softmax
from ringjax._src.dropout import RowHashes
from ringjax._src.online_softmax import PartialSoftmax
from ringjax._src.rows.selection import RowSelection
from ringjax._src.validation import check_int


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Rows per block of the Pallas kernels on TPU and GPU, for `dilated_attention(..., block_sizes=...)`.

    Query rows are counted over all query heads that share a key/value head. A size is reduced if half of it holds all
    rows of a segment. Blocks that exceed the kernel's memory are rejected by the compiler.

    Args:
        query: Query rows per block in the forward pass.
        key: Key rows per block in the forward pass.
        grad_query: Query rows per block in the backward pass; `query` by default.
        grad_key: Key rows per block in the backward pass; `key` by default.

    Raises:
        ValueError: If a size is not a power of two of at least 16.

    Example:
        >>> import ringjax as rj
        >>> rj.BlockSizes(query=128, key=64)
        BlockSizes(query=128, key=64, grad_query=128, grad_key=64)
    """

    query: int
    key: int
    grad_query: int = 0  # 0: same as in the forward pass
    grad_key: int = 0

    def __post_init__(self) -> None:
        for name, forward in (("grad_query", self.query), ("grad_key", self.key)):
            if check_int(name, getattr(self, name), least=0) == 0:
                object.__setattr__(self, name, forward)
        for field in dataclasses.fields(self):
            size = check_int(field.name, getattr(self, field.name))
            if size < 16 or size & (size - 1):
                raise ValueError(f"`{field.name}` must be a power of two of at least 16, got {size}.")


@dataclasses.dataclass(frozen=True)
class AttendConfig:
    """Static options of a call."""

    is_causal: bool  # whether a query attends only to keys up to its own position
    scale: float  # factor applied to the scores
    output_divisor: int = 1  # what the output is divided by after all branches, for the backward pass
    dropout_rate: float = 0.0  # probability of dropping a weight
    implementation: str | None = None  # the implementation that the caller asked for, or None
    block_sizes: BlockSizes | None = None  # block sizes of the Pallas kernels, or None for the defaults
    is_prior_empty: bool = False  # whether `prior` (or `grads`) has no results for the selected rows yet: a hint

    @property
    def is_interpreted(self) -> bool:
        """Whether Pallas kernels are interpreted."""
        return self.implementation in ("interpret_tpu", "interpret_gpu")


class RowPositions(NamedTuple):
    """Segment and position of query rows and of key rows, each (..., rows, 2); segments of missing rows differ."""

    query: Array
    key: Array


class ChunkPairs(NamedTuple):
    """Pairs of a query chunk and a key chunk, attended one after the other.

    Attributes:
        query: Query chunk of each pair, (pairs,).
        key: Key chunk of each pair, (pairs,).
        active: Which pairs have work, (pairs,), or None for all.
        is_diagonal: Whether query chunk and key chunk of a pair are the same, so that causality masks inside.
        positions: Segment and position of each row (C, heads, n, 2) of an unaligned branch, whose masks depend on them;
            otherwise None.
        key_ranges: With positions, maps first row and last row + 1 of query blocks to the key rows that they may attend
            to, (pairs, heads, blocks, 2).
    """

    query: Array
    key: Array
    active: Array | None = None
    is_diagonal: bool = False
    positions: RowPositions | None = None
    key_ranges: Callable[[Array, Array], Array] | None = None


class Operands(NamedTuple):
    """Queries, keys and values, and which of their rows attend to which."""

    query: Array  # unscaled queries
    kv: tuple[Array, ...]  # keys and values, as two arrays or as one stacked array
    rows: RowSelection  # the selected rows
    pairs: ChunkPairs | None = None  # for packed operands; None for dense ones
    query_ids: Array | None = None  # segment ids (B, T) or (N, C, n), or None
    key_ids: Array | None = None  # segment ids of the keys, or None
    hashes: RowHashes | None = None  # for dropout: of queries (B, T, K, G) or (N, C, n * G), and of keys, as their ids

    @property
    def batch(self) -> int:
        """Batch entries B, or tasks N."""
        return self.query.shape[0]

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a position."""
        return self.query.shape[2] if self.pairs is None else 1

    @property
    def q_per_kv(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[3] if self.pairs is None else self.query.shape[2] // self.rows.num_rows

    @property
    def tasks_per_head(self) -> int:
        """How many tasks each head of the selection has; a task is one head in one chunk (pair) of a batch entry."""
        return self.batch * self.rows.chunks if self.pairs is None else self.batch // len(self.rows.heads)

    def is_causal(self, config: AttendConfig) -> bool:
        """Returns whether causality masks scores inside the chunks."""
        return config.is_causal and (self.pairs is None or self.pairs.is_diagonal or self.pairs.positions is not None)


class Residuals(NamedTuple):
    """What a backward pass needs of the forward pass."""

    dout: Array  # gradient with respect to the output, like the query
    lse: Array  # log-sum-exp over all branches, from `softmax.for_backward`, like the query without its last axis
    delta: Array  # ``sum(dout * out)`` over the last axis, minus the gradient of the log-sum-exp if it was returned
    out: Array | None = None  # the output; plain XLA uses it for exact zeros where a query attends to a single key


class Grads(NamedTuple):
    """Gradients of query, and of key and value in the form of `Operands.kv`, in the accumulator dtype."""

    query: Array
    kv: tuple[Array, ...]


class Case(NamedTuple):
    """What decides whether a backend supports a call."""

    dtype: str  # dtype of query, key and value
    head_dim: int  # dimensions per head
    num_rows: int  # key rows of a task
    q_per_kv: int  # query heads per key/value head
    ids: str = ""  # dtype of the segment ids, or ""
    positions: int = 0  # positions on a device, over the whole batch; 0 if they do not matter


def case_of(operands: Operands) -> Case:
    """Returns the case of these operands."""
    query, ids = operands.query, operands.query_ids
    shape = query.shape[:2] if operands.pairs is None else query.shape[:-1]
    positions = math.prod(shape) // (1 if operands.pairs is None else operands.q_per_kv)
    name = "" if ids is None else ids.dtype.name
    return Case(query.dtype.name, query.shape[-1], operands.rows.num_rows, operands.q_per_kv, name, positions)


_MAX_DIM = 256
_MAX_POSITIONS = 2**31 - 1  # kernels use int32


class Limits(NamedTuple):
    """What the kernels of a backend support."""

    dtypes: tuple[str, ...]
    min_dim: int
    min_rows: int  # fewer are not worth a kernel
    min_block: int

    def unsupported(self, backend: str, case: Case, sizes: BlockSizes | None = None) -> str:
        """Returns why the kernels do not support a case (with these block sizes), or ""."""
        block = self.min_block if sizes is None else min(dataclasses.astuple(sizes))
        ids_fit = not case.ids or jnp.can_cast(case.ids, jnp.int32)
        rules = {
            f"{', '.join(self.dtypes)}, not {case.dtype}": case.dtype in self.dtypes,
            f"head dims from {self.min_dim} to {_MAX_DIM}, not {case.head_dim}": self.min_dim
            <= case.head_dim
            <= _MAX_DIM,
            f"at least {self.min_rows} selected rows per segment or chunk, not {case.num_rows}": case.num_rows
            >= self.min_rows,
            f"blocks of at least {self.min_block} rows, not {block}": block >= self.min_block,
            f"segment ids that fit int32, not {case.ids}": ids_fit,
            f"at most {_MAX_POSITIONS} positions (batch times length), not {case.positions}": case.positions
            <= _MAX_POSITIONS,
        }
        return next((f"the {backend} kernels take {rule}" for rule, holds in rules.items() if not holds), "")


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of `attend` and `attend_bwd`, see `dispatch.BACKENDS`.

    Attributes:
        name: Name of the backend.
        implementation: Value of the argument `implementation` that selects it.
        platform: The JAX platform that it runs on, one of those that `platform.py` lowers for; the first backend of a
            platform that supports a call is the default there. None for every platform, but only on request.
        attend: See the module docstring.
        attend_bwd: See the module docstring.
        limits: What its kernels support, or None for everything.
        unavailable: Returns why it cannot be used in this process, or ""; called with whether the caller asked for it.
        delta: Computes ``sum(dout * out)`` over the last axis in a given dtype, as `attend_bwd` needs it.
    """

    name: str
    implementation: str
    platform: str | None
    attend: Callable[[PartialSoftmax, Operands, AttendConfig], PartialSoftmax]
    attend_bwd: Callable[[Grads, Operands, Residuals, AttendConfig], Grads]
    limits: Limits | None = None
    unavailable: Callable[[bool], str] = lambda is_requested: ""
    delta: Callable[[Array, Array, jnp.dtype], Array] = softmax.delta

    def why_not(self, case: Case, config: AttendConfig) -> str:
        """Returns why the backend cannot run a case on the devices of this process, or ""."""
        sizes = config.block_sizes if self.platform != "cpu" else None
        if self.limits is not None and (reason := self.limits.unsupported(self.name, case, sizes)):
            return reason
        if config.dropout_rate and self.implementation != "xla":
            return f"the {self.name} kernels do not drop weights"
        return "" if config.is_interpreted else self.unavailable(config.implementation is not None)
