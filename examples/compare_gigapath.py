"""Compares slide embeddings with those of the original Prov-GigaPath package, for the same slide and weights.

The original needs its own environment (PyTorch, flash-attn, a GPU). There, without ringjax or JAX, run

    python examples/compare_gigapath.py original --tiles slide.h5 --weights slide_encoder.pth --file original.npz

Then, in the environment of ringjax:

    python examples/compare_gigapath.py compare --tiles slide.h5 --weights slide_encoder.pth --file original.npz

This prints the differences in all layers, of the CLS token and of the mean over tiles, and fails if they are larger
than the precision of the original explains.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import numpy as np
from slides.tiles import Slide, SlideError, read_slide

WIDTH = 1536
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}  # largest difference over largest entry, by precision of the original
POOLS = ("cls", "mean")


def run_original(slide: Slide, weights: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the states of all layers and the output of the original package, (layers + 2, 768) for each pool.

    On a GPU it runs in float16, as its own pipeline does.
    """
    import torch  # noqa: PLC0415
    from gigapath import slide_encoder  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = slide_encoder.create_model(str(weights), "gigapath_slide_enc12l768d", WIDTH).eval().to(device)
    model.tile_size = slide.tile_size  # older versions of the package always divide by 256
    tiles, coordinates = (torch.from_numpy(x[None]).float().to(device) for x in (slide.features, slide.coordinates))
    arrays = {"dtype": np.array("float16" if device == "cuda" else "float32")}
    with torch.no_grad(), torch.autocast(device, torch.float16, enabled=device == "cuda"):
        for pool in POOLS:
            model.global_pool = pool == "mean"
            states = [*model(tiles, coordinates, all_layer_embed=True), *model(tiles, coordinates)]
            arrays[pool] = torch.cat(states).float().cpu().numpy()
    return arrays


def run_ours(slide: Slide, weights: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the same of ringjax, in float32."""
    from slides.weights import read_weights  # noqa: PLC0415 - the original's environment does not need these

    from ringjax.models import SlideEncoder  # noqa: PLC0415

    try:
        encoder = SlideEncoder.from_gigapath(read_weights(weights), dtype="float32")
    except ValueError as error:
        raise SlideError(f"{weights}: {error}") from error
    inputs = {"tiles": slide.features[None], "coordinates": slide.coordinates[None], "tile_size": slide.tile_size}
    arrays = {}
    for pool in POOLS:
        states = [
            encoder(**inputs, pool=pool, all_layers=is_all).reshape(-1, encoder.config.features)
            for is_all in (True, False)
        ]
        arrays[pool] = np.concatenate([np.asarray(x) for x in states])
    return arrays


def compare(ours: dict[str, np.ndarray], original: dict[str, np.ndarray]) -> float:
    """Prints the differences of each state, and returns the largest one relative to the largest entry of its state."""
    print("state         " + "".join(f"{pool:>10}: largest difference   relative" for pool in POOLS))
    largest = {}
    num_states = len(original["cls"])
    for i in range(num_states):
        name = "output" if i == num_states - 1 else f"layer {i}" if i else "input"
        line = f"{name:14}"
        for pool in POOLS:
            difference = float(np.abs(ours[pool][i] - original[pool][i]).max())
            largest[name, pool] = difference / float(np.abs(original[pool][i]).max())
            line += f"{difference:31.2e}{largest[name, pool]:11.2e}"
        print(line)
    name, pool = max(largest, key=lambda x: largest[x])
    print(f"\nlargest relative difference: {largest[name, pool]:.2e} ({name}, {pool})")
    return largest[name, pool]


def read_original(path: pathlib.Path, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            found = {name: file[name] for name in (*POOLS, "dtype")}
    except Exception as error:  # a damaged file raises anything
        raise SlideError(f"{path}: not a file of the command `original`") from error
    if found["cls"].shape != shape:
        raise SlideError(f"{path}: has states of shape {found['cls'].shape}, ours have {shape}: other weights?")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="compare_gigapath", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("original", "compare"), help="what to do, see above")
    parser.add_argument("--tiles", type=pathlib.Path, required=True, help="file of tile features, .h5 or .npz")
    parser.add_argument("--weights", type=pathlib.Path, required=True, help="slide_encoder.pth")
    parser.add_argument("--file", type=pathlib.Path, required=True, help="npz file of the original's embeddings")
    options = parser.parse_args(arguments)
    try:
        slide = read_slide(options.tiles, WIDTH)
        if options.command == "original":
            np.savez(options.file, **run_original(slide, options.weights))
            print(f"embeddings of the original package in {options.file}")
            return 0
        ours = run_ours(slide, options.weights)
        original = read_original(options.file, ours["cls"].shape)
    except SlideError as error:
        print(f"compare_gigapath: {error}", file=sys.stderr)
        return 2
    dtype = str(original["dtype"])
    agrees = compare(ours, original) <= TOLERANCE[dtype]
    print(f"{'within' if agrees else 'NOT within'} {TOLERANCE[dtype]:.0e}, the tolerance for an original in {dtype}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
