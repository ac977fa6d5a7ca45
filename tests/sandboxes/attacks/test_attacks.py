"""Every attack of the bank fails on every backend, but for those listed as open, which succeed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from tests.sandboxes.attacks.backends import BACKENDS, HOST_DECIDES, KNOWN_OPEN
from tests.sandboxes.attacks.bank import BANK, run_bank, surprise
from tests.sandboxes.attacks.probe import Outcome, Probe
from tests.sandboxes.attacks.table import committed, table

Seen = Callable[[str], dict[str, Outcome]]


@pytest.fixture(scope="session")
def seen(base_image: str, request: pytest.FixtureRequest) -> Seen:
    """`seen(backend)`: what the probes of this run's tests did there, all in one go at the first call."""
    known: dict[str, dict[str, Outcome]] = {}

    def look(backend: str) -> dict[str, Outcome]:
        if backend not in known:
            tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
            asked = [test.callspec.params["probe"] for test in tests if test.originalname == "test_attack"]
            probes = [probe for probe in BANK if probe in asked]
            known[backend] = trio.run(run_bank, backend, base_image, probes)
        return known[backend]

    return look


@pytest.mark.docker
@pytest.mark.parametrize("probe", BANK, ids=lambda probe: probe.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attack(seen: Seen, backend: str, probe: Probe) -> None:
    assert not surprise(backend, probe.name, seen(backend)[probe.name])


def test_names_are_unique_and_fit_a_table() -> None:
    names = [probe.name for probe in BANK]
    assert len(set(names)) == len(names) >= 45
    assert not [name for name in names if "|" in name]


def test_only_probes_that_exist_are_listed_as_open() -> None:
    assert set(KNOWN_OPEN) == set(BACKENDS)
    for names in KNOWN_OPEN.values():
        assert set(names) <= {probe.name for probe in BANK}
    assert set().union(*KNOWN_OPEN.values()) >= HOST_DECIDES


def test_the_committed_table_is_the_banks() -> None:
    """Where it fails: `python -m tests.sandboxes.attacks`."""
    assert committed() == table()
