"""The walks of benchmarks.walks, hop by hop: no way up, and no longer than the table there says."""

import re

import pytest

from benchmarks import walks

#: How much longer than in the table a walk may be: files, hops, returns. Longer ones need a reason and a new table.
SLACK = (3, 12, 6)


@pytest.fixture(scope="module")
def measured():
    return walks.measure()


def test_no_layer_calls_a_higher_one_by_name(measured):
    assert {name: walks.ways_up(calls) for name, calls in measured.items()} == {name: [] for name in measured}


def test_walks_do_not_grow(measured):
    rows = re.findall(r"^\| (\w+) \| \d+ -> (\d+) \| \d+ -> (\d+) \| \d+ -> (\d+) \| \d+ \|$", walks.__doc__, re.MULTILINE)
    table = {name: [int(number) for number in numbers] for name, *numbers in rows}
    assert list(table) == list(measured)
    for name, calls in measured.items():
        for now, most, slack in zip(walks.counts(calls), table[name], SLACK, strict=True):
            assert now <= most + slack, f"{name}: {walks.counts(calls)} files, hops and returns, the table has {table[name]}"


def test_a_way_up_is_seen():
    found = [
        walks.Call("engine/files.py", "report.py", "write", False, False),
        walks.Call("engine/files.py", "report.py", "write", True, False),  # handed down
        walks.Call("report.py", "engine/files.py", "write_file", False, False),
        walks.Call("audits/audit.py", "report.py", "write", False, False),  # the door
    ]
    assert walks.ways_up(found) == found[:1]
