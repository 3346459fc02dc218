"""A float32 value as a bfloat16 and the 16 bits that rounding left over, without a loss (P1).

Let ``x`` be the 32 bits of a float32, ``l`` their low half as a signed number, and ``P`` the 16 bits of its cast to
bfloat16, which rounds to nearest, ties to even. Then ``x = (P << 16) + l``, but for a tie whose high half is even: that
is rounded down with ``l = -32768``, and ``x`` is ``65536`` more. An even ``P`` stands for 65,537 values, so no 16 bits
can tell them all apart; one bit more can. The code that is kept is ``l``.

Modes:

- ``exact``: a mask with one bit an element marks those ties. Every value but a NaN comes back with its bits, and the
  weight is the cast.
- ``saturate``: no mask. Those ties (7.6e-6 of ordinary values) keep 32767: they come back one step of float32 smaller
  in magnitude, and no smaller when they are split again. The weight is the cast.
- ``half_away``: what the source documents' implementation does by default. Ties round away from zero, which makes the
  code complete; the weight of every such tie is one step of bfloat16 from the cast. Some NaN become a weight of zero or
  infinity (their master is still the NaN).

Laws: a NaN stays NaN in the weight and in the master (but for those weights in ``half_away``); its payload may be lost.
Infinities, zeros of both signs, subnormals, and finite values that the cast rounds to infinity come back as they were.
Nothing here asks a device for a number.
"""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["Mode", "Path", "merge", "path_for", "split", "tie_bytes"]

Tensor = torch.Tensor
Mode = Literal["exact", "saturate", "half_away"]
Path = Literal["blocks", "dense", "triton"]

# Elements whose float32 bits and halves lie in a core's cache together.
_BLOCK = 1 << 17
# Elements that are looked through for ties together: bounds the scratch.
_SPAN = 1 << 22
# Ties are rare: rows of this many elements are asked for their minimum first, which costs a hundredth of a comparison.
_ROW = 512
# Above this share of rows with a tie, every element is looked at.
_MANY = 1 / 8
_LOWEST = -32768
# The low 17 bits of a tie whose high half is even.
_EVEN_TIE = 0x8000
# Gathers bytes of 0 and 1 into the bits of one: byte k becomes bit k of the top byte.
_GATHER = 0x0102040810204080


def tie_bytes(n: int) -> int:
    """Bytes of the mask for ``n`` elements.

    >>> tie_bytes(9)
    2
    """
    return -(-n // 8)


def path_for(where: torch.device) -> Path:
    """How values on a device are split: cache-sized blocks, a fused kernel, or whole-tensor operators."""
    if where.type == "cpu":
        return "blocks"
    from lowtide.optim import residual_triton  # noqa: PLC0415 - imports nothing heavy, but asks for a package

    return "triton" if residual_triton.serves(where) else "dense"


def split(master: Tensor, weight: Tensor, code: Tensor, ties: Tensor | None, mode: Mode) -> None:
    """Write the cast of ``master`` to ``weight`` and what is left over to ``code`` and ``ties``.

    All are rows: float32, bfloat16, int16 of ``n`` elements, and in mode ``exact`` uint8 of :func:`tie_bytes`. Cost on
    the CPU: about twice that of a fused AdamW step, together with :func:`merge` (``benchmarks/residual.py``), and
    bounded scratch. Elsewhere: 6 bytes of scratch an element, none where Triton serves the device.

    >>> x = torch.tensor([1.0, 1.00390625, -3e-41])  # the second is a tie
    >>> weight, code = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    >>> ties = torch.empty(1, dtype=torch.uint8)
    >>> split(x, weight, code, ties, "exact")
    >>> back = torch.empty(3)
    >>> merge(weight, code, ties, back, "exact")
    >>> torch.equal(back, x), int(ties)
    (True, 2)
    """
    if not master.numel():
        return
    path = path_for(master.device)
    if path == "triton":
        from lowtide.optim import residual_triton  # noqa: PLC0415

        residual_triton.split(master, weight, code, ties, mode)
    elif path == "dense":
        _split_dense(master, weight, code, ties, mode)
    else:
        bits = master.view(torch.int32)
        code.copy_(bits)  # the low half: a cast to fewer bits keeps them
        if mode == "half_away":
            for b, w in zip(bits.split(_BLOCK), weight.split(_BLOCK), strict=True):
                _round_away(b, w)
        else:
            weight.copy_(master)
            for start in range(0, master.numel(), _SPAN):
                part = slice(start, start + _SPAN)
                mask = None if ties is None or mode != "exact" else ties[start // 8 : (start + _SPAN) // 8]
                _settle_ties(master[part], weight[part], code[part], mask)


def merge(weight: Tensor, code: Tensor, ties: Tensor | None, master: Tensor, mode: Mode) -> None:
    """Write to ``master`` what was split; the rows are those of :func:`split`."""
    if not master.numel():
        return
    path = path_for(master.device)
    if path == "triton":
        from lowtide.optim import residual_triton  # noqa: PLC0415

        residual_triton.merge(weight, code, ties if mode == "exact" else None, master)
    elif path == "dense":
        master.copy_(weight)
        master.view(torch.int32).add_(code)
        if mode == "exact" and ties is not None:
            master.view(torch.int32).add_(_unpacked(ties, master.numel()), alpha=65536)
    else:
        _merge_blocks(weight, code, master)
        if mode == "exact" and ties is not None:
            for start in range(0, master.numel(), _SPAN):
                _add_marked(ties[start // 8 : (start + _SPAN) // 8], master[start : start + _SPAN])


# ---- the CPU, block by block ---------------------------------------------------------------------


def _merge_blocks(weight: Tensor, code: Tensor, master: Tensor) -> None:
    bits = master.view(torch.int32)
    # Adding 16 bits to 32 converts through a buffer of the operator's own, which is slower than this one.
    wide = torch.empty(min(_BLOCK, master.numel()), dtype=torch.int32, device=master.device)
    for w, c, x, b in zip(*(row.split(_BLOCK) for row in (weight, code, master, bits)), strict=True):
        x.copy_(w)  # the high half, and zeros
        b.add_(wide[: b.numel()].copy_(c))


def _settle_ties(master: Tensor, weight: Tensor, code: Tensor, ties: Tensor | None) -> None:
    """Find the ties that were rounded down, to even; mark them, or give them the highest code."""
    if ties is not None:
        ties.zero_()
    rows = code[: code.numel() // _ROW * _ROW].view(-1, _ROW)
    # A tie has the lowest code there is.
    held = (rows.amin(1) == _LOWEST).nonzero().view(-1) if rows.numel() else code.new_empty(0, dtype=torch.int64)
    if held.numel() > _MANY * max(1, rows.shape[0]):
        marked = (code == _LOWEST).nonzero().view(-1)
    else:
        row, column = (rows[held] == _LOWEST).nonzero().unbind(1)
        rest = (code[rows.numel() :] == _LOWEST).nonzero().view(-1) + rows.numel()
        marked = torch.cat((held[row] * _ROW + column, rest))
    high = master.view(torch.int32)[marked] >> 16
    marked = marked[high == weight.view(torch.int16)[marked]]
    if ties is None:
        code[marked] = 32767
    elif marked.numel() > _MANY * code.numel() / 8:
        flags = torch.zeros(code.numel(), dtype=torch.bool, device=code.device)
        flags[marked] = True
        ties.copy_(_packed(flags))
    else:
        ties.index_put_((marked >> 3,), (1 << (marked & 7)).to(torch.uint8), accumulate=True)


def _add_marked(ties: Tensor, master: Tensor) -> None:
    """Bring the marked elements up to where they were."""
    if not ties.any():
        return
    held = ties.nonzero().view(-1)
    bits = master.view(torch.int32)
    if held.numel() > _MANY * ties.numel():
        bits.add_(_unpacked(ties, master.numel()), alpha=65536)
        return
    places = torch.arange(8, device=ties.device)
    marked = ((ties[held].unsqueeze(1) >> places) & 1).bool()
    bits[(8 * held.unsqueeze(1) + places)[marked]] += 65536


# ---- what every device does with whole rows ------------------------------------------------------


def _round_away(bits: Tensor, weight: Tensor) -> None:
    weight.view(torch.int16).copy_((bits + 0x8000) >> 16)


def _split_dense(master: Tensor, weight: Tensor, code: Tensor, ties: Tensor | None, mode: Mode) -> None:
    bits = master.view(torch.int32)
    code.copy_(bits)
    if mode == "half_away":
        _round_away(bits, weight)
        return
    weight.copy_(master)
    even_tie = (bits & 0x1FFFF) == _EVEN_TIE
    if mode == "saturate":
        code.masked_fill_(even_tie, 32767)
    elif ties is not None:
        ties.copy_(_packed(even_tie))


def _packed(flags: Tensor) -> Tensor:
    """Rows of eight flags as the bits of one byte, the first in the lowest."""
    if flags.numel() % 8:
        flags = torch.nn.functional.pad(flags, (0, -flags.numel() % 8))
    return ((flags.view(torch.int64) * _GATHER) >> 56) & 0xFF


def _unpacked(ties: Tensor, n: int) -> Tensor:
    """Every bit as a byte of 0 or 1."""
    places = torch.arange(8, dtype=torch.uint8, device=ties.device)
    return ((ties.unsqueeze(1) >> places) & 1).view(-1)[:n]
