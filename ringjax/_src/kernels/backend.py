"""Which code runs a block: plain XLA, or the kernels of the platform that the program is lowered for."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringjax._src.kernels.cpu import build
from ringjax._src.kernels.cpu.calls import KEY_ROWS
from ringjax._src.kernels.kernel import Blocks, BlockSizes, ceil_div
from ringjax._src.kernels.platform import refused
from ringjax._src.validation import check_instance, check_optional_choice

Implementation = Literal["xla", "pallas", "native", "interpret_tpu", "interpret_gpu"]
Target = Literal["tpu", "gpu", "cpu"]
TARGETS: tuple[Target, ...] = ("tpu", "gpu")  # of Pallas kernels
_PLATFORM = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
_OF_IMPLEMENTATION: dict[Implementation | None, tuple[Target, ...]] = {
    None: (*TARGETS, "cpu"),
    "pallas": TARGETS,
    "native": ("cpu",),
}
_MOST_DIM = 256
_MOST_POSITIONS = 2**31 - 1  # their numbers are int32
_CPU_ROWS = {"forward": 512, "gradient": 256}  # of a query block: all it holds stays in a core's second cache
_SM_80 = 8.0  # Ampere

Given = TypeVar("Given")
Result = TypeVar("Result")


class _Limits(NamedTuple):
    """What the kernels of a target take."""

    dtypes: tuple[str, ...]
    least_dim: int
    least_rows: int  # fewer are not worth a kernel
    least_block: int


_LIMITS: dict[Target, _Limits] = {
    "tpu": _Limits(("bfloat16", "float32"), 16, 16, 128),  # blocks of the lanes of a register
    "gpu": _Limits(("bfloat16", "float16", "float32"), 16, 16, 16),  # of a tile of the tensor cores
    "cpu": _Limits(("bfloat16", "float16", "float32", "float64"), 1, 1, KEY_ROWS),
}


class Case(NamedTuple):
    """What decides whether kernels apply.

    Attributes:
        dtype: Of query, key and value.
        head_dim: Dimensions per head.
        rows: Key rows of a task.
        group: Query heads per key/value head.
        ids: Dtype of the segment ids, or "".
        positions: Positions of a device, over all entries of its batch; 0 where they do not matter.
    """

    dtype: str
    head_dim: int
    rows: int
    group: int
    ids: str = ""
    positions: int = 0

    def misfit(self, target: Target, sizes: BlockSizes | None = None) -> str:
        """Why the kernels of a target do not apply (with these block sizes), or ""."""
        dtypes, least_dim, least_rows, least_block = _LIMITS[target]
        block = least_block if sizes is None else min(dataclasses.astuple(sizes))
        ids_fit = not self.ids or jnp.can_cast(self.ids, jnp.int32)
        rules = {
            f"take {', '.join(dtypes)}, not {self.dtype}": self.dtype in dtypes,
            f"take head dims from {least_dim} to {_MOST_DIM}, not {self.head_dim}": least_dim
            <= self.head_dim
            <= _MOST_DIM,
            f"take at least {least_rows} selected rows per segment or chunk, not {self.rows}": self.rows >= least_rows,
            f"take blocks of at least {least_block} rows, not {block}": block >= least_block,
            f"take segment ids that fit int32, not {self.ids}": ids_fit,
            f"take at most {_MOST_POSITIONS} positions (batch times length), not {self.positions}": self.positions
            <= _MOST_POSITIONS,
        }
        return next((f"the {target} kernels {rule}" for rule, holds in rules.items() if not holds), "")

    def blocks(self, target: Target, sizes: BlockSizes | None, *, is_gradient: bool, has_marks: bool = False) -> Blocks:
        """The blocks of a pass: as given, or by what compiles without spilling registers or memory."""
        if target == "cpu":
            return Blocks(_CPU_ROWS["gradient" if is_gradient else "forward"], KEY_ROWS)
        rows, least = (self.rows * self.group, self.rows), _LIMITS[target].least_block
        if sizes is not None:
            given = (sizes.grad_query, sizes.grad_key) if is_gradient else (sizes.query, sizes.key)
            return Blocks(*(max(least, min(size, _power_above(n))) for size, n in zip(given, rows, strict=True)))
        if target == "gpu":
            chosen = self._gpu_blocks(is_gradient, has_marks)
        else:
            is_small, is_wide = self.dtype == "bfloat16", self.head_dim > 128
            chosen = (256, 256) if is_wide and not is_small else (512, 512) if is_wide or not is_small else (1024, 1024)
        return Blocks(*(_fitting(size, n, least) for size, n in zip(chosen, rows, strict=True)))

    def _gpu_blocks(self, is_gradient: bool, has_marks: bool) -> tuple[int, int]:
        """Seen by the compilers for sm_80, sm_90 and sm_100 to spill nothing forward (to 128 dims), and little else."""
        if self.dtype == "float32":  # no tensor cores: sums take registers
            return 16, 32
        if self.head_dim > 128:
            return 32, 32
        if is_gradient:
            return 64, 64
        is_plain = not has_marks and (self.head_dim <= 64 or self.head_dim == 128)  # 80 and 96 are masked to 128
        return 128, 64 if is_plain else 32


def _fitting(size: int, rows: int, least: int) -> int:
    """The largest size up to this one, halved at will, that leaves little of its blocks empty."""
    while size > least and ceil_div(rows, size) * size > 1.125 * ceil_div(rows, least) * least:
        size //= 2
    return max(size, least)


def _power_above(rows: int) -> int:
    """The least power of two that holds so many rows."""
    return 1 << max(0, rows - 1).bit_length()


@functools.cache
def _oldest_gpu() -> float:
    """Least compute capability of the GPUs that this process has; infinite without any.

    A program is lowered for a platform, whatever the generation of its devices: the devices at hand have to tell.
    """
    try:
        found = [float(getattr(device, "compute_capability", "inf")) for device in jax.local_devices(backend="cuda")]
    except RuntimeError:
        found = []
    return min(found, default=float("inf"))


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of a target, with sizes if given, interpreted or not."""

    target: Target
    sizes: BlockSizes | None = None
    interpret: bool = False


@dataclasses.dataclass(frozen=True)
class Backend:
    """How a caller wants blocks to be run.

    Attributes:
        implementation: None for the kernels of the platform where they apply; ``"xla"``; ``"pallas"``, the kernels on
            TPU and GPU; ``"native"``, those on CPU; or ``"interpret_tpu"`` and ``"interpret_gpu"`` for kernels
            interpreted on any platform.
        sizes: Block sizes of the Pallas kernels, or None for our own.
    """

    implementation: Implementation | None = None
    sizes: BlockSizes | None = None

    @property
    def is_interpreted(self) -> bool:
        """Whether kernels are interpreted."""
        return self.implementation in ("interpret_tpu", "interpret_gpu")

    def run(
        self, case: Case, given: Given, xla: Callable[[Given], Result], kernel: Callable[[Kernels, Given], Result]
    ) -> Result:
        """Runs `xla` or `kernel` on what is given; which one is decided when the program is lowered for a platform."""
        if self.implementation == "xla":
            return xla(given)
        if self.is_interpreted:
            target: Target = "tpu" if self.implementation == "interpret_tpu" else "gpu"
            self._check(case, (target,))
            return kernel(Kernels(target, self.sizes, interpret=True), given)
        targets = _OF_IMPLEMENTATION[self.implementation]
        if self.implementation is not None:
            self._check(case, targets)
        fitting = [target for target in targets if not self._misfit(case, target)]
        if not fitting:
            return xla(given)
        branches = {_PLATFORM[x]: functools.partial(kernel, Kernels(x, self.sizes)) for x in fitting}
        default = xla if self.implementation is None else functools.partial(self._refused, case, xla)
        return lax.platform_dependent(given, **branches, default=default)

    def _refused(self, case: Case, xla: Callable[[Given], Result], given: Given) -> Result:
        """What takes the place of `xla` where kernels are asked for on a platform that has none."""
        targets = _OF_IMPLEMENTATION[self.implementation]
        misfits = "".join(f" ({reason})" for x in targets if (reason := self._misfit(case, x)))
        checked = ', or "interpret_tpu" or "interpret_gpu" to check the kernels there' if "tpu" in targets else ""
        reason = (
            f"`implementation={self.implementation!r}` has kernels for {' and '.join(_PLATFORM[x] for x in targets)} "
            f'only{misfits}; use None or "xla" elsewhere{checked}.'
        )
        return xla(refused(given, reason))

    def _misfit(self, case: Case, target: Target) -> str:
        """Why the kernels of a target do not apply to a case on the devices at hand, or ""."""
        if target == "gpu" and not self.is_interpreted and _oldest_gpu() < _SM_80:
            return f"the gpu kernels need compute capability {_SM_80}, not {_oldest_gpu()}"
        if target == "cpu":
            if self.implementation is None and jax.default_backend() != "cpu":
                return "another platform is the default"  # nothing is compiled for it unless asked for
            if misfit := case.misfit("cpu"):
                return misfit
            if (reason := build.why_not()) and self.implementation is None:
                build.warn_once(reason)
            return reason and f"the cpu kernels are not there: {reason}"
        return case.misfit(target, self.sizes)

    def _check(self, case: Case, targets: tuple[Target, ...]) -> None:
        misfits = [self._misfit(case, target) for target in targets]
        if all(misfits):
            raise NotImplementedError(
                f"`implementation={self.implementation!r}` cannot do this case: {'; '.join(misfits)}. "
                '`implementation="xla"` does, and None chooses it by itself.'
            )


def check_backend(implementation: Implementation | None, block_sizes: BlockSizes | None) -> Backend:
    """Checks what a caller asks for, and returns it."""
    check_optional_choice("implementation", implementation, get_args(Implementation))
    if block_sizes is not None:
        check_instance("block_sizes", block_sizes, BlockSizes)
        if implementation in ("xla", "native"):
            raise ValueError(
                f"`block_sizes` must be None with `implementation={implementation!r}`, which has no Pallas kernels, "
                f"got {block_sizes}."
            )
    return Backend(implementation, block_sizes)


def case_of(query: Array, rows: int, group: int, ids: Array | None = None) -> Case:
    """Returns the case of these arrays; the query is (B, T, K, G, H), or (N, C, rows * G, H) for packed rows."""
    positions = math.prod(query.shape[:2]) if query.ndim == 5 else math.prod(query.shape[:-1]) // group
    return Case(query.dtype.name, query.shape[-1], rows, group, "" if ids is None else ids.dtype.name, positions)
