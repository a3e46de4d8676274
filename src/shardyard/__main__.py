"""Starts the `shardyard` command, also by `python -m shardyard`. Ctrl-C ends it quietly while it is still loading."""

import sys

INTERRUPTED = 130
"""The exit code after Ctrl-C, as of every command."""


def main() -> None:
    try:
        from shardyard.cli import main as run  # noqa: PLC0415 this is what takes a while
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
