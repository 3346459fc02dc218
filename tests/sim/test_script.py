"""``lowtide simulate``: a script runs as Python would run it, on the simulated device, and its figures are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.measure import read_records

pytestmark = pytest.mark.sim

ROOT = Path(__file__).parents[2]
# The simulator takes a process's accelerator over: each script has a process of its own.
RUN = """
import sys
from pathlib import Path
from lowtide.sim.script import run_script
script, folder, *args = sys.argv[1:]
raise SystemExit(run_script(Path(script), args, device="tiny",
    json=Path(folder, "figures.json"), trace=Path(folder, "trace.json")))
"""


def simulate(script: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, str(script), str(folder), *args],
        env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_script_is_started_as_python_starts_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'found'\n", encoding="utf-8")
    script = written(tmp_path, "import sys, beside\nprint(__name__, sys.argv, beside.NAME, __file__)\n")
    done = simulate(script, tmp_path, "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"__main__ {[str(script), '--steps', '3']} found {script}"


ENDINGS = [
    ("raise SystemExit(7)", 7, ""),
    ("raise SystemExit", 0, ""),
    ("raise SystemExit('no data')", 1, "no data"),
    ("import torch; torch.ones(1, device='sim')[3]", 1, "IndexError"),
    ("import torch; torch.empty(2 << 30, dtype=torch.uint8, device='sim')", 1, "OutOfMemoryError"),
    ("def (", 1, "SyntaxError"),
]


def test_the_exit_code_is_kept_and_the_figures_are_told_all_the_same(tmp_path: Path) -> None:
    for number, (text, _, _) in enumerate(ENDINGS):
        (tmp_path / f"{number}.py").write_text(text, encoding="utf-8")
    # One process runs them all, since starting one takes longest.
    every = RUN.replace(
        "raise SystemExit(run_script(Path(script), args, ",
        "for p in sorted(Path(folder).glob('[0-9].py')): print('code', run_script(p, ",
    )
    done = subprocess.run([sys.executable, "-c", every, "", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == [code for _, code, _ in ENDINGS]
    assert done.stdout.count("virtual seconds") == len(ENDINGS)
    assert all(said in done.stderr for _, _, said in ENDINGS)


def test_the_figures_are_those_of_the_script(tmp_path: Path) -> None:
    text = """
import torch
x = torch.ones(1 << 18, device="sim")  # 1 MiB
y = x * 2
print(y.sum().item())
pinned = torch.empty(1 << 18, pin_memory=True)
pinned.copy_(y, non_blocking=True)
torch.accelerator.synchronize()
"""
    done = simulate(written(tmp_path, text), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "524288.0"
    found = {record.metric: record for record in read_records(tmp_path / "figures.json")}
    assert {(r.bench, r.case, r.mode) for r in found.values()} == {("simulate", "script.py", "tiny")}
    assert found["peak_active_bytes"].value >= 2 << 20
    assert found["capacity_bytes"].value == 1 << 30
    assert found["races"].value == 0
    assert found["in_bytes"].value == 0
    # 1 MiB at 1 GB/s, and the one number that the host read.
    assert (1 << 20) <= found["out_bytes"].value <= (1 << 20) + 8
    assert float(found["virtual_seconds"].value) > (1 << 20) / 1e9
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert any(event.get("cat") == "out" and event["args"]["bytes"] == 1 << 20 for event in events)


def test_a_race_is_told(tmp_path: Path) -> None:
    text = """
import torch
x = torch.ones(1 << 18, device="sim")
with torch.Stream(device="sim"):
    x.mul_(2)
"""
    done = simulate(written(tmp_path, text), tmp_path)
    assert done.returncode == 0, done.stderr
    found = {record.metric: record.value for record in read_records(tmp_path / "figures.json")}
    assert int(found["races"]) > 0
    assert "mul" in done.stdout


def test_the_example_trains_the_same_on_the_simulated_device_and_moves_its_activations(tmp_path: Path) -> None:
    done = simulate(ROOT / "examples" / "simulate_training.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bit-equal: True" in done.stdout
    assert " on sim" in done.stdout
    found = {record.metric: record.value for record in read_records(tmp_path / "figures.json")}
    assert found["races"] == 0
    assert int(found["out_bytes"]) > 1 << 20


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    from lowtide.sim.script import ScriptError, run_script

    with pytest.raises(ScriptError, match=r"expected a Python file, got .*absent\.py"):
        run_script(tmp_path / "absent.py")
