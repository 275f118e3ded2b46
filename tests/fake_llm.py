"""A deterministic stand-in for `jradix.llm.LLM`: answers are a function of the prompt alone."""
from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator

from jradix.errors import RequestError
from jradix.outputs import CompletionOutput, Logprob, RequestOutput
from jradix.sampling_params import SamplingParams

MARKERS = ("<|im_start|>", "<|im_end|>")


class FakeLLM:
    """Bytes are tokens.

    Args:
      before_result: called with the number of results yielded so far, before each is yielded.
      lazy: keep no record of what was asked (for memory tests).
      shuffle_seed: finish open requests in a random order instead of last first.
    """
    model_name = "fake-model"
    max_model_len = 4096

    def __init__(self, *, fingerprint: str = "f00d", before_result: Callable[[int], None] | None = None,
                 lazy: bool = False, shuffle_seed: int | None = None) -> None:
        self.fingerprint = fingerprint
        self.before_result = before_result
        self.lazy = lazy
        self.rng = None if shuffle_seed is None else random.Random(shuffle_seed)
        self.asked: list[tuple[str | list[int], SamplingParams]] = []
        self.max_inflight: int | None = None
        self.num_yielded = self.peak_open = self.num_aborted = 0
        self.is_closed = False
        self.tokens = {"computed_prompt": 0, "cached_prompt": 0, "generated": 0}
        self._seen: set[bytes] = set()

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.is_closed = True

    def render_chat(self, messages: list[dict], *, template_kwargs: dict | None = None) -> list[int]:
        for message in messages:
            if not isinstance(message.get("content"), str):
                raise RequestError(f"message content {message.get('content')!r}: expected a text")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages) + str(template_kwargs or "")
        return list(text.encode())

    def markers_in(self, messages: list[dict]) -> list[str]:
        return [marker for marker in MARKERS if any(marker in m["content"] for m in messages)]

    def generate_iter(self, requests: Iterable[tuple[str | list[int], SamplingParams]], *, order_window: int = 1,
                      max_inflight: int | None = None) -> Iterator[tuple[int, RequestOutput]]:
        self.max_inflight = max_inflight
        source = enumerate(requests)
        running: list[tuple[int, tuple[str | list[int], SamplingParams]]] = []
        is_exhausted = False
        try:
            while True:
                while not is_exhausted and len(running) < (max_inflight or 256):
                    item = next(source, None)
                    if item is None:
                        is_exhausted = True
                    else:
                        running.append(item)
                        if not self.lazy:
                            self.asked.append(item[1])
                self.peak_open = max(self.peak_open, len(running))
                if not running:
                    return
                index, (prompt, params) = running.pop(self.rng.randrange(len(running)) if self.rng else -1)
                if self.before_result is not None:
                    self.before_result(self.num_yielded)
                self.num_yielded += 1
                yield index, self._answer(prompt, params)
        finally:
            self.num_aborted += len(running)

    def stats(self) -> dict:
        total = self.tokens["computed_prompt"] + self.tokens["cached_prompt"]
        hit_rate = self.tokens["cached_prompt"] / total if total else 0.0
        return {"tokens": dict(self.tokens), "cache": {"hit_rate": hit_rate}}

    def _answer(self, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else None
        if not ids or len(ids) > self.max_model_len:
            return RequestOutput("r", text, ids, error=f"{len(ids)} tokens: expected 1 to {self.max_model_len}")
        key = repr((ids, params)).encode()
        cached = len(ids) - 1 if not self.lazy and key in self._seen else 0
        if not self.lazy:
            self._seen.add(key)
        self.tokens["computed_prompt"] += len(ids) - cached
        self.tokens["cached_prompt"] += cached
        outputs = []
        for sample in range(params.n):
            digest = hashlib.blake2b(key + bytes([sample])).hexdigest()
            answer = digest[:8 if params.max_tokens is None else params.max_tokens]
            tokens = list(answer.encode())
            logprobs = None
            if params.logprobs is not None:     # the chosen token comes third
                logprobs = [{t: Logprob(-2.0, 3, chr(t)), 1: Logprob(-0.5, 1, "\ufffd"), 2: Logprob(-1.0, 2, None)}
                            for t in tokens]
            outputs.append(CompletionOutput(sample, answer, tokens, "length", None, logprobs))
            self.tokens["generated"] += len(tokens)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *({t: Logprob(float("-inf"), 9, chr(t))} for t in ids[1:])]
        return RequestOutput("r", text, ids, prompt_logprobs, True, outputs, cached, sampling_params=params)
