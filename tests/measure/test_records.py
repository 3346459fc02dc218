"""Records survive the way to a file and back, and nothing else passes for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.measure import Record, read_records, write_records

RECORDS = [
    Record("demo", "gpt", "plain", "peak_bytes", 123, "B"),
    Record("demo", "gpt", "swap", "loss_step_1", (0.1).hex(), "float.hex"),
    Record("bench", "llama", "recompute", "step_over_plain", 1.25, "ratio"),
]


def test_a_file_holds_one_flat_list_with_exactly_the_six_keys(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "figures.json"
    write_records(path, iter(RECORDS))
    entries = json.loads(path.read_text())
    assert [set(entry) for entry in entries] == [{"bench", "case", "mode", "metric", "value", "unit"}] * 3
    assert read_records(path) == RECORDS
    assert list(path.parent.iterdir()) == [path], "no partial file stays behind"


def test_an_empty_list_is_a_list(tmp_path: Path) -> None:
    write_records(tmp_path / "none.json", [])
    assert read_records(tmp_path / "none.json") == []


def test_a_second_write_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_records(path, RECORDS)
    write_records(path, RECORDS[:1])
    assert read_records(path) == RECORDS[:1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_json_cannot_hold_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match=r"demo/gpt/plain/loss.*finite"):
        Record("demo", "gpt", "plain", "loss", value, "nat")


@pytest.mark.parametrize("text", ["{}", '[{"bench": "demo"}]', "[3]"])
def test_a_file_of_another_form_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json.*expected"):
        read_records(path)
