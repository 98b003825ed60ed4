PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
PYTEST := $(VENV)/bin/python -m pytest --dist loadfile
CORES := $(shell getconf _NPROCESSORS_ONLN)
# tests of processes often wait: one worker more than there are cores keeps these busy
WORKERS := $(shell n=$$(( $(CORES) + 1 )); echo $$(( n < 8 ? n : 8 )))

.PHONY: train demo test test-rest test-clients test-all lint docs kill-matrix signal-matrix bench

train: $(VENV)/.ok
	$(VENV)/bin/python launch/train.py --config configs/quickstart.json

demo: $(VENV)/.ok
	$(VENV)/bin/python launch/demo.py

test: lint  # every axis once, in five to ten minutes on two cores
	$(PYTEST) -n $(WORKERS) --tier quick

test-rest: lint  # more rows and the longer tests: the second half of CI; MINUTES=30: what can be begun in that time
	$(PYTEST) --no-loadscope-reorder -n $(WORKERS) --tier rest $(if $(MINUTES),--minutes $(MINUTES))

test-clients: $(CLIENTS)/.ok  # with the real libraries of trackers, lm_eval and datasets, which the other tests skip
	$(CLIENTS)/bin/python -m pytest tests/monitor/test_trackers.py tests/door/test_tracked_runs.py \
	  tests/evaluation/test_harness_tasks.py tests/data/test_datasets_library.py

test-all: lint  # everything: all rows of all tables
	$(PYTEST) -n $(WORKERS) --tier full

lint: $(VENV)/.ok
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

docs: $(VENV)/.ok  # the documentation as a site: open site/index.html
	$(VENV)/bin/mkdocs build --quiet

bench: $(VENV)/.ok  # is this tree slower than the last record on this kind of CPU?
	$(VENV)/bin/python benchmarks/bench.py

kill-matrix: $(VENV)/.ok
	rm -rf runs/kill-matrix && mkdir -p runs/kill-matrix
	$(VENV)/bin/python -m tests.support.process_kills runs/kill-matrix all > runs/kill-matrix.log

signal-matrix: $(VENV)/.ok  # some hours on two cores; goes on where it was stopped
	mkdir -p runs
	$(VENV)/bin/python -m tests.support.signal_matrix runs/signal-matrix >> runs/signal-matrix.log

$(VENV)/.ok: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# What $(VENV) has is seen from here and not installed again; what the clients need can't disturb the other tests.
$(CLIENTS)/.ok: $(VENV)/.ok
	$(PYTHON) -m venv $(CLIENTS)
	echo "import site; site.addsitedir('$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt wandb mlflow-skinny trackio lm_eval datasets
	touch $@
