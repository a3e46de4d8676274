"""Shardyard's functions in Java, for Spark sessions that run in this process's JVM: no key is handed to Python.

The sources are beside this file. Spark ships a Java compiler (Janino) for the code that it generates; it compiles them
too, once for each user and version. Spark Connect has no access to the JVM: there the callers use Arrow functions, with
the same results. Janino knows no lambdas and no generics, and makes private methods static.
"""

import hashlib
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 as everybody calls it

from shardyard.pipeline.cache import cache_folder

CATALOG = "shardyard"
"""Spark's name for the functions: `shardyard.xxh64(key)`."""
_SETTING = f"spark.sql.catalog.{CATALOG}"
_CLASS = "shardyard.jvm.Functions"
_BLOCK = struct.Struct(">?qiiii")
"""The head of a block, as `Functions.java` writes it: records and bytes follow, of these lengths."""
_SOURCES = sorted(Path(__file__).parent.glob("*.java"))


def has_functions(session: object = None) -> bool:
    """Whether the session, by default the active one, has the functions, which are added to it on first use."""
    spark = session or SparkSession.getActiveSession()
    if not isinstance(spark, SparkSession) or not hasattr(spark, "_jsparkSession"):
        return False
    if spark.conf.get(_SETTING, None) is None:
        _add_to(spark)
    return spark.conf.get(_SETTING) == _CLASS


def call(function: str, *arguments: Column) -> Column:
    """Call one of the functions by its name in `Functions.java`."""
    return F.call_function(f"{CATALOG}.`{function}`", *arguments)


def count_table(df: DataFrame, function: str) -> Iterator[tuple[int | None, int, int, bytes, bytes]]:
    """What a function that counts loads returns for all rows of a frame, by one job and without copying any row.

    Yields blocks: window, counter, number of the block, records and bytes.
    """
    spark: Any = df.sparkSession
    functions = spark._jsparkSession.sessionState().catalogManager().catalog(CATALOG)
    with tempfile.TemporaryDirectory(prefix="shardyard-") as folder:
        path = Path(folder) / "blocks"
        functions.count(df._jdf, function, str(path))
        with path.open("rb") as file:
            while head := file.read(_BLOCK.size):
                has_window, window, counter, block, records, sizes = _BLOCK.unpack(head)
                yield window if has_window else None, counter, block, file.read(records), file.read(sizes)


def constant_columns(df: DataFrame) -> dict[str, object]:
    """The columns that have the same value in all rows, as far as Spark knows without reading any, and their values."""
    plan = df._jdf.queryExecution().optimizedPlan()
    if plan.nodeName() != "Project":
        return {}
    found: dict[str, object] = {}
    for i in range(plan.projectList().size()):
        column = plan.projectList().apply(i)
        if column.nodeName() == "Alias" and column.child().foldable():
            value = column.child().eval(None)
            found[column.name()] = None if value is None else str(value)
    return found


def _add_to(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    loader = spark._jsparkSession.sharedState().jarClassLoader()
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:16]
    jar = cache_folder() / f"functions-{digest}-spark-{pyspark.__version__}.jar"
    if not jar.exists():
        _compile(jvm, spark.sparkContext._gateway, loader, jar)
    spark._jsparkSession.sessionState().resourceLoader().addJar(jar.as_uri())  # ADD JAR, without loading the parser
    jvm.java.lang.Thread.currentThread().setContextClassLoader(loader)  # Spark looks the catalog up in it
    spark.conf.set(_SETTING, _CLASS)


def _compile(jvm: Any, gateway: Any, loader: Any, jar: Path) -> None:
    """Compile the sources into a jar that appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=jar.parent, prefix="compile-") as folder:
        files = gateway.new_array(jvm.java.io.File, len(_SOURCES))
        for i, source in enumerate(_SOURCES):
            files[i] = jvm.java.io.File(str(source))
        compiler = jvm.org.codehaus.janino.Compiler()
        compiler.setIClassLoader(jvm.org.codehaus.janino.ClassLoaderIClassLoader(loader))
        compiler.setDestinationDirectory(jvm.java.io.File(folder), False)
        compiler.compile(files)
        draft = Path(folder) / "functions.jar"
        with zipfile.ZipFile(draft, "w") as archive:
            for compiled in sorted(Path(folder).rglob("*.class")):
                archive.write(compiled, compiled.relative_to(folder))
        os.replace(draft, jar)
