"""Safetensors folders of the Hugging Face kind: one file, or shards with an index.

Headers are read and checked against the files' sizes before anything else, so that a cut download is found at once.
Data is memory-mapped and viewed in its own type (bfloat16 through ml_dtypes), so reading a tensor copies nothing.
"""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jradix.errors import CheckpointError, UnsupportedModel
from jradix.model_files import INDEX_FILE

DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
          "BF16": np.dtype(ml_dtypes.bfloat16)}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class _Location:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsSource:
    """Tensors of a folder by name.

    Attributes:
      shapes: name -> shape of every tensor in the folder.

    Raises:
      CheckpointError: a shard is missing or cut, or the index and the shards disagree.
    """

    def __init__(self, folder: Path) -> None:
        self._locations = _locate(folder)
        self.shapes = {name: location.shape for name, location in self._locations.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file, in the file's type."""
        location = self._locations[name]
        if location.dtype not in DTYPES:
            raise UnsupportedModel(f"tensor {name!r} in {location.file.name} has type {location.dtype}; supported: "
                                   f"{', '.join(DTYPES)}")
        dtype = DTYPES[location.dtype]
        if location.start == location.end:
            return np.empty(location.shape, dtype)
        raw = np.memmap(location.file, np.uint8, "r", location.start, (location.end - location.start,))
        return np.asarray(raw).view(dtype).reshape(location.shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, in name order.

    Raises:
      CheckpointError: the index is damaged or names a file that is not there.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        whole = folder / "model.safetensors"
        return [whole] if whole.is_file() else sorted(
            file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_"))
    names = sorted(set(_weight_map(index).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{INDEX_FILE} names {len(missing)} of {len(names)} files that are not in {folder}, "
                              f"first {missing[0]!r}: incomplete download? Fetch the model again")
    return [folder / name for name in names]


def read_safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """Tensor name -> its entry ({"dtype", "shape", "data_offsets"}), and the file offset the data begins at.

    Raises:
      CheckpointError: the file cannot be read, its header is damaged, or its size is not what the header says.
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if 0 < length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    if size < 8 or len(text) != length or not text:
        raise CheckpointError(f"{file.name} ({size} bytes) ends inside its header: incomplete download? Fetch it again")
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"the header of {file.name} is damaged ({error}): incomplete download? "
                              f"Fetch it again") from error
    if 8 + length + end != size:
        raise CheckpointError(f"{file.name} has {size} bytes, its header describes {8 + length + end}: incomplete "
                              f"download? Fetch it again")
    return entries, 8 + length


def _locate(folder: Path) -> dict[str, _Location]:
    found: dict[str, _Location] = {}
    index = folder / INDEX_FILE
    for file in weight_files(folder):
        entries, start = read_safetensors_header(file)
        for name, entry in entries.items():
            if name in found:
                raise CheckpointError(f"tensor {name!r} is in both {found[name].file.name} and {file.name}; expected "
                                      f"once. Remove the files that are not part of this model")
            first, last = entry["data_offsets"]
            location = _Location(file, entry["dtype"], tuple(entry["shape"]), start + first, start + last)
            dtype = DTYPES.get(location.dtype)
            if dtype is not None and math.prod(location.shape) * dtype.itemsize != last - first:
                raise CheckpointError(f"{file.name}: tensor {name!r} of shape {location.shape} and type "
                                      f"{location.dtype} has {last - first} bytes: the file is damaged, fetch it again")
            found[name] = location
    if index.is_file():
        absent = sorted(set(_weight_map(index)) - set(found))
        if absent:
            raise CheckpointError(f"{INDEX_FILE} names {len(absent)} tensors that no shard holds, first {absent[0]!r}: "
                                  f"incomplete download? Fetch the model again")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{INDEX_FILE} is damaged ({error!r}): expected JSON with a \"weight_map\". "
                              f"Fetch it again") from error
