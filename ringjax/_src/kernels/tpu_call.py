"""How the kernels on TPU are called: the grid, the block of each array at each of its steps, and the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringjax._src.kernels.kernel import Look, quotient
from ringjax._src.kernels.platform import on_its_platform
from ringjax._src.vma import shaped_like


class Marks(NamedTuple):
    """What `Look.lines` compares: of queries (N, C, L, n * G), of keys (N, C, L, n)."""

    query: Array
    key: Array


class Rows(NamedTuple):
    """Rows of which one chunk of queries meets one chunk of keys.

    Attributes:
        q: Queries (N, C, n * G, H), not scaled.
        kv: Keys and values (2, N, C, n, H).
        chunks: Chunk of the queries and chunk of the keys, (2,).
        spans: Which blocks meet: `Look.query_spans`, or `Look.key_spans` for the gradient of keys.
        marks: Of all rows, or None where the rules have no lines.
    """

    q: Array
    kv: Array
    chunks: Array
    spans: Array
    marks: Marks | None


class Joint(NamedTuple):
    """What came out: the cotangent, like the queries; lse (see `softmax.for_backward`) and delta (N, C, 2, n * G)."""

    dout: Array
    stats: Array


class Specs:
    """The block specs of a pass whose outer blocks are of queries or of keys."""

    def __init__(self, look: Look, shape: tuple[int, ...], outer: Literal["query", "key"]) -> None:
        tasks, dim = shape[0], shape[-1]
        blocks = look.blocks
        outer_blocks, inner_blocks = look.query_blocks, look.key_blocks
        if outer == "key":
            outer_blocks, inner_blocks = inner_blocks, outer_blocks
        self.look, self.tasks, self.dim = look, tasks, dim
        self.grid = (tasks, outer_blocks, inner_blocks)

        def inner(spans: Any, task: Array, own: Array, nth: Array) -> Array:  # noqa: ANN401
            head = quotient(task, look.head_tasks)
            return jnp.clip(spans[head, 0, own] + nth, 0, jnp.maximum(spans[head, 2, own] - 1, 0))

        def query(task: Array, own: Array, nth: Array, chunks: Any, spans: Any) -> tuple[Array, Array]:  # noqa: ANN401
            return chunks[0], own if outer == "query" else inner(spans, task, own, nth)

        def key(task: Array, own: Array, nth: Array, chunks: Any, spans: Any) -> tuple[Array, Array]:  # noqa: ANN401
            return chunks[1], own if outer == "key" else inner(spans, task, own, nth)

        def rows(place: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Any, ...]]:
            return lambda task, *rest: (task, *place(task, *rest), 0)

        def lanes(place: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Any, ...]]:
            def index(task: Array, *rest: Any) -> tuple[Any, ...]:  # noqa: ANN401
                chunk, block = place(task, *rest)
                return task, chunk, 0, block

            return index

        self.query = pl.BlockSpec((1, 1, blocks.query, dim), rows(query))
        self.kv = pl.BlockSpec((2, 1, 1, blocks.key, dim), lambda *at: (0, *rows(key)(*at)))
        self._lanes = {"query": (blocks.query, lanes(query)), "key": (blocks.key, lanes(key))}

    def numbers(self, which: str, lines: int) -> pl.BlockSpec:
        """Of so many numbers per row of the queries or keys, (N, C, lines, rows)."""
        size, index = self._lanes[which]
        return pl.BlockSpec((1, 1, lines, size), index)

    def rows(self, rows: Rows) -> list[tuple[Array, pl.BlockSpec]]:
        """Queries, keys and values, and marks, with their specs."""
        inputs = [(rows.q, self.query), (rows.kv, self.kv)]
        if rows.marks is None:
            return inputs
        lines = len(self.look.lines)
        numbers = [self.numbers(which, lines) for which in ("query", "key")]
        return [*inputs, *zip(rows.marks, numbers, strict=True)]

    def joint(self, joint: Joint) -> list[tuple[Array, pl.BlockSpec]]:
        """The same for what came out."""
        return [(joint.dout, self.query), (joint.stats, self.numbers("query", 2))]


class Call(NamedTuple):
    """A kernel and its arrays; the last inputs are summed up in place, as the outputs.

    Attributes:
        name: Of the pass.
        kernel: The kernel.
        specs: Its grid.
        multiplies: Matrix multiplies per pair of blocks.
        scalars: Chunks and spans, known before the kernel starts.
        inputs: Arrays and how they are cut.
        sums: How many of the inputs, the last ones, are summed up.
        scratch: Shapes of arrays that last from step to step.
    """

    name: str
    kernel: Callable[..., None]
    specs: Specs
    multiplies: int
    scalars: tuple[Array, Array]
    inputs: list[tuple[Array, pl.BlockSpec]]
    sums: int
    scratch: list[tuple[int, int]]

    @property
    def outputs(self) -> list[tuple[Array, pl.BlockSpec]]:
        """The inputs that are summed up."""
        return self.inputs[-self.sums :]

    def run(self, interpret: bool) -> list[Array]:
        """The sums."""
        specs, dtype = self.specs, self.inputs[0][0].dtype
        first = len(self.scalars) + len(self.inputs) - self.sums
        call = pl.pallas_call(
            self.kernel,
            out_shape=[shaped_like(array, *self.scalars) for array, _ in self.outputs],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=specs.grid,
                in_specs=[spec for _, spec in self.inputs],
                out_specs=[spec for _, spec in self.outputs],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in self.scratch],
            ),
            input_output_aliases={first + i: i for i in range(self.sums)},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            cost_estimate=specs.look.cost(specs.tasks, specs.dim, self.multiplies, dtype.itemsize),
            name=f"ringjax_{self.name}",
            interpret=interpret,
        )
        arrays = *self.scalars, *(array for array, _ in self.inputs)
        return call(*arrays) if interpret else on_its_platform("tpu", call, *arrays, sums=self.sums)
