package shardyard.jvm;

import java.io.Serializable;
import java.util.Arrays;

/** What to count, from text such as "columns=key,bytes window=0 bucket_bits=20 ... schemes=fnv1a32:modulus:12". */
public final class CountingRules implements Serializable {
    private final String text;
    final LoadColumns columns;
    final long windowMicros;
    final int bucketBits;
    final int sampleKeys;
    final int sampleBytes;
    final int blockCells;
    final int maxCells;
    final int maxPartitions;
    /** The hashes that the schemes use, each once. */
    final int[] hashes;
    /** Of each scheme: which of these hashes it uses, whether it jumps, and how many partitions it has. */
    final int[] hashOf;
    final boolean[] isJump;
    final int[] partitions;
    /** Of each hash: the schemes that jump, the one with the fewest partitions first. */
    final int[][] jumps;
    /** Kafka masks out the sign bit of murmur2. */
    final long[] modulusMask;

    public CountingRules(String text) {
        this.text = text;
        columns = new LoadColumns(list("columns"));
        windowMicros = Long.parseLong(value("window"));
        bucketBits = number("bucket_bits");
        sampleKeys = number("sample_keys");
        sampleBytes = number("sample_bytes");
        blockCells = number("block_cells");
        maxCells = number("max_cells");
        maxPartitions = number("max_partitions");
        String[] schemes = list("schemes");
        int[] found = new int[schemes.length];
        int distinct = 0;
        hashOf = new int[schemes.length];
        isJump = new boolean[schemes.length];
        partitions = new int[schemes.length];
        modulusMask = new long[schemes.length];
        for (int i = 0; i < schemes.length; i++) {
            String[] parts = schemes[i].split(":");
            int kind = Hashes.kind(parts[0]);
            int at = 0;
            while (at < distinct && found[at] != kind) at++;
            if (at == distinct) found[distinct++] = kind;
            hashOf[i] = at;
            isJump[i] = parts[1].equals(Placement.JUMP);
            partitions[i] = Integer.parseInt(parts[2]);
            modulusMask[i] = Long.parseUnsignedLong(parts[3]);
        }
        hashes = Arrays.copyOf(found, distinct);
        jumps = new int[distinct][];
        for (int i = 0; i < distinct; i++) jumps[i] = jumpsOf(i);
    }

    private int[] jumpsOf(int hash) {
        int[] found = new int[partitions.length];
        int count = 0;
        for (int i = 0; i < partitions.length; i++) {
            if (!isJump[i] || hashOf[i] != hash) continue;
            int at = count++;
            for (; at > 0 && partitions[found[at - 1]] > partitions[i]; at--) found[at] = found[at - 1];
            found[at] = i;
        }
        return Arrays.copyOf(found, count);
    }

    private int number(String name) {
        return Integer.parseInt(value(name));
    }

    private String[] list(String name) {
        return value(name).isEmpty() ? new String[0] : value(name).split(",");
    }

    private String value(String name) {
        String[] parts = text.split(" ");
        for (int i = 0; i < parts.length; i++) {
            if (parts[i].startsWith(name + "=")) return parts[i].substring(name.length() + 1);
        }
        throw new IllegalArgumentException("expected " + name + "= in " + text);
    }
}
