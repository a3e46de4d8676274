package shardyard.jvm;

import java.util.ArrayList;
import java.util.Collections;
import java.util.Iterator;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.api.java.function.FlatMapFunction;
import org.apache.spark.api.java.function.Function2;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * Counts all rows of a frame by one job: each task counts in memory of its own, and what they have counted is added.
 *
 * Spark's own aggregation would copy each row twice before a function sees it.
 */
final class TablePass implements FlatMapFunction, Function2 {
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
        LoadCounter all = new LoadCounter(rules, pass.columns);
        if (sent.getNumPartitions() > 0) all.add((Object[]) sent.treeReduce(pass));
        return all.blocks();
    }

    /** Count the rows of a task. */
    public Iterator call(Object rowsOrBatches) {
        LoadCounter counter = new LoadCounter(rules, columns);
        for (Iterator each = (Iterator) rowsOrBatches; each.hasNext();) {
            Object next = each.next();
            if (next instanceof ColumnarBatch) countBatch(counter, (ColumnarBatch) next);
            else counter.count((InternalRow) next);
        }
        return Collections.singleton(counter.sent()).iterator();
    }

    private static void countBatch(LoadCounter counter, ColumnarBatch batch) {
        for (int i = 0; i < batch.numRows(); i++) counter.count(batch.getRow(i));
    }

    /** Add what two tasks have sent. */
    public Object call(Object one, Object other) {
        LoadCounter counter = new LoadCounter(rules, columns);
        counter.add((Object[]) one);
        counter.add((Object[]) other);
        return counter.sent();
    }
}
