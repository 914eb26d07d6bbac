"""Commands and one server, each in a process of its own, with the embedded Qwen checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import openai
import pytest
from megakernel_qwen import package

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

START_SECONDS = 240


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The checkpoint that ships with the package."""
    return package.embedded_checkpoint()


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """Variables without the user's own settings.

    All processes share compiled programs with each other and with this one, and have the same rows
    and context so that they can.
    """
    foreign = ("MEGAKERNEL_", "KIMI_", "QWEN_", "HF_", "JAX_", "XLA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    programs = os.environ.get("JAX_COMPILATION_CACHE_DIR") or tmp_path_factory.mktemp("programs")
    return kept | {
        "COLUMNS": "200",
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PLATFORMS": "cpu",
        "MEGAKERNEL_CONTEXT": "512",
        "MEGAKERNEL_ROWS": "4",
    }


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def python_in(environment) -> Run:
    """Runs the interpreter in a folder; ``code`` is the exit code that it must end with."""

    def start(folder, *arguments, stdin="", code=0, **variables):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            cwd=folder,
            env=environment | variables,
            timeout=START_SECONDS,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done

    return start


@pytest.fixture
def megakernel(python_in, tmp_path) -> Run:
    """Runs a command of the command line in an empty folder."""
    return partial(python_in, tmp_path, "-m", "megakernel_serve")


@pytest.fixture(scope="session")
def server(environment, tmp_path_factory) -> Iterator[str]:
    """The address of a server on a free port, ready to answer."""
    folder = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "megakernel_serve", "serve", "--port", "0"]
    command += ["--served-model-name", "tiny"]
    log = folder / "log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment
        )
    try:
        yield _address_when_ready(process, log)
    finally:
        process.terminate()
        process.wait(60)


def _address_when_ready(process: subprocess.Popen, log: Path) -> str:
    """What the server says of itself once it takes requests."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        for line in log.read_text(encoding="utf-8").splitlines():
            if line.startswith("Ready: tiny at "):
                return line.removeprefix("Ready: tiny at ").removesuffix("/v1")
        time.sleep(0.1)
    raise AssertionError(f"the server did not become ready:\n{log.read_text(encoding='utf-8')}")


@pytest.fixture(scope="session")
def client(server) -> Iterator[openai.OpenAI]:
    """The client library that most users have."""
    with openai.OpenAI(
        base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=START_SECONDS
    ) as client:
        yield client
