"""Writes tiny_references.npz: logits of transformers for toy models, so that the comparison also runs without torch.

Run from the repository root: `PYTHONPATH=.:tests python tests/data/make_references.py`. The weights come from seeded
NumPy generators (`toy_models.toy_weights`), so only logits are stored, of every fourth position.
"""
from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from toy_models import REFERENCE_MODELS, make_checkpoint, reference_tokens


def hf_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """float32[T, V] of transformers' model, in float32 with plain attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)[None]).logits[0].numpy()


def main() -> None:
    transformers.logging.disable_progress_bar()
    found = {}
    for name, (architecture, overrides) in REFERENCE_MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(folder, architecture, **overrides)
            found[name] = hf_logits(Path(folder), reference_tokens())[::4]
    np.savez_compressed(Path(__file__).parent / "tiny_references.npz", **found)


if __name__ == "__main__":
    main()
