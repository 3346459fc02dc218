"""Swapped state gives the plain optimizer's bits, in every way in which an optimizer is used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import SwapManager
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.optim.swap import swap_optimizer

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


def test_settings_of_the_lower_tier_may_change_between_steps() -> None:
    """What lies on a tier that was left stays readable there; what is stored next goes to the new one."""
    pairs = pair(OPTIMIZERS["adamw"])
    for model, optimizer in pairs:
        for step in range(4):
            if step in {0, 2}:
                SwapManager().configure(host_bytes=(1 << 30) + step)
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    compare(*pairs)


def test_a_group_whose_state_is_empty_is_stepped_beside_one_whose_state_moves() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:2], "momentum": 0.0}, {"params": parameters[2:], "momentum": 0.9}]
        return torch.optim.SGD(groups, lr=0.1)

    pairs = pair(make)
    for model, optimizer in pairs:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    compare(*pairs)


@pytest.mark.cpu
def test_a_save_reads_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small parameters share a segment: it is not read once for each of them."""
    parameters = [nn.Parameter(torch.randn(100)) for _ in range(200)]
    optimizer = swap_optimizer(torch.optim.AdamW(parameters, foreach=False), swap_times=1)
    for parameter in parameters:
        parameter.grad = torch.ones(100)
    optimizer.step()
    before = SwapManager().traffic.in_bytes
    reads: list[int] = []
    tier = SwapManager().carrier_for(torch.device("cpu")).tier  # type: ignore[attr-defined]
    read = tier.read

    def counted(slot: Any, *args: Any, **kwargs: Any) -> Any:
        reads.append(slot.nbytes)
        return read(slot, *args, **kwargs)

    monkeypatch.setattr(tier, "read", counted)
    optimizer.state_dict()
    assert sum(reads) == optimizer.report().moving_bytes
    assert SwapManager().traffic.in_bytes == before


@pytest.mark.sim
def test_a_step_holds_what_its_report_says_and_not_a_byte_more() -> None:
    """Fused, and without masters, a class needs no memory of its own: all that a step adds are segments.

    In the first step it makes the state of one segment, and a count of steps for each piece that stays.
    """
    import lowtide.sim

    simulator = lowtide.sim.active()
    assert simulator is not None
    where = torch.device("sim")
    parameters = [nn.Parameter(torch.ones(1 << 18, device=where)) for _ in range(6)]
    optimizer = swap_optimizer(torch.optim.AdamW(parameters, fused=True), swap_times=6)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    largest = max(segment.nbytes for segment in optimizer._segments)
    for step in range(3):
        simulator.synchronize()
        simulator.reset_peaks()
        before = simulator.memory().allocated
        optimizer.step()
        seen = optimizer.report()
        made = simulator.memory().allocated - before
        assert made == (0 if step else 512 * seen.segments)
        assert simulator.memory().peak_allocated - before == seen.peak_bytes + (0 if step else largest + made)
        assert seen.peak_bytes == seen.window_bytes == 2 * seen.bucket_bytes


# ---- masters -------------------------------------------------------------------------------------


@pytest.mark.values
@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd", "rmsprop", "adafactor"])
@pytest.mark.parametrize("master", ["fp32", "residual"])
@pytest.mark.parametrize("tier", [None, "file", "device"])
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
        if how in {"load_state_dict", "data"}:
            master.copy_(parameter.detach())
        elif parameter is model[4].weight and how == "slice":  # type: ignore[index]
            master[:, 3] = 1.5
        elif parameter is model[4].weight:  # type: ignore[index]
            master.copy_(parameter.detach())  # a residual knows of a whole piece only that it was edited


@pytest.mark.values
@pytest.mark.parametrize("master", ["fp32", "residual"])
@pytest.mark.parametrize("how", ["load_state_dict", "data", "slice"])
def test_a_parameter_that_was_edited_from_outside_wins_over_its_master(master: str, how: str) -> None:
    plain_model, model = net(torch.bfloat16), net(torch.bfloat16)
    plain = SeparateMasters(OPTIMIZERS["adamw"](list(plain_model.parameters())))
    swapped = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), swap_times=4, master=master)
    for step in range(4):
        if step == 2:
            edit(plain_model, plain.masters, "piece" if how == "slice" and master == "residual" else how)
            edit(model, [], how)
        for m, o in ((plain_model, plain), (model, swapped)):
            o.zero_grad()
            backward(m, step)
            o.step()
    assert_same_bits(weights(plain_model), weights(model))
    state = swapped.state_dict()["state"]
    assert_same_bits(plain.masters, [state[k]["master_param"] for k in range(len(plain.masters))])


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


class Remembers(torch.optim.Optimizer):
    """Keeps the very gradient that it is given, from its second step on, and steps with the one before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.125})  # a power of two: rounded once, wherever a tensor is cut

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].get("last")
                    if "steps" in self.state[p]:
                        self.state[p]["last"] = p.grad
                    self.state[p]["steps"] = 1
                    p.add_(p.grad if last is None else last, alpha=-group["lr"])


@pytest.mark.values
@pytest.mark.parametrize("master", ["fp32", "residual"])
def test_what_a_class_keeps_of_what_it_was_given_is_its_own(master: str) -> None:
    plain_model, model = net(torch.bfloat16), net(torch.bfloat16)
    plain = SeparateMasters(Remembers(list(plain_model.parameters())))
    swapped = swap_optimizer(Remembers(list(model.parameters())), swap_times=3, master=master, elementwise=True)
    for m, o in ((plain_model, plain), (model, swapped)):
        for step in range(4):
            o.zero_grad()
            backward(m, step)
            o.step()  # type: ignore[attr-defined]
    assert_same_bits(weights(plain_model), weights(model))
