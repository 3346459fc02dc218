"""Swapped state gives the plain optimizer's bits, in every way in which an optimizer is used."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import SwapManager
from lowtide.errors import ConfigError, StateDictError, StateError, UnsupportedError
from lowtide.optim.swap import SwapOptimizer, swap_optimizer

from .kit import OPTIMIZERS, SeparateMasters, assert_same_bits, backward, net, tensors_in, through_file, weights


def pair(make: Any, **options: Any) -> list[tuple[nn.Module, Any]]:
    """The same model twice: with the plain optimizer, and with the wrapped one."""
    made = []
    for wraps in (False, True):
        model = net()
        optimizer = make(list(model.parameters()))
        made.append((model, swap_optimizer(optimizer, swap_times=4, **options) if wraps else optimizer))
    return made


def compare(plain: tuple[nn.Module, Any], swapped: tuple[nn.Module, Any]) -> None:
    assert_same_bits(weights(plain[0]), weights(swapped[0]), "weights")
    assert_same_bits(plain[1].state_dict(), swapped[1].state_dict(), "state_dict")


@pytest.mark.values
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_class_gives_the_plain_bits(name: str) -> None:
    pairs = pair(OPTIMIZERS[name])
    for model, optimizer in pairs:
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    compare(*pairs)


@pytest.mark.values
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd", "adafactor"])
def test_accumulation_clipping_a_scheduler_and_missing_gradients_change_nothing(name: str) -> None:
    pairs = pair(OPTIMIZERS[name])
    for model, optimizer in pairs:
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.1 * (k + 1)),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
            ],
            milestones=[3],
        )
        for step in range(8):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(3):
                backward(model, 10 * step + micro, 1 / 3)
            if step in {2, 5}:
                model[2].weight.grad = None  # type: ignore[index]
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
    compare(*pairs)


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd"])
@pytest.mark.parametrize("growth", [2.0, 3.0])
@pytest.mark.values
def test_a_gradient_scaler_that_skips_steps_changes_nothing(name: str, growth: float) -> None:
    pairs = pair(OPTIMIZERS[name])
    where = next(pairs[0][0].parameters()).device.type
    scales = []
    for model, optimizer in pairs:
        scaler = torch.amp.GradScaler(where, init_scale=16.0, growth_factor=growth, growth_interval=2)
        for step in range(7):
            optimizer.zero_grad()
            backward(model, step, scale=scaler.scale)
            if step in {2, 4}:
                model[0].weight.grad[0, 0] = float("inf")  # type: ignore[index]
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales[:7] == scales[7:]
    compare(*pairs)


@pytest.mark.values
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "adamw-amsgrad", "sgd", "nadam", "adafactor"])
def test_state_dicts_go_from_plain_to_wrapped_and_back_in_mid_run(name: str) -> None:
    """Each of four runs changes its optimizer half way, by a file: all end with the same bits."""
    make = OPTIMIZERS[name]
    ends = []
    for first_wraps in (False, True):
        for second_wraps in (False, True):
            model = net()
            optimizer = make(list(model.parameters()))
            optimizer = swap_optimizer(optimizer, swap_times=4) if first_wraps else optimizer
            for step in range(3):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
            saved = through_file(optimizer.state_dict())
            optimizer = make(list(model.parameters()))
            optimizer = swap_optimizer(optimizer, swap_times=7) if second_wraps else optimizer
            optimizer.load_state_dict(saved)
            assert_same_bits(saved["state"], optimizer.state_dict()["state"], "loaded")
            for step in range(3, 5):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
            ends.append((weights(model), optimizer.state_dict()["state"]))
    for end in ends[1:]:
        assert_same_bits(ends[0], end)


def test_wrapping_after_steps_moves_the_state_over_and_unwrapping_gives_it_back() -> None:
    pairs = pair(OPTIMIZERS["adamw"])
    plain_model, plain = pairs[0]
    model = net()
    inner = OPTIMIZERS["adamw"](list(model.parameters()))
    for step in range(6):
        for m, o in ((plain_model, plain), (model, inner)):
            o.zero_grad()
            backward(m, step)
        plain.step()
        if step == 2:
            wrapped = swap_optimizer(inner, swap_times=4)
            assert not inner.state
        if step == 4:
            assert wrapped.unwrap() is inner
        (wrapped if 2 <= step < 4 else inner).step()
    compare((plain_model, plain), (model, inner))


def test_state_leaves_the_optimizer_and_only_a_window_of_it_comes_back() -> None:
    model = net()
    optimizer = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), swap_times=8)
    before = SwapManager().lower_bytes()
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    seen = optimizer.report()
    elements = sum(p.numel() for p in model.parameters())
    assert 8 * elements <= seen.moving_bytes <= 8 * elements + 64 * 2 * 8 * seen.segments
    assert seen.kept_bytes == 4 * sum(len(s.states) for s in optimizer._segments)  # one step count a piece
    assert seen.window_bytes / 2 < seen.peak_bytes <= seen.window_bytes
    assert seen.loaded_bytes == seen.moving_bytes
    assert seen.stored_bytes == 2 * seen.moving_bytes
    assert SwapManager().lower_bytes() - before >= seen.moving_bytes


def test_a_parameter_without_a_gradient_is_neither_stepped_nor_loaded() -> None:
    model = net()
    optimizer = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), swap_times=16)
    backward(model, 0)
    optimizer.step()
    first = optimizer.report()
    kept = model[0].weight.detach().clone()
    optimizer.zero_grad()
    backward(model, 1)
    model[0].weight.grad = None
    optimizer.step()
    moved = optimizer.report().loaded_bytes - first.loaded_bytes
    assert torch.equal(kept, model[0].weight)
    # The first matrix has three quarters of all elements; a rest of it below a sixteenth of a segment may come along.
    own = 8 * model[0].weight.numel()
    assert moved <= first.moving_bytes - own + 64 * 1024 // 16


def test_groups_are_the_users_own_and_new_ones_are_swapped_too() -> None:
    runs = []
    for wraps in (False, True):
        model, late = net(), net(seed=1)
        inner = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}])
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 2)  # made for the optimizer inside, before
        optimizer = swap_optimizer(inner, swap_times=3) if wraps else inner
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


def test_copies_and_pickles_are_optimizers_of_their_own() -> None:
    model = net()
    optimizer = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), swap_times=5)
    backward(model, 0)
    optimizer.step()
    for other_model, other in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):  # noqa: S301
        assert isinstance(other, SwapOptimizer)
        assert other.param_groups[0]["params"][0] is next(other_model.parameters())
        assert_same_bits(optimizer.state_dict(), other.state_dict())
        twin = copy.deepcopy(other_model)
        plain = OPTIMIZERS["adamw"](list(twin.parameters()))
        plain.load_state_dict(other.state_dict())
        for m, o in ((other_model, other), (twin, plain)):
            o.zero_grad()
            backward(m, 7)
            o.step()
        assert_same_bits(weights(twin), weights(other_model))


def test_hooks_run_once_a_step_and_a_closure_once_with_its_loss_returned() -> None:
    model = net()
    inner = OPTIMIZERS["adamw"](list(model.parameters()))
    count = [0, 0, 0]
    inner.register_step_pre_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    optimizer = swap_optimizer(inner, swap_times=8)
    optimizer.register_step_post_hook(lambda *_: count.__setitem__(1, count[1] + 1))

    def closure() -> Tensor:
        count[2] += 1
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert count == [1, 1, 1]


def test_a_scheduler_made_for_the_inner_optimizer_does_not_warn() -> None:
    model = net()
    inner = OPTIMIZERS["sgd"](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    optimizer = swap_optimizer(inner)
    backward(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_several_optimizers_live_side_by_side_and_die_with_their_last_reference() -> None:
    before = SwapManager().lower_bytes()
    models = [net(seed=k) for k in range(3)]
    made = [swap_optimizer(OPTIMIZERS["adamw"](list(m.parameters())), swap_times=4) for m in models]
    for step in range(2):
        for model, optimizer in zip(models, made, strict=True):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    assert SwapManager().lower_bytes() > before
    watch = [weakref.ref(optimizer) for optimizer in made]
    gc.collect()
    gc.disable()
    try:
        del made, optimizer
        assert [w() for w in watch] == [None] * 3
        assert SwapManager().lower_bytes() == before
    finally:
        gc.enable()


def test_state_that_is_not_named_stays_on_the_device() -> None:
    pairs = pair(OPTIMIZERS["adamw"], state=("exp_avg_sq",))
    for model, optimizer in pairs:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    compare(*pairs)
    elements = sum(p.numel() for p in pairs[0][0].parameters())
    seen = pairs[1][1].report()
    assert 4 * elements <= seen.moving_bytes < 4.2 * elements
    assert 4 * elements <= seen.kept_bytes < 4.2 * elements


def test_state_in_a_state_dict_is_a_copy_in_host_memory_of_its_own_size() -> None:
    model = net()
    optimizer = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), swap_times=4)
    backward(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    for tensor in tensors_in(saved["state"]):
        if tensor.dim():
            assert tensor.device.type == "cpu"
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    optimizer.step()
    assert_same_bits(before, saved)


# ---- masters -------------------------------------------------------------------------------------


@pytest.mark.values
@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd", "rmsprop", "adafactor"])
@pytest.mark.parametrize("master", ["fp32", "residual"])
@pytest.mark.parametrize("tier", [None, "device"])
def test_masters_and_weights_have_the_bits_of_the_plain_loop(name: str, master: str, tier: str | None) -> None:
    plain_model, model = net(torch.bfloat16), net(torch.bfloat16)
    plain = SeparateMasters(OPTIMIZERS[name](list(plain_model.parameters())))
    swapped = swap_optimizer(OPTIMIZERS[name](list(model.parameters())), swap_times=4, master=master, tier=tier)
    for step in range(8):
        for m, o in ((plain_model, plain), (model, swapped)):
            o.zero_grad()
            backward(m, step)
            if step == 3:
                m[0].weight.grad = None
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            o.step()
        if step == 5:
            saved = through_file(swapped.state_dict())
            swapped = swap_optimizer(OPTIMIZERS[name](list(model.parameters())), swap_times=3, master=master, tier=tier)
            swapped.load_state_dict(saved)
    assert_same_bits(weights(plain_model), weights(model))
    state = swapped.state_dict()["state"]
    assert_same_bits(plain.masters, [state[k]["master_param"] for k in range(len(plain.masters))])
    for k, (_, m) in enumerate(plain.pairs):
        expected = {**plain.optimizer.state[m], "master_param": m}
        assert_same_bits(expected, state[k], f"state {k}")


@pytest.mark.parametrize("master", ["fp32", "residual"])
def test_a_checkpoint_of_masters_loads_into_the_other_kind_and_into_a_plain_optimizer(master: str) -> None:
    model = net(torch.bfloat16)
    optimizer = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), master=master)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    saved = optimizer.state_dict()
    for other in ("fp32", "residual"):
        twin = copy.deepcopy(model)
        loaded = swap_optimizer(OPTIMIZERS["adamw"](list(twin.parameters())), swap_times=3, master=other)
        loaded.load_state_dict(saved)
        assert_same_bits(saved["state"], loaded.state_dict()["state"])
    twin = copy.deepcopy(model)
    plain = OPTIMIZERS["adamw"](list(twin.parameters()))
    plain.load_state_dict(saved)
    backward(twin, 4)
    plain.step()


def edit(model: nn.Module, masters: list[Tensor], how: str) -> None:
    """Change a model's parameters as users do, and the plain loop's masters with them."""
    late = net(torch.bfloat16, seed=9).state_dict()
    if how == "load_state_dict":
        model.load_state_dict(late)
    elif how == "data":
        for parameter, value in zip(model.parameters(), late.values(), strict=True):
            parameter.data.copy_(value)
    else:
        model[4].weight.data[:, 3] = 1.5  # type: ignore[index]
    for parameter, master in zip(model.parameters(), masters, strict=False):
        if how != "slice":
            master.copy_(parameter.detach())
        elif parameter is model[4].weight:  # type: ignore[index]
            master[:, 3] = 1.5


@pytest.mark.values
@pytest.mark.parametrize("master", ["fp32", "residual"])
@pytest.mark.parametrize("how", ["load_state_dict", "data", "slice"])
def test_a_parameter_that_was_edited_from_outside_wins_over_its_master(master: str, how: str) -> None:
    plain_model, model = net(torch.bfloat16), net(torch.bfloat16)
    plain = SeparateMasters(OPTIMIZERS["adamw"](list(plain_model.parameters())))
    swapped = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), swap_times=4, master=master)
    for step in range(4):
        if step == 2:
            edit(plain_model, plain.masters, how)
            edit(model, [], how)
        for m, o in ((plain_model, plain), (model, swapped)):
            o.zero_grad()
            backward(m, step)
            o.step()
    if how != "slice" or master == "fp32":
        assert_same_bits(weights(plain_model), weights(model))
        return
    # The residual of the whole piece is given up: what was not edited is its parameter, to less than half a step of it.
    assert torch.isfinite(model[4].weight).all()
    assert (model[4].weight[:, 3] - plain_model[4].weight[:, 3]).abs().max() <= 2**-7


def test_masters_halve_what_a_residual_keeps_of_them() -> None:
    sizes = {}
    for master in ("fp32", "residual"):
        model = net(torch.bfloat16)
        optimizer = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), swap_times=1, master=master)
        sizes[master] = optimizer.report().moving_bytes / sum(p.numel() for p in model.parameters())
    assert 12.0 <= sizes["fp32"] < 12.1
    assert 10.125 <= sizes["residual"] < 10.3


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"swap_times": 0},
        {"swap_times": 1.5},
        {"bucket_bytes": -1},
        {"master": "bf16"},
        {"master": "residual", "residual_mode": "round"},
        {"tier": "nvme"},
        {"state": ("moment",)},
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any]) -> None:
    name = "moment" if "state" in options else next(reversed(options))
    with pytest.raises(ConfigError, match=name):
        swap_optimizer(OPTIMIZERS["adamw"](list(net().parameters())), **options)


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing would move"):
        swap_optimizer(torch.optim.SGD(net().parameters(), lr=0.1))


def test_classes_and_instances_that_cannot_be_wrapped_are_refused() -> None:
    model = net()
    inner = OPTIMIZERS["adamw"](list(model.parameters()))
    with pytest.raises(StateError, match="instance"):
        swap_optimizer(torch.optim.AdamW)  # type: ignore[arg-type]
    for refused in (
        torch.optim.LBFGS(model.parameters()),
        torch.optim.SparseAdam(list(model.parameters())),
        torch.optim.AdamW(model.parameters(), differentiable=True, foreach=False),
    ):
        with pytest.raises(UnsupportedError, match="taken apart"):
            swap_optimizer(refused)
    wrapped = swap_optimizer(inner)
    for again in (inner, wrapped):
        with pytest.raises(StateError, match="wrapped already"):
            swap_optimizer(again)


def test_the_optimizer_inside_says_where_it_went() -> None:
    model = net()
    inner = OPTIMIZERS["adamw"](list(model.parameters()))
    wrapped = swap_optimizer(inner)
    for call in (inner.step, inner.state_dict, lambda: inner.load_state_dict({}), lambda: inner.add_param_group({})):
        with pytest.raises(StateError, match="SwapOptimizer around it"):
            call()
    wrapped.unwrap()
    backward(model, 0)
    inner.step()


@pytest.mark.cpu
def test_a_sparse_gradient_is_refused_before_anything_is_stepped() -> None:
    first, second = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(40))
    optimizer = swap_optimizer(torch.optim.AdamW([first, second], foreach=False))
    first.grad = torch.ones(40)
    second.grad = torch.ones(40).to_sparse()
    with pytest.raises(UnsupportedError, match="not dense"):
        optimizer.step()
    assert torch.equal(first, torch.ones(40))


def test_an_fp16_model_has_no_residual() -> None:
    with pytest.raises(UnsupportedError, match="bfloat16"):
        swap_optimizer(OPTIMIZERS["adamw"](list(net(torch.float16).parameters())), master="residual")


def test_a_state_dict_of_another_model_is_refused_and_changes_nothing() -> None:
    model = net()
    optimizer = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())))
    backward(model, 0)
    optimizer.step()
    before = optimizer.state_dict()
    other = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    plain = OPTIMIZERS["adamw"](list(other.parameters()))
    other(torch.ones(1, 9)).sum().backward()
    plain.step()
    with pytest.raises(StateDictError, match="exp_avg of parameter 0"):
        optimizer.load_state_dict(plain.state_dict())
    few = OPTIMIZERS["adamw"](list(other[:1].parameters()))
    with pytest.raises(ValueError, match="of other parameters"):
        optimizer.load_state_dict(few.state_dict())
    assert_same_bits(before, optimizer.state_dict())


def test_not_a_number_is_carried_as_the_plain_optimizer_carries_it() -> None:
    pairs = pair(OPTIMIZERS["adamw"])
    for model, optimizer in pairs:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            if step == 1:
                model[0].weight.grad[0, 0] = float("nan")  # type: ignore[index]
                model[0].weight.grad[1, 1] = float("inf")  # type: ignore[index]
            optimizer.step()
    compare(*pairs)
