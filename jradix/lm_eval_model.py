"""The model `jradix` of EleutherAI's lm-evaluation-harness: the requests of a task as batches that share prefixes.

    python -m jradix.lm_eval_model --model jradix --model_args pretrained=demo,dtype=float32 --tasks arc_easy

is lm_eval's own command line with this model in it; releases of lm_eval that read entry points need no such help. In
Python, `import jradix.lm_eval_model` makes the name known to `lm_eval.simple_evaluate`, which also takes a `JradixLM`.
Tasks, prompts and metrics are lm_eval's alone; a request means what it means to lm_eval's `hf` model. Needs lm_eval:
`pip install "jradix[eval]"`.
"""
from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jradix.errors import RequestError, TokenizerError
from jradix.llm import LLM
from jradix.sampling_params import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError('jradix.lm_eval_model needs lm_eval: pip install "jradix[eval]"') from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger("jradix")

Pair = tuple[list[int], list[int]]     # token ids of a context and of its continuation
MAX_GEN_TOKS = 256                     # output tokens where neither task nor user says, as for lm_eval's `hf`
UNASKED_DEVICES = ("cuda", "cuda:0")
SCORING = SamplingParams(max_tokens=0)


@register_model("jradix")
class JradixLM(TemplateLM):
    """An `LLM` as lm_eval sees it: texts in, log-likelihoods and continuations out, in the order of the requests.

    All requests of one call are one batch, run in the order in which they share most: the examples of a few-shot
    prompt are computed once, and so is the question before its answers.

    Args:
      pretrained: model of `LLM` ("demo", a folder, a `.gguf` file, a hub id), or an open `LLM`, which is not closed.
      device: of `LLM`; "cuda" and "cuda:0" are None, the best there is: lm_eval's command line says so unasked.
      batch_size, max_batch_size: given by lm_eval and not used; `max_num_seqs` is what runs at once.
      llm_options: further arguments of `LLM`, by name.

    Attributes:
      llm: the model, its cache and its counts.
      tokenizer: the transformers tokenizer, whose chat template lm_eval reads.

    Raises:
      ValueError: an option that `LLM` does not have, or options beside an open `LLM`.
      JradixError: the model cannot be loaded.
    """

    def __init__(self, pretrained: str | LLM, *, device: str | None = None, batch_size: int | str | None = None,
                 max_batch_size: int | None = None, **llm_options: Any):
        super().__init__()
        if isinstance(pretrained, LLM):
            if llm_options or device is not None:
                raise ValueError(f"{next(iter(llm_options), 'device')} beside an open LLM: give it to that LLM")
            self.llm = pretrained
        else:
            known = inspect.signature(LLM).parameters
            unknown = sorted(set(llm_options) - set(known))
            if unknown:
                raise ValueError(f"model_args: unknown {unknown[0]!r}; expected pretrained and arguments of "
                                 f"jradix.LLM: {', '.join(name for name in known if name != 'model')}")
            self.llm = LLM(pretrained, device=None if device in UNASKED_DEVICES else device, **llm_options)
        self.tokenizer = self.llm.tokenizer.fast

    # -- facts that lm_eval asks for

    @property
    def max_length(self) -> int:
        """Tokens the model sees at most. `max_model_len` is one more: it also counts the last token, only predicted."""
        return self.llm.engine.longest_prompt(SCORING) - 1

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, or EOS where there is none. Raises TokenizerError."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise TokenizerError(f"{self.llm.tokenizer.name} has neither BOS nor EOS to stand for an empty context")

    @property
    def tokenizer_name(self) -> str:
        """Names lm_eval's cache of requests; differs for tokenizers that encode or render chats differently."""
        return f"{self.llm.model_name.replace('/', '__')}-{self.llm.tokenizer.fingerprint}"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text. Without a generation prompt, the last message is left open to be continued.

        Raises:
          TokenizerError: the model has no chat template.
          RequestError: the template refused these messages, for example a system message.
        """
        is_continued = {} if add_generation_prompt else {"continue_final_message": True}
        return self.llm.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt,
                                              template_kwargs=is_continued)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text. Special tokens are added as the tokenizer does by itself, unless that is said."""
        return self.llm.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    # -- work

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each token given as much before it as the model can see.

        Raises:
          RequestError: a text cannot be scored; the message names its index.
        """
        pairs: list[Pair] = []
        places: list[int] = []
        for place, request in enumerate(requests):
            windows = get_rolling_token_windows(self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                                                max_seq_len=self.max_length, context_len=1)
            pairs += map(make_disjoint_window, windows)
            places += [place] * (len(pairs) - len(places))
        totals = [0.0] * len(requests)
        for place, (logprob, _) in zip(places, self._score(pairs, places, disable_tqdm)):
            totals[place] += logprob
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop text or an end token of the model.

        A context that leaves no room for the output is cut from the left. Sampling parameters are those of the
        request; the rest comes from the model's `generation_config.json`.

        Raises:
          RequestError: a request cannot be served; the message names its index.
        """
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        num_cut = 0
        for place, request in enumerate(requests):
            context, gen_kwargs = request.args
            try:
                given = sampling_params(gen_kwargs, self.llm.tokenizer.special_tokens)
                ids = self.tok_encode(context) or [self.prefix_token_id]
            except ValueError as error:
                raise RequestError(f"request {place}: {error}") from error
            room = self.max_length - given.max_tokens
            if room < 1:
                raise RequestError(f"request {place}: max_gen_toks={given.max_tokens} leaves no room for a context in "
                                   f"the {self.max_length} tokens the model sees; lower it or raise max_model_len")
            num_cut += len(ids) > room
            prompts.append(ids[-room:])
            params.append(given)
        self._warn_of_cuts(num_cut, len(requests))
        texts = []
        for place, output in enumerate(self.llm.generate(prompts, params, progress=False if disable_tqdm else None)):
            if output.error is not None:
                raise RequestError(f"request {place}: {output.error}")
            texts.append(output.outputs[0].text)
        return texts

    def _loglikelihood_tokens(self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
                              disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self._score(pairs, range(len(pairs)), disable_tqdm)

    def _score(self, pairs: Sequence[Pair], places: Sequence[int], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """(log-probability, is the greedy output) of each continuation; `places` are the requests they belong to."""
        heads, tails = [], []
        num_cut = 0
        for place, (context, continuation) in zip(places, pairs):
            if not 1 <= len(continuation) <= self.max_length:
                raise RequestError(f"request {place}: continuation of {len(continuation)} tokens; expected 1 to "
                                   f"{self.max_length}, which is what the model sees at most")
            room = self.max_length + 1 - len(continuation)
            num_cut += len(context) > room
            heads.append(context[-room:])
            tails.append(continuation)
        self._warn_of_cuts(num_cut, len(pairs))
        scores = self.llm.score(heads, tails, progress=False if disable_tqdm else None)
        for place, score in zip(places, scores):
            if score.error is not None:
                raise RequestError(f"request {place}: {score.error}")
        return [(score.logprob, score.is_greedy) for score in scores]

    def _warn_of_cuts(self, num_cut: int, num_requests: int) -> None:
        if num_cut:
            logger.warning(f"{num_cut} of {num_requests} contexts were cut from the left to fit into the "
                           f"{self.max_length} tokens the model sees")


def sampling_params(gen_kwargs: Mapping[str, Any], special_tokens: Mapping[str, int]) -> SamplingParams:
    """Sampling parameters for lm_eval's `generation_kwargs`.

    Args:
      gen_kwargs: `until`, `max_gen_toks` or one of its other names, `do_sample`, and fields of `SamplingParams`. Greedy
        unless `do_sample` is true or a temperature is given without it.
      special_tokens: text and id of tokens that are left out of the output's text; among `until` they stop by id.

    Raises:
      ValueError: a name that is none of these, or a value outside its range.
    """
    given: dict[str, Any] = {**normalize_gen_kwargs(dict(gen_kwargs), default_max_gen_toks=MAX_GEN_TOKS)}
    until = [text for text in given.pop("until") if text]
    if not given.pop("do_sample"):
        given["temperature"] = 0.0
    return SamplingParams.from_dict({
        "max_tokens": given.pop("max_gen_toks"), "stop": until,
        "stop_token_ids": [special_tokens[text] for text in until if text in special_tokens], **given})


def main() -> None:
    """lm_eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
