"""An answer under tools: what asks for it, the grammar that holds it, and the calls read from it.

Where the calls are opened by ordinary text, one grammar holds the whole answer. Where a special token opens them
(Mistral's [TOOL_CALLS]), which is no text: if calls are required, it stands at the end of the prompt; if they are not,
it ends the first part of the answer, and a second request goes on behind it under the grammar of the calls. That
request finds the first one's KV in the cache.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jradix.errors import GrammarError, RequestError
from jradix.grammar.python_types import json_schema
from jradix.outputs import CompletionOutput, RequestOutput, ToolCall
from jradix.sampling_params import GRAMMAR_FIELDS, SamplingParams
from jradix.tokenizer import Tokenizer
from jradix.tool_formats import (FORMATS, ToolFormat, calls_grammar, find_format, opens_call, read_calls,
                                 without_special_tokens)
from jradix.tools import ToolSet

PROBE = [{"role": "user", "content": "x"}]      # shown with and without tools, to see whether a template shows them
ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 9
NOT_TAKEN = "no tool call was taken"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How conversations with one set of tools are asked and read. Made by `plan_tools`.

    Attributes:
      tools: what may be called.
      form: how calls are written.
      opener_id: the special token that opens them; None where text does.
      grammar: Lark text of the answer; with `opener_id` of what follows that token.
    """
    tools: ToolSet
    form: ToolFormat
    opener_id: int | None
    grammar: str

    @property
    def is_opened(self) -> bool:
        """The prompt ends with the token that opens the calls."""
        return self.opener_id is not None and self.tools.mode == "required"

    def ask(self, token_ids: Sequence[int], params: SamplingParams | None) -> tuple[ToolPrompt, SamplingParams]:
        """The request of a conversation.

        Args:
          token_ids: the conversation as the template renders it.
          params: of the request.

        Raises:
          RequestError: the parameters ask for a grammar of their own, or cannot have one.
        """
        params = params or SamplingParams()
        given = [name for name in GRAMMAR_FIELDS if getattr(params, name) is not None]
        if given:
            raise RequestError(f"tools with {given[0]}: an answer is held to one grammar; leave one of them out, or "
                               'set tool_choice="none"')
        try:
            held = dataclasses.replace(params, grammar=self.grammar)
        except ValueError as error:
            raise RequestError(f"tools: {error}") from None
        if self.is_opened:
            token_ids = [*token_ids, self.opener_id]
        elif self.opener_id is not None:
            held = dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, self.opener_id))
        return ToolPrompt(list(token_ids), self), held


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """A rendered conversation with tools. `LLM.generate_iter` takes it for a prompt and reads the calls of its answer.

    Attributes:
      token_ids: of the prompt.
      plan: how its answer is read.
    """
    token_ids: list[int]
    plan: ToolPlan

    def rest_of(self, output: RequestOutput) -> dict[int, tuple[list[int], SamplingParams]]:
        """By sample, the request for the calls that it opened with a special token and has yet to write."""
        plan, params = self.plan, output.sampling_params
        found = {}
        for completion in output.outputs:
            if plan.opener_id is None or plan.is_opened or completion.stop_reason != plan.opener_id:
                continue
            num_left = None if params.token_limit is None else params.token_limit - len(completion.token_ids)
            if num_left == 0:
                continue
            seed = None if params.seed is None else _rest_seed(params.seed, completion.index)
            found[completion.index] = [*output.prompt_token_ids, *completion.token_ids], dataclasses.replace(
                params, n=1, max_tokens=num_left, min_tokens=0, seed=seed, prompt_logprobs=None, grammar=plan.grammar,
                stop_token_ids=tuple(token for token in params.stop_token_ids if token != plan.opener_id))
        return found

    def join(self, output: RequestOutput, sample: int, rest: RequestOutput) -> None:
        """Adds the answer to a request of `rest_of` to the sample it belongs to."""
        completion = output.outputs[sample]
        if not rest.outputs:
            completion.error = f"{NOT_TAKEN}: {rest.error}"
            return
        found = rest.outputs[0]
        completion.token_ids += found.token_ids
        completion.finish_reason, completion.stop_reason = found.finish_reason, found.stop_reason
        completion.grammar, completion.num_forced_tokens = found.grammar, found.num_forced_tokens
        completion.valid, completion.error = found.valid, rest.error or found.error
        if completion.logprobs is not None:
            completion.logprobs += found.logprobs
            completion.cumulative_logprob += found.cumulative_logprob
        output.metrics.latency_s += rest.metrics.latency_s or 0.0
        output.metrics.num_computed_tokens += rest.metrics.num_computed_tokens
        output.metrics.num_preemptions += rest.metrics.num_preemptions

    def abort(self, output: RequestOutput, samples: Iterable[int]) -> None:
        """Ends samples whose calls will not be written any more."""
        for sample in samples:
            completion = output.outputs[sample]
            completion.finish_reason, completion.stop_reason = "abort", None
            completion.error = f"{NOT_TAKEN}: aborted before it was written"

    def read(self, output: RequestOutput, tokenizer: Tokenizer) -> None:
        """Turns what the samples wrote into text and calls; an output with an error is left as it is."""
        for completion in output.outputs if output.error is None else ():
            self._read(completion, output, tokenizer)

    def _read(self, completion: CompletionOutput, output: RequestOutput, tokenizer: Tokenizer) -> None:
        plan, ids = self.plan, completion.token_ids
        if ids and ids[-1] in {*tokenizer.eos_token_ids, *output.sampling_params.stop_token_ids} - {plan.opener_id}:
            ids = ids[:-1]
        content, is_opened = "", plan.is_opened
        if plan.opener_id in ids:
            place = ids.index(plan.opener_id)
            content, ids, is_opened = tokenizer.decode(ids[:place]), ids[place + 1:], True
        written = tokenizer.decode(ids)
        if not is_opened and plan.tools.mode == "auto" and (plan.opener_id is not None
                                                            or not opens_call(plan.form, written)):
            if not completion.valid:        # text may end anywhere
                completion.valid = completion.error = None
            return
        if not completion.valid:
            reason = completion.error or f"cut off after {len(completion.token_ids)} tokens; give it more tokens"
            completion.error = reason if reason.startswith(NOT_TAKEN) else f"{NOT_TAKEN}: {reason}"
            if plan.opener_id in completion.token_ids:
                completion.text = content + plan.form.mark + written
            if plan.opener_id is not None and completion.stop_reason == plan.opener_id:
                completion.finish_reason, completion.stop_reason = "length", None
            return
        names = [tool.name for tool in plan.tools.callable]
        try:
            before, calls = read_calls(plan.form, written, names, is_opened=is_opened)
        except ValueError as error:
            completion.valid, completion.error = False, f"{NOT_TAKEN}: {error}"
            return
        completion.text = content.rstrip() if is_opened else before
        completion.tool_calls = [ToolCall(_call_id(output, completion, number), name, arguments)
                                 for number, (name, arguments) in enumerate(calls)]
        completion.finish_reason = "tool_calls"


Requests = Iterator[tuple[Any, SamplingParams | None]]      # prompt, parameters
Answers = Iterator[tuple[int, RequestOutput] | None]        # index and answer; None where an engine step is awaited


def answers_with_calls(complete: Callable[..., Answers], requests: Requests, tokenizer: Tokenizer,
                       cut_off: dict[int, RequestOutput] | None = None) -> Answers:
    """Completes requests and reads the calls in the answers to each `ToolPrompt` among them.

    Answers whose calls need a request of their own are finished after all others.

    Args:
      complete: `complete(requests, cut_off=None)` and `complete(requests, on_error="record")` answer requests.
      requests: read lazily.
      tokenizer: of the model.
      cut_off: by index, where answers are left that were begun and cannot be yielded any more.
    """
    asked: dict[int, ToolPrompt] = {}
    opened: dict[int, tuple[ToolPrompt, RequestOutput, dict[int, tuple[list[int], SamplingParams]]]] = {}

    def noting_tools() -> Requests:
        for place, (prompt, params) in enumerate(requests):
            if isinstance(prompt, ToolPrompt):
                asked[place] = prompt
            yield prompt, params

    try:
        with contextlib.closing(complete(noting_tools(), cut_off=cut_off)) as answers:
            for answer in answers:
                prompt = None if answer is None else asked.pop(answer[0], None)
                if prompt is not None:
                    place, output = answer
                    if rest := prompt.rest_of(output):
                        opened[place] = prompt, output, rest
                        continue
                    prompt.read(output, tokenizer)
                yield answer
        if not opened:
            return
        parts = [(place, sample) for place, (_, _, rest) in opened.items() for sample in rest]
        calls = (opened[place][2][sample] for place, sample in parts)
        with contextlib.closing(complete(calls, on_error="record")) as answers:
            for answer in answers:
                if answer is None:
                    yield None
                    continue
                place, sample = parts[answer[0]]
                prompt, output, rest = opened[place]
                prompt.join(output, sample, answer[1])
                del rest[sample]
                if not rest:
                    del opened[place]
                    prompt.read(output, tokenizer)
                    yield place, output
    finally:
        for place, (prompt, output, rest) in opened.items():
            prompt.abort(output, rest)
            if cut_off is not None:
                cut_off[place] = output


def plan_tools(tokenizer: Tokenizer, tools: ToolSet, tool_format: str | None = None) -> ToolPlan:
    """How conversations with these tools are asked and read.

    Args:
      tokenizer: with the chat template.
      tools: of mode "auto" or "required".
      tool_format: a key of `FORMATS`, where the messages themselves say what tools there are and how to call them;
        None: what the template asks for, which must show the tools.

    Raises:
      RequestError: the template shows no tools or writes calls in a form that is not supported, arguments that cannot
        be enforced, or an unknown format.
    """
    if tool_format is None:
        check_shows_tools(tokenizer, tools)
        form = find_format(tokenizer.fast.get_chat_template(tools=tools.definitions))
    elif tool_format in FORMATS:
        form = FORMATS[tool_format]
    else:
        raise RequestError(f"tool_format={tool_format!r}: expected one of {', '.join(FORMATS)}")
    special = tokenizer.special_tokens
    opener_id = special.get(form.mark)
    form = without_special_tokens(form, special)
    grammar = calls_grammar(form, tools, is_opened=opener_id is not None, is_required=tools.mode == "required")
    return ToolPlan(tools, form, opener_id, grammar)


def check_shows_tools(tokenizer: Tokenizer, tools: ToolSet) -> None:
    """Raises RequestError where the chat template renders the same with tools and without."""
    if tokenizer.render_chat(PROBE, template_kwargs={"tools": tools.definitions}) == tokenizer.render_chat(PROBE):
        raise RequestError(f"{tokenizer.name}: its chat template does not show tools to the model; pass one that does "
                           "(LLM(chat_template=...)), or describe the tools in your messages and say with tool_format= "
                           f"how calls are to be written ({', '.join(FORMATS)})")


def tool_definitions(tools: Any) -> Any:
    """Tools with each Python function among them in OpenAI's form; anything else is left as it is.

    Raises:
      RequestError: a function whose parameters have no JSON schema.
    """
    if not isinstance(tools, (list, tuple)):
        return tools
    try:
        return [function_tool(tool) if callable(tool) else tool for tool in tools]
    except GrammarError as error:
        raise RequestError(f"tools: {error}") from None


def function_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """A Python function as a tool in OpenAI's form.

    Args:
      function: its signature gives the parameters; its docstring, in Google's style, what it and they are for. An
        `Annotated[..., "text"]` describes a parameter as well.

    Raises:
      GrammarError: a parameter without annotation, or of a type that has no JSON schema.
    """
    from transformers.utils.chat_template_utils import parse_google_format_docstring
    schema = {key: value for key, value in json_schema(function).items() if key != "$schema"}
    description, parameters, _ = parse_google_format_docstring(inspect.getdoc(function) or "")
    properties = {name: {"description": parameters[name], **one} if name in parameters else one
                  for name, one in schema["properties"].items()}
    entry: Mapping[str, Any] = {"description": description} if description else {}
    return {"type": "function", "function": {"name": function.__name__, **entry,
                                             "parameters": {**schema, "properties": properties}}}


def _call_id(output: RequestOutput, completion: CompletionOutput, number: int) -> str:
    digest = hashlib.blake2b(f"{completion.index} {number}".encode(), digest_size=8)
    for ids in (output.prompt_token_ids, completion.token_ids):
        digest.update(np.array([len(ids), *ids], "<i4").tobytes())
    value, letters = int.from_bytes(digest.digest(), "little"), []
    for _ in range(ID_LENGTH):
        value, letter = divmod(value, len(ID_LETTERS))
        letters.append(ID_LETTERS[letter])
    return "".join(letters)


def _rest_seed(seed: int, sample: int) -> int:
    """Of the request that goes on with a sample, so that it draws neither the sample's numbers again nor another's."""
    return int.from_bytes(hashlib.blake2b(f"calls {seed} {sample}".encode(), digest_size=8).digest(), "little") % 2**63
