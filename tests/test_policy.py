"""Answers, how they combine, and the ready-made policies."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

import lowtide
from lowtide import CheckpointPolicy, SelectiveCheckpointContext, save_ops, swap_ops
from lowtide.activations.operators import Kind, operator_of
from lowtide.errors import PolicyError
from lowtide.policy import (
    Fate,
    as_policy,
    composite_of,
    fate_of,
    is_must,
    save_matmuls_and_attention,
    stronger,
    swap_matmuls_and_attention,
)

aten = torch.ops.aten
RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE


def test_the_members_and_their_values() -> None:
    assert {member.name: member.value for member in CheckpointPolicy} == {
        "MUST_SAVE": 0,
        "PREFER_SAVE": 1,
        "MUST_RECOMPUTE": 2,
        "PREFER_RECOMPUTE": 3,
        "MUST_SWAP": 4,
        "PREFER_SWAP": 5,
    }


@pytest.mark.parametrize("member", list(TorchPolicy), ids=lambda m: m.name)
def test_torchs_own_members_are_understood(member: TorchPolicy) -> None:
    ours = as_policy(member, "here")
    assert type(ours) is CheckpointPolicy
    assert ours.name == member.name.replace("CPU_OFFLOAD", "SWAP")


@pytest.mark.parametrize(
    "answer",
    [None, 0, 4, True, "MUST_SAVE", Fate.KEEP, CheckpointPolicy, object()],
    ids=lambda answer: type(answer).__name__,
)
def test_nothing_is_guessed(answer: object) -> None:
    with pytest.raises(PolicyError, match=r"lowtide\.CheckpointPolicy") as raised:
        as_policy(answer, "layers.7")
    assert "(layers.7)" in str(raised.value) and repr(answer) in str(raised.value)


def test_the_order_of_answers_is_total_and_must_beats_prefer() -> None:
    for a, b in itertools.product(CheckpointPolicy, repeat=2):
        won = stronger(a, b)
        assert won in {a, b}
        assert stronger(b, a) is won
        if is_must(a) != is_must(b):
            assert won is (a if is_must(a) else b)
        else:
            assert fate_of(won) is max(fate_of(a), fate_of(b))
    for a, b, c in itertools.product(CheckpointPolicy, repeat=3):
        assert stronger(stronger(a, b), c) is stronger(a, stronger(b, c))
    assert Fate.KEEP > Fate.SWAP > Fate.RECOMPUTE


def test_the_context_says_in_which_phase_it_is() -> None:
    assert [SelectiveCheckpointContext(is_recompute=phase).is_recompute for phase in (False, True)] == [False, True]
    with pytest.raises(TypeError):
        SelectiveCheckpointContext(True)  # type: ignore[misc]


# ---- ready-made ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named",
    [
        ("aten.mm",),
        ("mm",),
        ("aten::mm",),
        ("aten.mm.default",),
        (aten.mm,),
        (aten.mm.default,),
        ([aten.mm],),
        ({"aten.mm"},),
        ((aten.mm.default, "aten.addmm"),),
    ],
    ids=str,
)
def test_an_operator_may_be_named_in_every_way(named: tuple[Any, ...]) -> None:
    for make, answer in ((save_ops, CheckpointPolicy.MUST_SAVE), (swap_ops, CheckpointPolicy.MUST_SWAP)):
        policy = make(*named)
        assert policy(None, aten.mm.default) is answer
        assert policy(None, aten.sin.default) is RECOMPUTE


def test_one_overload_means_that_one_and_a_packet_all() -> None:
    assert save_ops("aten.add.Tensor")(None, aten.add.Scalar) is RECOMPUTE
    assert save_ops("aten.add")(None, aten.add.Scalar) is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize(
    ("composite", "parts"),
    [
        ("matmul", ["mm", "bmm", "mv", "dot"]),
        ("linear", ["addmm", "mm"]),
        ("einsum", ["bmm"]),
        ("scaled_dot_product_attention", ["_scaled_dot_product_flash_attention_for_cpu"]),
        ("conv2d", ["convolution"]),
        ("layer_norm", ["native_layer_norm"]),
    ],
)
def test_a_composite_means_its_parts(composite: str, parts: list[str]) -> None:
    for named in (f"aten.{composite}", getattr(aten, composite)):
        policy = save_ops(named)
        assert all(policy(None, getattr(aten, part).default) is CheckpointPolicy.MUST_SAVE for part in parts)


def _kept(policy: Any, fn: Any) -> int:
    """Bytes that a region keeps because of a policy, beside its input."""
    wrapped = lowtide.checkpoint_wrapper(fn, policy, recompute="replay")
    x = torch.randn(16, 16, requires_grad=True)
    wrapped(x)
    return int(wrapped._lowtide_region.row.kept_bytes) - x.nbytes


def test_a_function_that_knows_only_the_composite_is_asked_for_it_too() -> None:
    asked: list[Any] = []

    def policy(ctx: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        return CheckpointPolicy.MUST_SAVE if op is aten.matmul.default else RECOMPUTE

    assert _kept(policy, lambda x: torch.matmul(x, x).exp().sin()) == 16 * 16 * 4
    assert aten.mm.default in asked and aten.matmul.default in asked
    assert aten.matmul.default in composite_of(aten.mm.default)
    assert composite_of(aten.sin.default) == ()


def test_what_heavy_operators_give_is_kept_or_moved() -> None:
    for make, answer in (
        (save_matmuls_and_attention, CheckpointPolicy.MUST_SAVE),
        (swap_matmuls_and_attention, CheckpointPolicy.MUST_SWAP),
    ):
        policy = make()
        heavy = [aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_dot_product_flash_attention_for_cpu]
        assert all(policy(None, op.default) is answer for op in heavy)
        assert policy(None, aten.gelu.default) is RECOMPUTE
    assert _kept(save_matmuls_and_attention(), lambda x: (x @ x).exp().sin()) == 16 * 16 * 4
    assert _kept(save_ops("aten.exp"), lambda x: (x @ x).exp().sin()) == 16 * 16 * 4


def test_equal_sets_are_equal_policies_and_every_call_gives_a_fresh_one() -> None:
    first, second = save_ops("aten.mm", "aten.bmm"), save_ops("aten.mm", "aten.bmm")
    assert first == second and hash(first) == hash(second) and first is not second
    assert first != save_ops("aten.mm") and first != swap_ops("aten.mm", "aten.bmm")
    assert save_matmuls_and_attention() is not save_matmuls_and_attention()
    first(None, aten.mm.default)
    assert first == second, "what has run is no part of a policy's meaning"


def test_pickle_and_copy_keep_the_meaning_and_forget_the_runs() -> None:
    policy = save_ops(aten.mm, aten.addmm.default, "aten.matmul")
    policy(None, aten.mm.default)
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):  # noqa: S301 - our own bytes
        assert other.members == policy.members
        assert other.answer is policy.answer
        assert not other.occurred
        assert other(None, aten.addmm.default) is CheckpointPolicy.MUST_SAVE


def test_the_report_names_a_listed_operator_that_never_ran() -> None:
    model = nn.Sequential(lowtide.checkpoint_wrapper(nn.Linear(8, 8), save_ops("aten.addmm", "aten.bmm")))
    assert not lowtide.report(model).notes, "nothing has run so far"
    model(torch.ones(2, 8))
    (note,) = lowtide.report(model).notes
    assert "aten.bmm" in note and "never ran" in note
    ready = nn.Sequential(lowtide.checkpoint_wrapper(nn.Linear(8, 8), save_matmuls_and_attention()))
    ready(torch.ones(2, 8))
    assert not lowtide.report(ready).notes, "of a ready-made list only some ever run"


# ---- what the tape knows of operators ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        (aten.view.default, Kind.PASS),
        (aten.t.default, Kind.PASS),
        (aten.detach.default, Kind.PASS),
        (aten._local_scalar_dense.default, Kind.PASS),
        (aten.mm.default, Kind.PURE),
        (aten.split_with_sizes_copy.default, Kind.PURE),
        (aten.add_.Tensor, Kind.WRITE),
        (aten.sin.out, Kind.WRITE),
        (aten.empty_like.default, Kind.EMPTY),
        (aten.new_empty.default, Kind.EMPTY),
        (aten.native_batch_norm.default, Kind.OPAQUE),
        (aten.record_stream.default, Kind.OPAQUE),
        (aten.set_.source_Tensor, Kind.POISON),
        (aten.resize_.default, Kind.POISON),
        (torch.ops._c10d_functional.all_reduce.default, Kind.OPAQUE),
    ],
    ids=str,
)
def test_the_kind_of_an_operator(operator: Any, kind: Kind) -> None:
    assert operator_of(operator).kind is kind


def test_attention_draws_only_where_it_drops() -> None:
    attention = operator_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    q = torch.zeros(1, 1, 2, 2)
    assert not attention.draws((q, q, q), {})
    assert not attention.draws((q, q, q, 0.0), {})
    assert operator_of(aten.bernoulli_.float).draws((q, 0.5), {})
    assert not operator_of(aten.mm.default).draws((q, q), {})
