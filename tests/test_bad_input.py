"""Bad input, and nothing lost.

Law: what a user can get wrong raises an exception from ``lowtide.errors`` that
names module, expected, got and remedy. Parameters, gradients of earlier
micro-batches and the optimizer are untouched by it, and the next step trains as
if nothing had happened, bit by bit.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import CheckpointPolicy, SwapManager, SwapState, SwapTensor, checkpoint_wrapper, swap_wrapper
from lowtide.errors import (
    CapacityError,
    LowtideError,
    ModifiedError,
    PolicyError,
    ReplayError,
    ScheduleError,
    StateError,
    TierError,
    WrapError,
)
from lowtide.residency.file import FileTier
from lowtide.residency.spill import Spill

N = 16
LAYERS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x).tanh().exp()) * x


class Training:
    """One model and one optimizer with state, a few steps in, with the gradient of one micro-batch there."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step()
        self.model(torch.randn(3, N)).square().sum().backward()

    def step(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(3, N)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> list[Any]:
        return [
            *(p.detach().clone() for p in self.model.parameters()),
            *(None if p.grad is None else p.grad.clone() for p in self.model.parameters()),
            copy.deepcopy(self.optimizer.state_dict()),
        ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _wrap_all(training: Training, wrap: Callable[[nn.Module], nn.Module] = swap_wrapper) -> None:
    for layer in training.model:
        wrap(layer)
    lowtide.auto(training.model)


def _mend(training: Training) -> None:
    lowtide.unwrap(training.model)
    for layer in training.model:
        lowtide.unwrap(layer)


def trains_on_after(
    wrong: Callable[[Training], Any],
    kind: type[LowtideError],
    *words: str,
    within: AbstractContextManager[Any] | None = None,
    mend: Callable[[Training], None] = _mend,
) -> None:
    """``wrong`` raises ``kind`` with ``words``; nothing is lost; the next steps equal an untouched twin's."""
    untouched, training = Training(), Training()
    before = training.state()
    with within or nullcontext(), pytest.raises(kind) as raised:
        wrong(training)
    text = str(raised.value)
    assert type(raised.value).__module__ == "lowtide.errors"
    for word in ("expected ", "got ", *words):
        assert word in text, (word, text)
    assert text.rstrip().endswith("."), "no remedy"
    del raised  # its traceback holds the graph of the step that failed
    assert _equal(before, training.state())
    mend(training)
    results = []
    for one in (untouched, training):
        torch.manual_seed(9)
        results.append([one.step(), one.step(), *one.state(), torch.get_rng_state()])
    assert _equal(*results)
    assert SwapManager().lower_bytes() == 0


@pytest.fixture(autouse=True)
def small_values_move(tmp_path: Path) -> None:
    SwapManager().configure(min_bytes=0, file_dir=str(tmp_path))


def _forward(training: Training) -> Tensor:
    loss: Tensor = training.model(torch.randn(3, N)).square().sum()
    return loss


# ---- policies and wrappers ----------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["save", None, 0, True, CheckpointPolicy], ids=str)
@pytest.mark.parametrize("kind", ["checkpoint", "swap"])
def test_a_policy_that_answers_rubbish(answer: object, kind: str) -> None:
    def wrong(training: Training) -> None:
        wrap = checkpoint_wrapper if kind == "checkpoint" else swap_wrapper
        wrap(training.model[1], lambda *_args, **_kwargs: answer)
        lowtide.report(training.model)
        _forward(training)

    trains_on_after(wrong, PolicyError, repr(answer), "(1)", "CheckpointPolicy")


def test_a_policy_that_answers_recompute_where_nothing_is_recorded() -> None:
    def wrong(training: Training) -> None:
        swap_wrapper(training.model[1], lambda _: CheckpointPolicy.MUST_RECOMPUTE, name="layers.1")
        _forward(training)

    trains_on_after(wrong, PolicyError, "MUST_RECOMPUTE", "(layers.1)", "checkpoint_wrapper")


@pytest.mark.parametrize("name", ["aten.mmm", "aten.mm.nobody", "nowhere.mm", "mmm", 3, torch.mm])
@pytest.mark.parametrize("make", [lowtide.save_ops, lowtide.swap_ops])
def test_an_operator_that_does_not_exist(name: object, make: Any) -> None:
    trains_on_after(lambda _: make(name), PolicyError, repr(name), "torch.ops")


def test_a_second_and_different_wrap() -> None:
    def wrong(training: Training) -> None:
        _wrap_all(training)
        checkpoint_wrapper(training.model[2], name="layers.2")

    trains_on_after(wrong, WrapError, "(layers.2)", "checkpoint", "swap", "lowtide.unwrap", mend=lambda _: None)


# ---- chains and groups ----------------------------------------------------------------------------------


def test_a_chain_with_a_cycle() -> None:
    manager = SwapManager()

    def wrong(training: Training) -> None:
        layers = list(training.model)
        for layer in layers:
            swap_wrapper(layer)
        for first, second in zip(layers, layers[1:] + layers[:1], strict=True):
            manager.set_forward_prefetch_layer(first, second)

    trains_on_after(wrong, ScheduleError, "cycle", "Layer -> Layer", "forward order", mend=lambda _: None)


def test_a_chain_of_something_that_is_no_module() -> None:
    def wrong(training: Training) -> None:
        SwapManager().set_forward_prefetch_layer(training.model[0], "layers.1")

    trains_on_after(wrong, WrapError, "str", "torch.nn.Module", "set_forward_prefetch_layer")


@pytest.mark.parametrize("call", ["launch_offload", "wait_offload", "launch_load", "wait_load"])
def test_a_group_that_was_never_filled(call: str) -> None:
    manager = SwapManager()

    def wrong(training: Training) -> None:
        _wrap_all(training)
        manager.set_current_group_name("there")
        loss = _forward(training)
        manager.set_current_group_name(None)
        try:
            getattr(manager, call)("theer")
        finally:
            del loss

    trains_on_after(wrong, ScheduleError, call, "'theer'", "'there'", "set_current_group_name", mend=lambda _: None)


@pytest.mark.parametrize(
    ("call", "missing"),
    [("wait_offload", "launch_offload"), ("launch_load", "launch_offload"), ("wait_load", "launch_load")],
)
def test_a_wait_before_its_launch(call: str, missing: str) -> None:
    manager = SwapManager()

    def wrong(training: Training) -> None:
        _wrap_all(training)
        manager.set_current_group_name("stage0")
        loss = _forward(training)
        try:
            getattr(manager, call)("stage0")
        finally:
            manager.set_current_group_name(None)
            del loss

    trains_on_after(wrong, StateError, call, missing, "'stage0'", mend=lambda _: None)


# ---- the lower tier ---------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("what", ["missing", "below a file"])
def test_a_file_directory_that_cannot_be_used(what: str, tmp_path: Path) -> None:
    directory = tmp_path / "no" / "where"
    if what == "below a file":
        (tmp_path / "plain").write_text("a file")
        directory = tmp_path / "plain" / "below"

    def wrong(training: Training) -> None:
        _wrap_all(training)
        SwapManager().configure(file_dir=str(directory))
        _forward(training)

    def mend(_training: Training) -> None:
        SwapManager().configure(file_dir=str(tmp_path))

    trains_on_after(wrong, TierError, str(directory), "writable directory", mend=mend)


def _full_after(writes: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the disk fill up after so many chunks; returns how to free it."""
    write = Spill.write
    done: list[int] = []

    def full(self: Spill, address: int, offset: int, nbytes: int) -> None:
        done.append(nbytes)
        if len(done) > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, address, offset, nbytes)

    monkeypatch.setattr(Spill, "write", full)
    return lambda: monkeypatch.setattr(Spill, "write", write)


@pytest.mark.cpu
@pytest.mark.parametrize("writes", [0, 3, 7])
def test_a_disk_that_is_full_in_mid_step(writes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free: list[Callable[[], None]] = []

    def wrong(training: Training) -> None:
        _wrap_all(training)
        free.append(_full_after(writes, monkeypatch))
        _forward(training).backward()

    trains_on_after(wrong, TierError, str(tmp_path), "bytes", "swap less", mend=lambda _: free[0]())


@pytest.mark.cpu
def test_a_tensor_whose_copy_failed_stays_on_the_device_and_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100)
    swap = SwapTensor(tensor.clone())
    free = _full_after(0, monkeypatch)
    swap.async_offload()
    with pytest.raises(TierError, match=r"full|room"):
        swap.wait_offload()
    assert swap.state is SwapState.DEVICE
    assert torch.equal(swap.get_val(), tensor)
    assert SwapManager().lower_bytes() == 0
    free()
    swap.async_offload()
    swap.wait_offload()
    swap.async_load()
    swap.wait_load()
    assert torch.equal(swap.get_val(), tensor)


@pytest.mark.cpu  # the pool words it otherwise: tests/residency/test_pool.py
def test_a_host_budget_too_small_for_what_must_move() -> None:
    def wrong(training: Training) -> None:
        _wrap_all(training, lambda m: swap_wrapper(m, lambda _: CheckpointPolicy.MUST_SWAP))
        SwapManager().configure(host_bytes=100)
        _forward(training)

    def mend(_training: Training) -> None:
        SwapManager().configure(host_bytes=None)

    trains_on_after(wrong, CapacityError, "bytes in total", "bytes, 192 of them live", mend=mend)


@pytest.mark.values
def test_a_host_budget_too_small_for_what_prefers_to_move_keeps_and_counts_it() -> None:
    plain, other = Training(), Training()
    _wrap_all(other, lambda m: swap_wrapper(m, lambda _: CheckpointPolicy.PREFER_SWAP))
    SwapManager().configure(host_bytes=60)
    results = []
    for training in (plain, other):
        torch.manual_seed(9)
        results.append([training.step(), training.step(), *training.state()])
    assert _equal(*results)
    rows = lowtide.report(other.model).rows
    refused = [row.refused.get("the budget of the lower tier is full") for row in rows]
    assert sum(one.bytes for one in refused if one) > 0
    for row in rows[1:-1]:
        # One tensor fits, and it is the first layer's.
        assert row.swapped_bytes == 0 < row.kept_bytes


# ---- graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, swap_wrapper])
def test_a_value_changed_in_place_after_it_was_saved(wrap: Any) -> None:
    def wrong(training: Training) -> None:
        _wrap_all(training, wrap)
        SwapManager().set_current_group_name("not launched")
        x = torch.randn(3, N, requires_grad=True)
        out = training.model[0](x)
        SwapManager().set_current_group_name(None)
        x.detach().add_(1)
        torch.autograd.grad(out.sum(), x)

    trains_on_after(wrong, ModifiedError, "version 0", "version 1", "modified by an inplace operation", "clone")


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, swap_wrapper])
def test_a_backward_after_its_graph_was_freed(wrap: Any) -> None:
    """Autograd itself notices where its own node is gone; what it cannot see is ours to say."""
    untouched, training = Training(), Training()
    _wrap_all(training, wrap)
    loss = _forward(training)
    assert len(torch.autograd.grad(loss, list(training.model.parameters()))) == 2 * LAYERS
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    del loss
    assert _equal(untouched.state(), training.state())
    results = []
    for one in (untouched, training):
        torch.manual_seed(9)
        results.append([one.step(), *one.state()])
    assert _equal(*results)


def test_every_error_is_a_runtime_error_of_one_tree() -> None:
    kinds = [getattr(lowtide.errors, name) for name in lowtide.errors.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)]
    ours = [kind for kind in kinds if not issubclass(kind, Warning)]
    assert len(ours) >= 11
    assert all(issubclass(kind, LowtideError) and issubclass(kind, RuntimeError) for kind in ours)
    assert issubclass(ReplayError, LowtideError)


@pytest.mark.cpu
def test_a_spill_file_in_memory_is_named_by_the_report(tmp_path: Path) -> None:
    shared = Path("/dev/shm")  # noqa: S108 - the file system in memory itself, not a guess at a folder for scratch
    if not shared.is_dir():
        pytest.skip("no /dev/shm")
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
    for layer in model:
        lowtide.swap_wrapper(layer)
    lowtide.auto(model)

    def said(directory: Path) -> list[str]:
        SwapManager().configure(file_dir=str(directory))
        model(torch.ones(256, 256)).sum().backward()
        report = lowtide.report(model)
        assert report.total("swapped_bytes")
        return [note for note in report.notes if "lies in memory" in note]

    (note,) = said(shared)
    assert str(shared) in note
    assert "file_dir" in note
    if not FileTier(tmp_path).in_memory:
        assert not said(tmp_path)
