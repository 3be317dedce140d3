# Two commands on a fresh machine: `make demo` does the main job, `make test` proves it; `make docs` builds the pages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out
export OMP_NUM_THREADS ?= 1

.PHONY: demo test docs check-style setup clean

setup: $(VENV)/.ready

# A torch that is already importable and in range is kept; otherwise the pinned CPU build is installed
# (plain `torch` would take gigabytes of CUDA).
$(VENV)/.ready: pyproject.toml constraints.txt
	@if $(PYTHON) -c 'import torch; raise SystemExit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11))' 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV) && $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'; \
	else \
		$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	fi
	@touch $@

demo: setup
	@mkdir -p $(OUT)
	@$(BIN)/python tools/demo.py --out $(OUT)

test: setup check-style
	@$(BIN)/python -m pytest

check-style: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo 'open out/site/index.html'

clean:
	rm -rf $(VENV) $(OUT)
