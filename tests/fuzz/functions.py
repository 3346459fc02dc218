"""The kinds of ``torch.autograd.Function`` that real layers contain.

Holds the classes that fuzzed programs apply. Law: each of them depends on its
arguments and the seeded generator alone, so all may be declared pure; the same
source makes a declared and an undeclared set.
"""

# ruff: noqa: ANN001, ANN205
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

import lowtide

__all__ = ["Functions", "declared", "undeclared"]


@dataclass(frozen=True)
class Functions:
    """One set of classes: saves of inputs, outputs and intermediates, draws, several outputs, writes, views."""

    product: Any
    dropout: Any
    several: Any
    with_setup: Any
    writes_argument: Any
    keeps_attribute: Any
    nested: Any
    view: Any
    no_grad_output: Any
    non_contiguous: Any


def _build() -> Functions:  # noqa: C901 (a list of small classes, not a decision)
    class Product(Function):
        """Saves its inputs and an intermediate that it wrote in place."""

        @staticmethod
        def forward(ctx, a, b):
            y = a.sin()
            y.mul_(b)
            ctx.save_for_backward(a, b, y)
            return y

        @staticmethod
        def backward(ctx, g):
            a, b, y = ctx.saved_tensors
            return g * a.cos() * b + 0 * y, g * a.sin()

    class Dropout(Function):
        """Draws from the generator and saves the mask alone."""

        @staticmethod
        def forward(ctx, a, p):
            mask = torch.rand_like(a) > p
            ctx.p = p
            ctx.save_for_backward(mask)
            return a * mask / (1 - p)

        @staticmethod
        def backward(ctx, g):
            (mask,) = ctx.saved_tensors
            return g * mask / (1 - ctx.p), None

    class Several(Function):
        """Three outputs: one saved through a slice, one of integers, one a view; a list among the arguments."""

        @staticmethod
        def forward(ctx, a, b, scale, shifts):
            t = torch.tanh(a * b)
            t.add_(shifts[0])
            index = t.argmax(-1)
            u = t.exp()
            ctx.save_for_backward(a, b, t, u[1:], index)
            ctx.scale = scale
            ctx.mark_non_differentiable(index)
            return u, index, t[:, :3] * scale

        @staticmethod
        def backward(ctx, g, _, h):
            a, b, t, u, index = ctx.saved_tensors
            d = g * t.exp() + u.sum() * 0
            d = torch.cat([d[:, :3] + h * ctx.scale, d[:, 3:]], 1)
            th = torch.tanh(a * b)
            d = d * (1 - th * th) + 0 * index.sum()
            return d * b, d * a, None, None

    class WithSetup(Function):
        """The two-part form: forward without a context, and setup_context."""

        @staticmethod
        def forward(a, b):
            return a * torch.sigmoid(b), b.cos()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0], output[1], inputs[1])

        @staticmethod
        def backward(ctx, g, h):
            a, k, b = ctx.saved_tensors
            s = torch.sigmoid(b)
            return g * s + 0 * k, g * a * s * (1 - s) - h * b.sin()

    class WritesArgument(Function):
        """Writes its argument in place and says so."""

        @staticmethod
        def forward(ctx, a):
            a.mul_(0.5)
            ctx.mark_dirty(a)
            return a

        @staticmethod
        def backward(ctx, g):
            return g * 0.5

    class KeepsAttribute(Function):
        """Keeps a tensor as an attribute of the context, which never passes a hook."""

        @staticmethod
        def forward(ctx, a):
            ctx.t = a.sigmoid()
            r = a.sin()
            ctx.save_for_backward(r, a)
            return ctx.t * r

        @staticmethod
        def backward(ctx, g):
            r, a = ctx.saved_tensors
            return g * (ctx.t * (1 - ctx.t) * r + ctx.t * a.cos())

    class Nested(Function):
        """Applies other classes inside its forward."""

        @staticmethod
        def forward(ctx, a, b):
            y = Dropout.apply(a, 0.3)
            u, _, _ = Several.apply(y, b, 2.0, [1.0])
            ctx.save_for_backward(y, u)
            return u * 0.1

        @staticmethod
        def backward(ctx, g):
            y, u = ctx.saved_tensors
            return g * y + u * 0.1, g

    class View(Function):
        """Returns a view of its argument."""

        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.t()

        @staticmethod
        def backward(ctx, g):
            (a,) = ctx.saved_tensors
            return g.t() + 0 * a

    class NoGradOutput(Function):
        """Saves an output beside an integer derived from a draw."""

        @staticmethod
        def forward(ctx, a):
            order = torch.randperm(a.shape[0])
            r = a[order].tanh()
            ctx.save_for_backward(r, order)
            return r

        @staticmethod
        def backward(ctx, g):
            r, order = ctx.saved_tensors
            return torch.zeros_like(g).index_add(0, order, g * (1 - r * r))

    class NonContiguous(Function):
        """Saves a transposed and an expanded tensor, whose strides its backward relies on."""

        @staticmethod
        def forward(ctx, a, b):
            row = b[:1].expand(a.shape[0], -1)
            ctx.save_for_backward(a.t().contiguous().t(), row)
            return a * row * math.pi

        @staticmethod
        def backward(ctx, g):
            a, row = ctx.saved_tensors
            assert a.stride() == (1, a.shape[0])
            assert row.stride(0) == 0
            into = torch.zeros_like(g)
            into[0] = (g * a * math.pi).sum(0)
            return g * row * math.pi, into

    return Functions(
        Product, Dropout, Several, WithSetup, WritesArgument, KeepsAttribute, Nested, View, NoGradOutput, NonContiguous
    )


undeclared = _build()
declared = _build()
for _class in vars(declared).values():
    lowtide.pure(_class)
