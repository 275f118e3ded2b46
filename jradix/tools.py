"""Tools that a model may call: what the user gives, read and checked, in OpenAI's form.

Nothing is rendered or run here. How each family of models writes a call is in `tool_formats.py`.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jradix.errors import RequestError

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
FORM = ('expected {"type": "function", "function": {"name": "...", "description": "...", "parameters": {"type": '
        '"object", ...}}}')
CHOICES = 'expected "auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'


@dataclass(frozen=True, slots=True)
class Tool:
    """One function the model may call.

    Attributes:
      name: letters, digits, `_` and `-`, at most 64.
      parameters: JSON schema of its arguments, of type object.
      definition: all that was given, as the chat template shows it.
    """
    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a conversation, and what the model is to do with them.

    Attributes:
      tools: all of them; the template shows them whatever the mode is, so that prompts go on sharing their beginning.
      mode: "auto": text, or calls; "none": text; "required": at least one call.
      callable: those that may be called, all or the one that was named.
      is_parallel: several calls may be made at once.
    """
    tools: tuple[Tool, ...]
    mode: Literal["auto", "none", "required"]
    callable: tuple[Tool, ...]
    is_parallel: bool

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """For the chat template, as the variable `tools`."""
        return [dict(tool.definition) for tool in self.tools]


def read_tools(tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None = None,
               parallel_tool_calls: bool | None = None) -> ToolSet | None:
    """The tools of a request in the form of OpenAI's chat completions.

    Args:
      tools: list of {"type": "function", "function": {"name", "description", "parameters"}}; without `parameters` the
        function takes none. None: no tools.
      tool_choice: "auto" (also None), "none", "required", or {"type": "function", "function": {"name": ...}} for one
        call of that function.
      parallel_tool_calls: several calls may be made at once; None: True.

    Returns:
      None without tools.

    Raises:
      RequestError: a malformed tool, a name used twice, a choice that names no tool, or a choice without tools.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        raise RequestError(f"parallel_tool_calls={parallel_tool_calls!r}: expected True or False")
    if tools is None:
        if tool_choice not in (None, "none") or parallel_tool_calls is not None:
            given = "parallel_tool_calls" if tool_choice in (None, "none") else f"tool_choice={str(tool_choice)[:80]}"
            raise RequestError(f"{given} without tools: give `tools` as well, or leave it out")
        return None
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence) or not tools:
        raise RequestError(f"tools={str(tools)[:80]}: expected a list of at least one tool; leave it out for none")
    read = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in read]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"tools[{i}]: the name {name!r} is also that of tools[{names.index(name)}]; give each "
                               "function its own")
    is_parallel = parallel_tool_calls is not False
    if tool_choice is None or isinstance(tool_choice, str):
        mode = "auto" if tool_choice is None else tool_choice
        if mode not in ("auto", "none", "required"):
            hint = f'; to name a function, give {{"type": "function", "function": {{"name": {mode!r}}}}}'
            raise RequestError(f"tool_choice={mode!r}: {CHOICES}{hint if mode in names else ''}")
        return ToolSet(read, mode, read, is_parallel)
    return ToolSet(read, "required", (read[_chosen(tool_choice, names)],), False)


def arguments_from_json(text: str, place: str) -> dict[str, Any]:
    """The arguments of a call that a message gives as JSON text, as OpenAI's messages do.

    Args:
      text: JSON of an object; empty for no arguments.
      place: of the call, for messages.

    Raises:
      RequestError: it is none.
    """
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place}: arguments={text[:60]!r} is no JSON ({error}); expected the text of an object"
                           ) from None
    if not isinstance(found, dict):
        raise RequestError(f"{place}: arguments={text[:60]!r}: expected the JSON text of an object")
    return found


def with_argument_objects(messages: Any) -> Any:
    """Messages with the arguments of their tool calls as objects, which chat templates expect, instead of JSON text.

    What is no list of messages, or no tool call of the known form, is left for the template to judge.

    Raises:
      RequestError: arguments that are no JSON object; the message is named.
    """
    if not isinstance(messages, (list, tuple)):
        return messages
    return [{**message, "tool_calls": [_with_object(call, f"messages[{i}].tool_calls[{k}]")
                                       for k, call in enumerate(message["tool_calls"])]}
            if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), (list, tuple)) else message
            for i, message in enumerate(messages)]


def _with_object(call: Any, place: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": arguments_from_json(function["arguments"], place)}}


def _read_tool(given: Any, place: str) -> Tool:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or given.get("type") != "function":
        raise RequestError(f"{place}={str(given)[:80]}: {FORM}")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{place}: name={str(name)[:80]!r}: expected letters, digits, `_` and `-`, at most 64")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{place} ({name}): description={str(description)[:60]}: expected a text")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = dict(NO_ARGUMENTS)
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise RequestError(f"{place} ({name}): parameters={str(parameters)[:80]}: expected a JSON schema of "
                           '"type": "object", whose properties are the arguments')
    return Tool(name, parameters, {**given, "function": {**function, "parameters": parameters}})


def _chosen(choice: Any, names: Sequence[str]) -> int:
    """Which tool a choice names."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"tool_choice={str(choice)[:80]}: {CHOICES}")
    if name not in names:
        raise RequestError(f"tool_choice names {name!r}, which is none of the tools: {', '.join(names)}")
    return names.index(name)
