package shardyard.jvm;

import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.Cast;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.execution.ColumnarToRowExec;
import org.apache.spark.sql.execution.FileSourceScanExec;
import org.apache.spark.sql.execution.InputAdapter;
import org.apache.spark.sql.execution.ProjectExec;
import org.apache.spark.sql.execution.QueryExecution;
import org.apache.spark.sql.execution.SQLExecutionRDD;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.WholeStageCodegenExec;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.IntegralType;
import org.apache.spark.sql.types.StringType;
import scala.collection.Seq;

/**
 * The rows of a frame. If it has nothing but columns of Parquet or ORC files, these are the vectors that Spark reads them
 * into; else they are rows as Spark computes them.
 */
final class TableRows {
    private final QueryExecution execution;
    /** The files, or null; and for each column of the frame where it is in them, and how wide its integers are. */
    private FileSourceScanExec files;
    private int[] at;
    private int[] widths;

    TableRows(QueryExecution execution) {
        this.execution = execution;
        SparkPlan plan = execution.executedPlan();
        if (plan instanceof WholeStageCodegenExec) plan = ((WholeStageCodegenExec) plan).child();
        Seq columns = plan.output();
        if (plan instanceof ProjectExec) {
            columns = ((ProjectExec) plan).projectList();
            plan = ((ProjectExec) plan).child();
        }
        if (!(plan instanceof ColumnarToRowExec)) return;
        plan = ((ColumnarToRowExec) plan).child();
        if (plan instanceof InputAdapter) plan = ((InputAdapter) plan).child();
        if (plan instanceof FileSourceScanExec) locate(columns, (FileSourceScanExec) plan);
    }

    private void locate(Seq columns, FileSourceScanExec scan) {
        at = new int[columns.size()];
        widths = new int[columns.size()];
        for (int i = 0; i < at.length; i++) {
            Expression source = source((Expression) columns.apply(i));
            at[i] = source instanceof AttributeReference ? indexOf((AttributeReference) source, scan.output()) : -1;
            if (at[i] < 0) return;
            widths[i] = source.dataType().defaultSize();
        }
        files = scan;
    }

    /** The column without a new name and without casts that make no difference to whoever reads its bytes or integers. */
    private static Expression source(Expression column) {
        if (column instanceof Alias) return source(((Alias) column).child());
        if (!(column instanceof Cast)) return column;
        DataType to = column.dataType();
        Expression child = ((Cast) column).child();
        DataType from = child.dataType();
        boolean isSame = from instanceof StringType && to instanceof BinaryType
            || from instanceof IntegralType && to instanceof IntegralType && from.defaultSize() <= to.defaultSize();
        return isSame ? source(child) : column;
    }

    private static int indexOf(AttributeReference column, Seq columns) {
        for (int i = 0; i < columns.size(); i++) {
            if (((AttributeReference) columns.apply(i)).exprId().equals(column.exprId())) return i;
        }
        return -1;
    }

    LoadColumns locate(LoadColumns names) {
        return files == null ? names : names.movedTo(at, widths);
    }

    /** Of batches of vectors, or of rows. */
    JavaRDD rdd() {
        if (files == null) return execution.toRdd().toJavaRDD();
        RDD vectors = files.executeColumnar();
        return new SQLExecutionRDD(vectors, execution.sparkSession().sessionState().conf()).toJavaRDD();
    }
}
