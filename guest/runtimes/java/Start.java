package firn;

import com.amazonaws.services.lambda.crac.Context;
import com.amazonaws.services.lambda.crac.Core;
import com.amazonaws.services.lambda.crac.Resource;
import com.amazonaws.services.lambda.runtime.api.client.AWSLambda;
import java.io.FileInputStream;
import java.io.IOException;
import java.lang.reflect.Field;
import java.security.GeneralSecurityException;
import java.security.SecureRandom;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import java.util.SplittableRandom;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Starts AWS Lambda's unmodified runtime interface client. Each clone of a snapshot replaces the
 * random state of the JDK before the function's after-restore hooks run.
 */
public final class Start implements Resource {
    /** The context holds its resources weakly. */
    private static final Start RESEED = new Start();

    /** The size of the buffer of {@code sun.security.provider.SeedGenerator}. */
    private static final int SEED_BUFFER = 8192;

    public static void main(String[] arguments) throws Throwable {
        if ("snap-start".equals(System.getenv("AWS_LAMBDA_INITIALIZATION_TYPE"))) {
            // The first resource: its hook is the last one before the freeze, and the first one
            // after the restore.
            Core.getGlobalContext().register(RESEED);
        }
        AWSLambda.main(arguments);
    }

    /** A JDK whose state cannot be replaced fails the freeze, and not each restore. */
    @Override
    public void beforeCheckpoint(Context<? extends Resource> context) throws Exception {
        reseed();
    }

    @Override
    public void afterRestore(Context<? extends Resource> context) throws Exception {
        reseed();
    }

    private static void reseed() throws IOException, GeneralSecurityException, ReflectiveOperationException {
        // All generators of a kind share the state that this changes. The first kind is the default.
        try (FileInputStream kernel = new FileInputStream("/dev/urandom")) {
            for (String kind : List.of("NativePRNG", "NativePRNGBlocking", "NativePRNGNonBlocking")) {
                SecureRandom.getInstance(kind).setSeed(kernel.readNBytes(64));
            }
        }
        SecureRandom secure = new SecureRandom();
        SecureRandom.getInstance("SHA1PRNG").generateSeed(SEED_BUFFER);

        Class<?> math = Class.forName("java.lang.Math$RandomNumberGeneratorHolder");
        ((Random) value(math, "randomNumberGenerator")).setSeed(secure.nextLong());
        if (value(Collections.class, "r") instanceof Random shuffle) {
            shuffle.setSeed(secure.nextLong());
        }
        ((AtomicLong) value(Random.class, "seedUniquifier")).set(secure.nextLong());
        ((AtomicLong) value(SplittableRandom.class, "defaultGen")).set(secure.nextLong());
        ((AtomicLong) value(ThreadLocalRandom.class, "seeder")).set(secure.nextLong());
        Field ofThread = Thread.class.getDeclaredField("threadLocalRandomSeed");
        ofThread.setAccessible(true);
        for (Thread thread : Thread.getAllStackTraces().keySet()) {
            ofThread.setLong(thread, secure.nextLong());
        }
    }

    private static Object value(Class<?> holder, String name) throws ReflectiveOperationException {
        Field field = holder.getDeclaredField(name);
        field.setAccessible(true);
        return field.get(null);
    }
}
