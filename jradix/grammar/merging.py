"""Which states of an automaton are equal, as far as it is cheap to know: one pass backwards from the ends.

Where there are no cycles the result is the smallest automaton. States on cycles are compared inside their component
(two states are in one when each can reach the other) and components of a like shape with each other; what that misses
stays double, which costs space and nothing else.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator

from jradix.grammar.subsets import Row

MAX_VISITS = 200_000        # edges looked at while one component is refined; beyond it, it stays as it is


def representatives(rows: list[Row], accepting: list[bool]) -> list[int]:
    """For each state the one that stands for it. `rows`: (mask, state) of each way on, disjoint masks."""
    same_as = [-1] * len(rows)
    first_with: dict[tuple, tuple[int, ...]] = {}
    for component in _components(rows):
        if len(component) > 1:
            _merge_component(component, rows, accepting, same_as, first_with)
            continue
        state = component[0]
        row = rows[state]
        if any(target == state for _, target in row):
            own = _joined(row, lambda target, state=state: -1 if target == state else same_as[target])
            same_as[state] = first_with.setdefault((accepting[state], own), (state,))[0]
        key = accepting[state], _joined(row, same_as.__getitem__)
        if same_as[state] < 0:
            same_as[state] = first_with.setdefault(key, (state,))[0]
        elif same_as[state] == state:
            first_with.setdefault(key, (state,))
    return same_as


def _merge_component(component: list[int], rows: list[Row], accepting: list[bool], same_as: list[int],
                     first_with: dict[tuple, tuple[int, ...]]) -> None:
    label = _refined(component, rows, accepting, same_as)
    member = {number: state for state, number in reversed(label.items())}         # the first state of each class
    signatures = {number: (accepting[state], _joined(rows[state], lambda target: _target(target, label, same_as)))
                  for number, state in member.items()}
    shapes = {number: (accepts, sorted(mask for mask, _ in row)) for number, (accepts, row) in signatures.items()}
    order = [min(shapes, key=lambda number: (shapes[number], member[number]))]
    place = {order[0]: 0}
    shape = []                                      # the component seen from one class: equal for equal components
    for number in order:                            # grows while it is read
        accepts, row = signatures[number]
        seen = []
        for mask, target in sorted(row):
            if target < 0:
                if ~target not in place:
                    place[~target] = len(order)
                    order.append(~target)
                target = ~place[~target]
            seen.append((mask, target))
        shape.append((accepts, tuple(seen)))
    kept = first_with.setdefault(tuple(shape), tuple(member[number] for number in order))
    for state in component:
        same_as[state] = kept[place[label[state]]]
    for state in kept if kept[0] == member[order[0]] else ():       # a state before the cycle can equal one on it
        first_with.setdefault((accepting[state], _joined(rows[state], same_as.__getitem__)), (state,))


def _refined(component: list[int], rows: list[Row], accepting: list[bool], same_as: list[int]) -> dict[int, int]:
    """State -> class inside the component: classes are split until the states of each have the same row of classes."""
    label = {state: int(accepting[state]) for state in component}
    num_classes, visits = len(set(label.values())), 0
    cost = sum(len(rows[state]) for state in component)
    while True:
        visits += cost
        if visits > MAX_VISITS:
            return {state: number for number, state in enumerate(component)}
        numbers: dict[tuple, int] = {}
        finer = {}
        for state in component:
            row = _joined(rows[state], lambda target, label=label: _target(target, label, same_as))
            finer[state] = numbers.setdefault((label[state], row), len(numbers))
        label = finer
        if len(numbers) == num_classes:
            return label
        num_classes = len(numbers)


def _target(state: int, label: dict[int, int], same_as: list[int]) -> int:
    """A class of the component as ~number, a state outside it as its representative."""
    return ~label[state] if state in label else same_as[state]


def _joined(row: Row, name: Callable[[int], int]) -> frozenset[tuple[int, int]]:
    """(mask, name of the target), one mask for each name."""
    if len(row) == 1:
        return frozenset(((row[0][0], name(row[0][1])),))
    masks: dict[int, int] = {}
    for mask, target in row:
        target = name(target)
        masks[target] = masks.get(target, 0) | mask
    return frozenset((mask, target) for target, mask in masks.items())


def _components(rows: list[Row]) -> Iterator[list[int]]:
    """Strongly connected components reachable from state 0, each after all it leads to (Tarjan, without recursion)."""
    index = [-1] * len(rows)
    low = [0] * len(rows)
    is_open = [False] * len(rows)
    opened: list[int] = []
    count = 0
    stack = [(0, iter(rows[0]))]
    index[0], is_open[0] = 0, True
    opened.append(0)
    while stack:
        state, ways = stack[-1]
        for _, target in ways:
            if index[target] < 0:
                count += 1
                index[target] = low[target] = count
                is_open[target] = True
                opened.append(target)
                stack.append((target, iter(rows[target])))
                break
            if is_open[target]:
                low[state] = min(low[state], index[target])
        else:
            stack.pop()
            if stack:
                before = stack[-1][0]
                low[before] = min(low[before], low[state])
            if low[state] == index[state]:
                component = []
                while not component or component[-1] != state:
                    component.append(opened.pop())
                    is_open[component[-1]] = False
                yield component[::-1]
