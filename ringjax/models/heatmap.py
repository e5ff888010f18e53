"""Pictures of numbers per tile, drawn at the coordinates of the tiles."""

from __future__ import annotations

import io
import math
import os
import pathlib

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from ringjax._src.validation import check_positive, shown

_MOST_CELLS = 10_000  # on a side of a picture
_INCHES = 8  # the longer side


def save_heatmap(
    path: str | os.PathLike[str],
    weights: Float[ArrayLike, " L"],
    coordinates: Float[ArrayLike, "L 2"],
    *,
    tile_size: float = 256,
    title: str | None = None,
    label: str = "attention relative to the mean tile",
) -> None:
    """Draws weights at the coordinates of their tiles and writes the picture as a PNG file.

    Colors show each weight divided by the mean of all. They range from the 1st to the 99th percentile, so that a few
    tiles with large weights do not hide the others. Tiles in the same cell of the grid are averaged; cells without
    tiles are gray.

    Args:
        path: The PNG file.
        weights: One number per tile, such as an attention map.
        coordinates: x and y of the upper left corner of each tile, in pixels.
        tile_size: Side of a tile in pixels.
        title: Title of the picture.
        label: Label of the color bar.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        OSError: If the file cannot be written.
        ValueError: If `path` does not end in .png, `weights` are not finite numbers of shape (L,), `coordinates` are
            not finite numbers of shape (L, 2), or the picture would have more than 10,000 tiles on a side.

    Example:
        >>> import pathlib, tempfile
        >>> from ringjax.models import save_heatmap
        >>> path = pathlib.Path(tempfile.mkdtemp(), "map.png")
        >>> save_heatmap(path, [0.2, 0.3, 0.5], [(0, 0), (256, 0), (0, 256)])
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    target = pathlib.Path(path)
    if target.suffix != ".png":
        raise ValueError(f"`path` must end in .png, got {str(path)!r}.")
    picture, (left, top) = _cells(weights, coordinates, check_positive("tile_size", tile_size))
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - only pictures need it
        from matplotlib.ticker import MultipleLocator  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=_figure_size(*picture.shape), layout="constrained")
    axes = figure.add_subplot(facecolor="0.92")
    height, width = picture.shape
    extent = np.array([left, left + width, top + height, top]) * tile_size
    values = picture[np.isfinite(picture)]
    low, high = np.percentile(values, [1, 99]).tolist()
    image = axes.imshow(picture, cmap="inferno", extent=tuple(extent), interpolation="nearest", vmin=low, vmax=high)
    step = _tick_step(max(height, width) * tile_size)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(step))
        axis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="x in pixels", ylabel="y in pixels", title=title or "")
    figure.colorbar(image, label=label, extend="both" if low < high else "neither", shrink=0.9, aspect=30)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=max(120.0, 2 * max(height, width) / _INCHES))  # two pixels per tile or more
    target.write_bytes(drawn.getvalue())


def _cells(weights: ArrayLike, coordinates: ArrayLike, tile_size: float) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns the mean weight in each cell of the grid, relative to the mean of all, and the first column and row."""
    corners = _numbers("coordinates", coordinates)
    if corners.ndim != 2 or corners.shape[1] != 2 or len(corners) == 0:
        raise ValueError(f"`coordinates` must have shape (tiles, 2), got {corners.shape}.")
    values = _numbers("weights", weights)
    if values.shape != corners.shape[:1]:
        raise ValueError(f"`weights` must have shape (tiles,) = {corners.shape[:1]}, got {values.shape}.")
    cells = np.floor(corners / tile_size)
    first = cells.min(axis=0)
    width, height = (cells.max(axis=0) - first + 1).tolist()
    if max(width, height) > _MOST_CELLS:
        raise ValueError(
            f"`coordinates` must extend over at most {_MOST_CELLS} tiles of `tile_size` pixels, got {width:.0f} and "
            f"{height:.0f}."
        )
    margins = [max(1, math.ceil((max(width, height) / 4 - side) / 2)) for side in (width, height)]  # no thin stripes
    left, top = (int(first[i]) - margins[i] for i in range(2))
    columns, rows = (cells - [left, top]).astype(int).T
    total, count = np.zeros((2, int(height) + 2 * margins[1], int(width) + 2 * margins[0]))
    np.add.at(total, (rows, columns), values / (values.mean() or 1))
    np.add.at(count, (rows, columns), 1)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0), (left, top)


def _figure_size(height: int, width: int) -> tuple[float, float]:
    """Returns the size in inches for a picture of so many tiles, with room for labels and the color bar."""
    scale = min(0.5, _INCHES / max(height, width))
    return max(2.5, scale * width) + 1.8, max(2.5, scale * height) + 0.8


def _tick_step(length: float) -> float:
    """Returns a round distance between ticks, of which about five fit into `length`."""
    power = 10 ** math.floor(math.log10(length / 5))
    return max(step * power for step in (1, 2, 5) if step * power <= length / 5)


def _numbers(name: str, values: ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be an array of numbers, got {shown(values)}.") from None
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` must be finite, got {array[~np.isfinite(array)][0]}.")
    return array
