"""The verb ``swap_layer_inputs``: bits, bytes as formulas, and what leaves nothing behind (L1, L8, U5, U6)."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from tests.activations.kit import no_collector
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
    no_managers,
    same,
    stats,
    steps,
    swapped,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import SwapManager, checkpoint_wrapper
from lowtide.errors import CapacityError, LowtideWarning, ScheduleError, UnsupportedError, WrapError
from lowtide.recipes.layer_inputs import LayerInputs, SwapLayerInputManager, swap_layer_inputs


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_training_is_the_same_and_all_inputs_but_the_last_leave(count: int, recompute: bool) -> None:  # noqa: FBT001
    want = steps(build(count, recompute=False))
    model, switch = swapped(count, recompute=recompute)
    assert same(want, steps(model))
    loss = model(batch()).sum()
    assert inputs_away() == count - 1
    loss.backward()
    assert inputs_away() == 0
    assert alive(switch.managers) == [0] * count
    assert SwapManager().traffic.out_bytes == 3 * (count - 1) * INPUT_BYTES
    assert SwapManager().traffic.late_loads == 0


def test_what_moves_is_the_input_and_nothing_else() -> None:
    model, _ = swapped(4)
    model(batch()).sum().backward()
    rows = {row.name: row for row in lowtide.report(model).rows}
    assert [rows[f"layers.{i}"].swapped_bytes for i in range(4)] == [INPUT_BYTES] * 3 + [0]
    assert rows["layers.3"].kept_bytes == INPUT_BYTES
    assert not any(row.refused for row in rows.values())


def test_the_other_arguments_of_a_recomputed_layer_stay() -> None:
    class Masked(Block):
        def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            return super().forward(hidden_states * mask)

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(hidden_states=x, mask=torch.ones(TOKENS, WIDTH).cos())
            return x

    torch.manual_seed(0)
    model = Model(3, Masked)
    want = steps(model)
    for layer in model.layers:
        checkpoint_wrapper(layer, recompute="replay")
    swap_layer_inputs(list(model.layers))
    assert same(want, steps(model))
    row = lowtide.report(model).rows[0]
    assert (row.swapped_bytes, row.kept_bytes) == (INPUT_BYTES, INPUT_BYTES)


def test_the_last_layer_stays_and_backward_brings_back_one_layer_ahead() -> None:
    model, switch = swapped(5)
    x = model.first(batch())
    outs = []
    for layer in model.layers:
        x = layer(x)
        outs.append(x)
    # The last but one was on its way when forward ended, and is needed first: nobody waits for it to leave.
    assert stats(switch.managers) == [["host"], ["host"], ["host"], ["d2h"], ["device"]]
    assert _loaded_when_backward_enters(outs[-1], x.sum(), switch) == {0: "host", 1: "host", 2: "host"}


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("prefetch", [1, 2, 3, 4])
def test_prefetch_is_how_many_layers_ahead_backward_loads(prefetch: int, recompute: bool) -> None:  # noqa: FBT001
    model = build(6, recompute=recompute)
    switch = swap_layer_inputs(list(model.layers), prefetch=prefetch)
    out = model(batch())
    states = _loaded_when_backward_enters(out, out.sum(), switch)
    # When backward enters layer 5, of the layers before it layer 4 is still there, and the next ones are on their way.
    assert states == {layer: "h2d" if layer > 4 - prefetch else "host" for layer in range(4)}
    # The hook of the layer's end has run before ours.
    assert SwapManager().traffic.late_loads == 0
    assert SwapManager().traffic.in_bytes == 4 * INPUT_BYTES


def _loaded_when_backward_enters(out: Tensor, loss: Tensor, switch: LayerInputs) -> dict[int, str]:
    """Where the input of every layer but the last two is when backward has reached the last layer's output."""
    found: dict[int, str] = {}

    def look(_: Tensor) -> None:
        found.update({index: stats(switch.managers)[index][0] for index in range(len(switch.managers) - 2)})

    out.register_hook(look)
    loss.backward()
    return found


def test_a_distance_of_its_own_does_not_change_other_chains() -> None:
    model = build(4)
    swap_layer_inputs(list(model.layers), prefetch=3)
    assert SwapManager().settings.prefetch == 1
    model(batch()).sum().backward()
    assert SwapManager().traffic.late_loads == 0


def test_the_resident_inputs_do_not_grow_with_the_number_of_layers() -> None:
    """What is not on the lower tier at the end of forward: the last input, and the one that is on its way."""
    for count in (3, 6, 9):
        model, switch = swapped(count)
        loss = model(batch()).sum()
        resident = [state for one in stats(switch.managers) for state in one if state in {"device", "d2h"}]
        assert len(resident) == 2
        loss.backward()
        switch.undo()


# ---- what leaves nothing behind (the faults of the first implementation) ------------------------------------------


def test_evaluation_and_no_grad_leave_nothing_and_do_not_shift_the_next_step() -> None:
    want = steps(build(4, recompute=False))
    model, switch = swapped(4)
    model.eval()
    with torch.no_grad():
        model(batch(7))
    with torch.inference_mode():
        model(batch(8))
    assert alive(switch.managers) == [0] * 4
    assert inputs_away() == 0
    model.train()
    assert same(want, steps(model))


def test_an_exception_in_forward_leaves_nothing() -> None:
    model, switch = swapped(4)
    hook = model.layers[2].norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"):
        model(batch())
    hook.remove()
    gc.collect()
    assert alive(switch.managers) == [0] * 4
    assert inputs_away() == 0
    assert SwapManager().units == []
    assert same(steps(build(4, recompute=False)), steps(model))


@pytest.mark.parametrize("recompute", [True, False])
def test_a_graph_that_is_dropped_leaves_nothing(recompute: bool) -> None:  # noqa: FBT001
    model, switch = swapped(4, recompute=recompute)
    with no_collector():
        out = model(batch())
        assert alive(switch.managers) == [1] * 4
        del out
        assert alive(switch.managers) == [0] * 4
        assert inputs_away() == 0


def test_retain_graph_gives_the_same_gradients_twice() -> None:
    model, _ = swapped(4)
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    loss.backward()
    assert same(once, gradients(model))


@pytest.mark.parametrize("recompute", [True, False])
def test_managers_and_layers_die_by_reference_counting(recompute: bool) -> None:  # noqa: FBT001
    model, switch = swapped(3, recompute=recompute)
    model(batch()).sum().backward()
    gone = [weakref.ref(layer) for layer in model.layers] + [weakref.ref(one) for one in switch.managers]
    with no_collector():
        del model
        assert [one() for one in gone] == [None] * len(gone)
    assert no_managers()
    assert not [tag for tag in SwapLayerInputManager.manager_map if tag.startswith("swap_layer_inputs")]


def test_undo_restores_everything_and_may_be_repeated() -> None:
    model = build(3, recompute=False)
    before = [dict(layer.__dict__) for layer in model.layers]
    switch = swap_layer_inputs(list(model.layers))
    loss = model(batch()).square().mean()
    switch.undo()
    switch.undo()
    assert [dict(layer.__dict__) for layer in model.layers] == before
    assert not any(SwapManager().is_chained(layer) for layer in model.layers)
    assert len(switch.managers) == 0
    assert no_managers()
    loss.backward()  # the graph that was alive
    assert same([loss.detach(), *gradients(model)], steps(build(3, recompute=False), 1))
    model(batch())
    assert inputs_away() == 0


def test_undo_keeps_the_recompute_that_was_there() -> None:
    model, switch = swapped(3)
    switch.undo()
    assert all(layer.forward.region is not None for layer in model.layers)
    assert all(row.swapped_bytes == 0 for row in lowtide.report(model).rows)


def test_unwrap_takes_a_layer_out_and_its_neighbours_close_the_chain() -> None:
    model, switch = swapped(4, recompute=False)
    lowtide.unwrap(model.layers[1])
    loss = model(batch()).sum()
    assert inputs_away() == 2
    assert [manager.layer_idx for manager in switch.managers] == [0, 1, 2]
    loss.backward()


def test_copies_and_pickles_are_plain_layers_with_their_recompute() -> None:
    model, _ = swapped(3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
        assert all(layer.forward.recipe is None for layer in other.layers)
        assert same(steps(build(3, recompute=False)), steps(other))
        assert inputs_away() == 0


def test_a_reset_of_the_manager_does_not_switch_it_off_silently() -> None:
    model, _ = swapped(4)
    SwapManager().reset()
    loss = model(batch()).sum()
    assert inputs_away() == 3
    loss.backward()


# ---- who else keeps the input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_torch_s_own_checkpoint_nothing_breaks_and_the_input_counts_as_held_elsewhere(
    reentrant: bool,  # noqa: FBT001
) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(5)
    model = Checkpointed(3)
    want = steps(model)
    switch = swap_layer_inputs(list(model.layers))
    assert same(want, steps(model))
    assert alive(switch.managers) == [0, 0, 0]
    rows = lowtide.report(model).rows
    assert [row.held_elsewhere_bytes for row in rows] == [INPUT_BYTES] * 3
    assert all("checkpoint_wrapper" in refusal.remedy for row in rows for refusal in row.refused.values())
    assert SwapManager().traffic.out_bytes == 0


def test_the_module_that_calls_torch_s_checkpoint_can_be_named_instead() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.block, x, use_reentrant=True)
            return out

    want = steps(build(4, Checkpointed, recompute=False))
    model, _ = swapped(4, Checkpointed, recompute=False)
    assert same(want, steps(model))
    loss = model(batch()).sum()
    assert inputs_away() == 3
    loss.backward()


def test_an_input_that_somebody_else_holds_counts_as_held_elsewhere_with_the_remedy() -> None:
    model, _ = swapped(4)
    kept: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model(batch()).sum().backward()
    rows = lowtide.report(model).rows
    assert [row.held_elsewhere_bytes for row in rows] == [INPUT_BYTES, INPUT_BYTES, 0, 0]
    assert sum("drop the other reference" in note for note in lowtide.report(model).notes) == 2


# ---- errors -------------------------------------------------------------------------------------------------------


def test_bad_lists_are_refused_and_leave_nothing() -> None:
    a, b, c = Block(), Block(), Block()
    with pytest.raises(WrapError, match="no layers"):
        swap_layer_inputs([])
    with pytest.raises(WrapError, match="got function"):
        swap_layer_inputs([a, lambda x: x])  # type: ignore[list-item]
    with pytest.raises(ScheduleError, match="named twice"):
        swap_layer_inputs([a, b, a])
    with pytest.raises(ScheduleError, match="prefetch is no count"):
        swap_layer_inputs([a, b], prefetch=0)
    with pytest.raises(ScheduleError, match="micro_batches is no count"):
        swap_layer_inputs([a, b], micro_batches=1.5)  # type: ignore[arg-type]
    SwapManager().set_forward_prefetch_layer(a, b)
    with pytest.raises(ScheduleError, match="a chain already"):
        swap_layer_inputs([b, c])
    SwapManager().unchain(a)
    lowtide.unwrap(a)
    lowtide.unwrap(b)
    assert not any("forward" in layer.__dict__ for layer in (a, b, c))
    assert no_managers()


def test_naming_a_layer_again_is_refused_until_the_first_is_undone() -> None:
    layers = [Block(), Block()]
    switch = swap_layer_inputs(layers)
    with pytest.raises(WrapError, match="moves already"):
        swap_layer_inputs(layers)
    switch.undo()
    swap_layer_inputs(layers).undo()


def test_one_layer_alone_warns_that_nothing_will_move() -> None:
    layer = Block()
    with pytest.warns(LowtideWarning, match="nothing will move"):
        swap_layer_inputs([layer])
    layer(batch()).sum().backward()


def test_a_layer_without_an_input_raises_and_names_the_two_places() -> None:
    class Odd(Block):
        def forward(self, *, x: Tensor) -> Tensor:
            return super().forward(x)

    layers = [Odd(), Odd()]
    swap_layer_inputs(layers)
    with pytest.raises(UnsupportedError, match="keyword hidden_states or as the first positional tensor"):
        layers[0](x=batch())


@pytest.mark.cpu
def test_a_compiled_graph_that_would_have_to_swap_raises() -> None:
    model, switch = swapped(2, recompute=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="a compiled graph cannot swap"):
        compiled(batch())
    switch.undo()


def test_too_little_room_is_found_before_the_first_input_leaves() -> None:
    model, switch = swapped(5)
    SwapManager().configure(host_bytes=4 * INPUT_BYTES - 1)
    with pytest.raises(CapacityError, match="no room") as caught:
        model(batch())
    text = str(caught.value)
    assert f"(5 - 1) x {INPUT_BYTES} x 1 = {4 * INPUT_BYTES} bytes" in text
    assert f"got {4 * INPUT_BYTES - 1} bytes of host_bytes" in text
    assert SwapManager().traffic.out_bytes == 0
    assert alive(switch.managers) == [0] * 5
    SwapManager().configure(host_bytes=8 * INPUT_BYTES)
    assert same(steps(build(5, recompute=False)), steps(model))


def test_micro_batches_in_flight_multiply_what_is_needed() -> None:
    model = build(3)
    switch = swap_layer_inputs(list(model.layers), micro_batches=4)
    SwapManager().configure(host_bytes=2 * 4 * INPUT_BYTES - 1)
    with pytest.raises(CapacityError, match=rf"\(3 - 1\) x {INPUT_BYTES} x 4"):
        model(batch())
    switch.undo()


def test_the_check_is_made_again_for_a_larger_input() -> None:
    model, _ = swapped(3)
    SwapManager().configure(host_bytes=4 * INPUT_BYTES)
    model(batch()).sum().backward()
    with pytest.raises(CapacityError, match="no room"):
        model(torch.cat([batch()] * 3))


def test_buffers_of_a_layer_stay_even_where_all_inputs_of_its_region_move() -> None:
    class Biased(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(TOKENS, WIDTH))

        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states * self.table)

    model = build(3, Biased, recompute=False)
    for layer in model.layers:
        checkpoint_wrapper(layer, swap_inputs=True, recompute="replay")
    swap_layer_inputs(list(model.layers))
    model(batch()).sum().backward()
    row = lowtide.report(model).rows[0]
    assert row.swapped_bytes == INPUT_BYTES
    assert row.refused["buffers never move"].bytes == INPUT_BYTES


def test_the_learned_order_and_the_chain_can_stand_side_by_side() -> None:
    want = steps(build(4, recompute=False))
    model, _ = swapped(4)
    order = lowtide.auto(model)
    assert same(want, steps(model))
    loss = model(batch()).sum()
    assert inputs_away() == 3
    loss.backward()
    order.undo()


def test_a_group_that_is_driven_by_hand_takes_precedence() -> None:
    want = steps(build(3, recompute=False), 1)
    model, switch = swapped(3)
    manager = SwapManager()
    manager.set_current_group_name("batch")
    loss = model(batch()).square().mean()
    manager.set_current_group_name(None)
    assert stats(switch.managers) == [["device"]] * 3
    manager.launch_offload("batch")
    manager.wait_offload("batch")
    assert inputs_away() == 3
    manager.launch_load("batch")
    manager.wait_load("batch")
    loss.backward()
    assert same(want, [loss.detach(), *gradients(model)])


def test_several_micro_batches_are_served_in_every_order() -> None:
    """One stage's 1F1B: warm-up forwards, then backward and forward in turn, oldest first."""

    def run(model: Stack, warm_up: int, count: int = 5) -> list[Tensor]:
        losses: list[Tensor] = []
        waiting: list[Tensor] = []
        for index in range(count):
            waiting.append(model(batch(index)).square().mean())
            if len(waiting) > warm_up:
                losses.append(waiting[0].detach().clone())
                waiting.pop(0).backward()
        for loss in waiting:
            losses.append(loss.detach().clone())
            loss.backward()
        return [*losses, *gradients(model)]

    for warm_up in (0, 1, 3):
        want = run(build(4, recompute=False), warm_up)
        for recompute in (True, False):
            model, switch = swapped(4, recompute=recompute)
            assert same(want, run(model, warm_up))
            assert alive(switch.managers) == [0] * 4
            assert inputs_away() == 0
            switch.undo()


def test_the_batch_stack_is_first_in_first_out() -> None:
    model, switch = swapped(3)
    losses = [model(batch(index)).sum() for index in range(3)]
    first = switch.managers[0]
    assert alive(switch.managers) == [3, 3, 3]
    assert [one.stat for one in first.batch_stack] == ["host"] * 3
    assert inputs_away() == 3 * 2
    oldest = first.batch_stack[0]
    losses[0].backward()
    assert alive(switch.managers) == [2, 2, 2]
    assert oldest.stat == "device"
    assert all(one.stat == "host" for one in first.batch_stack)
    for loss in losses[1:]:
        loss.backward()


def test_the_wrapped_layers_look_as_before() -> None:
    model = build(2, recompute=False)
    keys = list(model.state_dict())
    switch = swap_layer_inputs(list(model.layers))
    assert isinstance(switch, LayerInputs)
    assert list(model.state_dict()) == keys
    assert isinstance(model.layers[0], Block)
    assert functools.reduce(lambda a, b: a + b, [p.numel() for p in model.parameters()]) > 0
