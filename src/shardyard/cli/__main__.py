"""Runs the command by `python -m shardyard.cli`, and by `spark-submit`, which needs a file."""

from shardyard.cli import main

main()
