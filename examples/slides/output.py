"""Embeddings of many slides in one npz file, saved while they are computed and continued after an interruption."""

from __future__ import annotations

import json
import os
import pathlib
import time
import zipfile
from typing import NamedTuple

import numpy as np

from slides.tiles import SlideError

SECONDS_BETWEEN_SAVES = 10


class Entry(NamedTuple):
    """What is stored about a slide."""

    embedding: np.ndarray
    num_tiles: int
    version: str  # of the file of tiles


class Embeddings:
    """Embeddings by slide name, in a file with the arrays `names`, `embeddings`, `num_tiles` and two to resume with.

    Args:
        path: The npz file. Slides that it contains are kept.
        settings: What the embeddings depend on, apart from the slide. A file with other settings is refused.
        overwrite: Whether to ignore an existing file, which is replaced at the first save.

    Raises:
        SlideError: If the file cannot be written, is damaged, or was written with other settings.
    """

    def __init__(self, path: pathlib.Path, settings: dict[str, object], overwrite: bool = False) -> None:
        if path.suffix != ".npz":
            raise SlideError(f"{path}: the name of the output must end in .npz")
        if not path.parent.is_dir():
            raise SlideError(f"{path}: cannot be written (no folder {path.parent})")
        self._path, self._settings = path, settings
        self._saved_at, self._is_saved = time.monotonic(), True
        self.entries: dict[str, Entry] = {} if overwrite or not path.exists() else self._load()

    def has(self, name: str, file: pathlib.Path) -> bool:
        """Returns whether the embedding of this file, unchanged, is there."""
        return name in self.entries and self.entries[name].version == _version(file)

    def add(self, name: str, file: pathlib.Path, embedding: np.ndarray, num_tiles: int) -> None:
        """Adds or replaces an embedding and saves all, unless they were saved just now."""
        self.entries[name] = Entry(embedding, num_tiles, _version(file))
        self._is_saved = False
        if time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES:
            self.save()

    def save(self) -> None:
        """Writes all embeddings to a new file that then replaces the old one.

        Raises:
            SlideError: If the file cannot be written.
        """
        if self._is_saved:
            return
        names = sorted(self.entries)
        entries = [self.entries[name] for name in names]
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as stream:
                np.savez(
                    stream,
                    names=np.array(names),
                    embeddings=np.stack([x.embedding for x in entries]),
                    num_tiles=np.array([x.num_tiles for x in entries]),
                    versions=np.array([x.version for x in entries]),
                    settings=np.array(json.dumps(self._settings)),
                )
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(self._path)
        except OSError as error:
            raise SlideError(f"{self._path}: cannot be written ({error.strerror})") from error
        finally:
            part.unlink(missing_ok=True)
        self._saved_at, self._is_saved = time.monotonic(), True

    def _load(self) -> dict[str, Entry]:
        try:
            with self._path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                settings = json.loads(str(file["settings"]))
                columns = [file[name] for name in ("names", "embeddings", "num_tiles", "versions")]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise SlideError(f"{self._path}: not a file of embeddings (pass --overwrite to replace it)") from None
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise SlideError(
                    f"{self._path}: was written with {name}={settings.get(name)}, not {value} (pass --overwrite to "
                    "replace it)"
                )
        return {str(name): Entry(x, int(num), str(version)) for name, x, num, version in zip(*columns, strict=True)}


def _version(file: pathlib.Path) -> str:
    """Returns size and time of change of a file, which differ if it was written again."""
    status = file.stat()
    return f"{status.st_size}-{status.st_mtime_ns}"
