package shardyard.jvm;

import org.apache.spark.sql.connector.catalog.functions.ScalarFunction;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;

/** The partition of a hash: by jump, or the remainder of the hash as an unsigned number. */
public final class Placement implements ScalarFunction {
    public static final String JUMP = "jump";
    public static final String MODULUS = "modulus";
    private final String name;
    private final boolean isJump;

    public Placement(String name) {
        this.name = name;
        this.isJump = name.equals(JUMP);
    }

    public int invoke(long hash, int partitions) {
        return isJump ? Hashes.jump(hash, partitions) : (int) Long.remainderUnsigned(hash, (long) partitions);
    }

    public String name() {
        return name;
    }

    public String canonicalName() {
        return "shardyard." + name;
    }

    /** The name of a column, unless it gets another. */
    public String toString() {
        return name;
    }

    public DataType[] inputTypes() {
        return new DataType[] {DataTypes.LongType, DataTypes.IntegerType};
    }

    public DataType resultType() {
        return DataTypes.IntegerType;
    }

    public boolean isResultNullable() {
        return false;
    }
}
