"""Tests that compile for a TPU run wherever libtpu is, in processes of their own."""

import importlib.util

import pytest

LIBTPU = importlib.util.find_spec("libtpu") is not None


def pytest_configure(config):
    config.addinivalue_line("markers", "tpu_compile: compiles for a TPU that is not there")


def pytest_runtest_setup(item):
    if item.get_closest_marker("tpu_compile") and not LIBTPU:
        pytest.skip("compiling for a TPU needs libtpu: pip install 'vmem-pool[tpu]'")
