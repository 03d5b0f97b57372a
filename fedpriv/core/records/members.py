"""Names of clients as people write them: ``0-3, 5``. What groups of clients are written as in files and reports."""

import re
from collections.abc import Iterable, Iterator, Sequence

_PART = re.compile(r"(0|[1-9]\d{0,17})(?:-([1-9]\d{0,17}))?|([1-9]\d{18,19})")  # the last: Flower's number of a node


def members_text(clients: Iterable[int]) -> str:
    """Return the names of clients, given in ascending order and each once."""
    return ", ".join(_named(part) for part in _runs(clients))


def member_ranges(text: str) -> tuple[range, ...]:
    """Return the clients that a text of :func:`members_text` names."""
    ranges: list[range] = []
    for part in text.split(", "):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{part[:40]!r} names no clients; 0-3, 5 names five")
        first = int(match[1] or match[3])
        members = range(first, int(match[2] or first) + 1)
        if not members or (ranges and first < ranges[-1].stop):
            raise ValueError(f"{part!r}: names of clients ascend")
        ranges.append(members)
    return tuple(ranges)


def named_members(ranges: Sequence[range], most: int) -> str:
    """Return the names of clients, shortened after so many parts to the number of those that are left out."""
    text = ", ".join(map(_named, ranges[:most]))
    left = sum(map(len, ranges[most:]))
    return f"{text} and {left:,} more" if left else text


def _runs(clients: Iterable[int]) -> Iterator[range]:
    first = last = None
    for client in clients:
        if first is not None and last is not None and client != last + 1:
            yield range(first, last + 1)
            first = client
        first = client if first is None else first
        last = client
    if first is not None and last is not None:
        yield range(first, last + 1)


def _named(members: range) -> str:
    return str(members.start) if len(members) == 1 else f"{members.start}-{members.stop - 1}"
