"""The two released models, the tables that come along, and a machine to ask about."""

from __future__ import annotations

import pytest

from twoends.sizing.footprint import footprint
from twoends.sizing.machines import load_machines
from twoends.sizing.models import load_model
from twoends.sizing.prices import load_prices


@pytest.fixture(scope="session")
def k3():
    """Kimi K3's footprint."""
    return footprint(load_model("kimi-k3"))


@pytest.fixture(scope="session")
def kimi_linear():
    """Kimi-Linear's footprint."""
    return footprint(load_model("kimi-linear"))


@pytest.fixture(scope="session")
def machines():
    """The machine table that comes along."""
    return load_machines()


@pytest.fixture
def prices():
    """The price table that comes along; a table of its own, for tests add to it."""
    return load_prices()
