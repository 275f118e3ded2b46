"""What a user gets back. The words are vLLM's; a failed item is a record in its place."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from jradix.sampling_params import SamplingParams


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
      logprob: natural logarithm, from the raw logits.
      rank: 1 for the most probable token; None where it was not computed.
      decoded_token: the token's own text, None where the engine has no tokenizer.
    """
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. It was written under the tool's schema, so the arguments fit it.

    Attributes:
      id: nine letters and digits (what Mistral's templates ask for), the same whenever the same output is made again.
      name: of the function.
      arguments: by parameter name.
    """
    id: str
    name: str
    arguments: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """In OpenAI's form, the arguments as JSON text."""
        return {"id": self.id, "type": "function",
                "function": {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}}


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
      index: number of the sample, 0 to n - 1.
      text: decoded output, without the stop text unless it was asked for, and without tool calls.
      token_ids: all sampled ids, the stop token included.
      finish_reason: "stop", "length", "abort", "tool_calls" where it ended with calls, or None while it runs.
      stop_reason: the stop text or stop token id that ended it; "max_model_len" or "kv_capacity" where the output was
        cut by a limit other than max_tokens; None for an end token of the model and for max_tokens.
      logprobs: per output token, token id -> Logprob: the chosen one and the most probable ones.
      cumulative_logprob: sum over the chosen tokens; None unless logprobs were asked for.
      grammar: what held the output to its grammar: "dfa", or "dfa-depth-5" where recursion and free values were cut at
        that depth, or "matcher"; None without a grammar.
      num_forced_tokens: of `token_ids`, those that were appended because the grammar left no choice.
      valid: the output ended as a whole text of its grammar; None without a grammar.
      parsed: the value of a valid output under a JSON schema, else None.
      error: why an output is no whole text of its grammar; None when it is, and without a grammar.
      tool_calls: calls of the tools given to `chat`, in order. Never part of them: where the output was cut off inside
        a call there are none, `text` is all that was written and `error` says so.
    """
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    grammar: str | None = None
    num_forced_tokens: int = 0
    valid: bool | None = None
    parsed: Any = None
    error: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def as_message(self) -> dict[str, Any]:
        """The answer as a message in OpenAI's form, to be appended to the conversation."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": self.text or None,
                "tool_calls": [call.as_dict() for call in self.tool_calls]}


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds, counts over all samples of the request.

    Attributes:
      queue_s: from submission to the first step that computes it.
      ttft_s: from submission to the first output token.
      latency_s: from submission to the end.
      num_computed_tokens: prompt tokens run through the model (recomputation after preemption not counted).
      num_preemptions: times a running sample was put back into the queue.
    """
    queue_s: float | None = None
    ttft_s: float | None = None
    latency_s: float | None = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class CacheUse:
    """What the prefix cache did for one request, in tokens of the prompt. `llm.cache.explain` says more.

    Attributes:
      num_cached_tokens: found, and not computed again.
      num_host_tokens: of these, brought back from host memory.
      num_copied_tokens: of these, in a page that was shared in part and copied.
      num_evicted_tokens: further tokens that had been cached once and were evicted before this request came.
    """
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_copied_tokens: int = 0
    num_evicted_tokens: int = 0

    def __str__(self) -> str:
        text = f"{self.num_cached_tokens} tokens from the cache"
        parts = [f"{n} {what}" for n, what in ((self.num_host_tokens, "from host memory"),
                                               (self.num_copied_tokens, "in a copied page")) if n]
        if parts:
            text += f" ({', '.join(parts)})"
        return text + (f"; {self.num_evicted_tokens} more had been evicted" if self.num_evicted_tokens else "")


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt.

    Attributes:
      request_id: the user's id, or one made by the engine.
      prompt: the prompt's text; None when token ids were given.
      prompt_token_ids: ids that were run.
      prompt_logprobs: per prompt token, the first None; None unless asked for.
      finished: True when every sample has ended.
      outputs: one per sample.
      num_cached_tokens: prompt tokens found in the cache at admission of the first sample.
      cache: what the cache did for it, of the first sample.
      num_truncated_tokens: prompt tokens cut off to make it fit (`on_error="truncate_left"` or `"truncate_right"`).
      metrics: times and counts.
      error: why the item failed; None when it did not.
      sampling_params: the values in force, defaults of the model filled in.
    """
    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    cache: CacheUse = field(default_factory=CacheUse)
    num_truncated_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    sampling_params: SamplingParams | None = None


@dataclass(slots=True)
class ScoreOutput:
    """Log-probabilities of a fixed completion.

    Attributes:
      token_ids: ids of the completion.
      logprobs: one per completion token, given everything before it.
      logprob: their sum.
      is_greedy: True when every completion token is the most probable one.
      num_cached_tokens: tokens of the prompt found in the cache.
      error: why the item failed; None when it did not.
    """
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprob: float = 0.0
    is_greedy: bool = False
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class StreamDelta:
    """What one sample gained since the last delta.

    Attributes:
      index: number of the prompt in the call.
      sample: number of the sample, 0 to n - 1.
      text: new text; whole characters, never part of a stop string that may still complete.
      token_ids: new token ids.
      finish_reason: set on the sample's last delta.
      output: the whole answer, on the last delta of the prompt; also where a failed prompt reports its error.
    """
    index: int
    sample: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    output: RequestOutput | None = None
