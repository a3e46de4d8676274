package shardyard.jvm;

/**
 * The keys that a task sees first, each with all of its records. Keys that occur often are among them: such a key is
 * placed once and not for each of its records, and the number of its records is known exactly.
 */
final class EarlyKeys {
    private static final int MAX_KEYS = 1 << 14;
    private static final int MAX_BYTES = 1 << 20;
    /** After this many records of other keys it is decided whether the first keys occur often enough. */
    private static final int TRIAL = 1 << 16;

    private KeySample keys = none();
    /** Whether there are no records of other keys. */
    private boolean isComplete = true;
    /** Whether the records are placed, so that none can be added. */
    private boolean isPlaced;
    private int hits;
    private int misses;

    private static KeySample none() {
        return new KeySample(0, MAX_KEYS, MAX_BYTES);
    }

    /** Count a record if its key is one of the first. */
    boolean count(long hash, Object base, long offset, int length, long size, int partition) {
        if (isPlaced) {
            if (keys.count() > 0) forget();
            isComplete = false;
            return false;
        }
        if (isComplete && keys.hasRoom(1, length)) {
            keys.add(hash, base, offset, length, 1, size, partition);
            return true;
        }
        isComplete = false;
        int i = keys.find(hash, base, offset, length);
        if (i < 0) {
            misses++;
            return false;
        }
        hits++;
        keys.addAt(i, 1, size, partition);
        return true;
    }

    /** Whether so few records have one of the first keys that it is not worth looking for it. */
    boolean isUseless() {
        return misses == TRIAL && hits < TRIAL / 8;
    }

    void forget() {
        keys = none();
        isComplete = false;
        misses = 0;
    }

    void placeIn(LoadCounter counter) {
        if (isPlaced) return;
        isPlaced = true;
        for (int i = 0; i < keys.count(); i++) keys.placeIn(counter, i);
    }

    byte[] pack() {
        return keys.pack();
    }

    boolean isComplete() {
        return isComplete;
    }

    /** Add those of another task. All records of a key are known if each task has it, or has all of its own keys. */
    void add(byte[] packed, boolean isOtherComplete) {
        KeySample other = none();
        other.addAll(packed);
        KeySample both = none();
        boolean fit = true;
        for (int i = 0; i < keys.count(); i++) {
            if (isOtherComplete || other.find(keys, i) >= 0) fit &= both.copy(keys, i);
        }
        for (int i = 0; i < other.count(); i++) {
            int at = both.find(other, i);
            if (at >= 0) both.addAt(at, other.records(i), other.size(i), other.partition(i));
            else if (isComplete && keys.find(other, i) < 0) fit &= both.copy(other, i);
        }
        keys = both;
        isComplete &= isOtherComplete && fit;
    }
}
