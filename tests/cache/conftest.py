"""A folder of blocks for a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.disk import DiskFolder
from tests.cache.disk_rig import folder_in


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DiskFolder]:
    folder = folder_in(tmp_path)
    yield folder
    folder.close()
