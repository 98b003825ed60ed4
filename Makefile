PYTHON ?= python3
VENV := .venv

.PHONY: train demo test lint kill-matrix

train: $(VENV)/.ok
	$(VENV)/bin/python launch/train.py --config configs/quickstart.json

demo: $(VENV)/.ok
	$(VENV)/bin/python launch/demo.py

test: lint
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: $(VENV)/.ok
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

kill-matrix: $(VENV)/.ok
	rm -rf runs/kill-matrix && mkdir -p runs/kill-matrix
	$(VENV)/bin/python -m tests.support.kill_cells runs/kill-matrix all > runs/kill-matrix.log

$(VENV)/.ok: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
