"""transformers as a peer, in both of its ways: `generate` on static batches, and continuous batching.

- "generate": batches of outputs of the same length, padded on the left. The fastest of a few batch sizes is found on
  the first job of each warm-up and kept.
- "generate_batch": the paged manager behind `generate_batch`, kept through a run so that its blocks can be shared
  between batches. It sizes itself by a GPU's memory; here the number of blocks and of tokens per step are given.
"""
from __future__ import annotations

import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StoppingCriteria

from peers.protocol import Answer, Engine, Job, Settings, serve

PAD = 0     # masked; which id it is does not matter
BATCH_SIZES = (4, 8, 16, 32)
PAGE_SIZE, BATCH_TOKENS = 64, 512
POLL_S = 1.0


class FirstToken(StoppingCriteria):
    """Never stops anything; notes when it was asked for the first time."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.at = self.at or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class TransformersEngine:
    """What both ways share: model, versions, and the refusal of what transformers cannot do."""

    def __init__(self, settings: Settings):
        torch.set_num_threads(settings.threads)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
        self._model = AutoModelForCausalLM.from_pretrained(settings.weights, dtype=dtype).eval()
        self._model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=PAD)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.notes: list[str] = []

    def generate(self, job: Job) -> Answer:
        if job.schema is not None:
            raise ValueError("transformers has no structured output of its own")
        return self._generate(job)

    def close(self) -> None: ...


class StaticEngine(TransformersEngine):
    """`generate`, batch after batch; each prompt is computed from its first token, padding included."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self._batch_size: int | None = None
        self.notes.append(f"batches of {', '.join(map(str, BATCH_SIZES))}, whichever was fastest in the warm-up")

    def start(self, is_warmup: bool) -> None:
        if is_warmup:
            self._batch_size = None

    def _generate(self, job: Job) -> Answer:
        if self._batch_size is None:
            self._run(Job(job.prompts[:1], [2]), 1)      # so that no batch size pays for the first call
            sizes = sorted({min(size, len(job.prompts)) for size in BATCH_SIZES})
            self._batch_size = min(sizes, key=lambda size: self._run(job, size).wall_s)
        return self._run(job, self._batch_size)

    def _run(self, job: Job, batch_size: int) -> Answer:
        outputs: list[list[int]] = [[] for _ in job.prompts]
        ttft_s = [0.0] * len(outputs)
        num_computed = 0
        started = time.perf_counter()
        order = sorted(range(len(outputs)), key=lambda i: (job.num_outputs[i], len(job.prompts[i])))
        while order:
            num_output = job.num_outputs[order[0]]
            chosen = [i for i in order[:batch_size] if job.num_outputs[i] == num_output]
            order = order[len(chosen):]
            width = max(len(job.prompts[i]) for i in chosen)
            ids = torch.full((len(chosen), width), PAD)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(chosen):
                ids[row, width - len(job.prompts[i]):] = torch.tensor(job.prompts[i])
                mask[row, width - len(job.prompts[i]):] = 1
            first = FirstToken()
            with torch.inference_mode():
                found = self._model.generate(ids, attention_mask=mask, max_new_tokens=num_output, do_sample=False,
                                             min_new_tokens=num_output, stopping_criteria=[first])
            num_computed += ids.numel()
            for row, i in enumerate(chosen):
                outputs[i] = found[row, width:].tolist()
                ttft_s[i] = first.at - started
        return Answer(outputs, time.perf_counter() - started, ttft_s, num_computed)


class ContinuousEngine(TransformersEngine):
    """The continuous batching manager, a new one for each run."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        config = self._model.config
        token_bytes = (2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
                       * self._model.dtype.itemsize)
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=settings.kv_bytes // (PAGE_SIZE * token_bytes),
            max_batch_tokens=BATCH_TOKENS, max_requests_per_batch=settings.max_num_seqs,
            allow_block_sharing=settings.prefix_caching)
        self._manager: transformers.generation.continuous_batching.ContinuousBatchingManager | None = None
        self._num_shared = 0
        self.notes.append(f"{self._config.num_blocks} blocks of {PAGE_SIZE} tokens, {BATCH_TOKENS} tokens per step")

    def start(self, is_warmup: bool) -> None:
        self.close()
        self._manager = self._model.init_continuous_batching(continuous_batching_config=self._config)
        self._manager.warmup()
        cache = self._manager.batch_processor.cache
        search = cache.search_prefix_match

        def counted(*arguments: object) -> int:      # shared tokens are counted nowhere else
            num_shared = search(*arguments)
            self._num_shared += num_shared
            return num_shared

        cache.search_prefix_match = counted
        self._manager.start()

    def _generate(self, job: Job) -> Answer:
        num_shared = self._num_shared
        started = time.perf_counter()
        for i, (prompt, num_output) in enumerate(zip(job.prompts, job.num_outputs)):
            self._manager.add_request(prompt, request_id=str(i), max_new_tokens=num_output, record_timestamps=True)
        found: dict[int, transformers.generation.continuous_batching.GenerationOutput] = {}
        while len(found) < len(job.prompts):
            result = self._manager.get_result(timeout=POLL_S)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the generation thread of transformers has ended; its log says why")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"request {result.request_id} failed: {result.error}")
                found[int(result.request_id)] = result
        wall_s = time.perf_counter() - started
        ordered = [found[i] for i in range(len(found))]
        return Answer([result.generated_tokens for result in ordered], wall_s,
                      [result.timestamps[0] - started for result in ordered],
                      sum(map(len, job.prompts)) - (self._num_shared - num_shared))

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager.destroy()
            self._manager = None


METHODS = {"generate": StaticEngine, "generate_batch": ContinuousEngine}


def open_engine(settings: Settings) -> Engine:
    return METHODS[settings.method](settings)


if __name__ == "__main__":
    sys.exit(serve(open_engine))
