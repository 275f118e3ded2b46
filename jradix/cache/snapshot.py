"""A saved prefix cache on disk: the folder, its manifest and the tree arrays. It does not read or write page content.

    path/
      manifest.json          what it is, of which model, and every file of the data folder with its size; replaced last
      data-3f...e1/          the one that the manifest names
        tree.npz             arrays of PackedTree
        pages/               written and read by the device side
      .lock                  held while somebody saves

The manifest is replaced in one step after everything it names is on the disk, so the folder holds a whole snapshot at
every moment: the old one or the new one. Data folders that no manifest names are left by a save that was killed; the
next save removes them.
"""
from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from jradix.cache.node import Namespace
from jradix.cache.packed_tree import PackedTree
from jradix.errors import SnapshotError

KIND = "jradix prefix cache"
FORMAT = 1
MANIFEST = "manifest.json"
TREE = "tree.npz"
PAGES = "pages"
_LOCK = ".lock"
_NEW_MANIFEST = ".manifest.json.new"
_DATA_NAME = re.compile(r"data-[0-9a-f]{16}")
# Larger files below PAGES hold checksums of their own, which are tested while they are read.
_DIGEST_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class SnapshotIdentity:
    """What must be equal for saved KV to be used.

    Attributes:
      weights, config, tokenizer: fingerprints.
      weight_dtype, kv_dtype: names of types.
      groups: layers that share page ids.
      deterministic: what the bits of a deterministic engine depend on, so that loaded KV is its own; "" for any other.
    """
    weights: str
    config: str
    tokenizer: str
    weight_dtype: str
    kv_dtype: str
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[tuple[int, ...], ...]
    deterministic: str = ""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"groups": [list(layers) for layers in self.groups]}


_WHAT_TO_DO = {
    "weights": "load it with the model it was saved with",
    "config": "load it with the model it was saved with",
    "tokenizer": "load it with the tokenizer it was saved with",
    "weight_dtype": "give the LLM the same dtype",
    "kv_dtype": "give the LLM the same dtype, on the same kind of device",
    "page_size": "give the LLM the same page_size",
    "deterministic": "give the LLM the same deterministic, prefill_chunk_tokens, max_num_seqs and attention",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that was opened: its manifest, file sizes and tree are right; its pages are checked as they are read.

    Attributes:
      pages_folder: content of the tree's rows.
      created: when it was saved, ISO 8601.
    """
    path: Path
    tree: PackedTree
    pages_folder: Path
    created: str


def has_snapshot(path: str | os.PathLike[str] | None) -> bool:
    """True where a snapshot was saved, whole or damaged; False for None."""
    return path is not None and (Path(path) / MANIFEST).exists()


def saved_weight_dtype(path: str | os.PathLike[str]) -> str:
    """Type of the weights whose KV was saved. Raises SnapshotError for a damaged manifest."""
    with _saying_why(Path(path)):
        return _read_manifest(Path(path))["identity"]["weight_dtype"]


@contextlib.contextmanager
def new_snapshot(path: Path, identity: SnapshotIdentity, tree: PackedTree) -> Iterator[Path]:
    """Saves a snapshot: `with new_snapshot(...) as pages_folder:` write the pages there, each file synced to the disk.

    When the block ends, the snapshot at `path` is replaced. When anything fails, what was written is removed and the
    old snapshot, if any, stays.

    Args:
      path: a folder of its own; made when it is not there.

    Raises:
      SnapshotError: `path` is something else than a snapshot, or in use by another save, or cannot be written.
    """
    with _saying_why(path), _locked(path):
        data = path / f"data-{secrets.token_hex(8)}"
        try:
            data.mkdir()
            with open(data / TREE, "wb") as file:
                np.savez(file, **tree.arrays())
                file.flush()
                os.fsync(file.fileno())
            yield data / PAGES
            _write_manifest(path, data, identity, tree)
        except BaseException:
            with contextlib.suppress(OSError):
                (path / _NEW_MANIFEST).unlink()
            if _data_name(path) != data.name:       # an interrupt may come when the manifest is in place already
                shutil.rmtree(data, ignore_errors=True)
            raise
        _sync(path)
        for name in _data_folders(path) - {data.name}:
            shutil.rmtree(path / name, ignore_errors=True)


def open_snapshot(path: Path, identity: SnapshotIdentity) -> Snapshot:
    """Opens a snapshot of this very model and layout. Reads the manifest and the tree, not the pages.

    Raises:
      SnapshotError: there is none, it is of something else, or a file is missing, additional, altered or of another
        size; the message names it.
    """
    with _saying_why(path):
        manifest = _read_manifest(path)
        _check_identity(path, manifest["identity"], identity.as_json())
        data = path / manifest["data"]
        _check_files(data, manifest["files"])
        with np.load(data / TREE, allow_pickle=False) as arrays:
            tree = PackedTree(namespaces=tuple(_namespace(fields) for fields in manifest["namespaces"]), **arrays)
    return Snapshot(path, tree, data / PAGES, manifest["created"])


# -- saving

@contextlib.contextmanager
def _saying_why(path: Path) -> Iterator[None]:
    try:
        yield
    except SnapshotError:
        raise
    except OSError as error:
        raise SnapshotError(f"snapshot {path}: {error.strerror or error}"
                            + (f" ({error.filename})" if error.filename else "")
                            + "; name a folder that can be read and written and has room") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Makes the folder and holds its lock; a folder made here is removed again when nothing came of it."""
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    _check_is_ours(path)
    fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SnapshotError(f"snapshot {path}: another process is saving there; wait for it, or name another folder"
                                ) from error
        try:
            yield
        except BaseException:
            if is_new and not (path / MANIFEST).exists():
                with contextlib.suppress(OSError):
                    (path / _LOCK).unlink()
                    path.rmdir()
            raise
    finally:
        os.close(fd)


def _check_is_ours(path: Path) -> None:
    """Refuses to save into a folder that holds anything else than a snapshot."""
    if (path / MANIFEST).exists():
        if _data_name(path) is None:
            raise SnapshotError(f"snapshot {path}: its {MANIFEST} is not that of a snapshot, or damaged; delete the "
                                f"folder if it is one, or name another")
        return
    others = sorted(set(os.listdir(path)) - {_LOCK, _NEW_MANIFEST} - _data_folders(path))
    if others:
        raise SnapshotError(f"snapshot {path}: the folder holds other things ({', '.join(others[:5])}) and no "
                            f"{MANIFEST}; name a new folder, or an empty one")


def _write_manifest(path: Path, data: Path, identity: SnapshotIdentity, tree: PackedTree) -> None:
    files = {}
    for name in _files_in(data):
        size = (data / name).stat().st_size
        files[name] = {"size": size} | ({"digest": _digest(data / name)} if _has_digest(name, size) else {})
    manifest = {
        "kind": KIND, "format": FORMAT, "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "identity": identity.as_json(), "num_pages": tree.num_rows, "num_tokens": len(tree.tokens),
        "namespaces": [namespace._asdict() for namespace in tree.namespaces], "data": data.name, "files": files,
    }
    text = json.dumps({**manifest, "digest": _manifest_digest(manifest)}, indent=1)
    with open(path / _NEW_MANIFEST, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    for folder in (data, *(folder for folder in data.rglob("*") if folder.is_dir())):
        _sync(folder)
    _sync(path)
    os.replace(path / _NEW_MANIFEST, path / MANIFEST)


def _sync(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- opening

def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SnapshotError(f"no snapshot in {path}: there is no {MANIFEST}; check the path, or save the cache there "
                            f"first") from error
    except UnicodeDecodeError as error:
        raise _damaged(file, str(error)) from error
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise SnapshotError(f"{file} is not that of a snapshot; check the path")
    if manifest.get("format") != FORMAT:
        raise SnapshotError(f"{file}: format {manifest.get('format')!r}, this version reads {FORMAT}; save the cache "
                            f"again with this version")
    if manifest.pop("digest", None) != _manifest_digest(manifest):
        raise _damaged(file, "it was altered")
    return manifest


def _check_identity(path: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    saved = {"deterministic": "", **saved}      # the first snapshots did not name it
    for name, value in expected.items():
        if saved[name] != value:
            what = _WHAT_TO_DO.get(name, "load it with the model it was saved with")
            raise SnapshotError(f"snapshot {path} is of another {name.replace('_', ' ')} ({name}): it has "
                                f"{saved[name]!r}, expected {value!r}; {what}, or save a new snapshot")


def _check_files(data: Path, files: dict[str, dict[str, Any]]) -> None:
    """The data folder holds exactly these files, in their sizes, the digested ones unaltered."""
    found = set(_files_in(data))
    for name, entry in files.items():
        if name not in found:
            raise _damaged(data / name, "it is missing")
        size = (data / name).stat().st_size
        if size != entry["size"]:
            raise _damaged(data / name, f"it has {size} bytes, expected {entry['size']}")
        if "digest" in entry and _digest(data / name) != entry["digest"]:
            raise _damaged(data / name, "it was altered")
    if found - set(files):
        raise _damaged(data / min(found - set(files)), "it does not belong there")


def _damaged(file: Path, why: str) -> SnapshotError:
    return SnapshotError(f"{file}: {why}. The snapshot is damaged or was copied in part: copy it again, or delete it "
                         f"and save the cache again")


def _namespace(fields: dict[str, Any]) -> Namespace:
    return Namespace(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# -- both

def _data_name(path: Path) -> str | None:
    """The data folder that the manifest names; None when there is no good manifest."""
    try:
        return _read_manifest(path)["data"]
    except OSError:
        return None


def _data_folders(path: Path) -> set[str]:
    return {name for name in os.listdir(path) if _DATA_NAME.fullmatch(name)}


def _files_in(folder: Path) -> list[str]:
    """Paths below a folder of everything that is not a folder."""
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())


def _has_digest(name: str, size: int) -> bool:
    return size <= _DIGEST_BYTES or not name.startswith(f"{PAGES}/")


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
