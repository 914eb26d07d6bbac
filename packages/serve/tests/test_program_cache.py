"""Compiled programs are found again by the next process."""

import os
import subprocess
import sys

SCRIPT = """
import time
import jax
from megakernel_serve.program_cache import keep_programs
import megakernel_serve.program_cache as module
module._WORTH_KEEPING_SECONDS = 0.0
keep_programs()
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: (x * 3 + 1).sum())(jax.numpy.arange(7.0)).block_until_ready()
print(jax.config.jax_compilation_cache_dir, "/jax/compilation_cache/cache_hits" in hits)
"""


def run(**variables):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env = {**plain, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True
    )
    folder, hit = done.stdout.split()
    return folder, hit == "True"


def test_the_second_process_finds_the_first_ones_program(tmp_path):
    first = run(XDG_CACHE_HOME=str(tmp_path))
    assert first == (str(tmp_path / "megakernel" / "programs"), False)
    assert run(XDG_CACHE_HOME=str(tmp_path))[1]


def test_a_folder_chosen_for_jax_is_kept(tmp_path):
    chosen = str(tmp_path / "mine")
    assert run(JAX_COMPILATION_CACHE_DIR=chosen)[0] == chosen
