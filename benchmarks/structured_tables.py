"""Benchmark of the token tables on the host: time and size of automaton x vocabulary, and how much of a text is forced.

    python benchmarks/structured_tables.py [--model demo] [--repeats 5]

The languages are put together here and need neither schema nor regex. "forced" is the share of the canonical tokens of
random documents that a jump appends without a forward pass; each of them is compared with the tokenizer's. No device is
used. Bounds are judged by CPU time; the exit code is 1 when one does not hold or a forced token differs.
"""
from __future__ import annotations

import argparse
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple

from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.jump import canonical_forced_tokens
from jradix.grammar.language import Lang, alt, byte_set, chars, optional, repeat, seq, text
from jradix.grammar.token_dfa import build_token_tables
from jradix.grammar.vocabulary import Vocabulary, vocabulary_of
from jradix.model_files import resolve
from jradix.tokenizer import Tokenizer
from report import Watch, print_result, print_table, summarise

MAX_TABLES_S = 0.3              # CPU time of an automaton of about 1,000 states, forced tokens included
BOUNDED_STATES = 2_500          # larger ones are shown without a bound
DIGIT, HEX = byte_set(b"0123456789"), byte_set(b"0123456789abcdefABCDEF")
CHARACTER = alt(chars([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF)]),
                seq(text("\\"), alt(byte_set(b'"\\/bfnrt'), seq(text("u"), repeat(HEX, 4, 4)))))
INTEGER = seq(optional(text("-")), alt(text("0"), seq(byte_set(b"123456789"), repeat(DIGIT, 0, 14))))
NUMBER = seq(INTEGER, optional(seq(text("."), repeat(DIGIT, 1, 10))))


class Share(NamedTuple):
    """Canonical tokens of random documents: how many, how many of them forced, how many forced ones differ."""
    num_tokens: int
    num_forced: int
    num_wrong: int


def string(max_length: int | None) -> Lang:
    return seq(text('"'), repeat(CHARACTER, 0, max_length), text('"'))


def enum(*values: str) -> Lang:
    return alt(*(text(f'"{value}"') for value in values))


def record(separators: tuple[str, str], fields: dict[str, Lang]) -> Lang:
    comma, colon = separators
    return seq(text("{"), *(seq(text(f'{comma if n else ""}"{name}"{colon}'), value)
                            for n, (name, value) in enumerate(fields.items())), text("}"))


def product(separators: tuple[str, str]) -> Lang:
    """The product schema of the structured workload."""
    size = record(separators, dict(width=INTEGER, height=INTEGER, unit=enum("cm", "in")))
    tags = seq(text("["), string(12), repeat(seq(text(separators[0]), string(12)), 1, 3), text("]"))
    return record(separators, dict(name=string(24), category=enum("tool", "toy", "food", "book", "clothing"),
                                   price_cents=INTEGER, in_stock=alt(text("true"), text("false")), tags=tags,
                                   dimensions=size, rating=NUMBER, summary=string(60)))


LANGUAGES: dict[str, Callable[[], Lang]] = {
    "200 digits": lambda: repeat(DIGIT, 1, 200),
    "enum of 300": lambda: enum(*(f"value_{n}_{n * n % 97}" for n in range(300))),
    "two fields, unbounded": lambda: record((",", ":"), dict(a=string(None), b=NUMBER)),
    "product, compact": lambda: product((",", ":")),
    "product, spaced": lambda: product((", ", ": ")),
    "eight strings of 40": lambda: record((",", ":"), {f"field_{n}": string(40) for n in range(8)}),
    "string of 500": lambda: string(500),
}
TINY = ("200 digits", "enum of 300")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "default"), default="default")
    parser.add_argument("--model", default="demo", help="whose tokenizer to use; default: the demo model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--documents", type=int, default=100, help="random documents per language")
    options = parser.parse_args(argv)
    path = Path(resolve(options.model).path)
    tokenizer = Tokenizer.from_gguf(path) if path.suffix == ".gguf" else Tokenizer.from_folder(path)
    started = time.perf_counter()
    vocabulary = vocabulary_of(tokenizer)
    num_nodes = len(vocabulary.trie.byte)
    vocabulary_s = time.perf_counter() - started

    table: list[list[Any]] = [["", "states", "rows", "classes", "MB", "tables s", "jump s", "CPU s", "forced", "holds"]]
    lines = []
    for name in TINY if options.size == "tiny" else LANGUAGES:
        dfa = compile_language(LANGUAGES[name]())
        tables = build_token_tables(dfa, vocabulary)
        plain, jump, both = (timed(action, options.repeats) for action in (
            partial(build_token_tables, dfa, vocabulary, canonical=False),
            partial(canonical_forced_tokens, dfa, vocabulary), partial(build_token_tables, dfa, vocabulary)))
        share = forced_share(dfa, vocabulary, tables.forced_token.tolist(), options.documents)
        cpu = summarise(both.cpu_s)
        holds = None if dfa.num_states > BOUNDED_STATES else cpu.median <= MAX_TABLES_S
        num_classes = None if tables.next_state is None else tables.next_state.shape[1]
        table.append([name, dfa.num_states, tables.num_rows, num_classes, tables.nbytes / 1e6,
                      summarise(plain.wall_s).median, summarise(jump.wall_s).median, cpu.median,
                      share.num_forced / max(share.num_tokens, 1), holds])
        lines.append(dict(name=name, states=dfa.num_states, byte_classes=dfa.num_classes, rows=tables.num_rows,
                          classes=num_classes, bytes=tables.nbytes, tables_s=summarise(plain.wall_s),
                          jump_s=summarise(jump.wall_s), cpu_s=cpu, tokens=share.num_tokens, forced=share.num_forced,
                          wrong=share.num_wrong, holds=holds))
    num_wrong = sum(line["wrong"] for line in lines)
    all_hold = not num_wrong and all(line["holds"] is not False for line in lines)
    print_table("token tables", table, [
        f"vocabulary of {vocabulary.num_tokens:,} tokens, trie of {num_nodes:,} nodes in {vocabulary_s:.2f} s",
        "classes empty: transitions over bytes; CPU s: tables with forced tokens; bound "
        f"{MAX_TABLES_S} s up to {BOUNDED_STATES:,} states",
        f"forced tokens that are not the tokenizer's: {num_wrong}"])
    print_result("structured_tables", dict(tokenizer=tokenizer.name, vocabulary_s=vocabulary_s, rows=lines,
                                           all_hold=all_hold))
    return 0 if all_hold else 1


def timed(action: Callable[[], Any], repeats: int) -> Watch:
    watch = Watch()
    for _ in range(repeats):
        watch.start()
        action()
        watch.stop()
    return watch


def forced_share(dfa: Dfa, vocabulary: Vocabulary, forced: list[int], num_documents: int) -> Share:
    """Goes through the canonical tokens of random documents and compares the forced ones."""
    rng = random.Random(0)
    counts = [0, 0, 0]
    for _ in range(num_documents):
        document = random_document(dfa, rng)
        ids = vocabulary.encode(document.decode())
        pieces = [vocabulary.token_bytes[i] or b"" for i in ids]
        if b"".join(pieces) != document:
            continue        # a character that no token spells
        state = 0
        for i, piece in zip(ids, pieces):
            counts[0] += 1
            counts[1] += forced[state] >= 0
            counts[2] += forced[state] not in (-1, i)
            state = dfa.walk(state, piece)
    return Share(*counts)


def random_document(dfa: Dfa, rng: random.Random) -> bytes:
    """An accepted text of mostly letters and digits, whose strings end after a dozen characters."""
    state, found = 0, bytearray()
    while True:
        allowed = dfa.allowed_bytes(state)
        if dfa.accepting[state] and (not allowed or rng.random() < 0.1):
            return bytes(found)
        plain = [byte for byte in allowed if byte < 0x80 and (chr(byte).isalnum() or byte in b" .,-}]")]
        byte = ord('"') if ord('"') in allowed and rng.random() < 0.08 else rng.choice(
            plain if plain and rng.random() < 0.98 else list(allowed))
        found.append(byte)
        state = dfa.walk(state, bytes([byte]))


if __name__ == "__main__":
    sys.exit(main())
