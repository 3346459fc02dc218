"""The command line: what each command hands over, what it exits with, how it words an error."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from lowtide import cli
from lowtide.errors import UnsupportedError
from lowtide.measure import Record, write_records

COMMANDS = ("demo", "selfcheck", "bench", "report", "version")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_version_is_that_of_the_installed_packages() -> None:
    result = invoke("version")
    assert result.exit_code == 0
    assert result.output == f"lowtide {importlib.metadata.version('lowtide')}, torch {torch.__version__}\n"


def test_the_installed_command_shows_every_command_and_says_nothing_to_stderr() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "lowtide.cli", "--help"], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert all(command in shown.stdout for command in COMMANDS)
    assert shown.stderr == ""


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("selfcheck", "--json", "a.json"), ((Path("a.json"),), {})),
        (("selfcheck",), ((None,), {})),
        (("bench", "--quick", "--json", "a.json"), ((Path("a.json"),), {"quick": True})),
        (("bench",), ((None,), {"quick": False})),
    ],
)
def test_selfcheck_and_bench_hand_over_their_options_and_exit_with_the_answer(
    command: tuple[str, ...], expected: tuple[object, object], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def part(*args: object, **kwargs: object) -> int:
        calls.append((args, kwargs))
        return status

    monkeypatch.setattr(f"lowtide.{command[0]}.run", part)
    assert invoke(*command).exit_code == status
    assert calls == [expected]


def test_demo_hands_over_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lowtide.demo

    calls = []

    def demonstration(*args: object, **kwargs: object) -> int:
        calls.append((args, kwargs))
        return 1

    monkeypatch.setattr(lowtide.demo, "run", demonstration)
    options = ("--steps", "5", "--batch", "2", "--seed", "7", "--threads", "2", "--out", str(tmp_path))
    assert invoke("demo", *options).exit_code == 1
    settings = lowtide.demo.Settings(steps=5, batch=2, seed=7, threads=2)
    assert calls == [((settings, tmp_path), {"json": None, "markdown": None})]


def test_the_defaults_of_the_command_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import lowtide.demo

    seen = []
    monkeypatch.setattr(lowtide.demo, "run", lambda settings, *_, **__: seen.append(settings) or 0)
    assert invoke("demo").exit_code == 0
    assert seen == [lowtide.demo.Settings()]


@pytest.mark.parametrize("option", [("--steps", "1"), ("--batch", "0"), ("--threads", "0"), ("--seed", "-1")])
def test_an_option_out_of_range_is_refused_by_name(option: tuple[str, str]) -> None:
    result = invoke("demo", *option)
    assert result.exit_code == 2
    assert option[0] in result.output


def test_report_prints_the_table_of_a_saved_demonstration(tmp_path: Path) -> None:
    figures = {
        "steps": 1,
        "steps_with_equal_loss": 1,
        "loss_step_1": (2.5).hex(),
        "peak_bytes": 3 << 20,
        "step_seconds": 0.25,
        "regions": 2,
        "kept_bytes": 1 << 20,
        "recomputed_bytes": 4 << 20,
        "swapped_bytes": 5 << 20,
        "file_bytes": 6 << 20,
    }
    records = [Record("demo", "gpt", "recompute", metric, value, "") for metric, value in figures.items()]
    write_records(tmp_path / "figures.json", records)
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 0
    row = next(line.split() for line in result.output.splitlines() if line.startswith("recompute"))
    assert row == ["recompute", "1/1", "2.500", "3.0", "1.00", "0.250", "1.00", "1.0", "4.0", "5.0", "6.0"]
    assert str(tmp_path / "report.html") in result.output


def test_report_of_an_empty_folder_says_what_to_run(tmp_path: Path) -> None:
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 2
    assert "lowtide demo" in result.output


def test_an_error_of_lowtide_is_one_line_and_exit_status_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise UnsupportedError("the report cannot be drawn: expected matplotlib")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "lowtide: the report cannot be drawn: expected matplotlib\n"


def test_parts_are_imported_inside_their_commands() -> None:
    """Bench, demo and what they draw with are no cost of importing the command line."""
    listed = "import sys, lowtide.cli; print([name for name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True).stdout
    assert isinstance(cli, types.ModuleType)
    for part in ("lowtide.demo", "lowtide.bench", "lowtide.selfcheck", "matplotlib", "jinja2"):
        assert f"'{part}'" not in loaded
