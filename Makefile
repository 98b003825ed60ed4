PYTHON ?= python3
VENV := .venv
PYTEST := $(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile

.PHONY: train demo test test-rest test-all lint kill-matrix

train: $(VENV)/.ok
	$(VENV)/bin/python launch/train.py --config configs/quickstart.json

demo: $(VENV)/.ok
	$(VENV)/bin/python launch/demo.py

test: lint  # every axis once, in five minutes on two cores
	$(PYTEST) --tier quick

test-rest: lint  # what `test` leaves out
	$(PYTEST) --tier rest

test-all: lint  # everything
	$(PYTEST) --tier full

lint: $(VENV)/.ok
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

kill-matrix: $(VENV)/.ok
	rm -rf runs/kill-matrix && mkdir -p runs/kill-matrix
	$(VENV)/bin/python -m tests.support.process_kills runs/kill-matrix all > runs/kill-matrix.log

$(VENV)/.ok: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
