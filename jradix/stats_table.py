"""The counts of an engine as a table: a plain nested dict that prints itself aligned. Standard library only."""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from numbers import Integral, Real
from typing import Any, NamedTuple

RATE_WORDS = ("rate", "fraction", "share")     # a name whose last word is one of these is shown in percent
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Stats(dict):
    """Nested counts by name, as `LLM.stats()` returns them.

    A dict in every respect, `repr` and JSON included; `str`, and so `print`, is a table, and notebooks show an HTML
    one. What a value is follows from its name: `..._s` seconds, `..._bytes` bytes, `..._rate`, `..._fraction` and
    `..._share` parts of one.
    """

    def __str__(self) -> str:
        lines = list(_lines(self))
        labels = ["  " * line.level + line.label for line in lines]
        label_width = max(map(len, labels), default=0)
        number_width = max((len(line.value) for line in lines if line.is_number), default=0)
        return "\n".join(f"{label:<{label_width}}  {line.value.rjust(number_width) if line.is_number else line.value}"
                         .rstrip() for label, line in zip(labels, lines))

    def _repr_html_(self) -> str:
        rows = []
        for line in _lines(self):
            label = f'style="text-align:left;padding-left:{0.5 + 1.2 * line.level:.1f}em"'
            if line.is_heading:
                rows.append(f'<tr><th colspan="2" {label}>{escape(line.label)}</th></tr>')
            else:
                side = "right" if line.is_number else "left"
                rows.append(f'<tr><td {label}>{escape(line.label)}</td>'
                            f'<td style="text-align:{side}">{escape(line.value)}</td></tr>')
        return f'<table style="font-variant-numeric:tabular-nums"><tbody>{"".join(rows)}</tbody></table>'


class _Line(NamedTuple):
    level: int
    label: str
    value: str = ""
    is_number: bool = False
    is_heading: bool = False


def _lines(values: Mapping[str, Any], level: int = 0) -> Iterator[_Line]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield _Line(level, _words(str(name)), is_heading=True)
            yield from _lines(value, level + 1)
        else:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            yield _Line(level, _label(str(name), is_number), format_value(str(name), value), is_number)


def format_value(name: str, value: Any) -> str:
    """`value` as a reader wants it, by its type and by the unit that its name ends in."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Real):
        return _format_number(name, value)
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value("", item) for item in value) or "-"
    return str(value)


def _format_number(name: str, value: Real) -> str:
    if not math.isfinite(value):
        return str(float(value))
    if name.split("_")[-1] in RATE_WORDS:
        return f"{float(value):.1%}"
    if name.endswith("_s"):
        return _format_seconds(float(value))
    if name.endswith("_bytes"):
        return _format_bytes(float(value))
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return f"{float(value):,.2f}" if abs(value) >= 100 else f"{float(value):.4g}"


def _format_seconds(value: float) -> str:
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 0.9995e-3:
        return f"{value * 1e6:.3g} µs"
    if size < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if size < 99.95 else f"{value:,.0f} s"


def _format_bytes(value: float) -> str:
    for unit in BYTE_UNITS[:-1]:
        if abs(value) < 1023.95:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} {BYTE_UNITS[-1]}"


def _label(name: str, is_number: bool) -> str:
    """The name without its unit where the value shows it."""
    if is_number:
        name = name.removesuffix("_s").removesuffix("_bytes")
    return _words(name)


def _words(name: str) -> str:
    return name.removeprefix("num_").replace("_", " ")
