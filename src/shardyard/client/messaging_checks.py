"""Checks of what a program passes to a messaging client, before anything is sent."""

import re
from collections.abc import Iterable

from shardyard.model import InvalidValue, TooLarge, check_text, whole_number
from shardyard.model.checks import encoded_size
from shardyard.wire.channels import MAX_CHANNEL_LENGTH
from shardyard.wire.inbox import MAX_TEXT_BYTES, MAX_USER_LENGTH
from shardyard.wire.messaging import MAX_PAGE, MAX_WATCHED

MAX_DEVICE_LENGTH = 64
MAX_NUMBER = 2**53 - 1
_ID = re.compile("[0-9]{1,19}")


def checked_user(user: str) -> str:
    return _checked("user", user, MAX_USER_LENGTH)


def checked_device(device: str) -> str:
    return _checked("device", device, MAX_DEVICE_LENGTH)


def checked_channel(channel: str) -> str:
    return _checked("channel", channel, MAX_CHANNEL_LENGTH)


def checked_message(text: str) -> str:
    """The text of a message or a post."""
    if not isinstance(text, str):
        raise InvalidValue("text", text, "a string")
    size = encoded_size("text", text)
    if size > MAX_TEXT_BYTES:
        raise TooLarge("text in bytes", size, MAX_TEXT_BYTES)
    return text


def checked_number(number: int | None) -> int | None:
    """The number of a message or a post that is sent again."""
    if number is not None and whole_number("number", number, at_least=0) > MAX_NUMBER:
        raise InvalidValue("number", number, "that of a message that was not acknowledged")
    return number


def checked_users(users: Iterable[str]) -> list[str]:
    """Users to watch."""
    if isinstance(users, str) or not isinstance(users, Iterable):
        raise InvalidValue("users", users, "a list of names")
    checked = [checked_user(user) for user in users]
    if len(checked) > MAX_WATCHED:
        raise TooLarge("number of watched users", len(checked), MAX_WATCHED)
    return checked


def checked_id(what: str, id_: str) -> str:
    if not isinstance(id_, str) or _ID.fullmatch(id_) is None:
        raise InvalidValue(what, id_, "the id of a message, which is a string of up to 19 digits")
    return id_


def checked_before(before: str | None) -> str | None:
    """Where a page ends; None: with the newest."""
    return None if before is None else checked_id("before", before)


def checked_page_size(limit: int) -> int:
    if whole_number("limit", limit, at_least=1) > MAX_PAGE:
        raise InvalidValue("limit", limit, f"at most {MAX_PAGE}")
    return limit


def _checked(what: str, name: str, longest: int) -> str:
    check_text(what, name)
    if len(name) > longest:
        raise InvalidValue(what, name, f"at most {longest} characters")
    return name
