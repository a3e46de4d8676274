"""What a handler raised: as it is logged, as it is reported to a broker, and how `sys.exit` ends a consumer."""

import logging
import traceback
from dataclasses import dataclass
from types import TracebackType

from shardyard.wire.headers import REASON_CHARACTERS, TRACEBACK_BYTES, end_of, start_of

_log = logging.getLogger(__name__)

_PACKAGE = "shardyard"
LOGGED_CHARACTERS = 64 * 1024
"""A traceback that is longer, as one with a huge error message is, is logged from its end only."""

TRACEBACK_SECONDS = 600.0
"""How often, at most, the traceback of failures of one kind is logged."""
KINDS = 1000
"""How many kinds of failures are remembered for that. Beyond it, the one that was logged first is forgotten."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """Why a handler failed."""

    reason: str
    traceback: str = ""
    """The end of the error's traceback, with the start of a long message; empty if there is none."""
    exc_info: ExcInfo | None = None
    """The error for the log; None if it is too large to be logged in full, or has text that can't be encoded."""
    kind: int | None = None
    """The same for errors of one type that were raised at the same place; None if no line of the handler is known."""

    @classmethod
    def of(cls, error: Exception, reason: str | None = None) -> "HandlerFailure":
        """A failure by an error. What is reported of it can be sent, whatever the `__str__` of the error does."""
        exc_info: ExcInfo = (type(error), error, _own_frames(error))
        whole = "".join(traceback.format_exception(*exc_info))
        can_be_logged = len(whole) <= LOGGED_CHARACTERS and whole == whole.encode(errors="replace").decode()
        return cls(
            _reason(error) if reason is None else reason,
            _shortened(whole, exc_info).decode(),
            exc_info if can_be_logged else None,
            None if exc_info[2] is None else _kind(error, exc_info[2]),
        )

    def log(self, where: str, record_id: str, attempt: int, *, last: bool, in_full: bool = True) -> None:
        """Log it, `in_full` with its traceback, otherwise in one line. `where`: the record's place, such as
        `orders/3/17`."""
        reason = self.reason if in_full else f"{' '.join(self.reason.split())} (traceback as before)"
        as_text = in_full and self.traceback and self.exc_info is None
        _log.log(
            logging.ERROR if last else logging.WARNING,
            "the handler failed for %s (record %s, attempt %d), %s: %s%s",
            where,
            record_id,
            attempt,
            "which becomes a dead letter" if last else "which will be retried",
            reason,
            f"\n{self.traceback}" if as_text else "",
            exc_info=self.exc_info if in_full else None,
        )


class LoggedKinds:
    """The kinds of failures that were logged with their tracebacks lately: a handler that always fails would fill the
    log with the same one."""

    def __init__(self) -> None:
        self._logged_at: dict[int, float] = {}

    def add(self, failure: HandlerFailure, now: float) -> bool:
        """Whether to log this failure in full. If so, others of its kind are not for a while. `now`: in seconds."""
        kind = failure.kind
        if kind is None:
            return True
        if now - self._logged_at.get(kind, -TRACEBACK_SECONDS) < TRACEBACK_SECONDS:
            return False
        self._logged_at.pop(kind, None)
        if len(self._logged_at) >= KINDS:
            del self._logged_at[next(iter(self._logged_at))]
        self._logged_at[kind] = now
        return True


def _shortened(whole: str, exc_info: ExcInfo) -> bytes:
    """The end of a traceback. A long message does not take the place of the lines where the error was raised."""
    message, most = "".join(traceback.format_exception_only(*exc_info[:2])), TRACEBACK_BYTES // 2
    if len(message.encode(errors="replace")) > most and whole.endswith(message):
        whole = f"{whole.removesuffix(message)}{start_of(message, most).decode()} [...]\n"
    return end_of(whole, TRACEBACK_BYTES)


def _kind(error: Exception, trace: TracebackType) -> int:
    frames = tuple((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace))
    return hash((type(error), frames))


def _reason(error: Exception) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 its __str__ is code of the handler too
        text = f"{type(error).__name__}, whose message can't be shown"
    return text[:REASON_CHARACTERS].encode(errors="replace").decode()


class HandlerExit(Exception):
    """Raised when a handler called `sys.exit`, in place of its `SystemExit`, which would tear down the event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the handler raised {error!r}")
        self.error = error


def handler_exit(error: BaseException) -> HandlerExit | None:
    """The `HandlerExit` in an error that may be a group of several; None if there is none."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := handler_exit(each)) is not None), None)
    return error if isinstance(error, HandlerExit) else None


def _own_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame of the handler on, without those of Shardyard that called it."""
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE:
        trace = trace.tb_next
    return trace
