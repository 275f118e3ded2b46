"""What a batch file will share when it runs, and what keeps it from sharing more. Nothing is run, no weights are read.

With a model, prompts are counted by its tokenizer and chat template. Without one by an approximation: a token is a
word of up to eight letters with the space before it, a digit, a run of signs or of white space; a chat message costs
three tokens more, chat_template_kwargs nothing.

Prompts share within their `cache_namespace` only. Lines with cache=false or prompt_logprobs read no cache and count as
computed in full; what the latter leave to others is not counted.

Memory is 4 bytes for each prompt token, up to four times that while variable parts are looked for. At most
`MAX_PROMPT_TOKENS` are read; the report says how many lines were left out.
"""
from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jradix.batch_line import BatchRequest, LineError
from jradix.errors import RequestError, TokenizerError
from jradix.model_files import DEMO, HUB_FILES, HUB_IGNORED, resolve
from jradix.request_file import RequestFile
from jradix.sched.order import PrefixNode, prefix_trie
from jradix.tokenizer import Tokenizer
from jradix.tools import with_argument_objects
from jradix.variable_parts import Sharing, VariablePart, find_variable_parts

MAX_PROMPT_TOKENS = 2**27
LISTED = 8
MALFORMED_LISTED = 20
EXCERPT_CHARACTERS = 56
LISTED_FROM = 0.005     # of the prompt tokens a shared prefix has to save to be listed
TAIL_TOKENS = 24
APPROXIMATION = "approximate (no --model given: words, digits and signs are counted)"
_HUB_ID = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
_PIECE = re.compile(r" ?[^\W\d_]{1,8}|\d| ?(?:[^\w\s]|_)+|\s+")


@dataclass
class SharedPrefix:
    """A prefix at which prompts part.

    Attributes:
      num_prompts, num_tokens: how many prompts begin with it, and its length.
      num_saved_tokens: prompt tokens reused because of what it adds to the shared prefix it continues.
      line: the first line that begins with it.
      ends_with: its last words.
    """
    num_prompts: int
    num_tokens: int
    num_saved_tokens: int
    line: int
    ends_with: str


@dataclass
class VariablePartLines:
    """A `VariablePart` in terms of the file. Attributes as there; `lines` and `texts` are its two examples."""
    kind: str
    num_prompts: int
    num_lost_tokens: int
    lines: tuple[int, int]
    texts: tuple[str, str]
    followed_by: str


@dataclass
class LintReport:
    """What `jradix lint` found; `--json` prints these fields as one object. Fractions are of all prompt tokens.

    Attributes:
      input: the file.
      tokenizer: whose tokens these are.
      is_approximate: no model was given.
      page_size: tokens per KV page.
      lines, blank: lines of the file, and those without content.
      malformed: lines that would become an error record.
      first_malformed: (line, reason) of the first of them.
      left_out: lines that were not looked at, because `MAX_PROMPT_TOKENS` were reached.
      prompts, prompt_tokens: what could be read.
      uncached: prompts among them that read no cache.
      longest_prompt_tokens, longest_prompt_pages: of the longest prompt.
      computed_tokens: prompt tokens that have to be computed, each distinct prefix once.
      reuse: the fraction that is reused, token by token.
      whole_page_reuse: the fraction an engine reuses that shares whole pages only.
      shared_prefixes: those that save most, first.
      variable_parts: those that cost most, first.
      computed_tokens_after_moving, reuse_after_moving: the same figures with these parts behind the shared text.
    """
    input: str
    tokenizer: str
    is_approximate: bool
    page_size: int
    lines: int = 0
    blank: int = 0
    malformed: int = 0
    first_malformed: list[tuple[int, str]] = field(default_factory=list)
    left_out: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    uncached: int = 0
    longest_prompt_tokens: int = 0
    longest_prompt_pages: int = 0
    computed_tokens: int = 0
    reuse: float = 0.0
    whole_page_reuse: float = 0.0
    shared_prefixes: list[SharedPrefix] = field(default_factory=list)
    variable_parts: list[VariablePartLines] = field(default_factory=list)
    computed_tokens_after_moving: int = 0
    reuse_after_moving: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        def row(label: str, value: str, note: str = "") -> str:
            return f"{label:<22}{value:>14}" + (f"   {note}" if note else "")

        text = [f"{self.input}: {self.prompts:,} prompts, {self.malformed:,} malformed and {self.blank:,} blank lines",
                f"tokens: {self.tokenizer}", "",
                row("prompt tokens", f"{self.prompt_tokens:,}",
                    f"the longest prompt has {self.longest_prompt_tokens:,} ({self.longest_prompt_pages:,} pages of "
                    f"{self.page_size})"),
                row("computed", f"{self.computed_tokens:,}", "each distinct prefix once"),
                row("reuse", f"{self.reuse:.1%}"),
                row("in whole pages", f"{self.whole_page_reuse:.1%}",
                    f"what an engine reuses that shares only full pages of {self.page_size} tokens")]
        if self.uncached:
            text.append(row("read no cache", f"{self.uncached:,}", "prompts with cache=false or prompt_logprobs"))
        if self.shared_prefixes:
            text += ["", "shared prefixes", f"{'prompts':>10}{'tokens':>10}{'saved':>12}   first line, last words"]
            text += [f"{p.num_prompts:>10,}{p.num_tokens:>10,}{p.num_saved_tokens:>12,}   line {p.line}: "
                     f"{_excerpt(p.ends_with, is_end=True)}" for p in self.shared_prefixes]
        text += ["", "variable parts in front of shared text" + ("" if self.variable_parts else ": none found")]
        for number, part in enumerate(self.variable_parts[:LISTED], 1):
            text.append(f"  {number}. {part.kind}: {part.num_prompts:,} prompts, {part.num_lost_tokens:,} tokens lost")
            text += [f"{f'line {line}':>14}  {_excerpt(shown)}" for line, shown in zip(part.lines, part.texts)]
            text.append(f"{'before':>14}  {_excerpt(part.followed_by)}")
        if len(self.variable_parts) > LISTED:
            text.append(f"  and {len(self.variable_parts) - LISTED:,} more")
        if self.variable_parts:
            text.append(f"reuse after moving them behind the shared text: {self.reuse_after_moving:.1%}, now "
                        f"{self.reuse:.1%}")
        if self.malformed:
            text += ["", "malformed lines", *(f"  line {line}: {reason}" for line, reason in self.first_malformed)]
            if self.malformed > len(self.first_malformed):
                text.append(f"  and {self.malformed - len(self.first_malformed):,} more")
        if self.left_out:
            text += ["", f"{self.left_out:,} lines at the end were left out: the lines before them already hold "
                         f"{self.prompt_tokens:,} prompt tokens"]
        return "\n".join(text)


def lint_file(path: str | os.PathLike[str], *, model: str | None = None, page_size: int = 16) -> LintReport:
    """Looks at a file of request lines as `jradix run` would read it.

    Args:
      path: request lines.
      model: whose tokenizer to use: folder, GGUF file, hub id or "demo"; a folder with only tokenizer files will do.
        None: the approximation described above.
      page_size: tokens per KV page.

    Raises:
      BatchFileError: the file cannot be read.
      TokenizerError, CheckpointError: the model's tokenizer cannot be loaded.
      ValueError: page_size is not positive.
    """
    if page_size < 1:
        raise ValueError(f"page_size={page_size}: expected a positive number of tokens")
    with RequestFile(path) as requests:
        tokens = _ApproximateTokens() if model is None else _ModelTokens(load_tokenizer(model), model)
        requests.scan()
        report = LintReport(os.fspath(path), tokens.description, model is None, page_size, requests.num_lines,
                            requests.num_blank)
        groups = _read_prompts(requests, tokens, report)
    report.longest_prompt_pages = -(-report.longest_prompt_tokens // page_size)
    report.computed_tokens_after_moving = report.computed_tokens      # so far those of lines that read no cache
    num_whole_page_tokens = 0
    for prompts, lines in groups:
        sharing = Sharing.of(prompts)
        whole_pages = np.minimum(sharing.shared, [len(prompts[i]) - 1 for i in sharing.order]) // page_size
        num_whole_page_tokens += int(whole_pages.sum()) * page_size
        report.shared_prefixes += _shared_prefixes(prompts, lines, sharing, tokens, LISTED_FROM * report.prompt_tokens)
        parts, moved = find_variable_parts(prompts, tokens)
        report.variable_parts += [_in_lines(part, lines) for part in parts]
        report.computed_tokens += sharing.num_computed
        report.computed_tokens_after_moving += moved.num_computed
    report.shared_prefixes.sort(key=lambda prefix: -prefix.num_saved_tokens)
    del report.shared_prefixes[LISTED:]
    report.variable_parts.sort(key=lambda part: -part.num_lost_tokens)
    if report.prompt_tokens:
        report.reuse = 1 - report.computed_tokens / report.prompt_tokens
        report.whole_page_reuse = num_whole_page_tokens / report.prompt_tokens
        report.reuse_after_moving = 1 - report.computed_tokens_after_moving / report.prompt_tokens
    return report


class _ModelTokens:
    """Prompts in the tokens of a model."""

    def __init__(self, tokenizer: Tokenizer, model: str) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self.description = f"of {model} (its tokenizer and chat template)"

    def encode(self, request: BatchRequest) -> list[int]:
        if request.messages is not None:
            return self._tokenizer.apply_chat_template(with_argument_objects(request.messages),
                                                       template_kwargs=request.template_kwargs)
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt)
        if (highest := max(request.prompt)) >= self._tokenizer.vocab_size:
            raise RequestError(f"token id {highest} is outside the vocabulary of {self._tokenizer.vocab_size}")
        return request.prompt

    def token_text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._tokenizer.token_text(token_id)
        return self._texts[token_id]

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class _ApproximateTokens:
    """Prompts in pieces of text, numbered as they appear."""
    description = APPROXIMATION

    def __init__(self) -> None:
        self._ids: collections.defaultdict[str | int, int] = collections.defaultdict()
        self._ids.default_factory = self._ids.__len__
        self._pieces: list[str | int] = []

    def encode(self, request: BatchRequest) -> list[int]:
        if request.messages is None:
            prompt = request.prompt
            return [self._ids[piece] for piece in (_PIECE.findall(prompt) if isinstance(prompt, str) else prompt)]
        ids = []
        for message in [*request.messages, {"role": "assistant"}]:
            content = message.get("content")
            text = content if isinstance(content, str) else json.dumps(content) if content is not None else ""
            ids += [self._ids[piece] for piece in ("<|", str(message.get("role")), "|>\n", *_PIECE.findall(text))]
        return ids

    def token_text(self, token_id: int) -> str:
        if len(self._pieces) != len(self._ids):
            self._pieces = list(self._ids)
        piece = self._pieces[token_id]
        return piece if isinstance(piece, str) else f"<{piece}>"

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.token_text, token_ids))


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model; of a hub id no weights are downloaded.

    Raises:
      TokenizerError, CheckpointError: there is none, or it cannot be loaded.
    """
    path = Path(model).expanduser()
    if model.strip() and path.is_dir():
        return Tokenizer.from_folder(path)
    if path.is_file() or model == DEMO or model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        return Tokenizer.from_gguf(resolve(model).path)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise TokenizerError(f"model={model!r}: no such folder or file here, and the hub needs the package "
                             "huggingface_hub: `pip install huggingface_hub`") from error
    try:
        folder = snapshot_download(model, allow_patterns=[name for name in HUB_FILES if name != "*.safetensors"],
                                   ignore_patterns=list(HUB_IGNORED))
    except (HfHubHTTPError, OSError) as error:     # OSError: not cached here, and no network
        raise TokenizerError(f"model={model!r}: no such folder or file here (looked at {path.absolute()}), and as a "
                             f"hub id its tokenizer cannot be had: {error}. Check the spelling, go online once, or "
                             "leave --model out for approximate figures") from error
    return Tokenizer.from_folder(folder)


def _read_prompts(requests: RequestFile, tokens: _ModelTokens | _ApproximateTokens, report: LintReport
                  ) -> list[tuple[list[np.ndarray], list[int]]]:
    """Token ids and line numbers of the prompts that can be read, by cache namespace; counts go to the report."""
    groups: dict[object, tuple[list[np.ndarray], list[int]]] = {}
    for line in requests.lines():
        if report.prompt_tokens >= MAX_PROMPT_TOKENS:
            report.left_out += 1
            continue
        try:
            request = requests.request(line, requests.read(line))
            ids = tokens.encode(request)
            if not ids:
                raise RequestError("the prompt is empty")
        except (LineError, RequestError, TokenizerError) as error:
            report.malformed += 1
            if len(report.first_malformed) < MALFORMED_LISTED:
                report.first_malformed.append((line, str(error)))
            continue
        report.prompts += 1
        report.prompt_tokens += len(ids)
        report.longest_prompt_tokens = max(report.longest_prompt_tokens, len(ids))
        if not request.params.cache or request.params.prompt_logprobs is not None:
            report.uncached += 1
            report.computed_tokens += len(ids)
            continue
        prompts, lines = groups.setdefault(request.params.cache_namespace, ([], []))
        prompts.append(np.array(ids, np.int32))
        lines.append(line)
    return list(groups.values())


def _in_lines(part: VariablePart, lines: Sequence[int]) -> VariablePartLines:
    (first, text), (other, other_text) = part.examples
    return VariablePartLines(part.kind, part.num_prompts, part.num_lost_tokens, (lines[first], lines[other]),
                             (text.strip(), other_text.strip()), part.followed_by)


def _shared_prefixes(prompts: Sequence[np.ndarray], lines: Sequence[int], sharing: Sharing,
                     tokens: _ModelTokens | _ApproximateTokens, least: float) -> list[SharedPrefix]:
    """The prefixes that save most, and more than `least` tokens."""
    found: list[tuple[int, PrefixNode]] = []
    stack = [(prefix_trie(prompts, sharing.order, sharing.shared), 0)]
    while stack:
        node, num_before = stack.pop()
        saved = (node.num_prompts - 1) * (node.num_tokens - num_before)
        if saved > least:
            found.append((saved, node))
        stack += [(child, node.num_tokens) for child in node.children]
    found.sort(key=lambda item: (-item[0], item[1].num_tokens))
    prefixes = []
    for saved, node in found[:LISTED]:
        first, below = len(prompts), [node]
        while below:
            part = below.pop()
            first = min([first, *part.ending])
            below += part.children
        tail = prompts[first][max(node.num_tokens - TAIL_TOKENS, 0):node.num_tokens]
        prefixes.append(SharedPrefix(node.num_prompts, node.num_tokens, saved, lines[first],
                                     tokens.text(tail.tolist())))
    return prefixes


def _excerpt(text: str, *, is_end: bool = False) -> str:
    """One line of it, quoted."""
    if len(text) > EXCERPT_CHARACTERS:
        text = "..." + text[-EXCERPT_CHARACTERS:] if is_end else text[:EXCERPT_CHARACTERS] + "..."
    return json.dumps(text, ensure_ascii=False)
