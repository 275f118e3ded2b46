"""Every error jradix raises on purpose. Each message says what was given, what was expected and what to do."""
from __future__ import annotations

from typing import Any


class JradixError(Exception):
    """Base of all jradix errors."""


class RequestError(JradixError, ValueError):
    """One request cannot be served: empty or over-long prompt, token id outside the vocabulary, bad parameter."""


class UnsupportedModel(JradixError, ValueError):
    """The checkpoint's architecture, or one of its settings, is not implemented."""


class CheckpointError(JradixError, ValueError):
    """The checkpoint is incomplete or does not match its config: missing shard, unknown tensor, wrong shape."""


class TokenizerError(JradixError, ValueError):
    """The tokenizer or its chat template is missing or cannot do what was asked."""


class DeviceError(JradixError, RuntimeError):
    """The requested device does not exist here, or the model does not fit into its memory."""


class OutOfPages(JradixError):
    """The pool has too few pages, free and evictable together. Nothing was changed."""


class PagesTooYoung(OutOfPages):
    """Enough pages could be evicted, but they were used less than `min_ttl_s` ago."""


class PinError(JradixError, ValueError):
    """A prefix cannot be pinned: over the budget, longer than the pool, a bad time to live, or not pinned at all."""


class EngineError(JradixError, RuntimeError):
    """A step failed or the engine is closed. The cause is chained."""


class ProgramError(JradixError, RuntimeError):
    """A program, or a part of its text, failed. The cause is chained.

    Attributes:
      text: what the program's text was by then.
      state: its state.
    """

    def __init__(self, message: str, state: Any = None):
        super().__init__(message)
        self.state = state
        self.text = "" if state is None else state.text_so_far


class BatchFileError(JradixError, OSError):
    """The batch job cannot run: unreadable input, locked or foreign output file, no space left."""


class SnapshotError(JradixError, OSError):
    """A saved cache cannot be written or used: damaged, of another model or layout, no space left. Nothing changed."""


class GrammarError(JradixError, ValueError):
    """The grammar cannot be used: wrong syntax, an unsupported construct (named, with its place), or unsatisfiable."""


class GrammarUnsupported(GrammarError):
    """A construct of the grammar that an automaton cannot enforce; the message names it and its place."""


class GrammarTooLarge(GrammarError):
    """The grammar needs more states, work or bytes than the limits allow. The message names limit and number."""
