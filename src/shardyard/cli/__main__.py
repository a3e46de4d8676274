"""Runs the command by `python -m shardyard.cli`, and by `spark-submit`, which needs a file."""

import os
import sys

# Python looks for modules first in the folder of the file that it runs, and would take `copy.py` there for its own.
sys.path = [path for path in sys.path if path != os.path.dirname(os.path.realpath(__file__))]

from shardyard.cli import main  # noqa: E402 the line above must come first

main()
