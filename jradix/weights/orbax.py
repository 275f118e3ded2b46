"""Converted checkpoints: the Decoder's own arrays in an Orbax folder, restored straight onto their devices.

The folder holds `weights/` (Orbax), `config.json` and `generation_config.json` (Hugging Face's), and the marker
`jradix.json` that `model_files` recognises. The marker is written last (a folder without it is an unfinished
conversion) and lists the weights' files with their sizes, because Orbax reports a missing file as a bare `Exception`.
Tokenizer files are the caller's to copy.
"""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from jradix.errors import CheckpointError
from jradix.model_files import ORBAX_MARKER, ModelFiles
from jradix.models.config import ModelConfig
from jradix.models.decoder import Decoder, abstract_parameters, build_decoder, named_parameters
from jradix.weights.loader import load_config, load_generation_config, load_hf_config

WEIGHTS_FOLDER = "weights"
FORMAT = 2

# One sharding for every parameter, or a choice by its path and shape.
Placement: TypeAlias = Sharding | Callable[[str, tuple[int, ...]], Sharding]


def save_orbax(model: Decoder, config: ModelConfig, files: ModelFiles, out_folder: Path) -> ModelFiles:
    """Writes the weights, both configs and the marker.

    Args:
      model: the loaded model; its arrays are written in the type they have.
      config: of the model.
      files: where it was loaded from; the configs and the name come from there.
      out_folder: is made; may hold other files (a tokenizer), but no checkpoint yet.

    Returns:
      The new checkpoint's files.

    Raises:
      CheckpointError: `out_folder` already holds a checkpoint.
    """
    out_folder = out_folder.absolute()
    if (out_folder / ORBAX_MARKER).exists() or (out_folder / WEIGHTS_FOLDER).exists():
        raise CheckpointError(f"{out_folder} already holds a checkpoint; name a new folder, or remove this one first")
    out_folder.mkdir(parents=True, exist_ok=True)
    if files.kind == "gguf":
        load_hf_config(files).to_json_file(out_folder / "config.json", use_diff=False)
    elif (files.path / "config.json").absolute() != out_folder / "config.json":
        shutil.copyfile(files.path / "config.json", out_folder / "config.json")
    (out_folder / "generation_config.json").write_text(json.dumps(load_generation_config(files), indent=2) + "\n")
    arrays = named_parameters(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(out_folder / WEIGHTS_FOLDER, arrays)
        checkpointer.wait_until_finished()
    marker = {"format": FORMAT, "dtype": str(arrays["embed"].dtype), "name": files.name,
              "num_parameters": config.num_parameters, "files": _file_sizes(out_folder)}
    (out_folder / ORBAX_MARKER).write_text(json.dumps(marker, indent=2) + "\n")
    return ModelFiles("orbax", out_folder, out_folder.name)


def restore_orbax(files: ModelFiles, dtype: str | jnp.dtype, sharding: Placement) -> Decoder:
    """Restores a converted checkpoint; each device reads only what it holds.

    Args:
      files: of kind "orbax".
      dtype: type of kernels, embedding and head; converted while reading where the checkpoint has another.
      sharding: where the parameters go.

    Raises:
      CheckpointError: the marker is damaged, or files or parameters are missing, damaged or of another shape.
    """
    _check_marker(files.path)
    config = load_config(files)
    weights = (files.path / WEIGHTS_FOLDER).absolute()
    targets = abstract_parameters(config, jnp.dtype(dtype))
    choose = sharding if callable(sharding) else lambda path, shape: sharding
    abstract = {path: jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=choose(path, target.shape))
                for path, target in targets.items()}
    advice = f"The checkpoint in {files.path} is damaged or incomplete; convert the model again"
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check_parameters(checkpointer.metadata(weights), targets, advice)
            arrays = checkpointer.restore(weights, abstract)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Orbax cannot restore {weights}: {error}. {advice}") from error
    return build_decoder(config, jnp.dtype(dtype), arrays)


def _file_sizes(folder: Path) -> dict[str, int]:
    """Size of every file of the weights, by its path inside the checkpoint."""
    files = (file for file in (folder / WEIGHTS_FOLDER).rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(files)}


def _check_marker(folder: Path) -> None:
    """The marker is of our format and every file it lists is there in its size."""
    try:
        marker = json.loads((folder / ORBAX_MARKER).read_text(encoding="utf-8"))
        version, expected = marker["format"], dict(marker["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / ORBAX_MARKER} is missing or damaged ({error!r}); "
                              f"convert the model again") from error
    if version != FORMAT:
        raise CheckpointError(f"{folder} has format {version!r}, this version reads {FORMAT}; convert the model again")
    found = _file_sizes(folder)
    for name, size in expected.items():
        if found.get(name) != size:
            state = f"has {found[name]} bytes, expected {size}" if name in found else "is missing"
            raise CheckpointError(f"{folder}: {name} {state}: incomplete copy? Copy the folder again, or convert the "
                                  f"model again")


def _check_parameters(metadata: Any, targets: dict[str, jax.ShapeDtypeStruct], advice: str) -> None:
    stored = metadata.item_metadata
    if stored is None:
        raise CheckpointError(f"Orbax finds no parameters. {advice}")
    shapes = {path: tuple(entry.shape) for path, entry in dict(stored).items()}
    if set(shapes) != set(targets):
        missing, unexpected = sorted(set(targets) - set(shapes)), sorted(set(shapes) - set(targets))
        raise CheckpointError(f"missing parameters: {missing[:10]} ({len(missing)}), unexpected: {unexpected[:10]} "
                              f"({len(unexpected)}). {advice}")
    for path, target in targets.items():
        if shapes[path] != target.shape:
            raise CheckpointError(f"parameter {path!r} has shape {shapes[path]}, config.json needs {target.shape}. "
                                  f"{advice}")
