PYTHON ?= python3
VENV := .venv

.PHONY: train test lint

train: $(VENV)/.ok
	$(VENV)/bin/python launch/train.py --config configs/quickstart.json

test: lint
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.ok
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

$(VENV)/.ok: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
