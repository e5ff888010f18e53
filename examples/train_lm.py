"""Trains a LongNet language model on bytes, from a laptop to many hosts: copy it and change it.

    python examples/train_lm.py --devices 8                       # 8 simulated CPU devices; `make train`
    python examples/train_lm.py --data 2 --ring 4 --data-path texts/ --resume
    python examples/launch_local.py --processes 2 --devices 2 -- --steps 30
    python examples/train_lm.py --aot v5e:4x4 --seq-len 262144 ...    # compile for devices that are not there

What you will want to change is in this file: the options, the model, the loss and the step. Data, devices, checkpoints
and display are in `examples/lm/`. Many hosts, checkpoints, memory and compiler flags: docs/training.md.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from lm import aot, data, devices, flags
from lm.agreement import all_or_none
from lm.checkpoints import Checkpoints, is_stuck
from lm.display import Display, complain, flush_stdout, keep_stdout_for_records, memory_line, never_fail_to_encode
from lm.flags import RunError, UserError, above, as_user_error, at_least, at_most, flag, one_of, parse
from lm.folder import PROFILED_STEPS, Profile, run_folder, write_config
from lm.signals import StopRequest

import ringjax as rj
from ringjax.models import LongNetConfig, LongNetDecoder, token_loss

VOCABULARY = 256  # bytes
DTYPE = one_of("auto", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that can be asked for; the defaults train on a laptop in a few minutes."""

    # the model
    layers: int = flag(2, "blocks", at_least(1))
    features: int = flag(64, "width of the residual stream", at_least(1))
    heads: int = flag(4, "query heads", at_least(1))
    kv_heads: int = flag(0, "key/value heads; 0: as many as query heads", at_least(0))
    segments: tuple[int, ...] = flag(
        (128, 512, 2048), "segment lengths of the attention, of one branch each", at_least(1)
    )
    rates: tuple[int, ...] = flag((1, 2, 4), "dilation rates, of the same branches", at_least(1))
    positions: str = flag("rotary", "rotary or xpos")
    dtype: str = flag("auto", "of the computation; auto: bfloat16 where the devices have it, else float32", DTYPE)
    remat: bool = flag(True, "compute blocks again in the backward pass, all but attention")
    # the training
    seq_len: int = flag(2048, "bytes in a sequence", at_least(2))
    batch: int = flag(4, "sequences in an optimiser step, of all devices together", at_least(1))
    accumulate: int = flag(1, "micro-batches of a step, one after the other", at_least(1))
    steps: int = flag(250, "optimiser steps", at_least(1))
    learning_rate: float = flag(1e-2, "highest learning rate", above(0))
    warmup: int = flag(20, "steps in which it rises; then it falls along a cosine to a tenth", at_least(1))
    weight_decay: float = flag(0.1, "of AdamW, for matrices", at_least(0))
    clip: float = flag(1.0, "largest norm of a gradient", above(0))
    seed: int = flag(0, "of initial parameters, shuffling and sampling", at_least(0), at_most(2**32 - 1))
    # the data
    data_path: tuple[str, ...] = flag((), "files, folders or patterns; by default Python's standard library")
    eval_every: int = flag(100, "steps between evaluations on held-out documents; 0: none", at_least(0))
    eval_batches: int = flag(2, "batches of an evaluation", at_least(1))
    # the devices
    data: int = flag(1, "mesh axis: devices that share the sequences of a batch, and the parameters", at_least(1))
    ring: int = flag(0, "mesh axis: devices that share a sequence; 0: all that are left", at_least(0))
    tensor: int = flag(1, "mesh axis: devices that share heads and hidden features", at_least(1))
    layout: str = flag("auto", "contiguous or zigzag; auto: zigzag on a ring of several devices")
    devices: int = flag(0, "simulated CPU devices of each process; 0: the devices that there are", at_least(0))
    distributed: bool = flag(False, "several processes, which JAX finds by itself (SLURM, Cloud TPU)")
    coordinator: str = flag("", "several processes: HOST:PORT of the first one", flags.ADDRESS)
    num_processes: int = flag(1, "how many, with --coordinator", at_least(1))
    process_id: int = flag(-1, "which one this is, from 0, with --coordinator", at_least(-1))
    start_timeout: float = flag(60.0, "seconds in which all processes have to come", at_least(1))
    # what is written and shown
    out: str = flag("runs/lm", "folder for metrics, checkpoints, curve and sample", flags.NAMED_PATH, flags.PATH)
    resume: bool = flag(False, "go on from the newest checkpoint, if there is one")
    overwrite: bool = flag(False, "delete an earlier run in the same folder; damaged checkpoints are kept")
    save_every: int = flag(100, "steps between checkpoints; 0: at the end only", at_least(0))
    keep: int = flag(3, "checkpoints that stay", at_least(1))
    log_every: int = flag(10, "steps between lines", at_least(1))
    json: bool = flag(False, "write the JSON lines to stdout, everything else to stderr")
    prompt: str = flag("def ", "what the sample at the end begins with")
    sample_bytes: int = flag(200, "length of the sample; 0: none", at_least(0))
    profile: str = flag("", f"folder for a profile of {PROFILED_STEPS} steps", flags.PATH)
    compile_only: bool = flag(False, "compile the training step, say what memory it takes, and end")
    aot: str = flag("", "compile for devices that are not there, such as v5e:4x4 or H100 (8 of them), and end")


class State(NamedTuple):
    """What training changes; a checkpoint holds it whole."""

    parameters: Any
    optimizer: Any
    rng: Array


def model_config(config: Config, device: jax.Device) -> LongNetConfig:
    dtype = rj.compute_dtype(device) if config.dtype == "auto" else jnp.dtype(config.dtype)
    return LongNetConfig(
        vocab_size=VOCABULARY,
        num_layers=config.layers,
        features=config.features,
        num_heads=config.heads,
        num_kv_heads=config.kv_heads or None,
        pattern=rj.DilationPattern(config.segments, config.rates),
        positions=config.positions,
        remat=config.remat,
        dtype=dtype,
    )


def make_optimizer(config: Config) -> optax.GradientTransformation:
    adamw = optax.adamw(
        learning_rate(config), weight_decay=config.weight_decay, mask=functools.partial(jax.tree.map, is_matrix)
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def learning_rate(config: Config) -> optax.Schedule:
    peak = config.learning_rate
    return optax.warmup_cosine_decay_schedule(
        0.1 * peak, peak, config.warmup, max(config.steps, config.warmup + 1), 0.1 * peak
    )


def is_matrix(parameter: Array) -> bool:
    """Not a norm's scale or bias; all have a leading axis of layers but the last norm."""
    return parameter.ndim > 2 or (parameter.ndim == 2 and parameter.shape[0] == VOCABULARY)


def filled(graph: Any, variables: nnx.State, parameters: Any) -> LongNetDecoder:
    """The model with these parameters, a pure dict of arrays."""
    variables = jax.tree.map(lambda x: x, variables)  # a copy: variables are mutable
    nnx.replace_by_pure_dict(variables, parameters)
    return nnx.merge(graph, variables)


class Training:
    """The pieces of a run on a mesh: shardings, and the functions that are compiled."""

    def __init__(self, config: Config, mesh: jax.sharding.Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.ring = devices.make_ring(mesh, config.layout)
        devices.check_fits(mesh, self.ring, config.seq_len, config.batch, config.accumulate)
        with as_user_error(ValueError, TypeError, NotImplementedError):
            self.model_config = model_config(config, mesh.devices.flat[0])
            self.plan = rj.plan(
                self.model_config.pattern,
                seq_len=config.seq_len,
                num_heads=config.heads,
                head_dim=config.features // config.heads,
                num_kv_heads=config.kv_heads or None,
                ring_size=mesh.shape["ring"],
                batch=config.batch // config.accumulate // mesh.shape["data"],
                layout=self.ring.layout,
                is_causal=True,
                dtype=self.model_config.dtype,
                has_segment_ids=True,
                head_shards=mesh.shape["tensor"],
            )
            model = nnx.eval_shape(functools.partial(self.new_model, self.ring))
        self.optimizer = make_optimizer(config)
        self.graph, self.variables = nnx.split(model)
        parameters = devices.parameter_shardings(self.variables, mesh)
        shapes = jax.eval_shape(self.new_state)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self.shardings = State(
            parameters,
            devices.optimizer_shardings(self.optimizer, shapes.optimizer, parameters, mesh),
            everywhere,
        )
        self.wanted = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, self.shardings
        )
        whole = (config.accumulate, config.batch // config.accumulate, config.seq_len)
        shaped = functools.partial(jax.ShapeDtypeStruct, whole, sharding=devices.batch_sharding(mesh))
        self.wanted_batch = data.Batch(shaped(jnp.int32), shaped(jnp.int32), shaped(jnp.float32), shaped(jnp.int32))
        self.init = jax.jit(self.new_state, out_shardings=self.shardings)
        self.step = jax.jit(self.train_step, out_shardings=(self.shardings, everywhere), donate_argnums=0)
        self.evaluate = jax.jit(self.sums, out_shardings=everywhere)

    def new_model(self, ring: rj.Ring | None) -> LongNetDecoder:
        return LongNetDecoder(self.model_config, ring=ring, rngs=nnx.Rngs(self.config.seed))

    def new_state(self) -> State:
        """The same numbers on every mesh: they are drawn as if on one device."""
        parameters = nnx.to_pure_dict(nnx.state(self.new_model(self.ring)))
        return State(parameters, self.optimizer.init(parameters), jax.random.key_data(jax.random.key(self.config.seed)))

    def loss(self, parameters: Any, part: data.Batch) -> tuple[Array, Array]:
        """The loss of a micro-batch, summed over its tokens, and the number of tokens."""
        model = filled(self.graph, self.variables, parameters)
        logits = model(part.tokens, segment_ids=part.segment_ids)
        return token_loss(logits, part.targets, part.weights)

    def train_step(self, state: State, batch: data.Batch) -> tuple[State, dict[str, Array]]:
        """One step of the optimiser on all micro-batches: with sums over all tokens, the loss is that of any mesh."""

        def add(sums: Any, part: data.Batch) -> tuple[Any, None]:
            value, gradient = jax.value_and_grad(self.loss, has_aux=True)(state.parameters, part)
            return jax.tree.map(jnp.add, sums, (value, gradient)), None

        zero = jnp.zeros(())
        zeros = ((zero, zero), jax.tree.map(jnp.zeros_like, state.parameters))
        ((loss, tokens), gradient), _ = lax.scan(add, zeros, batch)
        tokens = jnp.maximum(tokens, 1)
        gradient = jax.tree.map(lambda x: x / tokens, gradient)
        gradient = lax.with_sharding_constraint(gradient, self.shardings.parameters)
        changes, optimizer = self.optimizer.update(gradient, state.optimizer, state.parameters)
        figures = {"loss": loss / tokens, "tokens": tokens, "gradient_norm": optax.tree.norm(gradient)}
        return State(optax.apply_updates(state.parameters, changes), optimizer, state.rng), figures

    def sums(self, parameters: Any, batch: data.Batch) -> tuple[Array, Array]:
        """The loss of all micro-batches, summed, and the number of tokens."""
        _, sums = lax.scan(lambda _, part: (None, self.loss(parameters, part)), None, batch)
        return sums[0].sum(), sums[1].sum()

    def batches(self, documents: Sequence[data.Document], seed: int | None) -> data.Batches:
        layout = (self.ring.layout, self.mesh.shape["ring"])
        return data.Batches(documents, self.config.seq_len, devices.batch_sharding(self.mesh), layout, seed)

    def order(self) -> dict[str, int]:
        """What a number of rows seen means: row `n` of a run follows from these, and from the data."""
        return {"seq_len": self.config.seq_len, "seed": self.config.seed}

    def facts(self) -> dict[str, str]:
        """What the parameters mean: a checkpoint of a model with other facts is not for this one."""
        free = ("remat", "scan_layers", "dtype")
        fields = [field.name for field in dataclasses.fields(self.model_config) if field.name not in free]
        return {name: str(getattr(self.model_config, name)) for name in fields}


def train(training: Training, split: data.Split, display: Display, profile: Profile) -> int:
    """Trains until the last step or a request to stop, and returns the exit code."""
    config, folder = training.config, pathlib.Path(training.config.out)
    checkpoints = Checkpoints(folder / "checkpoints", config.keep, display.say)
    source = {"seed": config.seed, **split.facts()}
    facts = {"model": training.facts(), "data": source, "order": training.order()}
    step, rows, state = begin(training, checkpoints, facts, display)
    first = step
    entropy = data.unigram_entropy(split.train) if display.is_first else 0.0
    display.say(f"unigram entropy of the corpus: {entropy:.4f} nats per byte")
    batches, held_out = training.batches(split.train, config.seed), training.batches(split.held_out, None)
    compiled = training.step.lower(training.wanted, training.wanted_batch).compile()
    display.say(memory_line(compiled))
    sizes = (config.accumulate, config.batch // config.accumulate)
    figures: dict[str, Array] = {}
    asked = False
    with StopRequest() as stop, checkpoints, profile, display:
        display.clock.reset(step)
        while step < config.steps and not asked:
            profile.before_step(step - first)
            batch = batches.batch(rows, *sizes)  # read while the step before is computed
            jax.block_until_ready(figures)
            state, figures = compiled(state, batch)
            step, rows = step + 1, rows + config.batch
            display.advance(step)
            asked = stop.at(step)
            is_end, is_first = asked or step == config.steps, step == first + 1
            shown, tested, saved = (
                is_end or (every > 0 and step % every == 0)
                for every in (config.log_every, config.eval_every, config.save_every)
            )
            if saved or shown:
                check_finite(step, figures)
            if shown or tested or is_first:
                record = {"step": step, **{name: float(x) for name, x in figures.items()}}
                record |= {"learning_rate": float(learning_rate(config)(step - 1)), **display.clock.speed(step)}
                if tested and config.eval_every and not asked:
                    record["validation_loss"] = evaluate(training, state, held_out, sizes)
                display.log(record)
                display.clock.reset(step)
            if saved:
                display.sync()
                checkpoints.save(step, state, {**facts, "rows": rows})
                display.clock.reset(step)
    if asked and step < config.steps:
        display.say(f"asked to stop: step {step} is saved; --resume goes on from it")
        return 128 + stop.signal
    display.finish(sample(training, state) if config.sample_bytes else "", entropy)
    display.raise_problems()
    return 0


def check_finite(step: int, figures: dict[str, Array]) -> None:
    for name in ("loss", "gradient_norm"):
        if not np.isfinite(value := float(figures[name])):
            raise RunError(f"the {name} of step {step} is {value}; the checkpoints before it are kept")


def begin(
    training: Training, checkpoints: Checkpoints, facts: dict[str, Any], display: Display
) -> tuple[int, int, State]:
    """Steps done, rows seen, and the state: those of the newest checkpoint, if the user wants to go on, or new ones.

    Files of an earlier run are changed only after its checkpoint was accepted.
    """
    check = functools.partial(check_facts, facts)
    restored = checkpoints.restore(training.wanted, check) if training.config.resume else None
    if restored is not None:
        display.say(f"going on from the checkpoint of step {restored.step}")
        if restored.facts["data"] != facts["data"]:
            display.say(f"other data than those of the checkpoint: {facts['data']} instead of {restored.facts['data']}")
    with all_or_none("use metrics.jsonl"):
        display.begin(restored.step if restored else 0)
    display.attempt("config.json", lambda: write_config(display.folder, training.config))
    return (restored.step, restored.facts["rows"], restored.state) if restored else (0, 0, training.init())


def check_facts(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuses the checkpoint of another model, or one that counts other rows of the data, in one line."""
    for kind, what in (("model", "is of another model"), ("order", "counts rows of data in another order")):
        ours, theirs = expected[kind], found.get(kind, {})
        other = [f"{name} {theirs.get(name)} instead of {x}" for name, x in ours.items() if theirs.get(name) != x]
        if other:
            raise UserError(f"--resume: the checkpoint {what}: {', '.join(other)}")


def evaluate(training: Training, state: State, held_out: data.Batches, sizes: tuple[int, int]) -> float:
    """The loss on held-out documents, per token."""
    config = training.config
    batches = (held_out.batch(i * config.batch, *sizes) for i in range(config.eval_batches))
    sums = [training.evaluate(state.parameters, batch) for batch in batches]
    loss, tokens = (sum(float(x[i]) for x in sums) for i in (0, 1))
    return loss / max(tokens, 1.0)


def sample(training: Training, state: State) -> str:
    """Text from the model, on one device with the decode cache; all processes help to bring the parameters there."""
    parameters, rng = devices.whole_on_host((state.parameters, state.rng))
    if jax.process_index():
        return ""
    model = filled(*nnx.split(nnx.eval_shape(functools.partial(training.new_model, None))), parameters)
    prompt = np.frombuffer(os.fsencode(training.config.prompt) or b"\n", np.uint8)
    given, length = jnp.asarray(prompt, jnp.int32)[None], training.config.sample_bytes
    tokens = model.generate(given, length, rng=jax.random.wrap_key_data(rng), temperature=0.8)
    return (prompt.tobytes() + bytes(np.asarray(tokens)[0].tolist())).decode(errors="replace")


def check_processes(config: Config) -> None:
    if not config.coordinator and (config.num_processes, config.process_id) != (1, -1):
        raise UserError("--num-processes and --process-id need --coordinator")


def run(config: Config) -> int:
    if config.aot:
        return run_on(config, *aot.target_devices(config.aot))
    processes = (config.distributed, config.coordinator, config.num_processes, config.process_id, config.start_timeout)
    with devices.started(config.devices, *processes):
        return run_on(config, None, jax.devices())


def run_on(config: Config, target: Any | None, there: Sequence[jax.Device]) -> int:
    mesh = devices.make_mesh(there, config.data, config.ring, config.tensor)
    training = Training(config, mesh)
    display = Display(pathlib.Path(config.out), config.steps, config.batch * config.seq_len, config.json)
    count = sum(x.size for x in jax.tree.leaves(training.wanted.parameters))
    display.say(f"mesh {dict(mesh.shape)}, {count:,} parameters, computed in {training.model_config.dtype}")
    display.say(str(training.plan))
    if target or config.compile_only:
        compiled = training.step.lower(training.wanted, training.wanted_batch).compile()
        if target:
            return 0 if aot.report(target, compiled, display.say) else 1
        display.say(memory_line(compiled))
        return 0
    split = devices.read_alike(lambda: data.read_documents(config.data_path, display.say))
    sizes = [f"{sum(x.size for x in part) / 1e6:.2f} MB in {len(part):,} documents" for part in split[:2]]
    display.say(f"data: {sizes[0]}, held out {sizes[1]}")
    profile, folder = Profile(config.profile, display.problem), pathlib.Path(config.out)
    with run_folder(folder, resume=config.resume, overwrite=config.overwrite, report=display.say):
        return train(training, split, display, profile)


def main(argv: Sequence[str] | None = None) -> int:
    never_fail_to_encode()
    try:
        config = parse(Config, __doc__.splitlines()[0], argv)
        check_processes(config)
        if config.json and argv is None:  # a process of its own
            keep_stdout_for_records()
        return run(config)
    except (UserError, RunError) as error:
        complain(f"train_lm: {error}")
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        complain("train_lm: interrupted")
        return 130


if __name__ == "__main__":
    code = main()
    flush_stdout()
    if is_stuck.is_set():
        os._exit(code)  # Python would wait for the writer of the checkpoint
    sys.exit(code)
