"""The printed map, the picture and the command."""

import subprocess
import sys

import pytest
from vmem_pool import Buffer, PlanError, ReceiveArea, plan, save_plot
from vmem_pool.__main__ import main
from vmem_pool.report import text


def example():
    buffers = [
        ReceiveArea("partials", (2, 8, 128), "float32"),
        Buffer("weights", (256, 128), "bfloat16", (3, 0)),
        Buffer("scores", (8, 128), "float32", (1, 2)),
    ]
    return plan(buffers, 1 << 20, ("project", "attend", "reduce", "route"), loop=True)


def test_the_map_shows_each_lifeline_and_the_bytes_of_each_phase():
    printed = text(example())
    lines = {line.split()[1]: line for line in printed.splitlines() if line.startswith("│")}
    assert "█··█" in lines["weights"]
    assert "·██·" in lines["scores"]
    assert "████" in lines["partials"]
    assert "█▂▂█" in lines["live"]
    assert "fullest is phase 0 (project): 72 KiB live" in printed
    assert lines["weights"].split("│")[4].strip() == "8192"


def test_the_picture_is_drawn_in_the_format_of_its_suffix(tmp_path):
    pytest.importorskip("matplotlib")
    save_plot(example(), tmp_path / "plan.svg")
    save_plot(example(), tmp_path / "plan.png")
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'vmem-pool\[plot\]'"):
        save_plot(example(), tmp_path / "plan.svg")


def test_an_unknown_picture_format_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"cannot draw plan\.bmp"):
        save_plot(example(), tmp_path / "plan.bmp")


MODULE = """
from vmem_pool import Buffer, plan

def make():
    return plan([Buffer("weights", (256, 128), "bfloat16", (0, 1))], 1 << 20)

planned = make()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "some_kernel_plan.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "some_kernel_plan"


@pytest.mark.parametrize("name", ["make", "planned"])
def test_the_command_prints_a_plan_or_what_a_function_plans(module, name, capsys):
    assert main([f"{module}:{name}"]) == 0
    assert "weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("some_kernel_plan", "names no plan; write MODULE:NAME"),
        ("some_kernel_plan:Buffer2", "is not a Plan"),
        ("no_such_module_here:plan", "No module named 'no_such_module_here'"),
    ],
)
def test_the_command_says_why_there_is_no_plan(module, spec, message, capsys):
    assert main([spec]) == 1
    assert message in capsys.readouterr().err


def test_importing_the_package_starts_no_backend_and_needs_no_matplotlib():
    code = (
        "import sys, vmem_pool, vmem_pool.aot, vmem_pool.container, vmem_pool.stream\n"
        "assert 'matplotlib' not in sys.modules\n"
        "xb = sys.modules.get('jax._src.xla_bridge')\n"
        "assert xb is None or not xb.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
