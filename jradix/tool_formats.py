"""How families of models write tool calls: found from the chat template, as a grammar to write in, and read again.

  hermes         <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, each on lines of its own: Hermes 2 and
                 3, Qwen2.5, Qwen3
  llama          {"name": "f", "parameters": {...}} as the whole turn, one call: Llama 3.1 to 3.3
  mistral        [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]: Mistral 7B v0.3, Mixtral 8x22B
  mistral-nemo   the same without the space before the list: Mistral Nemo, Ministral
  json           {"name": "f", "arguments": {...}}, one per line, as the whole turn: templates that show tools and state
                 none of the forms above

In all of them calls end the turn; hermes and mistral may write text before them. JSON is written with the blanks of the
templates' `tojson` (`json.dumps`), so that a turn rendered again is the text that was generated.
Sources: the chat templates published with these models, and transformers' page "Tool use".
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jradix.errors import GrammarError, RequestError
from jradix.grammar.json_schema import JsonOptions
from jradix.grammar.matcher_schema import json_matcher, json_rule
from jradix.grammar.rust_regex import rust_text
from jradix.tools import Tool, ToolSet

HEAD = '{"name"'                    # where no mark opens a call, a turn that begins so is one
PYTHON_TAG = "<|python_tag|>"       # that Llama may write before a call
JSON_OPTIONS = JsonOptions(whitespace=(", ", ": "), strict=True)
OPEN_OBJECTS = ("additionalProperties", "patternProperties", "unevaluatedProperties")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: mark, before, call, between, call, ..., after.

    Attributes:
      name: a key of `FORMATS`.
      mark: what opens the calls; "" where the JSON itself does, at the beginning of the turn.
      before, between, after: text before the first call, between two, after the last; `between` is None where a turn
        holds one call.
      arguments: key of the arguments.
    """
    name: str
    mark: str
    before: str
    between: str | None
    after: str
    arguments: str = "arguments"


FORMATS: Mapping[str, ToolFormat] = {row.name: row for row in (
    ToolFormat("hermes", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ToolFormat("llama", "", "", None, "", "parameters"),
    ToolFormat("mistral", "[TOOL_CALLS]", " [", ", ", "]"),
    ToolFormat("mistral-nemo", "[TOOL_CALLS]", "[", ", ", "]"),
    ToolFormat("json", "", "", "\n", ""),
)}
# What stands in a chat template of each; the first that is found decides.
TEMPLATE_SIGNS = (("[TOOL_CALLS] [", "mistral"), ("[TOOL_CALLS]", "mistral-nemo"), ("<tool_call>", "hermes"),
                  ("dictionary of argument name", "llama"))
UNREAD_SIGNS = ("[ARGS]", "<function=", "<arg_key>", "<\uff5ctool", "<|tool_call|>", "<|channel|>")


def find_format(template: str) -> ToolFormat:
    """The format that a chat template asks its model for.

    Raises:
      RequestError: the template is of a form that is not written here; the sign of it is named.
    """
    unread = next((sign for sign in UNREAD_SIGNS if sign in template), None)
    if unread is not None:
        raise RequestError(f"the chat template writes tool calls with {unread!r}, which is not supported; expected one "
                           f"of the formats {', '.join(FORMATS)}: pass a chat_template that uses one of them")
    return FORMATS[next((name for sign, name in TEMPLATE_SIGNS if sign in template), "json")]


def without_special_tokens(form: ToolFormat, special_tokens: Collection[str]) -> ToolFormat:
    """The format as far as text goes: special tokens are no text, so what they begin behind the mark is left out.

    Where they stand between two calls, a turn holds one.
    """
    after = min((form.after.find(token) for token in special_tokens if token in form.after), default=len(form.after))
    is_apart = form.between is not None and any(token in form.between for token in special_tokens)
    return dataclasses.replace(form, after=form.after[:after], between=None if is_apart else form.between)


def calls_grammar(form: ToolFormat, tools: ToolSet, *, is_opened: bool, is_required: bool) -> str:
    """A Lark grammar of the turns that a model may write.

    Args:
      form: of the calls.
      tools: those in `callable` may be called.
      is_opened: the mark has been written already.
      is_required: calls and nothing else; else any text, which becomes calls once it opens them.

    Raises:
      RequestError: arguments that cannot be enforced; the tool and the keyword are named.
    """
    calls = [f"call_{i}: /{rust_text(_call_head(form, tool))}/ %json {_arguments_rule(tool)} /{rust_text('}')}/"
             for i, tool in enumerate(tools.callable)]
    more = f"(/{rust_text(form.between)}/ call)*" if form.between is not None and tools.is_parallel else ""
    turn = " ".join(part for part in (_literal(form.before), "call", more, _literal(form.after)) if part)
    lines = [f"turn: {turn}", f"call: {' | '.join(f'call_{i}' for i in range(len(calls)))}", *calls]
    if is_opened or (is_required and not form.mark):
        return "\n".join(["start: turn", *lines])
    if is_required:
        return "\n".join([f"start: /{rust_text(form.mark)}/ turn", *lines])
    if form.mark:
        return "\n".join(["start: opening turn | TEXT", "TEXT: /(?s:.)*/",
                          f"opening[lazy]: /(?s:.)*{rust_text(form.mark)}/", *lines])
    return "\n".join(["start: turn | TEXT", f"TEXT: /{_not_beginning_with(HEAD)}/", *lines])


def opens_call(form: ToolFormat, text: str) -> bool:
    """True where `text`, perhaps cut off, has begun a call."""
    return form.mark in text if form.mark else text.removeprefix(PYTHON_TAG).startswith(HEAD)


def read_calls(form: ToolFormat, text: str, names: Collection[str], *, is_opened: bool = False
               ) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """What a model has written, as text and calls.

    Args:
      form: of the calls.
      text: of the whole turn, special tokens at its end left out.
      names: functions that may be called.
      is_opened: `text` begins behind the mark.

    Returns:
      (text before the calls, without blanks at its end where calls follow; name and arguments of each call).

    Raises:
      ValueError: calls were opened and are malformed, incomplete or of an unknown function.
    """
    content, body = "", text
    if not is_opened:
        if not opens_call(form, text):
            return text, []
        if form.mark:
            content, _, body = text.partition(form.mark)
        else:
            body = text.removeprefix(PYTHON_TAG)
    calls: list[tuple[str, dict[str, Any]]] = []
    place = _behind(form.before, body, 0)
    while place is not None:
        call, place = _read_call(form, body, place, names)
        calls.append(call)
        end = _behind(form.after, body, place)
        if end is not None and not body[end:].strip():
            return content.rstrip(), calls
        place = None if form.between is None else _behind(form.between, body, place)
    raise ValueError(f"tool call number {len(calls) + 1} is malformed: {body[-60:]!r}")


def _read_call(form: ToolFormat, body: str, place: int, names: Collection[str]
               ) -> tuple[tuple[str, dict[str, Any]], int]:
    """(name, arguments) of the call at `place`, and where it ends."""
    start = place + len(body[place:]) - len(body[place:].lstrip())
    try:
        found, end = _DECODER.raw_decode(body, start)
    except RecursionError:
        raise ValueError("the arguments of a tool call are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"tool call is no JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get(form.arguments), dict) \
            or set(found) != {"name", form.arguments}:
        raise ValueError(f"tool call {str(found)[:80]}: expected an object of \"name\" and \"{form.arguments}\"")
    if not isinstance(found["name"], str) or found["name"] not in names:
        raise ValueError(f"tool call of {str(found['name'])[:80]!r}, which is none of the tools: {', '.join(names)}")
    return (found["name"], found[form.arguments]), end


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _behind(words: str, body: str, place: int) -> int | None:
    """Where `body` goes on behind these words, whatever blanks are around them; None where it has others."""
    for word in words.split():
        while body[place:place + 1].isspace():
            place += 1
        if not body.startswith(word, place):
            return None
        place += len(word)
    return place


def _call_head(form: ToolFormat, tool: Tool) -> str:
    return f'{{"name": "{tool.name}", "{form.arguments}": '


def _literal(value: str) -> str:
    return f"/{rust_text(value)}/" if value else ""


def _not_beginning_with(head: str) -> str:
    """An expression for every text but those that begin with `head`."""
    inner = ""
    for char in reversed(head):
        other = rf"[^\x{{{ord(char):X}}}](?s:.)*"
        inner = f"(?:{other}|{rust_text(char)}{inner})?" if inner else f"(?:{other})?"
    return inner


def _arguments_rule(tool: Tool) -> str:
    """The schema of a tool's arguments as it stands behind `%json`. Objects hold declared keys only."""
    try:
        text = json.dumps(_closed(tool.parameters), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"tool {tool.name!r}: parameters are not JSON ({error}); expected JSON values only"
                           ) from None
    try:
        return _json_rule(text)
    except GrammarError as error:
        raise RequestError(f"tool {tool.name!r}: parameters cannot be enforced: {error}") from None


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function that declares an empty list of parameters takes none."""
    if parameters.get("properties") == {} and not any(key in parameters for key in OPEN_OBJECTS):
        return {**parameters, "additionalProperties": False}
    return dict(parameters)


@lru_cache(maxsize=512)
def _json_rule(schema: str) -> str:
    parsed = json.loads(schema)
    json_matcher(parsed, JSON_OPTIONS)
    return json_rule(parsed, JSON_OPTIONS)
