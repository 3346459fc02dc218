"""A float32 value as a bfloat16 and the 16 bits that rounding left over, without a loss (P1).

Let ``x`` be the 32 bits of a float32, ``l`` their low half as a signed number, and ``P`` the 16 bits of its cast to
bfloat16, which rounds to nearest, ties to even. Then ``x = (P << 16) + l``, but for a tie whose high half is even: that
is rounded down, and ``x = (P << 16) + 32768``, which is no signed number of 16 bits. An even ``P`` stands for 65,537
values, so no 16 bits can tell them all apart; one bit more can. The code is ``l``, and 32767 for those ties.

Modes:

- ``exact``: a mask with one bit an element, element ``i`` being bit ``i % 8`` of byte ``i // 8``, marks those ties,
  which get the missing 1 back. Every value but a NaN comes back with its bits, and the weight is the cast.
- ``saturate``: no mask, the same code. Those ties (7.6e-6 of ordinary values) come back one step of float32 smaller in
  magnitude, and no smaller when they are split again. The weight is the cast. So a mask that is lost, or zero, costs an
  ``exact`` master one step of float32, and either mode reads what the other wrote.
- ``half_away``: what the source documents' implementation does by default. Ties round away from zero, which makes the
  code complete; the weight of every such tie is one step of bfloat16 from the cast. Some NaN become a weight of zero or
  infinity (their master is still the NaN).

Laws: a NaN stays NaN in the weight and in the master (but for those weights in ``half_away``); its payload may be lost.
Infinities, zeros of both signs, subnormals, and finite values that the cast rounds to infinity come back as they were.
Nothing here asks a device for a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

__all__ = ["Mode", "Path", "merge", "path_for", "split", "tie_bytes"]

Tensor = torch.Tensor
Mode = Literal["exact", "saturate", "half_away"]
Path = Literal["blocks", "dense", "triton"]

# Elements, for each thread, whose float32 bits, halves and scratch lie in a core's cache together; a multiple of _ROW.
_BLOCK = 1 << 16
# Elements that are looked through for ties together: bounds the scratch.
_SPAN = 1 << 22
# Ties are rare: the lowest code of each row of so many elements is found first, which costs a tenth of a comparison of
# each element.
_ROW = 512
# Bytes of the mask that are looked through at once: their indices are scratch, too.
_LOOK = 1 << 18
# Above this share of rows (or bytes of the mask) with a tie, going through all elements is cheaper than by index. So
# it is up to this many elements: some twenty small operators are the price of an index.
_MANY = 1 / 16
_SMALL = 1 << 16
_LOWEST, _HIGHEST = -32768, 32767
# The low 17 bits of a tie whose high half is even.
_EVEN_TIE = 0x8000
# The same bits as the top ones of an integer.
_EVEN_TIE_ON_TOP = _EVEN_TIE << 15
# Gathers bytes of 0 and 1 into the bits of one: byte k becomes bit k of the top byte.
_GATHER = 0x0102040810204080
# The way back: a byte eight times over, of which byte k keeps bit k.
_EIGHT_TIMES = 0x0101010101010101
_OWN_BIT = 0x8040201008040201 - (1 << 64)


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
    the CPU: up to twice that of a fused AdamW step, together with :func:`merge` (``benchmarks/residual.py``), and
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
    elif mode == "half_away":
        _split_away(master, weight, code)
    else:
        for start in range(0, master.numel(), _SPAN):
            part = slice(start, start + _SPAN)
            mask = None if ties is None or mode != "exact" else ties[start // 8 : (start + _SPAN) // 8]
            _split_span(master[part], weight[part], code[part], mask)


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
            master.view(torch.int32).add_(_unpacked(ties, master.numel()))
    else:
        _merge_blocks(weight, code, master)
        if mode == "exact" and ties is not None:
            for start in range(0, master.numel(), _SPAN):
                _add_marked(ties[start // 8 : (start + _SPAN) // 8], master[start : start + _SPAN])


# ---- the CPU, block by block ---------------------------------------------------------------------


def _block() -> int:
    return min(_SPAN, _BLOCK * torch.get_num_threads())


def _blocks(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    block = _block()
    return zip(*(row.split(block) for row in rows), strict=True)


def _scratch(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(min(_block(), like.numel()), dtype=dtype, device=like.device)


def _split_away(master: Tensor, weight: Tensor, code: Tensor) -> None:
    wide = _scratch(master, torch.int32)
    for b, w, c in _blocks(master.view(torch.int32), weight.view(torch.int16), code):
        c.copy_(b)
        w.copy_(torch.add(b, 0x8000, out=wide[: b.numel()]).bitwise_right_shift_(16))


def _split_span(master: Tensor, weight: Tensor, code: Tensor, ties: Tensor | None) -> None:
    n, whole = code.numel(), code.numel() // _ROW * _ROW
    for x, b, w, c in _blocks(master, master.view(torch.int32), weight, code):
        c.copy_(b)  # the low half: a cast to fewer bits keeps them
        w.copy_(x)
    lowest = torch.full((-(-n // _ROW),), _HIGHEST, dtype=torch.int16, device=code.device)
    # In one call: a reduction takes longer to begin than to go through a block.
    torch.amin(code[:whole].view(-1, _ROW), 1, out=lowest[: whole // _ROW])
    if whole < n:
        torch.amin(code[whole:], 0, out=lowest[-1])
    if ties is not None:
        ties.zero_()
    # A tie has the lowest code there is.
    held = (lowest == _LOWEST).nonzero().view(-1)
    if not held.numel():
        return
    if n <= _SMALL or held.numel() > _MANY * lowest.numel():
        _settle_all(master.view(torch.int32), code, ties)
        return
    row, column = (code[:whole].view(-1, _ROW)[held[held < whole // _ROW]] == _LOWEST).nonzero().unbind(1)
    rest = (code[whole:] == _LOWEST).nonzero().view(-1) + whole
    marked = torch.cat((held[row] * _ROW + column, rest))
    marked = marked[(master.view(torch.int32)[marked] & 0x10000) == 0]
    code[marked] = _HIGHEST
    if ties is not None:
        ties.index_put_((marked >> 3,), (1 << (marked & 7)).to(torch.uint8), accumulate=True)


def _settle_all(bits: Tensor, code: Tensor, ties: Tensor | None) -> None:
    """Give the ties that were rounded down the highest code and their mark, by going through all elements."""
    block, wide, small = _block(), _scratch(bits, torch.int32), _scratch(bits, torch.int16)
    flags = torch.zeros(8 * tie_bytes(small.numel()), dtype=torch.int8, device=bits.device)
    eights = torch.empty_like(flags.view(torch.int64))
    for start in range(0, bits.numel(), block):
        b, c = bits[start : start + block], code[start : start + block]
        n = b.numel()
        # A comparison that writes over what it compares is several times faster than one that makes a row of bools.
        found = torch.bitwise_left_shift(b, 15, out=wide[:n]).eq_(_EVEN_TIE_ON_TOP)
        c.sub_(small[:n].copy_(found))  # one below the lowest is the highest
        if ties is not None:
            t = ties[start // 8 : (start + block) // 8]
            flags[n // 8 * 8 : 8 * t.numel()] = 0  # the last byte may have fewer than eight elements
            flags[:n].copy_(found)
            packed = torch.mul(flags.view(torch.int64)[: t.numel()], _GATHER, out=eights[: t.numel()])
            t.copy_(packed.bitwise_right_shift_(56))


def _merge_blocks(weight: Tensor, code: Tensor, master: Tensor) -> None:
    # Adding 16 bits to 32 converts through a buffer of the operator's own, which is slower than this one.
    wide = _scratch(master, torch.int32)
    for w, c, x, b in _blocks(weight, code, master, master.view(torch.int32)):
        extended = wide[: b.numel()].copy_(c)
        x.copy_(w)  # the high half, and zeros
        b.add_(extended)


def _add_marked(ties: Tensor, master: Tensor) -> None:
    """Bring the marked elements up to where they were."""
    bits = master.view(torch.int32)
    held = _marked_bytes(ties, int(_MANY * ties.numel()))
    if held is None or (master.numel() <= _SMALL and held.numel()):
        _add_all(ties, bits)
        return
    if not held.numel():
        return
    places = torch.arange(8, device=ties.device)
    marked = ((ties[held].unsqueeze(1) >> places) & 1).bool()
    bits[(8 * held.unsqueeze(1) + places)[marked]] += 1


def _marked_bytes(ties: Tensor, most: int) -> Tensor | None:
    """Where bytes with a mark are, or None if there may be more than ``most``."""
    found: list[Tensor] = []
    # To look for them is most of the cost, as they are rare: eight bytes at a time, where they lie so.
    whole = 0 if ties.storage_offset() % 8 else ties.numel() // 8 * 8
    for start in range(0, whole, _LOOK):
        part = ties[start : min(start + _LOOK, whole)]
        words = part.view(torch.int64).nonzero().view(-1)
        most -= 8 * words.numel()
        if most < 0:
            return None
        if words.numel():
            word, byte = part.view(-1, 8)[words].nonzero().unbind(1)
            found.append(8 * words[word] + byte + start)
    for start in range(whole, ties.numel(), _LOOK // 8):
        single = ties[start : start + _LOOK // 8].nonzero().view(-1)
        most -= single.numel()
        if most < 0:
            return None
        found.append(single + start)
    return torch.cat(found) if found else ties.new_empty(0, dtype=torch.int64)


def _add_all(ties: Tensor, bits: Tensor) -> None:
    block, wide = _block(), _scratch(bits, torch.int32)
    eights = torch.empty(min(block // 8, ties.numel()), dtype=torch.int64, device=bits.device)
    for b, t in zip(bits.split(block), ties.split(block // 8), strict=True):
        own = eights[: t.numel()].copy_(t).mul_(_EIGHT_TIMES).bitwise_and_(_OWN_BIT)
        b.add_(wide[: b.numel()].copy_(own.view(torch.int8)[: b.numel()].ne_(0)))


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
    code.masked_fill_(even_tie, _HIGHEST)
    if mode == "exact" and ties is not None:
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
