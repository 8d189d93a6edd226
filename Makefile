# SPDX-License-Identifier: Apache-2.0
# Everything is run in place from this tree; only dependencies are installed, into .venv.
# Real files stand for the steps (two stamps in .venv, one in build/, the model), so a second run repeats none.

PYTHON ?= python3
JOBS   ?= 2
ARCH   ?= $(shell uname -m)
ARGS   ?=

VENV   := .venv
PY     := $(VENV)/bin/python
MODEL  := models/smollm2-135m-instruct.l3r
RUN    := $(VENV)/.installed-run
DEV    := $(VENV)/.installed-dev
BUILT  := build/.extensions
AGAIN  := build/bundle-again
KERNEL := $(shell find cecilia -name '*.pyx' -o -name '*.pxd' -o -name '*.c' -o -name '*.h')
PIP    := $(PY) -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run build test test-aarch64 lint quality bench bench-peers bench-neighbour bench-quantisations bench-recipes bench-memory bench-conversion bench-roofline bench-layout bench-long bench-sessions bench-start bundle test-bundle soak clean

help: ## list the targets
	@echo 'usage: make TARGET [ARGS="..."] [PYTHON=python3.12] [JOBS=2]'
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile | grep -v '^  help' | expand -t 24

run: build $(if $(filter --model --model=%,$(ARGS)),,$(MODEL)) ## serve the default model at http://127.0.0.1:9091
	@exec $(PY) -m server $(ARGS)

build: $(BUILT) ## make .venv and compile the extensions in place

test: build $(DEV) ## run the tests
	@$(PY) -m pytest $(ARGS)

test-aarch64: build $(DEV) ## cross compile the kernels and check them under qemu
	@$(PY) -m pytest tests/kernels/c $(ARGS)

lint: $(DEV) ## ruff, mypy --strict, cython-lint
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint $(filter %.pyx %.pxd,$(KERNEL))

quality: build $(MODEL) $(DEV) ## perplexity, KL and token ids against stored references
	@$(PY) -m tools.quality $(ARGS)

bench: build $(MODEL) ## prefill and decode speed of this engine
	@$(PY) -m tools.bench.ours $(ARGS)

bench-peers: build $(MODEL) ## this engine beside llama.cpp and ik_llama.cpp on the same weights (builds both once, up to an hour)
	@$(PY) -m tools.bench.peers $(ARGS)

bench-neighbour: build $(MODEL) ## decoding while another process burns a core, beside both peers
	@$(PY) -m tools.bench.neighbour $(ARGS)

bench-quantisations: build $(MODEL) ## size, perplexity, KL and speed of every weight quantisation
	@$(PY) -m tools.bench.quantisations $(ARGS)

bench-recipes: build ## logit error, KL, top-1 agreement of every cache recipe and quantisation of Ling-3.0
	@$(PY) -m tools.bench.recipes $(ARGS)

bench-memory: build ## what long sessions of Ling-3.0-tiny take with every cache recipe
	@$(PY) -m tools.bench.memory $(ARGS)

bench-conversion: build ## memory and time of converting Ling-3.0, and whether its two layouts give one result
	@$(PY) -m tools.bench.conversion $(ARGS)

bench-sessions: build $(MODEL) ## what it costs to go on with what is kept: follow-ups, branches, forks, snapshots
	@$(PY) -m tools.bench.sessions $(ARGS)

bench-roofline: build $(MODEL) ## where the time of a step goes, beside the machine's peaks
	@$(PY) -m tools.bench.roofline $(ARGS)

bench-long: build ## a prompt of 32K tokens through a live server: memory, progress, giving up (ARGS="FILE.l3r --tokens 32768")
	@$(PY) -m tools.bench.long_prompt $(ARGS)

bench-start: build ## from starting the server to its first token, and its memory, beside llama-server (ARGS="FILE.l3r FILE.gguf")
	@$(PY) -m tools.bench.start $(ARGS)

bench-layout: build ## time the candidate weight layouts
	@$(PY) -m tools.bench.layout $(ARGS)

bundle: $(RUN) ## what runs on a board by itself: a folder, a .tar.xz, a single file (ARCH=aarch64: cross-built)
	@$(PY) -m tools.build_portable --arch $(ARCH) $(ARGS)

test-bundle: bundle $(MODEL) $(DEV) ## build the bundle again from nothing, compare, try it on an empty machine (as root)
	@rm -rf $(AGAIN) $(AGAIN)-work
	@$(PY) -m tools.build_portable --arch $(ARCH) $(ARGS) --output $(AGAIN) --work $(AGAIN)-work
	@set -e; for file in $(AGAIN)/*.tar.xz $(AGAIN)/*.run; do cmp $$file portable/dist/$${file##*/}; echo "$${file##*/}: both builds are the same"; done
	@set -e; for folder in $(AGAIN)/*/; do $(PY) -m portable.verify $$folder --model $(MODEL); done
	@rm -rf $(AGAIN) $(AGAIN)-work
	@$(PY) -m pytest tests/portable

soak: build $(MODEL) $(DEV) ## 1,000 requests with random disconnects; look for leaks
	@$(PY) -m tools.soak $(ARGS)

clean: ## remove what was compiled and every cache (.venv and models stay)
	rm -rf build portable/dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find cecilia server tools tests portable -name __pycache__ -prune -exec rm -rf {} +
	find cecilia -name '*.so' -delete

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found (on Debian: sudo apt install python3)" >&2; exit 2; }
	@$(PYTHON) tools/preflight.py
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml tools/requirements.py | $(PY)
	$(PY) tools/requirements.py run build convert > $(VENV)/requirements-run.txt
	$(PIP) install -r $(VENV)/requirements-run.txt
	@touch $@

$(DEV): $(RUN)
	$(PY) tools/requirements.py dev > $(VENV)/requirements-dev.txt
	$(PIP) install -r $(VENV)/requirements-dev.txt
	@touch $@

$(BUILT): setup.py $(KERNEL) $(RUN)
	@$(PY) tools/preflight.py
	$(PY) setup.py build_ext --inplace -j$(JOBS)
	@mkdir -p $(@D) && touch $@

# Order-only: a rebuilt kernel does not make a converted model stale.
$(MODEL): | $(BUILT)
	$(PY) -m tools.fetch
