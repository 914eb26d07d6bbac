"""A pytest plugin that stops starting tests after some time, taking turns between the files.

Every file is collected, hence imported. Each file's first test comes before any file's second, so
that a short run still touches everything; folders, which hold tests of whole kernels, come after
the files beside them.
"""

from __future__ import annotations

import time
from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-seconds", type=float, default=0, help="0 runs all tests")


def pytest_configure(config: pytest.Config) -> None:
    if seconds := config.getoption("--run-seconds"):
        config.pluginmanager.register(BoundedRun(seconds))


class BoundedRun:
    """Holds the time at which the run ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.started: float | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Orders the tests by their place within their file, then by the depth of that file."""
        seen: dict[object, int] = defaultdict(int)
        turns: dict[pytest.Item, tuple[int, int]] = {}
        for item in items:
            turns[item] = seen[item.path], len(item.path.parts)
            seen[item.path] += 1
        items.sort(key=turns.__getitem__)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Skips a test that would start too late."""
        now = time.monotonic()
        self.started = now if self.started is None else self.started
        if now > self.started + self.seconds:
            pytest.skip("the time for this run is over")
