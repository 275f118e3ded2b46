"""A tiny LLM for tests of programs: byte tokens, ChatML, random weights, greedy by default."""
from __future__ import annotations

import json
from pathlib import Path

from jradix import LLM
from toy_engine import ToyLM, toy_model_config
from toy_models import make_checkpoint
from toy_tokenizers import make_chat_tokenizer

MODEL = dict(vocab_size=272, num_hidden_layers=1, max_position_embeddings=512, bos_token_id=256, eos_token_id=258)


def toy_llm(folder: Path, **settings: object) -> tuple[LLM, ToyLM]:
    """The LLM, and its model for the float64 reference."""
    weights = make_checkpoint(folder, **MODEL)
    make_chat_tokenizer().save(folder)
    (folder / "generation_config.json").write_text(json.dumps(dict(temperature=0.0, eos_token_id=258)))
    sizes = dict(dtype="float32", max_num_seqs=8, prefill_chunk_tokens=64, page_size=4, kv_cache_bytes=2**21,
                 grammar_workers=0, grammar_cache_dir=None, compile_cache_dir=None, quiet=True)
    return LLM(folder, **{**sizes, **settings}), ToyLM(toy_model_config(**MODEL), weights)
