"""The model's weights for all peers: dequantised once, then the same numbers in every engine's format and type.

    python benchmarks/peers/weights.py --model demo --root .venv-peers/weights

writes `float32/` and `bfloat16/` (config.json, model.safetensors, tokenizer, for jradix, transformers and vLLM) and
`float32.gguf` and `bfloat16.gguf` (for llama.cpp, only where the model itself is a .gguf file: its metadata and the
order of its rows are kept, so that nothing has to be converted back). Norms stay float32 in the latter.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from jradix.errors import CheckpointError
from jradix.loading import load_tokenizer
from jradix.model_files import ModelFiles, resolve
from jradix.weights.gguf import GGUFSource
from jradix.weights.hf import SafetensorsSource
from jradix.weights.loader import load_hf_config

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
READY = "ready"
WRITTEN_ANEW = ("general.architecture", "general.file_type", "general.quantization_version")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="as for LLM, but not Orbax")
    parser.add_argument("--root", type=Path, required=True, help="folder to write to; made anew")
    options = parser.parse_args(argv)
    write_weights(options.model, options.root)
    return 0


def write_weights(model: str, root: Path) -> None:
    """Writes all formats, or nothing: the folder appears when it is whole.

    Raises:
      CheckpointError: the model cannot be read, or is an Orbax folder.
    """
    files = resolve(model)
    if files.kind == "orbax":
        raise CheckpointError(f"model={model!r}: other engines cannot read Orbax; name the checkpoint it was made from")
    unfinished = root.with_name(f"{root.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    for name, dtype in DTYPES.items():
        write_folder(files, unfinished / name, name, dtype)
        load_tokenizer(files, None, None).save(unfinished / name)
        if files.kind == "gguf":
            write_gguf(files.path, unfinished / f"{name}.gguf", name)
    (unfinished / READY).write_text(model, encoding="utf-8")
    shutil.rmtree(root, ignore_errors=True)
    unfinished.rename(root)


def write_folder(files: ModelFiles, folder: Path, dtype_name: str, dtype: np.dtype) -> None:
    """Config and tensors in Hugging Face format, one file."""
    from safetensors.numpy import save_file
    folder.mkdir()
    source = GGUFSource(files.path) if files.kind == "gguf" else SafetensorsSource(files.path)
    tensors = {name: np.ascontiguousarray(np.asarray(source.read(name), np.float32).astype(dtype))
               for name in source.shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = load_hf_config(files).to_dict()
    config |= dict(dtype=dtype_name, torch_dtype=dtype_name)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_gguf(source: Path, target: Path, dtype_name: str) -> None:
    """The same file with its matrices in another type."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize
    kind = {"float32": GGMLQuantizationType.F32, "bfloat16": GGMLQuantizationType.BF16}[dtype_name]
    file_type = {"float32": LlamaFileType.ALL_F32, "bfloat16": LlamaFileType.MOSTLY_BF16}[dtype_name]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name in WRITTEN_ANEW or name.startswith("GGUF."):
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        of_kind = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(np.ascontiguousarray(values, np.float32), of_kind), raw_dtype=of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
