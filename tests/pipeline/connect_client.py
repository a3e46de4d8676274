"""Runs commands of the pipeline in a process that uses Spark Connect: a process has either its sessions or others.

It reads a list of argument lists as JSON, and prints a line of JSON for each: its exit code and what it printed.
"""

import contextlib
import io
import json
import sys
from unittest.mock import patch

from shardyard.cli import main
from shardyard.pipeline.reshard import copying


def run(arguments: list[str]) -> dict[str, object]:
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "argv", ["shardyard", *arguments]),
        patch.object(copying, "SPARK_ABOVE", 0),  # so that Spark copies records
    ):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    for arguments in json.load(sys.stdin):
        print(json.dumps(run(arguments)), flush=True)
