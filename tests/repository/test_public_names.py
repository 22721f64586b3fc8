"""What `import twoends` offers is what it says, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import twoends


@pytest.mark.parametrize("name", twoends.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(twoends, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'open_modle'"):
        twoends.open_modle  # noqa: B018


def test_importing_the_package_loads_neither_numpy_nor_torch():
    code = "import sys, twoends; sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
