package shardyard.jvm;

/**
 * Errors for which Python raises shardyard.model.InvalidValue, named in their message, where spark_errors.py finds it.
 *
 * They are of a class of Java's own: Spark's driver cannot read others from a task, and reports an unknown reason.
 */
final class InvalidValue {
    private InvalidValue() {
    }

    static IllegalArgumentException partition(int partition, int limit) {
        return of("partition is " + partition + ": expected a number from 0 to " + (limit - 1));
    }

    static IllegalArgumentException cells(int limit) {
        return of("cells to report is 'more than " + limit + "': expected fewer windows, topics, schemes or "
            + "partitions at a time: their product is too large to report");
    }

    private static IllegalArgumentException of(String message) {
        return new IllegalArgumentException("shardyard.model.InvalidValue: " + message);
    }
}
