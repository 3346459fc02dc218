"""What a training step should cost: closed forms for identical layers whose saved bytes move over a link.

Law: pure arithmetic on seconds and bytes; every form is checked against the
recurrence that it solves (:func:`walk`). Names follow the texts on the subject:
``f`` and ``g`` are a layer's forward and backward, ``r`` its recompute, ``w``
the bytes that it moves.

The schedule that they describe: a layer's bytes leave when it ends and are gone
when they have arrived; the next layer but one waits for that. In backward a
layer's bytes come back while the layer after it runs. The last layer stays; of
the last two, where the one before it is still on its way out (``stays=2``).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Layers", "Link", "hideable_bytes", "stall_backward", "stall_forward", "step_seconds", "walk"]


@dataclass(frozen=True)
class Layers:
    """Identical layers: how many, and seconds of forward, of backward and of recompute of one.

    ``lead`` is how much of a layer's backward runs before what it moved is read.

    >>> Layers(4, 1.0, 2.0, 0.5).busy
    14.0
    """

    count: int
    forward: float
    backward: float
    recompute: float = 0.0
    lead: float = 0.0

    @property
    def again(self) -> float:
        """Seconds of one layer in backward."""
        return self.backward + self.recompute

    @property
    def busy(self) -> float:
        """Seconds of all of them without a stall."""
        return self.count * (self.forward + self.again)


@dataclass(frozen=True)
class Link:
    """Bytes a second to the host and from it, and the seconds that one layer's copies take besides their bytes."""

    out: float
    inward: float
    latency: float = 0.0

    def seconds_out(self, nbytes: float) -> float:
        """Time of one layer's bytes to the host."""
        return nbytes / self.out + self.latency if nbytes else 0.0

    def seconds_in(self, nbytes: float) -> float:
        """Time of one layer's bytes from the host."""
        return nbytes / self.inward + self.latency if nbytes else 0.0


def hideable_bytes(layers: Layers, link: Link) -> float:
    """Bytes that a layer can move without a stall in either direction.

    >>> hideable_bytes(Layers(4, 1.0, 2.0), Link(10.0, 4.0))
    8.0
    """
    out = max(0.0, layers.forward - link.latency) * link.out
    return min(out, max(0.0, layers.again - link.latency) * link.inward)


def stall_forward(layers: Layers, link: Link, nbytes: float, *, buffers: int = 2) -> float:
    """Seconds that forward waits where all layers but the last move, and ``buffers`` layers' bytes fit at once.

    >>> stall_forward(Layers(4, 1.0, 2.0), Link(1.0, 1.0), 3.0)
    4.0
    """
    n = layers.count
    if n <= buffers:
        return 0.0
    return max(0.0, (n - buffers) * link.seconds_out(nbytes) - (n - 2) * layers.forward)


def stall_backward(layers: Layers, link: Link, nbytes: float, *, stays: int = 1, full: bool = False) -> float:
    """Seconds that backward waits for the layers that do not stay.

    ``full`` if memory has no room for a layer to come back before one has gone.

    >>> stall_backward(Layers(4, 1.0, 2.0), Link(1.0, 1.0), 3.0)
    3.0
    >>> stall_backward(Layers(4, 1.0, 2.0), Link(1.0, 1.0), 3.0, full=True)
    5.0
    """
    moved, copy = layers.count - stays, link.seconds_in(nbytes)
    if moved < 1:
        return 0.0
    if full:
        return max(0.0, max(copy, moved * copy - (moved - 1) * layers.again) - layers.lead)
    return max(0.0, moved * (copy - layers.again) - layers.lead)


def step_seconds(layers: Layers, link: Link, nbytes: float, *, stays: int = 1, full: bool = False) -> float:
    """Seconds of forward and backward, stalls included.

    >>> step_seconds(Layers(4, 1.0, 2.0), Link(1.0, 1.0), 3.0)
    19.0
    """
    backward = stall_backward(layers, link, nbytes, stays=stays, full=full)
    return layers.busy + stall_forward(layers, link, nbytes) + backward


def walk(layers: Layers, link: Link, nbytes: float, *, buffers: int = 2, stays: int = 1, full: bool = False) -> float:
    """Seconds of the same step, one layer after the other; what the closed forms solve.

    >>> walk(Layers(4, 1.0, 2.0), Link(1.0, 1.0), 3.0)
    19.0
    """
    n = layers.count
    gone = [0.0] * n  # when each layer's bytes have left
    now = 0.0
    for layer in range(n):
        now = max(now, gone[layer - buffers] if layer >= buffers else 0.0) + layers.forward
        gone[layer] = max(now, gone[layer - 1] if layer else 0.0) + link.seconds_out(nbytes)
    back = now  # when the bytes of the layer before have come back
    for layer in reversed(range(n)):
        start, read = now, now + layers.lead
        now = (read if layer >= n - stays else max(read, back)) + layers.again - layers.lead
        # Loading the layer before begins with this layer, or, where memory is full, when the last that stays has ended.
        if layer <= n - stays:
            back = max(back, now if full and layer == n - stays else start) + link.seconds_in(nbytes)
    return now
