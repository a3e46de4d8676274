package shardyard.jvm;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.array.ByteArrayMethods;

/**
 * Distinct keys, each with all of its records and bytes: all keys as long as they fit, else one in 2, 4, 8 and so on.
 *
 * A key is sampled if the lowest `level` bits of `hash >>> skippedBits` are zero. The level rises when there are more
 * than `maxKeys` keys, or more than `maxBytes` bytes of them. What is sampled at a level was sampled at all levels below
 * it, so no record of it was missed, and neither the order of the records nor of merging makes a difference.
 */
public final class KeySample {
    public static final int UNKNOWN = -1;
    public static final int SEVERAL = -2;
    private static final int MAX_LEVEL = 40;

    /** The numbers of a key: the last one is where it ends in `keys`, and in the lower half its partition. */
    private static final int HASH = 0;
    private static final int RECORDS = 1;
    private static final int SIZE = 2;
    private static final int END = 3;
    private static final int WIDTH = 4;
    private static final long UPPER = 0xffffffff00000000L;

    private final int skippedBits;
    private final int maxKeys;
    private final int maxBytes;
    private int level;
    private long mask;
    private int count;
    /** Of each key four numbers in a row, so that they are in memory together: see the constants. */
    private long[] entries = new long[WIDTH * 64];
    private byte[] keys = new byte[1024];
    /** By the hash of a key its upper half, and in the lower half where the key is, plus one; 0 for none. Twice as many
     * slots as there is room for keys. */
    private long[] slots = new long[128];

    public KeySample(int skippedBits, int maxKeys, int maxBytes) {
        this.skippedBits = skippedBits;
        this.maxKeys = maxKeys;
        this.maxBytes = maxBytes;
    }

    public boolean hasAllKeys() {
        return level == 0;
    }

    /** Whether this many more keys with so many bytes fit in without raising the level from 0. */
    public boolean hasRoom(int moreKeys, long moreBytes) {
        return level == 0 && moreKeys <= maxKeys - count && moreBytes <= maxBytes - bytes();
    }

    public boolean hasRoom(KeySample other) {
        return other.level == 0 && hasRoom(other.count, other.bytes());
    }

    private int bytes() {
        return start(count);
    }

    public int count() {
        return count;
    }

    public long hash(int i) {
        return entries[WIDTH * i + HASH];
    }

    public long records(int i) {
        return entries[WIDTH * i + RECORDS];
    }

    public long size(int i) {
        return entries[WIDTH * i + SIZE];
    }

    public int partition(int i) {
        return (int) entries[WIDTH * i + END];
    }

    /** Count records of a key if it is sampled. */
    public void add(long hash, Object base, long offset, int length, long more, long size, int partition) {
        if (!isSampled(hash)) return;
        int i = find(hash, base, offset, length);
        if (i >= 0) {
            addAt(i, more, size, partition);
            return;
        }
        append(hash, base, offset, length, more, size, partition);
        insert(count - 1);
        while ((count > maxKeys || bytes() > maxBytes) && level < MAX_LEVEL && count > 1) raise(level + 1);
    }

    public void addAll(KeyBatch batch) {
        for (int i = 0; i < batch.count; i++) if (isSampled(batch.hashes[i])) add(batch, i);
    }

    /** Count the records of an entry of a batch if their key is sampled. */
    public void add(KeyBatch batch, int i) {
        add(batch.hashes[i], batch.bases[i], batch.offsets[i], batch.lengths[i], batch.records[i], batch.sizes[i],
            batch.partitions[i]);
    }

    private boolean isSampled(long hash) {
        return (hash >>> skippedBits & mask) == 0;
    }

    /** Where a key is, or -1. */
    public int find(long hash, Object base, long offset, int length) {
        for (int slot = slot(hash); slots[slot] != 0; slot = slot + 1 & slots.length - 1) {
            int i = (int) slots[slot] - 1;
            if (((slots[slot] ^ hash) & UPPER) == 0 && isKey(i, base, offset, length)) return i;
        }
        return -1;
    }

    /** Where a key of another sample is, or -1. */
    public int find(KeySample other, int i) {
        return find(other.hash(i), other.keys, other.offset(i), other.length(i));
    }

    public void addAt(int i, long more, long size, int partition) {
        int at = WIDTH * i;
        entries[at + RECORDS] += more;
        entries[at + SIZE] += size;
        if ((int) entries[at + END] != partition) entries[at + END] = placed(end(i), SEVERAL);
    }

    /** Take a key over from another sample, which this one does not have. Returns whether it fits in. */
    public boolean copy(KeySample other, int i) {
        int length = other.length(i);
        if (!hasRoom(1, length)) return false;
        add(other.hash(i), other.keys, other.offset(i), length, other.records(i), other.size(i), other.partition(i));
        return true;
    }

    public void placeIn(LoadCounter counter, int i) {
        counter.countKey(keys, offset(i), length(i), hash(i), records(i), size(i), partition(i));
    }

    /** Add a packed sample. */
    public void addAll(byte[] packed) {
        ByteBuffer in = ByteBuffer.wrap(packed).order(ByteOrder.LITTLE_ENDIAN);
        int otherLevel = (int) in.getLong();
        int others = (int) in.getLong();
        if (otherLevel > level) raise(otherLevel);
        long key = Platform.BYTE_ARRAY_OFFSET + 16 + 32 * others;
        for (int i = 0; i < others; i++) {
            int length = in.getInt(16 + 28 * others + 4 * i);
            add(in.getLong(16 + 8 * i), packed, key, length, in.getLong(16 + 8 * (others + i)),
                in.getLong(16 + 8 * (2 * others + i)), in.getInt(16 + 24 * others + 4 * i));
            key += length;
        }
    }

    /** Level and number of keys; then hashes, records, bytes, partitions and lengths of all keys; then the keys. */
    public byte[] pack() {
        ByteBuffer out = ByteBuffer.allocate(16 + 32 * count + bytes()).order(ByteOrder.LITTLE_ENDIAN);
        out.putLong((long) level).putLong((long) count);
        for (int i = 0; i < count; i++) out.putLong(hash(i));
        for (int i = 0; i < count; i++) out.putLong(records(i));
        for (int i = 0; i < count; i++) out.putLong(size(i));
        for (int i = 0; i < count; i++) out.putInt(partition(i));
        for (int i = 0; i < count; i++) out.putInt(length(i));
        out.put(keys, 0, bytes());
        return out.array();
    }

    private int slot(long hash) {
        return (int) (hash ^ hash >>> 32) & slots.length - 1;
    }

    private int start(int i) {
        return i == 0 ? 0 : end(i - 1);
    }

    private int end(int i) {
        return (int) (entries[WIDTH * i + END] >>> 32);
    }

    private static long placed(int end, int partition) {
        return (long) end << 32 | partition & 0xffffffffL;
    }

    private long offset(int i) {
        return Platform.BYTE_ARRAY_OFFSET + start(i);
    }

    private int length(int i) {
        return end(i) - start(i);
    }

    private boolean isKey(int i, Object base, long offset, int length) {
        return length(i) == length && ByteArrayMethods.arrayEquals(keys, offset(i), base, offset, length);
    }

    private void append(long hash, Object base, long offset, int length, long more, long size, int partition) {
        int start = bytes();
        if (length > keys.length - start) keys = Arrays.copyOf(keys, Math.addExact(start, Math.max(start, length)));
        Platform.copyMemory(base, offset, keys, Platform.BYTE_ARRAY_OFFSET + start, length);
        if (WIDTH * count == entries.length) grow();
        int at = WIDTH * count++;
        entries[at + HASH] = hash;
        entries[at + RECORDS] = more;
        entries[at + SIZE] = size;
        entries[at + END] = placed(start + length, partition);
    }

    private void grow() {
        entries = Arrays.copyOf(entries, 2 * entries.length);
        slots = new long[2 * slots.length];
        for (int i = 0; i < count; i++) insert(i);
    }

    private void insert(int i) {
        int slot = slot(hash(i));
        while (slots[slot] != 0) slot = slot + 1 & slots.length - 1;
        slots[slot] = hash(i) & UPPER | i + 1;
    }

    private void raise(int to) {
        level = to;
        mask = (1L << to) - 1;
        int had = count;
        int start = 0;
        count = 0;
        Arrays.fill(slots, 0);
        for (int i = 0; i < had; i++) {
            int end = end(i);
            if (isSampled(hash(i))) {
                append(hash(i), keys, Platform.BYTE_ARRAY_OFFSET + start, end - start, records(i), size(i), partition(i));
                insert(count - 1);
            }
            start = end;
        }
    }
}
