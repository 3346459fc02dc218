"""Finds the call sites to delete, by a few patterns over the syntax tree.

Whatever waits, records, launches, keeps alive, lets go or tells the schedule is
a site; a new one in the source is a new mutant without a word said here.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .source import Edit, Mutant, read

__all__ = ["FILES", "discover"]

FILES = (
    "device.py",
    "schedule.py",
    "residency/copies.py",
    "residency/swap_tensor.py",
    "residency/group.py",
    "residency/manager.py",
    "residency/pool.py",
    "activations/region.py",
    "activations/stow.py",
    "activations/tape.py",
    "activations/replay.py",
    "activations/call_mode.py",
    "activations/inplace.py",
    "activations/links.py",
    "optim/pipeline.py",
    "optim/segment.py",
    "optim/surroundings.py",
    "optim/gradients.py",
    "optim/host_gradient.py",
    "optim/late.py",
    "optim/arriving.py",
)

# Of these files only the classes that the accelerator's path uses.
_SKIPPED_CLASSES = {"FileCarrier", "_FileCopy", "Carrier", "Copy", "Event", "Stream"}

# Last name of a call that stands as a statement: deleted.
_CALLS = re.compile(
    r"wait|wait_\w+|_await|synchronize|_?settle|record_\w+|"
    r"launch_\w+|_launch\w*|async_\w+|copy_|"
    r"release|_?release_\w+|give|_free\w*|free\w*|_?abandon|drop_if_done|_let_go|close|_close_\w+|forget|gone|trim|"
    r"_?retire_\w+|_withdraw|_act|_run|_run_all|"
    r"begin_\w+|end_\w+|_open_epoch|reach|reached|notify_\w+|queue_\w+|stow_\w+|_file|file_under|add_storage|spill|"
    r"swap|remember_\w+|before_write"
)
# Receivers of `append`, `add` and `remove` that keep something alive, or are the order of events.
_KEEPERS = {"swapped", "_given", "units", "holding", "holders", "_leaving", "actions", "storages", "_storages", "filed"}
# Attributes that hold an event, a copy or bytes: a store of something is replaced by None.
_EVENTFUL = {"ready", "event", "_keep", "_out", "_in", "_slot", "_val", "held", "cache", "swap", "swapped"}
# Attributes whose reset to nothing lets go of something: the reset is deleted.
_HELD = _EVENTFUL | {
    "_leaving", "_view", "body", "cached", "holders", "holding", "last_reader", "nodes", "on_backward", "packed",
    "planned", "record", "storages", "tensor", "unlaunched_bytes", "visit",
}  # fmt: skip
# Counters of those who still need something.
_COUNTED = {"owners", "live", "pending", "uses", "_live_bytes", "_idle_bytes"}
_STATES = {"state", "_state"}


@dataclass(frozen=True)
class _Found:
    """One site: which node to replace, and by what."""

    node: ast.AST
    text: str
    mutation: str


def discover() -> list[Mutant]:
    """Every site of the package, in the order of the files."""
    return [mutant for file in FILES for mutant in _of_file(file)]


def _of_file(file: str) -> list[Mutant]:
    source = read(file)
    lines = _line_starts(source)
    seen: Counter[str] = Counter()
    mutants = []
    for where, found in _walk(ast.parse(source), ""):
        site = f"{file}::{where}::{ast.unparse(found.node)}"
        base = f"{site} => {found.mutation}"
        seen[base] += 1
        key = base if seen[base] == 1 else f"{base} #{seen[base]}"
        edit = Edit(file, _start(found.node, lines), _stop(found.node, lines), found.text)
        mutants.append(Mutant(key, site, found.mutation, (edit,), "site"))
    return mutants


def _line_starts(source: bytes) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _start(node: ast.AST, lines: list[int]) -> int:
    place: Any = node
    start: int = lines[place.lineno - 1] + place.col_offset
    return start


def _stop(node: ast.AST, lines: list[int]) -> int:
    place: Any = node
    stop: int = lines[place.end_lineno - 1] + place.end_col_offset
    return stop


def _walk(node: ast.AST, where: str) -> Iterator[tuple[str, _Found]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and child.name in _SKIPPED_CLASSES:
            continue
        inner = where
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            inner = f"{where}.{child.name}" if where else child.name
        elif where:
            yield from ((where, found) for found in _matches(child, where))
        yield from _walk(child, inner)


def _matches(node: ast.AST, where: str) -> Iterator[_Found]:
    if _is_deleted_whole(node):
        yield _Found(node, "pass", "deleted")
    elif isinstance(node, ast.ListComp) and isinstance(node.elt, ast.Call) and _name(node.elt.func) == "Action":
        yield _Found(node, "[]", "no action")
    elif isinstance(node, ast.Assign):
        yield from _assignments(node, in_init=where.endswith("__init__"))
    elif isinstance(node, ast.With):
        yield from _streams(node)
    elif isinstance(node, ast.Call):
        yield from _calls(node)


def _is_deleted_whole(node: ast.AST) -> bool:
    """A statement that is a site by itself."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call) and _is_call_site(node.value)
    if isinstance(node, ast.Delete):
        return not _is_a_modules_own(node.targets[0])
    return isinstance(node, ast.AugAssign) and _name(node.target) in _COUNTED


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_call_site(call: ast.Call) -> bool:
    name = _name(call.func)
    if name in {"append", "add", "remove", "pop"} and isinstance(call.func, ast.Attribute):
        return _name(call.func.value) in _KEEPERS
    if name in {"clear", "extend"} and isinstance(call.func, ast.Attribute):
        return _name(call.func.value) in _HELD
    return _CALLS.fullmatch(name) is not None


def _is_a_modules_own(node: ast.expr) -> bool:
    """Attributes of the user's module are the business of wrapping, not of memory."""
    return isinstance(node, ast.Subscript) and _name(node.value) == "__dict__"


def _is_nothing(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is None or node.value == 0
    return isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)) and not list(ast.iter_child_nodes(node))[1:]


def _assignments(node: ast.Assign, *, in_init: bool) -> Iterator[_Found]:
    pairs = [(target, node.value) for target in node.targets]
    if len(node.targets) == 1 and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
    for target, value in pairs:
        name = _name(target)
        if name == "actions" and isinstance(value, ast.Call):
            yield _Found(value, "[]", "no action")
        if not isinstance(target, ast.Attribute):
            continue
        if _is_nothing(value) and name in _HELD and not in_init:
            yield from _kept(node, target, pairs)
        elif not _is_nothing(value) and name in _EVENTFUL:
            yield _Found(value, "None", f"{name} is forgotten")
        elif name in _STATES and not in_init:
            yield from _kept(node, target, pairs)


def _kept(node: ast.Assign, target: ast.expr, pairs: list[tuple[ast.expr, ast.expr]]) -> Iterator[_Found]:
    """The assignment without this target."""
    if len(pairs) == 1 or len(node.targets) > 1:
        if target is node.targets[0]:  # `a = b = None` goes as a whole
            yield _Found(node, "pass", "deleted")
        return
    rest = [(t, v) for t, v in pairs if t is not target]
    left = ", ".join(ast.unparse(t) for t, _ in rest)
    right = ", ".join(ast.unparse(v) for _, v in rest)
    yield _Found(node, f"{left} = {right}", f"{_name(target)} stays as it is")


def _streams(node: ast.With) -> Iterator[_Found]:
    for item in node.items:
        context = item.context_expr
        name = _name(context.func) if isinstance(context, ast.Call) else _name(context)
        if name in {"use_stream", "stream"}:
            yield _Found(context, "__import__('contextlib').nullcontext()", "not on that stream")


def _calls(call: ast.Call) -> Iterator[_Found]:
    name = _name(call.func)
    if name == "record_event":
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        stream = ast.unparse(call.args[0] if call.args or receiver is None else receiver)
        yield _Found(call, f"__import__('torch').Event(device={stream}.device)", "an event that is never recorded")
    elif name == "_StreamCopy":
        for argument in call.args:
            for kept in argument.elts if isinstance(argument, ast.Tuple) else ():
                yield _Found(kept, "True", f"{ast.unparse(kept)} is not kept alive")
