"""Imports lowtide anew, from one snapshot of its source with the changes of one mutant.

Law: only for a process of its own that ends soon (a fork): modules that were
imported before are forgotten, except the simulated device, which is C++ and
exists once.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from functools import cache
from types import CodeType

from .source import Mutant, MutationError, apply_edits, module_of, read, root, snapshot

__all__ = ["compile_all", "import_mutated", "load_simulator_alone"]

_DEVICE = "lowtide.sim"


@cache
def _code_of(file: str) -> CodeType:
    return _compile(file, read(file))


def _compile(file: str, text: bytes) -> CodeType:
    code: CodeType = compile(text, str(root() / file), "exec", dont_inherit=True)
    return code


def compile_all() -> None:
    """Compile the unchanged modules once, for every fork."""
    for file in snapshot():
        _code_of(file)


class _Loader(importlib.machinery.SourceFileLoader):
    """Gives the code it was made with; reads no file."""

    def __init__(self, name: str, file: str, code: CodeType) -> None:
        super().__init__(name, str(root() / file))
        self._code = code
        self.used = False

    def get_code(self, fullname: str) -> CodeType:
        self.used = True
        return self._code


class _Finder:
    """Finds every module of the package in the snapshot, the changed ones changed."""

    def __init__(self, mutant: Mutant) -> None:
        changed = {edit.file for edit in mutant.edits}
        self.changed: list[_Loader] = []
        self._files: dict[str, str] = {}
        for file in snapshot():
            is_package = file.endswith("__init__.py")
            name = module_of(file.removesuffix("/__init__.py") if file != "__init__.py" else file)
            self._files[name] = file if is_package or name not in self._files else self._files[name]
        self._codes = {file: _compile(file, apply_edits(file, mutant.edits)) for file in sorted(changed)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.get(name)
        if file is None:
            return None
        code = self._codes.get(file)
        loader = _Loader(name, file, code or _code_of(file))
        if code is not None:
            self.changed.append(loader)
        places = [str((root() / file).parent)] if file.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            name, root() / file, loader=loader, submodule_search_locations=places
        )

    def check(self) -> None:
        """Raises unless every changed module was run."""
        unused = set(self._codes) - {
            str(loader.path).removeprefix(f"{root()}/") for loader in self.changed if loader.used
        }
        if unused:
            raise MutationError(f"the changed modules {sorted(unused)} were not imported by lowtide")


def load_simulator_alone() -> types.ModuleType:
    """Import the simulated device without running the package around it."""
    if any(name.partition(".")[0] == "lowtide" for name in sys.modules):
        raise MutationError("lowtide was imported before the simulated device: a mutant could not replace it")
    package = types.ModuleType("lowtide")
    package.__path__ = [str(root())]
    sys.modules["lowtide"] = package
    return importlib.import_module(_DEVICE)


def import_mutated(mutant: Mutant) -> types.ModuleType:
    """Import the whole package with the mutant's changes in it."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "lowtide"]:
        if name != _DEVICE and not name.startswith(_DEVICE + "."):
            del sys.modules[name]
    finder = _Finder(mutant)
    sys.meta_path.insert(0, finder)
    package = importlib.import_module("lowtide")
    finder.check()
    return package
