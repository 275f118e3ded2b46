"""The languages of the `format` keyword, over decoded text.

Where a specification allows more than a few states can hold, the language is smaller: host names have at most 63
characters, seconds end at 59 and carry at most nine decimals, e-mail addresses have no quoted local part, URIs no IPv6
literal.
"""
from __future__ import annotations

import functools

from jradix.grammar.language import Lang, any_char, both, repeat
from jradix.grammar.regex import parse_regex

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
         rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)")
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_DAY_TIME = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION = (rf"P(?:[0-9]+W|{_DAY_TIME}|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
             rf"(?:{_DAY_TIME})?)")
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_HEX = r"[0-9A-Fa-f]{1,4}"
_LAST = rf"(?:{_HEX}:{_HEX}|{_IPV4})"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_HEX2 = r"[0-9A-Fa-f]{2}"
_UNICODE = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd\U00020000-\U0002fffd\U00030000-\U0003fffd"


def _ipv6() -> str:
    options = [rf"(?:{_HEX}:){{6}}{_LAST}", rf"::(?:{_HEX}:){{5}}{_LAST}"]
    for before in range(1, 6):
        options.append(rf"(?:{_HEX}(?::{_HEX}){{0,{before - 1}}})?::(?:{_HEX}:){{{5 - before}}}{_LAST}")
    options += [rf"(?:{_HEX}(?::{_HEX}){{0,5}})?::{_HEX}", rf"(?:{_HEX}(?::{_HEX}){{0,6}})?::"]
    return "|".join(options)


def _uri(extra: str, reference: bool) -> str:
    unreserved = rf"A-Za-z0-9\-._~!$&'()*+,;={extra}"
    char = rf"(?:[{unreserved}:@]|%{_HEX2})"
    no_colon = rf"(?:[{unreserved}@]|%{_HEX2})"
    authority = rf"(?:(?:[{unreserved}:]|%{_HEX2})*@)?(?:[{unreserved}]|%{_HEX2})*(?::[0-9]*)?"
    absolute = rf"/(?:{char}+(?:/{char}*)*)?"
    rest = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    uri = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?://{authority}(?:/{char}*)*|{absolute}|{char}+(?:/{char}*)*|){rest}"
    relative = rf"(?://{authority}(?:/{char}*)*|{absolute}|{no_colon}+(?:/{char}*)*|){rest}"
    return rf"(?:{uri}|{relative})" if reference else uri


_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:\.?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(?::[1-9][0-9]{0,3}|\*)?"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": _uri("", False),
    "uri-reference": _uri("", True),
    "iri": _uri(_UNICODE, False),
    "iri-reference": _uri(_UNICODE, True),
    "uri-template": (rf"(?:[A-Za-z0-9\-._~!$&()*+,;=:/?#\[\]@]|%{_HEX2}"
                     rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"),
    "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
    "relative-json-pointer": r"(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)",
}
FORMATS = frozenset(_PATTERNS)
"""Formats that are enforced."""
UNSUPPORTED = frozenset(("idn-email", "idn-hostname", "regex"))
"""Formats of the specification that no automaton here decides; every other name is an annotation by the standard."""


@functools.cache
def format_language(name: str) -> Lang:
    """The texts of format `name`, one of FORMATS."""
    language = parse_regex(_PATTERNS[name], flags=0, anchored=True)
    return both(language, repeat(any_char(), 0, 63)) if name == "hostname" else language
