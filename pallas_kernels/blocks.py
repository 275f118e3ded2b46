"""Block sizes of the kernels: measured ones per device in `tuned/*.json`, and a rule for devices nobody measured."""
from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class DecodeBlocks:
    """Attributes:
      kv_tokens: keys of one step of the pipeline, whole pages.
      num_stages: copies in flight.
      num_splits: parts a row's context is computed in, side by side.
    """
    kv_tokens: int
    num_stages: int = 2
    num_splits: int = 1


@dataclass(frozen=True)
class ExtendBlocks:
    """Attributes:
      q_tokens: queries of one block.
      kv_tokens: keys of one step of the pipeline, whole pages.
      num_stages: copies in flight.
    """
    q_tokens: int
    kv_tokens: int
    num_stages: int = 2


@dataclass(frozen=True)
class SharedBlocks:
    """Attributes:
      kv_tokens: keys of one step of the pipeline, whole pages.
      num_stages: copies in flight.
      num_splits: parts a prefix is computed in, side by side.
    """
    kv_tokens: int
    num_stages: int = 2
    num_splits: int = 1


Blocks = DecodeBlocks | ExtendBlocks | SharedBlocks
_KINDS: dict[str, type] = dict(decode=DecodeBlocks, extend=ExtendBlocks, shared_prefix=SharedBlocks)


def tuned_blocks(backend: str, kernel: str, device_kind: str, *, head_dim: int, page_size: int) -> Blocks | None:
    """The measured block sizes, None where this device or these sizes were not measured.

    A file is named by backend and device, as `mosaic_gpu.nvidia-h200.json`, and holds
    `{"<kernel>": [{"head_dim": .., "page_size": .., "blocks": {..}}, ..]}`.

    Raises:
      ValueError: the file is malformed.
    """
    for entry in _entries(backend, _file_name(device_kind)).get(kernel, ()):
        if entry["head_dim"] == head_dim and entry["page_size"] == page_size:
            kind = _KINDS[kernel]
            return kind(**entry["blocks"])
    return None


def tuned_sharing(device_kind: str) -> dict[str, float] | None:
    """The measured cost of attention to shared prefixes, None for a device that was not measured.

    A file is named by the device, as `shared_prefix.nvidia-h200.json`, and holds `{"read": .., "member": .., "part": ..}`
    in units of one query that reads one key by itself; `benchmarks/shared_prefix.py` writes it.

    Raises:
      ValueError: the file is malformed.
    """
    path = TUNED / f"shared_prefix.{_file_name(device_kind)}.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: float(found[name]) for name in ("read", "member", "part")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: expected numbers read, member and part; {error!r}; write it with "
                         "benchmarks/shared_prefix.py") from None


def _file_name(device_kind: str) -> str:
    return device_kind.lower().replace(" ", "-")


@cache
def _entries(backend: str, device: str) -> dict[str, list[dict[str, Any]]]:
    path = TUNED / f"{backend}.{device}.json"
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for kernel, rows in entries.items():
            known = {field.name for field in fields(_KINDS[kernel])}
            for row in rows:
                if not {"head_dim", "page_size", "blocks"} <= row.keys() or not row["blocks"].keys() <= known:
                    raise ValueError(f"{row}")
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path.name}: expected lists of head_dim, page_size and blocks under {', '.join(_KINDS)}; "
                         f"found {error}; write it with benchmarks/tune.py") from None
    return entries
