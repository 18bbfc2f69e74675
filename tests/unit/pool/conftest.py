import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory of this test's own in shared memory, which must be empty again at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as directory:
        yield Path(directory)
        assert list(Path(directory).iterdir()) == []
