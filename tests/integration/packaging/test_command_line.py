"""The installed command answers for help at once, without loading jax."""

import pytest

from .workspace import member

pytestmark = pytest.mark.isolated


@pytest.fixture
def environment(environment_of):
    return environment_of(member("megakernel-serve"))


@pytest.fixture
def no_jax(tmp_path):
    """A folder that makes every import of jax fail."""
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    return str(tmp_path)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_does_not_import_jax(environment, no_jax, arguments):
    done = environment.run(environment.scripts / "megakernel", *arguments, PYTHONPATH=no_jax)
    assert done.returncode == 0, done.stdout
    if "--help" in arguments:
        assert done.stdout.lower().startswith("usage: megakernel")


def test_the_module_is_the_same_command(environment, no_jax):
    command = environment.run(environment.scripts / "megakernel", "--help", PYTHONPATH=no_jax)
    module = environment.run(
        environment.python, "-m", "megakernel_serve", "--help", PYTHONPATH=no_jax
    )
    assert module.returncode == 0, module.stdout
    assert module.stdout == command.stdout


def test_an_unknown_command_is_a_usage_error(environment, no_jax):
    done = environment.run(environment.scripts / "megakernel", "no-such-command", PYTHONPATH=no_jax)
    assert done.returncode == 2
    assert "no-such-command" in done.stdout
