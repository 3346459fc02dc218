"""The rules of the tape, R15 to R18: proof by checksum, release at the last use, Functions, in-place answers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import CheckpointPolicy, SwapManager, SwapTensor, checkpoint_wrapper, save_ops, swap_wrapper
from lowtide.activations.tape import Tape
from lowtide.activations.values import Node
from lowtide.errors import CertifyError, WrapError
from lowtide.measure import memory_curve

from .kit import alive, backward_operators, no_collector, recompute, results, row_of, same

N = 64
BYTES = N * N * 4


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, N)


# ---- R15: certify ----------------------------------------------------------------------------------


def _hidden_write(x: Tensor) -> Tensor:
    scale = torch.zeros_like(x)
    scale.numpy()[:] = x.detach().numpy() * 3  # a kernel that no operator shows, into memory that one has filled
    return x.sin() * scale


@pytest.mark.cpu
def test_r15_certify_finds_a_hidden_write_and_names_operator_and_region(x: Tensor) -> None:
    assert not same(results(_hidden_write, x), results(recompute(_hidden_write), x))  # the hole itself
    wrapped = recompute(_hidden_write, certify=1, name="layers.3")
    out = wrapped(x.clone().requires_grad_())
    with pytest.raises(CertifyError, match=r"aten\.zeros_like.*\(layers\.3\)"):
        out.sum().backward()


@pytest.mark.cpu
def test_r15_certify_names_the_qualified_module() -> None:
    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _hidden_write(x)

    model = nn.Sequential(nn.Linear(N, N), nn.Sequential(Hidden()))
    checkpoint_wrapper(model[1][0], recompute="replay", certify=1)
    lowtide.report(model)
    with pytest.raises(CertifyError, match=r"\(1\.0\)"):
        model(torch.randn(2, N)).sum().backward()


@pytest.mark.cpu
def test_r15_only_the_first_calls_of_each_shape_are_certified(x: Tensor) -> None:
    wrapped = recompute(_hidden_write, certify=1)

    def step(x: Tensor) -> None:
        wrapped(x.clone().requires_grad_()).sum().backward()

    for shape in (x, x[:3]):
        with pytest.raises(CertifyError):
            step(shape)
        step(shape)


def test_r15_a_clean_region_passes_whatever_its_types(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        z = torch.fft.rfft(F.dropout(x, 0.2)).conj()
        return z.abs() * (z.real > 0) * x.bfloat16().sin()[:, : z.shape[1]].t().contiguous().t()

    assert same(results(fn, x), results(recompute(fn, certify=5), x))


@pytest.mark.cpu
def test_r15_certify_sees_a_swapped_tensor_that_came_back_wrong(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.residency.spill import Spill

    read = Spill.read

    def spoiled(self: Spill, address: int, offset: int, nbytes: int) -> None:
        import ctypes

        read(self, address, offset, nbytes)
        ctypes.memset(address + nbytes // 2, 7, 1)

    SwapManager().configure(min_bytes=0)
    model = nn.Sequential(*[swap_wrapper(nn.Tanh(), certify=1) for _ in range(3)])
    lowtide.auto(model)
    out = model(x.clone().requires_grad_())
    monkeypatch.setattr(Spill, "read", spoiled)
    with pytest.raises(CertifyError, match="other bits"):
        out.sum().backward()


# ---- R16: memory --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(N, 4 * N)
        self.down = nn.Linear(4 * N, N)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (N,)))).sin())


class Blocks(nn.Module):
    def __init__(self, count: int, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def _plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _peak(model: nn.Module) -> int:
    x = torch.randn(256, N)

    def step() -> None:
        model(x).square().mean().backward()

    step()  # parameter gradients are there from now on
    return memory_curve(step, warmup=1).peak_bytes


@pytest.mark.parametrize("count", [1, 4, 12])
def test_r16_the_peak_of_several_blocks_is_not_above_checkpoints(count: int) -> None:
    peer = Blocks(count, lambda block, x: checkpoint(block, x, use_reentrant=False))
    ours = Blocks(count, _plain)
    for block in ours.blocks:
        checkpoint_wrapper(block, recompute="replay")
    kept = Blocks(count, _plain)
    for block in kept.blocks:
        checkpoint_wrapper(block, lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE, recompute="replay")
    bound = _peak(peer)
    assert _peak(ours) <= bound
    assert _peak(kept) <= _peak(Blocks(count, _plain)) * 1.02  # keeping everything costs what plain autograd keeps


def test_r16_a_value_dies_at_its_last_use_and_a_tape_with_its_last_handle() -> None:
    model = Blocks(4, _plain)
    for block in model.blocks:
        checkpoint_wrapper(block, recompute="replay")
    seen: list[int] = []
    gc.collect()
    before = alive(Tape)
    x = torch.randn(8, N, requires_grad=True)
    for block in model.blocks:
        x = block(x)
        x.register_hook(lambda _: seen.append(alive(Tape) - before))
    with no_collector():
        x.sum().backward()
        # At the output of block k backward is done with all blocks after it, though it still runs itself.
        assert seen == [4, 3, 2, 1]
        assert alive(Tape) == before


def test_r16_intermediates_of_a_replay_die_as_it_goes(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x * 1.5  # saves nothing: only the replay holds it
        return x.sin()

    wrapped = recompute(fn)

    def step() -> None:
        wrapped(x).sum().backward()

    x.requires_grad_()
    step()
    # The output; then the sum's gradient, its expansion and product, and two of the chain at a time.
    assert memory_curve(step, warmup=1).peak_bytes <= 6 * BYTES


def test_r16_a_tape_keeps_the_nodes_of_its_closure_only(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(20):
            x.tanh().exp().clamp(0, 1).floor()
        return (x * 2).sin()

    before = alive(Node)
    with no_collector():
        out = recompute(fn)(x.clone().requires_grad_())
        assert alive(Node) - before == 1
    del out


def test_r16_a_value_whose_other_reader_was_dropped_dies_at_its_last_use_too(x: Tensor) -> None:
    kept: list[Any] = []
    freed: list[bool] = []

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.detach().exp()
        kept.append(torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage()))
        u = x.tanh()
        assert u.grad_fn is not None
        u.grad_fn.register_prehook(lambda _: freed.append(kept[0].expired()))
        return u * h, u.sin() * h

    first, second = recompute(fn, policy_fn=save_ops("aten.exp"))(x.requires_grad_())
    del second
    first.sum().backward()
    assert freed == [True]


def test_r16_swapped_values_that_came_back_die_at_their_last_use(x: Tensor) -> None:
    manager = SwapManager()
    manager.configure(min_bytes=0)
    manager.set_current_group_name("g")
    seen: list[int] = []

    def resident() -> int:
        return sum(type(t) is SwapTensor and t._val is not None for t in gc.get_objects())

    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.exp() * 0.1
            x.register_hook(lambda _: seen.append(resident()))
        return x

    out = swap_wrapper(fn)(x.clone().requires_grad_())
    for call in (manager.launch_offload, manager.wait_offload, manager.launch_load, manager.wait_load):
        call("g")
    out.sum().backward()
    assert seen == [4, 3, 2, 1]


def test_r16_what_a_kept_region_holds_is_given_back_as_backward_goes(x: Tensor) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * 1.5).exp().sin()
        return x

    freed: list[int] = []
    model = recompute(fn, policy_fn=save_ops("aten.exp"))

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                kept.append(torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage()))
            return out

    with Watch():
        out = model(x.clone().requires_grad_())
    node = out.grad_fn
    while node is not None:
        if "Exp" in node.name():
            node.register_prehook(lambda _: freed.append(sum(ref.expired() for ref in kept)))
        node = node.next_functions[0][0] if node.next_functions else None
    out.sum().backward()
    assert freed == [0, 1, 2, 3]


ENDINGS: dict[str, Callable[[Tensor], None]] = {
    "backward": lambda loss: loss.backward(),
    "drop": lambda loss: None,
    "retain and backward": lambda loss: (loss.backward(retain_graph=True), loss.backward())[0],
    "retain and drop": lambda loss: loss.backward(retain_graph=True),
}


class Scaled(torch.autograd.Function):
    """A pure Function with an intermediate of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        wide = (x * factor).exp()
        ctx.save_for_backward(x, wide)
        ctx.factor = factor
        return wide.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _, wide = ctx.saved_tensors
        return grad * wide.cos() * wide * ctx.factor, None


class Declared(Scaled):
    """The same, declared pure."""


lowtide.pure(Declared)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", ["recompute", "keep", "swap", "certified"])
def test_r16_nothing_outlives_its_graph_by_reference_counting_alone(x: Tensor, ending: str, way: str) -> None:
    SwapManager().configure(min_bytes=0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(N, N)

        def forward(self, x: Tensor) -> Tensor:
            h = Declared.apply(F.dropout(self.linear(x), 0.1), 0.1).clone()
            h.add_(1)
            return h.cumsum(0) * Scaled.apply(x, 0.1)

    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "recompute": lambda m: checkpoint_wrapper(m, recompute="replay"),
        "certified": lambda m: checkpoint_wrapper(m, recompute="replay", certify=9),
        "keep": lambda m: checkpoint_wrapper(m, save_ops("aten.addmm", "aten.cumsum"), recompute="replay"),
        "swap": swap_wrapper,
    }
    model = nn.Sequential(*[wraps[way](Layer()) for _ in range(3)])
    lowtide.auto(model)
    with no_collector():
        before = alive()
        for _ in range(2):
            loss = model(x.clone().requires_grad_()).sum()
            ENDINGS[ending](loss)
            del loss
            assert alive() == before
            assert SwapManager().lower_bytes() == 0


def test_r16_a_branch_that_backward_never_ran_leaves_nothing(x: Tensor) -> None:
    wrapped = recompute(lambda x: (x.exp().sin(), x.tanh().cos() * x.sin()))
    with no_collector():
        before = alive()
        used, unused = wrapped(x.clone().requires_grad_())
        used.sum().backward()
        del used
        assert alive(Tape) > 0
        del unused
        assert alive() == before


# ---- R17: Functions -------------------------------------------------------------------------------------


def test_r17_a_declared_function_keeps_its_inputs_only_and_is_run_once_more(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return Declared.apply(x.sin(), 0.5) * 2

    assert same(results(fn, x), results(recompute(fn), x))
    wrapped = recompute(fn)
    assert backward_operators(wrapped, x)["exp"] == 1
    assert row_of(wrapped).kept_bytes == BYTES  # the input of the region
    assert not row_of(wrapped).refused


def test_r17_an_undeclared_function_is_kept_and_the_report_says_for_how_many_bytes(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return Scaled.apply(x.sin(), 0.5) * 2

    assert same(results(fn, x), results(recompute(fn), x))
    wrapped = recompute(fn)
    assert backward_operators(wrapped, x)["exp"] == 0
    row = row_of(wrapped)
    (reason,) = row.refused
    assert reason == "autograd.Function Scaled is not declared pure"
    assert row.refused[reason].bytes == row.opaque_bytes == BYTES
    assert "lowtide.pure" in row.refused[reason].remedy


def _refusals() -> dict[str, tuple[type, str]]:
    outside = torch.ones(N, N)

    class WritesArgument(Scaled):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.save_for_backward(x, x * 2)
            ctx.factor = factor
            x.detach().add_(0)
            return x * factor

    class ReadsOutside(Scaled):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            wide = x * outside
            ctx.save_for_backward(x, wide)
            ctx.factor = factor
            return wide * factor

    class Resizes(Scaled):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            wide = x.exp()
            wide.clone().resize_(2)
            ctx.save_for_backward(x, wide)
            ctx.factor = factor
            return wide * factor

    class EnablesGradients(Scaled):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            with torch.enable_grad():
                wide = x.detach().exp()
            ctx.save_for_backward(x, wide)
            ctx.factor = factor
            return wide * factor

    return {
        "writes": (WritesArgument, "it writes to an argument"),
        "reads": (ReadsOutside, "it reads a tensor that is not an argument"),
        "resizes": (Resizes, "a collective or a storage resize"),
        "gradients": (EnablesGradients, "it enables gradients"),
    }


@pytest.mark.parametrize("name", ["writes", "reads", "resizes", "gradients"])
def test_r17_a_call_that_visibly_breaks_its_declaration_is_kept(name: str, x: Tensor) -> None:
    function, why = _refusals()[name]
    lowtide.pure(function)

    def fn(x: Tensor) -> Tensor:
        return function.apply(x.sin(), 0.5) * 2

    wrapped = recompute(fn)
    assert same(results(fn, x), results(wrapped, x))
    assert any("declared pure, but " + why in reason for reason in row_of(wrapped).refused)


def test_r17_random_numbers_autocast_and_lists_inside_a_function_come_out_the_same(x: Tensor) -> None:
    @lowtide.pure
    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            wide = torch.mm(x, weight)
            mask = torch.rand_like(wide) > 0.3
            return wide * mask, wide, mask

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(inputs[0], inputs[1], output[1], output[2])
            ctx.mark_non_differentiable(output[1], output[2])

        @staticmethod
        def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
            x, weight, wide, mask = ctx.saved_tensors
            grad = (grad.to(wide.dtype) * mask * wide.sign()).to(weight.dtype)
            return grad @ weight.t(), x.t() @ grad

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x @ weight  # fills autocast's cache with a cast that the Function must not take
            b = Drops.apply(x.sin(), weight)[0].float()
        return a.float() + b + F.dropout(b, 0.5)

    wrapped = recompute(fn)
    assert same(results(fn, x, x.t().contiguous()), results(wrapped, x, x.t().contiguous()))
    assert not row_of(wrapped).refused, "a cast from autocast's cache came in unseen"


def test_r17_a_discrete_output_of_a_function_is_kept(x: Tensor) -> None:
    """R10 holds for Functions too: an index is never chosen twice."""

    @lowtide.pure
    class Best(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            values, index = x.topk(3)
            ctx.mark_non_differentiable(index)
            return values, index

        @staticmethod
        def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
            return torch.zeros(N, N)

    def fn(x: Tensor) -> Tensor:
        return x.sin().gather(1, Best.apply(x)[1])

    assert same(results(fn, x), results(recompute(fn), x))
    assert backward_operators(recompute(fn), x)["topk"] == 0


def test_r17_a_function_that_saves_something_else_when_it_runs_again_raises(x: Tensor) -> None:
    runs: list[int] = []

    @lowtide.pure
    class Fickle(Scaled):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            runs.append(1)
            wide = (x * factor).exp()
            ctx.save_for_backward(*((x, wide) if len(runs) == 1 else (x, wide, wide)))
            ctx.factor = factor
            return wide.sin()

    out = recompute(lambda x: Fickle.apply(x.sin(), 0.5))(x.requires_grad_())
    with pytest.raises(WrapError, match="did something else"):
        out.sum().backward()


# ---- R18: answers follow in-place writes ---------------------------------------------------------------


def _slice_write(h: Tensor) -> Tensor:
    h[: N // 2] = 1.0
    return h


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": lambda h: h.relu_(),
    "mul_": lambda h: h.mul_(2),
    "add_ add_": lambda h: h.add_(1).add_(2),
    "slice write": _slice_write,
    "dropout_": lambda h: F.dropout(h, 0.2, inplace=True),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("answer", ["save", "swap"])
def test_r18_a_kept_product_is_not_computed_again_after_an_in_place_write(name: str, answer: str, x: Tensor) -> None:
    weight, bias = torch.randn(N, N), torch.randn(N)

    def fn(x: Tensor) -> Tensor:
        return IN_PLACE[name](torch.addmm(bias, x, weight)).sin() * 2

    policy = save_ops("aten.addmm") if answer == "save" else lowtide.swap_ops("aten.addmm")
    wrapped = recompute(fn, policy_fn=policy)
    SwapManager().configure(min_bytes=0)
    SwapManager().set_current_group_name("g" if answer == "swap" else None)
    assert same(results(fn, x), results(wrapped, x))
    run, plain = backward_operators(wrapped, x), backward_operators(fn, x)
    assert [run[op] for op in ("mm", "addmm")] == [plain[op] for op in ("mm", "addmm")]


def test_r18_an_overwritten_answer_does_not_follow(x: Tensor) -> None:
    """The contents that the policy named are gone: what overwrote them is computed again."""

    def fn(x: Tensor) -> Tensor:
        h = x.detach() @ x.detach()
        h.copy_(x.detach().exp())
        return x.sin() * h

    wrapped = recompute(fn, policy_fn=save_ops("aten.mm"))
    assert same(results(fn, x), results(wrapped, x))
    assert row_of(wrapped).kept_bytes == BYTES
