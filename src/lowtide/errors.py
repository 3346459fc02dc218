"""Every exception that lowtide raises on purpose.

The tree::

    LowtideError (RuntimeError)
    ├── PolicyError        a policy answered something that is not an answer, or named an unknown operator
    ├── ConfigError        a memory configuration that cannot be met
    ├── WrapError          a module or function cannot be wrapped this way
    ├── ScheduleError      a chain that cannot be followed, a group that does not exist or is empty
    ├── StateError         a residency call that does not fit the state it meets
    │   └── StateDictError a state_dict that is not one of this optimizer (a ValueError too, as in torch)
    ├── CapacityError      host memory or file space is missing
    │   └── TierError      the lower tier itself failed: directory missing, read-only, full, short read
    ├── ReplayError        a value cannot be brought back
    │   ├── ModifiedError  it was changed in place after it was saved
    │   └── CertifyError   it came back with other bits than it was saved with
    └── UnsupportedError   a request (``MUST_*``) that this torch, device or region cannot honour

All of them are ``RuntimeError`` so that code which already catches what
autograd raises keeps working. A message is built by :func:`explain` and names
what is wrong, what was expected, what was met, where, and what to do.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CertifyError",
    "ConfigError",
    "LowtideError",
    "LowtideWarning",
    "ModifiedError",
    "PolicyError",
    "ReplayError",
    "ScheduleError",
    "StateDictError",
    "StateError",
    "TierError",
    "UnsupportedError",
    "WrapError",
    "explain",
]


class LowtideError(RuntimeError):
    """Base of every exception that lowtide raises on purpose."""


class LowtideWarning(UserWarning):
    """A request that is legal and does not do what its author may think; said once."""


class PolicyError(LowtideError):
    """A policy answered something that is not an answer, or named an operator that does not exist."""


class ConfigError(LowtideError):
    """A memory configuration that does not fit itself, or not the model it is applied to."""


class WrapError(LowtideError):
    """A module or function cannot be wrapped this way (wrapped already, and differently)."""


class ScheduleError(LowtideError):
    """A chain that cannot be followed (a cycle), or a group that nobody has filled."""


class StateError(LowtideError):
    """A residency call that does not fit the state it meets; the message names the missing call."""


class StateDictError(StateError, ValueError):
    """A ``state_dict`` that does not belong to this optimizer's parameters; nothing was loaded."""


class CapacityError(LowtideError):
    """The lower tier has no room; the message says how many bytes are needed."""


class TierError(CapacityError):
    """The lower tier itself failed: directory missing, read-only or full, or a short read."""


class ReplayError(LowtideError):
    """A value that backward asks for cannot be brought back."""


class ModifiedError(ReplayError):
    """A value that backward needs was changed in place after it was saved."""


class CertifyError(ReplayError):
    """A value came back with other bits than it was saved with."""


class UnsupportedError(LowtideError):
    """A request that this torch, device or region cannot honour."""


def explain(problem: str, *, expected: str, got: str, where: str, remedy: str) -> str:
    """Build the text of an error in the one form that all of them share.

    >>> explain("unknown answer", expected="a CheckpointPolicy", got="'save'", where="layers.3",
    ...         remedy="Return CheckpointPolicy.MUST_SAVE.")
    "unknown answer: expected a CheckpointPolicy, got 'save' (layers.3). Return CheckpointPolicy.MUST_SAVE."
    """
    return f"{problem}: expected {expected}, got {got} ({where}). {remedy}"
