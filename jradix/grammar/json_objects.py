"""Texts of JSON objects and arrays: punctuation, order and counting. What a value is comes from the caller."""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Callable, NamedTuple

from jradix.errors import GrammarTooLarge
from jradix.grammar.json_keywords import Keywords
from jradix.grammar.json_references import Conjunction, Literal
from jradix.grammar.json_strings import StringWriter, listed_texts
from jradix.grammar.json_values import Arrays, Count, Keys, Objects, join
from jradix.grammar.language import (Lang, alt, both, but_not, epsilon, nothing, optional, repeat, seq, text,
                                     utf8_strings)

MAX_KEY_SETS = 24
MAX_KEY_REGIONS = 128
MAX_ANY_ORDER = 6
MAX_SOME = 4
MAX_UNIQUE = 10
MAX_COUNTS = 100_000   # properties times what is followed beside them
MAX_LISTED_KEYS = 8
MAX_CHOICES = 32      # of distinct sets of keys, where several must occur
Write = Callable[[Conjunction], Lang]


@dataclass(frozen=True, slots=True)
class Punctuation:
    """The texts between values; blanks, where allowed, belong to them."""
    open_object: Lang
    close_object: Lang
    open_array: Lang
    close_array: Lang
    comma: Lang
    colon: Lang

    @classmethod
    def of(cls, comma: str, colon: str, blanks: int) -> Punctuation:
        """`blanks`: how many blanks, tabs or line ends may stand at each place where JSON allows them."""
        blank = repeat(alt(*map(text, " \t\n\r")), 0, blanks) if blanks else epsilon()
        return cls(seq(text("{"), blank), seq(blank, text("}")), seq(text("["), blank), seq(blank, text("]")),
                   seq(blank, text(comma), blank), seq(blank, text(colon), blank))


class Member(NamedTuple):
    """A key, or a language of keys, and the value it takes; `some[i]`: it can be what the i-th `some` rule wants."""
    key: str | Lang
    value: Conjunction
    is_required: bool
    some: tuple[bool, ...]


class ObjectPlan(NamedTuple):
    """Declared members in order, then the sets of other keys, disjoint from them and from each other."""
    declared: tuple[Member, ...]
    others: tuple[Member, ...]
    is_possible: bool


def plan_object(objects: Objects, keywords: Keywords, strings: StringWriter, *, closed: bool, place: str) -> ObjectPlan:
    """Decides for every key what its value must satisfy.

    Args:
      closed: keys that no rule speaks of are refused where any are declared.

    Raises:
      GrammarTooLarge: too many key patterns, or too many ways in which they overlap.
    """
    names = dict.fromkeys(name for rule in objects.rules + objects.some if not rule.keys.outside
                          for name in sorted(rule.keys.names))
    names.update(dict.fromkeys(objects.required))
    for words in (listed_texts(language) for rule in objects.rules + objects.some for language in rule.keys.languages):
        if words is not None and len(words) <= MAX_LISTED_KEYS:     # a pattern such as ^[a-d]$ declares its keys
            names.update(dict.fromkeys(words))
    declared = []
    for name in names:
        value = keywords.value_of(objects, name)
        if not keywords.is_empty(value):
            some = tuple(rule.keys.contains(name, strings.accepts) for rule in objects.some)
            if value or name in objects.required or not closed or _is_spoken_of(objects, name, strings):
                declared.append(Member(name, value, name in objects.required, some))
        elif name in objects.required:
            return ObjectPlan((), (), False)
    sets = list(dict.fromkeys(rule.keys for rule in objects.rules + objects.some if not rule.keys.is_finite))
    if len(sets) > MAX_KEY_SETS:
        raise GrammarTooLarge(f"{place}: {len(sets)} key patterns that may overlap, more than {MAX_KEY_SETS}")
    taken = alt(*map(text, names))
    found: dict[tuple[Conjunction, tuple[bool, ...]], list[Lang]] = {}
    for region, keys in _regions(sets, taken, frozenset(names), strings, place):
        value: Conjunction = ()
        for rule in objects.rules:
            if region.get(rule.keys):
                value = join(value, rule.value)
        spoken = any(region.get(rule.keys) for rule in objects.rules)
        if keywords.is_empty(value) or (closed and names and not spoken):
            continue
        some = tuple(bool(region.get(rule.keys)) for rule in objects.some)
        found.setdefault((value, some), []).append(keys)
    others = tuple(Member(alt(*keys), value, False, some) for (value, some), keys in found.items())
    return ObjectPlan(tuple(declared), others, True)


def _is_spoken_of(objects: Objects, name: str, strings: StringWriter) -> bool:
    return any(rule.keys.contains(name, strings.accepts) for rule in objects.rules)


def _regions(sets: list[Keys], taken: Lang, names: frozenset[str], strings: StringWriter, place: str
             ) -> list[tuple[dict[Keys, bool], Lang]]:
    """The parts into which `sets` divide the keys that are not `taken`: which sets a part is in, and its keys."""
    regions: list[tuple[dict[Keys, bool], Lang]] = [({}, _region({}, taken))]
    for keys in sets:
        has_all_others = keys.outside and not keys.languages and keys.names <= names
        found = []
        for region, _ in regions:
            for is_in in (True,) if has_all_others else (True, False):
                part = region | {keys: is_in}
                language = _region(part, taken)
                if not strings.is_empty(language):
                    found.append((part, language))
        regions = found
        if len(regions) > MAX_KEY_REGIONS:
            raise GrammarTooLarge(f"{place}: key patterns that overlap in more than {MAX_KEY_REGIONS} ways")
    return regions


def _region(region: dict[Keys, bool], taken: Lang) -> Lang:
    within, without = [], [taken]
    for keys, is_in in region.items():
        language = alt(*map(text, keys.names), *keys.languages)
        (within if is_in != keys.outside else without).append(language)
    universe = both(*within) if within else utf8_strings()
    return but_not(universe, alt(*without))


def object_language(objects: Objects, plan: ObjectPlan, keywords: Keywords, marks: Punctuation, strings: StringWriter,
                    write: Write, *, any_order: bool, place: str) -> Lang:
    """The texts of the objects of `plan`, which is that of `objects`.

    Declared keys come first, in declared order (any order when asked and at most 6), each at most once. Other keys may
    repeat: an automaton cannot remember them. A reader keeps the last of equal keys, so that a set of other keys counts
    as one towards the least number of properties, and the key that meets a condition is the last of its set.

    Raises:
      GrammarUnsupported: more properties wanted than can be told apart, or conditions that only several keys of one set
        could meet.
      GrammarTooLarge: too many states.
    """
    if not plan.is_possible:
        return nothing()
    if len(objects.some) > MAX_SOME:
        raise GrammarTooLarge(f"{place}: {len(objects.some)} conditions that some key must meet, more than {MAX_SOME}")
    if any_order and len(plan.declared) > MAX_ANY_ORDER:
        raise GrammarTooLarge(f"{place}: {len(plan.declared)} properties in any order, at most {MAX_ANY_ORDER}; "
                              'use property_order="declared"')
    if len(objects.some) > 1 and not _can_meet(objects, plan, keywords):
        keywords.refuse(place, f"{len(objects.some)} conditions that some key must meet need several undeclared keys, "
                               "which an automaton does not tell apart")
        objects = replace(objects, some=())
    low = objects.low if objects.low > sum(member.is_required for member in plan.declared) else 0
    if low > len(plan.declared) + len(plan.others):
        if not plan.others:
            return nothing()
        keywords.refuse(f"{place.rstrip('/')}/minProperties",
                        f"{low} properties, but an automaton tells only {len(plan.declared)} declared ones and "
                        f"{len(plan.others)} kinds of others apart")
        low = len(plan.declared) + len(plan.others)
    high = objects.high if objects.high is not None and (plan.others or objects.high < len(plan.declared)) else None
    cap = max(low, 0 if high is None else high)

    def pair(member: Member, met: int) -> Lang:
        value = member.value
        for i, rule in enumerate(objects.some):
            if met >> i & 1:
                value = join(value, rule.value)
        key = text(member.key) if isinstance(member.key, str) else member.key
        return seq(strings.quoted(key), marks.colon, write(value))

    def choices(member: Member, unmet: int) -> list[tuple[Lang, int]]:
        able = sum(1 << i for i, can in enumerate(member.some) if can) & unmet
        return [(pair(member, met), unmet & ~met) for met in range(able + 1) if met & able == met]

    def rest(started: bool, count: int, unmet: int) -> Lang:
        """Members of other keys, once the declared ones are over."""
        least, most = max(0, low - count), None if high is None else high - count
        if most is not None and (most < 0 or least > most):
            return nothing()
        plain = [pair(member, 0) for member in plan.others]
        found = _listed(alt(*plain), marks.comma, started, least, most)
        if least > 1:
            found = both(found, alt(*(both(*(_with_one(plain[i], plain, plain, marks.comma, started) for i in distinct))
                                      for distinct in islice(combinations(range(len(plain)), least), MAX_CHOICES))))
        for i, rule in enumerate(objects.some):
            if unmet >> i & 1:
                found = both(found, alt(*(
                    _with_one(pair(member, 1 << i), plain, plain[:at] + plain[at + 1:] if rule.value else plain,
                              marks.comma, started)
                    for at, member in enumerate(plan.others) if member.some[i])))
        return found

    every = (1 << len(objects.some)) - 1
    counts = (cap + 1) * (every + 1)
    if (len(plan.declared) + 1) * counts > MAX_COUNTS:
        raise GrammarTooLarge(f"{place}: {len(plan.declared)} properties times {counts} counts to follow")
    states = [(started, count, unmet) for started in (False, True) for count in range(cap + 1)
              for unmet in range(every + 1) if started == (count > 0) or not cap]
    ends = {state: rest(*state) for state in states}
    pairs = {(member, unmet): choices(member, unmet) for member in plan.declared for unmet in range(every + 1)}

    def then(member: Member, state: tuple[bool, int, int], after: dict[tuple[bool, int, int], Lang]) -> Lang:
        started, count, unmet = state
        if high is not None and count >= high:
            return nothing()
        comma = marks.comma if started else epsilon()
        return alt(*(seq(comma, one, after[True, min(count + 1, cap), left]) for one, left in pairs[member, unmet]))

    if any_order:
        body = _any_order(plan.declared, states, ends, then)
    else:
        body = ends
        for member in reversed(plan.declared):
            body = {state: alt(then(member, state, body), nothing() if member.is_required else body[state])
                    for state in states}
    return seq(marks.open_object, body[False, 0, every], marks.close_object)


def _can_meet(objects: Objects, plan: ObjectPlan, keywords: Keywords) -> bool:
    """Can the `some` rules be met together where one key of each set of others may meet any?

    True also where that is not found out, and where one of them can never be met.
    """
    every = (1 << len(objects.some)) - 1
    possible, left = 0, {every}
    for member in plan.declared + plan.others:
        able = sum(1 << i for i, can in enumerate(member.some) if can)
        options = []
        for met in range(1, able + 1):
            value = member.value
            for i, rule in enumerate(objects.some):
                if met >> i & 1:
                    value = join(value, rule.value)
            if met & able == met and not keywords.is_empty(value):
                options.append(met)
                possible |= met
        left |= {unmet & ~met for unmet in left for met in options}
    return 0 in left or possible != every


def _any_order(declared: tuple[Member, ...], states: list, ends: dict, then: Callable) -> dict:
    tables: dict[int, dict] = {}
    for left in range(1 << len(declared)):
        waiting = [i for i in range(len(declared)) if left >> i & 1]
        done = not any(declared[i].is_required for i in waiting)
        tables[left] = {state: alt(ends[state] if done else nothing(),
                                   *(then(declared[i], state, tables[left & ~(1 << i)]) for i in waiting))
                        for state in states}
    return tables[(1 << len(declared)) - 1]


def _listed(one: Lang, comma: Lang, started: bool, low: int, high: int | None) -> Lang:
    """`low` to `high` times `one`, with commas between and, when `started`, before."""
    more = seq(comma, one)
    if started:
        return repeat(more, low, high)
    if high == 0:
        return epsilon()
    first = seq(one, repeat(more, max(low - 1, 0), None if high is None else high - 1))
    return first if low else optional(first)


def _with_one(wanted: Lang, before: list[Lang], after: list[Lang], comma: Lang, started: bool) -> Lang:
    """Lists of `before`, then `wanted`, then `after`, with commas between and, when `started`, before."""
    plain = alt(*before)
    more, rest = repeat(seq(comma, plain), 0), repeat(seq(comma, alt(*after)), 0)
    if started:
        return seq(more, comma, wanted, rest)
    return alt(seq(wanted, rest), seq(plain, more, comma, wanted, rest))


def array_language(arrays: Arrays, keywords: Keywords, marks: Punctuation, write: Write) -> Lang:
    """The texts of `arrays`.

    Raises:
      GrammarError: `uniqueItems` whose items are not a list of at most 10 known values.
    """
    high = arrays.high
    length = len(arrays.prefix)
    low_after = max(arrays.low - length, 0)
    if length == 0:
        body = _listed(write(arrays.rest), marks.comma, False, arrays.low, high)
    else:
        body = nothing() if high is not None and (high < length or low_after > high - length) else \
            repeat(seq(marks.comma, write(arrays.rest)), low_after, None if high is None else high - length)
        for i in range(length - 1, -1, -1):
            comma = marks.comma if i else epsilon()
            more = seq(comma, write(arrays.prefix[i]), body) if high is None or i < high else nothing()
            body = alt(epsilon() if i >= arrays.low else nothing(), more)
    bodies = [body] + [_counted(arrays, count, keywords, marks, write) for count in arrays.counts]
    if arrays.unique is not None and (high is None or high > 1):
        bodies.append(_unique(arrays, keywords, marks, write))
    return seq(marks.open_array, both(*bodies), marks.close_array)


def _counted(arrays: Arrays, count: Count, keywords: Keywords, marks: Punctuation, write: Write) -> Lang:
    """Item lists with the right number of items that satisfy `count.value`; if there is a most, others fail it."""
    length = max(len(arrays.prefix), count.skip)

    def sides(index: int) -> tuple[Lang, Lang]:
        item = arrays.item(index)
        if index < count.skip:
            return nothing(), write(item)
        inside = write(join(item, count.value))
        if count.high is None:
            return inside, write(item)
        return inside, alt(*(write(join(item, (Literal(node, not positive),))) for node, positive in count.value))

    inside, outside = sides(length)
    others = repeat(seq(marks.comma, outside), 0)
    cap = count.low if count.high is None else count.high

    def tail(done: int) -> Lang:
        return seq(others, repeat(seq(marks.comma, inside, others), max(count.low - done, 0),
                                  None if count.high is None else count.high - done))

    after = [tail(done) for done in range(cap + 1)]
    for i in range(length - 1, 0, -1):
        holds, fails = sides(i)
        after = [_next(done, cap, count, after, seq(marks.comma, holds), seq(marks.comma, fails))
                 for done in range(cap + 1)]
    holds, fails = sides(0)
    return _next(0, cap, count, after, holds, fails)


def _next(done: int, cap: int, count: Count, after: list[Lang], holds: Lang, fails: Lang) -> Lang:
    options = [epsilon()] if done >= count.low else []
    options.append(seq(fails, after[done]))
    if count.high is None or done < count.high:
        options.append(seq(holds, after[min(done + 1, cap)]))
    return alt(*options)


def _unique(arrays: Arrays, keywords: Keywords, marks: Punctuation, write: Write) -> Lang:
    positions = [arrays.item(i) for i in range(len(arrays.prefix) + 1)]
    values = dict.fromkeys(value for item in positions for value in keywords.listed(item) or (None,))
    if None in values or len(values) > MAX_UNIQUE:
        keywords.refuse(arrays.unique or "", f"items are not a list of at most {MAX_UNIQUE} known values, so an "
                                             "automaton cannot remember which ones came")
        return repeat(alt(*(alt(write(item), seq(marks.comma, write(item))) for item in positions)), 0)
    items = [text(value) for value in values]
    level: dict[int, Lang] = {}
    for used in range((1 << len(items)) - 1, -1, -1):
        comma = marks.comma if used else epsilon()
        level[used] = alt(epsilon(), *(seq(comma, item, level[used | 1 << i]) for i, item in enumerate(items)
                                       if not used >> i & 1))
    return level[0]
