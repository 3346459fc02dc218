"""What a layer may be: called twice, one of several in a region, wrapped in any way, sliced, frozen, a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.activations.kit import Operators
from tests.recipes.layer_inputs_kit import (
    INPUT_BYTES,
    TOKENS,
    WIDTH,
    Block,
    Stack,
    alive,
    batch,
    build,
    gradients,
    inputs_away,
    same,
    steps,
    swapped,
)
from torch import Tensor, nn

import lowtide
from lowtide import CheckpointPolicy, SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide.recipes.layer_inputs import swap_layer_inputs


def test_a_layer_that_is_called_twice_is_served_twice() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in [*self.layers, self.layers[1]]:
                x = layer(x)
            return x

    for recompute in (True, False):
        torch.manual_seed(5)
        model = Twice(3)
        want = steps(model)
        if recompute:
            for layer in model.layers:
                checkpoint_wrapper(layer, recompute="replay")
        switch = swap_layer_inputs(list(model.layers))
        assert same(want, steps(model))
        loss = model(batch()).sum()
        assert alive(switch.managers) == [1, 2, 1]
        assert inputs_away() == 3  # layers 0, 1 and 1 again; the last layer of the list never leaves
        loss.backward()
        assert alive(switch.managers) == [0, 0, 0]
        switch.undo()


def test_a_region_around_several_layers_moves_only_what_enters_it() -> None:
    class Group(nn.Sequential):
        pass

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.groups = nn.ModuleList(Group(Block(), Block()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for group in self.groups:
                x = group(x)
            return x

    torch.manual_seed(0)
    model = Grouped()
    want = steps(model)
    for group in model.groups:
        checkpoint_wrapper(group, recompute="replay")
    layers = [layer for group in model.groups for layer in group]
    switch = swap_layer_inputs(layers)
    assert same(want, steps(model))
    loss = model(batch()).sum()
    assert alive(switch.managers) == [1, 0, 1, 0, 1, 0]
    assert inputs_away() == 2  # the last group holds the last layer, so its input stays
    assert SwapManager().traffic.out_bytes == 3 * 2 * INPUT_BYTES
    loss.backward()
    assert SwapManager().traffic.late_loads == 0
    assert any("only what enters that region" in note for note in lowtide.report(model).notes)


def test_regions_inside_of_a_layer_keep_their_own_answers() -> None:
    """A layer that is not recomputed, with an inner recompute and an inner swap: only their own policies change."""
    want = steps(build(3, recompute=False))
    model = build(3, recompute=False)
    for layer in model.layers:
        checkpoint_wrapper(layer.down, recompute="replay")
        swap_wrapper(layer.up)
    swap_layer_inputs(list(model.layers))
    assert same(want, steps(model))
    loss = model(batch()).sum()
    # Beside each input: what `up` saves, its input (the norm's result).
    assert inputs_away() == 2 * 2
    loss.backward()


def test_inside_of_an_outer_swap_region_the_outer_policy_speaks_for_the_rest() -> None:
    asked: list[tuple[int, ...]] = []

    def policy(tensor: Tensor) -> CheckpointPolicy:
        asked.append(tuple(tensor.shape))
        return CheckpointPolicy.MUST_SWAP if tensor.shape[-1] == 2 * WIDTH else CheckpointPolicy.MUST_SAVE

    model = build(3, recompute=False)
    want = steps(build(3, recompute=False))
    swap_wrapper(model, policy)
    swap_layer_inputs(list(model.layers))
    assert same(want, steps(model))
    assert asked
    loss = model(batch()).sum()
    wide = 2  # both the activation's input and its result are 2 x as wide and are saved
    assert inputs_away() == 2 * (1 + wide * 2)
    loss.backward()


@pytest.mark.parametrize("mode", ["call", "swap"])
def test_every_kind_of_wrap_of_the_layer_itself_works(mode: str) -> None:
    want = steps(build(4, recompute=False))
    model = build(4, recompute=False)
    for layer in model.layers:
        if mode == "call":
            checkpoint_wrapper(layer, recompute="call")
        else:
            swap_wrapper(layer, lambda _: CheckpointPolicy.MUST_SAVE)
    switch = swap_layer_inputs(list(model.layers))
    assert same(want, steps(model))
    loss = model(batch()).sum()
    assert inputs_away() == 3
    assert alive(switch.managers) == [1] * 4
    loss.backward()


def test_a_selective_policy_recomputes_no_more_than_before() -> None:
    def operators(*, swap: bool) -> dict[str, int]:
        torch.manual_seed(5)
        model = Stack(3)
        for layer in model.layers:
            checkpoint_wrapper(layer, lowtide.save_matmuls_and_attention(), recompute="replay")
        if swap:
            swap_layer_inputs(list(model.layers))
        loss = model(batch()).sum()
        with Operators() as seen:
            loss.backward()
        return {name: seen.of(name) for name in ("addmm", "mm", "gelu", "native_layer_norm")}

    assert operators(swap=True) == operators(swap=False)


def test_a_sliced_input_keeps_its_base() -> None:
    class Sliced(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                self.base = torch.cat([x, x.detach() * 2])
                x = layer(self.base[:TOKENS])
            return x * self.base[TOKENS:].mean()

    torch.manual_seed(5)
    model = Sliced(3)
    want = steps(model)
    for layer in model.layers:
        checkpoint_wrapper(layer, recompute="replay")
    swap_layer_inputs(list(model.layers))
    assert same(want, steps(model))
    assert model.base.untyped_storage().nbytes() == 2 * INPUT_BYTES


def test_frozen_layers_and_inputs_without_gradient_work() -> None:
    want_model, model = build(4, recompute=False), build(4)
    for one in (want_model, model):
        one.first.requires_grad_(requires_grad=False)
        one.layers[0].requires_grad_(requires_grad=False)
        one.layers[2].requires_grad_(requires_grad=False)
    want = steps(want_model)
    swap_layer_inputs(list(model.layers))
    assert same(want, steps(model))


def test_autocast_and_dropout_give_the_same_bits() -> None:
    class Dropped(Block):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return torch.dropout(super().forward(hidden_states), 0.2, train=True)

    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        with torch.autocast(batch().device.type, dtype=torch.bfloat16):
            return steps(model)

    want = run(build(3, Dropped, recompute=False))
    model, _ = swapped(3, Dropped)
    assert same(want, run(model))


def test_a_tensor_that_is_marked_moves_with_the_input() -> None:
    class Carrying(Block):
        def forward(self, hidden_states: Tensor, extra: Tensor | None = None) -> Tensor:
            assert extra is not None
            return super().forward(hidden_states * extra)

    for recompute in (True, False):
        torch.manual_seed(5)
        first = nn.Linear(WIDTH, WIDTH)
        layers = nn.ModuleList(Carrying() for _ in range(3))
        if recompute:
            for layer in layers:
                checkpoint_wrapper(layer, recompute="replay")
        switch = swap_layer_inputs(list(layers))
        x = first(batch())
        for layer in layers:
            extra = x.detach().cos()
            extra.swap_this_tensor = True  # type: ignore[attr-defined]
            x = layer(x, extra)
        # Where nothing is recomputed the product saves the marked tensor, and not the input, whose factor is constant.
        assert inputs_away() == (2 * 2 if recompute else 2)
        x.sum().backward()
        switch.undo()


def test_a_tensor_that_is_marked_false_stays_and_is_counted() -> None:
    model, _ = swapped(3)
    x = model.first(batch())
    x.swap_this_tensor = False
    for layer in model.layers:
        x = layer(x)
    assert inputs_away() == 1
    reasons = [reason for row in lowtide.report(model).rows for reason in row.refused]
    assert reasons == ["the input does not move: it is marked swap_this_tensor = False"]
    x.sum().backward()


def test_where_autograd_keeps_nothing_of_the_input_the_report_says_so() -> None:
    class Converting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block().double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.double()).float()

    model, _ = swapped(3, Converting, recompute=False)
    model(batch()).sum().backward()
    assert sum("autograd keeps none of it" in note for note in lowtide.report(model).notes) == 3
    assert SwapManager().traffic.out_bytes == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_a_transformer_as_people_use_it_trains_the_same(recompute: bool) -> None:  # noqa: FBT001
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.arange(TOKENS).reshape(2, -1) % 64

    def run(model: Any) -> list[Tensor]:
        losses = []
        for _ in range(2):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *gradients(model)]

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    want = run(model)
    if recompute:
        for layer in model.model.layers:
            checkpoint_wrapper(layer, recompute="replay")
    switch = swap_layer_inputs(list(model.model.layers))
    assert same(want, run(model))
    loss = model(input_ids=ids, labels=ids).loss
    assert inputs_away() == 3
    loss.backward()
    switch.undo()
