"""Writes smollm_references.json: what transformers generates on SmolLM2-135M-Instruct, and how far it is from float64.

Needs torch. Run from the repository root:  PYTHONPATH=.:tests python tests/data/make_smollm_references.py
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import oracle
import smollm
import torch
import transformers

from jradix.model_files import resolve
from jradix.tokenizer import Tokenizer
from jradix.weights.loader import load_config


def main() -> None:
    files = resolve("demo")
    tokenizer, config = Tokenizer.from_gguf(files.path), load_config(files)
    tensors, hf_config = smollm.checkpoint_tensors()
    model = smollm.transformers_model(tensors, hf_config)
    prompts = [tokenizer.encode(text) for text in smollm.PROMPTS]
    outputs = [smollm.transformers_tokens(model, ids) for ids in prompts]
    errors = []
    for ids, output in zip(prompts, outputs):
        exact = oracle.forward(tensors, config, [*ids, *output])
        with torch.no_grad():
            theirs = model(torch.tensor([[*ids, *output]])).logits[0].numpy()
        errors.append(float(np.abs(theirs - exact).max()))
    content = dict(made_with=f"transformers {transformers.__version__}, torch {torch.__version__}",
                   float32_errors=errors, prompts=prompts, outputs=outputs)
    Path(__file__).with_name("smollm_references.json").write_text(json.dumps(content) + "\n")
    print(f"largest difference of transformers from float64: {max(errors):.2e}")


if __name__ == "__main__":
    main()
