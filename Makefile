# Everyday commands; each sets up what is missing first. `make` lists them.
.PHONY: help setup train test test-all lint format native check clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: ## the environment with everything for development
	bash tools/bootstrap.sh dev

train: ## the tiny Qwen3-Next on two CPU processes
	bash examples/run_qwen3_next_ibpo.sh

test: ## the tests
	bash tests/run.sh

test-all: ## and the slow ones
	bash tests/run.sh --all

lint: ## ruff, hadolint, shellcheck, mypy, documents
	bash .ci/lint

format: ## repair what lint can repair
	"$$(dirname "$$(bash tools/bootstrap.sh dev)")/ruff" check --fix
	"$$(dirname "$$(bash tools/bootstrap.sh dev)")/ruff" format

native: ## csrc/ under sanitizers and a fuzzer
	bash tests/native.sh

check: ## everything that must pass
	bash .ci/run

clean: ## caches and what was built; .venv and runs/ stay
	rm -rf build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
