"""The LLM class: a model, its tokenizer and one engine behind generate, chat, stream and score."""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import sys
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jradix.calls import Steps, Turn, in_turn, iterated_call, whole_call
from jradix.config import EngineConfig, StepShapes
from jradix.grammar.book import GRAMMAR_STARTS
from jradix.engine import Engine
from jradix.errors import EngineError, RequestError, TokenizerError
from jradix.llm_cache import LLMCache
from jradix.loading import (end_token_ids, find_device, grammar_cache_folder, keep_compilations, load_tokenizer,
                            load_vocabulary)
from jradix.model_files import resolve
from jradix.outputs import RequestOutput, ScoreOutput, StreamDelta
from jradix.progress import ProgressBar
from jradix.runner.memory import plan_host_pages, plan_memory
from jradix.runner.runner import ModelRunner
from jradix.sampling_params import SamplingParams, read_response_format
from jradix.stats_table import Stats
from jradix.tool_turn import ToolPlan, ToolPrompt, answers_with_calls, plan_tools, tool_definitions
from jradix.tools import ToolSet, read_tools, with_argument_objects
from jradix.weights.dtype import kv_dtype, resolve_dtype
from jradix.weights.loader import load_config, load_generation_config, load_model, weights_fingerprint

if TYPE_CHECKING:
    from jradix.cache.node import Namespace
    from jradix.cache.prefix_cache import PrefixCache

logger = logging.getLogger("jradix")

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
BATCH_ORDERS = ("depth_first", "arrival")
ON_ERROR = ("record", "raise", "truncate_left", "truncate_right")
GENERATION_DEFAULTS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DEFAULT_MAX_NUM_SEQS = {"cpu": 64}
DEFAULT_CHUNK_TOKENS = {"cpu": 512}
DEFAULT_GRID_TOKENS = {"cpu": 64}


class LLM:
    """A language model that never computes the same prefix twice. Also a context manager.

    Threads may share it: calls that return lists run one after the other, iterators and `AsyncLLM` between their steps.

    Args:
      model: folder in Hugging Face format, `.gguf` file, folder written by `jradix convert`, hub id, or "demo".
      dtype: "float32", "bfloat16", "float16", or "auto": what is fastest on the device without losing range.
      page_size: tokens per KV page; None: 16.
      kv_cache_bytes: size of the KV pool; None: by `memory_fraction`. On CPUs its memory is taken as it is used.
      max_model_len: longest prompt plus output; None: the model's own limit, or the pool if that is smaller.
      max_num_seqs: requests that run at once; None: 64 on CPU, 256 elsewhere.
      prefill_chunk_tokens: prompt tokens per step; None: 512 on CPU, 2048 elsewhere.
      enable_prefix_caching: False computes every prompt from its first token.
      seed: of the random streams of requests without a seed of their own; None: not reproducible.
      tokenizer: folder or `.gguf` file to take the tokenizer from; None: the model's own.
      chat_template: Jinja text that replaces the model's chat template.
      revision: of a hub id.
      memory_fraction: share of the device's free memory to use; None: 0.5 on CPU (at most 2 GiB of KV), 0.9 elsewhere.
      device: "cpu", "gpu" or "tpu"; None: the best there is.
      batch_order: "depth_first" runs the prompts of one call in the order in which they share most; "arrival" as given.
        Results come in the order given, either way.
      eviction_policy: what leaves the cache first: "lru", "lfu" or "slru" (spares what was used again).
      min_ttl_s: prefixes used less than this many seconds ago are not evicted while an older one can be.
      max_wait_s: how long a request waits where only such young prefixes could make room for it.
      max_pinned_fraction: share of the KV pool that `cache.pin` may protect.
      host_cache_bytes: memory of the machine for KV that the device's pool has no room for; None: none.
      grammar_bytes: device memory for the tables of grammars in use; 0: no grammars.
      shared_attention: rows that share a prefix read its KV together where that pays.
      attention: implementation of the attention, one of `jradix.ops.attention.IMPLEMENTATIONS`; None: the first that
        serves the device.
      jump_decoding: tokens that a grammar leaves no choice about are not computed one by one. The tokens are the same.
      grammar_start: "tables": a request waits until its grammar is compiled; "matcher": for interactive use, it starts
        at once on a matcher where there is one, and its tokens may differ from those of later runs.
      grammar_workers: processes that compile grammars beside the engine; None: one less than the CPUs, at most 4; 0:
        grammars are compiled in this process and hold it up.
      grammar_cache_dir: where compiled grammars are kept between runs; "auto": a folder in the user's cache directory;
        None: nowhere.
      load_cache: folder written by `cache.save` to start from.
      deterministic: the same tokens give the same log-probabilities to the last bit, cold or warm, alone or in any
        batch, after preemption too. Prompts are computed in chunks of `prefill_chunk_tokens` (None: 64 on CPU, 256
        elsewhere), one a step; hits are multiples of that, and generated text is not shared until it is part of a
        prompt. No jumps and no shared attention then; dtype="auto" does not measure.
      decode_steps: decode steps in one device call while nothing waits for admission; 1: off.
      overlap: plan the next step while the device runs this one.
      use_generation_config: False ignores the model's `generation_config.json` and starts from neutral sampling.
      warmup: "none" compiles each shape when it is first needed, "full" compiles all at the start.
      compile_cache_dir: where compiled steps are kept between runs; "auto": JAX's own setting, else a folder in the
        user's cache directory; None: nowhere.
      progress: progress bars; None: only on an interactive terminal or in a notebook.
      quiet: print nothing (memory plan and sampling defaults otherwise go to stderr, a line each).

    Raises:
      UnsupportedModel, CheckpointError, TokenizerError: the model cannot be loaded.
      DeviceError: no such device, or the model does not fit.
      ValueError: a size outside its range.
    """

    def __init__(self, model: str | Path, *, dtype: str = "auto", page_size: int | None = None,
                 kv_cache_bytes: int | None = None, max_model_len: int | None = None, max_num_seqs: int | None = None,
                 prefill_chunk_tokens: int | None = None, enable_prefix_caching: bool = True, seed: int | None = 0,
                 tokenizer: str | Path | None = None, chat_template: str | None = None, revision: str | None = None,
                 memory_fraction: float | None = None, device: str | None = None, batch_order: str = "depth_first",
                 eviction_policy: str = "lru", min_ttl_s: float = 0.0, max_wait_s: float = 1.0,
                 max_pinned_fraction: float = 0.5, host_cache_bytes: int | None = None,
                 load_cache: str | Path | None = None, grammar_bytes: int = 64 * 2**20,
                 shared_attention: bool = True, attention: str | None = None,
                 jump_decoding: bool = True, grammar_start: str = "tables", grammar_workers: int | None = None,
                 grammar_cache_dir: str | Path | None = "auto", deterministic: bool = False, decode_steps: int = 1,
                 overlap: bool = True, use_generation_config: bool = True, warmup: str = "none",
                 compile_cache_dir: str | Path | None = "auto", progress: bool | None = None, quiet: bool = False):
        if warmup not in ("none", "full"):
            raise ValueError(f'warmup={warmup!r}: expected "none" or "full"')
        if grammar_start not in GRAMMAR_STARTS:
            raise ValueError(f"grammar_start={grammar_start!r}: expected one of {GRAMMAR_STARTS}")
        if deterministic and grammar_start == "matcher":
            raise ValueError('grammar_start="matcher" with deterministic=True: what follows a grammar would depend on '
                             'how fast it is compiled; leave grammar_start at "tables"')
        if batch_order not in BATCH_ORDERS:
            raise ValueError(f"batch_order={batch_order!r}: expected one of {BATCH_ORDERS}")
        files = resolve(str(model), revision=revision)
        model_config = load_config(files)
        self.tokenizer = load_tokenizer(files, tokenizer, chat_template)
        chosen = find_device(device)
        keep_compilations(compile_cache_dir)
        weight_dtype, reason = resolve_dtype(dtype, chosen, hidden=model_config.hidden_size,
                                             intermediate=model_config.intermediate_size,
                                             may_measure=not deterministic)
        pool_dtype = kv_dtype(weight_dtype, chosen)
        max_num_seqs = max_num_seqs or DEFAULT_MAX_NUM_SEQS.get(chosen.platform, 256)
        page_size = 16 if page_size is None else page_size
        if prefill_chunk_tokens is None:
            prefill_chunk_tokens = DEFAULT_CHUNK_TOKENS.get(chosen.platform, 2048)
            if deterministic:
                grid = DEFAULT_GRID_TOKENS.get(chosen.platform, 256)
                prefill_chunk_tokens = -(-grid // page_size) * page_size
        sizes = EngineConfig(page_size=page_size, max_num_seqs=max_num_seqs, prefill_chunk_tokens=prefill_chunk_tokens,
                             eviction_policy=eviction_policy, min_ttl_s=min_ttl_s, max_wait_s=max_wait_s,
                             max_pinned_fraction=max_pinned_fraction, grammar_bytes=grammar_bytes,
                             decode_steps=decode_steps, overlap=overlap, enable_prefix_caching=enable_prefix_caching,
                             jump_decoding=jump_decoding and not deterministic,
                             shared_attention=shared_attention and not deterministic, deterministic=deterministic)
        plan = plan_memory(
            model_config, device=chosen, weight_dtype=weight_dtype, kv_dtype=pool_dtype, page_size=page_size,
            max_num_seqs=max_num_seqs, step_tokens=StepShapes.for_engine(sizes).all()[-1].num_tokens,
            kv_cache_bytes=kv_cache_bytes, memory_fraction=memory_fraction, grammar_bytes=sizes.grammar_bytes)
        self._quiet, self._progress = quiet, progress
        self._say(plan.describe(files.name, f"{weight_dtype.name}, {reason}" if reason else weight_dtype.name,
                                pool_dtype.name))
        num_host_pages = 0
        if host_cache_bytes is not None:
            num_host_pages = plan_host_pages(model_config, plan, host_cache_bytes=host_cache_bytes, kv_dtype=pool_dtype)
        self.config = dataclasses.replace(
            sizes, num_pages=plan.num_pages, num_host_pages=num_host_pages,
            max_model_len=max_model_len or min(model_config.max_model_len, plan.num_pages * page_size))
        with self.progress_bar("loading", progress) as bar:
            weights = load_model(files, dtype=weight_dtype, device=chosen, progress=bar.update)
        generation = load_generation_config(files)
        eos_ids = end_token_ids(self.tokenizer.eos_token_ids, model_config.eos_token_ids, generation)
        self.end_token_ids = frozenset(eos_ids)
        vocabulary = load_vocabulary(self.tokenizer, model_config.vocab_size, eos_ids)
        runner = ModelRunner(weights, model_config, self.config, device=chosen, kv_dtype=pool_dtype,
                             num_valid_tokens=self.tokenizer.vocab_size, eos_ids=eos_ids,
                             token_bytes=vocabulary.token_bytes if vocabulary else None, implementation=attention)
        self.model_name = files.name
        self.memory_plan = plan
        weights_name = weights_fingerprint(files)
        way = (f"chunks of {prefill_chunk_tokens} tokens, {max_num_seqs} rows, attention {attention or 'by default'}"
               if deterministic else "")
        self.fingerprint = _digest(f"{weights_name} {self.tokenizer.fingerprint} {weight_dtype.name}{way}")
        self._identity = dict(
            weights=weights_name, config=_digest(repr(model_config)), tokenizer=self.tokenizer.fingerprint,
            weight_dtype=weight_dtype.name, kv_dtype=pool_dtype.name, page_size=page_size,
            num_layers=model_config.num_layers, num_kv_heads=model_config.num_kv_heads, head_dim=model_config.head_dim,
            groups=tuple(group.layers for group in model_config.kv_groups()),
            deterministic=way)
        self._runner = runner
        self.engine = Engine(
            runner, self.config, tokenizer=self.tokenizer,
            eos_ids=eos_ids, vocabulary=vocabulary, grammar_start=grammar_start, grammar_workers=grammar_workers,
            grammar_cache=grammar_cache_folder(grammar_cache_dir),
            generation_config=generation if use_generation_config else {}, seed=seed, model_name=self.fingerprint)
        defaults = {name: generation[name] for name in GENERATION_DEFAULTS if generation.get(name) is not None}
        if use_generation_config and defaults:
            self._say("sampling defaults of the model, where a request gives none: "
                      + ", ".join(f"{name}={value}" for name, value in defaults.items()))
        self.turn = Turn()
        self.cache = LLMCache(self)
        self._tool_plan: tuple[ToolSet, str | None, ToolPlan] | None = None       # the last one made
        self._batch_order = batch_order
        self._sinks: dict[str, Callable[[RequestOutput], None]] = {}
        if load_cache is not None:
            self.load_cache(Path(load_cache))
        if warmup == "full":
            self.warmup()

    # -- work

    @whole_call
    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None,
                 *, on_error: str = "record", progress: bool | None = None) -> Steps[list[RequestOutput]]:
        """Completes prompts; results come in the order of the prompts.

        Args:
          prompts: texts or lists of token ids; a single one is taken as a list of one.
          params: one for all prompts, or one each; None: the model's defaults.
          on_error: what a prompt that cannot be served becomes: "record": a result with `error`; "raise": one
            RequestError naming all bad prompts, before anything is computed; "truncate_left" or "truncate_right": a
            too long prompt loses tokens on that side, other faults are recorded.
          progress: overrides the LLM's own setting.

        Raises:
          RequestError: with on_error="raise".
          EngineError: the device failed. KeyboardInterrupt and EngineError carry `partial_results`: one entry per
            prompt, finished or cut off (finish_reason "abort"), None for a prompt that was not taken up.
        """
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error={on_error!r}: expected one of {ON_ERROR}")
        prompts = _as_list(prompts)
        requests = list(zip(prompts, _params_for(prompts, params)))
        return (yield from self._run_all(requests, on_error, progress))

    @whole_call
    def chat(self, messages: Messages | Sequence[Messages],
             params: SamplingParams | Sequence[SamplingParams] | None = None, *, add_generation_prompt: bool = True,
             template_kwargs: Mapping[str, Any] | None = None, response_format: Mapping[str, Any] | None = None,
             tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
             tool_choice: str | Mapping[str, Any] | None = None, parallel_tool_calls: bool | None = None,
             tool_format: str | None = None, on_error: str = "record", progress: bool | None = None
             ) -> Steps[list[RequestOutput]]:
        """Answers conversations, rendered with the model's own chat template.

        User text that spells a control token stays text. Arguments as `generate`.

        With `tools` the template shows them to the model, and a call that it writes has one of their names and
        arguments that fit. Calls are in `outputs[i].tool_calls`, finish_reason is then "tool_calls";
        `outputs[i].as_message()` is the message to append, followed by one of role "tool" for each call.

        Args:
          messages: a list of {"role", "content"}, or a list of such lists.
          template_kwargs: passed to the template.
          response_format: OpenAI's, for all conversations: {"type": "json_schema", "json_schema": {"schema": ...}} or
            {"type": "json_object"}.
          tools: for all conversations: OpenAI's {"type": "function", "function": {...}}, or Python functions, whose
            signature and docstring say the same.
          tool_choice: OpenAI's: "auto" (also None): text or calls; "none": text, not read for calls; "required": at
            least one call; {"type": "function", "function": {"name": ...}}: one call of that function.
          parallel_tool_calls: False: at most one call; None: as many as the model's format allows.
          tool_format: one of `jradix.tool_formats.FORMATS`: how calls are written, where the messages tell the model so
            and the template need not; None: what the template asks for.

        Raises:
          TokenizerError: the model has no chat template.
          RequestError: malformed tools, a tool whose arguments cannot be enforced, or a template that shows no tools.
        """
        self._check_open()
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error={on_error!r}: expected one of {ON_ERROR}")
        if not self.tokenizer.has_chat_template:
            self.tokenizer.apply_chat_template([{"role": "user", "content": ""}])     # raises what to do about it
        form = {} if response_format is None else read_response_format(response_format)
        tool_set = read_tools(tool_definitions(tools), tool_choice, parallel_tool_calls)
        if tool_set is None and tool_format is not None:
            raise RequestError(f"tool_format={tool_format!r} without tools: give `tools` as well, or leave it out")
        if tool_set is not None:
            self.plan_tools(tool_set, tool_format)      # raises what holds for all conversations
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        requests: list[tuple[Prompt | ToolPrompt | RequestError, SamplingParams | None]] = []
        for conversation, given in zip(conversations, _params_for(conversations, params)):
            if form:
                given = dataclasses.replace(given or SamplingParams(), **form)
            try:
                requests.append(self.chat_request(
                    conversation, given, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs,
                    tools=tool_set, tool_format=tool_format))
            except RequestError as error:
                requests.append((error, given))
        return (yield from self._run_all(requests, on_error, progress))

    @iterated_call
    def generate_iter(self, requests: Iterable[tuple[Prompt | ToolPrompt, SamplingParams | None]], *,
                      max_inflight: int | None = None, order_window: int = 1
                      ) -> Iterator[tuple[int, RequestOutput] | None]:
        """Completes a stream of requests: pulls them as room appears, yields (index, output) as each ends.

        A request that cannot be served is an output with `error`. Closing the iterator aborts what still runs.

        Args:
          requests: (prompt, params) pairs, read lazily; also what `chat_request` returns.
          max_inflight: requests open at once; None: 8 times max_num_seqs.
          order_window: requests pulled at a time and, with batch_order="depth_first", run in the order in which they
            share most; 1: as they come.
        """
        if max_inflight is None:
            max_inflight = 8 * self.config.max_num_seqs
        if max_inflight < 1:
            raise ValueError(f"max_inflight={max_inflight}: expected a positive integer")
        if order_window < 1:
            raise ValueError(f"order_window={order_window}: expected a positive integer")
        return self._iterate(iter(requests), max_inflight, order_window)

    @iterated_call
    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
               ) -> Iterator[StreamDelta | None]:
        """Completes prompts and yields each sample's new text as it appears, in whole characters.

        Closing the iterator aborts what still runs.
        """
        prompts = _as_list(prompts)
        pairs = list(zip(prompts, _params_for(prompts, params)))
        return self._stream(pairs)

    @whole_call
    def score(self, prompts: Prompt | Sequence[Prompt], completions: Prompt | Sequence[Prompt], *,
              progress: bool | None = None) -> Steps[list[ScoreOutput]]:
        """Log-probabilities of given completions. Reads the cache up to the token before each completion.

        Args:
          prompts: one for all completions, or one each.
          completions: texts (encoded on their own, without special tokens) or lists of token ids.
        """
        self._check_open()
        completions = _as_list(completions)
        prompts = _as_list(prompts)
        if len(prompts) == 1:
            prompts = prompts * len(completions)
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions: expected as many, "
                             "or one prompt")
        results = [ScoreOutput() for _ in completions]
        nothing = SamplingParams(max_tokens=0, prompt_logprobs=0)
        texts: dict[int, tuple[list[int], int]] = {}        # tokens, and how many of them are the prompt's
        for i, (prompt, completion) in enumerate(zip(prompts, completions)):
            try:
                head, tail = self._encode(prompt), self._encode(completion, add_special_tokens=False)
                if not head or not tail:
                    raise RequestError("empty prompt or completion: nothing to score")
                results[i].token_ids = tail
                texts[i] = [*head, *tail], len(head)
            except RequestError as error:
                results[i].error = str(error)
        order = list(texts)
        if self._batch_order == "depth_first":
            order = [order[j] for j in self.engine.sharing_order([texts[i][0] for i in order], [nothing] * len(order))]
        open_requests: dict[str, int] = {}
        ended: list[RequestOutput] = []
        try:
            for i in order:
                tokens, num_prompt = texts[i]
                try:
                    name = self.engine.add_request(tokens, nothing, first_logit=num_prompt - 1)
                except RequestError as error:
                    results[i].error = str(error)
                    continue
                open_requests[name] = i
                self._sinks[name] = ended.append
            with self.progress_bar("scoring", progress, len(open_requests)) as bar:
                while open_requests:
                    yield
                    for output in ended:
                        _fill_score(results[open_requests.pop(output.request_id)], output)
                    ended.clear()
                    bar.update(bar.total - len(open_requests), bar.total)
        finally:
            self.withdraw(open_requests)
        return results

    @in_turn
    def abort(self, request_id: str | None = None) -> None:
        """Ends one request, or all; their calls return the partial output with finish_reason "abort"."""
        self._check_open()
        for name in [request_id] if request_id is not None else list(self._sinks):
            self.engine.abort(name)

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True,
                    template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation, as `chat` runs them. Raises RequestError or TokenizerError."""
        return self.tokenizer.apply_chat_template(
            with_argument_objects(messages), add_generation_prompt=add_generation_prompt,
            template_kwargs=dict(template_kwargs or {}))

    def chat_request(self, messages: Messages, params: SamplingParams | None = None, *,
                     add_generation_prompt: bool = True, template_kwargs: Mapping[str, Any] | None = None,
                     tools: ToolSet | None = None, tool_format: str | None = None
                     ) -> tuple[list[int] | ToolPrompt, SamplingParams | None]:
        """A conversation as `generate_iter` takes it: (prompt, params). Arguments as `chat`.

        Raises:
          RequestError, TokenizerError: the conversation cannot be rendered or the tools cannot be used.
        """
        kwargs = dict(template_kwargs or {})
        if tools is not None:
            if kwargs.setdefault("tools", tools.definitions) != tools.definitions:
                raise RequestError("template_kwargs holds other 'tools' than `tools`; leave them out there")
        ids = self.render_chat(messages, add_generation_prompt=add_generation_prompt, template_kwargs=kwargs)
        plan = None if tools is None else self.plan_tools(tools, tool_format)
        return (ids, params) if plan is None else plan.ask(ids, params)

    def plan_tools(self, tools: ToolSet, tool_format: str | None = None) -> ToolPlan | None:
        """How conversations with these tools are asked and read; None where the answer is text. Raises RequestError."""
        if tools.mode == "none":
            return None
        last = self._tool_plan
        if last is None or last[:2] != (tools, tool_format):
            last = self._tool_plan = tools, tool_format, plan_tools(self.tokenizer, tools, tool_format)
        return last[2]

    def markers_in(self, messages: Messages) -> list[str]:
        """Control tokens that the text of these messages spells."""
        return self.tokenizer.markers_in(messages)

    # -- for callers that drive the engine themselves

    @in_turn
    def submit(self, prompt: Prompt | np.ndarray, params: SamplingParams | None,
               sink: Callable[[RequestOutput], None], *, is_streamed: bool = False, first_logit: int | None = None
               ) -> str:
        """Queues one request. It runs while `pump`, or any other call, drives the engine.

        Args:
          prompt: text, or token ids.
          sink: called with the output once it is finished, and with `is_streamed` whenever it grew.
          first_logit: first prompt position whose log-probabilities are wanted, where `prompt_logprobs` asks for any.

        Returns:
          The request's id, for `withdraw`.

        Raises:
          RequestError: it cannot be served; nothing was queued.
        """
        self._check_open()
        ids = prompt if isinstance(prompt, np.ndarray) else self._encode(prompt)
        name = self.engine.add_request(ids, params, prompt=prompt if isinstance(prompt, str) else None,
                                       is_streamed=is_streamed, first_logit=first_logit)
        self._sinks[name] = sink
        return name

    @in_turn
    def pump(self) -> None:
        """One engine step; every output goes to the call that waits for it, whichever call drives the step.

        A step that fails or is interrupted drops the requests of all calls; each call gets what its own had.
        """
        self._check_open()
        try:
            outputs = self.engine.step()
        except BaseException:
            outputs, self.engine.dropped_outputs = self.engine.dropped_outputs, []
            self._deliver(outputs)
            raise
        self._deliver(outputs)

    @in_turn
    def withdraw(self, names: Iterable[str]) -> None:
        """Aborts requests; their sinks get what they have."""
        if self.engine is None:
            return
        names = [name for name in names if name in self._sinks]
        for name in names:
            self.engine.abort(name)
        self._deliver(self.engine.take_aborted())
        for name in names:
            self._sinks.pop(name, None)

    # -- the engine as a whole

    @in_turn
    def warmup(self) -> None:
        """Compiles every step shape now, so that no request waits for it."""
        self._check_open()
        with self.progress_bar("compiling", self._progress) as bar:
            self._runner.warmup(bar.update)

    @in_turn
    def stats(self) -> Stats:
        """Pool use in pages, hit rate, tokens computed and saved, steps, compilations, device. Prints as a table."""
        self._check_open()
        return Stats(self.engine.stats())

    @in_turn
    def save_cache(self, path: Path) -> int:
        """`cache.save`."""
        self._check_open()
        return self.engine.save_cache(path, self._identity)

    @in_turn
    def load_cache(self, path: Path) -> int:
        """`cache.load`."""
        self._check_open()
        loaded = self.engine.load_cache(path, self._identity)
        self._say(f"loaded {loaded.num_loaded_pages} cached pages of {self.config.page_size} tokens from {path}"
                  + (f"; {loaded.num_left_out_pages} found no room" if loaded.num_left_out_pages else ""))
        return loaded.num_loaded_pages

    @property
    @in_turn
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        self._check_open()
        return self.engine.num_unfinished

    @property
    def prefix_cache(self) -> PrefixCache:
        """The engine's cache; `cache` is the handle for users. Raises EngineError while another thread runs calls."""
        self._check_open()
        if self.turn.is_taken:
            raise EngineError("another thread runs calls on this LLM, and its cache may change at any moment; wait for "
                              "them, or use `await AsyncLLM.run(lambda llm: llm.cache...)`, which runs between steps")
        return self.engine.cache

    def namespace(self, params: SamplingParams) -> Namespace | None:
        """Where the KV of requests with these parameters is shared; None: nowhere."""
        self._check_open()
        return self.engine.namespace(params)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as `generate` runs them. Raises RequestError."""
        return self._encode(prompt)

    @in_turn
    def close(self) -> None:
        """Gives back all device memory at once. Further calls do nothing."""
        if self.engine is not None:
            self.engine.close()
            self._sinks.clear()
            self.engine = self._runner = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- internals

    def _run_all(self, requests: list[tuple[Any, SamplingParams | None]], on_error: str, progress: bool | None
                 ) -> Steps[list[RequestOutput]]:
        self._check_open()
        if on_error == "raise":
            self._check_all(requests)
        results: list[RequestOutput | None] = [None] * len(requests)
        cut_off: dict[int, RequestOutput] = {}
        try:
            with self.progress_bar("generating", progress, len(requests)) as bar:
                done = 0
                for pair in self._iterate(iter(requests), max(len(requests), 1), max(len(requests), 1), on_error,
                                          cut_off):
                    if pair is None:
                        yield
                        continue
                    i, output = pair
                    results[i] = output
                    done += 1
                    bar.update(done, len(requests))
        except (KeyboardInterrupt, EngineError) as error:
            error.partial_results = [result or cut_off.get(i) for i, result in enumerate(results)]
            raise
        return results

    def _check_all(self, requests: list[tuple[Any, SamplingParams | None]]) -> None:
        bad = []
        for i, (prompt, params) in enumerate(requests):
            try:
                if isinstance(prompt, RequestError):
                    raise prompt
                self.engine.check_request(self._encode(prompt), params)
            except RequestError as error:
                bad.append(f"[{i}] {error}")
        if bad:
            raise RequestError(f"{len(bad)} of {len(requests)} prompts cannot be served: " + "; ".join(bad))

    def _iterate(self, requests: Iterator[tuple[Any, SamplingParams | None]], max_inflight: int, order_window: int,
                 on_error: str = "record", cut_off: dict[int, RequestOutput] | None = None
                 ) -> Iterator[tuple[int, RequestOutput] | None]:
        """As `generate_iter`; what it took up and could not yield any more is left in `cut_off`, by index."""
        complete = partial(self._complete, max_inflight=max_inflight, order_window=order_window, on_error=on_error)
        return answers_with_calls(complete, requests, self.tokenizer, cut_off)

    def _complete(self, requests: Iterator[tuple[Any, SamplingParams | None]], *, max_inflight: int, order_window: int,
                  on_error: str, cut_off: dict[int, RequestOutput] | None = None
                  ) -> Iterator[tuple[int, RequestOutput] | None]:
        """(index, output) of each request as it ends, None where it waits for a step.

        What could not be yielded any more is left in `cut_off`.
        """
        self._check_open()
        places: dict[str, int] = {}
        ended: list[RequestOutput] = []
        in_order = self._in_order(requests, order_window)
        has_more = True
        try:
            while True:
                while has_more and len(places) < max_inflight:
                    pulled = next(in_order, None)
                    if pulled is None:
                        has_more = False
                        break
                    place, prompt, params, ids = pulled
                    name = self._submit(prompt, params, on_error, ids)
                    if isinstance(name, RequestOutput):
                        yield place, name
                        continue
                    places[name] = place
                    self._sinks[name] = ended.append
                if not places:
                    return
                yield None
                for output in ended:
                    yield places.pop(output.request_id), output
                ended.clear()
        finally:
            self.withdraw(places)
            if cut_off is not None:
                cut_off.update((places[o.request_id], o) for o in ended if o.request_id in places)

    def _in_order(self, requests: Iterator[tuple[Any, SamplingParams | None]], window: int
                  ) -> Iterator[tuple[int, Any, SamplingParams | None, list[int] | None]]:
        """(place, prompt, params, token ids if known), each window of requests in the order to run them in."""
        start = 0
        while pulled := list(islice(requests, window)):
            ids: list[list[int] | None] = [None] * len(pulled)
            order: Iterable[int] = range(len(pulled))
            if self._batch_order == "depth_first" and len(pulled) > 1:
                for i, (prompt, _) in enumerate(pulled):
                    with contextlib.suppress(RequestError, TokenizerError):     # raised again when it is submitted
                        ids[i] = self._encode(prompt)
                order = self.engine.sharing_order(ids, [params for _, params in pulled])
            for i in order:
                yield start + i, *pulled[i], ids[i]
                ids[i] = None
            start += len(pulled)

    def _submit(self, prompt: Any, params: SamplingParams | None, on_error: str, known: list[int] | None = None, *,
                is_streamed: bool = False) -> str | RequestOutput:
        """Queues one request: its id, or the record of why it cannot run."""
        text = prompt if isinstance(prompt, str) else None
        ids: list[int] = []
        try:
            if isinstance(prompt, RequestError):
                raise prompt
            ids = self._encode(prompt) if known is None else known
            num_cut = 0
            if on_error.startswith("truncate"):
                longest = self.engine.longest_prompt(params)
                num_cut = max(len(ids) - longest, 0)
                if num_cut:
                    ids = ids[num_cut:] if on_error == "truncate_left" else ids[:longest]
            return self.engine.add_request(ids, params, prompt=text, is_streamed=is_streamed,
                                           num_truncated_tokens=num_cut)
        except RequestError as error:
            return RequestOutput("refused", text, list(ids), finished=True, error=str(error), sampling_params=params)

    def _stream(self, pairs: list[tuple[Prompt, SamplingParams | None]]) -> Iterator[StreamDelta | None]:
        self._check_open()
        places: dict[str, int] = {}
        seen: dict[tuple[str, int], tuple[int, int]] = {}     # (request, sample) -> characters and tokens yielded
        ended: set[tuple[str, int]] = set()
        deltas: list[StreamDelta] = []

        def take(output: RequestOutput) -> None:
            for completion in output.outputs:
                key = output.request_id, completion.index
                num_chars, num_tokens = seen.get(key, (0, 0))
                reason = completion.finish_reason
                if key in ended or (len(completion.text) <= num_chars and len(completion.token_ids) <= num_tokens
                                    and reason is None):
                    continue
                seen[key] = max(len(completion.text), num_chars), len(completion.token_ids)
                deltas.append(StreamDelta(places[output.request_id], completion.index, completion.text[num_chars:],
                                          completion.token_ids[num_tokens:], reason))
                if reason is not None:
                    ended.add(key)
            if output.finished:
                deltas[-1].output = output

        try:
            for i, (prompt, params) in enumerate(pairs):
                name = self._submit(prompt, params, "record", is_streamed=True)
                if isinstance(name, RequestOutput):
                    yield StreamDelta(i, output=name)
                else:
                    places[name] = i
                    self._sinks[name] = take
            num_open = len(places)
            while num_open:
                yield None
                for delta in deltas:
                    num_open -= delta.output is not None
                    yield delta
                deltas.clear()
        finally:
            self.withdraw(places)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            sink = self._sinks.get(output.request_id)
            if sink is not None:
                sink(output)
            if output.finished:
                self._sinks.pop(output.request_id, None)

    def _encode(self, prompt: Prompt | ToolPrompt, *, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, ToolPrompt):
            return prompt.token_ids
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if not isinstance(prompt, (Sequence, np.ndarray)):
            raise RequestError(f"prompt is {type(prompt).__name__}; expected a text or a list of token ids")
        return list(prompt)

    def _check_open(self) -> None:
        if self.engine is None:
            raise EngineError("this LLM is closed; make a new one")

    def _say(self, line: str) -> None:
        logger.info(line)
        if not self._quiet:
            print(f"jradix: {line}", file=sys.stderr)

    def progress_bar(self, what: str, progress: bool | None, total: int = 0) -> ProgressBar:
        wanted = self._progress if progress is None else progress
        return ProgressBar(what, total, is_shown=False if self._quiet else wanted)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def _params_for(items: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
                ) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * len(items)
    params = list(params)
    if len(params) != len(items):
        raise ValueError(f"{len(items)} prompts and {len(params)} sampling parameters: expected as many, or one")
    return params


def _fill_score(result: ScoreOutput, output: RequestOutput) -> None:
    if output.outputs[0].finish_reason == "abort":
        result.error = "aborted before it was scored"
        return
    entries = [entry[token] for entry, token in
               zip(output.prompt_logprobs[-len(result.token_ids):], result.token_ids)]
    result.logprobs = [entry.logprob for entry in entries]
    result.logprob = sum(result.logprobs)
    result.is_greedy = all(entry.rank == 1 for entry in entries)
    result.num_cached_tokens = output.num_cached_tokens
