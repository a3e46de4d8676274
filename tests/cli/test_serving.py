"""What servers do for an event loop that is not stopped for milliseconds at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.queues.brokers import BrokerProcess

pytestmark = pytest.mark.processes

REDUCED = """
import gc, json
from shardyard.cli.serving import reduce_stalls

before = gc.get_freeze_count()
reduce_stalls()
print(json.dumps([gc.get_threshold(), gc.get_freeze_count() > before]))
"""


@pytest.fixture
def _huge_pages_are_shown() -> None:
    status = Path("/proc/self/status")
    if not status.exists() or "\nTHP_enabled:" not in status.read_text():
        pytest.skip(
            "the kernel does not show in /proc whether a process may get huge pages (Linux does since version 5.0)"
        )


@pytest.mark.usefixtures("_huge_pages_are_shown")
def test_a_broker_gets_no_huge_pages(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        broker.listens()
        status = Path(f"/proc/{broker.process.pid}/status").read_text()
        assert status.partition("\nTHP_enabled:")[2].split()[0] == "0"


def test_garbage_is_collected_a_thousand_objects_at_a_time_and_what_is_there_at_the_start_is_left_alone() -> None:
    done = subprocess.run([sys.executable, "-c", REDUCED], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [[1_000, 1_000, 20], True]
