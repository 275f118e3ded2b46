"""The tokenizer of a model: text to ids, ids to text, chat messages to ids. Wraps a transformers fast tokenizer.

Control tokens in user text stay text unless the caller says `safe=False`: the template alone may open or close a turn.
Incremental decoding is in `detokenizer.py`, reading a GGUF file in `gguf_tokenizer.py`. transformers is imported when
the first tokenizer is made, not with this module.
"""
from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jradix.errors import RequestError, TokenizerError
from jradix.gguf_header import read_gguf_header

if TYPE_CHECKING:
    import tokenizers
    import transformers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json",
                   "vocab.txt", "tokenizer_config.json")
# Classes that take tokenizer.json as it is written; for these no model class has to be looked up.
SERIALIZED_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Parameters of transformers' apply_chat_template that change what it returns instead of reaching the template.
RESERVED_TEMPLATE_KWARGS = frozenset({
    "conversation", "chat_template", "add_generation_prompt", "tokenize", "sanitize_control_tokens", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"})
PRIVATE_USE = range(0xE000, 0xF900, 2)
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text, ids and chat messages of one model.

    Attributes:
      fast: the transformers tokenizer.
      name: the model's name, used in messages.
    """

    def __init__(self, fast: transformers.PreTrainedTokenizerFast, *, name: str | None = None,
                 chat_template: str | Path | None = None, extra_eos_ids: Iterable[int] = ()) -> None:
        """Wraps `fast`; afterwards it belongs to this object and must not be changed.

        Args:
          fast: a transformers fast tokenizer.
          name: the model's name; None: what the tokenizer says.
          chat_template: Jinja text, or the Path of a file with it, in place of the model's own.
          extra_eos_ids: ids that end a turn beside the tokenizer's own end token.

        Raises:
          TokenizerError: the tokenizer has no fast backend, or the template file cannot be read.
        """
        self.name = name or fast.name_or_path or "tokenizer"
        if not fast.is_fast:
            raise TokenizerError(f"{self.name}: {type(fast).__name__} is a slow (pure Python) tokenizer; expected a "
                                 "fast one. Convert it and save tokenizer.json beside the model")
        if isinstance(chat_template, Path):
            try:
                chat_template = chat_template.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"chat template file {chat_template}: {error}; expected a readable Jinja file"
                                     ) from error
        if chat_template is not None:
            fast.chat_template = chat_template
        self.fast = fast
        self._backend: tokenizers.Tokenizer = fast.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        own = fast.eos_token_id
        own_ids = () if own is None else (own,) if isinstance(own, int) else tuple(own)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*own_ids, *extra_eos_ids)))
        self._literal: tuple[str, tokenizers.Tokenizer] | None = None

    @classmethod
    def from_folder(cls, path: str | Path, *, chat_template: str | Path | None = None) -> Tokenizer:
        """Loads the tokenizer files of a local folder (a Hugging Face model, or a checkpoint they were copied into).

        Raises:
          TokenizerError: the folder has no tokenizer, a broken one, or one without a fast version.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise TokenizerError(f"{folder}: not a folder; expected a local folder with tokenizer.json")
        if not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise TokenizerError(f"{folder} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); copy the "
                                 "model's tokenizer files into it, or give the tokenizer's folder separately")
        # The backend reports a broken file with a bare Exception, so look first.
        if (folder / "tokenizer.json").is_file() and "model" not in _read_json(folder / "tokenizer.json"):
            raise TokenizerError(f"{folder / 'tokenizer.json'} has no \"model\"; expected a serialized fast tokenizer")
        config = _read_json(folder / "tokenizer_config.json")
        declared = config.get("tokenizer_class")
        is_serialized = (folder / "tokenizer.json").is_file() and "auto_map" not in config and (
            declared in SERIALIZED_CLASSES or (declared is None and not (folder / "config.json").is_file()))
        import transformers
        loader = transformers.PreTrainedTokenizerFast if is_serialized else transformers.AutoTokenizer
        try:
            fast = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError) as error:
            raise TokenizerError(f"{folder}: transformers cannot load this tokenizer ({error}); expected the files of "
                                 "a fast tokenizer (tokenizer.json and tokenizer_config.json)") from error
        return cls(fast, name=folder.resolve().name, chat_template=chat_template)

    @classmethod
    def from_gguf(cls, path: str | Path, *, chat_template: str | Path | None = None) -> Tokenizer:
        """Builds the tokenizer a GGUF file describes in its metadata.

        Raises:
          CheckpointError: not a GGUF file, or a truncated one.
          TokenizerError: no tokenizer inside, or of a kind that is not supported.
        """
        from jradix.gguf_tokenizer import fast_tokenizer_from_metadata
        metadata = read_gguf_header(Path(path)).metadata
        fast, extra_eos_ids = fast_tokenizer_from_metadata(metadata, source=str(path))
        return cls(fast, name=metadata.get("general.name") or Path(path).stem, chat_template=chat_template,
                   extra_eos_ids=extra_eos_ids)

    def save(self, folder: str | Path) -> None:
        """Writes the files that `from_folder` and transformers read, the chat template included."""
        self.fast.save_pretrained(str(folder))

    # Text and ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Where the tokenizer adds BOS and the text already spells it, there is still exactly one.

        Special tokens spelled in `text` become their ids: a raw prompt is trusted, user text in a chat is not.

        Raises:
          RequestError: not a string, or a string that is no valid Unicode.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt is {type(text).__name__}; expected a string")
        ids = self._encode(self._backend, text, add_special_tokens)
        if add_special_tokens and self.adds_bos:
            repeated = 0
            while repeated + 1 < len(ids) and ids[repeated + 1] == self.bos_token_id:
                repeated += 1
            ids = ids[repeated:]
        return ids

    def encode_parts(self, parts: Sequence[tuple[str, bool]], *, add_special_tokens: bool = False,
                     is_continuation: bool = False) -> list[int]:
        """Ids of texts that follow each other, encoded as one text.

        Args:
          parts: (text, is_trusted): special tokens spelled in trusted text become their ids, in other text they stay
            text.
          add_special_tokens: those of the tokenizer, as in `encode`.
          is_continuation: the texts go on after others, so no space is put before the first word, as tokenizers of the
            SentencePiece kind do at the start of a text.

        Raises:
          RequestError: a text that is no valid Unicode.
        """
        joined = [("".join(text for text, _ in run), is_trusted)
                  for is_trusted, run in itertools.groupby(parts, key=lambda part: part[1])]
        untrusted = [text for text, is_trusted in joined if not is_trusted]
        backend = self._backend
        if any(self._marker_pattern.search(text) for text in untrusted):
            pair = _unused_pair([text for text, _ in joined])
            backend = self._literal_backend(pair)
            joined = [(text if is_trusted else self._break_marked(self._mark(text, pair), pair), is_trusted)
                      for text, is_trusted in joined]
        whole = "".join(text for text, _ in joined)
        if add_special_tokens:
            return self.encode(whole) if backend is self._backend else self._encode(backend, whole, True)
        if is_continuation and self._anchor is not None:
            text, before = self._anchor
            ids = self._encode(backend, text + whole, False)
            if ids[:len(before)] == before:
                return ids[len(before):]
        return self._encode(backend, whole, False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, spaces untouched. Bytes that are no UTF-8 become U+FFFD, and only those.

        (The byte fallback of SentencePiece would replace every byte of a run that ends inside a character.)
        """
        text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if "\ufffd" in text and self._has_byte_fallback:
            return self._decode_byte_runs(ids, skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The token's own text, with its leading space; U+FFFD stands for part of a character."""
        text = self.decode([token_id], skip_special_tokens=False)
        piece = self._backend.id_to_token(token_id) or ""
        return " " + text if piece.startswith("\u2581") and not text.startswith(" ") else text

    # Chat

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
                            template_kwargs: Mapping[str, Any] | None = None, safe: bool = True) -> list[int]:
        """Ids of a conversation, rendered with the model's own template. BOS is where the template puts it.

        Args:
          messages: dicts with "role" and "content"; content is a string or a list of {"type": "text", "text": ...}
            parts, which are joined.
          add_generation_prompt: open the assistant's turn at the end.
          template_kwargs: variables of the template, e.g. tools or a fixed date.
          safe: text of messages, tools and documents that spells an added token is encoded as text, never as that token
            (tokens of one character or of white space only are left alone). False: as transformers does it.

        Raises:
          TokenizerError: the model has no chat template.
          RequestError: malformed messages, or the template refused them; the message names the one at fault.
        """
        messages = self._checked(messages)
        kwargs = dict(template_kwargs or {})
        untrusted = [messages, kwargs.get("tools"), kwargs.get("documents")]
        if not safe or not any(self._marker_pattern.search(text) for text in _strings(untrusted)):
            return self._encode(self._backend, self._render(messages, add_generation_prompt, kwargs), False)
        pair = _unused_pair(untrusted)
        for key in ("tools", "documents"):
            if key in kwargs:
                kwargs[key] = self._mark(kwargs[key], pair)
        rendered = self._render(self._mark(messages, pair), add_generation_prompt, kwargs, pair)
        return self._encode(self._literal_backend(pair), self._break_marked(rendered, pair), False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
                    template_kwargs: Mapping[str, Any] | None = None) -> str:
        """The conversation as text; arguments and errors as in `apply_chat_template`."""
        return self._render(self._checked(messages), add_generation_prompt, dict(template_kwargs or {}))

    def markers_in(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Added tokens spelled inside `messages`, each once, in order of appearance."""
        return list(dict.fromkeys(match for text in _strings(self._checked_content(messages))
                                  for match in self._marker_pattern.findall(text)))

    # Facts

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self.fast.bos_token_id

    @cached_property
    def adds_bos(self) -> bool:
        """True when `encode` begins with BOS."""
        bos = self.bos_token_id
        return bos is not None and self._backend.encode("", add_special_tokens=True).ids[:1] == [bos]

    @cached_property
    def _anchor(self) -> tuple[str, list[int]] | None:
        """Text and its ids to encode before a text that goes on after others; None where that changes nothing."""
        alone, before, both = (self._backend.encode(text, add_special_tokens=False).ids for text in ("a", "\n", "\na"))
        is_changed = both[:len(before)] == before and both[len(before):] != alone
        return ("\n", before) if is_changed else None

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text and id of the tokens that `decode` leaves out by default."""
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def has_chat_template(self) -> bool:
        template = self.fast.chat_template
        return "default" in template if isinstance(template, dict) else bool(template)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits; equal for tokenizers that encode, decode and render chats alike."""
        facts = [self._backend.to_str(), self.fast.chat_template, self.fast.special_tokens_map, self.eos_token_ids]
        text = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    # Private

    def _encode(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt holds {text[error.start]!a} at character {error.start}, half of a surrogate "
                               "pair; expected valid Unicode text") from None
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any],
                pair: str = "") -> str:
        reserved = sorted(RESERVED_TEMPLATE_KWARGS.intersection(kwargs))
        if reserved:
            raise RequestError(f"template_kwargs holds {reserved[0]!r}, which never reaches the template; leave it out")
        import jinja2
        try:
            return self.fast.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False,
                                                 **kwargs)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"{self.name}: the chat template is not valid Jinja, line {error.lineno}: {error}"
                                 ) from error
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            said = str(error).translate(dict.fromkeys(map(ord, pair)))
            raise RequestError(f"{self.name}: the chat template refused these messages: {said}") from error

    def _checked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if not self.has_chat_template:
            raise TokenizerError(f"{self.name} has no chat template, so messages cannot be turned into a prompt: pass "
                                 "chat_template=..., or use generate() with a prompt you wrote yourself")
        return self._checked_content(messages)

    def _checked_content(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError(f"messages={messages!r}: expected a non-empty list of dicts with 'role' and 'content'")
        checked = []
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise RequestError(f"messages[{i}] is {type(message).__name__}; expected a dict with 'role' and "
                                   "'content'")
            if not isinstance(message.get("role"), str) or not message["role"]:
                raise RequestError(f"messages[{i}]: role={message.get('role')!r}; expected 'system', 'user', "
                                   "'assistant' or another role of the template")
            checked.append({**message, "content": _content_text(message, i)})
        return checked

    @cached_property
    def _markers(self) -> tuple[str, ...]:
        """Texts of added tokens, longest first; not single characters, which cannot be broken, nor white space."""
        texts = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        return tuple(sorted((t for t in texts if len(t) > 1 and not t.isspace()), key=lambda t: (-len(t), t)))

    @cached_property
    def _marker_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._markers)) or "(?!)")

    def _mark(self, value: Any, pair: str) -> Any:
        """Wraps each marker in every string of `value`. It stays whole, so that a template may still look for it."""
        if isinstance(value, str):
            return self._marker_pattern.sub(lambda found: f"{pair[0]}{found[0]}{pair[1]}", value)
        if isinstance(value, Mapping):
            return {key: self._mark(item, pair) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(item, pair) for item in value]
        return value

    def _break_marked(self, rendered: str, pair: str) -> str:
        """Puts a sentinel inside each wrapped marker, after the first character of any added token it contains."""
        marked = re.compile(f"{pair[0]}({self._marker_pattern.pattern}){pair[1]}")
        starts = re.compile(f"(?={self._marker_pattern.pattern})(.)", re.DOTALL)
        return marked.sub(lambda found: pair[0] + starts.sub(rf"\1{pair[0]}", found[1]) + pair[1], rendered)

    def _literal_backend(self, pair: str) -> tokenizers.Tokenizer:
        """A copy of the backend that splits its text at the sentinels and drops them.

        They are still there when added tokens are looked for, so that a broken marker is not found; and gone when the
        model sees the pieces, which it cannot join again. The rest of the text is encoded as always.
        """
        if self._literal is None or self._literal[0] != pair:
            from tokenizers import Regex, pre_tokenizers
            backend = copy.deepcopy(self._backend)
            own = backend.pre_tokenizer
            seen = [byte_level_text(c.encode()) for c in pair]
            if own is None or seen[0] not in "".join(piece for piece, _ in own.pre_tokenize_str(pair[0])):
                seen = list(pair)
            split = pre_tokenizers.Split(Regex("|".join(seen)), "removed")
            backend.pre_tokenizer = split if own is None else pre_tokenizers.Sequence([own, split])
            self._literal = pair, backend
        return self._literal[1]

    @cached_property
    def _has_byte_fallback(self) -> bool:
        return self._backend.decoder is not None and self._backend.decoder.decode(["<0x41>"]) == "A"

    def _decode_byte_runs(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        pieces: list[str] = []
        run = bytearray()
        for i in ids:
            piece = self._backend.id_to_token(i)
            if piece is None or (skip_special_tokens and i in self.special_ids):
                continue
            byte = BYTE_TOKEN.fullmatch(piece)
            if byte:
                run.append(int(byte[1], 16))
                continue
            if run:
                pieces.append(run.decode("utf-8", "replace"))
                run.clear()
            pieces.append(piece)
        if run:
            pieces.append(run.decode("utf-8", "replace"))
        return self._backend.decoder.decode(pieces)


def byte_level_text(data: bytes) -> str:
    """`data` in the alphabet of byte-level BPE, where each byte is one printable character (GPT-2's table)."""
    return data.decode("latin-1").translate(_BYTE_LEVEL)


def _byte_level_table() -> dict[int, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: 256 + n for n, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level_table()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file, {} if there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}; expected a readable JSON file. Copy it from the model again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _content_text(message: Mapping[str, Any], index: int) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"messages[{index}]: content is {type(content).__name__}; expected a string or a list of "
                           "text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"messages[{index}]: content part of type {kind!r}; only parts of type 'text' with a "
                               "'text' string are supported")
        texts.append(part["text"])
    return "".join(texts)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside nested lists and mappings, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _unused_pair(value: Any) -> str:
    """Two private-use characters that no string of `value` contains."""
    used = set().union(*map(set, _strings(value)))
    for code in PRIVATE_USE:
        pair = chr(code) + chr(code + 1)
        if used.isdisjoint(pair):
            return pair
    raise RequestError("the messages use the whole private area U+E000 to U+F8FF, so control tokens in them cannot be "
                       "told from the template's; remove them or pass safe=False")
