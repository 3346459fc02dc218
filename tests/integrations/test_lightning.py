"""The callback for Lightning.

Laws: training is the same in every bit; after it, or after an exception, the
module is as it was.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import SwapManager
from lowtide.activations.wrappers import regions_of
from lowtide.errors import UnsupportedError
from lowtide.integrations.lightning import LowtideCallback

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]
LAYERS, WIDTH = 3, 16
FIELDS = [{"recompute_norm": True}, {"full_recompute_num_layers": LAYERS, "swap_inputs": True}]


def module() -> Any:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[name-defined,misc]
        fails = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True) for _ in range(LAYERS)
            )

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if self.fails:
                raise RuntimeError("stopped")
            x = batch
            for layer in self.layers:
                x = layer(x)
            return nn.functional.mse_loss(x, batch)

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    return Model()


def fit(model: Any, callbacks: list[Any]) -> None:
    import lightning

    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randn(8, 4, WIDTH), batch_size=2)
    lightning.Trainer(
        max_epochs=2,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, data, data)


def untouched(model: Any) -> bool:
    return not list(regions_of(model)) and not any("forward" in layer.__dict__ for layer in model.layers)


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_fitting_is_the_same_and_the_module_as_before(fields: dict[str, Any]) -> None:
    plain, other = module(), module()
    SwapManager().configure(min_bytes=0)
    fit(plain, [])
    told: list[str] = []
    callback = LowtideCallback(fields, report=told.append)
    fit(other, [callback])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    assert untouched(other)
    assert callback.applied is None
    assert (SwapManager().traffic.out_bytes > 0) == ("swap_inputs" in fields)
    assert SwapManager().lower_bytes() == 0
    assert len(told) == 1
    assert "lowtide.apply: 3 layers" in told[0]


def test_an_exception_undoes_it() -> None:
    model = module()
    model.fails = True
    callback = LowtideCallback(recompute_norm=True, report=None)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(model, [callback])
    assert untouched(model)
    assert callback.applied is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="pip install lightning"):
        LowtideCallback(recompute_norm=True)


def test_a_swapped_optimizer_from_configure_optimizers_trains_with_the_same_bits() -> None:
    ends = []
    for swaps in (False, True):
        model = module()

        def configure(model: Any = model, swaps: bool = swaps) -> torch.optim.Optimizer:  # noqa: FBT001
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return lowtide.swap_optimizer(optimizer, swap_times=3) if swaps else optimizer

        model.configure_optimizers = configure
        fit(model, [])
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
