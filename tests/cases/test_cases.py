"""Each case program under each way to wrap it that it can meaningfully take, with the most demanded.

Law: equal in every bit to the unwrapped twin. Nothing here accepts an error
where the program's docstring leaves a choice, except where a way runs Python
twice and the program shows just that.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import lowtide
from lowtide import SwapManager

from .wraps import PolicyWay, Way, policy_ways, ways

LAYERS = {
    "c01_square_transpose": {},
    "c03_strides_come_back": {},
    "c05_saved_by_many_ops": {"host_bytes": True},
    "c07_collected_states": {},
    "c09_odd_saved_tensors": {},
    "c11_forward_without_backward": {"host_bytes": True},
    "c13_retain_graph": {},
    "c15_unused_branches": {},
    "c17_gradient_penalty": {},
    "c19_saved_read_twice": {"error_ok": False},
    "c23_autocast": {},
    "c27_optimizer_in_backward": {},
    "c29_argument_shapes": {},
    "c31_frozen_and_lora": {},
    "c33_order_changes": {},
    "c35_ddp_unused": {},
    "c37_attributes": {"full": True},
    "c39_changed_after_wrap": {},
    "c41_tensor_subclass": {},
    "c43_existing_gradients": {},
    "c61_hf_llama_cache": {"strict": True},
    "c63_hf_t5": {},
    "c65_hf_mamba": {"host_bytes": True},
}
POLICIES = {
    "c21_policy_inplace": {"strict": True},
    "c25_first_call_state": {"strict": True},
    "c45_alternating_policy": {"strict": True},
}
# Programs whose second run of Python is, by their own docstring, another run: what torch's checkpoint cannot do
# either is not demanded of the ways that call the layer again.
ONLY_ONCE = {
    "c19_saved_read_twice": {"error_ok": True},
    "c21_policy_inplace": {"strict": False},
    "c25_first_call_state": {"strict": False},
    "c45_alternating_policy": {"strict": False},
    "c61_hf_llama_cache": {"strict": False},
}
# A block around a layer hides the layer's own attributes, which is all that these programs are about.
BARE_ONLY = {"c37_attributes"}
# What they check of themselves is numbers.
VALUES = {"c09_odd_saved_tensors", "c31_frozen_and_lora", "c37_attributes"}


@pytest.fixture
def small_values_move() -> None:
    SwapManager().configure(min_bytes=0)


def _assert_nothing_left(name: str, way: Way) -> None:
    """Every copy died with its graph, by reference counting alone.

    A second run of Python that fails inside torch's checkpoint leaks the graph
    itself (torch's frames, the caller's cache and the graph hold each other).
    """
    if not (way.python and name in ONLY_ONCE):
        assert SwapManager().lower_bytes() == 0, "copies on the lower tier outlive their graphs"


def _options(name: str, way: Way, given: dict[str, Any]) -> dict[str, Any]:
    options = dict(given)
    # Under an accelerator the lower tier hands out buffers of at least 4 KiB: no measure of a few numbers.
    if options.pop("host_bytes", False) and torch.accelerator.current_accelerator() is None:
        options["host_bytes"] = SwapManager().lower_bytes
    if way.python:
        options.update(ONLY_ONCE.get(name, {}))
    return options


def _program(name: str) -> Any:
    if name.split("_")[1] == "hf":
        pytest.importorskip("transformers")
    return importlib.import_module(f".programs.{name}", __package__)


# A swap that nobody schedules keeps its values and warns once a model; transformers warns of its own renaming.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nothing says when.*:lowtide.errors.LowtideWarning"),
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),
]
LAYER_CASES = [(name, way) for name in LAYERS for way in ways() if not (way.around and name in BARE_ONLY)]
POLICY_CASES = [(name, way) for name in POLICIES for way in policy_ways()]


@pytest.mark.usefixtures("small_values_move")
@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(n, w, id=f"{n}-{w.name}", marks=[pytest.mark.values] if n in VALUES else []) for n, w in LAYER_CASES],
)
def test_layers(name: str, way: Way) -> None:
    try:
        _program(name).run(way, way.link, **_options(name, way, LAYERS[name]))
    finally:
        way.undo()
    _assert_nothing_left(name, way)


@pytest.mark.usefixtures("small_values_move")
@pytest.mark.parametrize(("name", "way"), [pytest.param(n, w, id=f"{n}-{w.name}") for n, w in POLICY_CASES])
def test_policies(name: str, way: PolicyWay) -> None:
    try:
        _program(name).run(way, way.link, **_options(name, way, POLICIES[name]))
    finally:
        way.undo()
    _assert_nothing_left(name, way)


class Groups:
    """The group calls of the manager under the names that the program uses."""

    def __init__(self) -> None:
        manager = SwapManager()
        self.set_group = manager.set_current_group_name
        self.launch_offload, self.wait_offload = manager.launch_offload, manager.wait_offload
        self.launch_load, self.wait_load = manager.launch_load, manager.wait_load


@pytest.mark.usefixtures("small_values_move")
@pytest.mark.parametrize("way", [w for w in ways() if w.name.endswith("unscheduled")], ids=lambda w: w.name)
def test_groups(way: Way) -> None:
    notes = _program("c59_group_misuse").run(way, Groups())
    assert notes["[]"] == "equal"
    for early in ("['wait_offload']", "['wait_load']", "['launch_load']"):
        assert notes[early].startswith("StateError"), (early, notes[early])
    assert notes["unknown"].startswith("ScheduleError"), notes["unknown"]


OPTIMIZERS = {
    "swapped": lambda optimizer: lowtide.swap_optimizer(optimizer, swap_times=3),
    "whole tensors": lambda optimizer: lowtide.swap_optimizer(optimizer, elementwise=False),
    "one bucket": lambda optimizer: lowtide.swap_optimizer(optimizer, swap_times=1),
    "on the device": lambda optimizer: lowtide.swap_optimizer(optimizer, tier="device"),
}


@pytest.mark.values
@pytest.mark.parametrize("way", OPTIMIZERS)
@pytest.mark.parametrize(
    "name", ["c50_optimizer_is_an_optimizer", "c52_optimizer_resume", "c54_optimizer_skipped_step"]
)
def test_optimizers(name: str, way: str) -> None:
    _program(name).run(OPTIMIZERS[way])


@pytest.mark.values
def test_shared_storage() -> None:
    _program("c58_bf16_training").run(lowtide.SharedMasters)
