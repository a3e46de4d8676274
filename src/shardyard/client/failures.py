"""What a handler raised: as it is logged, as it is reported to a broker, and how `sys.exit` ends a consumer."""

import logging
import traceback
from dataclasses import dataclass
from types import TracebackType

from shardyard.wire.headers import REASON_CHARACTERS, TRACEBACK_BYTES, end_of

_log = logging.getLogger(__name__)

_PACKAGE = "shardyard"
LOGGED_CHARACTERS = 64 * 1024
"""A traceback that is longer, as one with a huge error message is, is logged from its end only."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """Why a handler failed."""

    reason: str
    traceback: str = ""
    """The end of the error's traceback; empty if there is none."""
    exc_info: ExcInfo | None = None
    """The error for the log; None if it is too large to be logged in full, or has text that can't be encoded."""

    @classmethod
    def of(cls, error: Exception, reason: str | None = None) -> "HandlerFailure":
        """A failure by an error. What is reported of it can be sent, whatever the `__str__` of the error does."""
        exc_info: ExcInfo = (type(error), error, _own_frames(error))
        whole = "".join(traceback.format_exception(*exc_info))
        can_be_logged = len(whole) <= LOGGED_CHARACTERS and whole == whole.encode(errors="replace").decode()
        return cls(
            _reason(error) if reason is None else reason,
            end_of(whole, TRACEBACK_BYTES).decode(),
            exc_info if can_be_logged else None,
        )

    def log(self, where: str, record_id: str, attempt: int, *, last: bool) -> None:
        """Log it with its traceback. `where`: the record's place, such as `orders/3/17`."""
        _log.log(
            logging.ERROR if last else logging.WARNING,
            "the handler failed for %s (record %s, attempt %d), %s: %s%s",
            where,
            record_id,
            attempt,
            "which becomes a dead letter" if last else "which will be retried",
            self.reason,
            f"\n{self.traceback}" if self.traceback and self.exc_info is None else "",
            exc_info=self.exc_info,
        )


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
