"""A two-layer LongNet recalls tokens from 4,096 positions back; with a pattern that ends there it cannot.

A run of eight random letters, blanks, and eight question marks 4,096 tokens after the letters:

    . . c a h h b o d k . . . .  (thousands of blanks)  . . . . ? ? ? ? ? ? ? ? . .        answer: c a h h b o d k

Why eight: in a branch of rate 8 a head attends to every eighth token, so the question mark at position `p` attends to
the letter at `p - 4096` and to none of its neighbors. The eight heads, each with its own residue, recall the run
together. The run is written 16 times, the last time 4,096 tokens before the question, so that an untrained model
attends to a letter now and then among thousands of blanks.

Both models have the same sizes, start from the same parameters and read the same sequences for as many steps. Only the
length of the long segment differs: 8,192 tokens hold both the letters and the question, 4,096 never do.

    python examples/recall.py                      # 4,096 tokens back
    python examples/recall.py --quick              # 256 tokens back, in about two minutes
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ringjax as rj
from ringjax.models import LongNetConfig, LongNetDecoder, token_loss

RATE = 8  # of the long branch; also the number of heads and the length of the run
LETTERS = 16
BLANK, QUESTION = LETTERS, LETTERS + 1
CHANCE = 1 / LETTERS


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked: the last of `copies` of a run of letters, which begin at one of `places` random positions."""

    distance: int = 4096  # from the question back to the last copy; the others are further away
    copies: int = 16
    places: int = 64

    @property
    def length(self) -> int:
        return self.places + 2 * RATE * self.copies + self.distance

    def pattern(self, *, reaches: bool) -> rj.DilationPattern:
        """A short dense branch and a long one of rate 8, which reaches the letters or ends just before them."""
        return rj.DilationPattern((32, 2 * self.distance if reaches else self.distance), (1, RATE))

    def sequences(self, rng: jax.Array, batch: int) -> jax.Array:
        """Random tokens (batch, length): letters, blanks, and question marks at the end."""
        of_letters, of_place = jax.random.split(rng)
        run = jax.random.randint(of_letters, (batch, 1, RATE), 0, LETTERS)
        place = jax.random.randint(of_place, (batch, 1, 1), 0, self.places)
        copy = 2 * RATE * jnp.arange(self.copies)[None, :, None]
        letters = place + copy + jnp.arange(RATE)[None, None, :]
        row = jnp.arange(batch)[:, None, None]
        blank = jnp.full((batch, self.length), BLANK)
        return blank.at[row, letters].set(run).at[row, letters[:, -1:] + self.distance].set(QUESTION)

    def score(self, model: LongNetDecoder, rng: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
        """Loss of a model on random sequences, and the share of question marks that it answers rightly."""
        tokens = self.sequences(rng, batch)
        answers = jnp.roll(tokens, self.distance, axis=1)  # what stood there `distance` tokens ago
        asked = tokens == QUESTION
        logits = model(tokens)
        loss, count = token_loss(logits, answers, asked.astype(jnp.float32))
        return loss / count, jnp.sum(asked & (logits.argmax(-1) == answers)).astype(jnp.float32) / count


def train(
    task: Task, pattern: rj.DilationPattern, *, steps: int, batch: int, chunk: int = 20
) -> tuple[LongNetDecoder, list[float]]:
    """A two-layer decoder with this pattern, trained, and its accuracy over each `chunk` of steps."""
    config = LongNetConfig.tiny(
        vocab_size=LETTERS + 2,
        pattern=pattern,
        num_heads=RATE,
        head_dim=16,
        hidden_features=128,
        positions=None,  # letters and blanks differ enough
        remat=False,
    )
    graph, parameters = nnx.split(LongNetDecoder(config, rngs=nnx.Rngs(0)))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.0, 3e-3, transition_steps=20), b2=0.98)
    )

    def loss_of(parameters, rng):
        return task.score(nnx.merge(graph, parameters), rng, batch)

    def step(carry, rng):
        parameters, moments = carry
        (loss, accuracy), gradient = jax.value_and_grad(loss_of, has_aux=True)(parameters, rng)
        update, moments = optimizer.update(gradient, moments, parameters)
        return (optax.apply_updates(parameters, update), moments), (loss, accuracy)

    run = jax.jit(functools.partial(jax.lax.scan, step))
    carry, history, start = (parameters, optimizer.init(parameters)), [], time.perf_counter()
    for i, rngs in enumerate(jax.random.split(jax.random.key(1), (steps // chunk, chunk))):
        carry, (losses, accuracies) = run(carry, rngs)
        history.append(float(accuracies.mean()))
        line = f"step {(i + 1) * chunk:4d}   loss {losses.mean():5.3f}   right {history[-1]:6.1%}"
        print(f"  {line}   {time.perf_counter() - start:4.0f} s", flush=True)
    return nnx.merge(graph, carry[0]), history


def accuracy_of(model: LongNetDecoder, task: Task, *, sequences: int = 128, batch: int = 4) -> float:
    """Share of right answers on new sequences."""

    @nnx.jit
    def accuracy(model, rng):
        return task.score(model, rng, batch)[1]

    rngs = jax.random.split(jax.random.key(2), sequences // batch)
    return sum(float(accuracy(model, rng)) for rng in rngs) / len(rngs)


def is_chance(accuracy: float, answers: int) -> bool:
    """Whether guessing gives so much: at most four standard deviations above its mean."""
    return accuracy < CHANCE + 4 * (CHANCE * (1 - CHANCE) / answers) ** 0.5


def plot(path: str, task: Task, chunk: int, histories: dict[str, list[float]], accuracies: dict[str, float]) -> None:
    """Writes accuracy over steps as a picture."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (training alone does without)

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (name, history), color in zip(histories.items(), ("tab:blue", "tab:orange"), strict=True):
        steps = [chunk * (i + 1) for i in range(len(history))]
        label = f"{name}: {accuracies[name]:.1%} on new sequences"
        axes.plot(steps, [100 * share for share in history], "o-", markersize=3, color=color, label=label)
    axes.axhline(100 * CHANCE, color="gray", linestyle="--", label=f"chance, 1 of {LETTERS} letters: {CHANCE:.1%}")
    axes.set(xlabel="training step", ylabel="right answers, %", ylim=(0, 104), xlim=(0, None))
    axes.set_title(f"Recalling {RATE} letters from {task.distance:,} tokens back, in {task.length:,} tokens")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small version: 256 tokens back")
    parser.add_argument("--steps", type=int, help="training steps, a multiple of 20")
    parser.add_argument("--out", default="recall.png", help="where the plot goes")
    options = parser.parse_args()
    task = Task(distance=256, copies=4) if options.quick else Task()
    batch, chunk, steps = (8, 20, 160) if options.quick else (2, 20, 400)
    if options.steps is not None:
        steps = options.steps
    if steps < chunk or steps % chunk:
        parser.error(f"--steps must be a positive multiple of {chunk}, got {steps}")

    histories, accuracies = {}, {}
    for reaches in (True, False):
        pattern = task.pattern(reaches=reaches)
        name = f"long segments of {pattern.segment_lengths[-1]:,} tokens"
        print(f"\n{name}, the letters {task.distance:,} back")
        model, histories[name] = train(task, pattern, steps=steps, batch=batch, chunk=chunk)
        accuracies[name] = accuracy_of(model, task)
        print(f"  new sequences: {accuracies[name]:.1%} right, chance is {CHANCE:.1%}")

    plot(options.out, task, chunk, histories, accuracies)
    print(f"\nplot: {options.out}")
    far, near = accuracies.values()
    if not (far > 0.95 and is_chance(near, 128 * RATE)):
        raise SystemExit(f"the claim does not hold: {far:.1%} with reach (above 95%), {near:.1%} without (chance)")


if __name__ == "__main__":
    main()
