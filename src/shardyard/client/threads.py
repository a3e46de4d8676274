"""Threads for handlers that are plain functions. They do not keep the process alive."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue

MAX_THREADS = 1_000
"""Those whose handler hangs count too."""

Work = Callable[[], None]


class Threads:
    """Calls plain functions in threads, which are reused. Unlike those of `ThreadPoolExecutor`, a thread whose function
    hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._capacity = asyncio.Semaphore(MAX_THREADS)
        self._all: list[SimpleQueue[Work | None]] = []
        self._idle: list[SimpleQueue[Work | None]] = []

    def close(self) -> None:
        """End idle threads. Functions that still run are not waited for."""
        for thread in self._all:
            thread.put(None)

    async def call(self, function: Callable[[], object]) -> object:
        """What `function` returns or raises. If the caller is cancelled, it keeps running."""
        await self._capacity.acquire()
        try:
            thread = self._idle.pop() if self._idle else self._start()
        except RuntimeError:  # the machine can't start another one
            self._capacity.release()
            raise
        loop = asyncio.get_running_loop()
        done: asyncio.Future[object] = loop.create_future()

        def settle(result: object, error: BaseException | None) -> None:
            self._idle.append(thread)
            self._capacity.release()
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        def work() -> None:
            result: object = None
            raised: BaseException | None = None
            try:
                result = function()
            except StopIteration as error:  # a future can't carry it
                raised = RuntimeError("the handler raised StopIteration")
                raised.__cause__ = error
            except BaseException as error:  # noqa: BLE001 the caller gets it
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(settle, result, raised)

        thread.put(work)
        return await done

    def _start(self) -> "SimpleQueue[Work | None]":
        inbox: SimpleQueue[Work | None] = SimpleQueue()

        def serve() -> None:
            while (work := inbox.get()) is not None:
                work()

        threading.Thread(target=serve, name=f"shardyard-handler-{len(self._all)}", daemon=True).start()
        self._all.append(inbox)
        return inbox
