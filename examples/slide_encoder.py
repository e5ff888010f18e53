"""Computes embeddings and heat maps of whole slides with the weights of Prov-GigaPath's slide encoder.

    python examples/slide_encoder.py --tiles slide.h5 --weights slide_encoder.pth --out embeddings.npz --heatmap map.png
    python examples/slide_encoder.py --tiles features/ --weights slide_encoder.pth --out cohort.npz --heatmap maps/
    python examples/slide_encoder.py --demo runs/slide      # a synthetic slide and random weights

A slide is an HDF5 or npz file with the datasets `features` (L, 1536) and `coords` (L, 2), as TRIDENT and CLAM write it.
The output has the arrays `names`, `embeddings` and `num_tiles`. Run the same command again to continue after an
interruption or after adding slides: finished ones are skipped. A slide that cannot be used is reported in one line, and
the others are processed. Weights are read without running code from the file; PyTorch is not needed.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import sys
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from slides.output import Embeddings
from slides.synthetic import random_weights, synthetic_slide
from slides.tiles import Slide, SlideError, find_slides, read_slide, write_slide
from slides.weights import read_weights

from ringjax.models import SlideEncoder, save_heatmap


class Job(NamedTuple):
    """One slide to process."""

    name: str
    file: pathlib.Path
    heatmap: pathlib.Path | None


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 if a slide failed, 2 if nothing could be done, 130 after ^C."""
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        if options.demo is not None:
            encoder, digest = demo(options, console)
        else:
            encoder, digest = load_encoder(options.weights, options.dtype, console)
        slides = find_slides(options.tiles)
        settings = {"weights": digest, "pool": options.pool, "all_layers": options.all_layers}
        settings |= {"dtype": options.dtype, "tile_size": options.tile_size}
        results = Embeddings(options.out, settings, options.overwrite)
        jobs = [Job(name, file, heatmap_path(options.heatmap, name, len(slides))) for name, file in slides.items()]
        failed = process(encoder, jobs, results, options, console)
    except SlideError as error:
        print(f"slide_encoder: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("slide_encoder: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    if results.entries:
        shape = next(iter(results.entries.values())).embedding.shape
        num = len(results.entries)
        console.print(f"{options.out}: {num:,} embedding{'s' * (num > 1)} of shape {shape}", markup=False)
    if failed:
        print(f"slide_encoder: {failed} of {len(jobs)} slides failed, see above", file=sys.stderr)
    return 1 if failed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slide_encoder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", nargs="+", metavar="PATH", help="files of tile features (.h5, .npz), or folders")
    parser.add_argument("--weights", type=pathlib.Path, help="slide_encoder.pth, or its arrays as .safetensors or .npz")
    parser.add_argument("--out", type=pathlib.Path, help="npz file of the embeddings")
    parser.add_argument("--heatmap", type=pathlib.Path, help="PNG file for one slide, or a folder for many")
    parser.add_argument("--pool", choices=("cls", "mean"), default="cls", help="CLS token (default) or mean of tiles")
    parser.add_argument("--all-layers", action="store_true", help="write the states of all layers, (layers + 1, 768)")
    parser.add_argument(
        "--tile-size", type=float, help="side of a tile in pixels of the coordinates (from the file, or 256)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision (float32)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output instead of continuing it")
    parser.add_argument("--demo", type=pathlib.Path, metavar="FOLDER", help="process a synthetic slide in this folder")
    options = parser.parse_args(arguments)
    needed = [f"--{name}" for name in ("tiles", "weights", "out") if getattr(options, name) is None]
    if options.demo is not None and len(needed) < 3:
        parser.error("--demo must be given without --tiles, --weights and --out")
    if options.demo is None and needed:
        parser.error(f"{' and '.join(needed)} must be given (or --demo FOLDER)")
    return options


def load_encoder(path: pathlib.Path, dtype: str, console: Console) -> tuple[SlideEncoder, str]:
    """Returns an encoder with these weights and a digest of them."""
    weights = read_weights(path)
    try:
        encoder = SlideEncoder.from_gigapath(weights, dtype=dtype)
    except ValueError as error:
        raise SlideError(f"{path}: {error}") from error
    if encoder.unused_weights:
        console.print(f"{path}: {len(encoder.unused_weights)} arrays are not part of the encoder", markup=False)
    with path.open("rb") as stream:
        return encoder, hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def demo(options: argparse.Namespace, console: Console) -> tuple[SlideEncoder, str]:
    """Writes a synthetic slide, sets the options to process it, and returns an encoder with random weights."""
    folder: pathlib.Path = options.demo
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    slide = folder / "synthetic.npz"
    write_slide(slide, synthetic_slide(rng, 1200))
    console.print("a synthetic slide of 1,200 tiles; random weights with the shapes of Prov-GigaPath", markup=False)
    options.tiles, options.out, options.overwrite = [str(slide)], folder / "embeddings.npz", True
    options.heatmap = options.heatmap or folder / "map.png"
    return SlideEncoder.from_gigapath(random_weights(rng), dtype=options.dtype), "random"


def heatmap_path(given: pathlib.Path | None, name: str, num_slides: int) -> pathlib.Path | None:
    """Returns where the heat map of a slide goes; `given` is a file or a folder."""
    if given is None:
        return None
    if given.suffix == ".png" and not given.is_dir():
        if num_slides > 1:
            raise SlideError(f"{given}: --heatmap must be a folder for {num_slides} slides")
        return given
    given.mkdir(parents=True, exist_ok=True)
    return given / f"{name}.png"


def process(
    encoder: SlideEncoder, jobs: list[Job], results: Embeddings, options: argparse.Namespace, console: Console
) -> int:
    """Processes the slides that are not finished, saves the embeddings, and returns how many slides failed."""
    left = [x for x in jobs if not (results.has(x.name, x.file) and (x.heatmap is None or x.heatmap.exists()))]
    if len(left) < len(jobs):
        console.print(f"{len(jobs) - len(left):,} of {len(jobs):,} slides are finished", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("slides", total=len(left))
        try:
            for job in left:
                bar.update(task, description=job.name)
                try:
                    line = process_slide(encoder, job, results, options)
                except SlideError as error:
                    failed, line = failed + 1, f"FAILED {error}"
                bar.console.print(line, markup=False)
                bar.advance(task)
        finally:
            results.save()
    return failed


def process_slide(encoder: SlideEncoder, job: Job, results: Embeddings, options: argparse.Namespace) -> str:
    """Adds the embedding of a slide to the results, draws its heat map, and returns a line about it."""
    slide = read_slide(job.file, encoder.config.input_features, options.tile_size)
    tiles, coordinates = slide.features[None], slide.coordinates[None]
    try:
        states = encoder(
            tiles, coordinates, pool=options.pool, all_layers=options.all_layers, tile_size=slide.tile_size
        )
    except (ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise SlideError(f"{job.file}: {str(error).splitlines()[0]}") from error
    embedding = np.asarray(states, np.float32)[..., 0, :]
    if not np.isfinite(embedding).all():
        raise SlideError(f"{job.file}: the embedding is not finite (try --dtype float32)")
    if job.heatmap is not None:
        draw(encoder, slide, job, options.pool)
    results.add(job.name, job.file, embedding, len(slide.features))
    return f"{job.name}: {len(slide.features):,} tiles" + ("" if job.heatmap is None else f", {job.heatmap}")


def draw(encoder: SlideEncoder, slide: Slide, job: Job, pool: str) -> None:
    """Draws which tiles the attention of all layers prefers on the way to the slide embedding."""
    weights = encoder.attention_rollout(
        slide.features[None], slide.coordinates[None], pool=pool, relative=True, tile_size=slide.tile_size
    )
    try:
        save_heatmap(job.heatmap, weights[0], slide.coordinates, tile_size=slide.tile_size, title=job.name)
    except (OSError, ModuleNotFoundError) as error:
        raise SlideError(f"{job.heatmap}: cannot be written ({error})") from error


if __name__ == "__main__":
    sys.exit(main())
