"""What the parent and a peer say to each other: JSON lines over the peer's stdin and stdout.

    peer    {"ready": {"versions": {...}, "notes": [...]}}
    parent  {"start": {"is_warmup": false}}
    peer    {"done": true}
    parent  {"generate": {"prompts": [[5, 7]], "num_outputs": [2], "schema": null}}
    peer    {"outputs": [[9, 3]], "wall_s": 0.01, "ttft_s": [0.006], "num_computed": 2}

A peer ends when its stdin does. What its engine prints goes to stderr, so that nothing can come between two answers.
A peer that fails prints its traceback there and dies; the parent reports the end of that. Standard library only.
"""
from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Callable, NamedTuple, Protocol

PR_SET_PDEATHSIG = 1        # linux/prctl.h: the signal that a process gets when its parent dies


@dataclass(frozen=True)
class Settings:
    """What a peer is started with.

    Attributes:
      weights: folder in Hugging Face format, for llama.cpp the .gguf file.
      dtype: "float32" or "bfloat16", of weights and arithmetic.
      prefix_caching: whether text that was computed once may be reused.
      max_model_len: longest prompt plus output, in tokens.
      max_num_seqs: most requests that are sent at once.
      threads: CPU threads to use.
      kv_bytes: memory for KV, where the engine wants to be told.
      method: which of its ways of generating, where a peer has several; else "".
      server: program that the adapter starts, where it is not the engine itself.
    """
    weights: str
    dtype: str
    prefix_caching: bool
    max_model_len: int
    max_num_seqs: int
    threads: int
    kv_bytes: int
    method: str = ""
    server: str | None = None

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Job(NamedTuple):
    """Prompts to answer greedily, all at once.

    Attributes:
      prompts: token ids.
      num_outputs: tokens to generate for each, end tokens ignored; with a schema at most so many.
      schema: JSON schema that each output has to follow, and ends with its document; None: free text.
    """
    prompts: list[list[int]]
    num_outputs: list[int]
    schema: dict[str, Any] | None = None


class Answer(NamedTuple):
    """What a job gave and took.

    Attributes:
      outputs: token ids of each prompt's output.
      wall_s: from the submission of all prompts to the last output.
      ttft_s: per prompt, from the submission of all to its first output token; None where the engine does not tell.
      num_computed: prompt tokens that went through the model; None where the engine does not tell.
    """
    outputs: list[list[int]]
    wall_s: float
    ttft_s: list[float] | None = None
    num_computed: int | None = None


class Engine(Protocol):
    """What an adapter makes of its engine.

    Attributes:
      versions: package -> version, of what does the work.
      notes: settings that a reader of the figures should know.
    """
    versions: dict[str, str]
    notes: list[str]

    def generate(self, job: Job) -> Answer: ...

    def start(self, is_warmup: bool) -> None:
        """Begins a run of one workload with no text cached. In a warm-up the engine may try its settings."""

    def close(self) -> None: ...


def write_line(stream: BinaryIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    stream.flush()


def serve(open_engine: Callable[[Settings], Engine]) -> int:
    """Runs a peer to the end of its stdin; the whole of an adapter's main program.

    Args:
      open_engine: makes the engine from the settings in `sys.argv[1]`.

    Returns:
      The exit code.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)      # else it would stay stopped without a parent
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine = open_engine(Settings(**json.loads(sys.argv[1])))
    try:
        write_line(answers, {"ready": dict(versions=engine.versions, notes=engine.notes)})
        for line in sys.stdin.buffer:
            (command, arguments), = json.loads(line).items()
            if command == "generate":
                write_line(answers, engine.generate(Job(**arguments))._asdict())
            elif command == "start":
                engine.start(**arguments)
                write_line(answers, {"done": True})
            else:
                raise ValueError(f"command {command!r}: expected generate or start")
    finally:
        os.killpg(0, signal.SIGCONT)        # processes of its own may have been stopped with it
        engine.close()
    return 0
