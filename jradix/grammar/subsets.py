"""The subset construction over a language expression: states are sets of terms, and rows are computed when asked for.

A term is what may still come: a node of the expression, how far inside it one is, and the term that follows (its tail).
Term 0 is the end. The byte steps of a term are its partial derivatives; a set of terms is a state of the automaton, and
its row the disjoint byte masks with the set each leads to. Intersections and differences are terms whose position is a
tuple of such sets, one per operand: their product is never built beyond what is reached.
"""
from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

from jradix.errors import GrammarTooLarge
from jradix.grammar.language import NUM_BYTES, Lang
from jradix.grammar.limits import GrammarLimits

END = 0                 # the term after which nothing comes; its set is number 0 as well
NO_SET = -1             # in the position of a difference: the excluded side cannot match any more
COST_OF_TERM = 16       # in steps of work, see GrammarLimits.max_work
COST_OF_STEP = 8
COST_OF_SET = 16
MAX_NESTED_PRODUCTS = 100
BYTE_MASK = (1 << NUM_BYTES) - 1
PRODUCTS = frozenset(("both", "but_not", "unmarked"))

Row = list[tuple[int, int]]                 # (mask of symbols, set or term it leads to)


class Subsets:
    """Sets of terms of one expression.

    Invariant: equal terms have one number, equal sets have one number; a memo is written once and then only read.

    Attributes:
      start: the set to begin with.
      work: steps so far, against `limits.max_work`.
    """

    def __init__(self, lang: Lang, limits: GrammarLimits) -> None:
        self.work = 0
        self._max_work = limits.max_work
        self._kinds: list[str] = []
        self._values: list[int | bytes | tuple] = []
        self._parts: list[tuple[int, ...]] = []
        self._nullables: list[bool] = []
        self._depths: list[int] = []                    # how many products are nested
        self._starts: list[tuple[int, object]] = []     # (node, position) of the term that begins the node
        self._node_ids: dict[tuple, int] = {}
        self._families: dict[tuple[int, ...], int] = {}     # parts -> the node that stands for all repeats of them
        self._terms: list[tuple[int, object, int]] = [(-1, None, END)]
        self._accepts: list[bool] = [True]
        self._steps: list[Row | None] = [[]]
        self._term_ids: dict[tuple[int, object, int], int] = {}
        self._sets: list[tuple[int, ...]] = [(END,)]
        self._set_accepts: list[bool] = [True]
        self._rows: list[Row | None] = [[]]
        self._set_ids: dict[int | tuple[int, ...], int] = {END: END}
        root = self._add_nodes(lang)
        self.start = self._set_of(self._term(*self._starts[root], END))

    def accepts(self, set_id: int) -> bool:
        """Whether the string may end here."""
        return self._set_accepts[set_id]

    def row(self, set_id: int) -> Row:
        """(mask, set) of each way on; the masks are disjoint and no two lead to the same set."""
        row = self._rows[set_id]
        if row is None:
            row = self._rows[set_id] = self._row_of(self._sets[set_id])
        return row

    # -- nodes: the expression, equal subexpressions joined

    def _add_nodes(self, lang: Lang) -> int:
        numbers: dict[int, int] = {}                    # by identity of the expression
        stack = [(lang, False)]
        while stack:
            node, is_ready = stack.pop()
            if id(node) in numbers:
                continue
            if not is_ready:
                stack.append((node, True))
                stack.extend((part, False) for part in node.parts if id(part) not in numbers)
                continue
            parts = [numbers[id(part)] for part in node.parts]
            if node.kind == "seq":                      # pairs of first part and rest, so that equal rests are one node
                number = parts.pop()
                while parts:
                    first = parts.pop()
                    is_nullable = self._nullables[first] and self._nullables[number]
                    number = self._add_node("seq", (), (first, number), is_nullable)
            else:
                number = self._add_node(node.kind, node.value, tuple(parts), node.nullable)
            numbers[id(node)] = number
        self._node_ids.clear()
        return numbers[id(lang)]

    def _add_node(self, kind: str, value: int | bytes | tuple, parts: tuple[int, ...], is_nullable: bool) -> int:
        key = kind, value, parts, is_nullable
        number = self._node_ids.get(key)
        if number is not None:
            return number
        number = self._node_ids[key] = len(self._kinds)
        depth = max((self._depths[part] for part in parts), default=0) + (kind in PRODUCTS)
        if depth > MAX_NESTED_PRODUCTS:
            raise GrammarTooLarge(f"intersections and differences nested {depth} deep; the limit is "
                                  f"{MAX_NESTED_PRODUCTS}: write the grammar flatter")
        self._depths.append(depth)
        self._kinds.append(kind)
        self._values.append(value)
        self._parts.append(parts)
        self._nullables.append(is_nullable)
        if kind == "repeat":                            # the counts are the position: equal rests are equal terms
            start = self._families.setdefault(parts, number), value
        elif kind == "residues":
            start = self._families.setdefault(("residues", *parts), number), value
        else:
            start = number, 0 if kind == "text" else (0, len(value), 0) if kind == "words" else None
        self._starts.append(start)
        self._spend(COST_OF_TERM + len(parts))
        return number

    # -- terms

    def _term(self, node: int, position: object, tail: int) -> int:
        kind = self._kinds[node]
        if (kind == "repeat" and position[1] == 0) or (kind == "text" and not self._values[node]):
            return tail
        key = node, position, tail
        term = self._term_ids.get(key)
        if term is None:
            self._spend(COST_OF_TERM)
            accepts = self._accepts[tail] and self._may_end(node, position)     # makes terms of its own for a product
            term = self._term_ids[key] = len(self._terms)
            self._terms.append(key)
            self._steps.append(None)
            self._accepts.append(accepts)
        return term

    def _may_end(self, node: int, position: object) -> bool:
        """Whether the rest of the node from this position on can be empty."""
        kind = self._kinds[node]
        if kind == "repeat":
            return position[0] == 0
        if kind == "words":
            return len(self._values[node][position[0]]) == position[2]
        if kind == "residues":
            return self._nullables[self._parts[node][position]]
        if kind in PRODUCTS and position is not None:
            accepts = self._set_accepts
            if kind == "both":
                return all(accepts[part] for part in position)
            if kind == "but_not":
                return accepts[position[0]] and (position[1] == NO_SET or not accepts[position[1]])
            return any(accepts[part] for part in self._through_marks(position[0]))
        return self._nullables[node]

    def _steps_of(self, term: int) -> Row:
        """(mask, term) of each byte step; masks may overlap."""
        steps = self._steps[term]
        if steps is None:
            steps = []
            at = term
            while at != END:
                if at != term and self._steps[at] is not None:
                    steps += self._steps[at]
                    break
                node, position, tail = self._terms[at]
                if self._kinds[node] == "text":         # most terms are
                    self._expand_text(node, position, tail, steps)
                    break
                self._expand(node, position, tail, steps)
                if not self._may_end(node, position):
                    break
                at = tail
            self._steps[term] = steps
            self._spend(COST_OF_STEP * len(steps) + 1)
        return steps

    def _expand(self, node: int, position: object, tail: int, steps: Row) -> None:
        """Adds the steps that consume a byte inside the node."""
        kinds, values, parts, starts, term = self._kinds, self._values, self._parts, self._starts, self._term
        stack = [(node, position, tail)]
        while stack:
            node, position, tail = stack.pop()
            kind = kinds[node]
            if kind == "text":
                if values[node]:
                    self._expand_text(node, position, tail, steps)
            elif kind == "bytes":
                if values[node]:
                    steps.append((values[node], tail))
            elif kind == "words":
                self._expand_words(node, position, tail, steps)
            elif kind == "seq":
                first, rest = parts[node]
                stack.append((*starts[first], term(*starts[rest], tail)))
                if self._nullables[first]:
                    stack.append((*starts[rest], tail))
            elif kind == "alt":
                stack.extend((*starts[part], tail) for part in parts[node])
                self._spend(len(parts[node]))
            elif kind == "repeat":
                low, high = position
                rest = term(node, (max(low - 1, 0), None if high is None else high - 1), tail)
                stack.append((*starts[parts[node][0]], rest))
            elif kind == "residues":
                modulus = len(parts[node])
                for digit in range(10):
                    steps.append((1 << 48 + digit, term(node, (position * 10 + digit) % modulus, tail)))
                stack.append((*starts[parts[node][position]], tail))
            else:
                if position is None:
                    position = tuple(self._set_of(term(*starts[part], END)) for part in parts[node])
                for mask, sets in self._product_row(kind, position):
                    rest = self._product(node, sets, tail)
                    if rest is not None:
                        steps.append((mask, rest))

    def _expand_text(self, node: int, position: int, tail: int, steps: Row) -> None:
        data = self._values[node]
        rest = tail if position + 1 == len(data) else self._term(node, position + 1, tail)
        steps.append((1 << data[position], rest))

    def _expand_words(self, node: int, position: tuple[int, int, int], tail: int, steps: Row) -> None:
        """Position (first, end, depth): the sorted words from first to end agree in their first `depth` bytes."""
        words = self._values[node]
        first, end, depth = position
        if len(words[first]) == depth:
            first += 1
        while first < end:
            byte = words[first][depth]
            above = end if end == first + 1 else bisect_right(words, byte, first, end, key=itemgetter(depth))
            is_last = above == first + 1 and len(words[first]) == depth + 1
            steps.append((1 << byte, tail if is_last else self._term(node, (first, above, depth + 1), tail)))
            first = above

    # -- products

    def _product(self, node: int, sets: tuple[int, ...], tail: int) -> int | None:
        """The term of a product at these sets; None where it plainly cannot match any more."""
        kind = self._kinds[node]
        if kind == "both" and END in sets:
            return tail if all(self._set_accepts[part] for part in sets) else None
        if kind == "but_not" and sets[0] == END:
            return None if sets[1] != NO_SET and self._set_accepts[sets[1]] else tail
        if kind == "unmarked" and sets[0] == END:
            return tail
        return self._term(node, sets, tail)

    def _product_row(self, kind: str, sets: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        if kind == "unmarked":
            found = []
            for part in self._through_marks(sets[0]):
                found += [(mask & BYTE_MASK, (rest,)) for mask, rest in self.row(part) if mask & BYTE_MASK]
        elif kind == "both":
            found = [(mask, (rest,)) for mask, rest in self.row(sets[0])]
            for part in sets[1:]:
                row = self.row(part)
                self._spend(len(found) * len(row))
                found = [(mask & other, (*rests, rest)) for mask, rests in found for other, rest in row if mask & other]
        else:
            found = []
            excluded = self.row(sets[1]) if sets[1] != NO_SET else []
            self._spend(len(self.row(sets[0])) * len(excluded))
            for mask, rest in self.row(sets[0]):
                for other, other_rest in excluded:
                    if mask & other:
                        found.append((mask & other, (rest, other_rest)))
                        mask &= ~other
                if mask:
                    found.append((mask, (rest, NO_SET)))
        self._spend(len(found))
        return found

    def _through_marks(self, set_id: int) -> list[int]:
        """The sets reached from this one over marks alone, itself included."""
        found = [set_id]
        for at in found:                                # grows while it is read
            found += [rest for mask, rest in self.row(at) if mask > BYTE_MASK and rest not in found]
        self._spend(len(found))
        return found

    # -- sets

    def _set_of(self, terms: int | tuple[int, ...]) -> int:
        """The number of a set: one term, or a sorted tuple of several."""
        set_id = self._set_ids.get(terms)
        if set_id is None:
            set_id = self._set_ids[terms] = len(self._sets)
            members = (terms,) if isinstance(terms, int) else terms
            self._spend(COST_OF_SET + len(members))
            self._sets.append(members)
            self._rows.append(None)
            self._set_accepts.append(any(self._accepts[term] for term in members))
        return set_id

    def _row_of(self, terms: tuple[int, ...]) -> Row:
        if len(terms) == 1:
            steps = self._steps_of(terms[0])
            if len(steps) < 2:
                return [(mask, self._set_of(rest)) for mask, rest in steps]
            row = self._row_of_disjoint(steps)
            if row is not None:
                return row
        by_mask: dict[int, list[int]] = {}
        num_steps = 0
        for term in terms:
            steps = self._steps[term]
            if steps is None:
                steps = self._steps_of(term)
            num_steps += len(steps)
            for mask, rest in steps:
                if mask in by_mask:
                    by_mask[mask].append(rest)
                else:
                    by_mask[mask] = [rest]
        union, are_disjoint = 0, True
        for mask in by_mask:
            are_disjoint = are_disjoint and not union & mask
            union |= mask
        masks, set_ids = dict[int, int](), self._set_ids
        for mask, rests in by_mask.items() if are_disjoint else self._disjoint(by_mask):
            if len(rests) == 1 or len(unique := set(rests)) == 1:
                set_id = set_ids.get(rests[0])
                if set_id is None:
                    set_id = self._set_of(rests[0])
            else:
                set_id = self._set_of(tuple(sorted(unique)))
            masks[set_id] = masks[set_id] | mask if set_id in masks else mask
            num_steps += len(rests)
        self._spend(num_steps + 4)
        return [(mask, set_id) for set_id, mask in masks.items()]

    def _row_of_disjoint(self, steps: Row) -> Row | None:
        """The row of steps whose masks are disjoint, as most are; None for others."""
        union = 0
        for mask, _ in steps:
            if union & mask:
                return None
            union |= mask
        masks, set_ids = dict[int, int](), self._set_ids
        for mask, rest in steps:
            set_id = set_ids.get(rest)
            if set_id is None:
                set_id = self._set_of(rest)
            masks[set_id] = masks[set_id] | mask if set_id in masks else mask
        self._spend(2 * len(steps) + 4)
        return [(mask, set_id) for set_id, mask in masks.items()]

    def _disjoint(self, by_mask: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
        """Splits overlapping masks into disjoint ones, each with all the terms it leads to."""
        pieces: list[tuple[int, list[int]]] = []
        for mask, rests in by_mask.items():
            split = []
            for other, other_rests in pieces:
                shared = other & mask
                if not shared:
                    split.append((other, other_rests))
                    continue
                if shared != other:
                    split.append((other ^ shared, other_rests))
                split.append((shared, other_rests + rests))
                self._spend(len(other_rests) + len(rests))
                mask ^= shared
            if mask:
                split.append((mask, rests))
            pieces = split
            self._spend(len(pieces))
        return pieces

    def _spend(self, work: int) -> None:
        self.work += work
        if self.work > self._max_work:
            raise GrammarTooLarge(f"building the automaton takes more than max_work={self._max_work:,} steps "
                                  f"(after {len(self._sets):,} state sets); use fewer alternatives that begin alike, "
                                  "smaller counts, or raise the limit")
