"""Where files are kept that make later runs faster. They can be deleted at any time."""

import os
import tempfile
from pathlib import Path


def cache_path() -> Path:
    """The user's own cache of Shardyard, which may not exist. It is not absolute if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "shardyard"


def cache_folder() -> Path:
    """The same as a folder that exists, or one for temporary files where it can't be created."""
    folder = cache_path()
    if folder.is_absolute():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            pass
        else:
            return folder
    return Path(tempfile.mkdtemp(prefix="shardyard-cache-"))
