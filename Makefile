# make demo: see it work.   make test: everything that CI runs.
# The tests of the engine run twice, on the CPU and on the simulated accelerator, which g++ compiles the first time.
# Both make what they need in .venv the first time; later calls start at once.

PYTHON ?= python3
VENV   ?= .venv
# Installed first, and only where the environment has no torch. Any other build of it:
#   make demo TORCH=torch==2.12.1
TORCH  ?= torch==2.13.0
# Processes that the tests are spread over; each uses one compute thread.
JOBS   ?= 2
# Laws about bytes alone: they hold where no kernel runs, too.
BYTES := tests/models/test_peaks.py tests/activations/test_release.py
# Where the demonstration writes its page, its pictures and its figures.
OUT    ?= demo-out

BIN := $(VENV)/bin

.PHONY: demo test format readme clean

demo: $(VENV)/ready-report
	$(BIN)/lowtide demo --out $(OUT)

test: $(VENV)/ready-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n $(JOBS)
	$(BIN)/python -m pytest -n $(JOBS) --device sim tests
	$(BIN)/python -m pytest -n $(JOBS) --device sim --no-compute $(BYTES)

format: $(VENV)/ready-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Run the demonstration and put its table into the README.
readme: $(VENV)/ready-report
	$(BIN)/lowtide demo --out $(OUT) --markdown $(OUT)/table.md
	sed -i -e '/<!-- demo:/,/<!-- end of demo/{//!d}' -e '/<!-- demo:/r $(OUT)/table.md' README.md

# The environment with torch alone. A torch that is there already is never replaced.
$(VENV)/ready-torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/ready-report: $(VENV)/ready-torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[report]"
	touch $@

$(VENV)/ready-dev: $(VENV)/ready-torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[report,dev]"
	touch $@ $(VENV)/ready-report

clean:
	rm -rf $(VENV) $(OUT) dist
