"""Which keys a tile of query rows sees: the work of a tile, as one pure function of lengths."""

from __future__ import annotations

from typing import NamedTuple


class KeyRange(NamedTuple):
    """Keys [start, stop) are seen by a row of the tile; [full_start, full_stop) by every row of it.

    A mask is needed on [start, full_start) and [full_stop, stop) only. Always start <= full_start <=
    full_stop <= stop; with no key that all rows see, full_start = full_stop = stop.
    """

    start: int
    full_start: int
    full_stop: int
    stop: int


def key_range(
    row_start: int, row_stop: int, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None
) -> KeyRange:
    """The keys that rows [row_start, row_stop) of a sequence see, row_start < row_stop.

    Row i sees key j iff i + offset - left <= j <= i + offset + right, offset = seqlen_k - seqlen_q, None
    being unlimited. Both edges move right by one a row, so the last row has the last edges.
    """
    first, last = row_start + seqlen_k - seqlen_q, row_stop - 1 + seqlen_k - seqlen_q
    start = 0 if left is None else max(0, first - left)
    stop = seqlen_k if right is None else min(seqlen_k, last + right + 1)
    if start >= stop:
        return KeyRange(start, start, start, start)
    full_start = start if left is None else max(start, last - left)
    full_stop = stop if right is None else min(stop, first + right + 1)
    if full_start >= full_stop:
        full_start = full_stop = stop
    return KeyRange(start, full_start, full_stop, stop)


def first_row_with_a_key(seqlen_q: int, seqlen_k: int, right: int | None) -> int:
    """Rows before it see no key, it and all later ones see at least one; seqlen_q when none does.

    left hides no row entirely: the last row is aligned with the last key, and left >= 0.
    """
    if seqlen_k == 0:
        return seqlen_q
    return 0 if right is None else min(seqlen_q, max(0, seqlen_q - seqlen_k - right))
