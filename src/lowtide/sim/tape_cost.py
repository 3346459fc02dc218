"""Host time that the tape itself takes, charged to the simulated host.

The simulated clock counts launches; what Python does between them is free. The
tape's own Python is not: a step that is bound by the host must show as one. The
engine knows nothing of this: its two entries are wrapped from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lowtide.activations import replay
from lowtide.activations.recorder import Recorder

__all__ = ["charge"]


def charge(spend: Callable[[float], None], *, recorded: float, replayed: float) -> None:
    """Let every operator that goes through the recorder, and every node that runs again, cost host seconds."""
    dispatch, run = Recorder.__torch_dispatch__, replay._run

    @functools.wraps(dispatch)
    def charged_dispatch(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if not self.tape.muted:
            spend(recorded)
        return dispatch(self, *args, **kwargs)

    @functools.wraps(run)
    def charged_run(*args: Any, **kwargs: Any) -> Any:
        spend(replayed)
        return run(*args, **kwargs)

    Recorder.__torch_dispatch__ = charged_dispatch  # type: ignore[method-assign]
    replay._run = charged_run
