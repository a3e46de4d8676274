"""FNV-1a as a Java function inside Spark's JVM: about five times as fast as handing each key to Python.

Spark ships a Java compiler for the code that it generates. It compiles this function too, and sends it to the
executors.
"""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

FNV1A32 = "shardyard_fnv1a32"
"""The function's name in SQL: it hashes a binary, string or integer column and returns a bigint."""

_CLASS = "shardyard.Fnv1a32"
_SOURCE = """
package shardyard;

public class Fnv1a32 implements org.apache.spark.sql.api.java.UDF1 {
    public Object call(Object key) throws Exception {
        int hash = 0x811c9dc5;
        if (key instanceof byte[]) {
            hash = of((byte[]) key);
        } else if (key instanceof Number) {
            long number = ((Number) key).longValue();
            for (int i = 0; i < 8; i++) hash = (hash ^ (int) (number >>> 8 * i & 0xff)) * 0x01000193;
        } else if (key != null) {
            String text = (String) key;
            for (int i = 0; i < text.length(); i++) {
                char letter = text.charAt(i);
                if (letter >= 0x80) return Long.valueOf(of(text.getBytes("UTF-8")) & 0xffffffffL);
                hash = (hash ^ letter) * 0x01000193;
            }
        }
        return Long.valueOf(hash & 0xffffffffL);
    }

    private static int of(byte[] bytes) {
        int hash = 0x811c9dc5;
        for (int i = 0; i < bytes.length; i++) hash = (hash ^ (bytes[i] & 0xff)) * 0x01000193;
        return hash;
    }
}
"""


def has_fnv1a32() -> bool:
    """Whether the active session has the function, which is registered on first use. Spark Connect can't have it."""
    spark = SparkSession.getActiveSession()
    if not isinstance(spark, SparkSession) or not hasattr(spark, "_jsparkSession"):
        return False
    if not spark.catalog.functionExists(FNV1A32):
        _register(spark)
    return True


def _register(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    session = spark._jsparkSession
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.cook(_SOURCE)
    folder = tempfile.mkdtemp(dir=spark.sparkContext._temp_dir)
    jar = Path(folder) / "shardyard.jar"
    with zipfile.ZipFile(jar, "w") as file:
        file.writestr(_CLASS.replace(".", "/") + ".class", bytes(compiler.getBytecodes()[_CLASS]))
    spark.sql(f"ADD JAR '{jar.as_uri()}'")
    function = session.sharedState().jarClassLoader().loadClass(_CLASS).getDeclaredConstructor(None).newInstance(None)
    session.udf().register(FNV1A32, function, jvm.org.apache.spark.sql.types.DataTypes.LongType)
