"""Which files the history's tables have. The pipeline job `history` writes them; readers need no Spark.

    <tables>/manifest.json                              names all the others: what it does not name is not in the tables
    <tables>/messages/<run>/bucket=7/*.parquet          sorted by (user_a, user_b, id), in small row groups
    <tables>/marks/<run>/*.parquet                      reader, peer, kind, upto

A conversation is its two users in order, `user_a` <= `user_b`. All of its messages are in one bucket. A file does not
change, and an id is in one file only. A new version of the tables is a new manifest, which replaces the old one in one
step; the files that only the version before has stay until the next one, for those who are reading them.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from shardyard.model import Damaged, NotOurs, WrongSchemaVersion
from shardyard.placement import partitioner_named

SCHEMA_VERSION = 1
FILE_NAME = "manifest.json"
SEPARATOR = "\0"
"""Between the users of a conversation, where it is hashed. No name of a user has this character."""
BUCKET_HASH = "fnv1a32"
"""Its remainder by the number of buckets is the bucket of a conversation."""


class MessagesFile(Struct, frozen=True):
    """A file with messages of one bucket."""

    path: str
    """Relative to the folder of the tables."""
    bucket: int
    rows: int
    first_id: int
    last_id: int


class ReadUpTo(Struct, frozen=True):
    """Records of a partition before `offset` are in the tables."""

    topic: str
    epoch: int
    partition: int
    offset: int


class Manifest(Struct, frozen=True, kw_only=True):
    """A version of the tables."""

    schema_version: int = SCHEMA_VERSION
    version: int = 0
    """It rises with each change."""
    buckets: int
    messages: tuple[MessagesFile, ...] = ()
    """Of a bucket's files, a later one was written later."""
    marks: tuple[str, ...] = ()
    read: tuple[ReadUpTo, ...] = ()
    """What the tables have of each partition; everything, also what later turns up in other files of a lake."""
    lake_files: tuple[str, ...] = ()
    """The files of the lake that the last run saw, and need not read again."""
    replaced: tuple[str, ...] = ()
    """Files of the version before that this one does not have."""


def load_manifest(root: Path) -> Manifest:
    """The manifest of the tables in a folder. Raises `NotOurs` if it has none."""
    path = root / FILE_NAME
    try:
        stored = msgspec.json.decode(path.read_bytes())
        if isinstance(stored, dict) and stored.get("schema_version") != SCHEMA_VERSION:
            found = stored.get("schema_version")
            raise WrongSchemaVersion(str(root), found if isinstance(found, int) else 0, SCHEMA_VERSION)
        return msgspec.convert(stored, Manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise NotOurs(str(root), "a folder of the pipeline job `history`") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(str(path), str(error)) from None


def conversation(user: str, peer: str) -> tuple[str, str]:
    """The two users in order."""
    return (user, peer) if user <= peer else (peer, user)


def bucket_of(user: str, peer: str, buckets: int) -> int:
    """The bucket of the conversation of two users."""
    return partitioner_named("modulus", buckets, BUCKET_HASH).place(SEPARATOR.join(conversation(user, peer)))
