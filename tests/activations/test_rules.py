"""The rules of the tape, R1 to R14: what is replayed, what is not, and that either gives plain autograd's bits.

Each test is named by its rule in ``ARCHITECTURE.md`` and fails where the rule is not kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import device
from lowtide.activations import tape as tape_module
from lowtide.errors import ModifiedError, ReplayError, UnsupportedError

from .kit import backward_operators, recompute, results, row_of, same, unseen

N = 8
calls: Counter[str] = Counter()
flags_seen: list[device.NumericFlags] = []
_library = torch.library.Library("lowtide_rules", "DEF")


def _define(name: str, kernel: Callable[[Tensor], Tensor]) -> Any:
    _library.define(f"{name}(Tensor x) -> Tensor")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    return getattr(torch.ops.lowtide_rules, name).default


def _counted_sign(x: Tensor) -> Tensor:
    calls["sign"] += 1
    return x.sign()


def _counted_exp(x: Tensor) -> Tensor:
    calls["exp"] += 1
    return x.exp()


def _flags(x: Tensor) -> Tensor:
    flags_seen.append(device.numeric_flags())
    return x.exp()


def _grows(x: Tensor) -> Tensor:
    calls["grows"] += 1
    return torch.ones(1 if calls["grows"] > 1 else len(x), x.shape[1])


opaque_sign = _define("opaque_sign", _counted_sign)
pure_exp = lowtide.pure(_define("pure_exp", _counted_exp))
pure_flags = lowtide.pure(_define("pure_flags", _flags))
pure_liar = lowtide.pure(_define("pure_liar", _grows))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, N)


def assert_same_as_plain(fn: Callable[..., Any], *inputs: Tensor) -> None:
    assert same(results(fn, *inputs), results(recompute(fn), *inputs))


# ---- R1, R2: who is replayed ---------------------------------------------------------------------


def test_r1_an_operator_of_an_unknown_namespace_is_never_run_again(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * opaque_sign(x.detach())

    assert_same_as_plain(fn, x)
    calls.clear()
    wrapped = recompute(fn)
    results(wrapped, x)
    assert calls["sign"] == 1
    assert row_of(wrapped).refused["opaque operator lowtide_rules.opaque_sign.default"].bytes == N * N * 4


def test_r1_an_operator_declared_pure_is_run_again_instead_of_kept(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * pure_exp(x.detach())

    assert_same_as_plain(fn, x)
    calls.clear()
    wrapped = recompute(fn)
    results(wrapped, x)
    assert calls["exp"] == 2
    assert row_of(wrapped).kept_bytes == N * N * 4  # the input alone


@torch.library.custom_op("lowtide_rules::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    calls["cube"] += 1
    return x**3


def _save_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


cube.register_autograd(lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2, setup_context=_save_input)


def test_r1_a_custom_operator_with_a_derivative_is_kept_until_it_is_declared_pure(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return cube(x.sin()).cos()

    for runs in (1, 2):
        calls.clear()
        wrapped = recompute(fn)
        got = results(wrapped, x)
        assert calls["cube"] == runs
        assert bool(row_of(wrapped).refused) == (runs == 1)
        assert same(results(fn, x), got)
        lowtide.pure(torch.ops.lowtide_rules.cube)


def test_r1_operators_of_aten_are_run_again(x: Tensor) -> None:
    wrapped = recompute(lambda x: x.sin() * x.detach().exp())
    assert backward_operators(wrapped, x)["exp"] == 1
    assert row_of(wrapped).kept_bytes == N * N * 4


@pytest.mark.cpu
def test_r2_what_runs_with_gradients_off_is_kept(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.zeros_like(x)
            scale.numpy()[:] = x.detach().numpy() ** 2  # a kernel that no operator shows
            scale = scale.tanh()
        return x.sin() * scale

    assert_same_as_plain(fn, x)
    wrapped = recompute(fn)
    assert backward_operators(wrapped, x)["tanh"] == 0
    assert row_of(wrapped).refused["it was computed with gradients off"].bytes == N * N * 4


# ---- R3 to R6: memory that is not what its operators say ---------------------------------------------


@pytest.mark.cpu
def test_r3_uninitialised_memory_that_something_unseen_fills_is_kept(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        buffer = torch.empty_like(x)
        buffer.numpy()[:] = x.detach().numpy() * 3
        return x.sin() * buffer

    assert_same_as_plain(fn, x)


@pytest.mark.cpu
def test_r3_a_partial_write_does_not_make_it_replayable(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        buffer = torch.empty_like(x)
        buffer.numpy()[:] = x.detach().numpy() * 3
        buffer[: N // 2].mul_(2)
        buffer[0] = 7.0
        return x.sin() * buffer

    assert_same_as_plain(fn, x)


def test_r3_a_visible_write_of_the_whole_makes_it_replayable(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        buffer = torch.empty_like(x)
        buffer.copy_(x.detach().exp())
        return x.sin() * buffer

    assert_same_as_plain(fn, x)
    wrapped = recompute(fn)
    assert backward_operators(wrapped, x)["exp"] == 1
    assert row_of(wrapped).kept_bytes == N * N * 4


@pytest.mark.parametrize("training", [True, False])
def test_r4_running_statistics_move_once(x: Tensor, training: bool) -> None:  # noqa: FBT001
    plain, other = nn.BatchNorm1d(N), nn.BatchNorm1d(N)
    want = results(lambda x: plain.train(training)(x.sin()).relu(), x)
    wrapped = recompute(lambda x: other.train(training)(x.sin()).relu())
    assert same(want, results(wrapped, x))
    assert same([b.float() for b in plain.buffers()], [b.float() for b in other.buffers()])
    assert not {"native_batch_norm", "_native_batch_norm_legit"} & set(backward_operators(wrapped, x))


@pytest.mark.cpu
def test_r4_a_storage_that_is_resized_or_exchanged_is_kept(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        grown = torch.zeros(2)
        grown.resize_(x.shape)
        grown.copy_(x.detach() * 2)
        other = torch.zeros(1)
        other.set_(x.detach().exp())
        return x.sin() * grown + x.cos() * other

    assert_same_as_plain(fn, x)

    def grows(x: Tensor) -> Tensor:
        longer = x.detach().exp()
        longer.resize_(2 * N, N)  # the same storage, with more bytes behind what an operator has made
        longer.numpy()[N:] = 0.5
        return x.sin() * longer[:N] + x.cos() * longer[N:]

    assert_same_as_plain(grows, x)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.cpu
@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_r5_a_collective_is_never_run_again_and_writes_its_arguments(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        gathered = torch.zeros_like(x)
        dist.all_gather_into_tensor(gathered, x.detach().exp())
        reduced = x.detach() * 2
        dist.all_reduce(reduced)
        return x.sin() * gathered + x.cos() * reduced

    assert_same_as_plain(fn, x)
    assert not [name for name in backward_operators(recompute(fn), x) if "all" in name]


def test_r6_a_tensor_from_before_the_region_is_written_once(x: Tensor) -> None:
    counter, cache = torch.ones(N), torch.zeros(2, N, N)

    def fn(x: Tensor) -> Tensor:
        counter.add_(1)
        cache[1] = x.detach().exp()
        return (x * counter).sin() * cache[1] * cache.sum()

    want = results(fn, x)
    counter.fill_(1)
    cache.zero_()
    assert same(want, results(recompute(fn), x))
    assert torch.equal(counter, torch.full((N,), 2.0))
    assert torch.equal(cache[1], x.exp())


# ---- R7, R8: writes, seen and unseen ---------------------------------------------------------------


def test_r7_a_value_read_before_its_storage_is_overwritten_stays_readable(x: Tensor) -> None:
    buffer = torch.randn(N, N)

    def fn(x: Tensor) -> Tensor:
        first = (x * buffer.clone()).sin() * (buffer + 0).detach()  # a replay needs the contents as they are here
        buffer.mul_(2)
        return first + x.cos()

    start = buffer.clone()
    want = results(fn, x)
    buffer.copy_(start)
    assert same(want, results(recompute(fn), x))


def test_r7_every_older_value_of_the_storage_is_copied_not_only_the_current_one(x: Tensor) -> None:
    """Fuzz seed 1179 of the study: x is seen through x and through ``x.data``, then written."""
    mask = torch.randn(N, N) > 0

    def fn(x: Tensor) -> Tensor:
        y = x.detach().clone()
        first = x.sin() * y.exp()
        y.data.mul_(2)
        second = x.cos() * y.exp()
        y.data.add_(1)
        y.masked_fill_(mask, 0.5)
        return first + second + x.tanh() * y.exp()

    assert_same_as_plain(fn, x)

    def external(x: Tensor, y: Tensor) -> Tensor:
        y = y.detach()
        y.mul_(2)  # from here on y and y.data count their versions apart
        first = x.sin() * y.exp()
        second = x.cos() * y.data.exp()
        y.masked_fill_(mask, 0.5)
        return first + second + x.tanh() * y.exp()

    assert_same_as_plain(external, x, torch.randn(N, N))


def test_r7_a_kept_result_is_released_by_a_write_and_computed_again(x: Tensor) -> None:
    """What can be replayed is never copied: overwriting it costs no memory."""

    def fn(x: Tensor) -> Tensor:
        y = x.detach().exp()
        first = x.sin() * (y * 2)
        y.add_(1)
        return first + x.cos() * y

    wrapped = recompute(fn, policy_fn=lowtide.save_ops("aten.exp"))
    assert same(results(fn, x), results(wrapped, x))
    assert row_of(wrapped).kept_bytes <= 2 * N * N * 4


def test_r7_more_than_the_limit_is_not_copied_but_raises(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_module, "_COPY_LIMIT", 100)
    buffer = torch.randn(N, N)

    def fn(x: Tensor) -> Tensor:
        out = (x * buffer).sin()
        buffer.mul_(2)
        return out

    with pytest.raises(UnsupportedError, match="256 bytes"):
        recompute(fn)(x.requires_grad_())


def test_r8_a_write_that_nobody_saw_opens_a_new_leaf(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.detach() * 2
        with unseen():
            y.mul_(3)
        return x.sin() * y

    assert_same_as_plain(fn, x)

    def read_by_an_operator(x: Tensor) -> Tensor:
        y = x.detach() * 2
        with unseen():
            y.mul_(3)
        return x.sin() * y.exp()

    assert_same_as_plain(read_by_an_operator, x)


def test_r8_a_held_value_changed_unseen_within_the_region_raises(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.detach() * 2
        out = x.sin() * y.exp()
        with unseen():
            y.mul_(3)
        return out

    wrapped = recompute(fn, policy_fn=lambda ctx, op, *a, **k: lowtide.CheckpointPolicy.MUST_SAVE)
    assert same(results(fn, x), results(wrapped, x))  # y itself is not needed: exp(y) is kept
    only_y = recompute(fn, policy_fn=lowtide.save_ops("aten.mul"))
    out = only_y(x.requires_grad_())
    with pytest.raises(ModifiedError, match="could not see"):
        out.sum().backward()


def test_r8_a_held_value_changed_after_the_region_raises_as_in_plain_autograd(x: Tensor) -> None:
    bodies: list[Callable[[Tensor, Tensor], Tensor]] = [lambda x, w: (x @ w).sin(), lambda x, w: x * w]
    for body, wrap in itertools.product(bodies, (lambda f: f, recompute)):
        w = torch.randn(N, N)
        out = wrap(lambda x, body=body, w=w: body(x, w))(x.clone().requires_grad_())
        w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# ---- R9 to R12: states around a replay ---------------------------------------------------------------


def test_r9_random_operators_draw_the_same_numbers_and_leave_the_generator_alone(x: Tensor) -> None:
    own = torch.Generator()

    def fn(x: Tensor) -> Tensor:
        noise = torch.empty_like(x).uniform_(generator=own)
        kept = torch.rand(N, N) * torch.randn_like(x)
        return F.dropout(x.sin() * noise, 0.4) * kept + F.dropout(torch.bernoulli(x.sigmoid()) * x.exp(), 0.2)

    own.manual_seed(5)
    want, state = results(fn, x), own.get_state()
    own.manual_seed(5)
    assert same(want, results(recompute(fn), x))
    assert torch.equal(state, own.get_state())


def test_r9_attention_that_drops_nothing_draws_nothing_and_is_run_again(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        q = x.sin().view(1, 1, N, N)
        return F.scaled_dot_product_attention(q, q, q) * 2

    assert_same_as_plain(fn, x)
    wrapped = recompute(fn)
    results(wrapped, x)
    assert row_of(wrapped).kept_bytes == N * N * 4


def test_r10_discrete_results_of_floats_are_kept_and_never_chosen_again(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        scores = x.softmax(-1)
        top, index = scores.topk(3)
        order = scores.argsort(-1)
        return scores.gather(1, index) * top * x.sin().gather(1, order[:, :3])

    assert_same_as_plain(fn, x)
    run = backward_operators(recompute(fn), x)
    assert not run["sort"]
    index_only = backward_operators(recompute(lambda x: x.sin().gather(1, x.topk(3).indices)), x)
    assert not index_only["topk"]


@pytest.mark.values
def test_r10_operators_with_atomics_are_kept_on_an_accelerator_only() -> None:
    index = torch.arange(N)

    def kept(where: str) -> int:
        def fn(x: Tensor, source: Tensor) -> Tensor:
            return x.index_add(0, index.to(where), source).exp().sin()

        wrapped = recompute(fn)
        x = torch.zeros(N, N, device=where, requires_grad=True)
        wrapped(x, torch.zeros(N, N, device=where))
        return row_of(wrapped).kept_bytes

    # The device without bytes stands for an accelerator: nothing here depends on a value.
    assert kept("meta") == N * N * 4  # the sum
    assert kept("cpu") == 2 * N * N * 4 + N * 8  # both addends and the index


@pytest.mark.values
def test_r11_host_reads_are_not_repeated(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        if h.sum().item() > -1e9:
            h = h * h.max().item()
        rows = (h > 0).any(1).nonzero().squeeze(1)
        return h[rows].exp() * h[h > 0].sum()

    assert_same_as_plain(fn, x)
    assert not backward_operators(recompute(fn), x)["_local_scalar_dense"]


@pytest.mark.cpu
def test_r11_a_replay_that_looks_different_raises(x: Tensor) -> None:
    calls.clear()
    out = recompute(lambda x: x.sin() * pure_liar(x.detach()))(x.requires_grad_())
    with pytest.raises(ReplayError, match="looks different"):
        out.sum().backward()


def test_r12_numeric_flags_of_forward_hold_in_the_replay_and_nowhere_else(x: Tensor) -> None:
    flags_seen.clear()
    before = device.numeric_flags()
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    try:
        out = recompute(lambda x: x.sin() * pure_flags(x.detach()))(x.requires_grad_())
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
    out.sum().backward()
    forward, replay = flags_seen
    assert forward == replay != before
    assert device.numeric_flags() == before


# ---- R13, R14: what autograd gets ----------------------------------------------------------------------


class Spoils(torch.autograd.Function):
    """A backward that writes to a tensor it has saved."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        h.mul_(2)
        return grad


def test_r13_a_replayed_value_that_backward_wrote_to_raises(x: Tensor) -> None:
    out = recompute(lambda x: Spoils.apply(x.exp()))(x.requires_grad_())
    with pytest.raises(RuntimeError, match="modified"):
        out.sum().backward()  # exp reads its result after Spoils has doubled it


def test_r13_a_buffer_that_was_handed_out_is_never_reused_for_a_write(x: Tensor) -> None:
    seen: list[Tensor] = []
    weights = [torch.randn(N, N, requires_grad=True) for _ in range(2)]

    def fn(h: Tensor) -> tuple[Tensor, Tensor]:
        first = h * weights[0]
        h.add_(1)
        return first, h * weights[1]

    def outer(x: Tensor) -> tuple[Tensor, Tensor]:
        return fn(x.detach() * 2)

    first, second = recompute(outer)(x)
    second.register_hook(lambda _: seen.append(first.grad_fn._saved_self))
    (first + second).sum().backward(retain_graph=True)
    assert torch.equal(seen[0], x * 2)
    assert torch.equal(weights[0].grad, x * 2)
    assert torch.equal(weights[1].grad, x * 2 + 1)


@pytest.mark.cpu
def test_r14_tensors_that_are_not_strided_pass_as_they_are(x: Tensor) -> None:
    sparse = torch.eye(N).to_sparse()

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            ctx.save_for_backward(sparse)
            return h * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (saved,) = ctx.saved_tensors
            assert saved.layout is torch.sparse_coo
            return torch.sparse.mm(saved, grad) * 2

    assert_same_as_plain(lambda x: Masked.apply(x.sin()).exp(), x)
    assert_same_as_plain(lambda x: torch.sparse.mm(sparse, x.sin()).exp(), x)
    assert_same_as_plain(lambda x: (x.sin().to_sparse() @ x).exp(), x)


def test_r14_lazy_conjugate_and_negative_bits_come_back() -> None:
    z = torch.randn(N, N, dtype=torch.complex64)

    def fn(z: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(z).conj() * z.conj()) * z.conj().imag.exp() + z.mH @ z

    assert_same_as_plain(fn, z)
    assert_same_as_plain(
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x.flip(0)).conj()), torch.randn(N)
    )


@pytest.mark.parametrize("name", ["t", "chunk", "expand", "unfold", "strided", "complex"])
def test_r14_views_are_rebuilt_from_their_layout(name: str, x: Tensor) -> None:
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "t": lambda h: h.t(),
        "chunk": lambda h: h.chunk(2, 1)[1],
        "expand": lambda h: h[:1].expand(N, N),
        "unfold": lambda h: h.unfold(0, 3, 2),
        "strided": lambda h: h[1::2, ::3],
        "complex": lambda h: torch.view_as_real(torch.view_as_complex(h.view(N, N // 2, 2)).conj().resolve_conj()),
    }
    view = views[name]
    assert_same_as_plain(lambda x: view(x.sin()) * view(x.exp()), x)


def test_rules_hold_together_in_every_order(x: Tensor) -> None:
    """Three steps of different kinds (in place, random, opaque) in each order."""

    def in_place(h: Tensor) -> Tensor:
        return (h * 1).tanh_() * (h * 2).add_(1)

    def random(h: Tensor) -> Tensor:
        return F.dropout(h, 0.3) * h.sigmoid()

    def opaque(h: Tensor) -> Tensor:
        return h * opaque_sign(h.detach())

    for order in itertools.permutations((in_place, random, opaque)):

        def fn(x: Tensor, order: Any = order) -> Tensor:
            for step in order:
                x = step(x)
            return x

        assert_same_as_plain(fn, x)


def test_r9_a_draw_on_meta_is_no_draw() -> None:
    """Shapes alone, as in a dry run."""
    x = torch.randn(4, 8, device="meta", requires_grad=True)
    layer = nn.Sequential(nn.Linear(8, 8, device="meta"), nn.Dropout(0.5), nn.GELU())
    out = recompute(layer.forward)(x)
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
