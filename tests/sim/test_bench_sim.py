"""``lowtide bench sim`` on the simulated device: figures that follow from the engine's laws, the same in every run."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.bench.sim_policies import POLICIES
from lowtide.measure import read_records

pytestmark = pytest.mark.sim

# The simulator takes a process's accelerator over: each run has a process of its own.
RUN = """
import sys
from pathlib import Path
from lowtide.bench.sim import run
*options, folder = sys.argv[1:]
micro_batches, warm_up = map(int, options[4:6] or (1, 0))
link = float(options[6]) if options[6:] else None
raise SystemExit(run("h100-80gb", options[0], layers=int(options[1]), seq=int(options[2]),
    policies=options[3].split(","), micro_batches=micro_batches, warm_up=warm_up, link=link,
    json=Path(folder, "figures.json"), trace=Path(folder, "step.json.gz")))
"""
Figures = dict[str, dict[str, Any]]


def figures(folder: Path, *options: str) -> tuple[Figures, str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *options, str(folder)],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Figures = {}
    for record in read_records(folder / "figures.json"):
        assert record.bench == "bench sim"
        found.setdefault(record.mode, {})[record.metric] = record.value
    return found, done.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Figures, str, Path]:
    """Four layers of the 7B model, each at the size that the roofline's figures are for."""
    folder = tmp_path_factory.mktemp("bench")
    return *figures(folder, "llama-7b", "4", "4096", "all"), folder


def test_every_policy_is_in_the_table_and_in_the_records(seen: tuple[Figures, str, Path]) -> None:
    found, shown, _ = seen
    assert list(found) == list(POLICIES)
    assert all(name in shown for name in POLICIES)
    assert found["swap-hideable"]["moved"].startswith("inputs, ")
    assert f"swap-hideable: moves {found['swap-hideable']['moved']}." in shown


def test_a_plain_layer_keeps_the_bytes_that_can_be_counted_by_hand(seen: tuple[Figures, str, Path]) -> None:
    plain = seen[0]["plain"]
    # Norms, attention and MLP of four layers; the output; the tables of positions were there before.
    assert plain["kept_after_forward_bytes"] == 4 * 728.53125 * 2**20 + 32 * 2**20


def test_full_recompute_costs_a_forward_without_its_last_product(seen: tuple[Figures, str, Path]) -> None:
    recompute = seen[0]["recompute"]
    assert 0.25 < recompute["over_plain"] < 0.30
    assert recompute["kept_after_forward_bytes"] == 4 * 32 * 2**20


def test_a_chunk_of_four_layers_keeps_one_input_and_runs_three_last_products_more(
    seen: tuple[Figures, str, Path],
) -> None:
    recompute, chunks = seen[0]["recompute"], seen[0]["recompute+chunks"]
    # The chunk's input is the model's own; what is left after forward is the output.
    assert chunks["kept_after_forward_bytes"] == 32 * 2**20
    assert recompute["recompute_over_plain"] < chunks["recompute_over_plain"] < 1 / 3
    assert chunks["exposed_over_step"] == 0
    assert abs(chunks["over_closed_form"]) < 0.002


def test_moving_inputs_is_free(seen: tuple[Figures, str, Path]) -> None:
    recompute, moved = seen[0]["recompute"], seen[0]["recompute+swap-inputs"]
    assert moved["over_plain"] - recompute["over_plain"] <= 0.005
    # Two layers' inputs, the output, and the gradient that is handed on.
    assert moved["inputs_resident"] <= 4
    # The model's own input is held by its owner, so moving it frees nothing; the last layer's stays, and that of the
    # layer before it is still there when backward asks for it.
    assert moved["out_bytes"] == 2 * 32 * 2**20
    assert moved["in_bytes"] == 32 * 2**20


def test_what_is_chosen_as_hideable_is_hidden(seen: tuple[Figures, str, Path]) -> None:
    hidden = seen[0]["swap-hideable"]
    assert hidden["exposed_over_step"] <= 0.01
    assert hidden["out_utilisation"] > 0.1


def test_keeping_products_costs_what_swapping_them_recomputes(seen: tuple[Figures, str, Path]) -> None:
    save, swap = seen[0]["save"], seen[0]["swap"]
    assert save["recompute_over_plain"] == pytest.approx(swap["recompute_over_plain"], abs=1e-9)
    assert save["exposed_seconds"] == save["out_bytes"] == 0
    assert swap["exposed_seconds"] > 0


def test_a_step_without_copies_is_its_closed_form(seen: tuple[Figures, str, Path]) -> None:
    for name in ("plain", "recompute", "save"):
        assert abs(seen[0][name]["over_closed_form"]) < 0.002


def test_swapped_attention_is_free_where_the_link_hides_it(seen: tuple[Figures, str, Path]) -> None:
    attention = seen[0]["swap-attention"]
    # q, k, v and attention's own result, the input of the projections, and a logarithm a head and token.
    assert attention["layer_bytes"] == 5 * 32 * 2**20 + 4096 * 32 * 4
    assert attention["over_plain"] <= 0.02
    assert attention["exposed_over_step"] == 0


@pytest.mark.parametrize("link", ["10", "5"])
def test_swapped_attention_costs_its_closed_form_where_the_link_does_not(link: str, tmp_path: Path) -> None:
    found, _ = figures(tmp_path, "llama-7b", "6", "4096", "swap-attention", "1", "0", link)
    assert found["swap-attention"]["over_plain"] > 0.5
    assert abs(found["swap-attention"]["over_closed_form"]) < 0.001


def test_moving_everything_costs_its_closed_form(seen: tuple[Figures, str, Path]) -> None:
    assert seen[0]["swap-all"]["over_plain"] > 0.5
    assert abs(seen[0]["swap-all"]["over_closed_form"]) < 0.001


def test_each_policy_has_its_trace(seen: tuple[Figures, str, Path]) -> None:
    folder = seen[2]
    assert {p.name for p in folder.glob("*.gz")} == {f"{name}.step.json.gz" for name in POLICIES}
    events = json.loads(gzip.decompress((folder / "swap.step.json.gz").read_bytes()))["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"sim:0 compute", "sim:0 copies out", "sim:0 copies in"}
    moved = sum(event["args"]["bytes"] for event in events if event.get("cat") == "out")
    assert moved == seen[0]["swap"]["out_bytes"]
    end = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert end == pytest.approx(seen[0]["swap"]["step_seconds"] * 1e6, abs=0.01)


def test_the_same_run_gives_the_same_figures(tmp_path: Path) -> None:
    runs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(figures(folder, "tiny-llama", "3", "64", "recompute,save"))
    assert runs[0] == runs[1]
    text = [(tmp_path / str(n) / "figures.json").read_text(encoding="utf-8") for n in range(2)]
    assert json.loads(text[0]) == json.loads(text[1])


def test_a_pipelines_stage_waits_for_no_copy_and_holds_what_is_warming_up(tmp_path: Path) -> None:
    """1F1B: three forwards, then one forward and one backward in turn. Residency does not grow with micro-batches."""
    layers, policies = 4, "recompute,recompute+swap-inputs,swap-hideable"
    peaks: dict[int, dict[str, int]] = {}
    for count in (5, 8):
        folder = tmp_path / str(count)
        folder.mkdir()
        found, _ = figures(folder, "llama-7b", str(layers), "4096", policies, str(count), "3")
        for name in ("recompute+swap-inputs", "swap-hideable"):
            assert found[name]["exposed_over_step"] < 0.01
        swapped, kept = found["recompute+swap-inputs"], found["recompute"]
        assert swapped["step_seconds"] <= 1.005 * kept["step_seconds"]
        # Every micro-batch's layers keep their inputs but the model's own, which is somebody else's.
        assert kept["inputs_resident"] - swapped["inputs_resident"] >= 3 * (layers - 1) - 2
        peaks[count] = {name: found[name]["peak_active_bytes"] for name in found}
    assert peaks[5] == peaks[8]


def test_what_does_not_fit_is_reported(tmp_path: Path) -> None:
    found, shown = figures(tmp_path, "llama-70b", "20", "32768", "recompute,swap-hideable")
    assert found["plain"] == {"failure": "out of memory"}
    assert "failure" in found["swap-hideable"]
    assert "plain: out of memory." in shown
