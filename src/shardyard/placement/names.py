"""The names of hashes, partitioners and kinds of ids, for those who need no more than the names."""

HASH_NAMES = ("fnv1a32", "fnv1a64", "xxh64", "murmur2", "phash2")
DEFAULT_HASH: dict[str, str | None] = {"modulus": "fnv1a32", "jump": "xxh64", "round_robin": None}
"""The hash of each partitioner, if none is named."""
PARTITIONERS = tuple(DEFAULT_HASH)
ID_KINDS = ("dense", "strided", "sparse", "snowflake", "text")
