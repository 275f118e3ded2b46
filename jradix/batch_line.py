"""One request line of a batch file: what is accepted, what is refused and why.

Request lines, one JSON object each, in UTF-8:
  OpenAI's batch form   {"custom_id", "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body": {}}
  the plain form        {"prompt": text or token ids, ...} or {"messages": [...], ...}; custom_id optional (`line-<n>`)
Fields of the body (of the line itself in the plain form):
  model                 any text; the answer names the model that really ran
  as in SamplingParams  max_tokens (or max_completion_tokens) min_tokens temperature top_p top_k min_p n seed stop
                        stop_token_ids presence_penalty frequency_penalty repetition_penalty logit_bias prompt_logprobs
                        ignore_eos skip_special_tokens include_stop_str_in_output cache cache_namespace
                        json_schema regex choices grammar structural_tag grammar_options
  response_format       {"type": "json_schema", "json_schema": {"schema": {...}}}, {"type": "json_object"} or text
  logprobs              chat: true or false, with top_logprobs; completions: how many
  chat_template_kwargs  chat only
  tools, tool_choice, parallel_tool_calls
                        chat only, as in `LLM.chat`
  stream, echo          only false
  user, metadata, store ignored: they do not change the answer
Null counts as not given. Every other field makes the line an error record that names it.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jradix.errors import RequestError
from jradix.sampling_params import SamplingParams, read_response_format
from jradix.tools import ToolSet, read_tools

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"

_SAMPLING_FIELDS = frozenset((
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "prompt_logprobs", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "cache", "cache_namespace",
    "json_schema", "regex", "choices", "grammar", "structural_tag", "grammar_options"))
_IGNORED_FIELDS = frozenset(("user", "metadata", "store"))


class LineError(RequestError):
    """One line cannot become a request. `code` is for programs, `custom_id` is None where the line names none."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What one line asks for.

    Attributes:
      custom_id: the user's name of the line, or `line-<n>`.
      prompt: text or token ids; None for chat.
      messages: the conversation; None for completions.
      template_kwargs: variables for the chat template, the tools among them.
      params: fields the line leaves out are left to the model, as in `LLM.generate`.
      model: the model the line asks for, None where it names none.
      tools: what the model may call; None for none.
    """
    custom_id: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None
    params: SamplingParams
    model: str | None
    tools: ToolSet | None = None


def parse_request_line(raw: bytes, line: int, defaults: Mapping[str, Any] | None = None) -> BatchRequest:
    """The request of one line.

    Args:
      raw: the line without its line ending.
      line: its number, from 1.
      defaults: sampling parameters for lines that give none.

    Raises:
      LineError: the line is malformed or asks for what is not supported.
    """
    entry = _load_object(raw)
    is_openai = any(name in entry for name in ("url", "method", "body"))
    custom_id = entry.get("custom_id")
    if custom_id is None:
        if is_openai:
            raise LineError("missing_custom_id", "custom_id is missing: give each line its own text")
        custom_id = f"line-{line}"
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("invalid_custom_id", f"custom_id={custom_id!r}: expected a non-empty text")
    try:
        if is_openai:
            body, is_chat = _openai_body(entry)
        else:
            body = {name: value for name, value in entry.items() if name != "custom_id" and value is not None}
            is_chat = "messages" in body
            if is_chat == ("prompt" in body):
                raise LineError("invalid_line", "expected `url` and `body`, or one of `prompt` and `messages`")
        return _parse_body(body, is_chat, custom_id, defaults or {})
    except LineError as error:
        error.custom_id = custom_id
        raise


def _load_object(raw: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if re.search(rb"\\u[dD]", raw):
            json.dumps(entry, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise LineError("invalid_json", "the text holds half of a surrogate pair (\\ud800 to \\udfff)") from None
    except UnicodeDecodeError as error:
        raise LineError("invalid_json", f"not UTF-8: byte {error.start + 1} is 0x{raw[error.start]:02x}") from None
    except RecursionError:
        raise LineError("invalid_json", "the JSON is nested too deeply") from None
    except ValueError as error:
        raise LineError("invalid_json", f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise LineError("invalid_line", f"expected a JSON object, got {shown(entry)}")
    return entry


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _openai_body(entry: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    for name, value in entry.items():
        if name not in ("custom_id", "method", "url", "body") and value is not None:
            raise LineError("unsupported_field", f"field {name!r} is not one of custom_id, method, url and body")
    if entry.get("method") != "POST":
        raise LineError("invalid_line", f"method={shown(entry.get('method'))}: expected 'POST'")
    url = entry.get("url")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise LineError("unknown_url", f"url={shown(url)}: expected '{CHAT_URL}' or '{COMPLETION_URL}'")
    body = entry.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_line", f"body={shown(body)}: expected a JSON object")
    return {name: value for name, value in body.items() if value is not None}, url == CHAT_URL


def _parse_body(body: dict[str, Any], is_chat: bool, custom_id: str, defaults: Mapping[str, Any]) -> BatchRequest:
    for name, why in (("stream", "a batch writes whole answers"), ("echo", "ask for prompt_logprobs instead")):
        if body.pop(name, False) is not False:
            raise LineError("unsupported_field", f"{name} is not supported: {why}; leave it out or set it to false")
    model = body.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise _bad_value("model", model, "a text")
    content = body.pop("messages" if is_chat else "prompt", None)
    if is_chat:
        if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
            raise _bad_value("messages", content, "a non-empty list of objects")
    elif not isinstance(content, str) and not _is_token_list(content):
        raise _bad_value("prompt", content, "one text or one list of token ids (one prompt per line)")
    template_kwargs = body.pop("chat_template_kwargs", None) if is_chat else None
    if template_kwargs is not None and not isinstance(template_kwargs, dict):
        raise _bad_value("chat_template_kwargs", template_kwargs, "an object")
    tools = _read_tools(body) if is_chat else None
    if tools is not None:
        if "tools" in (template_kwargs or {}):
            raise LineError("invalid_request", "chat_template_kwargs holds 'tools' beside `tools`: leave them out "
                                               "there")
        template_kwargs = {**(template_kwargs or {}), "tools": tools.definitions}

    given = dict(defaults)
    if (limit := body.pop("max_completion_tokens", None)) is not None:
        if body.setdefault("max_tokens", limit) != limit:
            raise LineError("invalid_request", f"max_tokens={shown(body['max_tokens'])} and max_completion_tokens="
                                               f"{shown(limit)} differ: give one of them")
    if (form := body.pop("response_format", None)) is not None:
        try:
            given.update(read_response_format(form))
        except ValueError as error:
            raise LineError("invalid_request", str(error)) from None
    logprobs, top_logprobs = body.pop("logprobs", None), body.pop("top_logprobs", None) if is_chat else None
    if logprobs is not None or top_logprobs is not None:
        given["logprobs"] = _num_logprobs(logprobs, top_logprobs) if is_chat else logprobs
    for name, value in body.items():
        if name in _SAMPLING_FIELDS:
            given[name] = value
        elif name not in _IGNORED_FIELDS:
            raise LineError("unsupported_field", f"field {name!r} is not supported in a "
                                                 f"{'chat' if is_chat else 'completion'} line: remove it")
    if not isinstance(given.get("stop", ""), (str, list)):
        raise _bad_value("stop", given["stop"], "a text or a list of texts")
    if not isinstance(given.get("stop_token_ids", []), list):
        raise _bad_value("stop_token_ids", given["stop_token_ids"], "a list of token ids")
    try:
        params = SamplingParams(**given)
    except OverflowError:
        raise LineError("invalid_request", "a sampling parameter is too large for a floating-point number") from None
    except ValueError as error:
        raise LineError("invalid_request", str(error)) from None
    if is_chat:
        return BatchRequest(custom_id, None, content, template_kwargs, params, model, tools)
    return BatchRequest(custom_id, content, None, None, params, model)


def _read_tools(body: dict[str, Any]) -> ToolSet | None:
    try:
        return read_tools(*(body.pop(name, None) for name in ("tools", "tool_choice", "parallel_tool_calls")))
    except RequestError as error:
        raise LineError("invalid_request", str(error)) from None


def _num_logprobs(logprobs: object, top_logprobs: object) -> Any:
    if logprobs is not None and not isinstance(logprobs, bool):
        raise _bad_value("logprobs", logprobs, "true or false in a chat line, with top_logprobs saying how many")
    if top_logprobs is not None and not logprobs:
        raise LineError("invalid_request", f"top_logprobs={shown(top_logprobs)} needs logprobs=true")
    return (0 if top_logprobs is None else top_logprobs) if logprobs else None


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _bad_value(name: str, value: object, expected: str) -> LineError:
    return LineError("invalid_request", f"{name}={shown(value)}: expected {expected}")


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
