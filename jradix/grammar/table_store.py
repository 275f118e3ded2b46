"""Compiled grammars on disk: a folder of checksummed files, bounded in bytes, the least recently used go first.

An entry is a line with the format, a checksum, and an npz archive whose first member is JSON; nothing is unpickled.
Whatever is not exactly what was saved (cut short, changed, of another format) is a miss. Any number of processes may
share a folder: files appear whole, under their final name.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import secrets
import time
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from jradix.grammar.compiler import SOURCES, Grammar, read_schema
from jradix.grammar.dfa import Dfa
from jradix.grammar.json_schema import SchemaReport
from jradix.grammar.limits import GrammarLimits
from jradix.grammar.matcher import MatcherSource
from jradix.grammar.token_dfa import ByteTables, TokenTables
from jradix.grammar.vocabulary import Vocabulary

FORMAT_VERSION = 1
LIBRARIES = ("llguidance", "tokenizers")
MAGIC = b"jradix grammar %d\n" % FORMAT_VERSION
DIGEST_BYTES = 32
SUFFIX, UNFINISHED_SUFFIX = ".grammar", ".tmp"
UNFINISHED_AGE_S = 3600.0       # after which a temporary file is taken for what a killed process left behind
CLASSES = {cls.__name__: cls for cls in (Grammar, Dfa, TokenTables, ByteTables, SchemaReport, MatcherSource)}


class TableStore:
    """The compiled grammars of a folder. The sizes of its files add up to at most `max_bytes` after each `save`.

    Args:
      folder: made when the first grammar is saved.
      max_bytes: of all entries together.

    Raises:
      ValueError: `max_bytes` below 1.
    """

    def __init__(self, folder: Path, max_bytes: int = 1 << 30) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes!r}: expected an integer >= 1")
        self.folder = Path(folder).absolute()     # also for a worker, whose parent may go elsewhere
        self.max_bytes = max_bytes

    def load(self, key: str) -> Grammar | None:
        """The grammar saved under `key`, a hex digest; None where there is none that can be used."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        body = memoryview(content)[len(MAGIC) + DIGEST_BYTES:]
        if not content.startswith(MAGIC + _digest(key, body)):
            return None
        try:
            grammar = _unpacked(body)
        except (ValueError, KeyError, TypeError, zipfile.BadZipFile):
            return None             # written by other code, although the checksum is right
        with contextlib.suppress(OSError):      # a folder that may only be read
            os.utime(path)
        return grammar

    def save(self, key: str, grammar: Grammar) -> None:
        """Keeps `grammar` under `key`, a hex digest, in place of what was there, and drops what is over the bound.

        A grammar that is over the bound by itself is not kept. About 10 ms for each megabyte of tables.

        Raises:
          OSError: the folder cannot be written.
        """
        path = self._path(key)
        body = _packed(grammar)
        content = b"".join((MAGIC, _digest(key, body), body))
        if len(content) > self.max_bytes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
        try:
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._trim()

    def _path(self, key: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{8,128}", key):
            raise ValueError(f"key={key!r}: expected 8 to 128 hex digits, as `table_key` gives them")
        return self.folder / f"{key}{SUFFIX}"

    def _trim(self) -> None:
        """Drops the entries that were not used for the longest time, and what killed processes left."""
        entries = []
        with os.scandir(self.folder) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):        # another process drops them as well
                    status = file.stat()
                    if file.name.endswith(SUFFIX):
                        entries.append((status.st_mtime_ns, file.name, status.st_size))
                    elif file.name.endswith(UNFINISHED_SUFFIX) and time.time() - status.st_mtime > UNFINISHED_AGE_S:
                        os.unlink(file.path)
        excess = sum(size for _, _, size in entries) - self.max_bytes
        for _, name, size in sorted(entries):
            if excess <= 0:
                break
            (self.folder / name).unlink(missing_ok=True)
            excess -= size


def table_key(sources: Mapping[str, Any], vocabulary: Vocabulary, limits: GrammarLimits | None = None) -> str:
    """32 hex digits: equal where `compile_grammar` gives the same grammar, for all that is known beforehand.

    Args:
      sources: arguments of `compile_grammar`: the grammar and its options; `limits` among them are not looked at. The
        order of a schema's properties counts, that of the arguments does not.
      vocabulary: whose tables they are.
      limits: None for the defaults.

    Raises:
      GrammarError: `json_schema` is no schema.
      TypeError: an argument that JSON cannot say.
      RecursionError: nested too deeply.
    """
    given = {name: value for name, value in sources.items()
             if name != "limits" and not (name in SOURCES and value is None)}
    if "json_schema" in given:
        given["json_schema"] = read_schema(given["json_schema"])
    facts = [FORMAT_VERSION, _compiler_version(), vocabulary.fingerprint,
             dataclasses.asdict(limits or GrammarLimits()), sorted(given.items())]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=1)
def _compiler_version() -> str:
    """Of all that makes grammars: libraries, and this package's source, which changes more often than its version."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return " ".join([digest.hexdigest(), *(version(library) for library in LIBRARIES)])


def _digest(key: str, body: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES)
    digest.update(body)
    return digest.digest()


def _packed(grammar: Grammar) -> bytes:
    arrays: list[np.ndarray] = []
    text = json.dumps(_flat(grammar, arrays))
    buffer = io.BytesIO()
    # As np.savez_compressed, but with the fast level of compression: masks shrink well at any.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in (("json", np.frombuffer(text.encode(), np.uint8)),
                            *((str(i), array) for i, array in enumerate(arrays))):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return buffer.getvalue()


def _unpacked(body: memoryview) -> Grammar:
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    grammar = _restored(json.loads(arrays["json"].tobytes()), arrays)
    if not isinstance(grammar, Grammar):
        raise TypeError(f"an entry with a {type(grammar).__name__}; expected a Grammar")
    return grammar


def _flat(value: Any, arrays: list[np.ndarray]) -> Any:
    """`value` as JSON, what JSON cannot say as a list that begins with its kind; arrays are moved to `arrays`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return ["array", str(len(arrays) - 1)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_flat(item, arrays) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[_flat(key, arrays), _flat(item, arrays)] for key, item in value.items()]]
    name = type(value).__name__
    if CLASSES.get(name) is not type(value):
        raise TypeError(f"a grammar holds a {name}, which the table store does not know; expected plain values, "
                        f"arrays or one of {', '.join(CLASSES)}")
    return [name, {field.name: _flat(getattr(value, field.name), arrays)
                   for field in dataclasses.fields(value) if field.init}]


def _restored(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "array":
        return arrays[content]
    if kind in ("list", "tuple"):
        items = [_restored(item, arrays) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {_restored(key, arrays): _restored(item, arrays) for key, item in content}
    return CLASSES[kind](**{name: _restored(item, arrays) for name, item in content.items()})
