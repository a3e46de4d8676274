package shardyard.jvm;

import java.io.Serializable;
import java.util.Arrays;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;

/** Where the columns of loads are in a row, and how wide its integers are. */
public final class LoadColumns implements Serializable {
    private final String[] names;
    private final int[] at;
    private final int[] widths;
    private final int bytes;
    private final int partition;
    private final int time;

    /** The columns in the order of their names: the key is the first, and all but the partition are long. */
    LoadColumns(String[] names) {
        this(names, new int[names.length], new int[names.length]);
        for (int i = 0; i < names.length; i++) {
            at[i] = i;
            widths[i] = i == partition ? 4 : 8;
        }
    }

    private LoadColumns(String[] names, int[] at, int[] widths) {
        this.names = names;
        this.at = at;
        this.widths = widths;
        bytes = Arrays.asList(names).indexOf("bytes");
        partition = Arrays.asList(names).indexOf("partition");
        time = Arrays.asList(names).indexOf("at");
    }

    /** The same columns elsewhere: where each of them is, and the bytes of its integers. */
    LoadColumns movedTo(int[] at, int[] widths) {
        return new LoadColumns(names, at, widths);
    }

    DataType[] types() {
        DataType[] types = new DataType[names.length];
        for (int i = 0; i < types.length; i++) {
            types[i] = i == 0 ? DataTypes.BinaryType : i == partition ? DataTypes.IntegerType : DataTypes.LongType;
        }
        return types;
    }

    int keyAt() {
        return at[0];
    }

    boolean hasTime() {
        return time >= 0;
    }

    boolean isTimeKnown(InternalRow row) {
        return !row.isNullAt(at[time]);
    }

    long time(InternalRow row) {
        return integer(row, time);
    }

    /** The size of a record in bytes; 0 if it is not known. */
    long size(InternalRow row) {
        return bytes < 0 || row.isNullAt(at[bytes]) ? 0 : integer(row, bytes);
    }

    /** The partition of a record, or KeySample.UNKNOWN. */
    int partition(InternalRow row, int max) {
        if (partition < 0 || row.isNullAt(at[partition])) return KeySample.UNKNOWN;
        long number = integer(row, partition);
        if (number < 0 || number >= max) throw InvalidValue.partition((int) number, max);
        return (int) number;
    }

    private long integer(InternalRow row, int column) {
        switch (widths[column]) {
            case 8: return row.getLong(at[column]);
            case 4: return row.getInt(at[column]);
            case 2: return row.getShort(at[column]);
            default: return row.getByte(at[column]);
        }
    }
}
