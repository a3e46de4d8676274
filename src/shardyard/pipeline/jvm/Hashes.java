package shardyard.jvm;

import org.apache.spark.sql.catalyst.expressions.XXH64;
import org.apache.spark.unsafe.Platform;

/** The hashes of shardyard.placement, and jump, over bytes in memory. A hash is an unsigned number in a long. */
public final class Hashes {
    public static final int FNV1A32 = 0;
    public static final int FNV1A64 = 1;
    public static final int XXH64_ = 2;
    public static final int MURMUR2 = 3;
    public static final int PHASH2 = 4;
    private static final String[] NAMES = {"fnv1a32", "fnv1a64", "xxh64", "murmur2", "phash2"};
    private static final boolean BIG_ENDIAN = java.nio.ByteOrder.nativeOrder() == java.nio.ByteOrder.BIG_ENDIAN;

    private Hashes() {
    }

    /** The number of a hash, or -1 if there is none of this name. */
    public static int kind(String name) {
        for (int i = 0; i < NAMES.length; i++) if (NAMES[i].equals(name)) return i;
        return -1;
    }

    public static long hash(int kind, Object base, long offset, int length) {
        switch (kind) {
            case FNV1A32: return fnv1a32(base, offset, length);
            case FNV1A64: return fnv1a64(base, offset, length);
            case XXH64_: return XXH64.hashUnsafeBytes(base, offset, length, 0L);
            case MURMUR2: return murmur2(base, offset, length);
            default: return phash2(base, offset, length);
        }
    }

    private static long fnv1a32(Object base, long offset, int length) {
        int hash = 0x811c9dc5;
        for (int i = 0; i < length; i++) hash = (hash ^ (Platform.getByte(base, offset + i) & 0xff)) * 0x01000193;
        return hash & 0xffffffffL;
    }

    private static long fnv1a64(Object base, long offset, int length) {
        long hash = 0xcbf29ce484222325L;
        for (int i = 0; i < length; i++) hash = (hash ^ (Platform.getByte(base, offset + i) & 0xffL)) * 0x100000001b3L;
        return hash;
    }

    /** Kafka's murmur2. */
    private static long murmur2(Object base, long offset, int length) {
        int m = 0x5bd1e995;
        int hash = 0x9747b28c ^ length;
        int whole = length & ~3;
        for (int i = 0; i < whole; i += 4) {
            int k = word(base, offset + i) * m;
            hash = hash * m ^ (k ^ k >>> 24) * m;
        }
        if (length > whole) hash = (hash ^ rest(base, offset + whole, length - whole)) * m;
        hash = (hash ^ hash >>> 13) * m;
        return (hash ^ hash >>> 15) & 0xffffffffL;
    }

    /** Erlang's phash2 of a list with one binary: Bob Jenkins' lookup2 over the binary, and then over the end of the list. */
    private static long phash2(Object base, long offset, int length) {
        int a = 0x9e3779b9;
        int b = a;
        int c = 0x08d12e65;
        int left = length;
        boolean isEnd = length == 0;
        while (true) {
            long at = offset + length - left;
            if (isEnd && c == 0) return 3468870702L & 0x7ffffffL;
            if (isEnd) {
                a = 0x3c6ef374;
                b = 0x3c6ef372;
            } else if (left >= 12) {
                a += word(base, at);
                b += word(base, at + 4);
                c += word(base, at + 8);
            } else {
                a += rest(base, at, Math.min(left, 4));
                b += rest(base, at + 4, Math.min(left - 4, 4));
                c += length + (rest(base, at + 8, left - 8) << 8);
            }
            a = a - b - c ^ c >>> 13;
            b = b - c - a ^ a << 8;
            c = c - a - b ^ b >>> 13;
            a = a - b - c ^ c >>> 12;
            b = b - c - a ^ a << 16;
            c = c - a - b ^ b >>> 5;
            a = a - b - c ^ c >>> 3;
            b = b - c - a ^ a << 10;
            c = c - a - b ^ b >>> 15;
            if (isEnd) return c & 0x7ffffffL;
            isEnd = left < 12;
            left -= 12;
        }
    }

    /** Four bytes as a little-endian number. */
    private static int word(Object base, long offset) {
        int word = Platform.getInt(base, offset);
        return BIG_ENDIAN ? Integer.reverseBytes(word) : word;
    }

    /** Up to four bytes as a little-endian number; 0 if there are none. */
    private static int rest(Object base, long offset, int length) {
        int word = 0;
        for (int i = 0; i < length; i++) word |= (Platform.getByte(base, offset + i) & 0xff) << 8 * i;
        return word;
    }

    /** The bucket that follows `bucket` for a key in this state; the walk ends at the last one below the number of buckets. */
    public static long jumpAfter(long bucket, long state) {
        return (long) ((bucket + 1) * (2147483648.0 / ((state >>> 33) + 1)));
    }

    public static long jumpState(long state) {
        return state * 2862933555777941757L + 1;
    }

    /** Jump consistent hash (Lamping and Veach, 2014). */
    public static int jump(long hash, int buckets) {
        long state = hash;
        long bucket = -1;
        long after = 0;
        while (after < buckets) {
            bucket = after;
            state = jumpState(state);
            after = jumpAfter(bucket, state);
        }
        return (int) bucket;
    }
}
