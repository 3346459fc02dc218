"""One gradient in host memory: what has landed last, the sum of what came before, and a factor that waits.

Laws: what the host adds or reads has arrived. Gradients of several backwards are added in the order in which they came,
in float32. What is done beside backward has the bits of what would be done when it is asked for; when it is done is all
that is guessed.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch

from lowtide import device
from lowtide.optim.arriving import Arrival
from lowtide.optim.beside import Beside
from lowtide.optim.gradients import Lane, bytes_of, host_memory

__all__ = ["BesideBackward", "HostGradient"]

Tensor = torch.Tensor


class BesideBackward(Beside):
    """The thread that adds and measures gradients while backward goes on."""

    def __init__(self) -> None:
        super().__init__("lowtide-gradients")
        # Norms that were asked for so far: the next step will ask for them again.
        self.kinds: set[float] = set()


class HostGradient:
    """One parameter's gradient in host memory, as a row in the order of the parameter's memory."""

    def __init__(
        self, like: Tensor, landing: Tensor, *, strides: tuple[int, ...], beside: BesideBackward | None = None
    ) -> None:
        """``landing`` is where copies of gradients ``like`` this arrive; a row is seen with ``strides``.

        Without ``beside`` all is done when it is asked for.
        """
        self.landing = landing
        self._size, self._strides = like.size(), strides
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self._beside = beside
        self._sum: Tensor | None = None
        self._summed = self._landed = False
        self._event: device.Event | None = None
        self._factor: Tensor | None = None
        self._norms: dict[float, Tensor] = {}
        self._job: Future[None] | None = None
        self._seen = False
        # A step that goes on beside has the gradient while this is set; what is dropped meanwhile does not come back.
        self._holder: Arrival | None = None
        self._dropped = False
        # Gradients since the last step, and between the two before: after so many, no more are to be expected.
        self._count, self._expected = 0, 1

    @property
    def pending(self) -> bool:
        """Whether there is a gradient for the next step."""
        return self._holder is None and (self._landed or self._summed)

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sum, which is made when a second gradient comes."""
        return 0 if self._sum is None else bytes_of(self._sum)

    def shaped(self, row: Tensor) -> Tensor:
        """A row as the parameter's class sees it."""
        return row.as_strided(self._size, self._strides)

    # ---- arriving ------------------------------------------------------------------------------

    def arrive(self, grad: Tensor, lane: Lane) -> None:
        """Launch the copy of a gradient, given as a row, that adds to what is there.

        Cost: the host waits for the last one's copy and adds it, unless that was done beside.
        """
        self._settle()
        self._fold()
        self._norms.clear()
        if grad.dtype != self.landing.dtype:
            self.landing = host_memory(grad.numel(), grad.dtype, pinned=self.landing.is_pinned())
        self._event = lane.copy_down(grad, self.landing)
        self._landed = self._seen = True
        self._count += 1
        if self._beside is None or self._event is None:
            return
        if self._count < self._expected:
            self._job = self._beside.submit(self._fold)
        elif self._beside.kinds:
            self._job = self._beside.submit(self._measure)

    def _settle(self) -> None:
        """Wait for what is done beside; raises what went wrong there."""
        if self._holder is not None:
            self._holder.wait()
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def _await(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def _fold(self) -> None:
        """Add what has landed to the sum, and apply the factor that was waiting for the whole of it."""
        if not (self._landed or self._summed):
            return
        self._await()
        if self._sum is None:
            self._sum = host_memory(self.landing.numel(), self._wide, pinned=False)
        if self._landed:
            # The first is copied: zero and a negative zero would be a zero.
            self._sum.add_(self.landing) if self._summed else self._sum.copy_(self.landing)
        if self._factor is not None:
            self._sum.mul_(self._factor)
        self._factor = None
        self._summed = True  # first: who looks meanwhile finds a gradient
        self._landed = False

    def _read(self) -> Tensor:
        self._await()
        if self._summed:
            factor, self._factor = self._factor, None
            if self._landed:
                self._fold()
            self._factor = factor
            assert self._sum is not None
            value = self._sum
        else:
            value = self.landing.to(self._wide)
        return value if self._factor is None else value * self._factor

    def _measure(self) -> None:
        assert self._beside is not None
        value = self.shaped(self._read())
        for kind in tuple(self._beside.kinds):
            self._norms[kind] = torch.linalg.vector_norm(value, kind)

    # ---- what is there -------------------------------------------------------------------------

    def value(self) -> Tensor:
        """The gradient, in float32 or wider, as a row; to be read before :meth:`used`, not to be written to."""
        self._settle()
        return self._read()

    def norm(self, kind: float) -> Tensor:
        """Torch's norm of the gradient in float32 or wider; known already where it was asked for before."""
        self._settle()
        if kind not in self._norms:
            if self._beside is not None:
                self._beside.kinds.add(kind)
            self._norms[kind] = torch.linalg.vector_norm(self.shaped(self._read()), kind)
        return self._norms[kind]

    def whole(self) -> Tensor:
        """The gradient in float32 or wider, all that waited applied; may be written to."""
        self._settle()
        self._norms.clear()
        self._fold()
        assert self._sum is not None
        return self._sum

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient so far by ``factor``, when it is used."""
        self._settle()
        self._norms.clear()
        if self._factor is not None:
            self._fold()
        self._factor = factor

    def used(self) -> None:
        """There is no gradient any more. The next one's copy may still be behind one that nobody waits for."""
        if self._holder is not None:
            self._dropped = True
            return
        self._settle()
        self.consume()

    def consume(self) -> None:
        """As :meth:`used`, for a step."""
        self._norms.clear()
        self._event = self._factor = None
        self._landed = self._summed = False
        if self._count:
            self._expected, self._count = self._count, 0

    def zero(self, *, set_to_none: bool) -> None:
        """As ``zero_grad`` does: forget it, or make it zeros if there was one since it was last forgotten."""
        seen = self._seen and not set_to_none
        self.used()
        self._seen = seen
        if seen:
            if self._sum is None:
                self._sum = host_memory(self.landing.numel(), self._wide, pinned=False)
            self._settle()
            self._sum.zero_()
            self._summed = True

    # ---- for a step, which may go on beside ------------------------------------------------------

    def for_step(self) -> Tensor:
        """As :meth:`value`."""
        if self._holder is None:
            self._settle()
        return self._read()

    def hand_over(self, holder: Arrival) -> None:
        """From now on the gradient is the step's, and who brings the next one waits for ``holder``."""
        self._settle()
        self._holder, self._dropped = holder, False

    def let_go(self) -> None:
        """The step needs nothing of this any more."""
        self._holder = None

    def take_back(self) -> None:
        """The step has ended: what it did not consume waits for the next one, unless it was dropped meanwhile."""
        if self._holder is not None:
            self._holder = None
            if self._dropped:
                self.consume()
