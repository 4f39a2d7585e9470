"""What every test shares: two cores, no luck.

Knows: pytest's and hypothesis' settings, and that SGLang is seldom installed. Must not know: any module of the project.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest
from hypothesis import settings

# Read when torch is first imported: the machine has two cores, and several processes of a test share them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Processes are killed here, and never machines: a tmpfs keeps as much through that as a disk, which all would wait for.
SHM, ROOM = "/dev/shm", 4 << 30
if os.path.isdir(SHM) and shutil.disk_usage(SHM).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", SHM)

# No deadline, because a shared machine stalls; derandomized, because a run that failed must fail again.
settings.register_profile("reef", deadline=None, derandomize=True)
settings.load_profile("reef")

# Its environment is another one, see `make test-sglang`; not skipped, because in this one nobody can mend that.
collect_ignore = [] if importlib.util.find_spec("sglang") else ["sglang"]

UNCOVERED = ("simulation", "integration", "property")
"""What runs long, or in other processes, which are not measured anyway: measuring costs as much again."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in UNCOVERED:
            item.add_marker(pytest.mark.no_cover)
