"""Trains a byte-level LongNet language model on anything from a laptop to many hosts.

    python examples/train_lm.py --devices 8                       # 8 simulated CPU devices; `make train`
    python examples/train_lm.py --data 2 --ring 4 --data-path texts/ --resume
    python examples/launch_local.py --processes 2 --devices 2 -- --steps 30
    python examples/train_lm.py --aot v5e:4x4 --seq-len 262144 ...    # compile ahead of time for a TPU

The script is meant to be copied and modified. The options, the model, the loss and the training step are in this file;
data, devices, checkpoints and display are in `examples/lm/`. See docs/training.md for multi-host runs, checkpoints,
memory and compiler flags.
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
    """Command-line options; the defaults train on a laptop in a few minutes."""

    # model
    layers: int = flag(2, "transformer blocks", at_least(1))
    features: int = flag(64, "width of the residual stream", at_least(1))
    heads: int = flag(4, "query heads", at_least(1))
    kv_heads: int = flag(0, "key/value heads; 0: same as --heads", at_least(0))
    segments: tuple[int, ...] = flag((128, 512, 2048), "segment length of each attention branch", at_least(1))
    rates: tuple[int, ...] = flag((1, 2, 4), "dilation rate of each attention branch", at_least(1))
    positions: str = flag("rotary", "positional encoding: rotary or xpos")
    dtype: str = flag("auto", "compute dtype; auto: bfloat16 if the devices support it natively, else float32", DTYPE)
    remat: bool = flag(True, "rematerialize blocks in the backward pass, except attention")
    # training
    seq_len: int = flag(2048, "sequence length in bytes", at_least(2))
    batch: int = flag(4, "sequences per optimizer step, over all devices", at_least(1))
    accumulate: int = flag(1, "micro-batches per optimizer step", at_least(1))
    steps: int = flag(250, "optimizer steps", at_least(1))
    learning_rate: float = flag(1e-2, "peak learning rate", above(0))
    warmup: int = flag(
        20, "warmup steps; then the learning rate decays along a cosine to a tenth of its peak", at_least(1)
    )
    weight_decay: float = flag(0.1, "weight decay of AdamW, applied to matrices", at_least(0))
    clip: float = flag(1.0, "maximum gradient norm", above(0))
    seed: int = flag(0, "seed of initial parameters, shuffling and sampling", at_least(0), at_most(2**32 - 1))
    # data
    data_path: tuple[str, ...] = flag((), "files, folders or glob patterns; default: Python's standard library")
    eval_every: int = flag(100, "steps between evaluations on held-out documents; 0: none", at_least(0))
    eval_batches: int = flag(2, "batches per evaluation", at_least(1))
    # devices
    data: int = flag(1, "mesh axis: devices that shard the batch and the parameters (FSDP)", at_least(1))
    ring: int = flag(0, "mesh axis: devices that shard a sequence; 0: all remaining devices", at_least(0))
    tensor: int = flag(1, "mesh axis: devices that shard heads and hidden features", at_least(1))
    layout: str = flag("auto", "contiguous or zigzag; auto: zigzag if keys rotate or are gathered")
    strategy: str = flag("auto", "how devices share segments: all_to_all, ring, ...; auto: what the plan finds fastest")
    devices: int = flag(0, "simulated CPU devices per process; 0: use the available devices", at_least(0))
    distributed: bool = flag(False, "run several processes, detected by JAX (SLURM, Cloud TPU)")
    coordinator: str = flag("", "run several processes: HOST:PORT of the first one", flags.ADDRESS)
    num_processes: int = flag(1, "number of processes, with --coordinator", at_least(1))
    process_id: int = flag(-1, "index of this process, from 0, with --coordinator", at_least(-1))
    start_timeout: float = flag(60.0, "seconds within which all processes must join", at_least(1))
    # output
    out: str = flag("runs/lm", "folder for metrics, checkpoints, loss curve and sample", flags.NAMED_PATH, flags.PATH)
    resume: bool = flag(False, "continue from the newest checkpoint, if there is one")
    overwrite: bool = flag(False, "delete an earlier run in the same folder; damaged checkpoints are kept")
    save_every: int = flag(100, "steps between checkpoints; 0: only at the end", at_least(0))
    keep: int = flag(3, "number of checkpoints to keep", at_least(1))
    log_every: int = flag(10, "steps between log lines", at_least(1))
    json: bool = flag(False, "write JSON lines to stdout and everything else to stderr")
    prompt: str = flag("def ", "prompt of the final sample")
    sample_bytes: int = flag(200, "length of the final sample; 0: none", at_least(0))
    profile: str = flag("", f"folder for a profile of {PROFILED_STEPS} steps", flags.PATH)
    compile_only: bool = flag(False, "compile the training step, print its memory and exit")
    aot: str = flag("", "compile for a topology such as v5e:4x4 or H100 (8 devices) and exit")


class State(NamedTuple):
    """Training state, saved in full by every checkpoint."""

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
    """Returns whether a parameter is a matrix, not the scale or bias of a norm.

    Parameters of blocks have a leading axis of layers.
    """
    return parameter.ndim > 2 or (parameter.ndim == 2 and parameter.shape[0] == VOCABULARY)


def load_params(graph: Any, variables: nnx.State, parameters: Any) -> LongNetDecoder:
    """Returns the model with the given parameters, a pure dict of arrays."""
    variables = jax.tree.map(lambda x: x, variables)  # a copy: variables are mutable
    nnx.replace_by_pure_dict(variables, parameters)
    return nnx.merge(graph, variables)


class Training:
    """Shardings and compiled functions of a run on a mesh."""

    def __init__(self, config: Config, mesh: jax.sharding.Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.ring = self.make_ring("contiguous" if config.layout == "auto" else config.layout)
        with as_user_error(ValueError, TypeError, NotImplementedError):
            self.model_config = model_config(config, mesh.devices.flat[0])
            self.plan = self.make_plan()
            if config.layout == "auto" and devices.needs_zigzag(self.plan):
                self.ring = self.make_ring("zigzag")
                self.plan = self.make_plan()
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

    def make_ring(self, layout: str) -> rj.Ring:
        """Returns the ring, after checking that batches divide evenly over it."""
        ring = devices.make_ring(self.mesh, layout, self.config.strategy)
        devices.check_fits(self.mesh, ring, self.config.seq_len, self.config.batch, self.config.accumulate)
        return ring

    def make_plan(self) -> rj.Plan:
        """Returns the plan of the attention of a layer."""
        config, sizes = self.config, self.mesh.shape
        return rj.plan(
            self.model_config.pattern,
            seq_len=config.seq_len,
            num_heads=config.heads,
            head_dim=config.features // config.heads,
            num_kv_heads=config.kv_heads or None,
            ring_size=sizes["ring"],
            batch=config.batch // config.accumulate // sizes["data"],
            layout=self.ring.layout,
            is_causal=True,
            dtype=self.model_config.dtype,
            strategy=self.ring.strategy,
            has_segment_ids=True,
            head_shards=sizes["tensor"],
            device=self.ring.device(),
        )

    def new_model(self, ring: rj.Ring | None) -> LongNetDecoder:
        return LongNetDecoder(self.model_config, ring=ring, rngs=nnx.Rngs(self.config.seed))

    def new_state(self) -> State:
        """Returns the initial state, which is the same on every mesh: it is drawn as if on one device."""
        parameters = nnx.to_pure_dict(nnx.state(self.new_model(self.ring)))
        return State(parameters, self.optimizer.init(parameters), jax.random.key_data(jax.random.key(self.config.seed)))

    def loss(self, parameters: Any, part: data.Batch) -> tuple[Array, Array]:
        """Returns the loss of a micro-batch, summed over its tokens, and the number of tokens."""
        model = load_params(self.graph, self.variables, parameters)
        logits = model(part.tokens, segment_ids=part.segment_ids)
        return token_loss(logits, part.targets, part.weights)

    def train_step(self, state: State, batch: data.Batch) -> tuple[State, dict[str, Array]]:
        """Runs one optimizer step over all micro-batches; sums over all tokens make it independent of the mesh."""

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
        """Returns the loss summed over all micro-batches, and the number of tokens."""
        _, sums = lax.scan(lambda _, part: (None, self.loss(parameters, part)), None, batch)
        return sums[0].sum(), sums[1].sum()

    def batches(self, documents: Sequence[data.Document], seed: int | None) -> data.Batches:
        layout = (self.ring.layout, self.mesh.shape["ring"])
        return data.Batches(documents, self.config.seq_len, devices.batch_sharding(self.mesh), layout, seed)

    def order(self) -> dict[str, int]:
        """Returns what determines the order of rows: row `n` of a run depends on these values and on the data."""
        return {"seq_len": self.config.seq_len, "seed": self.config.seed}

    def facts(self) -> dict[str, str]:
        """Returns the model options that a checkpoint must share for its parameters to be valid."""
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
            batch = batches.batch(rows, *sizes)  # read while the previous step is computed
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
        display.say(f"stopped on request: step {step} is saved; continue with --resume")
        return 128 + stop.signal
    display.finish(sample(training, state) if config.sample_bytes else "", entropy)
    display.raise_problems()
    return 0


def check_finite(step: int, figures: dict[str, Array]) -> None:
    for name in ("loss", "gradient_norm"):
        if not np.isfinite(value := float(figures[name])):
            raise RunError(f"the {name} of step {step} is {value}; earlier checkpoints are kept")


def begin(
    training: Training, checkpoints: Checkpoints, facts: dict[str, Any], display: Display
) -> tuple[int, int, State]:
    """Returns the step, the number of rows consumed and the state, restored from the newest checkpoint or new.

    Files of an earlier run are changed only after its checkpoint has been accepted.
    """
    check = functools.partial(check_facts, facts)
    restored = checkpoints.restore(training.wanted, check) if training.config.resume else None
    if restored is not None:
        display.say(f"resuming from the checkpoint of step {restored.step}")
        if restored.facts["data"] != facts["data"]:
            display.say(
                f"the data differs from that of the checkpoint: {facts['data']} instead of {restored.facts['data']}"
            )
    with all_or_none("use metrics.jsonl"):
        display.begin(restored.step if restored else 0)
    display.attempt("config.json", lambda: write_config(display.folder, training.config))
    return (restored.step, restored.facts["rows"], restored.state) if restored else (0, 0, training.init())


def check_facts(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raises `UserError` if a checkpoint belongs to another model or orders the data differently."""
    for kind, what in (("model", "belongs to another model"), ("order", "orders the data differently")):
        ours, theirs = expected[kind], found.get(kind, {})
        other = [f"{name} {theirs.get(name)} instead of {x}" for name, x in ours.items() if theirs.get(name) != x]
        if other:
            raise UserError(f"--resume: the checkpoint {what}: {', '.join(other)}")


def evaluate(training: Training, state: State, held_out: data.Batches, sizes: tuple[int, int]) -> float:
    """Returns the loss per token on held-out documents."""
    config = training.config
    batches = (held_out.batch(i * config.batch, *sizes) for i in range(config.eval_batches))
    sums = [training.evaluate(state.parameters, batch) for batch in batches]
    loss, tokens = (sum(float(x[i]) for x in sums) for i in (0, 1))
    return loss / max(tokens, 1.0)


def sample(training: Training, state: State) -> str:
    """Generates text on one device with the decode cache; all processes take part in gathering the parameters."""
    parameters, rng = devices.whole_on_host((state.parameters, state.rng))
    if jax.process_index():
        return ""
    model = load_params(*nnx.split(nnx.eval_shape(functools.partial(training.new_model, None))), parameters)
    prompt = np.frombuffer(os.fsencode(training.config.prompt) or b"\n", np.uint8)
    given, length = jnp.asarray(prompt, jnp.int32)[None], training.config.sample_bytes
    tokens = model.generate(given, length, rng=jax.random.wrap_key_data(rng), temperature=0.8)
    return (prompt.tobytes() + bytes(np.asarray(tokens)[0].tolist())).decode(errors="replace")


def check_processes(config: Config) -> None:
    if not config.coordinator and (config.num_processes, config.process_id) != (1, -1):
        raise UserError("--num-processes and --process-id require --coordinator")


def run(config: Config) -> int:
    if config.aot:
        return run_on(config, *aot.target_devices(config.aot))
    processes = (config.distributed, config.coordinator, config.num_processes, config.process_id, config.start_timeout)
    with devices.started(config.devices, *processes):
        return run_on(config, None, jax.devices())


def run_on(config: Config, target: Any | None, available: Sequence[jax.Device]) -> int:
    mesh = devices.make_mesh(available, config.data, config.ring, config.tensor)
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
    split = devices.read_same_data(lambda: data.read_documents(config.data_path, display.say))
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
        if config.json and argv is None:  # run as a script
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
        os._exit(code)  # at exit, Python would wait for the thread that writes the checkpoint
    sys.exit(code)
