"""Grammars of text for the matcher: Lark as llguidance reads it, the GBNF of llama.cpp, regexes and choices.

llguidance's Lark can also say what this house does not follow: special tokens, which are no text here, and rules that
count tokens, change the temperature or go back behind tokens already given. These are refused.
"""
from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.matcher import MAX_SOURCE_CHARS, MatcherSource, lark_source
from jradix.grammar.rust_regex import rust_regex, rust_text

IS_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
LARK_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/[a-z]*|(?://|#)[^\n]*')
REFUSED_ATTRIBUTE = re.compile(r"^[ \t]*[!?]?[\w-]+[ \t]*\[[^\]\n]*\b(max_tokens|temperature|stop)\b", re.MULTILINE)
GBNF_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*')
GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
RULE_NAME = re.compile(r"[\w-]+")
COUNTS = re.compile(r"\{[^}\n]*\}")
SET_OPERATION = re.compile(r"&&|--|~~")


def regex_matcher(pattern: str) -> MatcherSource:
    """The texts that match `pattern`, in Python's syntax, as a whole.

    Raises:
      GrammarError: syntax, or an unsupported construct.
      GrammarUnsupported: an anchor inside the expression.
      GrammarTooLarge: beyond llguidance's limits.
    """
    return lark_source(f"start: /(?:{rust_regex(pattern)})/", "regex")


def choices_matcher(choices: Sequence[str]) -> MatcherSource:
    """One of `choices`. Raises GrammarTooLarge beyond llguidance's limits."""
    return lark_source(f"start: /(?:{'|'.join(map(rust_text, choices))})/", "choices")


def lark_matcher(text: str) -> MatcherSource:
    """The texts of a Lark grammar (rule `start`) or a GBNF grammar (`root ::= ...`).

    Raises:
      GrammarError: syntax, an undefined rule, or something that is not followed; it is named.
      GrammarTooLarge: beyond the matcher's limits.
    """
    if not isinstance(text, str) or not text.strip():
        raise GrammarError(f"grammar={str(text)[:60]!r}: expected the text of a Lark or GBNF grammar")
    if len(text) > MAX_SOURCE_CHARS:
        raise GrammarTooLarge(f"grammar of {len(text):,} characters, more than {MAX_SOURCE_CHARS:,}; use a smaller one")
    lark = _lark_of_gbnf(text) if IS_GBNF.search(text) else text
    bare = LARK_QUOTED.sub('""', lark)
    if "<" in bare:
        raise GrammarError(f"grammar: {bare[bare.index('<'):][:20]!r} names a special token, which is no text; "
                           "write the text that is meant in quotes")
    refused = REFUSED_ATTRIBUTE.search(bare)
    if refused:
        raise GrammarError(f"grammar: the rule attribute {refused[1]!r} is not followed; use the sampling parameters "
                           "of the request, or `suffix` and `lazy` for rules that end early")
    return lark_source(lark, "grammar")


def _lark_of_gbnf(text: str) -> str:
    """Lark for a GBNF grammar. What the converter would misread is put in plain words first, or refused."""
    plain = GBNF_QUOTED.sub(_plain_quoted, text)
    bare = COUNTS.sub("", GBNF_QUOTED.sub(" ", plain))
    rules = [match[0].partition("::=")[0].strip() for match in IS_GBNF.finditer(bare)]
    known = {_lark_name(name) for name in rules}
    if len(known) < len(rules):
        raise GrammarError(f"grammar: rules {', '.join(sorted(rules)[:8])}: two of them have one name (case, `-` and "
                           "`_` make no difference); rename one")
    unknown = {name for name in RULE_NAME.findall(bare) if name not in rules}
    if unknown or "root" not in rules:
        raise GrammarError(f"grammar: no rule {', '.join(sorted(unknown)[:8]) or 'root'}; expected a definition with "
                           "::= of every name that is used, and of root")
    if "start" in known:
        raise GrammarError("grammar: a rule `start` beside `root`; rename it, as `start` is what root becomes")
    try:
        return gbnf_to_lark(plain)
    except GbnfToLarkError as error:
        raise GrammarError(f"grammar: {error}") from None
    except RecursionError:
        raise GrammarTooLarge("grammar: groups nested too deeply; use rules of their own") from None


def _plain_quoted(match: re.Match[str]) -> str:
    quoted = match[0]
    if quoted[0] == "#":
        return quoted
    if quoted[0] == "[" and SET_OPERATION.search(quoted):
        raise GrammarError(f"grammar: {quoted[:40]!r} would be read as a set operation; put the signs apart")
    return GBNF_ESCAPE.sub(_plain_escape, quoted)


def _plain_escape(match: re.Match[str]) -> str:
    """The character itself for a numeric escape, which the converter shortens wrongly."""
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return match[0]
    point = int(digits, 16)
    if point > 0x10FFFF or 0xD800 <= point < 0xE000 or not chr(point).isprintable() or chr(point) in '"\\[]^-/&~':
        raise GrammarError(f"grammar: the escape {match[0]} stands for no plain character; write the character")
    return chr(point)


def _lark_name(name: str) -> str:
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
