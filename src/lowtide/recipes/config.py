"""``MemoryConfig``: what a training run asks for, under the names that the sources use.

Pure data. Law: a wrong type, an unknown key or a combination that cannot be met
raises here, before a model is touched; nothing that is given is ignored.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from lowtide.errors import ConfigError, UnsupportedError, explain
from lowtide.recipes.find import as_patterns

__all__ = ["MemoryConfig"]

_METHODS = ("block", "uniform")
_SCHEDULES = ("chain", "auto", "none")
_PLACES = ("auto", "host")
_FLAGS = (
    "swap_attention",
    "recompute_activation_function",
    "recompute_norm",
    "swap_inputs",
    "swap_layer_input",
    "swap_optimizer",
    "reuse_fp32_param",
    "grad_offload",
    "optimizer_overlap",
)
_COUNTS = {  # the least that each may be
    "recompute_num_layers": 0,
    "full_recompute_num_layers": 0,
    "swap_attention_recompute_num_layers": 0,
    "recompute_activation_function_num_layers": 0,
    "recompute_norm_num_layers": 0,
    "swap_layer_input_prefetch": 1,
    "swap_optimizer_times": 1,
    "pipeline_stages": 1,
    "virtual_pipeline_chunks": 1,
    "virtual_pipeline_rank": 0,
}
_NEVER_NONE = ("pipeline_stages", "virtual_pipeline_chunks", "virtual_pipeline_rank", "swap_schedule")
_CHOICES = {"recompute_method": _METHODS, "swap_schedule": _SCHEDULES, "optimizer_offload": _PLACES}
_PATTERNS = ("swap_modules", "layer_modules", "activation_modules", "norm_modules", "fully_connected_modules")
_HELP = {
    "recompute_method": "which whole layers recompute: the first n (block) or every one (uniform)",
    "recompute_num_layers": "how many layers, where only one feature can be meant",
    "full_recompute_num_layers": "how many whole layers recompute; with uniform, how many share one kept input",
    "swap_attention": "move what self-attention saves to the host",
    "swap_modules": "sub-modules that swap_attention moves, by name, with commas between",
    "swap_attention_recompute_num_layers": "of how many layers the fully connected part recomputes besides",
    "recompute_activation_function": "compute the outputs of activation functions again",
    "recompute_activation_function_num_layers": "in how many layers, after those that recompute whole",
    "recompute_norm": "compute the outputs of norms again",
    "recompute_norm_num_layers": "in how many layers, after those that recompute whole",
    "swap_inputs": "move what whole-layer recompute keeps to the host",
    "swap_layer_input": "move the hidden states that enter each layer to the host",
    "swap_layer_input_prefetch": "how many layers ahead these come back",
    "swap_optimizer": "keep the optimizer's state on the host but for the moments in which it is stepped",
    "swap_optimizer_times": "in how many buckets a step walks it; larger: a lower peak",
    "reuse_fp32_param": "step bfloat16 parameters through float32 masters, of which two bytes each are kept",
    "optimizer_offload": "step the optimizer on the host, or where it is faster (auto); its state lies on the host",
    "optimizer_overlap": "let the optimizer's step reach into backward and the next forward",
    "grad_offload": "let gradients leave for the host in backward, for optimizer_offload",
    "layer_modules": "names of the layers, with * for one part, such as 'model.layers.*'",
    "activation_modules": "sub-modules that hold an activation function",
    "norm_modules": "sub-modules that are norms",
    "fully_connected_modules": "sub-modules that are the fully connected part",
    "pipeline_stages": "number of pipeline stages; the model given is one of them",
    "virtual_pipeline_chunks": "model chunks on this pipeline rank; the model given is one of them",
    "virtual_pipeline_rank": "which of these chunks the model is",
    "swap_schedule": "what moves bytes: a chain over the layers, the learned order, or your own group calls (none)",
}


def _refuse(problem: str, *, expected: str, got: str, where: str, remedy: str) -> ConfigError:
    return ConfigError(explain(problem, expected=expected, got=got, where=where, remedy=remedy))


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What :func:`lowtide.apply` shall do with the layers of a model.

    Effect: none by itself. Counts are those of this pipeline stage. Layers that recompute whole are counted first,
    then those whose activation function, or norm, recomputes; no layer gets both. A wrong type raises at once,
    a wrong combination when :meth:`validate` runs, which ``lowtide.apply`` does first.

    Args:
        recompute_method: ``"block"``: the first ``full_recompute_num_layers`` layers recompute whole;
            ``"uniform"``: every layer does, in chunks. Without it, a count means ``"block"``.
        recompute_num_layers: the sources' bare name; taken where one feature alone can be meant.
        full_recompute_num_layers: how many whole layers recompute. With ``"uniform"``: layers a chunk (default 1), of
            which the first one's input alone is kept; the last chunk may be smaller.
        swap_attention: move what self-attention saves to the lower tier and back.
        swap_modules: what moves instead; names or patterns of sub-modules. The documents' names ``input_norm``,
            ``self_attention`` and ``post_attention_norm`` are understood in every model.
        swap_attention_recompute_num_layers: of how many layers the fully connected part recomputes besides.
        recompute_activation_function: compute outputs of activation functions again.
        recompute_activation_function_num_layers: in how many layers; None: in all that do not recompute whole.
        recompute_norm: compute outputs of LayerNorm and RMSNorm again.
        recompute_norm_num_layers: likewise.
        swap_inputs: move what whole-layer recompute keeps.
        swap_layer_input: move the hidden states that enter each layer.
        swap_layer_input_prefetch: how many layers ahead these come back.
        swap_optimizer: keep the optimizer's state on the lower tier outside of ``step()``; needs the optimizer.
        swap_optimizer_times: in how many buckets a step walks it; None: 16. Larger: smaller buckets, a lower peak.
        reuse_fp32_param: step bfloat16 parameters through float32 masters that are never kept in full; needs the
            optimizer. With ``swap_optimizer`` what completes them moves as well.
        optimizer_offload: ``"host"``: the step runs on the host, where masters and state are; ``"auto"``: there, or on
            the device as with ``swap_optimizer``, whichever is measured to be faster. Needs the optimizer. Parameters
            of 16 bits are stepped through float32 masters.
        grad_offload: gradients leave for the host in backward, where the step runs there.
        optimizer_overlap: with ``swap_optimizer``, copies of the step reach into the backward before and the forward
            after it; with ``optimizer_offload``, a step on the host goes on while the next forward begins.
        layer_modules: patterns of the layers' qualified names; None: found by structure.
        activation_modules: names or patterns, within a layer, of the modules that hold an activation function.
        norm_modules: likewise of norms.
        fully_connected_modules: likewise of the fully connected part.
        pipeline_stages: above 1, the counts need not sum to the number of layers.
        virtual_pipeline_chunks: chunks of this pipeline rank; the counts are then those of all of them.
        virtual_pipeline_rank: which chunk the model is, from 0.
        swap_schedule: ``"chain"`` over the layers, ``"auto"`` (learned order), ``"none"``: you drive groups by hand.

    Raises:
        ConfigError: a field has a wrong type or value.

    >>> MemoryConfig(recompute_method="block", full_recompute_num_layers=4).full_layers
    4
    """

    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    full_recompute_num_layers: int | None = None
    swap_attention: bool = False
    swap_modules: str | tuple[str, ...] | None = None
    swap_attention_recompute_num_layers: int | None = None
    recompute_activation_function: bool = False
    recompute_activation_function_num_layers: int | None = None
    recompute_norm: bool = False
    recompute_norm_num_layers: int | None = None
    swap_inputs: bool = False
    swap_layer_input: bool = False
    swap_layer_input_prefetch: int | None = None
    swap_optimizer: bool = False
    swap_optimizer_times: int | None = None
    reuse_fp32_param: bool = False
    optimizer_offload: str | None = None
    grad_offload: bool = False
    optimizer_overlap: bool = False
    layer_modules: str | tuple[str, ...] | None = None
    activation_modules: str | tuple[str, ...] | None = None
    norm_modules: str | tuple[str, ...] | None = None
    fully_connected_modules: str | tuple[str, ...] | None = None
    pipeline_stages: int = 1
    virtual_pipeline_chunks: int = 1
    virtual_pipeline_rank: int = 0
    swap_schedule: str = "chain"

    def __post_init__(self) -> None:
        for name in _PATTERNS:
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for field in dataclasses.fields(self):
            _check_field(field.name, getattr(self, field.name))
        for name in _PATTERNS:
            value = getattr(self, name)
            if value is not None and not as_patterns(value):
                raise _refuse(
                    f"{name} names nothing",
                    expected="names or patterns, with commas between",
                    got=repr(value),
                    where="MemoryConfig",
                    remedy="Leave it out for the default.",
                )

    # ---- what it comes to ----------------------------------------------------------------------

    @property
    def full_layers(self) -> int | None:
        """How many whole layers recompute; None where every one does."""
        if self.recompute_method == "uniform":
            return None
        if self.full_recompute_num_layers is not None:
            return self.full_recompute_num_layers
        return (self.recompute_num_layers or 0) if self.recompute_method is not None else 0

    @property
    def chunk_layers(self) -> int:
        """Over how many layers one kept input stands, where every layer recomputes whole."""
        if self.recompute_method != "uniform":
            return 1
        return self._whole_count() or 1

    def _whole_count(self) -> int | None:
        bare = self.recompute_num_layers if self.recompute_method is not None and not self.swap_attention else None
        return bare if self.full_recompute_num_layers is None else self.full_recompute_num_layers

    @property
    def fully_connected_layers(self) -> int:
        """Of how many layers the fully connected part recomputes beside swap attention."""
        if self.swap_attention_recompute_num_layers is not None:
            return self.swap_attention_recompute_num_layers
        return (self.recompute_num_layers or 0) if self.swap_attention and self.recompute_method is None else 0

    @property
    def swaps(self) -> bool:
        """Whether anything is to move."""
        return self.swap_attention or self.swap_inputs or self.swap_layer_input

    @property
    def treats_optimizer(self) -> bool:
        """Whether the optimizer is to be wrapped."""
        return self.swap_optimizer or self.reuse_fp32_param or self.optimizer_offload is not None

    @property
    def treats_layers(self) -> bool:
        """Whether anything is asked for the layers."""
        parts = (self.recompute_activation_function, self.recompute_norm, self.recompute_method is not None)
        return self.swaps or any(parts) or self.full_layers != 0 or not self.treats_optimizer

    def validate(self) -> MemoryConfig:
        """Check the fields against each other; return the configuration itself.

        Raises:
            ConfigError: the combination cannot be met, or a field would have no effect.

        >>> MemoryConfig(swap_attention=True).validate().swaps
        True
        """
        self._check_bare_count()
        self._check_method()
        self._check_dependents()
        self._check_layer_inputs()
        self._check_optimizer()
        if self.virtual_pipeline_rank >= self.virtual_pipeline_chunks:
            raise _refuse(
                "there is no such chunk",
                expected=f"a rank below virtual_pipeline_chunks ({self.virtual_pipeline_chunks})",
                got=str(self.virtual_pipeline_rank),
                where="virtual_pipeline_rank",
                remedy="Ranks count from 0.",
            )
        return self

    def _check_bare_count(self) -> None:
        if self.recompute_num_layers is None:
            return
        whole, parts = self.recompute_method is not None, self.swap_attention
        exact = [
            name
            for name in ("full_recompute_num_layers", "swap_attention_recompute_num_layers")
            if getattr(self, name) is not None
        ]
        if whole == parts or exact:
            meaning = "two meanings" if whole and parts else "no meaning"
            raise _refuse(
                "recompute_num_layers is not clear here",
                expected="one of recompute_method and swap_attention, and no exact count beside it",
                got=f"{', '.join(exact)} as well" if exact else meaning,
                where="recompute_num_layers",
                remedy="Write full_recompute_num_layers for whole layers, or swap_attention_recompute_num_layers for "
                "the fully connected parts beside swap attention.",
            )

    def _check_method(self) -> None:
        whole = self._whole_count()
        if self.recompute_method == "block" and whole is None:
            raise _refuse(
                "the number of layers is missing",
                expected="full_recompute_num_layers",
                got="None",
                where="recompute_method='block'",
                remedy="Say how many layers recompute whole, or use recompute_method='uniform' for all.",
            )
        if self.recompute_method != "uniform":
            return
        if whole == 0:
            raise _refuse(
                "a chunk holds no layer",
                expected="at least 1, or nothing for 1",
                got="uniform with 0",
                where="full_recompute_num_layers",
                remedy="Give the layers a chunk, or leave recompute_method out to recompute none.",
            )
        for name in ("recompute_activation_function", "recompute_norm"):
            if getattr(self, name):
                raise _refuse(
                    f"{name} beside whole layers",
                    expected="recompute_method='block'",
                    got="'uniform', which leaves no layer for it",
                    where=name,
                    remedy="Use recompute_method='block' with full_recompute_num_layers.",
                )

    def _check_dependents(self) -> None:
        whole = self.full_layers is None or self.full_layers > 0
        needs = {
            "swap_modules": ("swap_attention", self.swap_attention),
            "swap_attention_recompute_num_layers": ("swap_attention", self.swap_attention),
            "recompute_activation_function_num_layers": (
                "recompute_activation_function",
                self.recompute_activation_function,
            ),
            "activation_modules": ("recompute_activation_function", self.recompute_activation_function),
            "recompute_norm_num_layers": ("recompute_norm", self.recompute_norm),
            "norm_modules": ("recompute_norm", self.recompute_norm),
            "fully_connected_modules": ("swap_attention with a count", self.fully_connected_layers > 0),
            "swap_inputs": ("full_recompute_num_layers or recompute_method", whole),
            "swap_layer_input_prefetch": ("swap_layer_input", self.swap_layer_input),
            "swap_optimizer_times": ("swap_optimizer", self.swap_optimizer),
            "grad_offload": ("optimizer_offload", self.optimizer_offload is not None),
            "optimizer_overlap": (
                "swap_optimizer or optimizer_offload",
                self.swap_optimizer or self.optimizer_offload is not None,
            ),
        }
        needs["swap_schedule"] = ("something that moves", self.swaps or self.swap_schedule == "chain")
        for name, (needed, there) in needs.items():
            if getattr(self, name) not in {None, False} and not there:
                raise _refuse(
                    f"{name} would have no effect",
                    expected=f"{needed} as well",
                    got="it is off",
                    where=name,
                    remedy=f"Set {needed}, or leave {name} out.",
                )

    def _check_layer_inputs(self) -> None:
        if not self.swap_layer_input:
            return
        if self.swap_schedule != "chain":
            raise _refuse(
                "swap_layer_input brings its own chain over the layers",
                expected="swap_schedule='chain'",
                got=repr(self.swap_schedule),
                where="swap_schedule",
                remedy="Leave swap_schedule out.",
            )
        if self.chunk_layers > 1:
            raise _refuse(
                "swap_layer_input moves what enters every layer, and of a chunk the first input alone is kept",
                expected="chunks of one layer",
                got=f"uniform with {self.chunk_layers}",
                where="swap_layer_input",
                remedy="Use swap_inputs, which moves the first input of each chunk, or full_recompute_num_layers=1.",
            )
        if self.swap_inputs:
            raise _refuse(
                "the inputs of the layers that recompute whole were given two answers",
                expected="swap_inputs or swap_layer_input",
                got="both",
                where="swap_inputs",
                remedy="Leave swap_inputs out: swap_layer_input moves the hidden states of every layer.",
            )

    def _check_optimizer(self) -> None:
        others = [name for name in ("swap_optimizer", "reuse_fp32_param") if getattr(self, name)]
        if self.optimizer_offload is not None and others:
            raise _refuse(
                "the optimizer was given two answers",
                expected="optimizer_offload, or swap_optimizer and reuse_fp32_param",
                got=f"optimizer_offload and {', '.join(others)}",
                where="optimizer_offload",
                remedy="Use swap_optimizer with reuse_fp32_param for a step on the device: it moves the fewest bytes.",
            )

    # ---- where it comes from -------------------------------------------------------------------

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> MemoryConfig:
        """A configuration from a mapping; it is validated.

        Raises:
            ConfigError: a key is unknown (the message names the nearest), or as :meth:`validate`.

        >>> MemoryConfig.from_dict({"swap_attention": True}).swap_attention
        True
        """
        if not isinstance(given, Mapping):
            raise _refuse(
                "a configuration is a mapping",
                expected="names and values",
                got=type(given).__name__,
                where="MemoryConfig.from_dict",
                remedy="Write 'swap_attention: true', one field a line.",
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in names:
                raise _unknown(str(key), names)
        return cls(**given).validate()

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> MemoryConfig:
        """A configuration from a YAML file, which holds a mapping of field names. Needs PyYAML.

        Raises:
            ConfigError: the file is no YAML, or as :meth:`from_dict`.
            UnsupportedError: PyYAML is missing.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "memory.yaml"
        >>> _ = path.write_text("swap_attention: true")
        >>> MemoryConfig.from_yaml(path).swap_attention
        True
        """
        try:
            yaml: Any = importlib.import_module("yaml")  # optional, and it has no types of its own
        except ImportError as error:
            raise UnsupportedError(
                explain(
                    "a YAML file cannot be read",
                    expected="PyYAML",
                    got="none installed",
                    where=str(path),
                    remedy="Install it with 'pip install pyyaml', or use MemoryConfig.from_dict.",
                )
            ) from error
        try:
            read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise _refuse(
                "a configuration file cannot be read",
                expected="YAML in UTF-8",
                got=" ".join(str(error).split()),
                where=str(path),
                remedy="Correct it there.",
            ) from error
        return cls.from_dict(read)

    @classmethod
    def from_args(cls, arguments: argparse.Namespace) -> MemoryConfig:
        """A configuration from parsed arguments; attributes that are no fields belong to somebody else.

        Raises:
            ConfigError: no field is among them, or as :meth:`validate`.

        >>> parser = MemoryConfig.add_arguments(argparse.ArgumentParser())
        >>> MemoryConfig.from_args(parser.parse_args(["--swap-attention"])).swap_attention
        True
        """
        found = vars(arguments)
        given = {field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found}
        if not given:
            raise _refuse(
                "these arguments hold no field of MemoryConfig",
                expected="attributes such as swap_attention",
                got=", ".join(sorted(found)[:8]) or "nothing",
                where="MemoryConfig.from_args",
                remedy="Call MemoryConfig.add_arguments(parser) before parsing.",
            )
        return cls.from_dict({name: value for name, value in given.items() if value is not None})

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one option a field, ``--recompute-norm`` and so on, and return the parser.

        An option that the parser has already keeps its meaning there, and is read under the same name.

        >>> parser = MemoryConfig.add_arguments(argparse.ArgumentParser())
        >>> parser.parse_args(["--full-recompute-num-layers", "4"]).full_recompute_num_layers
        4
        """
        group = parser.add_argument_group("memory", "what lowtide does with activations")
        taken = {option for action in parser._actions for option in action.option_strings}
        for field in dataclasses.fields(cls):
            option = "--" + field.name.replace("_", "-")
            if option in taken:
                continue
            settings: dict[str, Any] = {"default": field.default, "help": _HELP[field.name]}
            if field.name in _FLAGS:
                settings["action"] = "store_true"
            elif field.name in _COUNTS:
                settings |= {"type": int, "metavar": "N"}
            elif field.name in _CHOICES:
                settings["choices"] = _CHOICES[field.name]
            group.add_argument(option, **settings)
        return parser


def _unknown(key: str, names: list[str]) -> ConfigError:
    near = difflib.get_close_matches(key.replace("-", "_"), names, n=1)
    return _refuse(
        "an unknown field",
        expected="a field of MemoryConfig",
        got=repr(key),
        where="MemoryConfig",
        remedy=f"Did you mean {near[0]}?" if near else f"The fields are {', '.join(names)}.",
    )


def _check_field(name: str, value: Any) -> None:
    if value is None and name not in (*_NEVER_NONE, *_FLAGS):
        return
    if name in _FLAGS:
        right, expected = isinstance(value, bool), "True or False"
    elif name in _COUNTS:
        least = _COUNTS[name]
        right = isinstance(value, int) and not isinstance(value, bool) and value >= least
        expected = f"an integer of at least {least}"
    elif name in _CHOICES:
        right, expected = value in _CHOICES[name], " or ".join(map(repr, _CHOICES[name]))
    else:
        parts = (value,) if isinstance(value, str) else value
        right = isinstance(parts, tuple) and bool(parts) and all(isinstance(part, str) and part for part in parts)
        expected = "a name or pattern, or several of them"
    if not right:
        raise _refuse(
            "a field has a wrong value",
            expected=expected,
            got=repr(value),
            where=name,
            remedy="See the documentation of lowtide.MemoryConfig.",
        )
