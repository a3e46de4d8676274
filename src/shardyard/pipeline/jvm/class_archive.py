"""Class data sharing: the JVM maps Spark's classes from an archive, instead of loading and verifying thousands of them.

The JVM writes the archive itself when it exits. The first command that finds none for its Java and its Spark makes it,
and so takes some seconds longer.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyspark
from pyspark import SparkContext

from shardyard.pipeline.cache import cache_folder

EXIT_SECONDS = 120
"""How long a command waits until the JVM has written the archive."""
_QUIET = "-XX:+IgnoreUnrecognizedVMOptions -Xlog:disable -Xlog:all=error:stderr"
"""The JVM would print why it cannot use an archive, or which classes are missing in it."""


class ClassArchive:
    """The archive for the Java and the Spark of this process; another version cannot use it."""

    def __init__(self) -> None:
        java = Path(os.environ.get("JAVA_HOME") or Path(shutil.which("java") or "java").resolve().parent.parent)
        release = java / "release"
        files = [
            *sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar")),
            *([release] if release.exists() else []),
        ]
        parts = [str(java), *(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        self._path = cache_folder() / f"classes-{digest}.jsa"
        self._draft = self._path.with_suffix(f".{os.getpid()}.draft")

    def use(self) -> str:
        """The options of a JVM that uses the archive; none if there is no archive yet."""
        return f"{_QUIET} -XX:SharedArchiveFile={self._path}" if self._path.exists() else ""

    def use_or_make(self) -> str:
        """The options of a JVM that uses the archive, or writes it when it exits: call `finish` then."""
        return self.use() or f"{_QUIET} -XX:ArchiveClassesAtExit={self._draft}"

    def finish(self) -> None:
        """After the session was stopped: if its JVM writes the archive, wait for that. It counts only if complete."""
        gateway: Any = SparkContext._gateway
        process = getattr(gateway, "proc", None)
        if process is None or process.poll() is not None or self._path.exists():
            return
        SparkContext._gateway = SparkContext._jvm = None
        gateway.shutdown()
        process.stdin.close()  # for the JVM the sign to exit
        try:
            if process.wait(EXIT_SECONDS) == 0 and self._draft.exists():
                self._draft.replace(self._path)
        except subprocess.TimeoutExpired:
            process.kill()
        finally:
            self._draft.unlink(missing_ok=True)
