"""A wrapped optimizer is an optimizer to everyone else: groups, schedulers, hooks, copies, checkpoints, refusals."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import SwapManager
from lowtide.errors import CapacityError, StateDictError, StateError, UnsupportedError

from .kit import OPTIMIZERS, assert_same_bits, backward, net, through_file, weights

Wrap = Callable[[Any], Any]

WRAPS: dict[str, Wrap] = {
    "swapped": functools.partial(lowtide.swap_optimizer, swap_times=4),
    "on the host": lowtide.cpu_optimizer,
    "on the host, gradients leave": functools.partial(lowtide.cpu_optimizer, grad_offload=True),
}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
# The host's kernels give the host's bits.
every_wrap_with_its_bits = pytest.mark.parametrize(
    "wrap",
    [pytest.param(wrap, id=name, marks=[] if name == "swapped" else pytest.mark.cpu) for name, wrap in WRAPS.items()],
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](list(model.parameters()))


def steps(model: nn.Module, optimizer: Any, which: range) -> None:
    for step in which:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@every_wrap_with_its_bits
@pytest.mark.values
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "adamw-amsgrad", "sgd", "nadam", "adafactor"])
def test_state_dicts_go_from_plain_to_wrapped_and_back_in_mid_run(wrap: Wrap, name: str) -> None:
    """Each of four runs changes its optimizer half way, by a file: all end with the same bits."""
    make = OPTIMIZERS[name]
    ends = []
    for first_wraps in (False, True):
        for second_wraps in (False, True):
            model = net()
            optimizer: Any = make(list(model.parameters()))
            optimizer = wrap(optimizer) if first_wraps else optimizer
            steps(model, optimizer, range(3))
            saved = through_file(optimizer.state_dict())
            del optimizer
            optimizer = make(list(model.parameters()))
            optimizer = wrap(optimizer) if second_wraps else optimizer
            optimizer.load_state_dict(saved)
            assert_same_bits(saved["state"], optimizer.state_dict()["state"], "loaded")
            steps(model, optimizer, range(3, 5))
            ends.append((weights(model), optimizer.state_dict()["state"]))
            del optimizer
    for end in ends[1:]:
        assert_same_bits(ends[0], end)


@every_wrap_with_its_bits
@pytest.mark.values
def test_groups_are_the_users_own_and_new_ones_are_stepped_too(wrap: Wrap) -> None:
    runs = []
    for wraps in (False, True):
        model, late = net(), net(seed=1)
        inner = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}])
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 2)  # made for the optimizer inside, before
        optimizer = wrap(inner) if wraps else inner
        assert optimizer.param_groups is inner.param_groups
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step)
            backward(late, step)
            if step == 2:
                optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.01})
            optimizer.param_groups[0]["weight_decay"] = 0.01 * step
            optimizer.step()
            scheduler.step()
        runs.append((weights(model), weights(late), optimizer.state_dict()))
    assert_same_bits(*runs)


@pytest.mark.parametrize("wrap", [WRAPS["swapped"]])
def test_a_group_that_finds_no_room_is_not_there(wrap: Wrap) -> None:
    """A group that stayed in the list would be stepped by nobody."""
    model, late = net(), net(seed=1)
    optimizer = wrap(adamw(model))
    with lowtide_budget(1000), pytest.raises(CapacityError):
        optimizer.add_param_group({"params": list(late.parameters())})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(late.parameters())})
    before = late[0].weight.detach().clone()
    backward(late, 0)
    optimizer.step()
    assert not torch.equal(before, late[0].weight)


class lowtide_budget:  # noqa: N801 - read as a phrase where it is used
    """The lower tier has so many bytes in the body."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> None:
        SwapManager().configure(host_bytes=self.nbytes)

    def __exit__(self, *_: object) -> None:
        SwapManager().configure(host_bytes=None)


@every_wrap
@pytest.mark.values
def test_copies_and_pickles_are_optimizers_of_their_own(wrap: Wrap) -> None:
    model = net()
    optimizer = wrap(adamw(model))
    steps(model, optimizer, range(2))
    # Pickle reads memory past the operators; what a copy brought shows on the simulator once one has.
    assert all(w.to("cpu").isfinite().all() for w in weights(model))
    ends = []
    for other_model, other in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),  # noqa: S301
        (model, optimizer),
    ):
        assert type(other) is type(optimizer)
        assert other.param_groups[0]["params"][0] is next(other_model.parameters())
        steps(other_model, other, range(2, 4))
        ends.append((weights(other_model), other.state_dict()))
    assert_same_bits(ends[2], ends[0])
    assert_same_bits(ends[2], ends[1])


@every_wrap
def test_hooks_run_once_a_step_and_a_closure_once_with_its_loss_returned(wrap: Wrap) -> None:
    model = net()
    inner = adamw(model)
    count = [0, 0, 0]
    inner.register_step_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    optimizer = wrap(inner)
    optimizer.register_step_post_hook(lambda *_: count.__setitem__(1, count[1] + 1))

    def closure() -> Tensor:
        count[2] += 1
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert count == [1, 1, 1]


@every_wrap
def test_a_scheduler_made_for_the_inner_optimizer_does_not_warn(wrap: Wrap) -> None:
    model = net()
    inner = OPTIMIZERS["sgd"](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    optimizer = wrap(inner)
    backward(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.1


@every_wrap
def test_several_optimizers_live_side_by_side_and_die_with_their_last_reference(wrap: Wrap) -> None:
    before = SwapManager().lower_bytes()
    models = [net(seed=k) for k in range(3)]
    made = [wrap(adamw(model)) for model in models]
    for model, optimizer in zip(models, made, strict=True):
        steps(model, optimizer, range(2))
    watch = [weakref.ref(optimizer) for optimizer in made]
    gc.collect()
    gc.disable()
    try:
        del made, optimizer
        assert [w() for w in watch] == [None] * 3
        assert SwapManager().lower_bytes() == before
    finally:
        gc.enable()


@every_wrap
def test_classes_and_instances_that_cannot_be_wrapped_are_refused(wrap: Wrap) -> None:
    model = net()
    with pytest.raises(StateError, match="instance"):
        wrap(torch.optim.AdamW)
    for refused in (
        torch.optim.LBFGS(model.parameters()),
        torch.optim.SparseAdam(list(model.parameters())),
        torch.optim.AdamW(model.parameters(), differentiable=True, foreach=False),
    ):
        with pytest.raises(UnsupportedError, match="taken apart"):
            wrap(refused)
    inner = adamw(model)
    wrapped = wrap(inner)
    for again in (inner, wrapped):
        for other in WRAPS.values():
            with pytest.raises(StateError, match="wrapped already"):
                other(again)


@every_wrap
def test_whichever_of_the_two_has_no_state_says_where_it_went(wrap: Wrap) -> None:
    model = net()
    inner = adamw(model)
    wrapped = wrap(inner)

    def calls(optimizer: Any) -> list[Callable[[], object]]:
        late = {"params": list(net(seed=1).parameters())}
        return [
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict({}),
            lambda: optimizer.add_param_group(late),
        ]

    for call in calls(inner):
        with pytest.raises(StateError, match="around it"):
            call()
    backward(model, 0)
    wrapped.step()
    assert wrapped.unwrap() is inner
    for call in calls(wrapped):
        with pytest.raises(StateError, match="Use what unwrap"):
            call()
    assert float(inner.state[model[0].weight]["step"]) == 1.0
    inner.zero_grad()
    backward(model, 1)
    inner.step()


@every_wrap
def test_a_state_dict_of_another_model_is_refused_and_changes_nothing(wrap: Wrap) -> None:
    model = net()
    optimizer = wrap(adamw(model))
    steps(model, optimizer, range(1))
    before = optimizer.state_dict()
    other = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    plain = adamw(other)
    other(torch.ones(1, 9)).sum().backward()
    plain.step()
    with pytest.raises(StateDictError, match="exp_avg of parameter 0"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="of other parameters"):
        optimizer.load_state_dict(adamw(other[:1]).state_dict())
    assert_same_bits(before, optimizer.state_dict())


@every_wrap
def test_a_state_that_is_not_there_is_an_empty_mapping(wrap: Wrap) -> None:
    model = net()
    optimizer = wrap(adamw(model))
    assert not optimizer.state
    assert optimizer.state_dict()["state"] == {}
    steps(model, optimizer, range(1))
    assert set(map(id, optimizer.state)) == set(map(id, model.parameters()))
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.ones(1))]
    optimizer.state = {}
    assert not optimizer.state
