# Two commands are enough: `make serve` and `make test`. Both build the environment in .venv when it is missing or
# out of date. Settings: PYTHON=python3.12  HOST=0.0.0.0  PORT=8000  ARGS="further server flags"  TESTS=test/unit
HOST ?= 127.0.0.1
PORT ?= 30000
ARGS ?=
TESTS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help env serve test check format docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

env: ## build or refresh the environment in .venv
	@PYTHON='$(PYTHON)' bash scripts/env.sh

serve: env ## serve the built-in Gemma 4 pair with speculation on http://HOST:PORT
	@exec $(BIN)/python -m sglang.launch_server --model-path tiny-gemma4 \
		--speculative-algorithm FROZEN_KV_MTP --host $(HOST) --port $(PORT) $(ARGS)

test: env ## run the whole test suite, a file at a time on two workers
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

check: env ## format, lint, spelling, types, then the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	@$(BIN)/python -m pytest $(TESTS)

format: env ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: env ## rewrite the generated pages
	$(BIN)/python scripts/structure.py
	$(BIN)/python -m sglang.srt.server_args_docs > docs/server_arguments.md.new
	mv docs/server_arguments.md.new docs/server_arguments.md

clean: ## remove the environment and every cache
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis python/*.egg-info *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
