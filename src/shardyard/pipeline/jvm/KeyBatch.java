package shardyard.jvm;

import org.apache.spark.sql.catalyst.expressions.XXH64;

/**
 * Keys whose records are counted together: each step of counting is a loop of its own over all of them, because the JVM
 * compiles small loops sooner, and less often again, than one large method. Keys stay where they are.
 */
final class KeyBatch {
    final Object[] bases;
    final long[] offsets;
    final int[] lengths;
    final long[] hashes;
    final long[] records;
    final long[] sizes;
    final int[] partitions;
    int count;

    KeyBatch(int room) {
        bases = new Object[room];
        offsets = new long[room];
        lengths = new int[room];
        hashes = new long[room];
        records = new long[room];
        sizes = new long[room];
        partitions = new int[room];
    }

    boolean isFull() {
        return count == bases.length;
    }

    /** Add records of a key. Their bytes are `size`. Their hash may follow by `hash`. */
    void add(Object base, long offset, int length, long hash, long more, long size, int partition) {
        int i = count++;
        bases[i] = base;
        offsets[i] = offset;
        lengths[i] = length;
        hashes[i] = hash;
        records[i] = more;
        sizes[i] = size;
        partitions[i] = partition;
    }

    void hash() {
        for (int i = 0; i < count; i++) hashes[i] = XXH64.hashUnsafeBytes(bases[i], offsets[i], lengths[i], 42L);
    }

    /** Move an entry to an earlier place. */
    void move(int from, int to) {
        bases[to] = bases[from];
        offsets[to] = offsets[from];
        lengths[to] = lengths[from];
        hashes[to] = hashes[from];
        records[to] = records[from];
        sizes[to] = sizes[from];
        partitions[to] = partitions[from];
    }

    /** The bytes of all keys, those that occur again included. */
    long bytes() {
        long sum = 0;
        for (int i = 0; i < count; i++) sum += lengths[i];
        return sum;
    }
}
