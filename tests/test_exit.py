"""A script that ends while something of lowtide's is alive ends quietly: nothing on stderr, exit status 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Everything is held by the script's own globals, which Python takes apart as it ends.
PROGRAMS = {
    "a swapped optimizer": """
optimizer = lowtide.swap_optimizer(torch.optim.AdamW(model.parameters()), swap_times=4, overlap=True)
for _ in range(3):
    model(x).sum().backward()
    optimizer.step()
model(x).sum().backward()
""",
    "state in a file": """
optimizer = lowtide.swap_optimizer(torch.optim.AdamW(model.parameters()), swap_times=4, tier="file")
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
""",
    "gradients on the host": """
optimizer = lowtide.cpu_optimizer(torch.optim.AdamW(model.parameters()), grad_offload=True)
for _ in range(5):
    model(x).sum().backward()
""",
    "a step on the host that goes on": """
optimizer = lowtide.cpu_optimizer(torch.optim.AdamW(model.parameters()), grad_offload=True, overlap=True)
for _ in range(3):
    model(x).sum().backward()
    optimizer.step()
""",
    "graphs of wrapped layers": """
for layer in model:
    lowtide.swap_wrapper(layer)
lowtide.auto(model)
model(x).sum().backward()
out = [model(x) for _ in range(2)]
""",
    "a chunk": """
config = lowtide.MemoryConfig(recompute_method="uniform", full_recompute_num_layers=2, layer_modules="*")
applied = lowtide.apply(model, config)
out = model(x)
""",
    "call mode": """
model[0] = lowtide.checkpoint_wrapper(model[0], recompute="call")
out = model(x)
""",
    "a discarded output": """
checkpoint = lowtide.CheckpointWithoutOutput()
out = checkpoint.checkpoint(model[0], False, x)
y = model[1](out)
checkpoint.discard_output_and_register_recompute(y)
""",
    "inputs of layers": """
inputs = lowtide.swap_layer_inputs([lowtide.checkpoint_wrapper(layer) for layer in model])
out = model(x)
""",
    "a copy on its way": """
tensor = lowtide.SwapTensor(torch.ones(1 << 20))
tensor.async_offload()
tensor.wait_offload()
tensor.async_load()
""",
}

START = """
import torch
import lowtide
lowtide.SwapManager().configure(min_bytes=0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
x = torch.ones(8, 64, requires_grad=True)
"""
ON_SIM = """
import lowtide.sim, torch
lowtide.sim.start("h100-80gb")
torch.set_default_device("sim")
"""


def _run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.cpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_on_the_cpu_ends_quietly(name: str) -> None:
    _run(START + PROGRAMS[name])


@pytest.mark.sim
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_on_the_simulated_device_ends_quietly(name: str) -> None:
    _run(ON_SIM + START + PROGRAMS[name])
