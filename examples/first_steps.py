"""First steps: 32,768 tokens of causal dilated attention on one device, and its gradient.

    make demo                        # or: python examples/first_steps.py

The score matrix of dense attention would take 34 GB for this sequence. The demo compares some rows with the dense
reference, which can compute just these rows, and draws the pattern to `pattern.png` (as text without matplotlib).
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import ringjax as rj

LENGTH, HEADS, DIM = 32_768, 8, 64
PATTERN = rj.DilationPattern(segment_lengths=(2048, 8192, 32768), dilation_rates=(1, 4, 8))


def main() -> None:
    print(f"{PATTERN} over {LENGTH:,} tokens, {HEADS} heads of {DIM}, float32, causal, on {jax.devices()[0]}")
    coverage = PATTERN.coverage(HEADS)
    share = f"{coverage.share:.0%} of (position, head) pairs are selected"
    print(f"queries reach up to {coverage.reach:,} tokens back; {share}")

    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, LENGTH, HEADS, DIM))
    rows = jnp.array([0, 1, 2047, 2048, 9000, 16384, 30000, 32767])
    weights = jax.random.normal(jax.random.key(1), (1, len(rows), HEADS, DIM))

    def attention(q, k, v):
        return rj.dilated_attention(q, k, v, PATTERN, is_causal=True)

    def loss(q, k, v):  # uses the chosen rows only, so that the reference can compute it too
        return jnp.sum(attention(q, k, v)[:, rows] * weights)

    def reference(q, k, v):
        return rj.reference_attention(q, k, v, PATTERN, is_causal=True, rows=rows)

    print("\n                     compile        run   memory beyond inputs and outputs")
    out = report("attention", attention, query, key, value)
    grads = report("gradient", jax.grad(loss, argnums=(0, 1, 2)), query, key, value)

    expected, pull = jax.vjp(jax.jit(reference), query, key, value)
    errors = {"output": error(out[:, rows], expected)}
    errors |= {f"d{n}": error(a, b) for n, a, b in zip(("query", "key", "value"), grads, pull(weights), strict=True)}
    print(f"\nlargest error against the dense reference on {len(rows)} rows (float32):")
    print("  " + "   ".join(f"{name} {e:.1e}" for name, e in errors.items()))
    if max(errors.values()) > 2e-6:
        raise SystemExit("ringjax and the dense reference differ: please report this")
    draw(Path("pattern.png"))


def report(name, function, *args):
    """Compiles and runs a function, and prints the time and memory it takes."""
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    middle = time.perf_counter()
    result = jax.block_until_ready(compiled(*args))
    end = time.perf_counter()
    memory = compiled.memory_analysis().temp_size_in_bytes
    print(f"  {name:<14} {middle - begin:>10.2f} s {end - middle:>8.2f} s   {memory / 2**20:>8.0f} MiB")
    return result


def error(x, reference) -> float:
    return float(jnp.abs(x - reference).max() / jnp.maximum(1, jnp.abs(reference).max()))


def draw(path: Path) -> None:
    """Draws a smaller pattern: the number of branches in which each query attends to each key."""
    small, heads, length = rj.DilationPattern((8, 32, 64), (1, 2, 4)), (0, 1, 2), 64
    position = np.arange(length)
    counts = np.zeros((len(heads), length, length), int)
    for branch in small.branches(HEADS):
        for i, head in enumerate(heads):
            chosen = position % branch.segment_length % branch.rate == branch.offsets[head]
            segment = position // branch.segment_length
            counts[i] += chosen[:, None] & chosen & (segment[:, None] == segment) & (position <= position[:, None])
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError:
        print("\nthe first 32 positions of head 0 (install matplotlib for a picture):")
        print("\n".join("  " + "".join(" .:#"[c] for c in row[:32]) for row in counts[0, :32]))
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415
    from matplotlib.colors import ListedColormap  # noqa: PLC0415

    figure, axes = plt.subplots(1, len(heads), figsize=(13, 4.4), layout="constrained")
    colors = ListedColormap(["#ffffff", "#9ecae1", "#3182bd", "#08306b"])
    for axis, image, head in zip(axes, counts, heads, strict=True):
        picture = axis.imshow(image, cmap=colors, vmin=-0.5, vmax=3.5, interpolation="nearest")
        axis.set(title=f"head {head}", xlabel="key position", ylabel="query position")
    bar = figure.colorbar(picture, ax=axes, ticks=range(4), shrink=0.8)
    bar.set_label("branches in which the query attends to the key")
    figure.suptitle("Causal dilated attention: segments 8, 32, 64 with rates 1, 2, 4")
    figure.savefig(path, dpi=110)
    print(f"\na smaller pattern of the same kind is drawn in {path}")


if __name__ == "__main__":
    main()
