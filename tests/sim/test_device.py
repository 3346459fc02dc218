"""The simulated device is a device: it computes what the CPU does, counts its bytes, and keeps its own time."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide.sim
from lowtide.sim import Simulator

from .kit import Gpt, StorageTracker, ids, train

pytestmark = pytest.mark.sim
MIB = 1 << 20


@pytest.fixture
def sim() -> Simulator:
    found = lowtide.sim.active()
    assert found is not None
    gc.collect()
    found.set(compute=True, checks=True, poison=True)
    found.reset()
    found.reset_peaks()
    return found


# ---- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_training_equals_the_cpu_bit_for_bit(sim: Simulator, options: dict[str, bool], dtype: torch.dtype) -> None:
    model = Gpt()
    want = train(model, "cpu", torch.optim.AdamW, dtype, **options)
    got = train(model, "sim", torch.optim.AdamW, dtype, **options)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert not sim.races()


def _attend(where: str, **options: Any) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, heads, 16, 16, generator=draw).to(where) for heads in (8, 2, 2, 8))
    mask = torch.randn(16, 16, generator=draw).to(where) if options.pop("mask", False) else None
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True, **options)
    out.backward(grad)
    return [t.detach().cpu() for t in (out, *(t.grad for t in inputs if t.grad is not None))]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_grouped_attention_is_one_fused_kernel_with_the_cpus_bits(sim: Simulator, options: dict[str, Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(_attend("cpu", **options), _attend("sim", **options), strict=True))
    assert sim.operators()["_scaled_dot_product_fused_attention_overrideable"] == 1
    assert sim.operators()["_scaled_dot_product_fused_attention_overrideable_backward"] == 1


def test_a_mask_goes_into_the_fused_kernel(sim: Simulator) -> None:
    for want, got in zip(_attend("cpu", mask=True), _attend("sim", mask=True), strict=True):
        torch.testing.assert_close(got, want)  # the CPU takes another kernel for a mask
    assert "bmm" not in sim.operators()


def test_attention_with_dropout_draws_from_the_generator_and_has_the_right_gradient(sim: Simulator) -> None:
    q, k, v = (torch.randn(1, 2, 8, 8, device="sim", requires_grad=True) for _ in range(3))
    weight, step = torch.randn(1, 2, 8, 8, device="sim"), 1e-2

    def loss(q: Tensor, seed: int = 5) -> Tensor:
        torch.manual_seed(seed)
        return (F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True) * weight).sum()

    assert torch.equal(loss(q), loss(q))
    assert not torch.equal(loss(q), loss(q, seed=6))
    (gradient,) = torch.autograd.grad(loss(q), q)
    direction = torch.randn_like(q)
    slope = (loss(q + step * direction) - loss(q - step * direction)) / (2 * step)
    torch.testing.assert_close(slope.detach(), (gradient * direction).sum(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(sim: Simulator, kind: Any) -> None:
    origin, inputs = kind(8, 12, 2), torch.randn(5, 3, 8)

    def results(where: str) -> list[Tensor]:
        model = kind(8, 12, 2).to(where)
        model.load_state_dict(origin.state_dict())
        x = inputs.to(where, copy=True).requires_grad_()
        y, _ = model(x)
        y.square().sum().backward()
        assert x.grad is not None
        return [t.cpu() for t in (y.detach(), x.grad, *(p.grad for p in model.parameters()))]

    for want, got in zip(results("cpu"), results("sim"), strict=True):
        torch.testing.assert_close(got, want)  # the cell adds its biases in another order than the CPU's


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_checkpoint_restores_the_devices_random_state(sim: Simulator, reentrant: bool) -> None:  # noqa: FBT001
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("sim")
    x = torch.randn(4, 8, device="sim", requires_grad=True)

    def results(run: Any) -> list[Tensor]:
        x.grad = None
        torch.manual_seed(9)
        run().sum().backward()
        assert x.grad is not None
        return [x.grad.cpu(), torch.sim.get_rng_state()]  # type: ignore[attr-defined]

    want = results(lambda: layer(x))
    got = results(lambda: checkpoint(layer, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_generator_of_its_own_draws_what_the_cpus_does(sim: Simulator) -> None:
    own = torch.Generator("sim").manual_seed(4)
    first, second = (torch.rand(5, device="sim", generator=own) for _ in range(2))
    cpu = torch.Generator().manual_seed(4)
    assert torch.equal(first.cpu(), torch.rand(5, generator=cpu))
    assert torch.equal(second.cpu(), torch.rand(5, generator=cpu))


def test_autocast_runs_products_in_half_precision(sim: Simulator) -> None:
    model, tokens = nn.Linear(8, 8).to("sim"), torch.randn(4, 8, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = model(tokens)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32


def test_what_is_saved_is_loaded_to_the_device(sim: Simulator) -> None:
    file, model = io.BytesIO(), nn.Linear(3, 3).to("sim")
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["weight"].device.type == "sim"
    assert torch.equal(loaded["weight"], model.weight)


def test_lazy_conjugates_and_negatives_are_copied_right(sim: Simulator) -> None:
    z = torch.randn(4, dtype=torch.complex64)
    for make in (torch.conj, lambda t: torch.conj(t).imag):
        assert torch.equal(make(z.to("sim")).clone().cpu(), make(z).clone())
        assert torch.equal(make(z.to("sim")).cpu(), make(z).resolve_conj().resolve_neg())


def test_operators_of_many_kinds_run(sim: Simulator) -> None:
    x = torch.randn(5, 7)

    def results(x: Tensor) -> list[Tensor]:
        index = torch.tensor([0, 1], device=x.device)
        return [
            *x.topk(3), *x.sort(), x[x > 0], torch.nonzero(x), torch.cat([x, x]), torch.stack([x, x]),
            x.index_add(0, index, x[:2]), x.cumsum(0), torch.einsum("ij,kj->ik", x, x), x.std(), x.unique(), x.median(),
            F.one_hot(index), torch.where(x > 0, x, -x), F.batch_norm(x, None, None, training=True),
            F.conv1d(x[None], torch.ones(2, 5, 3, device=x.device)), torch.vmap(lambda a: a.sin().sum())(x),
        ]  # fmt: skip

    for want, got in zip(results(x), results(x.to("sim")), strict=True):
        assert torch.equal(want, got.cpu())


def test_integers_are_counted_as_integers(sim: Simulator) -> None:
    counts = torch.tensor([1, 1, 3], device="sim", dtype=torch.int32).histc(4, 0, 4)
    assert counts.dtype is torch.int32
    assert counts.tolist() == [0, 2, 0, 1]


def test_a_tensor_of_another_device_is_refused(sim: Simulator) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="sim") + torch.ones(3)


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [True, False])
def test_bytes_equal_an_independent_count(
    sim: Simulator, dtype: torch.dtype, *, compute: bool, recompute: bool
) -> None:
    sim.set(compute=compute)
    model = Gpt(3).to("sim", dtype)
    tokens = ids().to("sim")
    if recompute:
        for block in model.blocks:
            block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False)
    gc.collect()
    sim.reset_peaks()
    base = sim.memory().allocated
    with StorageTracker(sim.description.allocation_round, [*model.parameters(), tokens]) as tracker:
        loss = model(tokens)
        after_forward = sim.memory().allocated - base
        assert after_forward == tracker.now
        loss.backward()
    assert sim.memory().peak_allocated - base == tracker.peak
    assert tracker.peak > after_forward


def test_statistics_of_half_precision_norms_take_four_bytes_each_as_on_a_device(sim: Simulator) -> None:
    x = torch.randn(4, 8, device="sim", dtype=torch.bfloat16)
    out, mean, rate = torch.native_layer_norm(x, [8], None, None, 1e-5)
    assert (out.dtype, mean.dtype, rate.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_out_of_memory_is_torchs_own_error_and_leaks_nothing(sim: Simulator) -> None:
    before = sim.memory().allocated
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(sim.capacity + 1, dtype=torch.uint8, device="sim")
    assert sim.memory().allocated == before
    assert torch.accelerator.memory_stats()["num_ooms"] >= 1


def test_out_of_memory_in_backward_leaks_nothing(sim: Simulator) -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + torch.empty(sim.capacity, dtype=torch.uint8, device="sim").sum()

    x = torch.ones(1000, device="sim", requires_grad=True)
    before = sim.memory().allocated
    with pytest.raises(torch.OutOfMemoryError):
        (Greedy.apply(x * 3) * x).sum().backward()
    x.grad = None
    # The worker of backward drops what the error held after it has woken us.
    for _ in range(100):
        gc.collect()
        if sim.memory().allocated == before:
            break
        time.sleep(0.05)
    assert sim.memory().allocated == before


def test_what_a_stream_still_uses_stays_active_after_it_is_freed(sim: Simulator) -> None:
    side, x = torch.Stream("sim"), torch.empty(8 * MIB, dtype=torch.uint8, device="sim")
    host = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream())
    base = sim.memory()
    with side:
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    del x
    assert sim.memory().allocated == base.allocated - 8 * MIB
    assert sim.memory().active == base.active
    sim.synchronize()
    assert sim.memory().active == base.active - 8 * MIB
    assert not sim.races()


def test_torchs_counters_are_the_simulators(sim: Simulator) -> None:
    kept = torch.empty(3 * MIB, dtype=torch.uint8, device="sim")
    memory = sim.memory()
    assert torch.accelerator.memory_allocated() == memory.allocated
    assert torch.accelerator.max_memory_allocated() == memory.peak_allocated
    free, total = torch.accelerator.get_memory_info()
    assert (free, total) == (memory.capacity - memory.active, memory.capacity)
    del kept


def test_fresh_memory_is_poisoned(sim: Simulator) -> None:
    assert torch.empty(7, device="sim").isnan().all()


def test_a_storage_that_was_released_raises_when_it_is_used(sim: Simulator) -> None:
    x = torch.ones(1000, device="sim")
    before = sim.memory().allocated
    x.untyped_storage().resize_(0)
    assert sim.memory().allocated < before
    with pytest.raises(RuntimeError, match="released"):
        x + 1
    x.untyped_storage().resize_(4000)
    assert x.isnan().all()


# ---- time ---------------------------------------------------------------------------------------------------------


def test_computing_or_not_gives_the_same_kernels_and_the_same_time(sim: Simulator) -> None:
    seen = []
    for compute in (True, False, True):
        sim.set(compute=compute)
        model, tokens = Gpt().to("sim"), ids().to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):  # the state is made in the first step
            sim.synchronize()
            sim.reset()
            optimizer.zero_grad()
            model(tokens).backward()
            optimizer.step()
        seen.append((sim.synchronize(), sim.launches, sim.operators(), sim.busy()))
    assert seen[0] == seen[1] == seen[2]


def test_a_kernel_takes_its_operations_or_its_bytes(sim: Simulator) -> None:
    d = sim.description
    a, b = torch.ones(512, 512, device="sim"), torch.ones(512, 512, device="sim")
    sim.synchronize()
    sim.reset()
    torch.mm(a, b)
    assert sim.busy().compute == pytest.approx(
        max(d.kernel_latency, 2 * 512**3 / (d.flops_single * d.flops_efficiency)), rel=1e-9
    )
    sim.reset()
    a + b
    assert sim.busy().compute == pytest.approx(3 * 4 * 512**2 / (d.memory_rate * d.memory_efficiency), rel=1e-9)


def test_copies_overlap_kernels_and_each_other(sim: Simulator) -> None:
    d = sim.description
    x, y = (torch.empty(16 * MIB, dtype=torch.uint8, device="sim") for _ in range(2))
    down, up = (torch.zeros(16 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    out, inward = torch.Stream("sim"), torch.Stream("sim")
    sim.synchronize()
    sim.reset()
    with out:
        down.copy_(x, non_blocking=True)
    with inward:
        y.copy_(up, non_blocking=True)
    one = d.link_latency + 16 * MIB / d.link_out
    assert sim.now() < one
    assert sim.synchronize() == pytest.approx(one, rel=1e-2)
    assert (sim.copied().out, sim.copied().inward) == (16 * MIB, 16 * MIB)
    assert not sim.races()


def test_events_measure_virtual_time(sim: Simulator) -> None:
    first, second = (torch.Event("sim", enable_timing=True) for _ in range(2))
    x = torch.ones(512, 512, device="sim")
    sim.synchronize()
    first.record()
    x @ x
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) == pytest.approx(sim.busy().compute * 1e3, rel=0.5)
    assert first.elapsed_time(second) > 0


def test_an_event_of_before_a_reset_holds_nobody_up(sim: Simulator) -> None:
    sim.spend(100.0)
    event = torch.Event("sim")
    event.record()
    sim.reset()
    torch.accelerator.current_stream().wait_event(event)
    torch.ones(4, device="sim")
    assert sim.synchronize() < 1.0


def test_no_compute_steps_a_model_that_no_machine_here_could_hold(sim: Simulator) -> None:
    sim.set(compute=False)
    width = 4096
    layer = nn.Sequential(*[nn.Linear(width, width, device="sim", dtype=torch.bfloat16) for _ in range(8)])
    x = torch.empty(4096, width, device="sim", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert sim.memory().peak_allocated > 2 * 8 * 2 * width**2


# ---- the process --------------------------------------------------------------------------------------------------

LEAVES = """
import torch, lowtide.sim
lowtide.sim.start("tiny", compute={compute})
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).to("sim")
for p in model.parameters():
    p.register_hook(lambda g: g * 1)
model(torch.ones(8, 64, device="sim")).sum().backward()
"""


@pytest.mark.parametrize("compute", [True, False])
def test_a_process_that_ends_right_after_backward_ends_cleanly(*, compute: bool) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", LEAVES.format(compute=compute)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_one_process_has_one_simulated_accelerator(sim: Simulator) -> None:
    assert lowtide.sim.start("tiny") is sim
    with pytest.raises(lowtide.errors.UnsupportedError, match="Start another process"):
        lowtide.sim.start("h100-80gb")
