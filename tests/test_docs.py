"""The documentation is true: its code runs, its links resolve, its messages exist, its API is complete."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

ROOT = Path(__file__).parents[1]
SOURCE = Path(lowtide.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# An indented fence belongs to a list item; its code is dedented by as much.
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^(?P<level>#+) (?P<title>.+)$", re.MULTILINE)
# What stands for a part of a message that depends on the program, and the joints that errors.explain puts in.
# Packages that an example is about: they warn of matters of their own.
NEEDS = re.compile(r"^Needs ([\w, ]+?);", re.MULTILINE)
JOINT = re.compile(r"<[^<>]*>|: expected |, got | \(|\)\. |; ")


_DRIVEN = ["launch_offload", "wait_offload", "launch_load", "wait_load"]
_MOVED = ["async_offload", "wait_offload", "async_load", "wait_load"]
_ROUTED = ["set_forward_prefetch_layer", "set_current_group_name"]
# The rest of these classes is between the parts of the library.
FOR_USERS = {
    "Applied": ["undo"],
    "Auto": ["undo"],
    "CheckpointWithoutOutput": ["checkpoint", "discard_output", "discard_output_and_register_recompute", "recompute"],
    "CpuOptimizer": ["clip_grad_norm_", "report", "unwrap"],
    "LayerInputs": ["managers", "undo"],
    "SwapLayerInputManager": ["batch_stack", "configure", "forget"],
    "SwapTensors": ["add_tensor", "swap_to_host", "wait_d2h", "swap_to_device", "wait_h2d", "stat", "tensor_cpus"],
    "MemoryConfig": ["from_dict", "from_yaml", "from_args", "add_arguments", "validate"],
    "Report": ["total"],
    "Storage": [*_DRIVEN, "swap", "save", "tensors", "nbytes"],
    "SwapGroup": [*_DRIVEN, "add"],
    "SwapManager": [*_DRIVEN, *_ROUTED, "add_storage", "configure", "reset", "lower_bytes"],
    "SharedMasters": ["to_bf16", "to_fp32"],
    "SwapOptimizer": ["report", "unwrap"],
    "SwapTensor": [*_MOVED, "get_val", "state", "nbytes", "held_elsewhere"],
}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, info: str) -> list[tuple[int, str]]:
    """Line number and body of every block of a page whose fence says ``info``."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        if match["info"].strip() == info:
            body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
            found.append((text[: match.start("body")].count("\n"), body))
    return found


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The fragments by which the headings of a page can be linked to, as code hosts make them."""
    found: set[str] = set()
    for match in HEADING.finditer(prose(page)):
        slug = re.sub(r"[^\w\- ]", "", match["title"].lower()).replace(" ", "-")
        number = next(n for n in range(100) if (slug if n == 0 else f"{slug}-{n}") not in found)
        found.add(slug if number == 0 else f"{slug}-{number}")
    return found


def readers_own() -> dict[str, Any]:
    """What README.md takes as given: a model of the reader's with ``layers``, and a batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                tokens = layer(tokens)
            return tokens

    return {"model": Model(), "tokens": torch.randn(512, 64)}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_python_block_runs_in_the_order_of_its_page(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "documentation"}
    if page.name == "README.md" and page.parent == ROOT:
        namespace |= readers_own()
    for line, body in blocks(page, "python"):
        # Empty lines in front: a traceback then points at the line of the page.
        exec(compile("\n" * line + body, str(page), "exec"), namespace)  # noqa: S102 - our own pages


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_python_block_is_left_out_only_with_its_reason_beside_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        info = match["info"].strip()
        if not info.startswith("py") or info in {"python", "python sim"}:  # those of the simulator run in tests/sim
            continue
        assert info == "python no-run", f"{named(page)}: an unknown kind of block, {info!r}"
        before = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        assert before.startswith("Not run:"), f"{named(page)}: say above the block why it is not run, got {before!r}"


def test_the_pages_with_code_have_code() -> None:
    counts = {
        page.name: len(blocks(page, "python")) + len(blocks(page, "python sim"))
        for page in PAGES
        if page.parent != ROOT
    }
    without = {"README.md", "figures.md", "mutations.md"}
    assert all(counts[name] > 0 for name in counts.keys() - without), counts


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_every_example_runs_and_finds_its_bits_equal(example: Path) -> None:
    found = NEEDS.search(example.read_text(encoding="utf-8"))
    needed = re.split(r", | and ", found[1]) if found else []
    for package in needed:
        pytest.importorskip(package)
    search = os.pathsep.join(filter(None, [str(SOURCE.parent), os.environ.get("PYTHONPATH")]))
    strict = [] if needed else ["-W", "error"]
    done = subprocess.run(
        [sys.executable, *strict, str(example)],
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bit-equal: True" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_an_example_is_short_enough_to_read(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_resolves(page: Path) -> None:
    for match in LINK.finditer(prose(page)):
        target = match["target"]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{named(page)} links to {target}, which does not exist"
        if fragment:
            assert fragment in anchors(goal), f"{named(page)} links to {target}; headings give {sorted(anchors(goal))}"


def test_every_page_and_example_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / match["target"]).resolve() for match in LINK.finditer(prose(index))}
    missing = [named(page) for page in [*PAGES[1:], *EXAMPLES] if page != index and page not in linked]
    assert not missing


def sections() -> dict[str, str]:
    """The text of each section of the API page by its title."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    heads = [match for match in HEADING.finditer(text) if match["title"].startswith("`")]
    ends = [match.start() for match in HEADING.finditer(text)] + [len(text)]
    return {
        match["title"].strip("`"): text[match.end() : min(end for end in ends if end > match.start())]
        for match in heads
    }


def test_every_public_name_has_its_section_in_the_api_page() -> None:
    assert set(sections()) == set(lowtide.__all__)


@pytest.mark.parametrize("name", sorted(set(lowtide.__all__) - {"errors", "CheckpointPolicy", "SwapState"}))
def test_the_api_page_names_every_argument(name: str) -> None:
    section = sections()[name]
    arguments = [p.name for p in inspect.signature(getattr(lowtide, name)).parameters.values()]
    assert all(re.search(rf"\b{re.escape(argument)}\b", section) for argument in arguments), arguments


@pytest.mark.parametrize("name", sorted(FOR_USERS))
def test_the_api_page_names_every_method_that_users_call(name: str) -> None:
    section = sections()[name]
    for member in FOR_USERS[name]:
        assert hasattr(getattr(lowtide, name), member), f"{name}.{member} is gone"
        assert re.search(rf"\b{member}\b", section), f"{name}.{member} is not described"


def test_the_api_page_names_every_error() -> None:
    section = sections()["errors"]
    raised = [name for name in lowtide.errors.__all__ if name != "explain"]
    assert not [name for name in raised if f"`{name}`" not in section]


def texts_of_the_source() -> list[str]:
    """Every string of the package but docstrings: adjacent literals joined, f-strings in parts."""
    found: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found.extend(str(node.value) for node in strings if id(node) not in docstrings)
    return found


def test_every_message_that_troubleshooting_quotes_is_in_the_source() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    messages = [line for _, body in blocks(page, "text") for line in body.splitlines() if line.strip()]
    texts = texts_of_the_source()
    assert len(messages) > 20
    for message in messages:
        parts = [part.strip(" ().,:") for part in JOINT.split(message)]
        assert any(len(part) > 9 for part in parts), f"nothing of {message!r} could be looked up"
        missing = [part for part in parts if len(part) > 2 and not any(part in text for text in texts)]
        assert not missing, f"{message!r}: the source has no {missing}"


def test_the_seven_laws_and_the_eighteen_rules_are_all_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert re.findall(r"^(\d)\. \*\*", text, re.MULTILINE) == [str(n) for n in range(1, 8)]
    assert re.findall(r"^- \*\*R(\d+)\*\*", text, re.MULTILINE) == [str(n) for n in range(1, 19)]


def test_every_rule_that_the_code_cites_exists() -> None:
    rules = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    cited: set[str] = set()
    for path in (SOURCE / "activations").glob("*.py"):
        cited |= set(re.findall(r"\bR(\d+)\b", path.read_text(encoding="utf-8")))
    assert cited
    assert not [number for number in cited if f"**R{number}**" not in rules]


def test_the_map_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("## Map of modules")[1].split("## The laws")[0]
    named_there = set(re.findall(r"`([\w.]+)`", table))
    tails = named_there | {name.rsplit(".", 1)[-1] for name in named_there}
    modules = [p for p in SOURCE.rglob("*.py") if p.stem not in {"__init__", "__main__"}]
    grouped = {"demo", "bench", "measure"}
    missing = [str(p.relative_to(SOURCE)) for p in modules if p.stem not in tails and p.parent.name not in grouped]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_row_of_a_table_is_one_line(page: Path) -> None:
    rows = [line for line in prose(page).splitlines() if line.startswith("|")]
    assert not [row for row in rows if not row.rstrip().endswith("|")]
