"""What a program appends beside text: a part to generate, and a choice to make."""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jradix.outputs import CompletionOutput
from jradix.sampling_params import GRAMMAR_FIELDS, SamplingParams

METHODS = ("token_length_normalized", "greedy", "unconditional")
DEFAULT_MAX_TOKENS = 128
_FORMS: dict[type, dict[str, Any]] = {
    int: dict(regex=r"-?(0|[1-9][0-9]{0,17})"),
    float: dict(regex=r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?"),
    bool: dict(choices=("True", "False")),
    str: dict(json_schema={"type": "string"}),
}


@dataclass(frozen=True)
class Gen:
    """A part that the model writes; made by `gen`.

    Attributes:
      name: what the program calls it; None: nothing.
      settings: fields of SamplingParams that were given.
      dtype: type of its value; None: by its grammar.
    """
    name: str | None
    settings: dict[str, Any]
    dtype: type | None = None

    def params(self, defaults: SamplingParams | None) -> SamplingParams:
        """Its sampling parameters: what was given, else those of the run, else at most `DEFAULT_MAX_TOKENS` tokens.

        Raises:
          ValueError: a setting out of its range.
        """
        if defaults is None:
            return SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **self.settings})
        own = {}
        if set(GRAMMAR_FIELDS) & set(self.settings):      # a grammar replaces that of the run, and must be able to end
            own = {**dict.fromkeys(GRAMMAR_FIELDS), "ignore_eos": False}
        return dataclasses.replace(defaults, **{**own, **self.settings})

    def value(self, completion: CompletionOutput) -> Any:
        """What `s[name]` gives. Raises ValueError where the output is no whole text of its grammar."""
        if completion.error is not None:
            raise ValueError(completion.error)
        if self.dtype in (int, float):
            return self.dtype(completion.text)
        if self.dtype is bool:
            return completion.text == "True"
        if self.dtype is str:
            return json.loads(completion.text)
        return completion.text if self.settings.get("json_schema") is None else completion.parsed


@dataclass(frozen=True)
class Select:
    """A choice that the model makes; made by `select`."""
    name: str | None
    choices: tuple[str, ...]
    method: str


def gen(name: str | None = None, *, dtype: type | None = None, **settings: Any) -> Gen:
    """A part that the model writes: `s += gen("answer", max_tokens=64, stop="\\n")`.

    Its value, `s["answer"]`, is the text; with `json_schema` what the text says; with `dtype` of that type.

    Args:
      name: by which the program reads it; None for a part that is only text.
      dtype: int, float, bool ("True" or "False") or str (a JSON string); the output is held to that form.
      settings: any field of `SamplingParams` but `n`: max_tokens, stop, temperature, regex, json_schema, choices,
        logprobs, ... Without `max_tokens`, here or in the run's `params`, at most 128 tokens.

    Raises:
      ValueError: an unknown setting, or one out of its range.
    """
    if name is not None and not isinstance(name, str):
        raise ValueError(f"gen({name!r}): expected a name, or settings by keyword")
    if "n" in settings:
        raise ValueError(f"gen({name!r}, n={settings['n']}): a text goes on in one way; use s.fork(n) for several")
    if dtype is not None:
        if dtype not in _FORMS:
            raise ValueError(f"gen({name!r}, dtype={dtype!r}): expected int, float, bool or str")
        if given := [field for field in GRAMMAR_FIELDS if settings.get(field) is not None]:
            raise ValueError(f"gen({name!r}, dtype={dtype.__name__}) with {given[0]}: expected one of them")
        settings |= _FORMS[dtype]
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"gen({name!r}): unknown setting {unknown[0]!r}; expected a field of SamplingParams: "
                         f"{', '.join(sorted(known - {'n'}))}")
    part = Gen(name, settings, dtype)
    part.params(None)
    return part


def select(name: str | None = None, choices: Sequence[str] = (), *, method: str = "token_length_normalized") -> Select:
    """A choice that the model makes among texts, by their log-probabilities: `s += select("mood", ["good", "bad"])`.

    All choices are scored on their shared prefix, which is computed once. The last word before them is scored with
    each, so that a token may reach over the border.

    Args:
      name: by which the program reads it.
      choices: at least one text, none twice; one may be the beginning of another.
      method: "token_length_normalized": the highest mean over the tokens; "greedy": the best token at each place, a
        choice that has ended taking part with its mean; "unconditional": the highest mean of what the context adds to
        the log-probability that the choice has without it (Holtzman et al. 2021, domain conditional PMI).

    Raises:
      ValueError: no choices, or an unknown method.
    """
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"select({name!r}): choices={choices!r}; expected a list of texts")
    if len(set(choices)) != len(choices):
        raise ValueError(f"select({name!r}): a choice stands twice in {list(choices)!r}")
    if method not in METHODS:
        raise ValueError(f"select({name!r}): method={method!r}; expected one of {METHODS}")
    return Select(name, tuple(choices), method)
