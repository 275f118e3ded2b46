"""The batch job: drives an LLM over a request file, lazily, and writes each answer as it finishes.

`jradix.batch_line` describes the request lines, `jradix.result_file` the results and what survives a kill. Answers have
OpenAI's shape; each choice also carries `token_ids` and `stop_reason`. Unknown text of a token is written as
`token_id:<id>`.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from jradix.batch_line import LineError
from jradix.request_file import RequestFile
from jradix.result_file import LineIdentity, ResultFile, check_output_path
from jradix.errors import BatchFileError, EngineError, RequestError, TokenizerError
from jradix.outputs import CompletionOutput, Logprob, RequestOutput
from jradix.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jradix.llm import LLM
    from jradix.tool_turn import ToolPrompt

DEFAULT_MAX_INFLIGHT = 256
ORDER_WINDOW = 4096          # lines read ahead and put in the order in which they share most
LOWEST_LOGPROB = -9999.0     # stands for minus infinity, which JSON does not have
PROGRESS_S = 0.5             # seconds between two looks at the engine's statistics
ERRORS_SHOWN = 5


@dataclass
class BatchSummary:
    """What a job did; `--report` writes these fields as one JSON object.

    Counts are of the whole job; those marked * of this run alone. lines = items + blank, items = answered + errors.

    Attributes:
      input, output: the files.
      model, fingerprint: the model that answered.
      lines, blank: lines of the input, and those without content.
      items: lines that have a result.
      answered, errors: results that are an answer, and error records.
      resumed: results found in the output at the start.
      computed: * results written.
      first_errors: * messages of the first error records.
      other_model_lines: * answered lines that asked for a model of another name.
      control_token_lines: * chat lines whose text spells a control token of the model; None where the LLM cannot tell.
      finish_reasons: * how many choices ended for each reason.
      computed_prompt_tokens, cached_prompt_tokens: * prompt tokens run through the model, and reused from the cache.
      generated_tokens: * output tokens.
      hit_rate: * cached / (cached + computed) prompt tokens, 0 where there were none.
      saved_cache_pages: * pages of the prefix cache written to `cache_dir`.
      load_s, run_s: * seconds until the model was ready, and from there to the last result.
      requests_per_s: * computed / run_s.
    """
    input: str = ""
    output: str = ""
    model: str = ""
    fingerprint: str = ""
    lines: int = 0
    blank: int = 0
    items: int = 0
    answered: int = 0
    errors: int = 0
    resumed: int = 0
    computed: int = 0
    first_errors: list[str] = field(default_factory=list)
    other_model_lines: int = 0
    control_token_lines: int | None = None
    finish_reasons: dict[str, int] = field(default_factory=dict)
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    hit_rate: float = 0.0
    saved_cache_pages: int = 0
    load_s: float = 0.0
    run_s: float = 0.0
    requests_per_s: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.items:,} items: {self.answered:,} answered, {self.errors:,} errors; {self.resumed:,} resumed, "
                 f"{self.blank:,} blank lines",
                 f"prompt tokens: {self.computed_prompt_tokens:,} computed, {self.cached_prompt_tokens:,} reused (hit "
                 f"rate {self.hit_rate:.1%}); {self.generated_tokens:,} tokens generated",
                 f"{self.computed:,} requests in {self.run_s:.1f} s ({self.requests_per_s:.2f}/s), model ready after "
                 f"{self.load_s:.1f} s",
                 f"results: {self.output}"]
        if self.saved_cache_pages:
            lines.append(f"prefix cache: {self.saved_cache_pages:,} pages saved for the next run")
        if self.other_model_lines:
            lines.append(f"{self.other_model_lines:,} lines ask for another model; all were answered by {self.model}")
        if self.control_token_lines:
            lines.append(f"{self.control_token_lines:,} lines spell a control token in their text; it was read as text")
        lines += [f"error: {message}" for message in self.first_errors]
        return "\n".join(lines)


def run_batch(input_path: str | os.PathLike[str], output_path: str | os.PathLike[str], open_llm: Callable[[], LLM], *,
              defaults: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None,
              max_inflight: int = DEFAULT_MAX_INFLIGHT, overwrite: bool = False, strict: bool = False,
              report_path: str | os.PathLike[str] | None = None, cache_dir: str | os.PathLike[str] | None = None,
              show_progress: bool = True, answers_to: TextIO | None = None) -> BatchSummary:
    """Answers every line of a request file; called again with the same arguments, resumes.

    Args:
      input_path: request lines; read twice, lazily.
      output_path: result lines. Those already there are kept and not computed again.
      open_llm: makes the LLM, and is called after everything that can be checked without one. The LLM is closed at the
        end; to keep yours, pass `lambda: contextlib.nullcontext(llm)`.
      defaults: sampling parameters for lines that give none.
      settings: what else changes answers (seed, a limit on the length); results made under other settings are refused.
      max_inflight: requests open at a time.
      overwrite: throw away the results that are there.
      strict: refuse the whole job before any compute when one line is malformed.
      report_path: write the summary there as JSON.
      cache_dir: save the prefix cache there at the end (`open_llm` may have loaded it from there).
      show_progress: draw a bar on standard error when that is a terminal.
      answers_to: print each custom_id and its answer there at the end, in the order of the input.

    Raises:
      BatchFileError: the files do not allow the job; results written so far stay.
      SnapshotError: the cache cannot be saved; the results are complete.
      ValueError: a default is no valid sampling parameter, or max_inflight is not positive.
    """
    started = time.perf_counter()
    defaults = dict(defaults or {})
    SamplingParams.from_dict(defaults)
    if max_inflight < 1:
        raise ValueError(f"max_inflight={max_inflight}: expected a positive integer")
    if report_path is not None:
        check_output_path(report_path, "report", input_path, output_path)
    with RequestFile(input_path, defaults) as requests, ResultFile(output_path, input_path) as results:
        requests.scan()
        if strict and requests.num_malformed:
            raise BatchFileError(_refusal(requests))
        if not overwrite:
            results.index(requests)
        with open_llm() as llm:
            identity = LineIdentity(llm.fingerprint, {"defaults": defaults, **(settings or {})})
            results.verify(requests, identity)
            results.begin(requests.num_lines, overwrite=overwrite)
            job = _BatchJob(llm, requests, results, identity)
            job.summary.output = os.fspath(output_path)
            job.summary.load_s = time.perf_counter() - started
            job.run(max_inflight, show_progress)
            results.finish()
            if cache_dir is not None and job.summary.computed:
                job.summary.saved_cache_pages = llm.cache.save(cache_dir)
        summary = job.summary
        if report_path is not None:
            _write_report(report_path, summary)
        if answers_to is not None:
            _print_answers(requests, results, answers_to)
    return summary


def _with_seed(params: SamplingParams, line: int, digest: int) -> SamplingParams:
    """A seed of its own for a line that gives none: a resumed job then draws what an uninterrupted one would."""
    return params if params.seed is not None else dataclasses.replace(params, seed=(digest + line) % 2**63)


def _refusal(requests: RequestFile) -> str:
    listed = "".join(f"\n  line {line}: {reason}" for line, reason in requests.malformed)
    more = requests.num_malformed - len(requests.malformed)
    return (f"input {requests.path}: {requests.num_malformed} of {requests.num_items} lines are malformed and nothing "
            f"was computed. Correct them, or run without --strict to get error records for them:{listed}"
            + (f"\n  ... and {more} more" if more else ""))


@dataclass(frozen=True, slots=True)
class _OpenItem:
    """A request the LLM is working on. The prompt is not kept: the output brings it back."""
    line: int
    digest: int
    custom_id: str
    is_chat: bool
    num_logprobs: int | None
    is_other_model: bool


class _BatchJob:
    """One run over the lines that have no result yet.

    Every line is in exactly one of: not yet read, open (`_open`, by its index in `generate_iter`), written.
    """

    def __init__(self, llm: LLM, requests: RequestFile, results: ResultFile, identity: LineIdentity) -> None:
        self._llm = llm
        self._requests = requests
        self._results = results
        self._identity = identity
        self._open: dict[int, _OpenItem] = {}
        self._has_markers = hasattr(llm, "markers_in")
        self._finish_reasons: collections.Counter[str] = collections.Counter()
        self.summary = BatchSummary(
            input=str(requests.path), model=llm.model_name, fingerprint=llm.fingerprint,
            lines=requests.num_lines, blank=requests.num_blank, items=requests.num_items, resumed=results.num_done,
            control_token_lines=0 if self._has_markers else None)

    def run(self, max_inflight: int, show_progress: bool) -> None:
        """Computes what is missing."""
        started = time.perf_counter()
        before = self._llm.stats()["tokens"]
        if self._results.num_done < self._requests.num_items:
            with _progress_bar(self._requests.num_items, show_progress) as advance:
                answers = self._llm.generate_iter(self._pending(), max_inflight=max_inflight,
                                                  order_window=ORDER_WINDOW)
                with contextlib.closing(answers):
                    for index, output in answers:
                        self._write(self._open.pop(index), output)
                        advance(self._results, self._llm)
            if self._open or self._results.num_done < self._requests.num_items:
                raise EngineError(f"the engine stopped with {self._results.num_done} of {self._requests.num_items} "
                                  "results written; run the same command again to resume")
        self._close_summary(before, self._llm.stats()["tokens"], time.perf_counter() - started)

    def _pending(self) -> Iterator[tuple[str | list[int] | ToolPrompt, SamplingParams]]:
        """Requests for the LLM, made when it asks for them; a line that cannot become one is written at once."""
        index = 0
        for line in self._requests.lines():
            if self._results.has(line):
                continue
            raw = self._requests.read(line)
            digest = self._identity.digest(raw)
            try:
                request = self._requests.request(line, raw)
            except LineError as error:
                self._fail(line, digest, error.custom_id, error.code, str(error))
                continue
            prompt, params = request.prompt, request.params
            if request.messages is not None:
                try:
                    if request.tools is None:
                        prompt = self._llm.render_chat(request.messages, template_kwargs=request.template_kwargs)
                    else:
                        prompt, params = self._llm.chat_request(request.messages, params, tools=request.tools,
                                                                template_kwargs=request.template_kwargs)
                except (RequestError, TokenizerError) as error:
                    self._fail(line, digest, request.custom_id, "invalid_request", str(error))
                    continue
                if self._has_markers and self._llm.markers_in(request.messages):
                    self.summary.control_token_lines += 1
            self._open[index] = _OpenItem(line, digest, request.custom_id, request.messages is not None,
                                          request.params.logprobs, request.model not in (None, self._llm.model_name))
            index += 1
            yield prompt, _with_seed(params, line, digest)

    def _write(self, item: _OpenItem, output: RequestOutput) -> None:
        if output.error is not None:
            self._fail(item.line, item.digest, item.custom_id, "request_failed", output.error)
            return
        response = {"status_code": 200, "request_id": f"req_{item.line}_{item.digest:016x}",
                    "body": answer_body(output, self._llm.model_name, is_chat=item.is_chat,
                                        num_logprobs=item.num_logprobs, name=f"{item.digest:016x}")}
        self._results.append(item.line, item.digest, item.custom_id, response=response)
        self.summary.other_model_lines += item.is_other_model
        self._finish_reasons.update(str(choice.finish_reason) for choice in output.outputs)

    def _fail(self, line: int, digest: int, custom_id: str | None, code: str, message: str) -> None:
        self._results.append(line, digest, custom_id, error={"code": code, "message": message, "line": line})
        if len(self.summary.first_errors) < ERRORS_SHOWN:
            self.summary.first_errors.append(f"line {line}: {message}")

    def _close_summary(self, before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> None:
        summary = self.summary
        summary.errors = self._results.num_failed
        summary.answered = self._results.num_done - summary.errors
        summary.computed = self._results.num_done - summary.resumed
        summary.finish_reasons = dict(self._finish_reasons)
        summary.computed_prompt_tokens = after["computed_prompt"] - before["computed_prompt"]
        summary.cached_prompt_tokens = after["cached_prompt"] - before["cached_prompt"]
        summary.generated_tokens = after["generated"] - before["generated"]
        prompt_tokens = summary.computed_prompt_tokens + summary.cached_prompt_tokens
        summary.hit_rate = summary.cached_prompt_tokens / prompt_tokens if prompt_tokens else 0.0
        summary.run_s = seconds
        summary.requests_per_s = summary.computed / seconds if seconds else 0.0


def answer_body(output: RequestOutput, model: str, *, is_chat: bool, num_logprobs: int | None,
                name: str) -> dict[str, Any]:
    """The `body` of a result: OpenAI's chat.completion or text_completion, with `token_ids` beside each choice's text.

    A choice with a grammar also says what followed it, whether the text is whole, and the `error` where it is not. One
    that calls tools has `message.tool_calls` and no content where it wrote no text.

    Args:
      output: a finished request.
      model: the model that answered.
      is_chat: which of the two shapes.
      num_logprobs: most probable tokens asked for at each position; None: no log-probabilities.
      name: makes the body's id unique in its file.
    """
    choices = []
    for choice in sorted(output.outputs, key=lambda choice: choice.index):
        text = {"message": choice.as_message()} if is_chat else {"text": choice.text}
        logprobs = None
        if num_logprobs is not None and choice.logprobs is not None:
            logprobs = (_chat_logprobs if is_chat else _completion_logprobs)(choice, num_logprobs)
        choices.append({"index": choice.index, **text, "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason, "logprobs": logprobs, "token_ids": list(choice.token_ids)})
        if choice.grammar is not None:
            choices[-1] |= {"grammar": choice.grammar, "num_forced_tokens": choice.num_forced_tokens,
                            "valid": choice.valid, "error": choice.error}
    num_prompt, num_output = len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs)
    body = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion" if is_chat else "text_completion", "created": int(time.time()), "model": model,
            "choices": choices,
            "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output,
                      "total_tokens": num_prompt + num_output,
                      "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens}}}
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [
            None if position is None else
            {str(token): {"logprob": max(logprob.logprob, LOWEST_LOGPROB), "rank": logprob.rank,
                          "decoded_token": logprob.decoded_token} for token, logprob in position.items()}
            for position in output.prompt_logprobs]
    return body


def _chat_logprobs(choice: CompletionOutput, num_top: int) -> dict[str, Any]:
    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token
        # part of a character has no text of its own, so its bytes are not known here
        is_whole = text is not None and "\ufffd" not in text
        return {"token": _token_text(token, logprob), "logprob": max(logprob.logprob, LOWEST_LOGPROB),
                "bytes": list(text.encode("utf-8")) if is_whole else None}

    return {"content": [{**entry(token, position[token]),
                         "top_logprobs": [entry(*item) for item in _most_probable(position, num_top)]}
                        for token, position in zip(choice.token_ids, choice.logprobs)]}


def _completion_logprobs(choice: CompletionOutput, num_top: int) -> dict[str, Any]:
    tokens = [_token_text(token, position[token]) for token, position in zip(choice.token_ids, choice.logprobs)]
    offsets, offset = [], 0
    for token, position in zip(choice.token_ids, choice.logprobs):
        offsets.append(offset)
        offset += len(position[token].decoded_token or "")
    tops = []
    for position in choice.logprobs:
        top: dict[str, float] = {}
        for token, logprob in _most_probable(position, num_top):
            # of two tokens with one text the better one stays
            top.setdefault(_token_text(token, logprob), max(logprob.logprob, LOWEST_LOGPROB))
        tops.append(top)
    return {"tokens": tokens,
            "token_logprobs": [max(position[token].logprob, LOWEST_LOGPROB)
                               for token, position in zip(choice.token_ids, choice.logprobs)],
            "top_logprobs": tops if num_top else None, "text_offset": offsets}


def _most_probable(position: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The first `num_top`; the chosen token is among the entries even when it is not among them."""
    def order(item: tuple[int, Logprob]) -> tuple[float, float]:
        logprob = item[1]
        return -logprob.logprob, float("inf") if logprob.rank is None else logprob.rank

    return sorted(position.items(), key=order)[:num_top]


def _token_text(token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


@contextlib.contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Callable[[ResultFile, LLM], None]]:
    """Yields the function to call after each result."""
    if not wanted or not sys.stderr.isatty():
        yield lambda results, llm: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[errors]} errors, hit rate "
                                                             "{task.fields[hit_rate]:.0%}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, errors=0, hit_rate=0.0)
        looked_at = 0.0

        def advance(results: ResultFile, llm: LLM) -> None:
            nonlocal looked_at
            if time.monotonic() - looked_at >= PROGRESS_S or results.num_done == total:
                looked_at = time.monotonic()
                progress.update(task, completed=results.num_done, errors=results.num_failed,
                                hit_rate=llm.stats()["cache"]["hit_rate"] or 0.0)

        yield advance


def _write_report(path: str | os.PathLike[str], summary: BatchSummary) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(summary), file, indent=2)
            file.write("\n")
    except OSError as error:
        raise BatchFileError(f"report {path}: {error.strerror}; the results are complete, run the same command again "
                             "to get the report") from error


def _print_answers(requests: RequestFile, results: ResultFile, out: TextIO) -> None:
    for line in requests.lines():
        record = json.loads(results.read(line))
        name = record["custom_id"] or f"line {line}"
        if record["error"] is not None:
            print(f"{name}: error: {record['error']['message']}", file=out)
            continue
        choices = record["response"]["body"]["choices"]
        for choice in choices:
            message = choice["message"] if "message" in choice else {"content": choice["text"]}
            calls = [f"{call['function']['name']}({call['function']['arguments']})"
                     for call in message.get("tool_calls", ())]
            text = "\n".join([*filter(None, [message["content"]]), *calls])
            label = name if len(choices) == 1 else f"{name}[{choice['index']}]"
            print(f"{label}: " + text.strip().replace("\n", "\n    "), file=out)
