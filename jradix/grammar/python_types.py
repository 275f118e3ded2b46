"""JSON schemas of Python types: Pydantic models, dataclasses, TypedDicts, function signatures and annotations.

Pydantic describes its own models; it is not needed for the others and never imported here before a model is seen.
"""
from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import inspect
import types
import typing
import uuid
from typing import Any, get_args, get_origin, get_type_hints

from jradix.errors import GrammarError

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"},
    type(None): {"type": "null"}, None: {"type": "null"}, Any: {}, object: {}, list: {"type": "array"},
    tuple: {"type": "array"}, dict: {"type": "object"}, datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.date: {"type": "string", "format": "date"}, datetime.time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"}}
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.MutableSequence)
_SETS = (set, frozenset, collections.abc.Set)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(source: Any) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a Python type; objects of declared fields allow no others.

    Args:
      source: a Pydantic model or type adapter, a dataclass, a TypedDict, an Enum, a function (its parameters become the
        properties of one object), or an annotation such as `list[int] | None`. A dict is taken for a schema as it is.

    Raises:
      GrammarError: a type that has no JSON schema; the message names it and where it stands.
    """
    if isinstance(source, dict):
        return source
    own = _pydantic_schema(source)
    if own is not None:
        return own
    definitions: dict[str, Any] = {}
    schema = _Types(definitions).schema(source, _name(source))
    if definitions:
        schema = {**schema, "$defs": definitions}
    return {"$schema": DRAFT, **schema}


def _pydantic_schema(source: Any) -> dict[str, Any] | None:
    """What Pydantic says of its own classes and adapters; None for anything else."""
    if isinstance(source, type) and any(base.__module__.partition(".")[0] == "pydantic" for base in source.__mro__):
        return source.model_json_schema() if hasattr(source, "model_json_schema") else None
    if type(source).__module__.partition(".")[0] == "pydantic" and type(source).__name__ == "TypeAdapter":
        return source.json_schema()
    return None


class _Types:
    """Writes types as schemas; classes with fields become definitions, so that they may refer to themselves."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._names: dict[Any, str] = {}

    def schema(self, kind: Any, place: str) -> dict[str, Any]:
        for plain, schema in _PLAIN.items():      # by identity: some annotations, as Literal of a list, have no hash
            if kind is plain:
                return dict(schema)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is typing.Annotated:
            return self._annotated(arguments, place)
        if origin in (typing.Required, typing.NotRequired, typing.Final):
            return self.schema(arguments[0], place)
        if origin is typing.Literal:
            return self._values(arguments, place)
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.schema(argument, place) for argument in arguments]}
        if origin is not None:
            return self._container(origin, arguments, place)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return self._values(tuple(member.value for member in kind), place)
        nested = _pydantic_schema(kind)
        if nested is not None:
            return self._own(kind, nested)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self._fields(kind, self._dataclass_fields(kind), place)
        if typing.is_typeddict(kind):
            hints = get_type_hints(kind, include_extras=True)
            required = kind.__required_keys__
            return self._fields(kind, {name: (hint, name in required) for name, hint in hints.items()}, place)
        if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
            raise GrammarError(f"{place}: a named tuple has no one JSON form; use a dataclass")
        if inspect.isfunction(kind) or inspect.ismethod(kind) or isinstance(kind, types.BuiltinFunctionType):
            return self._object(self._parameters(kind, place), place)
        raise GrammarError(f"{place}: {kind!r} has no JSON schema; use a dataclass, a TypedDict, a Pydantic model, an "
                           "Enum, a Literal or a plain type")

    def _container(self, origin: Any, arguments: tuple[Any, ...], place: str) -> dict[str, Any]:
        if origin in _LISTS:
            return {"type": "array", "items": self.schema(arguments[0], f"{place}[]")}
        if origin in _SETS:
            return {"type": "array", "items": self.schema(arguments[0], f"{place}[]"), "uniqueItems": True}
        if origin is tuple:
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return {"type": "array", "items": self.schema(arguments[0], f"{place}[]")}
            items = [self.schema(argument, f"{place}[{i}]") for i, argument in enumerate(arguments) if argument != ()]
            return {"type": "array", **({"prefixItems": items} if items else {}), "minItems": len(items),
                    "maxItems": len(items)}
        if origin in _MAPPINGS:
            if arguments[0] is not str:
                raise GrammarError(f"{place}: keys of type {arguments[0]!r}, but JSON keys are texts; use str")
            return {"type": "object", "additionalProperties": self.schema(arguments[1], f"{place}[]")}
        raise GrammarError(f"{place}: {origin!r} has no JSON schema; use list, tuple, set or dict")

    def _annotated(self, arguments: tuple[Any, ...], place: str) -> dict[str, Any]:
        """A text is the description, a dict more keywords; other metadata speaks to other libraries."""
        schema = self.schema(arguments[0], place)
        for extra in arguments[1:]:
            if isinstance(extra, str):
                schema["description"] = extra
            elif isinstance(extra, dict):
                schema.update(extra)
            else:
                raise GrammarError(f"{place}: {extra!r} in Annotated, expected a description (str) or keywords (dict)")
        return schema

    def _values(self, values: tuple[Any, ...], place: str) -> dict[str, Any]:
        plain = [value.value if isinstance(value, enum.Enum) else value for value in values]
        wrong = [value for value in plain if not isinstance(value, (str, int, float, bool, type(None)))]
        if wrong:
            raise GrammarError(f"{place}: value {wrong[0]!r} is not JSON; use texts, numbers, booleans or None")
        return {"enum": plain}

    def _own(self, kind: Any, nested: dict[str, Any]) -> dict[str, Any]:
        """A Pydantic model inside another type: its definitions move up beside ours."""
        nested = dict(nested)
        for name, definition in nested.pop("$defs", {}).items():
            self._definitions[name] = definition
        if "$ref" in nested:
            return nested
        self._definitions[kind.__name__] = nested
        return {"$ref": f"#/$defs/{kind.__name__}"}

    def _fields(self, kind: Any, fields: dict[str, tuple[Any, bool]], place: str) -> dict[str, Any]:
        if kind not in self._names:
            name, number = kind.__name__, 2
            while name in self._definitions:
                name, number = f"{kind.__name__}{number}", number + 1
            self._names[kind] = name
            self._definitions[name] = {}
            self._definitions[name].update(self._object(fields, place))
        return {"$ref": f"#/$defs/{self._names[kind]}"}

    def _object(self, fields: dict[str, tuple[Any, bool]], place: str) -> dict[str, Any]:
        return {"type": "object",
                "properties": {name: self.schema(hint, f"{place}.{name}") for name, (hint, _) in fields.items()},
                "required": [name for name, (_, is_required) in fields.items() if is_required],
                "additionalProperties": False}

    def _dataclass_fields(self, kind: type) -> dict[str, tuple[Any, bool]]:
        hints = get_type_hints(kind, include_extras=True)
        return {field.name: (hints[field.name], field.default is dataclasses.MISSING
                             and field.default_factory is dataclasses.MISSING)
                for field in dataclasses.fields(kind) if field.init}

    def _parameters(self, function: Any, place: str) -> dict[str, tuple[Any, bool]]:
        hints = get_type_hints(function, include_extras=True)
        found = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise GrammarError(f"{place}: parameter {parameter} takes any number of values; name each one")
            if name not in hints:
                raise GrammarError(f"{place}: parameter {name!r} has no annotation; give it a type")
            found[name] = hints[name], parameter.default is parameter.empty
        return found


def _name(source: Any) -> str:
    return source.__name__ if isinstance(source, (type, types.FunctionType)) else repr(source)
