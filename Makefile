# Two commands: `make sweep` and `make test`. Both create .venv on first use; nothing else needs to be set up.
# A torch that PYTHON already has is used as it is (its environment is then visible inside .venv).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: sweep test lint perf clean

sweep: $(VENV)/installed
	$(BIN)/halting-bench sweep $(ARGS)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

perf: $(VENV)/installed
	$(BIN)/python -m perf $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is too old, Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)

# With a torch in sight its pin is left out, so that it is neither replaced nor downloaded again.
$(VENV)/constraints.txt: constraints.txt $(VENV)/bin/python
	if $(BIN)/python -c 'import torch' 2>/dev/null; then grep -v '^torch==' constraints.txt > $@; else cp constraints.txt $@; fi

$(VENV)/installed: pyproject.toml $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . -c $(VENV)/constraints.txt
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c $(VENV)/constraints.txt
	touch $@

clean:
	rm -rf $(VENV) build dist
