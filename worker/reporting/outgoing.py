"""What one stream sends next: reports by themselves, or windows of them added up, where the controller asked for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from speclen.v1 import control_pb2 as pb
from speclen.worker.reporting.buffer import Record, ReportBuffer
from speclen.worker.reporting.messages import to_report
from speclen.worker.reporting.window import to_window

log = structlog.get_logger()

# Steps of a window: even with no two alike it fits into a message.
MOST_STEPS = 1024


class Outgoing:
    """The part of a buffer that a stream has not sent. more: whether another message is ready at once."""

    def __init__(self, buffer: ReportBuffer, sent_seq: int, group_size: int, clock: Callable[[], float]) -> None:
        self.buffer, self.sent_seq, self.group_size, self.clock = buffer, sent_seq, group_size, clock
        self.more = False
        self._window_began = clock()

    def next(self, window_s: float, at_once: bool = False) -> pb.StreamReportsRequest | None:
        """The next message, None where nothing is to be sent yet.

        window_s: seconds to add up, 0 for none. at_once: the window ends now.
        """
        self.more = False
        records = self.buffer.after(self.sent_seq, MOST_STEPS)
        if not records:
            return None
        first, sealed = records[0][0], self.buffer.sealed
        resent = next((bounds for bounds in sealed if bounds[0] <= first <= bounds[1]), None)
        if resent is not None:
            return self._window([each for each in records if each[0] <= resent[1]])
        last_raw = self.buffer.raw_seq
        if not window_s or first <= last_raw:
            sealed_from = next((bounds[0] for bounds in sealed if bounds[0] > first), records[-1][0] + 1)
            raw_until = min(sealed_from - 1, last_raw) if window_s else sealed_from - 1
            return self._raw([each for each in records if each[0] <= raw_until])
        if len(records) < MOST_STEPS and not at_once and self.clock() - self._window_began < window_s:
            return None
        sealed.append((first, records[-1][0]))
        self._window_began = self.clock()
        return self._window(records)

    def pause_s(self, window_s: float, flush_interval_s: float) -> float:
        """Seconds until it is worth looking again."""
        if not window_s:
            return flush_interval_s
        left_s = self._window_began + window_s - self.clock()
        return min(max(left_s, 0.01), flush_interval_s)

    def _raw(self, records: Sequence[Record]) -> pb.StreamReportsRequest:
        records = records[: self.group_size]
        self.more = len(records) == self.group_size
        self.sent_seq = records[-1][0]
        self.buffer.raw_seq = max(self.buffer.raw_seq, self.sent_seq)
        return pb.StreamReportsRequest(reports=self._to_reports(records))

    def _window(self, records: Sequence[Record]) -> pb.StreamReportsRequest:
        self.more = len(records) == MOST_STEPS
        self.sent_seq = records[-1][0]
        try:
            return pb.StreamReportsRequest(windows=[to_window(records)])
        except (ValueError, TypeError, KeyError):  # one of them no message can hold: found by sending each by itself
            return pb.StreamReportsRequest(reports=self._to_reports(records))

    def _to_reports(self, records: Sequence[Record]) -> list[pb.StepReport]:
        """Records as messages. What no message can hold is left out and counted: it would end every stream anew."""
        reports = []
        for record in records:
            try:
                reports.append(to_report(*record))
            except (ValueError, TypeError, KeyError) as error:
                self.buffer.num_dropped += 1
                log.error("a report cannot be sent and is left out", seq=record[0], reason=str(error))
        return reports
