package shardyard.jvm;

import java.io.DataOutputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.util.ArrayList;
import org.apache.spark.sql.catalyst.analysis.NoSuchFunctionException;
import org.apache.spark.sql.classic.Dataset;
import org.apache.spark.sql.connector.catalog.FunctionCatalog;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.functions.BoundFunction;
import org.apache.spark.sql.connector.catalog.functions.UnboundFunction;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A catalog of Spark with functions only: the hashes by name, jump, modulus, and what counts the loads of balance. */
public final class Functions implements FunctionCatalog {
    private String name;

    public void initialize(String name, CaseInsensitiveStringMap options) {
        this.name = name;
    }

    public String name() {
        return name;
    }

    public Identifier[] listFunctions(String[] namespace) {
        return new Identifier[0];
    }

    public UnboundFunction loadFunction(Identifier identifier) throws NoSuchFunctionException {
        String function = identifier.name();
        boolean known = Hashes.kind(function) >= 0 || function.equals(Placement.JUMP)
            || function.equals(Placement.MODULUS) || function.startsWith(LoadCounts.PREFIX);
        if (!known) throw new NoSuchFunctionException(identifier);
        return new Named(function);
    }

    /** What a function that counts loads would return for all rows of a frame, written to a file: block after block. */
    public void count(Dataset frame, String function, String file) throws IOException {
        CountingRules rules = new CountingRules(function.substring(LoadCounts.PREFIX.length()));
        ArrayList blocks = TablePass.run(rules, new TableRows(frame.queryExecution()));
        DataOutputStream out = new DataOutputStream(new FileOutputStream(file));
        for (int i = 0; i < blocks.size(); i++) write((Object[]) blocks.get(i), out);
        out.close();
    }

    private static void write(Object[] block, DataOutputStream out) throws IOException {
        byte[] records = (byte[]) block[3];
        byte[] sizes = (byte[]) block[4];
        out.writeBoolean(block[0] != null);
        out.writeLong(block[0] == null ? 0 : ((Long) block[0]).longValue());
        for (int i = 1; i < 3; i++) out.writeInt(((Integer) block[i]).intValue());
        out.writeInt(records.length);
        out.writeInt(sizes.length);
        out.write(records);
        out.write(sizes);
    }

    private static final class Named implements UnboundFunction {
        private final String name;

        Named(String name) {
            this.name = name;
        }

        public String name() {
            return name;
        }

        public String description() {
            return name;
        }

        public BoundFunction bind(StructType input) {
            if (name.startsWith(LoadCounts.PREFIX)) return new LoadCounts(name);
            if (Hashes.kind(name) >= 0) return new KeyHash(name, input);
            return new Placement(name);
        }
    }
}
