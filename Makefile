# Every target works from nothing: it makes .venv when missing. Python >= 3.11 is all that is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OTHERS := .venv-integrations
JAX := .venv-jax

# Compiled files are kept, so that collecting the tests takes 13 seconds instead of 18 from the second time on.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-other-path test-all test-slow test-properties test-integrations test-jax mutants lint format bench soak docs pictures clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

venv: $(STAMP) ## make .venv with the pinned versions

# torch first and by its exact version: an unpinned torch would pull gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,report,train]'
	touch $@

demo: $(STAMP) ## train Scion against ScionC on embedded text, up to 6 minutes, and show them on a page
	$(BIN)/steadynorm demo

# The report page is tested in a real browser; on Debian as root it is installed, elsewhere those tests are skipped. The
# headless shell is the same engine without windows: it starts sooner.
HAS_CHROMIUM = { command -v chromium-headless-shell || command -v chromium; } >/dev/null
$(VENV)/.chromium: $(STAMP)
	$(HAS_CHROMIUM) || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq chromium-headless-shell >/dev/null; } \
		|| echo "no Chromium here: the tests of the report page will be skipped"
	touch $@

# A file's tests share fixtures and stay in one process; tests/conftest.py starts the long files first. JOBS=0 runs all in
# this process, for a debugger. A process takes about 1 GB.
JOBS ?= auto
PARALLEL = -n $(JOBS) --maxprocesses=8 --dist loadfile --no-loadscope-reorder

# Triton is 1 GB on disk, so `make test` skips the tests of its kernels where it is absent. A CUDA build of torch has its own.
$(VENV)/.triton: $(STAMP)
	test "$$(uname -s)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check triton==3.9.0
	touch $@

test: $(VENV)/.chromium ## the test suite without the slow part, as many files at once as there are cores
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow'

# Polar factors and training take bf16 products where the processor has them and fp32 elsewhere: this is the other way.
NUMERICAL = $(wildcard $(foreach name,polar lmo optim contract decay buckets idle moving simulate steady monitor train demo,\
	tests/test_$(name)*.py)) $(wildcard $(foreach name,lmo optim twin bounded,tests/properties/test_$(name)_properties.py))
OTHER = $$($(BIN)/python -c 'from steadynorm import machine; print(int(not machine.native_bf16()))')

test-other-path: $(STAMP) ## the numerical part of it with fp32 products if bf16 is native here, with bf16 if not
	STEADYNORM_NATIVE_BF16=$(OTHER) $(BIN)/python -m pytest $(PARALLEL) -m 'not slow' $(NUMERICAL)

test-all: test-integrations test-jax test-slow test-properties mutants ## all of it; -j2 for two at a time

test-slow: $(VENV)/.chromium $(VENV)/.triton ## every test, the slow ones included (but properties)
	! $(HAS_CHROMIUM) || export STEADYNORM_REQUIRE_CHROMIUM=1; \
		$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/properties

test-properties: $(STAMP) ## properties in their slow profile: up to 20,000 examples of each
	HYPOTHESIS_PROFILE=slow $(BIN)/python -m pytest $(PARALLEL) --hypothesis-seed=0 tests/properties

mutants: $(VENV)/.triton ## break each formula on purpose, one at a time, and see that the tests notice
	$(BIN)/python tests/mutants.py
	$(BIN)/python -m benchmarks.trust

# Their dependencies are many and narrow: an environment of its own keeps them away from the main one.
$(OTHERS)/.installed: pyproject.toml constraints.txt
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[integrations,report]' pytest
	touch $@

test-integrations: $(OTHERS)/.installed ## our optimizers in Hugging Face, Accelerate, Lightning, timm, ...
	STEADYNORM_REQUIRE_INTEGRATIONS=1 $(OTHERS)/bin/python -m pytest tests/integrations

# JAX beside torch, so that steadynorm.jax can be compared with the torch optimizers.
$(JAX)/.installed: pyproject.toml constraints.txt
	test -x $(JAX)/bin/python || $(PYTHON) -m venv $(JAX)
	$(JAX)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(JAX)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[jax]' pytest
	touch $@

test-jax: $(JAX)/.installed ## steadynorm.jax: beside the torch optimizers, on four devices, with its own mutants
	STEADYNORM_REQUIRE_JAX=1 $(JAX)/bin/python -m pytest tests/on_jax

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP) ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

bench: $(VENV)/.bench ## step time, memory and accuracy side by side with the peers
	$(BIN)/python -m benchmarks

soak: $(STAMP) ## a million optimizer steps, then half an hour of training: memory, norms, power iteration
	$(BIN)/python -m benchmarks.soak steps
	$(BIN)/python -m benchmarks.soak training
	$(BIN)/python -m benchmarks.trust

docs: $(STAMP) ## build the documentation into site/, warnings are errors
	$(BIN)/python docs/experiments.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(STAMP) ## draw the pictures of README and docs anew, from the library's own functions
	$(BIN)/python docs/pictures.py
	$(BIN)/python docs/theory_pictures.py
	$(BIN)/python docs/hold_pictures.py
	$(BIN)/python examples/correct_adamw.py > docs/out/correct_adamw.txt

clean: ## remove what make made
	rm -rf $(VENV) $(OTHERS) $(JAX) site build dist .pytest_cache .ruff_cache
