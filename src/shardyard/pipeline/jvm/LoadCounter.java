package shardyard.jvm;

import java.io.Serializable;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.unsafe.types.UTF8String;

/** The counts of one topic. A cell is two numbers in a row: records and bytes. */
public final class LoadCounter implements Serializable {
    private static final int ACTUAL = -1;
    private static final int TOTAL = -2;
    private static final int BUCKETS = -3;
    private static final int SAMPLE = -4;
    private static final int EARLY = -5;

    /** Of a window: where its totals are, its partitions as they are, and the first scheme. */
    private static final int TOTALS = 0;
    private static final int PARTITIONS = 1;
    private static final int SCHEMES = 2;

    private final CountingRules rules;
    private final LoadColumns columns;
    /** Null if there are windows: a key has records in several of them. */
    private final EarlyKeys early;
    private final KeySample sample;
    private final HashMap windows = new HashMap();
    private long[] buckets;
    private long cells;
    private long keyless;
    private Long lastNumber;
    private long[][] last;
    /** The window of the current record. */
    private long[][] window;
    /** The rows that are counted together, in this window; and their hashes by the schemes. */
    private final KeyBatch held;
    private final long[] hashes;
    private final double[] inverse;

    /** Up to `held` rows are counted together: 1, if the key of a row is gone with the next row. */
    LoadCounter(CountingRules rules, LoadColumns columns, int held) {
        this.rules = rules;
        this.columns = columns;
        this.held = new KeyBatch(held);
        sample = new KeySample(rules.bucketBits, rules.sampleKeys, rules.sampleBytes);
        hashes = new long[held];
        inverse = new double[rules.partitions.length];
        for (int i = 0; i < inverse.length; i++) inverse[i] = 1.0 / rules.partitions[i];
        early = columns.hasTime() ? null : new EarlyKeys();
    }

    /** Count a row, as long as its key stays where it is: together with others, or by `countHeld`. */
    void hold(InternalRow row) {
        if (row.isNullAt(columns.keyAt())) {
            countKeyless(row);
            return;
        }
        UTF8String key = row.getUTF8String(columns.keyAt());  // of a binary column it is a view of the bytes
        hold(row, key.getBaseObject(), key.getBaseOffset(), key.numBytes());
    }

    void hold(InternalRow row, Object base, long offset, int length) {
        long size = columns.size(row);
        int partition = countActual(row, size);
        held.add(base, offset, length, 0, 1, size, partition);
        if (held.isFull()) countHeld();
    }

    private void countKeyless(InternalRow row) {
        long size = columns.size(row);
        countActual(row, size);
        add(window[TOTALS], 0, 1, size);
        for (int i = 0; i < inverse.length; i++) add(window[SCHEMES + i], (int) (keyless % rules.partitions[i]), 1, size);
        keyless++;
    }

    /** Enter the window of a row, and count it in the partition that it is in, which is returned. */
    private int countActual(InternalRow row, long size) {
        enter(window(row));
        int partition = columns.partition(row, rules.maxPartitions);
        if (partition >= 0) {
            window[PARTITIONS] = withRoom(window[PARTITIONS], 2 * partition + 2);
            add(window[PARTITIONS], partition, 1, size);
        }
        return partition;
    }

    private void enter(long[][] next) {
        if (next == window) return;
        countHeld();
        window = next;
    }

    /** Count the rows that are held. */
    void countHeld() {
        held.hash();
        if (early != null) early.count(held);
        countKeys();
        if (early != null && early.isUseless()) {
            early.placeIn(this);
            early.forget();
        }
    }

    /** Count all records of a key in the current window, together with others, or by `countKeys`. Their bytes are `size`. */
    void countKey(Object base, long offset, int length, long hash, long records, long size, int partition) {
        held.add(base, offset, length, hash, records, size, partition);
        if (held.isFull()) countKeys();
    }

    /** Count the keys that are held, whose hashes are known. */
    void countKeys() {
        if (held.count == 0) return;
        addToTotals();
        for (int i = 0; i < rules.hashes.length; i++) {
            hash(rules.hashes[i]);
            if (rules.jumps[i].length > 0) jump(rules.jumps[i]);
            for (int k = 0; k < inverse.length; k++) if (rules.hashOf[k] == i && !rules.isJump[k]) remainders(k);
        }
        if (buckets == null && !sample.hasRoom(held.count, held.bytes())) fillBuckets();
        if (buckets != null) addHeldToBuckets();
        sample.addAll(held);
        held.count = 0;
    }

    private void addToTotals() {
        for (int i = 0; i < held.count; i++) add(window[TOTALS], 1, held.records[i], held.sizes[i]);
    }

    private void hash(int kind) {
        for (int i = 0; i < held.count; i++) hashes[i] = Hashes.hash(kind, held.bases[i], held.offsets[i], held.lengths[i]);
    }

    private void remainders(int scheme) {
        long[] cells = window[SCHEMES + scheme];
        long mask = rules.modulusMask[scheme];
        for (int i = 0; i < held.count; i++) {
            int at = remainder(hashes[i] & mask, rules.partitions[scheme], inverse[scheme]);
            add(cells, at, held.records[i], held.sizes[i]);
        }
    }

    /** Jump for several numbers of partitions at once: a walk to a larger number begins like that to a smaller one. */
    private void jump(int[] schemes) {
        for (int i = 0; i < held.count; i++) {
            long state = hashes[i];
            long bucket = -1;
            long after = 0;
            for (int k = 0; k < schemes.length; k++) {
                while (after < rules.partitions[schemes[k]]) {
                    bucket = after;
                    state = Hashes.jumpState(state);
                    after = Hashes.jumpAfter(bucket, state);
                }
                add(window[SCHEMES + schemes[k]], (int) bucket, held.records[i], held.sizes[i]);
            }
        }
    }

    /** The remainder of an unsigned number. Two steps with exact doubles take a fifth of the time of a division. */
    private static int remainder(long number, int divisor, double inverse) {
        long high = less(number >>> 32, divisor, inverse);
        return (int) less(high << 32 | number & 0xffffffffL, divisor, inverse);
    }

    private static long less(long number, int divisor, double inverse) {
        long rest = number - (long) (number * inverse) * divisor;
        return rest < 0 ? rest + divisor : rest >= divisor ? rest - divisor : rest;
    }

    private long[][] window(InternalRow row) {
        if (!columns.hasTime()) return window == null ? window((Long) null) : window;
        if (!columns.isTimeKnown(row)) return window((Long) null);
        long number = Math.floorDiv(columns.time(row), rules.windowMicros);
        if (last == null || lastNumber.longValue() != number) {
            lastNumber = Long.valueOf(number);
            last = window(lastNumber);
        }
        return last;
    }

    private long[][] window(Long number) {
        long[][] found = (long[][]) windows.get(number);
        if (found == null) {
            found = new long[SCHEMES + inverse.length][];
            found[TOTALS] = new long[4];
            found[PARTITIONS] = new long[0];
            for (int i = 0; i < inverse.length; i++) found[SCHEMES + i] = cells(rules.partitions[i]);
            windows.put(number, found);
        }
        return found;
    }

    private long[] cells(int count) {
        return withRoom(new long[0], 2 * count);
    }

    /** The cells, or more of them, such that there are as many numbers as asked for. */
    private long[] withRoom(long[] had, int numbers) {
        if (had.length >= numbers) return had;
        cells += (numbers - had.length) / 2;
        if (cells > rules.maxCells) throw InvalidValue.cells(rules.maxCells);
        return Arrays.copyOf(had, numbers);
    }

    /** Count in buckets from now on. Until now they were not needed, because the sample has all keys. */
    private void fillBuckets() {
        buckets = cells(1 << rules.bucketBits);
        addToBuckets(sample);
    }

    private void addToBuckets(KeySample keys) {
        for (int i = 0; i < keys.count(); i++) add(buckets, bucket(keys.hash(i)), keys.records(i), keys.size(i));
    }

    private void addHeldToBuckets() {
        for (int i = 0; i < held.count; i++) add(buckets, bucket(held.hashes[i]), held.records[i], held.sizes[i]);
    }

    private int bucket(long hash) {
        return (int) hash & (1 << rules.bucketBits) - 1;
    }

    /** Place the records that are not placed yet. */
    private void placeAll() {
        if (early != null) early.placeIn(this);
    }

    /** What is sent to another task. It consists of Java's own classes, because Spark finds no others when it reads it. */
    protected Object writeReplace() {
        return sent();
    }

    Object[] sent() {
        placeAll();
        if (early == null) return new Object[] {windows, buckets, sample.pack()};
        return new Object[] {windows, buckets, sample.pack(), early.pack(), Boolean.valueOf(early.isComplete())};
    }

    /** Add the counts of another task, as it sent them. */
    void add(Object[] sent) {
        placeAll();
        for (Iterator each = ((HashMap) sent[0]).entrySet().iterator(); each.hasNext();) {
            Map.Entry entry = (Map.Entry) each.next();
            long[][] into = window((Long) entry.getKey());
            long[][] more = (long[][]) entry.getValue();
            for (int i = 0; i < more.length; i++) {
                into[i] = withRoom(into[i], more[i].length);
                addAll(into[i], more[i]);
            }
        }
        addKeys((long[]) sent[1], (byte[]) sent[2]);
        if (early != null) early.add((byte[]) sent[3], ((Boolean) sent[4]).booleanValue());
    }

    private void addKeys(long[] more, byte[] packed) {
        if (more == null) {
            KeySample other = new KeySample(rules.bucketBits, rules.sampleKeys, rules.sampleBytes);
            other.addAll(packed);
            if (buckets == null && !sample.hasRoom(other)) fillBuckets();
            if (buckets != null) addToBuckets(other);
        } else {
            if (buckets == null) fillBuckets();
            addAll(buckets, more);
        }
        sample.addAll(packed);
    }

    private static void addAll(long[] cells, long[] more) {
        for (int i = 0; i < more.length; i++) cells[i] += more[i];
    }

    private static void add(long[] cells, int at, long records, long size) {
        cells[2 * at] += records;
        cells[2 * at + 1] += size;
    }

    /** All counts as rows of BLOCKS, without the topic: arrays of window, counter, block, records and bytes. */
    ArrayList blocks() {
        placeAll();
        ArrayList rows = new ArrayList();
        for (Iterator each = windows.entrySet().iterator(); each.hasNext();) {
            Map.Entry entry = (Map.Entry) each.next();
            Long number = (Long) entry.getKey();
            long[][] counts = (long[][]) entry.getValue();
            addBlocks(rows, number, TOTAL, counts[TOTALS]);
            addBlocks(rows, number, ACTUAL, withoutZeros(counts[PARTITIONS]));
            for (int i = 0; i < inverse.length; i++) addBlocks(rows, number, i, counts[SCHEMES + i]);
        }
        if (!sample.hasAllKeys()) {
            addBlocks(rows, null, BUCKETS, buckets);
            if (early != null) rows.add(row(null, EARLY, 0, early.pack(), new byte[0]));
        }
        if (sample.count() > 0) rows.add(row(null, SAMPLE, 0, sample.pack(), new byte[0]));
        return rows;
    }

    /** The cells of a counter in blocks, without the blocks that are zero throughout. */
    private void addBlocks(ArrayList rows, Long window, int counter, long[] cells) {
        int all = cells.length / 2;
        for (int start = 0; start < all; start += rules.blockCells) {
            int end = Math.min(all, start + rules.blockCells);
            ByteBuffer records = ByteBuffer.allocate(8 * (end - start)).order(ByteOrder.LITTLE_ENDIAN);
            ByteBuffer sizes = ByteBuffer.allocate(8 * (end - start)).order(ByteOrder.LITTLE_ENDIAN);
            boolean isEmpty = true;
            for (int i = start; i < end; i++) {
                isEmpty &= cells[2 * i] == 0;
                records.putLong(cells[2 * i]);
                sizes.putLong(cells[2 * i + 1]);
            }
            if (!isEmpty) rows.add(row(window, counter, start / rules.blockCells, records.array(), sizes.array()));
        }
    }

    private static Object[] row(Long window, int counter, int block, byte[] records, byte[] sizes) {
        return new Object[] {window, Integer.valueOf(counter), Integer.valueOf(block), records, sizes};
    }

    private static long[] withoutZeros(long[] cells) {
        int end = cells.length;
        while (end > 0 && cells[end - 2] == 0) end -= 2;
        return Arrays.copyOf(cells, end);
    }
}
