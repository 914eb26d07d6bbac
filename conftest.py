"""Options for the whole workspace's test run, and one cache of compiled programs for all of it."""

import atexit
import os
import shutil
import tempfile

import pytest


def _share_compiled_programs() -> None:
    """Lets all processes of this run compile each program once; nothing outlives the run.

    Set while this file is imported: jax reads it on its own import, which other conftest files do.
    Workers and subprocesses inherit it. A folder that was chosen before is kept.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="compiled-programs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


_share_compiled_programs()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help="fail the run if a test was skipped: in CI everything that is selected must run",
    )


def _turn(item: pytest.Item) -> int:
    """The longest file of those at the end of the alphabet comes first, short ones last."""
    if item.path.name == "test_isolated_installs.py":
        return 0
    return 2 if "integration" in item.path.parts else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: workers take whole files, and the last ones decide when both are done."""
    items.sort(key=_turn)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--strict-skips") or reporter is None:
        return
    skipped = reporter.stats.get("skipped", [])
    for report in skipped:
        reporter.write_line(f"must run, but was skipped: {report.nodeid} {report.longrepr}")
    if skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
