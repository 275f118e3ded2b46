"""Whether the C code of this process may use a matrix unit, and how a compiler is told not to."""
from __future__ import annotations

import os
from pathlib import Path

WITHOUT_TILES = "-mno-amx-tile"
PROCESSOR = Path("/proc/cpuinfo")
HAS_MATRIX_UNIT = (PROCESSOR.exists() and "amx_bf16" in PROCESSOR.read_text(encoding="utf-8")
                   and WITHOUT_TILES not in os.environ.get("CC", ""))
