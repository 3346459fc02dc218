"""What every test starts from: one compute thread, a fixed seed, a swap manager that remembers nothing.

The suite runs on one device at a time. ``--device sim`` makes the simulated accelerator the default of every tensor:
the same laws then hold on a device with streams, and a test fails if it leaves a race behind. A test that is about the
CPU or its file tier says so with ``@pytest.mark.cpu``, one that starts the simulator itself with ``@pytest.mark.sim``;
neither runs on the other device. With ``--no-compute`` no kernel runs: numbers are not compared, shapes and types are,
and bytes, times and races are what they are; a test of numbers alone says so with ``@pytest.mark.values``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowtide import SwapManager

HERE = Path(__file__).parent
# What is about the engine and holds on every device; the rest is about commands, pages and the package.
ENGINE = {
    "activations",
    "cases",
    "fuzz",
    "models",
    "mutations",
    "optim",
    "parallel",
    "recipes",
    "residency",
    "sim",
    "test_bad_input.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lowtide")
    group.addoption("--device", choices=["cpu", "sim"], default="cpu", help="Where tensors are made by default.")
    group.addoption("--no-compute", action="store_true", help="With --device sim: shapes, bytes and times only.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu: about plain CPU memory or its file tier; not run with --device sim")
    config.addinivalue_line("markers", "sim: about the simulated accelerator; run with --device sim only")
    config.addinivalue_line("markers", "values: about numbers alone; not run with --no-compute")
    if config.getoption("--device") == "sim":
        import lowtide.sim

        lowtide.sim.start("tiny", compute=not config.getoption("--no-compute"))
        os.environ["LOWTIDE_TEST_DEVICE"] = "sim"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    outside = collection_path.parent == HERE and collection_path.name not in {*ENGINE, "conftest.py", "__init__.py"}
    return True if outside and config.getoption("--device") == "sim" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_sim = config.getoption("--device") == "sim"
    computes_nothing = config.getoption("--no-compute")

    def stays(item: pytest.Item) -> bool:
        about_sim = item.get_closest_marker("sim") is not None
        if not on_sim:
            return not about_sim
        if computes_nothing and item.get_closest_marker("values") is not None:
            return False
        # What lies beside the simulator's tests and starts no device (descriptions, formulas) has run on the CPU.
        return about_sim or not (item.get_closest_marker("cpu") or item.path.parent == HERE / "sim")

    config.hook.pytest_deselected(items=[item for item in items if not stays(item)])
    items[:] = [item for item in items if stays(item)]


@pytest.fixture(autouse=True)
def on_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make tensors on the chosen device, and demand that nothing raced there.

    A test that is about the simulated device places its tensors itself, and may not race either; one of the
    simulator's own may.
    """
    about_sim = request.node.get_closest_marker("sim") is not None
    if request.config.getoption("--device") == "cpu" or (about_sim and HERE / "sim" in request.node.path.parents):
        yield
        return
    import lowtide.sim

    simulator = lowtide.sim.active()
    assert simulator is not None
    simulator.reset()
    if request.config.getoption("--no-compute"):
        # There are no numbers to compare.
        monkeypatch.setattr(torch, "equal", lambda a, b: a.shape == b.shape and a.dtype == b.dtype)
        monkeypatch.setattr(torch, "isfinite", lambda a: torch.ones(a.shape, dtype=torch.bool, device="cpu"))
    if not about_sim and "cases" not in request.node.path.parts:  # these programs place every tensor themselves
        torch.set_default_device("sim")
    yield
    torch.set_default_device(None)
    races = simulator.races()
    assert not races, f"{len(races)} races; the first is {races[0]}"


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Give each test a manager without groups, chains or settings, and leave none behind.

    Also checks that nothing stays installed once a test is done: a dispatch
    mode or a pair of saved-tensor hooks that outlives its region would change
    every later computation of the process.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    SwapManager().reset()
    yield
    SwapManager().reset()
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_dispatch_stack() == 0, "a dispatch mode is still installed"
    probe = torch.ones(1, requires_grad=True) * torch.ones(1)
    assert isinstance(probe.grad_fn, torch.autograd.graph.Node)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "saved-tensor hooks are still installed"
