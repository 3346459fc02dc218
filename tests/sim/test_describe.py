"""Descriptions of devices: complete, honest about where a figure comes from, and refused where they are not."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import LowtideError
from lowtide.sim.describe import FOLDER, TAGS, Description, DescriptionError

NAMES = ("a100-80gb", "ascend-910b", "gh200", "h100-80gb", "h200-141gb", "tiny")


def entries(name: str = "tiny") -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return read


def written(folder: Path, content: object, name: str = "mine.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_these_devices_come_with_the_package() -> None:
    assert Description.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_how_sure_it_is_and_where_it_comes_from(name: str) -> None:
    description = Description.named(name)
    assert description.name == name
    assert set(description.origins) == set(entries(name))
    for key, origin in description.origins.items():
        assert origin.tag in TAGS
        assert origin.source
        assert origin.unit == entries(name)[key]["unit"]
    table = description.describe()
    assert table.splitlines()[0] == name
    assert all(key in table for key in description.origins)


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_one_kind_have_one_type(name: str) -> None:
    description = Description.named(name)
    assert type(description.capacity) is int
    assert type(description.allocation_round) is int
    assert type(description.launch) is float
    assert type(description.link_out) is float


def test_a_kernel_takes_the_longest_of_latency_operations_and_bytes() -> None:
    h100 = Description.named("h100-80gb")
    assert h100.kernel_seconds(1e12, 0) == 1e12 / (989e12 * 0.65)
    assert h100.kernel_seconds(1e12, 1e12) == 1e12 / (3.35e12 * 0.8)
    assert h100.kernel_seconds(1e12, 0, single=True) == 1e12 / (67e12 * 0.65)
    assert h100.kernel_seconds(1, 1) == h100.kernel_latency


def test_the_links_that_the_planner_assumes() -> None:
    links = {name: Description.named(name).link_out for name in NAMES}
    assert links == {
        "a100-80gb": 24e9,
        "ascend-910b": 25e9,
        "gh200": 350e9,
        "h100-80gb": 50e9,
        "h200-141gb": 50e9,
        "tiny": 1e9,
    }
    assert all(Description.named(name).link_in == links[name] for name in NAMES)


def test_a_changed_figure_is_told_apart_from_one_of_the_file() -> None:
    changed = Description.named("tiny").with_(link=7.0, capacity=10)
    assert (changed.link_out, changed.link_in, changed.capacity) == (7.0, 7.0, 10)
    assert changed.origins["capacity"].tag == "given"
    assert changed.origins["launch"] == Description.named("tiny").origins["launch"]
    assert changed.with_(link_in=8.0).link_out == 7.0


def test_equal_figures_are_equal_descriptions() -> None:
    tiny = Description.named("tiny")
    assert tiny == Description.named("tiny")
    assert tiny != tiny.with_(launch=2e-6)
    assert tiny == tiny.with_(launch=tiny.launch)
    assert hash(tiny) == hash(Description.named("tiny"))


def test_a_description_survives_a_copy_and_a_pickle() -> None:
    tiny = Description.named("tiny")
    for twin in (copy.deepcopy(tiny), pickle.loads(pickle.dumps(tiny))):  # noqa: S301 - our own bytes
        assert twin == tiny
        assert twin.origins == tiny.origins


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(DescriptionError, match=r"expected one of a100.*, got 'h300'"):
        Description.named("h300")
    with pytest.raises(DescriptionError, match="no description"):
        Description.named("../devices/tiny")


def test_the_error_is_both_ours_and_a_value_error() -> None:
    assert issubclass(DescriptionError, LowtideError)
    assert issubclass(DescriptionError, ValueError)


@pytest.mark.parametrize("key", list(entries()))
def test_a_missing_figure_is_named(key: str, tmp_path: Path) -> None:
    content = entries()
    del content[key]
    with pytest.raises(DescriptionError, match=rf"missing figures.*got {key} \(.*mine\.json\)"):
        Description.read(written(tmp_path, content))


def test_an_unknown_figure_is_named(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"unknown figures.*got colour"):
        Description.read(written(tmp_path, entries() | {"colour": 1}))
    with pytest.raises(DescriptionError, match=r"unknown figures.*got colour \(tiny\)"):
        Description.named("tiny").with_(colour=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("capacity", 0),
        ("capacity", 1.5),
        ("capacity", True),
        ("allocation_round", -512),
        ("flops_half", 0.0),
        ("flops_single", "1e12"),
        ("memory_rate", float("inf")),
        ("link_out", float("nan")),
        ("link_in", None),
        ("flops_efficiency", 1.01),
        ("memory_efficiency", 0),
        ("pageable_share", -0.5),
        ("launch", -1e-9),
        ("link_latency", [0]),
        ("duplex", "simplex"),
        ("duplex", ["full"]),
    ],
)
def test_a_wrong_value_is_refused_wherever_it_comes_from(key: str, value: object, tmp_path: Path) -> None:
    content = entries()
    content[key]["value"] = value
    with pytest.raises(DescriptionError, match=rf"^{key} of a device is wrong: expected .*mine\.json"):
        Description.read(written(tmp_path, content))
    with pytest.raises(DescriptionError, match=rf"^{key} of a device is wrong: expected .*\(tiny\)"):
        Description.named("tiny").with_(**{key: value})


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("unit", "GB/s", "another unit: expected 'B/s', got 'GB/s'"),
        ("tag", "hearsay", "another tag: expected one of datasheet"),
        ("tag", "given", "another tag"),
        ("source", " ", "no source"),
        ("source", 3, "no source"),
    ],
)
def test_a_figure_without_its_origin_is_refused(part: str, value: object, message: str, tmp_path: Path) -> None:
    content = entries()
    content["memory_rate"][part] = value
    with pytest.raises(DescriptionError, match=f"memory_rate of a device has {message}"):
        Description.read(written(tmp_path, content))


@pytest.mark.parametrize("entry", [5, {"value": 1.0}, {**entries()["launch"], "note": ""}, None])
def test_a_figure_of_other_parts_is_refused(entry: object, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match="launch of a device has other parts"):
        Description.read(written(tmp_path, entries() | {"launch": entry}))


@pytest.mark.parametrize("content", ["", "{", "[1]", "7"])
def test_a_file_that_is_no_object_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"expected a JSON object of figures.*mine\.json"):
        Description.read(written(tmp_path, content))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"cannot be read.*FileNotFoundError.*absent\.json"):
        Description.read(tmp_path / "absent.json")


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    mine = Description.read(written(tmp_path, entries("gh200"), "rack.json"))
    assert mine.name == "rack"
    assert mine.link_in == 350e9


def test_reading_a_description_starts_no_device() -> None:
    code = (
        "import torch; from lowtide.sim.describe import Description; Description.named('tiny'); "
        "print(torch._C._get_privateuse1_backend_name())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["privateuseone"]
