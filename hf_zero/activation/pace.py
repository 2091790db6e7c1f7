"""The number of checkpoints that a device can send to the host without making the computation wait."""


class Pace:
    """Learns from one forward how many copies the next can hide: copies and blocks are timed by events of the device.

    A device without timed events (the CPU itself, whose copies are made at once) sends all.

    Args:
        make_event: makes an event that takes the time (`elapsed_time`), or is `None`.
    """

    def __init__(self, make_event):
        self._make_event = make_event
        self.limit: int | None = None  # how many of a forward's checkpoints go to the host; None: all
        self._copies: list[tuple] = []  # (begin, end) of each copy since the last `turn`
        self._blocks: list = []  # when the computation came to each checkpoint
        self._last: tuple[list, list] | None = None  # the forward to learn from, once its events have passed

    def allows(self, count: int) -> bool:
        """Whether one more checkpoint may go when so many of this forward went or stayed already."""
        return self.limit is None or count < self.limit

    def mark(self) -> None:
        """Marks that the computation comes to a checkpoint. To be called on its stream."""
        if self._make_event is not None:
            self._blocks.append(self._now())

    def begin(self) -> None:
        """Marks that a copy begins. To be called on its stream, as `end`."""
        if self._make_event is not None:
            self._copies.append((self._now(), self._make_event()))

    def end(self) -> None:
        """Marks that the copy that has just begun ends."""
        if self._make_event is not None:
            self._copies[-1][1].record()

    def _now(self):
        event = self._make_event()
        event.record()
        return event

    def turn(self) -> None:
        """Ends a forward. What it took is learned when its events have passed, without waiting for them."""
        self._learn()
        if self._copies and len(self._blocks) > 1:
            self._last = self._copies, self._blocks
        self._copies, self._blocks = [], []

    def _learn(self) -> None:
        if self._last is None:
            return
        copies, blocks = self._last
        if not copies[-1][1].query() or not blocks[-1].query():
            return
        each = sum(begin.elapsed_time(end) for begin, end in copies) / len(copies)
        spare = blocks[0].elapsed_time(blocks[-1])
        self.limit = max(1, int(spare / each)) if each > 0 else None
        self._last = None
