"""Status and exit code of an error follow from its branch, for every error there is."""

import pytest

from shardyard import model
from shardyard.model import Conflict, Damaged, Denied, Fenced, InvalidCall, RetryLater, ShardyardError
from shardyard.wire.errors import code_of, exit_code_of, status_of

BRANCHES: dict[type[ShardyardError], tuple[int, int]] = {
    InvalidCall: (400, 2),
    Conflict: (409, 1),
    Denied: (401, 1),
    Fenced: (409, 1),
    RetryLater: (503, 1),
    Damaged: (500, 1),
}
"""The status and the exit code of each branch."""
MORE_PRECISE = {
    "database_denied": 503,  # of the broker, not of its caller
    "not_allowed": 403,
    "unknown_topic": 404,
    "unknown_group": 404,
    "unknown_exchange": 404,
    "unknown_queue": 404,
    "unknown_policy": 404,
    "unknown_node": 404,
    "body_stalled": 408,
    "offset_trimmed": 410,
    "too_large": 413,
    "offset_beyond_end": 416,
    "over_quota": 429,
}
"""The errors for which HTTP has a status that says more than that of their branch."""
ERRORS = sorted(
    (kind for kind in vars(model).values() if isinstance(kind, type) and issubclass(kind, ShardyardError)),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind is not ShardyardError])
def test_an_error_has_the_status_and_the_exit_code_of_its_one_branch(kind: type[ShardyardError]) -> None:
    (branch,) = (branch for branch in BRANCHES if issubclass(kind, branch))
    status, exit_code = BRANCHES[branch]
    error = kind.__new__(kind)
    assert (status_of(error), exit_code_of(error)) == (MORE_PRECISE.get(code_of(kind), status), exit_code)


@pytest.mark.parametrize(
    "name", ["TopicExists", "TopicInUse", "Moved", "PartitionDraining", "Outdated", "SealLost", "GroupInUse"]
)
def test_what_the_state_does_not_allow_is_a_conflict(name: str) -> None:
    assert issubclass(getattr(model, name), Conflict)
