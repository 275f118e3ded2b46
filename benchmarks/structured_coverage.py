"""Coverage of JSON schemas by automata: real schemas with their documents, and the official test suite.

    python benchmarks/structured_coverage.py --data ../shared/data [--every 4] [--only ID] [--show]

A schema is right when every valid document is accepted and every invalid one refused. Documents are written compactly;
the keys of an object may come in any order the automaton asks for, since it fixes the order of declared keys. So a
valid document needs one accepted order, and an invalid one must be refused in all. A schema that is refused is counted
by the reason, never as right; so is one with a valid document deeper than a depth-limited automaton goes. The exit code
is 1 when an invalid document was accepted.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Iterator

from jradix.errors import GrammarError, GrammarTooLarge
from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.json_schema import MIN_FREE_DEPTH, JsonOptions, SchemaReport, schema_to_language
from jradix.grammar.limits import GrammarLimits
from report import print_result, print_table, summarise

MAX_ORDERS = 20_000


class TooManyOrders(RuntimeError):
    """A document has too many orders of keys to judge it."""


class Serialiser:
    """Walks an automaton through a document, trying orders of keys where it has a choice."""

    def __init__(self, dfa: Dfa) -> None:
        self._dfa, self._left = dfa, MAX_ORDERS

    def accepts(self, document: Any) -> bool:
        return any(self._dfa.accepting[state] for state in self._ends(document, 0))

    def _ends(self, value: Any, state: int) -> set[int]:
        if isinstance(value, dict):
            return self._object_ends(value, state)
        if isinstance(value, list):
            states = self._walk({state}, "[")
            for i, item in enumerate(value):
                states = self._walk(states, "," if i else "")
                states = {end for one in states for end in self._ends(item, one)}
            return self._walk(states, "]")
        return self._walk({state}, json.dumps(value, ensure_ascii=False))

    def _object_ends(self, value: dict[str, Any], state: int) -> set[int]:
        seen: set[tuple[tuple[int, int], frozenset[str]]] = set()
        nothing: frozenset[str] = frozenset()
        stack = [(one, frozenset(value), nothing) for one in self._walk({state}, "{")]
        while stack:
            one, left, offered = stack.pop()
            follow = self._follow(one)
            if (follow, left) in seen:
                continue
            seen.add((follow, left))
            self._left -= 1
            if self._left < 0:
                raise TooManyOrders(f"more than {MAX_ORDERS} orders of keys to try")
            if not left:
                if follow[1] >= 0:
                    return {follow[1]}
                continue
            started = len(left) < len(value)
            inside = {key: self._walk({one}, ("," if started else "") + json.dumps(key, ensure_ascii=False) + ":")
                      for key in value if key in left}
            possible = frozenset(key for key, states in inside.items() if states)
            if offered & left - possible:
                continue                        # a key was passed over, and declared keys do not come back
            for key in (key for key in reversed(value) if key in possible):
                ends = {end for one_inside in inside[key] for end in self._ends(value[key], one_inside)}
                if started and {self._follow(end) for end in ends} == {follow}:
                    stack.append((ends.pop(), left - {key}, possible))
                    break                       # it changes nothing, so it may as well come now
                stack += [(end, left - {key}, possible) for end in ends]
        return set()

    def _follow(self, state: int) -> tuple[int, int]:
        """What counts of a state after a value: where a comma and where the end of the object lead."""
        return self._dfa.walk(state, b","), self._dfa.walk(state, b"}")

    def _walk(self, states: set[int], data: str) -> set[int]:
        found = {self._dfa.walk(state, data.encode("utf-8", "surrogatepass")) for state in states} if data else states
        return found - {-1}


def nesting(value: Any) -> int:
    """Levels of arrays and objects."""
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(nesting, value.values() if isinstance(value, dict) else value), default=0)


def judge(schema: Any, tests: list[tuple[Any, bool]], options: JsonOptions) -> dict[str, Any]:
    """Verdict, reason, seconds and states of one schema."""
    started = time.perf_counter()
    report = SchemaReport()
    try:
        dfa = compile_language(schema_to_language(schema, options=options, report=report), GrammarLimits(),
                               allow_empty=True)
    except GrammarError as error:
        kind = "too large" if isinstance(error, GrammarTooLarge) else "refused"
        empty = "unsatisfiable" in str(error) and not any(valid for _, valid in tests)
        return dict(verdict="right" if empty else kind, reason=str(error), states=0,
                    seconds=time.perf_counter() - started)
    seconds = time.perf_counter() - started
    wrong = []
    for document, valid in tests:
        try:
            accepted = dfa.num_states > 0 and Serialiser(dfa).accepts(document)
        except TooManyOrders as error:
            return dict(verdict="not judged", reason=str(error), seconds=seconds, states=dfa.num_states)
        if valid and not accepted and report.is_depth_limited and nesting(document) > MIN_FREE_DEPTH:
            return dict(verdict="too deep", reason=json.dumps(document)[:200], seconds=seconds, states=dfa.num_states)
        if accepted != valid:
            wrong.append(("valid refused: " if valid else "INVALID ACCEPTED: ") + json.dumps(document)[:200])
    verdict = "right"
    if wrong:
        verdict = "invalid accepted" if any(line.startswith("INVALID") for line in wrong) else "valid refused"
    return dict(verdict=verdict, reason="; ".join(wrong), seconds=seconds, states=dfa.num_states,
                depth_limited=report.is_depth_limited)


def real_schemas(data: Path) -> Iterator[tuple[str, Any, list[tuple[Any, bool]]]]:
    with open(data / "json_schemas.jsonl", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield row["id"], row["schema"], [(test["data"], test["valid"]) for test in row["tests"]]


def suite_groups(data: Path) -> Iterator[tuple[str, Any, list[tuple[Any, bool]]]]:
    for path in sorted((data / "json_schema_test_suite").glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield (f"{path.stem}: {group['description']}", group["schema"],
                   [(test["data"], test["valid"]) for test in group["tests"]])


def keyword_of(reason: str) -> str:
    """The last keyword of a reason's path, and the reason without quoted or numeric detail."""
    path, _, text = reason.partition(": ")
    keyword = next((part for part in reversed(path.split("/")) if part.isidentifier()), "")
    return f"{keyword}: {re.sub(r'[0-9,]+', 'N', re.sub(chr(39) + '.*?' + chr(39), '...', text))[:70]}"


def measure(title: str, rows: Iterator[tuple[str, Any, list[tuple[Any, bool]]]], options: JsonOptions,
            arguments: argparse.Namespace) -> dict[str, Any]:
    """Judges all rows, prints the table, and returns the figures."""
    verdicts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seconds, states, limited = [], [], 0
    for index, (name, schema, tests) in enumerate(rows):
        if index % arguments.every != arguments.first % arguments.every or arguments.only not in name:
            continue
        found = judge(schema, tests, options)
        verdicts[found["verdict"]] += 1
        seconds.append(found["seconds"])
        if found["states"]:
            states.append(found["states"])
        limited += found["verdict"] == "right" and bool(found.get("depth_limited"))
        if found["verdict"] in ("refused", "too large"):
            reasons[f"{found['verdict']}: {keyword_of(found['reason'])}"] += 1
        if arguments.show and (found["verdict"] != "right" or found["seconds"] > 2):
            print(f"{found['verdict']} {found['seconds']:.2f} s {found['states']} {name}: {found['reason'][:300]}",
                  flush=True)
    total = sum(verdicts.values())
    time_s, size = summarise(seconds), summarise(states or [0])
    print_table(title, [("", "schemas", "share"), *((name, count, count / max(total, 1))
                                                    for name, count in verdicts.most_common())],
                [f"{count}x {reason}" for reason, count in reasons.most_common(12)])
    print(f"  seconds median {time_s.median:.4f}, p90 {time_s.p90:.3f}, max {max(seconds, default=0):.2f}; "
          f"states median {size.median:.0f}, p90 {size.p90:.0f}")
    return dict(total=total, **{name.replace(" ", "_"): count for name, count in verdicts.items()},
                right_but_depth_limited=limited, seconds=time_s, max_s=max(seconds, default=0.0), states=size,
                max_states=max(states, default=0), refusals=dict(reasons))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with json_schemas.jsonl and the suite")
    parser.add_argument("--which", choices=("schemas", "suite", "both"), default="both")
    parser.add_argument("--every", type=int, default=1, help="only every n-th schema")
    parser.add_argument("--first", type=int, default=0, help="remainder of those taken, with --every")
    parser.add_argument("--only", default="", help="only those whose name contains this")
    parser.add_argument("--show", action="store_true", help="print each that is not right, or slow")
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {}
    if arguments.which != "suite":
        result["schemas"] = measure("real schemas", real_schemas(arguments.data), JsonOptions(), arguments)
    if arguments.which != "schemas":
        result["suite"] = measure("test suite, draft 2020-12", suite_groups(arguments.data), JsonOptions(), arguments)
        result["suite_formats_off"] = measure("test suite, formats as annotations", suite_groups(arguments.data),
                                              JsonOptions(formats=False), arguments)
    print_result("structured_coverage", result)
    return 1 if any(part.get("invalid_accepted") for part in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
