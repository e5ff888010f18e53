"""Starts processes and creates the mesh and the shardings of a run.

The mesh has three axes: `data` (sequences of a batch), `ring` (positions of a sequence) and `tensor` (heads and hidden
features). All axes have type Auto: the compiler gathers the parameters of a layer where they are used.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax._src.clusters import ClusterEnv  # not public, but the only way to detect processes without connecting
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ringjax as rj
from lm.documents import Split
from lm.flags import RunError, UserError, as_user_error
from lm.peers import Address, Peers
from lm.relay import relayed
from lm.signals import end_with_launcher
from ringjax.aot import neighbor_cycle

AXES = ("data", "ring", "tensor")
_SHUTDOWN_SECONDS = 60  # for all processes to shut down


@contextlib.contextmanager
def started(
    cpu_devices: int, distributed: bool, coordinator: str, num_processes: int, process_id: int, timeout: float
) -> Iterator[None]:
    """Starts JAX, on simulated CPU devices if `cpu_devices` is not 0, and together with other processes.

    With `distributed`, JAX detects the other processes (SLURM, Cloud TPU, ...); otherwise `coordinator` is the address
    of the first one. The loss of a process makes each of the others exit with one line.

    Args:
        cpu_devices: Simulated CPU devices of this process; 0 uses the available devices.
        distributed: Whether JAX detects the other processes.
        coordinator: Address of the first process, HOST:PORT.
        num_processes: Number of processes, with a coordinator.
        process_id: Index of this process, with a coordinator.
        timeout: Seconds within which all processes must join.

    Raises:
        UserError: If not all processes join, `timeout` is not finite, or `process_id` is out of range.
    """
    end_with_launcher()
    if cpu_devices:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError as error:  # JAX is already running, in a notebook or a test
            if jax.device_count() < cpu_devices:
                raise UserError(
                    f"--devices {cpu_devices}: JAX is already running with {jax.device_count()} devices"
                ) from error
    if not coordinator and not distributed:
        yield
        return
    if not math.isfinite(timeout):
        raise UserError(f"--start-timeout must be a number of seconds, got {timeout}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = Address.parse(coordinator) if coordinator else None
    if address is None:
        address, num_processes, process_id = _detect_processes(timeout)
    elif not 0 <= process_id < num_processes:
        raise UserError(
            f"--coordinator requires --num-processes and a --process-id below it, got {num_processes} and {process_id}"
        )
    peers = Peers(address, num_processes, process_id)
    peers.rendezvous(timeout)
    with peers:
        with as_user_error(ValueError, RuntimeError):
            jax.distributed.initialize(
                relayed(address.host, address.port) if process_id else address.text,
                num_processes,
                process_id,
                coordinator_bind_address=address.bind,
                initialization_timeout=math.ceil(timeout),
                heartbeat_timeout_seconds=_SHUTDOWN_SECONDS,  # `Peers` notices a lost process before JAX does
                shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            )
        yield


def _detect_processes(timeout: float) -> tuple[Address, int, int]:
    """Returns the address of the first process, the number of processes and the index of this one."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(address, None, None, None, None, math.ceil(timeout))
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--distributed: JAX cannot detect the other processes: {reason}") from error
    coordinator, num_processes, process_id = found[:3]
    if coordinator is None or num_processes is None or process_id is None:
        raise UserError("--distributed: JAX detects no cluster (SLURM, Open MPI, Cloud TPU, ...); use --coordinator")
    return Address.parse(coordinator, "--distributed"), num_processes, process_id


def make_mesh(devices: Sequence[jax.Device], data: int, ring: int, tensor: int) -> Mesh:
    """Returns a mesh `data` x `ring` x `tensor` over the first devices; a `ring` of 0 uses all remaining devices.

    Raises:
        UserError: If there are too few devices, or if several processes do not use all of them.
    """
    shape = (data, ring or max(1, len(devices) // (data * tensor)), tensor)
    needed = math.prod(shape)
    asked = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape, strict=True))
    if needed > len(devices):
        can_simulate = devices[0].platform == "cpu" and jax.process_count() == 1
        simulated = f" (--devices {needed} simulates them)" if can_simulate else ""
        raise UserError(f"a mesh of {asked} needs {needed} devices, but only {len(devices)} are available{simulated}")
    if needed < len(devices) and jax.process_count() > 1:
        raise UserError(
            f"a mesh of {asked} uses {needed} devices; with several processes it must use all {len(devices)}"
        )
    chosen = list(devices)[:needed]
    if data == tensor == 1 and chosen[0].platform == "tpu":  # adjacent devices are connected, and the last to the first
        by_coords = {tuple(device.coords): device for device in chosen}
        grid = [max(axis) + 1 for axis in zip(*by_coords, strict=True)]
        if math.prod(grid) == needed and needed % 2 == 0:
            chosen = [by_coords[coords] for coords in neighbor_cycle(grid)]
            return Mesh(np.array(chosen).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)
    if any(device.client.runtime_type == "compile_only_runtime" for device in chosen):
        return Mesh(np.array(chosen).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=chosen)


def make_ring(mesh: Mesh, layout: str, strategy: str) -> rj.Ring:
    """Returns the ring of a mesh."""
    axes = {"axis_name": "ring", "batch_axis": "data", "head_axis": "tensor"}
    with as_user_error(ValueError):
        return rj.Ring(mesh, **axes, layout=layout, strategy=strategy)


def needs_zigzag(plan: rj.Plan) -> bool:
    """Returns whether a branch rotates or gathers keys: causal work is then balanced in the zigzag layout only."""
    return any(branch.where not in ("local", "all_to_all") for branch in plan.branches)


def check_fits(mesh: Mesh, ring: rj.Ring, seq_len: int, batch: int, micro_batches: int) -> None:
    """Raises `UserError` if batches of this size do not divide evenly over the mesh."""
    size = mesh.shape["ring"]
    multiple = size * (2 if ring.layout == "zigzag" else 1)
    if seq_len < 1 or seq_len % multiple:
        raise UserError(
            f"--seq-len must be a multiple of {multiple} for layout {ring.layout} on a ring of {size}, got {seq_len}"
        )
    if min(batch, micro_batches) < 1 or batch % (micro_batches * mesh.shape["data"]):
        raise UserError(
            f"--batch must be a multiple of --accumulate x --data, {micro_batches} x {mesh.shape['data']}, got {batch}"
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays of shape (micro-batches, sequences, stored positions)."""
    return NamedSharding(mesh, PartitionSpec(None, "data", "ring"))


def parameter_shardings(parameters: nnx.State, mesh: Mesh) -> Any:
    """Returns the sharding of each parameter as a pure dict: over `tensor` as given by its metadata, and over `data`
    (as in FSDP) along the largest remaining axis that divides evenly.
    """

    def sharding(variable: nnx.Variable) -> NamedSharding:
        shape = variable.get_value().shape
        spec = [*(variable.get_metadata().get("out_sharding") or ()), *(None,) * len(shape)][: len(shape)]
        free = [i for i, size in enumerate(shape) if spec[i] is None and size % mesh.shape["data"] == 0]
        if free and mesh.shape["data"] > 1:
            spec[max(free, key=lambda i: shape[i])] = "data"
        return NamedSharding(mesh, PartitionSpec(*spec))

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return nnx.to_pure_dict(jax.tree.map(sharding, parameters, is_leaf=is_variable))


def optimizer_shardings(optimizer: optax.GradientTransformation, state: Any, parameters: Any, mesh: Mesh) -> Any:
    """Returns the shardings of the optimizer state: moments like the parameters, the rest replicated."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, state, parameters, transform_non_params=lambda _: everywhere
    )


def whole_on_host(tree: Any) -> Any:
    """Gathers arrays to the first local device of this process; all processes must call it."""
    gathered = jax.tree.map(lambda x: NamedSharding(x.sharding.mesh, PartitionSpec()), tree)
    whole = jax.jit(lambda x: x, out_shardings=gathered)(tree)
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x.addressable_data(0)), jax.local_devices()[0]), whole)


def wait_for_all(what: str) -> None:
    """Waits for all other processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def read_same_data(read: Callable[[], Split]) -> Split:
    """Reads the data in every process and checks that all processes found the same files.

    Raises:
        UserError: If a process cannot read the data, or found different files than the first process.
    """
    if jax.process_count() == 1:
        return read()
    split, failure = None, None
    try:
        split = read()
    except (UserError, RunError) as error:  # the other processes wait for this one below
        failure = error
    digest = bytes.fromhex(split.contents) if split else bytes(16)
    found = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest, np.int32)))
    if failure:
        raise failure
    failed = np.flatnonzero(~found.any(axis=1))
    other = np.flatnonzero((found != found[0]).any(axis=1))
    if len(failed):
        raise UserError(f"--data-path: process {_numbers(failed)} cannot read the files; see its message")
    if len(other):
        raise UserError(
            "--data-path: all processes must find the same files (names, sizes and contents): "
            f"process {_numbers(other)} found different files than process 0"
        )
    return split


def _numbers(ranks: np.ndarray) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
