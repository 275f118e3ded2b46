"""What must be found before an engine can be made: device, tokenizer, end tokens, compilation cache; and `convert`."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Mapping

import jax

from jradix.errors import DeviceError, TokenizerError
from jradix.grammar.vocabulary import Vocabulary, vocabulary_of
from jradix.model_files import ModelFiles, resolve
from jradix.tokenizer import Tokenizer
from jradix.weights.dtype import resolve_dtype
from jradix.weights.loader import load_config, load_model


def convert(model: str | Path, out: str | Path, *, dtype: str = "auto", revision: str | None = None) -> None:
    """Writes a model as an Orbax folder: weights, config and tokenizer. `LLM(out)` loads it.

    Raises:
      CheckpointError: the model cannot be read, or `out` exists and is not empty.
    """
    from jradix.weights.orbax import save_orbax

    files = resolve(str(model), revision=revision)
    config = load_config(files)
    tokenizer = load_tokenizer(files, None, None)
    device = find_device("cpu")
    weight_dtype, _ = resolve_dtype(dtype, device, hidden=config.hidden_size, intermediate=config.intermediate_size)
    weights = load_model(files, dtype=weight_dtype, device=device)
    save_orbax(weights, config, files, Path(out))
    tokenizer.save(Path(out))


def load_tokenizer(files: ModelFiles, tokenizer: str | Path | None, chat_template: str | None) -> Tokenizer:
    path = files.path if tokenizer is None else Path(tokenizer)
    if path.is_dir():
        return Tokenizer.from_folder(path, chat_template=chat_template)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(path, chat_template=chat_template)
    raise TokenizerError(f"tokenizer={str(tokenizer)!r}: expected a folder with tokenizer files or a .gguf file")


def load_vocabulary(tokenizer: Tokenizer, num_tokens: int, eos_ids: Iterable[int]) -> Vocabulary | None:
    """The bytes of all tokens, for grammars; None where the tokenizer does not put texts together byte by byte."""
    try:
        return vocabulary_of(tokenizer, num_tokens, tuple(i for i in eos_ids if i < num_tokens))
    except TokenizerError:
        return None


def find_device(name: str | None) -> jax.Device:
    """The device to run on. Raises DeviceError when a named one does not exist."""
    try:
        found = jax.devices(name)[0]
    except RuntimeError as error:
        hint = {"gpu": 'pip install "jax[cuda13]"', "cuda": 'pip install "jax[cuda13]"',
                "tpu": 'pip install "jax[tpu]"'}
        raise DeviceError(f"device={name!r}: JAX finds no such device here, only {jax.default_backend()}; "
                          f"install it with {hint.get(name, 'the matching jax extra')}") from error
    return found


def keep_compilations(folder: str | Path | None) -> None:
    """Turns JAX's persistent compilation cache on, unless it is set already or not wanted."""
    if folder is None or (folder == "auto" and jax.config.jax_compilation_cache_dir):
        return
    path = Path.home() / ".cache" / "jradix" / "compiled" if folder == "auto" else Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))


def grammar_cache_folder(folder: str | Path | None) -> Path | None:
    """Where compiled grammars are kept: the user's cache directory for "auto"."""
    if folder is None:
        return None
    return Path.home() / ".cache" / "jradix" / "grammars" if folder == "auto" else Path(folder)


def end_token_ids(tokenizer: Iterable[int], config: Iterable[int], generation: Mapping[str, Any]) -> list[int]:
    stated = generation.get("eos_token_id")
    stated = [] if stated is None else [stated] if isinstance(stated, int) else stated
    return sorted({*tokenizer, *config, *stated})
