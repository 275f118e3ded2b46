"""jradix: batch inference of language models that never computes the same prefix twice (RadixAttention in JAX).

Importing this package touches no device; names are loaded when they are first used.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "jradix.llm", "AsyncLLM": "jradix.async_llm", "convert": "jradix.loading",
    "SamplingParams": "jradix.sampling_params",
    "RequestOutput": "jradix.outputs", "CompletionOutput": "jradix.outputs", "ScoreOutput": "jradix.outputs",
    "StreamDelta": "jradix.outputs", "Logprob": "jradix.outputs", "RequestMetrics": "jradix.outputs",
    "Engine": "jradix.engine", "EngineConfig": "jradix.config",
    "JradixError": "jradix.errors", "RequestError": "jradix.errors", "UnsupportedModel": "jradix.errors",
    "CheckpointError": "jradix.errors", "TokenizerError": "jradix.errors", "DeviceError": "jradix.errors",
    "EngineError": "jradix.errors", "BatchFileError": "jradix.errors", "SnapshotError": "jradix.errors",
    "PinError": "jradix.errors", "GrammarError": "jradix.errors", "GrammarTooLarge": "jradix.errors",
    "GrammarUnsupported": "jradix.errors",
    "CacheUse": "jradix.outputs", "ToolCall": "jradix.outputs",
    "Grammar": "jradix.grammar.compiler", "compile_grammar": "jradix.grammar.compiler",
    "json_schema": "jradix.grammar.python_types",
    "function": "jradix.program.function", "start": "jradix.program.function", "ProgramDelta": "jradix.program.function",
    "State": "jradix.program.state", "gen": "jradix.program.parts", "select": "jradix.program.parts",
    "ProgramError": "jradix.errors",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from jradix.async_llm import AsyncLLM
    from jradix.config import EngineConfig
    from jradix.engine import Engine
    from jradix.errors import (BatchFileError, CheckpointError, DeviceError, EngineError, GrammarError, GrammarTooLarge,
                               GrammarUnsupported, JradixError, PinError, ProgramError, RequestError, SnapshotError,
                               TokenizerError, UnsupportedModel)
    from jradix.grammar.compiler import Grammar, compile_grammar
    from jradix.grammar.python_types import json_schema
    from jradix.llm import LLM
    from jradix.loading import convert
    from jradix.outputs import (CacheUse, CompletionOutput, Logprob, RequestMetrics, RequestOutput, ScoreOutput,
                                StreamDelta, ToolCall)
    from jradix.program.function import ProgramDelta, function, start
    from jradix.program.parts import gen, select
    from jradix.program.state import State
    from jradix.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jradix' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
