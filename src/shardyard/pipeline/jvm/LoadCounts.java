package shardyard.jvm;

import java.io.Serializable;
import java.util.ArrayList;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.connector.catalog.functions.AggregateFunction;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/**
 * Counts the loads of a topic, as `Counting` in counting.py describes.
 *
 * What to count is in the function's name, because Spark would hand an argument over again for each row.
 */
public final class LoadCounts implements AggregateFunction {
    public static final String PREFIX = "count_loads ";
    private static final StructType BLOCK = DataTypes.createStructType(new StructField[] {
        DataTypes.createStructField("window", DataTypes.LongType, true),
        DataTypes.createStructField("counter", DataTypes.IntegerType, false),
        DataTypes.createStructField("block", DataTypes.IntegerType, false),
        DataTypes.createStructField("records", DataTypes.BinaryType, false),
        DataTypes.createStructField("bytes", DataTypes.BinaryType, false),
    });
    private final String name;
    private final CountingRules rules;

    public LoadCounts(String name) {
        this.name = name;
        this.rules = new CountingRules(name.substring(PREFIX.length()));
    }

    public Serializable newAggregationState() {
        return new LoadCounter(rules, rules.columns, 1);
    }

    public Serializable update(Serializable state, InternalRow row) {
        ((LoadCounter) state).hold(row);
        return state;
    }

    public Serializable merge(Serializable state, Serializable other) {
        ((LoadCounter) state).add((Object[]) other);
        return state;
    }

    public Object produceResult(Serializable state) {
        ArrayList blocks = ((LoadCounter) state).blocks();
        Object[] rows = new Object[blocks.size()];
        for (int i = 0; i < rows.length; i++) rows[i] = new GenericInternalRow((Object[]) blocks.get(i));
        return new GenericArrayData(rows);
    }

    public String name() {
        return name;
    }

    public String canonicalName() {
        return "shardyard." + name;
    }

    public DataType[] inputTypes() {
        return rules.columns.types();
    }

    public DataType resultType() {
        return DataTypes.createArrayType(BLOCK, false);
    }
}
