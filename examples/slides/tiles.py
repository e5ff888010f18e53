"""Reads the tile features of slides from HDF5 and npz files, as TRIDENT and CLAM write them.

A file holds the datasets `features` (L, 1536) or (1, L, 1536) and `coords` (L, 2) or (1, L, 2): x and y of each tile in
pixels of the full resolution. The side of a tile in these pixels is the attribute `patch_size_level0` of `coords`
(TRIDENT); in an npz file, an array of that name.
"""

from __future__ import annotations

import pathlib
import zipfile
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

SUFFIXES = (".h5", ".hdf5", ".npz")
MOST_CELLS = 1000  # the grid of the model's positions has 1000 x 1000 cells


class SlideError(Exception):
    """A slide, weights or an output file that cannot be used, with a message of one line."""


class Slide(NamedTuple):
    """The tiles of a slide: features (L, width) in float32, coordinates (L, 2) in pixels, the side of a tile."""

    features: np.ndarray
    coordinates: np.ndarray
    tile_size: float


def find_slides(paths: Iterable[str]) -> dict[str, pathlib.Path]:
    """Returns the slide files of these files and folders by name, which is the file name without its suffix.

    Raises:
        SlideError: If a path does not exist, a folder has no slides, or two slides have the same name.
    """
    found: dict[str, pathlib.Path] = {}
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise SlideError(f"{path}: no such file or folder")
        inside = sorted(x for x in path.iterdir() if x.suffix in SUFFIXES) if path.is_dir() else [path]
        if not inside:
            raise SlideError(f"{path}: no file ends in {', '.join(SUFFIXES)}")
        for file in inside:
            if file.stem in found:
                raise SlideError(f"{file}: another slide has the same name, {found[file.stem]}")
            found[file.stem] = file
    return found


def read_slide(path: pathlib.Path, width: int, tile_size: float | None = None) -> Slide:
    """Reads and checks the tiles of a slide.

    Args:
        path: An HDF5 or npz file.
        width: Number of features of a tile.
        tile_size: Side of a tile in pixels; by default the one in the file, or 256.

    Raises:
        SlideError: If the file is not as described at the top of this file, features are not finite, or a tile lies
            outside the grid of the model.
    """
    if path.suffix not in SUFFIXES:
        raise SlideError(f"{path}: the name must end in {', '.join(SUFFIXES)}")
    features, coordinates, stored_size = (_read_npz if path.suffix == ".npz" else _read_hdf5)(path)
    features, coordinates = (x[0] if x.ndim == 3 and len(x) == 1 else x for x in (features, coordinates))
    size = (
        256.0 if stored_size is None and tile_size is None else float(stored_size if tile_size is None else tile_size)
    )
    _check_features(path, features, width)
    _check_coordinates(path, coordinates, len(features), size)
    return Slide(features.astype(np.float32), coordinates, size)


def write_slide(path: pathlib.Path, slide: Slide) -> None:
    """Writes a slide as TRIDENT does, for tests and demonstrations."""
    if path.suffix == ".npz":
        np.savez(path, features=slide.features, coords=slide.coordinates, patch_size_level0=slide.tile_size)
        return
    with _h5py(path).File(path, "w") as file:
        file["features"], file["coords"] = slide.features, slide.coordinates
        file["coords"].attrs["patch_size_level0"] = slide.tile_size


def _read_npz(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, float | None]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            _check_names(path, file.files)
            size = float(file["patch_size_level0"]) if "patch_size_level0" in file.files else None
            return file["features"], file["coords"], size
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise SlideError(f"{path}: not a complete npz file ({_first_line(error)})") from error


def _read_hdf5(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, float | None]:
    h5py = _h5py(path)
    try:
        with h5py.File(path, "r") as file:
            _check_names(path, list(file))
            size = file["coords"].attrs.get("patch_size_level0")
            return np.asarray(file["features"]), np.asarray(file["coords"]), None if size is None else float(size)
    except (OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise SlideError(f"{path}: not a complete HDF5 file ({_first_line(error)})") from error


def _h5py(path: pathlib.Path):
    try:
        import h5py  # noqa: PLC0415 - npz files do without
    except ModuleNotFoundError:
        raise SlideError(f"{path}: HDF5 files need the package h5py: pip install h5py") from None
    return h5py


def _check_names(path: pathlib.Path, names: list[str]) -> None:
    for name, what in (("features", "tile features"), ("coords", "coordinates of the tiles")):
        if name not in names:
            raise SlideError(f"{path}: no dataset `{name}` ({what}); found {', '.join(names) or 'nothing'}")


def _check_features(path: pathlib.Path, features: np.ndarray, width: int) -> None:
    if features.ndim != 2 or not np.issubdtype(features.dtype, np.floating) or len(features) == 0:
        raise SlideError(f"{path}: `features` must be (tiles, {width}) numbers, got {_kind(features)}")
    if features.shape[1] != width:
        raise SlideError(
            f"{path}: the model takes {width} features per tile, got {features.shape[1]}: another tile encoder?"
        )
    finite = np.isfinite(features).all(axis=1)
    if not finite.all():
        num, first = (~finite).sum(), int(np.argmin(finite))
        raise SlideError(
            f"{path}: features of {num:,} of {len(finite):,} tiles are NaN or infinite, first tile {first}"
        )


def _check_coordinates(path: pathlib.Path, coordinates: np.ndarray, num_tiles: int, size: float) -> None:
    if coordinates.shape != (num_tiles, 2) or not np.issubdtype(coordinates.dtype, np.number):
        raise SlideError(f"{path}: `coords` must be ({num_tiles}, 2) numbers, got {_kind(coordinates)}")
    if not (np.isfinite(size) and size > 0):
        raise SlideError(f"{path}: the tile size must be above 0 pixels, got {size}")
    cells = np.floor(coordinates / size)
    inside = (cells >= 0) & (cells < MOST_CELLS)  # False for NaN
    if not inside.all():
        tile = int(np.argmin(inside.all(axis=1)))
        x, y = coordinates[tile]
        raise SlideError(
            f"{path}: tile {tile} at ({x:g}, {y:g}) lies outside the model's grid of {MOST_CELLS} x {MOST_CELLS} tiles "
            f"of {size:g} pixels"
        )


def _kind(x: np.ndarray) -> str:
    return f"{x.dtype} of shape {x.shape}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
