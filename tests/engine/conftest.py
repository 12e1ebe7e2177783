"""Secrets of a cluster, for tests of engines on the network."""

from pathlib import Path

import pytest

from tests.engine.curve_rig import Secret


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return Secret.make(tmp_path / "secret")


@pytest.fixture
def other(tmp_path: Path) -> Secret:
    return Secret.make(tmp_path / "other")
