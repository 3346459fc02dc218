"""The callback for Hugging Face trainers, on a small Llama with random weights.

Laws: training is the same in every bit; after it the model is as it was; two
mechanisms for the same activations are refused before anything runs.
"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide import SwapManager
from lowtide.activations.wrappers import regions_of
from lowtide.errors import ConfigError, UnsupportedError, WrapError
from lowtide.integrations.transformers import LowtideCallback, memory_enable
from lowtide.recipes.config import MemoryConfig

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
# What the trainers warn of is theirs.
pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]
LAYERS, WORDS, TOKENS = 3, 32, 16
CONFIGS = [
    {"recompute_activation_function": True},
    {"swap_attention": True},
    {"full_recompute_num_layers": LAYERS, "swap_inputs": True},
]


def build() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
    )


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    words = [torch.randint(WORDS, (TOKENS,)) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in words]


def trainer(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    return Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows(2), callbacks=callbacks)


def weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def untouched(model: Any) -> bool:
    return not list(regions_of(model)) and not any("forward" in module.__dict__ for module in model.model.layers)


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: next(iter(fields)))
def test_training_is_the_same_and_the_model_as_before(tmp_path: Path, fields: dict[str, Any]) -> None:
    SwapManager().configure(min_bytes=0)
    plain, other = build(), build()
    options = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    trainer(tmp_path, plain, [], **options).train()
    told: list[str] = []
    callback = LowtideCallback(fields, report=told.append)
    trainer(tmp_path, other, [callback], **options).train()
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(other), strict=True))
    assert untouched(other)
    assert callback.applied is None
    assert (SwapManager().traffic.out_bytes > 0) == any("swap" in name for name in fields)
    assert SwapManager().lower_bytes() == 0
    assert len(told) == 1
    assert "lowtide.apply: 3 layers" in told[0]
    assert "bytes per region" in told[0]


def test_without_a_report_nothing_is_printed_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, build(), [LowtideCallback(recompute_norm=True, report=None)]).train()
    assert "lowtide" not in capsys.readouterr().out


def test_a_second_training_says_nothing_twice(tmp_path: Path) -> None:
    told: list[str] = []
    one = trainer(tmp_path, build(), [LowtideCallback(recompute_norm=True, report=told.append)])
    one.train()
    one.train()
    assert len(told) == 1


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_trainers_own_checkpointing_is_refused_when_it_is_built(tmp_path: Path, name: str) -> None:
    with pytest.raises(WrapError, match=r"own checkpointing is on.*one mechanism.*Switch it off"):
        trainer(tmp_path, build(), [LowtideCallback(recompute_norm=True)], **{name: True})


def test_what_trl_switches_on_by_default_is_refused(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pad, end = "0", "1"
    words = Tokenizer(models.WordLevel({str(n): n for n in range(WORDS)}, unk_token=pad))
    arguments = trl.SFTConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    with pytest.raises(WrapError, match="some trainers switch it on by default"):
        trl.SFTTrainer(
            build(),
            arguments,
            train_dataset=datasets.Dataset.from_list([{"text": "1"}]),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=end),
            callbacks=[LowtideCallback(recompute_norm=True)],
        )


def test_a_training_that_raises_is_undone_by_hand_or_by_the_next_one(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("stopped")

    model = build()
    callback = LowtideCallback(swap_attention=True, report=None)
    one = trainer(tmp_path, model, [callback, Stops])
    with pytest.raises(RuntimeError, match="stopped"):
        one.train()
    assert not untouched(model)
    one.remove_callback(Stops)
    one.train()
    assert untouched(model)
    callback.undo()  # harmless


def test_a_callback_is_copied_with_its_configuration_alone() -> None:
    callback = LowtideCallback(swap_attention=True, report=None)
    for other in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):  # noqa: S301 - our own bytes
        assert type(other) is type(callback)
        assert other.config == callback.config
        assert other.applied is None


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        ((), {}, "got nothing"),
        ((MemoryConfig(swap_attention=True),), {"recompute_norm": True}, "MemoryConfig and recompute_norm as keywords"),
        (({"swap_atention": True},), {}, "swap_attention"),
        ((), {"swap_inputs": True}, "would have no effect"),
    ],
)
def test_a_configuration_is_given_once_and_can_be_met(
    arguments: tuple[Any, ...], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LowtideCallback(*arguments, **fields)
    with pytest.raises(ConfigError, match=message):
        memory_enable(build(), *arguments, **fields)


def test_memory_enable_takes_the_mapping_of_a_file_and_is_undone() -> None:
    model = build()
    applied = memory_enable(model, {"swap_attention": True, "swap_attention_recompute_num_layers": 1})
    assert [len(row.regions) for row in applied.rows] == [2, 1, 1]
    applied.undo()
    assert untouched(model)


def test_memory_enable_refuses_a_model_that_recomputes_by_itself() -> None:
    model = build()
    model.gradient_checkpointing_enable()
    with pytest.raises(WrapError, match="recomputes its layers by itself"):
        memory_enable(model, swap_attention=True)
    assert untouched(model)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match="pip install transformers"):
        LowtideCallback(swap_attention=True)


def test_a_swapped_optimizer_trains_in_a_trainer_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """Accelerate wraps it, a scheduler changes its rates, a checkpoint holds its state: the plain optimizer's bits."""
    from transformers import Trainer, TrainingArguments

    ends = []
    for swaps in (False, True):
        folder = tmp_path / str(swaps)

        def run(epochs: int, resume: bool, swaps: bool = swaps, folder: Path = folder) -> Any:  # noqa: FBT001
            model = build()
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if swaps:
                optimizer = lowtide.swap_optimizer(optimizer, swap_times=4)
            arguments = TrainingArguments(
                str(folder),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                num_train_epochs=epochs,
                max_grad_norm=0.1,
                save_strategy="epoch",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            )
            Trainer(model, arguments, train_dataset=rows(), optimizers=(optimizer, None)).train(
                resume_from_checkpoint=resume
            )
            return weights(model), optimizer.state_dict()["state"]

        run(1, resume=False)
        ends.append(run(3, resume=True))
    (plain, plain_state), (swapped, swapped_state) = ends
    assert all(torch.equal(a, b) for a, b in zip(plain, swapped, strict=True))
    for number, state in plain_state.items():
        assert all(torch.equal(value, swapped_state[number][name]) for name, value in state.items())
