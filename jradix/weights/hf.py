"""Safetensors folders of the Hugging Face kind: one file, or shards with an index.

All files are opened, and so checked against their headers, before any tensor is read: a cut download is found at once.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jradix.errors import CheckpointError, UnsupportedModel
from jradix.model_files import INDEX_FILE

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsSource:
    """Tensors of a folder by name.

    Attributes:
      shapes: name -> shape of every tensor in the folder.

    Raises:
      CheckpointError: a shard is missing or cut, or the index and the shards disagree.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}      # tensor name -> open file that holds it
        self.shapes: dict[str, tuple[int, ...]] = {}
        owner: dict[str, str] = {}
        for path in weight_files(folder):
            file = _open(path)
            for name in file.keys():
                if name in owner:
                    raise CheckpointError(f"tensor {name!r} is in both {owner[name]} and {path.name}; expected once. "
                                          f"Remove the files that are not part of this model")
                owner[name] = path.name
                self._files[name] = file
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
        index = folder / INDEX_FILE
        absent = sorted(set(_weight_map(index)) - set(owner)) if index.is_file() else []
        if absent:
            raise CheckpointError(f"{INDEX_FILE} names {len(absent)} tensors that no shard holds, first {absent[0]!r}: "
                                  f"incomplete download? Fetch the model again")

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the file's type (bfloat16 as ml_dtypes has it)."""
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in FLOAT_TYPES:
            raise UnsupportedModel(f"tensor {name!r} has type {dtype}; supported: {', '.join(FLOAT_TYPES)}")
        return self._files[name].get_tensor(name)


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


def _open(file: Path) -> Any:
    """Opens and checks one file: the header, and that the data it describes is all there."""
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {file} ({error}): incomplete download? Fetch it again") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{INDEX_FILE} is damaged ({error!r}): expected JSON with a \"weight_map\". "
                              f"Fetch it again") from error
