"""The patterns of policies: regular expressions that take time in proportion to a name's length, whatever they are.

They are matched by RE2, which has neither backreferences nor lookaround, and so can't explode.
"""

from functools import lru_cache
from typing import Any

import re2

from shardyard.model import InvalidValue
from shardyard.model.checks import check_text

MAX_PATTERN = 1000
"""Characters."""
MAX_COMPILED_BYTES = 1024 * 1024
"""Of a compiled pattern: repetitions of repetitions are refused beyond it."""


def check_pattern(pattern: object) -> str:
    """`pattern`, if it is a regular expression that RE2 takes."""
    check_text("pattern", pattern)
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise InvalidValue(
            "pattern", f"{str(pattern)[:50]}...", f"a regular expression of at most {MAX_PATTERN} characters"
        )
    _compiled(pattern)
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern is found in the name; `^` and `$` tie it to the beginning and the end."""
    return _compiled(pattern).search(name) is not None


@lru_cache(maxsize=1000)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MAX_COMPILED_BYTES
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        expected = f"a regular expression without backreferences and lookaround, such as ^images$ ({why})"
        raise InvalidValue("pattern", pattern, expected) from None
