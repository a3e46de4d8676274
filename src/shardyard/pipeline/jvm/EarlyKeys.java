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
    private long hits;
    private long misses;

    private static KeySample none() {
        return new KeySample(0, MAX_KEYS, MAX_BYTES);
    }

    /** Count the records whose key is one of the first. The others stay in the batch. */
    void count(KeyBatch batch) {
        if (isPlaced) {
            if (keys.count() > 0) forget();
            isComplete = false;
            return;
        }
        int first = addFirst(batch);
        int others = 0;
        for (int i = first; i < batch.count; i++) {
            int at = keys.find(batch.hashes[i], batch.bases[i], batch.offsets[i], batch.lengths[i]);
            if (at < 0) batch.move(i, others++);
            else keys.addAt(at, 1, batch.sizes[i], batch.partitions[i]);
        }
        hits += batch.count - first - others;
        misses += others;
        batch.count = others;
    }

    /** Add keys as long as there is room for them. Returns the place in the batch of the one that has none. */
    private int addFirst(KeyBatch batch) {
        int i = 0;
        while (isComplete && i < batch.count) {
            isComplete = keys.hasRoom(1, batch.lengths[i]);
            if (isComplete) keys.add(batch, i++);
        }
        return i;
    }

    /** Whether so few records have one of the first keys that it is not worth looking for it. */
    boolean isUseless() {
        return misses >= TRIAL && hits < TRIAL / 8;
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
        counter.countKeys();
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
