"""An optimizer around an optimizer: to everyone else an ordinary ``torch.optim.Optimizer``.

Law: the parameters, the groups, the defaults and the hooks are the user's own
objects, so that schedulers, clipping, scalers and trainers see what they know;
what is held elsewhere comes out of ``state_dict()`` as the plain optimizer's
would, and goes back in. The optimizer inside can no longer be stepped by
mistake: it says where it went.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, NoReturn

import torch

from lowtide._torch import OPTIMIZER_HOOKS
from lowtide.errors import StateDictError, StateError, explain

__all__ = ["StateOfParameters", "WrappedOptimizer", "counts_on_device"]

Tensor = torch.Tensor

# What would act on the optimizer inside without the state that has left it.
_GUARDED = ("step", "state_dict", "load_state_dict", "add_param_group")
# Left on an optimizer by GradScaler for the time of one step.
_PASSED = ("grad_scale", "found_inf")


# What _Refusal says: expected, got, remedy.
_UNWRAPPED = (
    "a call of the plain optimizer",
    "one of the wrapper that unwrap() has emptied",
    "Use what unwrap() gave.",
)


def _inside(owner: str) -> tuple[str, str, str]:
    return (
        f"a call of the {owner} around it",
        "a call of the optimizer inside",
        "Use what the wrapping call returned; its unwrap() gives this optimizer back.",
    )


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer's class counts this group's steps on the device of its parameters."""
    return bool(group.get("fused") or group.get("capturable"))


class StateOfParameters(Mapping[Tensor, dict[str, Any]]):
    """The state of each parameter that has any, as the plain optimizer's ``state``: copies, in host memory.

    Cost: reading an entry copies it from where it lies. Writing into what was read changes nothing.
    """

    def __init__(self, owner: WrappedOptimizer) -> None:
        self._owner = owner

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        if parameter not in self:
            raise KeyError(parameter)
        ((_, state),) = self._owner._export([parameter])
        return state

    def items(self) -> ItemsView[Tensor, dict[str, Any]]:
        """All of it, each byte read once."""
        return dict(self._owner._export(self._owner._with_state())).items()

    def values(self) -> ValuesView[dict[str, Any]]:
        """See :meth:`items`."""
        return dict(self.items()).values()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._owner._with_state())

    def __len__(self) -> int:
        return len(self._owner._with_state())

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is one for one in self)


class WrappedOptimizer(torch.optim.Optimizer):
    """What every optimizer of this package has in common; see :func:`lowtide.swap_optimizer`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        _demand_plain(inner, type(self).__name__)
        self._inner = inner
        # What was decided without being asked for; the report shows it.
        self.notes: list[str] = []
        self.__setstate__({"defaults": inner.defaults, "param_groups": inner.param_groups})
        self._warned_capturable_if_run_uncaptured = True
        for name in OPTIMIZER_HOOKS:
            # The dictionaries themselves: a handle that was given out still removes its hook.
            setattr(self, name, getattr(inner, name))

    def _take_over(self) -> None:
        """The state is ours now: whoever still calls the optimizer inside hears of it."""
        # A scheduler that was made before has put its own step there.
        self._before = {name: vars(self._inner)[name] for name in _GUARDED if name in vars(self._inner)}
        for name in _GUARDED:
            setattr(self._inner, name, _Refusal(name, _inside(type(self).__name__)))

    def _let_go(self) -> torch.optim.Optimizer:
        """The optimizer inside has everything again, and we nothing: whoever still calls us hears of it."""
        for name in _GUARDED:
            setattr(self, name, _Refusal(name, _UNWRAPPED))
        for name in _GUARDED:
            vars(self._inner).pop(name, None)
        vars(self._inner).update(self._before)
        return self._inner

    # ---- what each kind does in its own way ------------------------------------------------------

    @abstractmethod
    def _update(self) -> None:
        """Step every parameter that has a gradient."""

    @abstractmethod
    def _with_state(self) -> list[Tensor]:
        """The parameters that have state, in the order of the groups."""

    @abstractmethod
    def _export(self, parameters: Sequence[Tensor]) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        """Parameters that have state, and copies of it in host memory."""

    @abstractmethod
    def _import(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Replace all state. ``states`` was checked; nothing of it may be kept by reference."""

    @abstractmethod
    def _accepts(self, parameter: Tensor, name: str, value: Any) -> str | None:
        """None if ``value`` can be this parameter's state ``name``, else what was expected."""

    @abstractmethod
    def _added(self) -> None:
        """The last group is new."""

    @abstractmethod
    def _keywords(self) -> dict[str, Any]:
        """Keyword arguments that make another one like this."""

    # ---- an optimizer --------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> StateOfParameters:
        """See :class:`StateOfParameters`. Assigning a mapping replaces all state; an empty one forgets it."""
        return StateOfParameters(self)

    @state.setter
    def state(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._import(states)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A fused class unscales and skips inside of its kernel; the scaler asks for that by this name.
        return bool(getattr(self._inner, "_step_supports_amp_scaling", False))

    def _passed(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in _PASSED if name in vars(self)}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter with a gradient. ``closure`` is called once before; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A scheduler that was made for the optimizer inside asks it whether it has stepped.
        vars(self._inner)["_opt_called"] = True
        with torch.no_grad():
            self._update()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer.add_param_group``."""
        type(self._inner).add_param_group(self._inner, param_group)
        try:
            self._added()
        except BaseException:
            # A group that nobody plans for would be stepped by nobody.
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` of this or of a plain optimizer gave. Never brings the whole of it to the device.

        Raises:
            StateDictError: it belongs to other parameters; nothing was loaded.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        saved = copy.deepcopy(state_dict["param_groups"])
        self._check_groups(saved)
        numbers = [number for group in saved for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=True))
        states = {by_number[n]: state for n, state in state_dict["state"].items() if n in by_number}
        for number, parameter in by_number.items():
            for name, value in states.get(parameter, {}).items():
                self._check_value(number, parameter, name, value)
        for group, new in zip(self.param_groups, saved, strict=True):
            kept: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
            group.clear()
            group.update(new)
            group.update(kept)
        self._import(states)
        for load_hook in self._optimizer_load_state_dict_post_hooks.values():
            load_hook(self)

    def _check_groups(self, saved: list[dict[str, Any]]) -> None:
        have = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in saved]
        if have != given:
            raise StateDictError(
                explain(
                    "this state_dict is of other parameters",
                    expected=f"groups of {have} parameters",
                    got=f"groups of {given}",
                    where="load_state_dict",
                    remedy="Load the state_dict of the same model with the same parameter groups.",
                )
            )

    def _check_value(self, number: int, parameter: Tensor, name: str, value: Any) -> None:
        expected = self._accepts(parameter, name, value)
        if expected is not None:
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            raise StateDictError(
                explain(
                    "this state_dict is of other parameters",
                    expected=expected,
                    got=f"{shape}",
                    where=f"{name} of parameter {number}",
                    remedy="Load the state_dict of the same model; nothing was changed.",
                )
            )

    def __reduce__(self) -> tuple[Any, ...]:
        states = list(self._export(self._with_state()))
        return _rebuild, (type(self), _Shell(self._inner), self._keywords(), states)


class _Shell:
    """The optimizer inside, for copying and pickling: its class, groups and defaults, without what guards it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_shell, (type(self.inner), self.inner.__getstate__())


def _open_shell(cls: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    inner = object.__new__(cls)
    inner.__setstate__(state)
    return inner


def _rebuild(
    cls: type[WrappedOptimizer],
    inner: torch.optim.Optimizer,
    keywords: dict[str, Any],
    states: list[tuple[Tensor, dict[str, Any]]],
) -> WrappedOptimizer:
    made = cls(inner, **keywords)
    made._import(dict(states))
    return made


class _Refusal:
    """Stands in for a method of an optimizer whose state has left it."""

    _wrapped_by_lr_sched = True  # a scheduler that is made for it now need not wrap it

    def __init__(self, name: str, why: tuple[str, str, str]) -> None:
        self._name = name
        self._why = why

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        expected, got, remedy = self._why
        raise StateError(
            explain(
                f"{self._name}() of an optimizer whose state has left it",
                expected=expected,
                got=got,
                where=self._name,
                remedy=remedy,
            )
        )


def _demand_plain(inner: object, wanted: str) -> None:
    if not isinstance(inner, torch.optim.Optimizer):
        got = f"the class {inner.__name__}" if isinstance(inner, type) else f"a {type(inner).__name__}"
        raise StateError(
            explain(
                "nothing to wrap",
                expected="an instance of a torch.optim.Optimizer",
                got=got,
                where=wanted,
                remedy="Make the optimizer first, then wrap it.",
            )
        )
    if isinstance(inner, WrappedOptimizer) or isinstance(vars(inner).get("step"), _Refusal):
        raise StateError(
            explain(
                "this optimizer is wrapped already",
                expected="a plain optimizer",
                got=f"a {type(inner).__name__}"
                + ("" if isinstance(inner, WrappedOptimizer) else " inside of a wrapper"),
                where=wanted,
                remedy="Wrap it once, with all that it shall do; unwrap() gives the plain one back.",
            )
        )
