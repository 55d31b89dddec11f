import java.util.*;
import java.util.concurrent.*;
import javax.jms.*;
import org.apache.activemq.ActiveMQConnection;
import org.apache.activemq.ActiveMQConnectionFactory;
import org.apache.activemq.ActiveMQMessageConsumer;
import org.apache.activemq.RedeliveryPolicy;
import org.apache.activemq.command.ActiveMQMessage;

/**
 * Stages that call the unmodified JMS client as Mats3 does. Usage: StageCases all URL QUEUE
 *
 * A stage has its own connection, and threads with a transacted session each. One thread in three takes interactive
 * messages only. A thread receives a map message, sends others through one producer without a destination, and commits.
 * The map has the stack of those that wait for a reply, and what was done so far.
 */
public final class StageCases {
    static final long PATIENCE_MS = 30_000;
    static final int FLOWS = 30;

    static ActiveMQConnectionFactory factory;
    static String prefix;
    static final List<Stage> stages = new ArrayList<>();

    /** Says that a message shall be a dead letter at once. */
    static final class Refused extends Exception {}

    interface Work {
        void run(Step step) throws Exception;
    }

    public static void main(String[] args) throws Exception {
        factory = new ActiveMQConnectionFactory(args[1]);
        factory.getRedeliveryPolicy().setInitialRedeliveryDelay(10);
        factory.getRedeliveryPolicy().setRedeliveryDelay(10);
        prefix = args[2] + ".";
        try {
            flows();
            end();
            failures();
            end();
            topic();
            end();
            System.out.println("done");
        } catch (Throwable error) {
            error.printStackTrace();
        }
        System.out.flush();
        System.exit(0);
    }

    static void end() throws Exception {
        for (Stage stage : stages) {
            stage.end();
        }
        stages.clear();
    }

    /** A message in work, and the means to send others in its transaction. */
    static final class Step {
        final Session session;
        final MessageProducer producer;
        final MapMessage message;

        Step(Session session, MessageProducer producer, MapMessage message) {
            this.session = session;
            this.producer = producer;
            this.message = message;
        }

        String done() throws JMSException {
            return message.getString("done");
        }

        void send(Destination to, String stack, String done, int priority) throws JMSException {
            MapMessage next = session.createMapMessage();
            next.setBytes("envelope", stack.getBytes());
            next.setString("done", done);
            next.setStringProperty("trace", done.split(" ")[0]);
            next.setLongProperty("size", stack.length());
            next.setBooleanProperty("audit", true);
            producer.send(to, next, DeliveryMode.PERSISTENT, priority, 0);
        }

        /** Ask another stage, and go on in a third one with its reply. */
        void request(String to, String next) throws JMSException {
            String stack = new String(message.getBytes("envelope"));
            send(session.createQueue(prefix + to), next + "," + stack, done() + " " + here(), message.getJMSPriority());
        }

        void reply() throws JMSException {
            String[] stack = new String(message.getBytes("envelope")).split(",", 2);
            String rest = stack.length > 1 ? stack[1] : "";
            send(session.createQueue(prefix + stack[0]), rest, done() + " " + here(), message.getJMSPriority());
        }

        String here() throws JMSException {
            return ((javax.jms.Queue) message.getJMSDestination()).getQueueName().substring(prefix.length());
        }
    }

    /** The threads of a stage. */
    static final class Stage {
        final Connection connection;
        final List<Thread> threads = new ArrayList<>();
        final List<Session> sessions = new ArrayList<>();
        volatile boolean isEnding;

        Stage(String name, boolean isTopic, int concurrency, Work work) throws JMSException {
            connection = factory.createConnection();
            connection.start();
            for (int i = 0; i < concurrency; i++) {
                Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
                MessageProducer producer = session.createProducer(null);
                Destination from = isTopic ? session.createTopic(prefix + name) : session.createQueue(prefix + name);
                String selector = i % 3 == 2 ? "JMSPriority = 9" : null;
                MessageConsumer consumer = session.createConsumer(from, selector);
                Thread thread = new Thread(() -> loop(session, producer, consumer, work));
                thread.start();
                sessions.add(session);
                threads.add(thread);
            }
            stages.add(this);
        }

        void loop(Session session, MessageProducer producer, MessageConsumer consumer, Work work) {
            try {
                Message message;
                // Closing the session ends the receive, with null.
                while ((message = consumer.receive()) != null) {
                    try {
                        work.run(new Step(session, producer, (MapMessage) message));
                        session.commit();
                    } catch (Refused error) {
                        ActiveMQMessageConsumer refusing = (ActiveMQMessageConsumer) consumer;
                        RedeliveryPolicy usual = refusing.getRedeliveryPolicy();
                        RedeliveryPolicy none = new RedeliveryPolicy();
                        none.setMaximumRedeliveries(0);
                        refusing.setRedeliveryPolicy(none);
                        session.rollback();
                        refusing.setRedeliveryPolicy(usual);
                    } catch (RuntimeException error) {
                        session.rollback();
                    }
                }
            } catch (Exception error) {
                if (!isEnding) {
                    error.printStackTrace();
                    System.exit(1);
                }
            }
        }

        void end() throws Exception {
            isEnding = true;
            for (Session session : sessions) {
                session.close();
            }
            for (Thread thread : threads) {
                thread.join(PATIENCE_MS);
                if (thread.isAlive()) {
                    throw new AssertionError("a thread still waits for a message");
                }
            }
            connection.close();
        }
    }

    static void initiate(String to, String stack, int from, int until) throws JMSException {
        Connection connection = factory.createConnection();
        connection.start();
        Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
        Step step = new Step(session, session.createProducer(null), null);
        for (int i = from; i < until; i++) {
            step.send(session.createQueue(prefix + to), stack, "f" + i, i % 2 == 0 ? 9 : 4);
            session.commit();
        }
        connection.close();
    }

    static final BlockingQueue<String> ended = new LinkedBlockingQueue<>();

    static final Work TERMINATE = step -> ended.add(step.done() + " " + step.message.getIntProperty("JMSXDeliveryCount"));

    static SortedMap<String, Integer> await(int count) throws InterruptedException {
        SortedMap<String, Integer> ends = new TreeMap<>();
        for (int i = 0; i < count; i++) {
            String end = ended.poll(PATIENCE_MS, TimeUnit.MILLISECONDS);
            ends.merge(end == null ? "nothing" : end.replaceFirst("^f\\d+", "f"), 1, Integer::sum);
        }
        return ends;
    }

    /** An endpoint of three stages asks a leaf twice; each flow comes to its end once. */
    static void flows() throws Exception {
        new Stage("main", false, 3, step -> step.request("leaf", "main.1"));
        new Stage("main.1", false, 3, step -> step.request("leaf", "main.2"));
        new Stage("main.2", false, 3, Step::reply);
        new Stage("leaf", false, 3, Step::reply);
        new Stage("end", false, 3, TERMINATE);
        initiate("main", "end", 0, FLOWS);
        System.out.println(await(FLOWS));
        System.out.println(ended.poll(300, TimeUnit.MILLISECONDS));
    }

    /** One flow in three fails once; one is refused, one fails always, one is sent to the dead letters by its stage. */
    static void failures() throws Exception {
        Set<String> failed = ConcurrentHashMap.newKeySet();
        List<String> counts = Collections.synchronizedList(new ArrayList<>());
        new Stage("main", false, 3, step -> {
            switch (step.done()) {
                case "f0":
                    throw new Refused();
                case "f1":
                    counts.add(step.message.getStringProperty("JMSXDeliveryCount"));
                    throw new RuntimeException("fails always");
                case "f2":
                    ((ActiveMQMessage) step.message).setReadOnlyProperties(false);
                    step.message.setStringProperty("cause", "sent by the stage");
                    step.producer.send(step.session.createQueue("DLQ." + prefix + "main"), step.message);
                    return;
                default:
                    if (Integer.parseInt(step.done().substring(1)) % 3 == 0 && failed.add(step.done())) {
                        step.request("leaf", "none");
                        throw new RuntimeException("fails once");
                    }
                    step.reply();
            }
        });
        new Stage("end", false, 3, TERMINATE);
        initiate("main", "end", 0, FLOWS);
        System.out.println(await(FLOWS - 3));
        Connection connection = factory.createConnection();
        connection.start();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageConsumer dead = session.createConsumer(session.createQueue("DLQ." + prefix + "main"));
        SortedSet<String> letters = new TreeSet<>();
        for (int i = 0; i < 3; i++) {
            MapMessage letter = (MapMessage) dead.receive(PATIENCE_MS);
            String cause = letter.getStringProperty("cause");
            letters.add(letter.getString("done") + " " + (cause != null ? cause : letter.propertyExists("dlqDeliveryFailureCause")));
        }
        System.out.println(letters + " " + (dead.receive(300) == null));
        System.out.println(counts);
        MessageConsumer leaf = session.createConsumer(session.createQueue(prefix + "leaf"));
        System.out.println(leaf.receive(300) == null);
        connection.close();
    }

    /** Each of two services that subscribe to a topic gets each event. */
    static void topic() throws Exception {
        new Stage("news", true, 1, TERMINATE);
        new Stage("news", true, 1, TERMINATE);
        Connection connection = factory.createConnection();
        Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
        Step step = new Step(session, session.createProducer(null), null);
        for (int i = 0; i < FLOWS; i++) {
            step.send(session.createTopic(prefix + "news"), "", "f" + i, 4);
        }
        session.commit();
        connection.close();
        System.out.println(await(2 * FLOWS));
    }
}
