"""An exact meter of CPU tensor bytes: every storage that torch's CPU allocator hands out, from any thread.

torch's allocator can log each allocation and each release, with the running total taken under its lock, when the flag
`caffe2_report_cpu_memory_usage` is set. The meter sets that flag in the loaded library, lets stderr run into an
anonymous file meanwhile, and replays the lines. In contrast to `torch.profiler(profile_memory=True)` this sees
allocations made by other threads too (gloo's, autograd's, an engine's own), and in contrast to walking over live
Python tensors it sees buffers held in C++ (DDP's buckets) and what is freed again within the step.
Storages resized with `untyped_storage().resize_` go through the same allocator, so they count.

It does not see memory that does not come from that allocator: mapped shared memory (counted apart, see
`benchmarks.counters.shared_nbytes`), mapped files, and the scratch buffers that gloo takes from malloc.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path


_LINE = re.compile(rb"C10 (alloc|deleted) (\d+) bytes, total alloc (\d+) bytes")
_MARK = re.compile(rb"^tensor-meter-mark (\S+)$")
_CHATTER = re.compile(rb"^(\[rank\d+\]:)?\[I\d{4} ")  # other lines of level INFO, written only because it is on
_LOG_INFO = 0


class MeterError(RuntimeError):
    """This build of torch does not export the allocator's flags."""


@dataclass
class Span:
    """What happened between two marks.

    Args:
        start_nbytes: bytes held at the first mark.
        end_nbytes: bytes held at the second.
        peak_nbytes: most bytes held at any moment between.
    """

    start_nbytes: int = 0
    end_nbytes: int = 0
    peak_nbytes: int = 0

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass
class TensorMeter:
    """Counts from `start()` on, so start it before the first tensor of interest; one at a time per process.

    with TensorMeter() as meter:
        ...
        meter.mark("begin")
        ...
        meter.mark("end")
    meter.span("begin", "end").peak_nbytes
    """

    _events: list[tuple] = field(default_factory=list)
    _saved: tuple[int, int] | None = None  # (duplicate of stderr, log file) while counting
    _num_read: int = 0  # bytes of the log

    def start(self) -> None:
        report, level = _flags()
        sys.stderr.flush()
        log_file = os.memfd_create("tensor-meter")
        # appended: the offset of such a file is not locked, and lines of two threads could overwrite one another
        fcntl.fcntl(log_file, fcntl.F_SETFL, os.O_APPEND)
        self._saved = (os.dup(2), log_file)
        os.dup2(log_file, 2)
        self._level = level.value
        level.value = _LOG_INFO
        report.value = True

    def mark(self, name: str) -> None:
        sys.stderr.flush()
        os.write(2, f"tensor-meter-mark {name}\n".encode())

    def stop(self) -> None:
        report, level = _flags()
        report.value = False
        level.value = self._level
        sys.stderr.flush()
        os.dup2(self._saved[0], 2)
        self.read()
        for descriptor in self._saved:
            os.close(descriptor)
        self._saved, self._num_read = None, 0

    def read(self) -> None:
        """Reads what has been logged so far, so that `span` answers while the meter goes on counting."""
        sys.stderr.flush()
        stderr, log_file = self._saved
        text = os.pread(log_file, os.fstat(log_file).st_size - self._num_read, self._num_read)
        self._num_read += len(text)
        for line in text.splitlines(keepends=True):
            self._note(line, stderr)

    def __enter__(self) -> TensorMeter:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def _note(self, line: bytes, stderr: int) -> None:
        """Turns a line into a ("mark", name) or a (change, total) event; anything else was meant for stderr."""
        if found := _LINE.search(line):
            nbytes = int(found[2]) if found[1] == b"alloc" else -int(found[2])
            self._events.append((nbytes, int(found[3])))
        elif found := _MARK.match(line.rstrip()):
            self._events.append(("mark", found[1].decode()))
        elif not _CHATTER.match(line):
            os.write(stderr, line)

    def span(self, first: str, last: str) -> Span:
        """What happened between two marks, each set once.

        The bytes held at a mark are a sum of changes, so they do not depend on the order in which two threads wrote
        their lines; the peak uses the totals, which the allocator took under its lock.
        """
        span, held, base, inside = None, 0, None, False
        for event in self._events:
            if event[0] == "mark":
                if event[1] == first:
                    span, inside = Span(start_nbytes=held, peak_nbytes=held), True
                elif event[1] == last and inside:
                    span.end_nbytes = held
                    return span
                continue
            change, total = event
            # A process that counted before starts from a total that is not zero.
            base = total - change if base is None else base
            held += change
            if inside:
                span.peak_nbytes = max(span.peak_nbytes, total - base)
        raise ValueError(f"marks {first!r} .. {last!r} are not both in the log, in this order")

    def allocations(self, first: str, last: str) -> list[int]:
        """Bytes of each storage handed out between two marks, in order."""
        marks = [event[1] if event[0] == "mark" else None for event in self._events]
        events = self._events[marks.index(first) : marks.index(last)]
        return [event[0] for event in events if event[0] != "mark" and event[0] > 0]


def _flags():
    """The two flags of libc10, as ctypes values that can be set."""
    import torch

    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        library = ctypes.CDLL(str(path))
        report = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
        return report, ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError) as error:
        raise MeterError(f"tensor bytes cannot be counted with this build of torch: {error}") from error
