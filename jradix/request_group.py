"""What the user sent as one request: a prompt with its n samples, and the output they fill."""
from __future__ import annotations

import json
from typing import Sequence

import numpy as np

from jradix.batch import TokenLogprobs
from jradix.detokenizer import IncrementalDetokenizer
from jradix.outputs import CompletionOutput, Logprob, RequestOutput
from jradix.sampling_params import SamplingParams
from jradix.sched.request import Request
from jradix.tokenizer import Tokenizer


class RequestGroup:
    """Collects what the samples of one prompt produce.

    Attributes:
      output: grows while the samples run; complete once `finish` was called.
      samples: the scheduler's requests, one per sample.
      is_streamed: text is made as tokens come, not only at the end.
    """

    def __init__(self, output: RequestOutput, tokenizer: Tokenizer | None, *, is_streamed: bool):
        self.output = output
        self.samples: list[Request] = []
        self.is_streamed = is_streamed
        self._tokenizer = tokenizer
        self._detokenizers: list[IncrementalDetokenizer | None] = []
        self._prompt_logprobs: dict[int, dict[int, Logprob]] = {}    # by prompt position

    @property
    def params(self) -> SamplingParams:
        return self.output.sampling_params

    def make_detokenizer(self) -> IncrementalDetokenizer | None:
        """The detokenizer of the next sample; None where text is only needed at the end."""
        params = self.params
        if self._tokenizer is None or not (params.stop or self.is_streamed):
            return None
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens, stop=params.stop,
                                      include_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens)

    def add_sample(self, request: Request, detokenizer: IncrementalDetokenizer | None) -> None:
        """Takes in a sample that was queued."""
        has_logprobs = self.params.logprobs is not None
        self.output.outputs.append(CompletionOutput(len(self.samples), logprobs=[] if has_logprobs else None,
                                                    cumulative_logprob=0.0 if has_logprobs else None))
        self.samples.append(request)
        self._detokenizers.append(detokenizer)

    def stream(self, index: int, new_tokens: Sequence[int]) -> None:
        """Adds new tokens of a streamed sample, and their text as far as it is safe to show."""
        completion, detokenizer = self.output.outputs[index], self._detokenizers[index]
        completion.token_ids += new_tokens
        if detokenizer is not None:
            if self.samples[index].stop_search is None:    # else the scheduler has pushed them
                detokenizer.push(new_tokens)
            completion.text += detokenizer.delta()

    def add_logprobs(self, index: int, new_tokens: Sequence[int], found: TokenLogprobs, row: int) -> None:
        """Adds log-probabilities of a sample's new tokens: row `row` of `found`, leading axes [steps, rows]."""
        completion = self.output.outputs[index]
        for step, token in enumerate(new_tokens):
            entry = self._entry(token, TokenLogprobs(*(array[step, row] for array in found)), self.params.logprobs)
            completion.logprobs.append(entry)
            completion.cumulative_logprob += entry[token].logprob

    def add_prompt_logprob(self, position: int, found: TokenLogprobs, place: int) -> None:
        """Adds the log-probability of the prompt token at `position`: entry `place` of `found`."""
        token = self.output.prompt_token_ids[position]
        self._prompt_logprobs[position] = self._entry(token, TokenLogprobs(*(array[place] for array in found)),
                                                      self.params.prompt_logprobs)

    def complete(self, index: int) -> None:
        """Fills the output of a sample that has ended."""
        completion, request, detokenizer = self.output.outputs[index], self.samples[index], self._detokenizers[index]
        completion.token_ids = request.output_ids
        completion.finish_reason, completion.stop_reason = request.finish_reason, request.stop_reason
        if detokenizer is not None:
            detokenizer.finish()
            completion.text = detokenizer.text
        elif self._tokenizer is not None:
            completion.text = self._tokenizer.decode(completion.token_ids,
                                                     skip_special_tokens=self.params.skip_special_tokens)
        if request.constraint is not None and request.constraint.is_ready:
            self._judge(completion, request)

    def _judge(self, completion: CompletionOutput, request: Request) -> None:
        """Says whether the output is a whole text of its grammar."""
        constraint, params = request.constraint, self.params
        completion.grammar, completion.num_forced_tokens = constraint.engine, request.num_forced
        is_whole = completion.finish_reason == "stop" and constraint.is_accepting
        completion.valid = is_whole and not isinstance(completion.stop_reason, str)
        if completion.valid:
            if params.json_schema is not None:
                completion.parsed = json.loads(completion.text)
        elif completion.finish_reason == "length":
            limit = f"max_tokens={params.max_tokens}" if completion.stop_reason is None else completion.stop_reason
            completion.error = (f"cut off by {limit} after {len(completion.token_ids)} tokens, before the text of its "
                                "grammar was complete; give it more tokens")
        else:
            completion.error = (f"ended by {completion.stop_reason or completion.finish_reason!r} before the text of "
                                "its grammar was complete")

    def finish(self) -> None:
        """Fills what is known once all samples have ended."""
        output, first, metrics = self.output, self.samples[0], self.output.metrics
        output.finished = True
        output.cache = first.cache_use or output.cache
        output.num_cached_tokens = output.cache.num_cached_tokens
        if self.params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *(self._prompt_logprobs.get(p) for p in range(1, first.num_prompt))]
        metrics.num_computed_tokens = sum(r.num_computed_prompt for r in self.samples)
        metrics.num_preemptions = sum(r.num_preemptions for r in self.samples)
        metrics.latency_s = max(r.finished_s for r in self.samples) - first.arrival_s
        if first.admitted_s is not None:
            metrics.queue_s = first.admitted_s - first.arrival_s
        first_tokens = [r.first_token_s for r in self.samples if r.first_token_s is not None]
        if first_tokens:
            metrics.ttft_s = min(first_tokens) - first.arrival_s

    def _entry(self, token: int, found: TokenLogprobs, num_top: int) -> dict[int, Logprob]:
        """Token id -> Logprob at one position: the chosen token first, then the most probable ones."""
        entry = {token: Logprob(float(found.logprob), int(found.rank), self._text(token))}
        best: Sequence[tuple[int, float]] = list(zip(np.asarray(found.top_ids)[:num_top].tolist(),
                                                     np.asarray(found.top_logprobs)[:num_top].tolist()))
        for rank, (other, logprob) in enumerate(best, 1):
            entry.setdefault(other, Logprob(logprob, rank, self._text(other)))
        return entry

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)
