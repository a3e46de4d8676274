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

    private final int skippedBits;
    private final int maxKeys;
    private final int maxBytes;
    private int level;
    private long mask;
    private int count;
    private long[] hashes = new long[64];
    private long[] records = new long[64];
    private long[] sizes = new long[64];
    private int[] partitions = new int[64];
    private int[] ends = new int[64];
    private byte[] keys = new byte[1024];
    /** Where a key is, plus one, by its hash; 0 for none. Twice as many slots as keys fit into the other arrays. */
    private int[] slots = new int[128];

    public KeySample(int skippedBits, int maxKeys, int maxBytes) {
        this.skippedBits = skippedBits;
        this.maxKeys = maxKeys;
        this.maxBytes = maxBytes;
    }

    public boolean hasAllKeys() {
        return level == 0;
    }

    /** Whether this many more keys with so many bytes fit in without raising the level from 0. */
    public boolean hasRoom(int moreKeys, int moreBytes) {
        return level == 0 && moreKeys <= maxKeys - count && moreBytes <= maxBytes - bytes();
    }

    public boolean hasRoom(KeySample other) {
        return other.level == 0 && hasRoom(other.count, other.bytes());
    }

    private int bytes() {
        return count == 0 ? 0 : ends[count - 1];
    }

    public int count() {
        return count;
    }

    public long hash(int i) {
        return hashes[i];
    }

    public long records(int i) {
        return records[i];
    }

    public long size(int i) {
        return sizes[i];
    }

    public int partition(int i) {
        return partitions[i];
    }

    /** Count records of a key if it is sampled. */
    public void add(long hash, Object base, long offset, int length, long more, long size, int partition) {
        if ((hash >>> skippedBits & mask) != 0) return;
        int i = find(hash, base, offset, length);
        if (i >= 0) {
            addAt(i, more, size, partition);
            return;
        }
        if (count == hashes.length) grow();
        append(hash, base, offset, length, more, size, partition);
        insert(count - 1);
        while ((count > maxKeys || bytes() > maxBytes) && level < MAX_LEVEL && count > 1) raise(level + 1);
    }

    /** Where a key is, or -1. */
    public int find(long hash, Object base, long offset, int length) {
        for (int slot = slot(hash); slots[slot] != 0; slot = slot + 1 & slots.length - 1) {
            int i = slots[slot] - 1;
            if (hashes[i] == hash && isKey(i, base, offset, length)) return i;
        }
        return -1;
    }

    /** Where a key of another sample is, or -1. */
    public int find(KeySample other, int i) {
        return find(other.hashes[i], other.keys, other.offset(i), other.length(i));
    }

    public void addAt(int i, long more, long size, int partition) {
        records[i] += more;
        sizes[i] += size;
        if (partitions[i] != partition) partitions[i] = SEVERAL;
    }

    /** Take a key over from another sample, which this one does not have. Returns whether it fits in. */
    public boolean copy(KeySample other, int i) {
        if (!hasRoom(1, other.length(i))) return false;
        add(other.hashes[i], other.keys, other.offset(i), other.length(i), other.records[i], other.sizes[i], other.partitions[i]);
        return true;
    }

    public void placeIn(LoadCounter counter, int i) {
        counter.countKey(hashes[i], keys, offset(i), length(i), records[i], sizes[i], partitions[i]);
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
        for (int i = 0; i < count; i++) out.putLong(hashes[i]);
        for (int i = 0; i < count; i++) out.putLong(records[i]);
        for (int i = 0; i < count; i++) out.putLong(sizes[i]);
        for (int i = 0; i < count; i++) out.putInt(partitions[i]);
        for (int i = 0; i < count; i++) out.putInt(length(i));
        out.put(keys, 0, bytes());
        return out.array();
    }

    private int slot(long hash) {
        return (int) (hash ^ hash >>> 32) & slots.length - 1;
    }

    private int start(int i) {
        return i == 0 ? 0 : ends[i - 1];
    }

    private long offset(int i) {
        return Platform.BYTE_ARRAY_OFFSET + start(i);
    }

    private int length(int i) {
        return ends[i] - start(i);
    }

    private boolean isKey(int i, Object base, long offset, int length) {
        return length(i) == length && ByteArrayMethods.arrayEquals(keys, offset(i), base, offset, length);
    }

    private void append(long hash, Object base, long offset, int length, long more, long size, int partition) {
        int start = bytes();
        if (length > keys.length - start) keys = Arrays.copyOf(keys, Math.addExact(start, Math.max(start, length)));
        Platform.copyMemory(base, offset, keys, Platform.BYTE_ARRAY_OFFSET + start, length);
        hashes[count] = hash;
        records[count] = more;
        sizes[count] = size;
        partitions[count] = partition;
        ends[count] = start + length;
        count++;
    }

    private void grow() {
        int room = 2 * hashes.length;
        hashes = Arrays.copyOf(hashes, room);
        records = Arrays.copyOf(records, room);
        sizes = Arrays.copyOf(sizes, room);
        partitions = Arrays.copyOf(partitions, room);
        ends = Arrays.copyOf(ends, room);
        slots = new int[2 * room];
        for (int i = 0; i < count; i++) insert(i);
    }

    private void insert(int i) {
        int slot = slot(hashes[i]);
        while (slots[slot] != 0) slot = slot + 1 & slots.length - 1;
        slots[slot] = i + 1;
    }

    private void raise(int to) {
        level = to;
        mask = (1L << to) - 1;
        int had = count;
        int start = 0;
        count = 0;
        Arrays.fill(slots, 0);
        for (int i = 0; i < had; i++) {
            int end = ends[i];
            if ((hashes[i] >>> skippedBits & mask) == 0) {
                append(hashes[i], keys, Platform.BYTE_ARRAY_OFFSET + start, end - start, records[i], sizes[i], partitions[i]);
                insert(count - 1);
            }
            start = end;
        }
    }
}
