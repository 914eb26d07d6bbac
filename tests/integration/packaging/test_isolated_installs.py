"""Each package alone with what it declares: it imports quietly and passes its own tests."""

import json
import re
import sys
import textwrap

import pytest

from .isolation import Environment, run_tests
from .workspace import packages

pytestmark = pytest.mark.isolated

OWN_TEST_SECONDS = 2
"""Per package; the ``isolation`` module runs all of them."""

IMPORT_EVERYTHING = """
    import importlib, json, os, pkgutil, sys

    name = sys.argv[1]
    reads, connections = [], []

    def watch(event, arguments):
        if event in ("socket.connect", "socket.getaddrinfo"):
            connections.append(str(arguments[-1]))

    sys.addaudithook(watch)
    environ = type(os.environ)
    plain = environ.__getitem__

    def recorded(self, key):
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").split(".")[0] == name:
            reads.append(key)
        return plain(self, key)

    environ.__getitem__ = recorded
    package = importlib.import_module(name)
    modules = [name]
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
            modules.append(found.name)

    import jax
    jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend exists
    print(json.dumps({
        "file": package.__file__,
        "version": package.__version__,
        "modules": len(modules),
        "reads": reads,
        "connections": connections,
        "devices": len(jax.devices()),
        "path": sys.path,
    }))
"""


def test_every_module_imports_alone_and_touches_no_device_variable_or_network(package, environment):
    done = environment.run(
        environment.python, "-c", textwrap.dedent(IMPORT_EVERYTHING), package.import_name
    )
    assert done.returncode == 0, done.stdout
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["file"].startswith(str(environment.site_packages))
    assert not [entry for entry in seen["path"] if entry.startswith(str(package.folder.parent))]
    assert seen["version"] == package.version
    assert seen["modules"] >= 1
    assert seen["reads"] == []
    assert seen["connections"] == []
    assert seen["devices"] == 3


def test_undeclared_packages_are_out_of_reach(package, environment):
    higher = [other.import_name for other in packages() if other.layer > package.layer]
    script = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    done = environment.run(environment.python, "-c", script, "pytest", "hatchling", *higher)
    assert done.stdout.strip() == "[]"


def test_a_package_passes_its_own_tests_outside_the_source_tree(package, environment, tmp_path):
    if not list((package.folder / "tests").glob("test_*.py")):
        pytest.fail(f"{package} has no tests")
    done = run_tests(environment, package, tmp_path / "own", seconds=OWN_TEST_SECONDS)
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 1


def test_the_probe_of_imports_sees_devices_variables_and_connections(tmp_path):
    (tmp_path / "quiet").mkdir()
    (tmp_path / "quiet" / "__init__.py").write_text("__version__ = '1'")
    (tmp_path / "quiet" / "loud.py").write_text(
        "import os, socket\n"
        "os.environ.get('A'), os.getenv('B'), 'C' in os.environ\n"
        "try:\n    socket.create_connection(('127.0.0.1', 9))\nexcept OSError:\n    pass\n"
    )
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "__init__.py").write_text("import jax\njax.devices()")
    python = Environment(tmp_path, tmp_path).run
    script = textwrap.dedent(IMPORT_EVERYTHING)
    loud = python(sys.executable, "-c", script, "quiet", PYTHONPATH=str(tmp_path))
    seen = json.loads(loud.stdout.splitlines()[-1])
    assert seen["reads"] == ["A", "B", "C"]
    assert seen["connections"]
    early = python(sys.executable, "-c", script, "early", PYTHONPATH=str(tmp_path))
    assert early.returncode != 0
    assert "jax_num_cpu_devices" in early.stdout
