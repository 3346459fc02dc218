"""``MemoryConfig``: where it comes from, and that nothing which is given is ignored."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError, LowtideError
from lowtide.recipes.config import MemoryConfig

pytestmark = pytest.mark.cpu

GIVEN: dict[str, Any] = {
    "recompute_method": "block",
    "full_recompute_num_layers": 2,
    "recompute_activation_function": True,
    "recompute_activation_function_num_layers": 1,
    "recompute_norm": True,
    "swap_inputs": True,
    "pipeline_stages": 2,
    "layer_modules": "model.layers.*",
}


def test_every_source_gives_the_same_configuration(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "memory.yaml"
    lines = [f"{key}: {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in GIVEN.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    words: list[str] = []
    for key, value in GIVEN.items():
        words += ["--" + key.replace("_", "-")] + ([] if value is True else [str(value)])
    arguments = MemoryConfig.add_arguments(argparse.ArgumentParser()).parse_args(words)
    want = MemoryConfig(**GIVEN)
    assert MemoryConfig.from_dict(GIVEN) == want
    assert MemoryConfig.from_yaml(path) == want
    assert MemoryConfig.from_args(arguments) == want
    assert pickle.loads(pickle.dumps(want)) == copy.copy(want) == want  # noqa: S301 - our own bytes


def test_every_field_has_an_option() -> None:
    arguments = MemoryConfig.add_arguments(argparse.ArgumentParser()).parse_args([])
    assert set(vars(arguments)) == {field.name for field in dataclasses.fields(MemoryConfig)}
    assert MemoryConfig.from_args(arguments) == MemoryConfig()


def test_an_option_that_the_parser_has_keeps_its_meaning_there() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recompute-num-layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parsed = MemoryConfig.add_arguments(parser).parse_args(["--swap-attention"])
    assert MemoryConfig.from_args(parsed).fully_connected_layers == 3


def test_lists_of_patterns_become_tuples() -> None:
    assert MemoryConfig.from_dict({"swap_attention": True, "swap_modules": ["a", "b"]}).swap_modules == ("a", "b")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("swap-attention", "swap_attention"),
        ("recompute_activation_func", "recompute_activation_function"),
        ("full_recompute_layers", "full_recompute_num_layers"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"an unknown field.*Did you mean {near}\?"):
        MemoryConfig.from_dict({key: True})


@pytest.mark.parametrize("given", [[], "swap_attention", None])
def test_what_is_no_mapping_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="a configuration is a mapping"):
        MemoryConfig.from_dict(given)


def test_arguments_without_any_field_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"hold no field of MemoryConfig.*got lr"):
        MemoryConfig.from_args(argparse.Namespace(lr=0.1))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("swap_attention", 1, "True or False"),
        ("swap_attention", None, "True or False"),
        ("swap_attention", "true", "True or False"),
        ("full_recompute_num_layers", True, "an integer of at least 0"),
        ("full_recompute_num_layers", 2.0, "an integer of at least 0"),
        ("full_recompute_num_layers", -1, "an integer of at least 0"),
        ("full_recompute_num_layers", "2", "an integer of at least 0"),
        ("pipeline_stages", 0, "an integer of at least 1"),
        ("pipeline_stages", None, "an integer of at least 1"),
        ("recompute_method", "blocks", "'block' or 'uniform'"),
        ("swap_schedule", None, "'chain' or 'auto' or 'none'"),
        ("swap_modules", "", "a name or pattern"),
        ("swap_modules", (), "a name or pattern"),
        ("layer_modules", 3, "a name or pattern"),
        ("layer_modules", ("a", 3), "a name or pattern"),
    ],
)
def test_a_wrong_value_is_refused_when_it_is_given(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"a field has a wrong value: expected {expected}.*\({name}\)"):
        MemoryConfig(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recompute_method": "block"}, "the number of layers is missing"),
        ({"recompute_num_layers": 2}, "recompute_num_layers is not clear here.*got no meaning"),
        (
            {"recompute_num_layers": 2, "recompute_method": "block", "swap_attention": True},
            "is not clear here.*got two meanings.*full_recompute_num_layers.*swap_attention_recompute_num_layers",
        ),
        (
            {"recompute_num_layers": 2, "recompute_method": "block", "full_recompute_num_layers": 2},
            "is not clear here.*got full_recompute_num_layers as well",
        ),
        ({"recompute_method": "uniform", "recompute_activation_function": True}, "expected recompute_method='block'"),
        ({"recompute_method": "uniform", "recompute_norm": True}, "expected recompute_method='block'"),
        ({"swap_modules": "self_attn"}, "swap_modules would have no effect: expected swap_attention"),
        ({"recompute_activation_function_num_layers": 2}, "would have no effect"),
        ({"recompute_norm_num_layers": 2}, "would have no effect"),
        ({"norm_modules": "ln"}, "would have no effect"),
        ({"swap_inputs": True}, "swap_inputs would have no effect: expected full_recompute_num_layers"),
        ({"swap_attention": True, "fully_connected_modules": "mlp"}, "would have no effect"),
        ({"swap_layer_input_prefetch": 2}, "would have no effect"),
        ({"swap_schedule": "auto"}, "swap_schedule would have no effect: expected something that moves"),
        ({"swap_layer_input": True, "swap_schedule": "auto"}, "brings its own chain"),
        (
            {"swap_layer_input": True, "swap_inputs": True, "recompute_method": "uniform"},
            "the inputs of the layers that recompute whole were given two answers",
        ),
        (
            {"swap_layer_input": True, "recompute_method": "uniform", "full_recompute_num_layers": 2},
            "moves what enters every layer.*got uniform with 2.*Use swap_inputs",
        ),
        ({"virtual_pipeline_rank": 1}, "there is no such chunk"),
    ],
)
def test_a_combination_that_cannot_be_met_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryConfig(**given).validate()


def test_with_uniform_the_count_is_that_of_a_chunks_layers() -> None:
    for name in ("full_recompute_num_layers", "recompute_num_layers"):
        for count in (1, 2):
            config = MemoryConfig(recompute_method="uniform", **{name: count}).validate()
            assert (config.full_layers, config.chunk_layers) == (None, count)
        with pytest.raises(ConfigError, match="a chunk holds no layer: expected at least 1"):
            MemoryConfig(recompute_method="uniform", **{name: 0}).validate()
    assert MemoryConfig(recompute_method="uniform").chunk_layers == 1
    assert MemoryConfig(recompute_method="block", full_recompute_num_layers=3).chunk_layers == 1


def test_the_bare_count_takes_the_one_meaning_that_is_possible() -> None:
    assert MemoryConfig(recompute_method="block", recompute_num_layers=3).validate().full_layers == 3
    assert MemoryConfig(swap_attention=True, recompute_num_layers=3).validate().fully_connected_layers == 3
    assert MemoryConfig(full_recompute_num_layers=3).validate().full_layers == 3
    assert MemoryConfig().validate().full_layers == 0


def test_its_errors_are_lowtides() -> None:
    assert issubclass(ConfigError, LowtideError)


@pytest.mark.parametrize("text", [b"swap_attention: [", b"\xff\xfe swap"])
def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "memory.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"cannot be read.*memory\.yaml"):
        MemoryConfig.from_yaml(path)


def test_patterns_that_name_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="swap_modules names nothing"):
        MemoryConfig(swap_attention=True, swap_modules=" , ")


def test_a_key_that_is_near_to_none_lists_the_fields() -> None:
    with pytest.raises(ConfigError, match="The fields are recompute_method"):
        MemoryConfig.from_dict({"zzz": 1})
