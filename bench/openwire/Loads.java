import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.util.Arrays;
import java.util.BitSet;
import java.util.Random;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicInteger;
import javax.jms.*;
import org.apache.activemq.ActiveMQConnectionFactory;

/**
 * Loads of bench.openwire, by the unmodified ActiveMQ client.
 *
 * Each line of the input is a load: NAME URL QUEUE MESSAGES SEED. It is answered by one line: seconds, processor
 * seconds of this program, and the median latency in microseconds (0 if the load has none). The queue must be new. The
 * clock runs from the first send until the last message is received, and confirmed where the load waits for that. Then
 * each message must have come once, with its body.
 */
public final class Loads {
    static final int BODY_BYTES = 1024;
    static final int BODY_KINDS = 16;
    static final int AHEAD = 50_000; // the producer waits when it is this far ahead of the consumer
    static final int SESSIONS = 10;
    static final int FILLED_AT_ONCE = 100;
    static final long PATIENCE_MS = 60_000;
    static final byte[][] BODIES = new byte[BODY_KINDS][BODY_BYTES];

    final String url;
    final String queue;
    final int messages;
    final int[] priorities;
    final AtomicInteger received = new AtomicInteger();
    final BitSet seen = new BitSet();
    long started;
    long ended;
    long latencyNanos;

    public static void main(String[] arguments) throws Exception {
        Random dice = new Random(1);
        for (byte[] body : BODIES) dice.nextBytes(body);
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = input.readLine()) != null; ) {
            String[] words = line.split(" ");
            Loads load = new Loads(words[1], words[2], Integer.parseInt(words[3]), Long.parseLong(words[4]));
            System.gc();
            long before = processorNanos();
            try {
                load.run(words[0]);
            } catch (Throwable error) {
                // Threads that still wait would keep the program running.
                error.printStackTrace();
                System.exit(1);
            }
            double processor = (processorNanos() - before) / 1e9;
            System.out.println(
                (load.ended - load.started) / 1e9 + " " + processor + " " + load.latencyNanos / 1000.0);
        }
    }

    Loads(String url, String queue, int messages, long seed) {
        this.url = url;
        this.queue = queue;
        this.messages = messages;
        priorities = new Random(seed).ints(messages, 0, 10).toArray();
    }

    void run(String name) throws Exception {
        switch (name) {
            case "transient" -> carry(DeliveryMode.NON_PERSISTENT, 0);
            case "persistent" -> carry(DeliveryMode.PERSISTENT, 0);
            case "transacted-10" -> carry(DeliveryMode.PERSISTENT, 10);
            case "transacted-100" -> carry(DeliveryMode.PERSISTENT, 100);
            case "sessions" -> copy();
            case "request" -> request();
            default -> throw new AssertionError(name);
        }
        if (seen.cardinality() != messages) {
            throw new AssertionError(messages + " messages, of which " + seen.cardinality() + " came");
        }
    }

    static long processorNanos() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
            .getProcessCpuTime();
    }

    Connection connect() throws JMSException {
        Connection connection = new ActiveMQConnectionFactory("bench", "bench", url).createConnection();
        connection.start();
        return connection;
    }

    static Session open(Connection connection, boolean isTransacted) throws JMSException {
        return connection.createSession(
            isTransacted, isTransacted ? Session.SESSION_TRANSACTED : Session.AUTO_ACKNOWLEDGE);
    }

    Message make(Session session, int number) throws JMSException {
        BytesMessage message = session.createBytesMessage();
        message.setIntProperty("number", number);
        message.writeBytes(BODIES[number % BODY_KINDS]);
        return message;
    }

    void send(MessageProducer producer, Message message, int number, int mode) throws JMSException {
        producer.send(message, mode, priorities[number], Message.DEFAULT_TIME_TO_LIVE);
    }

    /** Check a message, and return its number. */
    int check(Message message, byte[] buffer) throws JMSException {
        if (message == null) throw new AssertionError("no message came within " + PATIENCE_MS + " ms");
        int number = message.getIntProperty("number");
        int length = ((BytesMessage) message).readBytes(buffer);
        if (length != BODY_BYTES || !Arrays.equals(buffer, BODIES[number % BODY_KINDS])) {
            throw new AssertionError("message " + number + " came with another body");
        }
        synchronized (seen) {
            if (seen.get(number)) throw new AssertionError("message " + number + " came twice");
            seen.set(number);
        }
        return number;
    }

    /** One producer and one consumer, on connections of their own; both commit after `group` messages; 0 is never. */
    void carry(int mode, int group) throws Exception {
        Connection sending = connect();
        Connection receiving = connect();
        Session from = open(sending, group > 0);
        MessageProducer producer = from.createProducer(from.createQueue(queue));
        Session to = open(receiving, group > 0);
        MessageConsumer consumer = to.createConsumer(to.createQueue(queue));
        Callable<Object> receive = () -> {
            byte[] buffer = new byte[BODY_BYTES];
            for (int count = 1; count <= messages; count++) {
                check(consumer.receive(PATIENCE_MS), buffer);
                if (group > 0 && (count % group == 0 || count == messages)) to.commit();
                received.set(count);
            }
            return null;
        };
        Callable<Object> send = () -> {
            for (int number = 0; number < messages; number++) {
                while (number - received.get() > AHEAD) Thread.sleep(1);
                send(producer, make(from, number), number, mode);
                if (group > 0 && ((number + 1) % group == 0 || number + 1 == messages)) from.commit();
            }
            return null;
        };
        measure(receive, send);
        sending.close();
        receiving.close();
    }

    /** Sessions of one connection receive, send and commit, each one message at a time, until a full queue is empty. */
    void copy() throws Exception {
        Connection filling = connect();
        Session from = open(filling, true);
        MessageProducer filler = from.createProducer(from.createQueue(queue));
        for (int number = 0; number < messages; number++) {
            send(filler, make(from, number), number, DeliveryMode.PERSISTENT);
            if ((number + 1) % FILLED_AT_ONCE == 0 || number + 1 == messages) from.commit();
        }
        filling.close();
        Connection connection = connect();
        AtomicInteger left = new AtomicInteger(messages);
        Callable<?>[] copiers = new Callable<?>[SESSIONS];
        for (int each = 0; each < SESSIONS; each++) {
            copiers[each] = () -> {
                Session session = open(connection, true);
                MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
                MessageProducer producer = session.createProducer(session.createQueue(queue + ".copies"));
                byte[] buffer = new byte[BODY_BYTES];
                // Another session may hold the last messages.
                while (left.get() > 0) {
                    Message message = consumer.receive(10);
                    if (message == null) continue;
                    int number = check(message, buffer);
                    send(producer, make(session, number), number, DeliveryMode.PERSISTENT);
                    session.commit();
                    left.decrementAndGet();
                }
                return null;
            };
        }
        measure(copiers);
        connection.close();
    }

    /** One request after the other, answered on a temporary queue. */
    void request() throws Exception {
        Connection asking = connect();
        Connection answering = connect();
        Session from = open(asking, false);
        MessageProducer producer = from.createProducer(from.createQueue(queue));
        Queue replies = from.createTemporaryQueue();
        MessageConsumer consumer = from.createConsumer(replies);
        Session to = open(answering, false);
        MessageProducer answers = to.createProducer(null);
        to.createConsumer(to.createQueue(queue)).setMessageListener(asked -> {
            try {
                Message reply = make(to, asked.getIntProperty("number"));
                reply.setJMSCorrelationID(asked.getJMSMessageID());
                answers.send(asked.getJMSReplyTo(), reply, DeliveryMode.NON_PERSISTENT, asked.getJMSPriority(), 0);
            } catch (JMSException error) {
                // The program that asks will tell that nothing came.
                error.printStackTrace();
            }
        });
        byte[] buffer = new byte[BODY_BYTES];
        long[] latencies = new long[messages];
        started = System.nanoTime();
        for (int number = 0; number < messages; number++) {
            Message message = make(from, number);
            message.setJMSReplyTo(replies);
            long asked = System.nanoTime();
            send(producer, message, number, DeliveryMode.NON_PERSISTENT);
            Message reply = consumer.receive(PATIENCE_MS);
            latencies[number] = System.nanoTime() - asked;
            check(reply, buffer);
        }
        ended = System.nanoTime();
        Arrays.sort(latencies);
        latencyNanos = latencies[messages / 2];
        asking.close();
        answering.close();
    }

    /** Run jobs at the same time, and measure how long they take. */
    void measure(Callable<?>... jobs) throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(jobs.length);
        started = System.nanoTime();
        Future<?>[] results = new Future<?>[jobs.length];
        for (int each = 0; each < jobs.length; each++) results[each] = threads.submit(jobs[each]);
        try {
            for (Future<?> result : results) result.get();
        } catch (ExecutionException error) {
            throw new Exception(error.getCause());
        }
        ended = System.nanoTime();
        threads.shutdown();
    }
}
