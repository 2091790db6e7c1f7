"""Combines the CRC-32s of ranges into that of a tensor, whoever wrote or read which of them.

A checksum of the whole tensor can be checked by any number of ranks, each of which sees only its own ranges, and by
any other program (zlib.crc32 of the tensor's bytes in the file). That CRC(A + B) follows from CRC(A), CRC(B) and the
length of B is linear algebra over GF(2): appending n zero bytes multiplies the remainder by x^(8n) (Ross Williams, "A
painless guide to CRC error detection algorithms", 1993; zlib's crc32_combine).
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


MANY = -1  # as the begin of a range: the sum of many, whose places were not kept
_POLYNOMIAL = 0xEDB88320  # of CRC-32, the coefficient of x^0 in the highest bit
_ONE, _X = 1 << 31, 1 << 30


class RangeChecksum(NamedTuple):
    """The CRC-32 of bytes [begin, begin + nbytes) of a tensor in a file."""

    begin: int
    nbytes: int
    crc: int


def crc_of_whole(ranges: Iterable[RangeChecksum], nbytes: int) -> int | None:
    """Returns the CRC-32 of a tensor of `nbytes` bytes from those of `ranges`, in any order and possibly repeated.

    Returns:
        `int` or `None`: `None` where the ranges leave a gap, or overlap without being equal.
    """
    crc, position = 0, 0
    for part in sorted(set(ranges)):
        if part.begin == position:
            crc = _appended(crc, part)
            position += part.nbytes
        elif part.begin + part.nbytes > position:
            return None
    return crc if position == nbytes else None


def _appended(crc: int, part: RangeChecksum) -> int:
    return _times(_shift(part.nbytes), crc) ^ part.crc if crc else part.crc


@lru_cache(maxsize=1024)  # the blocks of a model have the same few lengths
def _shift(nbytes: int) -> int:
    """Returns x^(8 nbytes) modulo the polynomial."""
    power, square = _ONE, _X
    exponent = 8 * nbytes
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power


def _times(a: int, b: int) -> int:
    """Returns the product of two polynomials modulo the polynomial."""
    product, bit = 0, _ONE
    while bit and a & (2 * bit - 1):
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
