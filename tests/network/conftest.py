"""A text to train on, and the losses of a run that nothing happens to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.network_hosts import network_of, why_not
from tests.support.network_runs import NetworkRun
from tests.support.network_switch import Weather

FAIR = Weather()


@pytest.fixture(scope="session")
def _namespaces() -> None:
    if why := why_not():
        pytest.skip(why)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Sources of the standard library, 0.3 MB."""
    path = tmp_path_factory.mktemp("text") / "library.txt"
    sources = sorted(Path(os.__file__).parent.glob("[a-b]*.py"))
    path.write_text("\n".join(source.read_text(errors="replace") for source in sources))
    return path


@pytest.fixture
def start(_namespaces, tmp_path, text) -> Iterator[Callable[..., NetworkRun]]:
    """Starts a run on hosts of its own, in fair weather by default."""
    networks = []

    def start(num_hosts: int, launcher: str = "variables", weather: Weather = FAIR, **options) -> NetworkRun:
        context = network_of(num_hosts)
        network = context.__enter__()
        networks.append(context)
        network.weather = weather
        return NetworkRun(network, tmp_path, launcher=launcher, text=text, **options)

    yield start
    for context in networks:
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def undisturbed(_namespaces, tmp_path_factory, text) -> list[float]:
    """The losses on two hosts."""
    with network_of(2) as network:
        run = NetworkRun(network, tmp_path_factory.mktemp("undisturbed"), launcher="variables", text=text)
        assert [ended.code for ended in run.end()] == [0, 0]
        return run.losses()
