"""Reads model weights from `.pth`, `.safetensors` and `.npz` files as numpy arrays, without running code from them.

PyTorch stores a state dict as a zip file of raw arrays and a pickle that refers to them. Unpickling can call any
function that the pickle names, so `_Unpickler` supplies its own few functions and replaces all else by inert objects.
PyTorch itself is not needed.
"""

from __future__ import annotations

import collections
import json
import math
import pathlib
import pickle
import struct
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

from slides.tiles import SlideError

Weights = dict[str, np.ndarray]
SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".npz")
_STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "BoolStorage": np.bool_,
}
_SAFETENSORS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SAFETENSORS |= {"I64": np.int64, "I32": np.int32, "U8": np.uint8, "BOOL": np.bool_}


def read_weights(path: pathlib.Path) -> Weights:
    """Returns the arrays of a state dict, also if it is the entry "model" or "state_dict" of a checkpoint.

    Raises:
        SlideError: If the file does not exist, is damaged, has another format or holds no arrays.
    """
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz}
    if path.suffix not in SUFFIXES:
        raise SlideError(f"{path}: the name of the weights must end in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise SlideError(f"{path}: no such file")
    try:
        found: Any = readers.get(path.suffix, _read_pth)(path)
    except SlideError:
        raise
    except Exception as error:  # damaged pickles and headers raise anything
        text = (str(error).splitlines() or [""])[0]
        raise SlideError(f"{path}: not a complete {path.suffix} file ({text or type(error).__name__})") from error
    for name in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    arrays = {name: x for name, x in found.items() if isinstance(x, np.ndarray)} if isinstance(found, dict) else {}
    if not arrays:
        raise SlideError(f"{path}: holds no state dict (a mapping from names to arrays)")
    return arrays


def _read_npz(path: pathlib.Path) -> Weights:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _read_safetensors(path: pathlib.Path) -> Weights:
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        if entry["dtype"] not in _SAFETENSORS:
            raise ValueError(f"{name} has the dtype {entry['dtype']}")
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        data = np.frombuffer(content[start:stop], _SAFETENSORS[entry["dtype"]])
        arrays[name] = data.reshape(entry["shape"])
    return arrays


def _read_pth(path: pathlib.Path) -> object:
    if not zipfile.is_zipfile(path):
        raise SlideError(f"{path}: not a PyTorch file of version 1.6 or later (a zip file), or incomplete")
    with zipfile.ZipFile(path) as file:
        pickles = [name for name in file.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise SlideError(f"{path}: not a PyTorch state dict (it has no data.pkl)")
        with file.open(pickles[0]) as stream:
            return _Unpickler(stream, file, pickles[0].removesuffix("data.pkl")).load()


class _Inert:
    """Stands for an object of a class that is not needed, such as the options of a training run."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Builds arrays, dicts, lists and plain values; any other class or function becomes `_Inert`."""

    def __init__(self, stream: Any, file: zipfile.ZipFile, folder: str) -> None:
        super().__init__(stream)
        self._file, self._folder = file, folder

    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name == "OrderedDict":
            return collections.OrderedDict
        if module == "torch._utils":
            return {"_rebuild_tensor_v2": _array, "_rebuild_parameter": _data}.get(name, _Inert)
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        return _Inert

    def persistent_load(self, pid: Any) -> np.ndarray:
        """Returns a storage: ("storage", dtype, file name, device, number of entries)."""
        _, dtype, name, _, size = pid
        return np.frombuffer(self._file.read(f"{self._folder}data/{name}"), dtype, count=size)


def _array(
    storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> np.ndarray:
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if min((*shape, *strides), default=0) < 0 or (math.prod(shape) and not 0 <= offset <= last < len(storage)):
        raise ValueError(
            f"an array of shape {shape} and strides {strides} exceeds its storage of {len(storage)} entries"
        )
    view = np.lib.stride_tricks.as_strided(storage[offset:], shape, [s * storage.itemsize for s in strides])
    return view.copy()


def _data(array: np.ndarray, *_: object) -> np.ndarray:
    return array
