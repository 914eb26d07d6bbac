"""Choosing schedules: the cost model, tables of timed choices, and timing itself.

There is no TPU here, so no time below is one of a TPU.
"""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from tpu_collectives import AllReduce, CollectiveError, ScheduleTable, Topology, TuningError
from tpu_collectives.table import TableEntry
from tpu_collectives.tune import Timing, tune

HOST = Topology.from_name("tpu7x:2x2x1")
POD = Topology.from_name("tpu7x:2x2x4")
ENTRY = TableEntry(
    topology="4 hosts x 4 chips x 2 cores",
    tree=("host", "lane"),
    rows=1,
    width=7168,
    wire_dtype="bfloat16",
    scatter=2,
    us=5.0,
    origin="measured",
    device="a made-up device",
)


@pytest.mark.parametrize(
    ("topology", "rows", "width", "scatter"),
    [
        (HOST, 1, 5120, 0),
        (HOST, 4, 5120, 0),
        (HOST, 16, 5120, 1),
        (POD, 1, 7168, 0),
        (POD, 2, 7168, 0),
        (POD, 8, 7168, 1),
        (POD, 16, 7168, 1),
    ],
)
def test_without_a_table_the_model_scatters_more_the_more_rows_there_are(
    topology, rows, width, scatter
):
    assert AllReduce(topology, rows, width).scatter == scatter


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_chosen_schedule_is_the_cheapest_of_all(rows):
    times = [AllReduce(POD, rows, 7168, schedule=s).modelled_us for s in range(3)]
    assert AllReduce(POD, rows, 7168).modelled_us == min(times)


def test_a_measured_entry_overrules_the_model_for_its_size_only():
    table = ScheduleTable((ENTRY,))
    assert AllReduce(POD, 1, 7168, schedule=table).scatter == 2
    assert AllReduce(POD, 2, 7168, schedule=table).scatter == 0
    assert AllReduce(POD, 1, 7168, jnp.float32, schedule=table).scatter == 0
    assert AllReduce(HOST, 1, 7168, schedule=table).scatter == 0


def test_an_interpreted_entry_is_never_used():
    table = ScheduleTable((replace(ENTRY, origin="interpreted"),))
    assert AllReduce(POD, 1, 7168, schedule=table).scatter == 0


def test_a_table_survives_its_file_and_newer_entries_replace_older_ones(tmp_path):
    path = tmp_path / "table.json"
    ScheduleTable((ENTRY,)).save(path)
    loaded = ScheduleTable.load(path)
    assert loaded == ScheduleTable((ENTRY,))
    newer, other = replace(ENTRY, scatter=1), replace(ENTRY, rows=2)
    assert loaded.updated([newer, other]).entries == (newer, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a schedule table"),
        ("[]", "is not a schedule table"),
        ('{"format": 9}', "format 9; this version reads 1"),
        ('{"format": 1, "entries": [{"tree": []}]}', "is not a schedule table"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, text, message):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(CollectiveError, match=message):
        ScheduleTable.load(path)


def test_timing_without_a_tpu_is_refused():
    with pytest.raises(TuningError, match=r"timed on TPUs, and virtual:.* has cpu devices"):
        tune(Topology.virtual(2), [(1, 128)])


def test_the_procedure_runs_in_the_interpreter_and_says_so():
    topology = Topology.virtual(2)
    timing = Timing(uses=2, calls=1, interpret=True)
    table = tune(topology, [(1, 128)], timing=timing, table=ScheduleTable((ENTRY,)))
    kept, new = table.entries
    assert kept == ENTRY
    assert (new.origin, new.device) == ("interpreted", "interpreter on cpu")
    assert new.topology == "1 hosts x 1 chips x 2 cores"
    assert new.us > 0
    assert table.lookup(topology, ("all",), 1, 128, jnp.bfloat16) is None
