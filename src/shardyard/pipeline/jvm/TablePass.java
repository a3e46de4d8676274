package shardyard.jvm;

import java.util.ArrayList;
import java.util.Collections;
import java.util.Iterator;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.api.java.function.FlatMapFunction;
import org.apache.spark.api.java.function.Function2;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.execution.vectorized.WritableColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Counts all rows of a frame by one job: each task counts in memory of its own, and what they have counted is added.
 *
 * Spark's own aggregation would copy each row twice before a function sees it.
 */
final class TablePass implements FlatMapFunction, Function2 {
    /** Rows that are counted together: what is known of them fits into the innermost caches of a processor. */
    private static final int HELD = 1 << 10;

    /** Up to so many tasks, the driver adds what they have sent by itself; of more, other tasks add it first. */
    private static final int FEW_TASKS = 8;

    private final CountingRules rules;
    private final LoadColumns columns;

    private TablePass(CountingRules rules, LoadColumns columns) {
        this.rules = rules;
        this.columns = columns;
    }

    /** The counts of all rows, as LoadCounter.blocks. */
    static ArrayList run(CountingRules rules, TableRows rows) {
        TablePass pass = new TablePass(rules, rows.locate(rules.columns));
        JavaRDD sent = rows.rdd().mapPartitions(pass);
        LoadCounter all = new LoadCounter(rules, pass.columns, 1);
        if (sent.getNumPartitions() <= FEW_TASKS) {
            for (Iterator each = sent.collect().iterator(); each.hasNext();) all.add((Object[]) each.next());
        } else {
            all.add((Object[]) sent.treeReduce(pass));
        }
        return all.blocks();
    }

    /** Count the rows of a task. */
    public Iterator call(Object rowsOrBatches) {
        LoadCounter counter = new LoadCounter(rules, columns, HELD);
        for (Iterator each = (Iterator) rowsOrBatches; each.hasNext();) {
            Object next = each.next();
            if (next instanceof ColumnarBatch) countBatch(counter, (ColumnarBatch) next);
            else countRow(counter, (InternalRow) next);
        }
        return Collections.singleton(counter.sent()).iterator();
    }

    private void countBatch(LoadCounter counter, ColumnarBatch batch) {
        ColumnVector keys = batch.column(columns.keyAt());
        if (keys instanceof WritableColumnVector && !((WritableColumnVector) keys).hasDictionary()) {
            countPlain(counter, batch, (WritableColumnVector) keys);
        } else {
            for (int i = 0; i < batch.numRows(); i++) counter.hold(batch.getRow(i));
        }
        counter.countHeld();
    }

    /** Count rows whose keys are in one piece of memory, without an object for each key. */
    private static void countPlain(LoadCounter counter, ColumnarBatch batch, WritableColumnVector keys) {
        int first = 0;
        while (first < batch.numRows() && keys.isNullAt(first)) counter.hold(batch.getRow(first++));
        if (first == batch.numRows()) return;
        UTF8String key = keys.getUTF8String(first);
        Object base = key.getBaseObject();
        long origin = key.getBaseOffset() - keys.getArrayOffset(first);
        for (int i = first; i < batch.numRows(); i++) {
            if (keys.isNullAt(i)) counter.hold(batch.getRow(i));
            else counter.hold(batch.getRow(i), base, origin + keys.getArrayOffset(i), keys.getArrayLength(i));
        }
    }

    private static void countRow(LoadCounter counter, InternalRow row) {
        counter.hold(row);
        counter.countHeld();
    }

    /** Add what two tasks have sent. What travels between tasks are arrays: a serializer need not know our classes. */
    public Object call(Object one, Object other) {
        LoadCounter counter = new LoadCounter(rules, columns, 1);
        counter.add((Object[]) one);
        counter.add((Object[]) other);
        return counter.sent();
    }
}
