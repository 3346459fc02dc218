"""``apply``: atomic, undone exactly, and nothing of the user's is touched. Where layers are found."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide.errors import ConfigError, LowtideError, ScheduleError, WrapError
from lowtide.recipes import apply as apply_module
from lowtide.recipes.apply import apply
from lowtide.recipes.config import MemoryConfig
from lowtide.recipes.find import find_in, find_layers, matches

from .kit import BATCH, LAYERS, SEQUENCE, WIDE, Mcore, bits, build, held, plain, same

EVERYTHING = MemoryConfig(
    full_recompute_num_layers=1,
    recompute_activation_function=True,
    recompute_norm=True,
    swap_attention=True,
    swap_inputs=True,
)
CONFIGS = [
    MemoryConfig(recompute_activation_function=True),
    MemoryConfig(recompute_norm=True, recompute_activation_function=True),
    MemoryConfig(recompute_method="uniform", swap_inputs=True),
    MemoryConfig(swap_attention=True, swap_attention_recompute_num_layers=1),
    MemoryConfig(swap_attention=True, swap_schedule="auto"),
    EVERYTHING,
]


def dicts(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(module.__dict__) for module in model.modules()]


def untouched(model: nn.Module, before: list[dict[str, Any]]) -> bool:
    chained = any(SwapManager().is_chained(module) for module in model.modules())
    return dicts(model) == before and not chained


# A chain names objects of this process, so a copy of its layers stands in none, and says so.
@pytest.mark.filterwarnings("ignore:a wrapper asked to swap")
@pytest.mark.parametrize("config", CONFIGS)
def test_undo_puts_everything_back(config: MemoryConfig) -> None:
    model, want = build("mcore"), plain("mcore").bits
    before, keys = dicts(model), list(model.state_dict())
    applied = apply(model, config)
    assert list(model.state_dict()) == keys
    assert same(want, bits(model))
    copied = copy.deepcopy(model)
    assert same(want, bits(copied))
    del copied
    applied.undo()
    assert untouched(model, before)
    applied.undo()
    assert untouched(model, before)
    assert same(want, bits(model))


@pytest.mark.filterwarnings("ignore:a wrapper asked to swap")
def test_a_copy_through_pickle_trains_the_same() -> None:
    model = build("mcore")
    apply(model, EVERYTHING)
    copied = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own bytes
    assert same(bits(model), bits(copied))


@pytest.mark.parametrize("name", ["gpt2-dropout", "llama-dropout", "t5-dropout", "mixtral"])
def test_all_features_at_once_change_no_bit(name: str) -> None:
    pytest.importorskip("transformers")
    SwapManager().configure(min_bytes=0)
    model, want = build(name), plain(name).bits
    SwapManager().traffic.out_bytes = 0
    apply(model, EVERYTHING)
    assert same(want, bits(model))
    assert SwapManager().traffic.out_bytes > 0
    assert SwapManager().lower_bytes() == 0


@pytest.mark.cpu
def test_under_autocast_no_bit_changes_and_the_activation_function_is_freed() -> None:
    unwrapped, model = build("mcore"), build("mcore")
    apply(model, MemoryConfig(recompute_activation_function=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(bits(unwrapped), bits(model))
        assert held(unwrapped) - held(model) == LAYERS * BATCH * SEQUENCE * WIDE * 2


def test_undo_between_forward_and_backward_leaves_the_graph_alone() -> None:
    unwrapped, model = build("mcore"), build("mcore")
    x = torch.randn(2, 32, 64)
    applied = apply(model, EVERYTHING)
    out = model(x)
    applied.undo()
    out.sum().backward()
    unwrapped(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(unwrapped.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("at", range(6))
def test_an_error_half_way_leaves_the_model_as_it_was(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mcore")
    before = dicts(model)
    seen = 0

    def failing(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > 2 * at:
                raise OSError("half-way")
            return original(*args, **kwargs)

        return call

    for name in ("checkpoint_wrapper", "swap_wrapper"):
        monkeypatch.setattr(apply_module, name, failing(getattr(apply_module, name)))
    with pytest.raises(OSError, match="half-way"):
        apply(model, EVERYTHING)
    assert untouched(model, before)


def test_an_error_in_the_schedule_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mcore")
    before = dicts(model)
    chain, calls = SwapManager.set_forward_prefetch_layer, []

    def failing(self: SwapManager, first: Any, second: Any) -> None:
        calls.append(first)
        if len(calls) == 2:
            raise ScheduleError("half-way")
        chain(self, first, second)

    monkeypatch.setattr(SwapManager, "set_forward_prefetch_layer", failing)
    with pytest.raises(ScheduleError, match="half-way"):
        apply(model, EVERYTHING)
    assert untouched(model, before)


def _wrap_inside(model: Mcore) -> None:
    checkpoint_wrapper(model.layers[1].mlp)


def _wrap_layer(model: Mcore) -> None:
    swap_wrapper(model.layers[2])


def _wrap_around(model: Mcore) -> None:
    checkpoint_wrapper(model)


def _chain(model: Mcore) -> None:
    SwapManager().set_forward_prefetch_layer(model.layers[0], model.layers[1])


def _apply_before(model: Mcore) -> None:
    apply(model, MemoryConfig(recompute_norm=True))


@pytest.mark.parametrize("wrap", [_wrap_inside, _wrap_layer, _wrap_around, _chain, _apply_before])
def test_what_the_user_wrapped_is_not_touched(wrap: Any) -> None:
    model = build("mcore")
    wrap(model)
    before = dicts(model)
    with pytest.raises(WrapError, match=r"wrapped or chained already.*Applied\.undo\(\) or lowtide\.unwrap"):
        apply(model, MemoryConfig(swap_attention=True))
    assert dicts(model) == before


def test_what_the_user_wraps_elsewhere_stays() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(64, 64)), build("mcore"))
    applied = apply(model, MemoryConfig(recompute_norm=True))
    applied.undo()
    assert "forward" in model[0].__dict__


def test_what_the_user_unwraps_or_wraps_anew_is_left_alone_by_undo() -> None:
    model = build("mcore")
    assert isinstance(model, Mcore)
    applied = apply(model, MemoryConfig(recompute_method="uniform"))
    lowtide.unwrap(model.layers[0])
    lowtide.unwrap(model.layers[1])
    swap_wrapper(model.layers[1])
    applied.undo()
    assert ["forward" in layer.__dict__ for layer in model.layers] == [False, True, False]


def test_a_model_that_recomputes_by_itself_is_refused() -> None:
    pytest.importorskip("transformers")
    model = build("llama")
    layer = model.get_submodule("model.layers.0")
    layer.gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(WrapError, match=r"recomputes its layers by itself.*gradient_checkpointing_disable"):
        apply(model, MemoryConfig(recompute_norm=True))
    layer.gradient_checkpointing = False  # type: ignore[assignment]
    apply(model, MemoryConfig(recompute_norm=True)).undo()


def test_the_model_dies_with_its_last_user() -> None:
    model = build("mcore")
    applied = apply(model, EVERYTHING)
    gone = weakref.ref(model)
    bits(model, steps=1)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    applied.undo()


def test_nothing_asked_for_is_nothing_done() -> None:
    model = build("mcore")
    before = dicts(model)
    applied = apply(model, MemoryConfig())
    assert untouched(model, before)
    assert str(applied).count("keeps everything") == LAYERS


def test_it_says_which_layer_gets_what() -> None:
    applied = apply(build("mcore"), EVERYTHING)
    assert str(applied).splitlines() == [
        "lowtide.apply: 3 layers",
        "  layers.0  recompute the layer, its inputs move",
        *(
            f"  layers.{index}  recompute the activation function: mlp; recompute the norm: input_layernorm, "
            "pre_mlp_layernorm; swap: self_attention  (what a swapped module saves of a norm moves, and is not "
            "computed again)"
            for index in (1, 2)
        ),
    ]


@pytest.mark.parametrize(("model", "config"), [("model", MemoryConfig()), (nn.Linear(1, 1), {"swap_attention": True})])
def test_wrong_types_are_refused(model: Any, config: Any) -> None:
    with pytest.raises(ConfigError, match="apply takes a model and a configuration"):
        apply(model, config)


@pytest.mark.parametrize(
    "config",
    [
        MemoryConfig(swap_attention=True, full_recompute_num_layers=1, swap_attention_recompute_num_layers=1),
        MemoryConfig(swap_attention=True, swap_attention_recompute_num_layers=1, recompute_activation_function=True),
        MemoryConfig(swap_attention=True, swap_modules="mlp", recompute_activation_function=True),
        MemoryConfig(swap_attention=True, swap_modules="input_norm", recompute_norm=True),
        MemoryConfig(swap_attention=True, swap_modules="self_attention,linear_qkv"),
    ],
)
def test_two_answers_for_one_layer_are_refused(config: MemoryConfig) -> None:
    model = build("mcore")
    before = dicts(model)
    with pytest.raises(ConfigError, match="a module was given two answers"):
        apply(model, config)
    assert untouched(model, before)


# ---- finding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("llama", ["model.layers.0", "model.layers.1", "model.layers.2"]),
        ("mixtral", ["model.layers.0", "model.layers.1", "model.layers.2"]),
        ("gpt2", ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
        ("t5-gated", [f"{half}.block.{index}" for half in ("encoder", "decoder") for index in range(3)]),
        ("vit", ["vit.layers.0", "vit.layers.1", "vit.layers.2"]),
        ("bert", [f"bert.encoder.layer.{index}" for index in range(3)]),
        ("mcore", ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_layers_are_found_by_structure(name: str, want: list[str]) -> None:
    if name != "mcore":
        pytest.importorskip("transformers")
    assert [layer.name for layer in find_layers(build(name))] == want


def test_stages_of_layers_are_looked_into_and_heads_are_no_layers() -> None:
    model = nn.ModuleDict(
        {
            "stages": nn.ModuleList(nn.ModuleDict({"blocks": Mcore(2).layers}) for _ in range(2)),
            "heads": nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(9)),
        }
    )
    assert [layer.name for layer in find_layers(model)] == [f"stages.{s}.blocks.{b}" for s in (0, 1) for b in (0, 1)]


def test_a_layer_that_stands_in_two_lists_is_one_layer() -> None:
    shared, first, second = Mcore(3).layers
    halves = nn.ModuleDict({"a": nn.Sequential(shared, first, shared), "b": nn.Sequential(second, shared)})
    assert [layer.name for layer in find_layers(halves)] == ["a.0", "a.1", "b.0"]


def test_a_single_layer_counts_where_there_is_no_longer_list() -> None:
    assert [layer.name for layer in find_layers(Mcore(1))] == ["layers.0"]


def test_patterns_stand_for_parts_of_names() -> None:
    model = build("mcore")
    assert [layer.name for layer in find_layers(model, "layers.[12]")] == ["layers.1", "layers.2"]
    assert [found.name for found in find_in(model.layers[0], ["linear_*"])] == [  # type: ignore[index]
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    ]
    assert not matches("layers.1", "*")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("decoder.layers.*", r"expected modules called decoder\.layers\.\*, got lists of layers called layers \(3 x"),
        ("layers.*,blocks.*", r"expected modules called blocks\.\*"),
        ("layers.*,layers.*.mlp", r"a layer lies inside of another one.*got layers\.0\.mlp, layers\.1\.mlp"),
    ],
)
def test_patterns_that_match_nothing_or_too_much_are_refused(patterns: str, message: str) -> None:
    with pytest.raises(LowtideError, match=message):
        apply(build("mcore"), MemoryConfig(recompute_norm=True, layer_modules=patterns))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(WrapError, match=r"no repeated layers were found.*layer_modules='model\.layers\.\*'"):
        find_layers(nn.Sequential(nn.Linear(4, 4), nn.GELU()))


# ---- beside the swap of layer inputs -----------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"recompute_method": "uniform"},
        {"full_recompute_num_layers": 1, "recompute_activation_function": True},
        {"recompute_norm": True},
        {"swap_attention": True},
    ],
)
def test_the_layers_inputs_move(more: dict[str, Any]) -> None:
    SwapManager().configure(min_bytes=0)
    model, known = build("mcore"), plain("mcore")
    before = dicts(model)
    applied = apply(model, MemoryConfig(swap_layer_input=True, **more))
    assert same(known.bits, bits(model))
    assert SwapManager().traffic.out_bytes > 0
    assert held(model) < known.held
    assert all("swap the layer's input" in row.answers for row in applied.rows)
    applied.undo()
    assert untouched(model, before)


def test_undo_leaves_a_chain_that_was_made_afterwards() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)))
    router = SwapManager()
    applied = apply(model, MemoryConfig(recompute_method="uniform", swap_inputs=True))
    for layer in model:
        router.unchain(layer)
    router.set_forward_prefetch_layer(model[0], model[1])
    applied.undo()
    assert router.neighbours(model[0])[1] is model[1] and router.neighbours(model[2]) == (None, None)
