"""How one request is sampled: the words of vLLM and SGLang, checked once when they are made."""
from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

MAX_LOGPROBS = 20
ENOUGH = "enough"
GRAMMAR_FIELDS = ("json_schema", "regex", "choices", "grammar", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. A field left at None takes the model's `generation_config.json`, then the neutral one.

    Attributes:
      n: samples of the prompt; each draws its own stream, sample i is the same whatever n is.
      max_tokens: output tokens at most; None: up to the model's `max_model_len`; 0: nothing is sampled; "enough": as
        None, for a grammar whose texts have a longest one, and refused for one that allows texts of any length.
      min_tokens: no stop token or stop string ends the output before this many tokens.
      temperature: 0 is greedy.
      top_p: smallest set of tokens with this much probability, in (0, 1].
      top_k: most probable k tokens; 0, -1 or None: off.
      min_p: tokens below min_p times the best probability are dropped, in [0, 1].
      seed: makes the samples reproducible; None: drawn from the engine's own seed.
      stop: text or texts that end the output.
      stop_token_ids: token ids that end the output, beside the model's own.
      include_stop_str_in_output: keep the stop text.
      ignore_eos: the model's own end tokens do not end the output; `stop` and `stop_token_ids` still do.
      presence_penalty, frequency_penalty: subtracted for tokens of the output, in [-2, 2] (OpenAI's definition).
      repetition_penalty: divides positive and multiplies negative logits of prompt and output tokens (Keskar 2019).
      logit_bias: token id -> value added to its logit.
      logprobs: also return this many of the most probable tokens (0: only the chosen one), at most 20. They are taken
        from the raw logits, before temperature, penalties and filters.
      prompt_logprobs: the same for the prompt's tokens; such a request reads no cached pages, but fills the cache.
      skip_special_tokens: leave special tokens out of the text.
      json_schema: the output is JSON of this schema: a dict, JSON text, true, or a Python type (Pydantic model,
        dataclass, TypedDict, Enum, function).
      regex: the whole output matches this expression, in Python's syntax.
      choices: the output is one of these texts.
      grammar: the output is a text of this grammar, in the Lark dialect of llguidance.
      structural_tag: free text in which certain marks begin parts of a schema, such as tool calls.
      grammar_options: further arguments of `jradix.compile_grammar`: `whitespace`, `strict`, `max_depth`, ...
      cache: False neither reads cached KV nor leaves any.
      cache_namespace: KV is shared only between requests that name the same one: a text, or a tuple or list of texts
        and integers; None: the common one.

    Raises:
      ValueError: a value is outside its range; the message names the field.
    """
    n: int = 1
    max_tokens: int | str | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    json_schema: Any = None
    regex: str | None = None
    choices: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | None = None
    grammar_options: Mapping[str, Any] | None = None
    cache: bool = True
    cache_namespace: str | tuple[str | int, ...] | list[str | int] | None = None

    def __post_init__(self) -> None:
        self._integer("n", 1)
        if self.max_tokens != ENOUGH:
            self._integer("max_tokens", 0, none=True)
        self._integer("min_tokens", 0)
        self._number("temperature", 0, math.inf, none=True)
        self._number("top_p", 0, 1, none=True, above=True)
        self._integer("top_k", -1, none=True)
        self._number("min_p", 0, 1, none=True)
        self._integer("seed", -2**63, none=True)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        self._number("repetition_penalty", 0, math.inf, none=True, above=True)
        self._integer("logprobs", 0, none=True, largest=MAX_LOGPROBS)
        self._integer("prompt_logprobs", 0, none=True, largest=MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected True or False")
        object.__setattr__(self, "cache_namespace", checked_namespace(self.cache_namespace))
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: expected one of {', '.join(GRAMMAR_FIELDS)}")
        if given and self.ignore_eos:
            raise ValueError(f"ignore_eos=True with {given[0]}: an output that fits must be able to end")
        if self.max_tokens == ENOUGH and not given:
            raise ValueError(f'max_tokens="{ENOUGH}" without a grammar, for whose longest text it stands: give a number')
        for name, kind in (("structural_tag", Mapping), ("grammar_options", Mapping), ("grammar", str)):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={str(getattr(self, name))[:80]}: expected "
                                 f"{'a text' if kind is str else 'a mapping'}")
        if self.grammar_options and not given:
            raise ValueError(f"grammar_options={self.grammar_options!r} without a grammar: expected one of "
                             f"{', '.join(GRAMMAR_FIELDS)} as well")
        if isinstance(self.json_schema, (int, float, list, tuple, bytes)) and not isinstance(self.json_schema, bool):
            raise ValueError(f"json_schema={str(self.json_schema)[:60]}: expected a schema as a dict, JSON text or "
                             "true, or a Python type")
        if self.regex is not None and not isinstance(self.regex, str):
            raise ValueError(f"regex={self.regex!r}: expected a text")
        if self.choices is not None and (isinstance(self.choices, str) or not isinstance(self.choices, Sequence)):
            raise ValueError(f"choices={self.choices!r}: expected a list of texts")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(f"stop={self.stop!r}: expected non-empty strings; leave the parameter out for no stop "
                             "text")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids or ())
        if any(not _is_integer(i) or i < 0 for i in ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r}: expected token ids (integers >= 0)")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.logit_bias is not None:
            try:
                bias = {int(token): float(value) for token, value in self.logit_bias.items()}
            except (AttributeError, TypeError, ValueError):
                raise ValueError(f"logit_bias={self.logit_bias!r}: expected a mapping of token id to number") from None
            if any(token < 0 or math.isnan(value) for token, value in bias.items()):
                raise ValueError(f"logit_bias={self.logit_bias!r}: expected token ids >= 0 and numbers that are not "
                                 "NaN")
            object.__setattr__(self, "logit_bias", bias)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Builds from a mapping; an unknown name is an error that lists the known ones."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**values)

    def resolved(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """Fills each field left at None from `generation_config`, then with the neutral value, field by field."""
        greedy = generation_config.get("do_sample") is False and generation_config.get("temperature") is None
        neutral = dict(temperature=0.0 if greedy else 1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
        filled = {}
        for name, value in neutral.items():
            if getattr(self, name) is None:
                given = generation_config.get(name)
                filled[name] = value if given is None else given
        return dataclasses.replace(self, **filled) if filled else self

    @property
    def grammar_sources(self) -> dict[str, Any]:
        """The grammar asked for, as arguments of `compile_grammar`; empty without one."""
        given = {name: getattr(self, name) for name in GRAMMAR_FIELDS if getattr(self, name) is not None}
        return {**given, **(self.grammar_options or {})}

    @property
    def token_limit(self) -> int | None:
        """`max_tokens` where it is a number."""
        return None if self.max_tokens == ENOUGH else self.max_tokens

    @property
    def is_greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    def _integer(self, name: str, smallest: int, *, none: bool = False, largest: int | None = None) -> None:
        value = getattr(self, name)
        if value is None and none:
            return
        if not _is_integer(value) or value < smallest or (largest is not None and value > largest):
            bound = f">= {smallest}" if largest is None else f"from {smallest} to {largest}"
            raise ValueError(f"{name}={value!r}: expected an integer {bound}{' or None' if none else ''}")

    def _number(self, name: str, low: float, high: float, *, none: bool = False, above: bool = False) -> None:
        value = getattr(self, name)
        if value is None and none:
            return
        ok = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or value > high or value < low or (above and value <= low):
            bound = f"{'>' if above else '>='} {low}" + ("" if high == math.inf else f" and <= {high}")
            raise ValueError(f"{name}={value!r}: expected a number {bound}{' or None' if none else ''}")


def read_response_format(value: Any) -> dict[str, Any]:
    """Sampling parameters for OpenAI's `response_format`. Raises ValueError for what is none."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = value.get("json_schema") if kind == "json_schema" else None
    if isinstance(schema, Mapping) and isinstance(schema.get("schema"), (Mapping, bool)):
        return {"json_schema": schema["schema"]}
    if kind == "structural_tag":
        return {"structural_tag": dict(value)}
    raise ValueError(f"response_format={str(value)[:80]}: expected " '{"type": "text"}, {"type": "json_object"}, '
                     '{"type": "json_schema", "json_schema": {"schema": {...}}} or {"type": "structural_tag", ...}')


def checked_namespace(value: Any) -> str | tuple[str | int, ...] | None:
    """A `cache_namespace` in its hashable form. Raises ValueError for anything but texts and tuples of them."""
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(part, str) or _is_integer(part) for part in value):
        return tuple(value)
    raise ValueError(f"cache_namespace={value!r}: expected a non-empty text, or a tuple of texts and integers")


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
