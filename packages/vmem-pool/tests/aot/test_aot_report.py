"""Reports on kernels with known answers, compiled for TPU v7 without one."""

import json
from functools import cache
from pathlib import Path

import pytest
from vmem_pool import aot
from vmem_pool.aot.__main__ import main
from vmem_pool.aot.target import spell

TARGETS = Path(__file__).with_name("targets.py")
compiles = pytest.mark.tpu_compile


@cache
def _report(build, trips=()):
    return aot.report(f"{TARGETS}:{build}", options=aot.Options(trips=dict(trips)))


@compiles
def test_the_loop_tree_has_the_trips_of_the_source():
    (kernel,) = _report("build_loops", (("L2", 0),)).kernels
    (outer, inner), (unknown, last) = [(loop, loop.children[0]) for loop in kernel.root.children]
    assert [loop.trips for loop in (outer, inner, unknown, last)] == [8, 32, 0, 32]
    assert kernel.warnings == ()
    assert kernel.unknown_trips == ()
    assert inner.own["VALU"] == 2
    assert inner.own["VSTORE"] == 1
    assert kernel.cycles[1] > 8 * 32 * inner.cycles[1]
    assert kernel.vmem_bytes == 256 * 128 * 4
    assert kernel.fits_overlay
    assert 0 < kernel.code_bundles <= kernel.scheduled_bundles
    assert inner.source.startswith("targets.py:")


@compiles
def test_given_trips_are_counted():
    base, more = (_report("build_loops", (("L2", n),)).kernels[0] for n in (0, 10))
    unknown = more.root.children[1]
    assert more.cycles[1] - base.cycles[1] == 10 * unknown.cycles[1] > 0


@compiles
def test_loops_of_unknown_length_are_named():
    assert _report("build_loops").kernels[0].unknown_trips == ("L2",)


@compiles
def test_the_barrier_over_the_whole_mesh_is_seen():
    added = _report("build_with_barrier").kernels[0]
    skipped = _report("build_without_barrier").kernels[0]
    assert added.global_barrier
    assert not skipped.global_barrier
    assert added.cycles[1] > skipped.cycles[1] + 50
    for kernel in (added, skipped):
        assert [(dma.remote, dma.bytes) for dma in kernel.dmas] == [(True, 4096)]


@compiles
def test_remote_transfers_are_in_the_inventory():
    found = _report("build_without_barrier").inventory
    assert found.total("dma_start", "remote") == (4096, 4096)
    assert found.executions("dma_wait", "remote") == (2, 2)


@compiles
def test_what_does_not_compile_raises_the_compilers_message():
    with pytest.raises(aot.CompileError, match="vmem"):
        _report("build_too_big")
    with pytest.raises(aot.CompileError, match="ValueError: this target is broken on purpose"):
        _report("build_broken")


@compiles
def test_the_command_prints_and_dumps(capsys, tmp_path):
    target = f"{TARGETS}:build_loops"
    assert main([target, "--trips", "L2=3", "--keep", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "\nloops" in printed
    assert "bundles of code, inside one overlay" in printed
    assert "x32 (entered 8 times)" in printed
    assert list(tmp_path.glob("*loops*final_bundles.txt"))
    assert main([target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0]["root"]["children"]


def test_a_target_that_nobody_can_load_is_refused():
    with pytest.raises(ValueError, match=r"names no function; write FILE\.py:build"):
        spell("targets.py")
    with pytest.raises(ValueError, match="not at the top of its file"):
        spell(lambda topology: None)


def test_without_libtpu_the_error_names_the_extra_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([f"{TARGETS}:build_loops"]) == 1
    assert "pip install 'vmem-pool[tpu]'" in capsys.readouterr().err


def test_trips_are_names_and_numbers(capsys):
    with pytest.raises(SystemExit):
        main([f"{TARGETS}:build_loops", "--trips", "L0"])
    assert "'L0' is not of the form NAME=NUMBER" in capsys.readouterr().err
