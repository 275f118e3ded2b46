"""Sets of JSON values, type by type: what one branch of a schema allows. Intersection is exact; nothing is text yet."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, NamedTuple

from jradix.grammar.json_numbers import ANY_NUMBER, Numbers
from jradix.grammar.json_references import Conjunction
from jradix.grammar.language import Lang, both

KINDS = frozenset(("null", "true", "false", "number", "string", "array", "object"))


@dataclass(frozen=True, slots=True)
class Keys:
    """A set of object keys: those in `names` or in one of `languages` (of decoded text); `outside`: all others."""
    names: frozenset[str] = frozenset()
    languages: tuple[Lang, ...] = ()
    outside: bool = False

    def contains(self, name: str, accepts: Callable[[Lang, str], bool]) -> bool:
        """Is `name` one of them? `accepts` tells whether a language holds a text."""
        inside = name in self.names or any(accepts(language, name) for language in self.languages)
        return inside != self.outside

    @property
    def is_finite(self) -> bool:
        return not self.languages and not self.outside


class KeyRule(NamedTuple):
    """Whatever key of `keys` is present has a value that satisfies `value`."""
    keys: Keys
    value: Conjunction


class Count(NamedTuple):
    """At least `low` and at most `high` items satisfy `value`; the first `skip` items do not count."""
    value: Conjunction
    low: int
    high: int | None
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays: item i satisfies `prefix[i]`, later ones `rest`. `unique`: place of `uniqueItems`, None without it."""
    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ()
    low: int = 0
    high: int | None = None
    counts: tuple[Count, ...] = ()
    unique: str | None = None

    def item(self, index: int) -> Conjunction:
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def meet(self, other: Arrays) -> Arrays:
        length = max(len(self.prefix), len(other.prefix))
        return Arrays(tuple(join(self.item(i), other.item(i)) for i in range(length)), join(self.rest, other.rest),
                      max(self.low, other.low), smaller(self.high, other.high),
                      tuple(dict.fromkeys(self.counts + other.counts)), self.unique or other.unique)


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects: every rule holds, required keys are there, and for each of `some` a key of it has such a value."""
    rules: tuple[KeyRule, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    some: tuple[KeyRule, ...] = ()

    def meet(self, other: Objects) -> Objects:
        return Objects(tuple(dict.fromkeys(self.rules + other.rules)),
                       tuple(dict.fromkeys(self.required + other.required)), max(self.low, other.low),
                       smaller(self.high, other.high), tuple(dict.fromkeys(self.some + other.some)))


ANY_ARRAY, ANY_OBJECT = Arrays(), Objects()


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the schemas of a branch looked at: keys, the first items, all items; for the `unevaluated*` keywords."""
    keys: tuple[Keys, ...] = ()
    items: int = 0
    all_items: bool = False
    matching: Conjunction | None = None

    def meet(self, other: Evaluated) -> Evaluated:
        return Evaluated(tuple(dict.fromkeys(self.keys + other.keys)), max(self.items, other.items),
                         self.all_items or other.all_items, self.matching or other.matching)


@dataclass(frozen=True, slots=True)
class Branch:
    """The values whose kind is in `kinds` and which satisfy what is said of that kind. `string`: None is any text."""
    kinds: frozenset[str] = KINDS
    string: Lang | None = None
    number: Numbers = ANY_NUMBER
    array: Arrays = ANY_ARRAY
    object: Objects = ANY_OBJECT
    evaluated: Evaluated = field(default=Evaluated())

    def meet(self, other: Branch) -> Branch | None:
        """The values in both, or None when that is plainly nothing."""
        kinds = self.kinds & other.kinds
        if not kinds:
            return None
        string, number, array, objects = self.string, self.number, self.array, self.object
        if "string" in kinds and other.string is not None:
            string = other.string if string is None else both(string, other.string)
        if "number" in kinds and other.number is not ANY_NUMBER:
            number = number.meet(other.number)
        if "array" in kinds and other.array is not ANY_ARRAY:
            array = array.meet(other.array)
        if "object" in kinds and other.object is not ANY_OBJECT:
            objects = objects.meet(other.object)
        kinds = _alive(kinds, string, number, array, objects)
        if not kinds:
            return None
        return Branch(kinds, string, number, array, objects, self.evaluated.meet(other.evaluated))


def _alive(kinds: frozenset[str], string: Lang | None, number: Numbers, array: Arrays, objects: Objects
           ) -> frozenset[str]:
    dead = set()
    if string is not None and string.is_nothing:
        dead.add("string")
    if number.is_empty:
        dead.add("number")
    if array.high is not None and array.low > array.high:
        dead.add("array")
    if objects.high is not None and max(objects.low, len(objects.required)) > objects.high:
        dead.add("object")
    return kinds - dead if dead else kinds


def join(first: Conjunction, second: Conjunction) -> Conjunction:
    """Both conjunctions at once, without repetition."""
    if not first or not second or first == second:
        return first or second
    return tuple(dict.fromkeys(first + second))


def smaller(first: int | None, second: int | None) -> int | None:
    """The smaller bound; None is no bound."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
