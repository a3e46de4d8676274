package shardyard.jvm;

import org.apache.spark.sql.connector.catalog.functions.ScalarFunction;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.IntegralType;
import org.apache.spark.sql.types.NullType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/** Hashes a key that is binary, a string or an integer. Spark calls `invoke`, without converting the key. */
public final class KeyHash implements ScalarFunction {
    private final String name;
    private final int kind;
    private final DataType type;

    public KeyHash(String name, StructType input) {
        this.name = name;
        this.kind = Hashes.kind(name);
        if (input.length() != 1) throw new UnsupportedOperationException("expected one key");
        DataType given = input.fields()[0].dataType();
        if (given instanceof StringType) type = given;
        else if (given instanceof BinaryType || given instanceof NullType) type = DataTypes.BinaryType;
        else if (given instanceof IntegralType) type = DataTypes.LongType;
        else throw new UnsupportedOperationException("expected binary, a string or an integer");
    }

    public long invoke(UTF8String key) {
        if (key == null) return invoke(new byte[0]);
        return Hashes.hash(kind, key.getBaseObject(), key.getBaseOffset(), key.numBytes());
    }

    public long invoke(byte[] key) {
        return Hashes.hash(kind, key == null ? new byte[0] : key, Platform.BYTE_ARRAY_OFFSET, key == null ? 0 : key.length);
    }

    public long invoke(long key) {
        byte[] bytes = new byte[8];
        for (int i = 0; i < 8; i++) bytes[i] = (byte) (key >>> 8 * i);
        return invoke(bytes);
    }

    public String name() {
        return name;
    }

    public String canonicalName() {
        return "shardyard." + name + "(" + type.simpleString() + ")";
    }

    /** The name of a column, unless it gets another. */
    public String toString() {
        return name;
    }

    public DataType[] inputTypes() {
        return new DataType[] {type};
    }

    public DataType resultType() {
        return DataTypes.LongType;
    }

    public boolean isResultNullable() {
        return type == DataTypes.LongType;
    }
}
