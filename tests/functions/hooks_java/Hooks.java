package shop;

import com.amazonaws.services.lambda.runtime.Context;
import com.amazonaws.services.lambda.runtime.RequestHandler;
import java.security.NoSuchAlgorithmException;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.SplittableRandom;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;
import org.crac.Core;
import org.crac.Resource;

/** Draws from the JDK's generators, and returns what its hooks saw. */
public class Hooks implements RequestHandler<Map<String, Object>, Map<String, Object>>, Resource {
    private int before;
    private int after;
    private String restored;

    public Hooks() throws NoSuchAlgorithmException {
        Core.getGlobalContext().register(this);
        draw();
    }

    @Override
    public void beforeCheckpoint(org.crac.Context<? extends Resource> context) throws Exception {
        before++;
        draw();
    }

    @Override
    public void afterRestore(org.crac.Context<? extends Resource> context) {
        after++;
        restored = String.valueOf(Math.random());
    }

    private static List<String> draw() throws NoSuchAlgorithmException {
        List<Integer> cards = new ArrayList<>();
        for (int card = 0; card < 32; card++) {
            cards.add(card);
        }
        Collections.shuffle(cards);
        return List.of(String.valueOf(Math.random()), String.valueOf(ThreadLocalRandom.current().nextLong()),
            String.valueOf(new SplittableRandom().nextLong()), String.valueOf(new Random().nextLong()),
            String.valueOf(SecureRandom.getInstanceStrong().nextLong()), UUID.randomUUID().toString(),
            cards.toString());
    }

    @Override
    public Map<String, Object> handleRequest(Map<String, Object> event, Context context) {
        if (event.containsKey("fail")) {
            throw new IllegalStateException("it is asked to");
        }
        try {
            return Map.of("event", event, "seen",
                Map.of("before", before, "after", after, "restored", String.valueOf(restored)), "draws", draw(),
                "version", Runtime.version().feature(), "arn", context.getInvokedFunctionArn(), "begun",
                System.getenv("AWS_LAMBDA_INITIALIZATION_TYPE"), "execution", System.getenv("AWS_EXECUTION_ENV"));
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error);
        }
    }

    /** A handler that the function names as a method. */
    public String shout(String text) {
        return text.toUpperCase();
    }
}
