import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Enumeration;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import javax.jms.*;
import org.apache.activemq.ActiveMQConnection;
import org.apache.activemq.ActiveMQMessageConsumer;
import org.apache.activemq.command.ConsumerControl;
import org.apache.activemq.transport.DefaultTransportListener;
import org.apache.activemq.transport.failover.FailoverTransport;

/**
 * Programs of consumers, of which one run has several: each start of Java takes long. Usage: JmsConsumers CASE,... URL
 * QUEUE. Each case has a queue of its own, and prints "# CASE" first.
 */
public final class JmsConsumers extends JmsCases {
    public static void main(String[] args) throws Exception {
        String[] names = args[0].split(",");
        for (String name : names) {
            url = args[1];
            queue = args[2] + "." + name;
            say("# " + name);
            try {
                ((Case) JmsConsumers.class.getDeclaredField(name.toUpperCase()).get(null)).run();
            } catch (Throwable error) {
                error.printStackTrace();
                say(error);
            }
        }
        say("done");
        System.out.flush();
        // Threads of a connection that is not closed would keep the program running.
        System.exit(0);
    }

    static String received(MessageConsumer consumer, int count) throws JMSException {
        StringBuilder got = new StringBuilder();
        for (int i = 0; i < count; i++) {
            got.append(counted(consumer.receive(PATIENCE_MS))).append(' ');
        }
        return got.toString().trim();
    }

    static Session session(Connection connection) throws JMSException {
        return connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
    }

    /** Two consumers of a temporary topic get what another connection sends to it. */
    static final Case TEMPORARY_TOPIC = () -> {
        ActiveMQConnection asking = connect();
        ActiveMQConnection answering = connect();
        Session session = session(asking);
        TemporaryTopic replies = session.createTemporaryTopic();
        MessageConsumer first = session.createConsumer(replies);
        MessageConsumer second = session.createConsumer(replies);
        TextMessage question = session.createTextMessage("question");
        question.setJMSReplyTo(replies);
        session.createProducer(session.createQueue(queue)).send(question);
        Session answers = session(answering);
        Message got = answers.createConsumer(answers.createQueue(queue)).receive(PATIENCE_MS);
        MessageProducer producer = answers.createProducer(got.getJMSReplyTo());
        producer.send(answers.createTextMessage("r1"));
        producer.send(answers.createTextMessage("r2"));
        say(received(first, 2) + " " + received(second, 2));
        first.close();
        second.close();
        replies.delete();
        try {
            for (int i = 0; i < 100; i++) {
                // The advisory of the end comes on another socket.
                producer.send(answers.createTextMessage("late"));
                Thread.sleep(20);
            }
        } catch (InvalidDestinationException error) {
            say("deleted");
        }
        asking.close();
        answering.close();
    };

    /** Each group goes to one of two consumers, in order, and to the other one when that is closed. */
    static final Case GROUPS = () -> {
        ActiveMQConnection connection = connect();
        Session session = session(connection);
        MessageConsumer[] consumers = new MessageConsumer[2];
        BlockingQueue<String> got = new LinkedBlockingQueue<>();
        for (int i = 0; i < 2; i++) {
            Session each = session(connection);
            consumers[i] = each.createConsumer(each.createQueue(queue));
            int number = i;
            consumers[i].setMessageListener(message -> {
                try {
                    got.add(message.getStringProperty("JMSXGroupID") + " " + number + " " + text(message)
                        + (message.getBooleanProperty("JMSXGroupFirstForConsumer") ? " first" : ""));
                } catch (JMSException error) {
                    got.add(error.toString());
                }
            });
        }
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        for (int round = 0; round < 2; round++) {
            Map<String, List<String>> byGroup = new TreeMap<>();
            for (int i = 0; i < 12; i++) {
                TextMessage message = session.createTextMessage("m" + i);
                message.setStringProperty("JMSXGroupID", "g" + i % 3);
                producer.send(message);
            }
            for (int i = 0; i < 12; i++) {
                String[] parts = got.poll(PATIENCE_MS, TimeUnit.MILLISECONDS).split(" ", 3);
                byGroup.computeIfAbsent(parts[0] + (round == 0 ? "" : " " + parts[1]), key -> new ArrayList<>())
                    .add(parts[2]);
            }
            say(byGroup);
            consumers[0].close();
        }
        connection.close();
    };

    /** Of two exclusive consumers the first gets all messages, and the second the others when that is closed. */
    static final Case EXCLUSIVE = () -> {
        ActiveMQConnection connection = connect();
        MessageConsumer[] consumers = new MessageConsumer[2];
        for (int i = 0; i < 2; i++) {
            Session session = session(connection);
            consumers[i] = session.createConsumer(session.createQueue(queue + "?consumer.exclusive=true"));
        }
        send(6);
        say(received(consumers[0], 3) + ", " + text(consumers[1].receiveNoWait()));
        consumers[0].close();
        say(received(consumers[1], 3));
        connection.close();
    };

    /** The consumer of the higher priority gets all messages that it has room for. */
    static final Case CONSUMER_PRIORITY = () -> {
        ActiveMQConnection connection = connect(url + "?jms.prefetchPolicy.all=3");
        MessageConsumer[] consumers = new MessageConsumer[2];
        for (int i = 0; i < 2; i++) {
            Session session = session(connection);
            consumers[i] = session.createConsumer(session.createQueue(queue + "?consumer.priority=" + 10 * i));
        }
        send(5);
        say(received(consumers[0], 2) + ", " + received(consumers[1], 3));
        connection.close();
    };

    /** A consumer whose prefetch grows and shrinks. */
    static final Case CONSUMER_CONTROL = () -> {
        send(8);
        ActiveMQConnection connection = connect(url + "?jms.prefetchPolicy.all=1");
        Session session = connection.createSession(false, Session.CLIENT_ACKNOWLEDGE);
        ActiveMQMessageConsumer consumer =
            (ActiveMQMessageConsumer) session.createConsumer(session.createQueue(queue));
        StringBuilder sizes = new StringBuilder();
        for (int prefetch : new int[] {1, 4, 2, 6}) {
            ConsumerControl control = new ConsumerControl();
            control.setConsumerId(consumer.getConsumerId());
            control.setDestination((org.apache.activemq.command.ActiveMQDestination) session.createQueue(queue));
            control.setPrefetch(prefetch);
            connection.asyncSendPacket(control);
            int expected = Math.max(prefetch, prefetch == 2 ? 4 : 0);
            for (int i = 0; i < 200 && consumer.getMessageSize() < expected; i++) {
                Thread.sleep(20);
            }
            Thread.sleep(100);
            sizes.append(consumer.getMessageSize()).append(' ');
        }
        say(sizes.toString().trim());
        connection.close();
    };

    /** Acknowledgements that wait at the client while it loses its connection. */
    static final Case OPTIMIZED_FAILOVER = () -> {
        send(30);
        ActiveMQConnection connection = connect("failover:(" + url + ")?initialReconnectDelay=500&jms.optimizeAcknowledge=true");
        Session session = session(connection);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        List<String> got = new ArrayList<>();
        for (int i = 0; i < 10; i++) {
            got.add(text(consumer.receive(PATIENCE_MS)));
        }
        java.util.concurrent.CountDownLatch resumed = new java.util.concurrent.CountDownLatch(1);
        connection.addTransportListener(new DefaultTransportListener() {
            public void transportResumed() {
                resumed.countDown();
            }
        });
        connection.getTransport().narrow(FailoverTransport.class).handleTransportFailure(new IOException("on purpose"));
        // A message that the client hands out before it has noticed the loss is a duplicate to it when it comes again.
        resumed.await(PATIENCE_MS, java.util.concurrent.TimeUnit.MILLISECONDS);
        AtomicInteger unready = unready(connection);
        for (int i = 0; i < 500 && unready.get() > 0; i++) {
            Thread.sleep(20);
        }
        Message message;
        while ((message = consumer.receive(got.size() < 30 ? 5000 : SILENCE_MS)) != null) {
            got.add(text(message));
        }
        connection.close();
        say(got.size() + " " + new java.util.HashSet<>(got).size());
        connection = connect();
        session = session(connection);
        for (String left : new String[] {queue, "DLQ." + queue}) {
            MessageConsumer rest = session.createConsumer(session.createQueue(left));
            while ((message = rest.receive(SILENCE_MS)) != null) {
                say(left + " " + counted(message) + " " + message.getStringProperty("dlqDeliveryFailureCause"));
            }
        }
        connection.close();
    };

    /** Returns the number of consumers, and one, that have not noticed the loss of their connection yet. */
    static AtomicInteger unready(ActiveMQConnection connection) throws ReflectiveOperationException {
        java.lang.reflect.Field unready =
            ActiveMQConnection.class.getDeclaredField("transportInterruptionProcessingComplete");
        unready.setAccessible(true);
        return (AtomicInteger) unready.get(connection);
    }

    /** A client whose threads disagree on whether it recovers, as they can when they notice two lost connections: its
     * consumers are ready, and it waits for that. */
    static final Case STALLED = () -> {
        // On a busy machine the threads may agree by chance.
        for (int i = 0; i < 5 && !stalls(i == 4); i++) { }
    };

    /** Returns whether the client has stalled. Prints what it got if so, and if this is the last attempt. */
    static boolean stalls(boolean isLast) throws Exception {
        ActiveMQConnection connection = connect("failover:(" + url + (url.contains("?") ? "&" : "?") + "wireFormat.maxInactivityDuration=3000"
            + "&wireFormat.maxInactivityDurationInitalDelay=1000)?initialReconnectDelay=20");
        FailoverTransport transport = connection.getTransport().narrow(FailoverTransport.class);
        Session session = session(connection);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        AtomicInteger unready = unready(connection);
        AtomicInteger losses = new AtomicInteger();
        connection.addTransportListener(new DefaultTransportListener() {
            public void transportInterupted() {
                if (losses.incrementAndGet() == 1) {
                    try {
                        // No thread that counts down from here reaches 0, and one that has reached it may go on.
                        unready.set(-100);
                        Thread.sleep(100);
                    } catch (InterruptedException error) {
                        say(error);
                    }
                    transport.getStateTracker().transportInterrupted(connection.getConnectionInfo().getConnectionId());
                }
            }
        });
        transport.handleTransportFailure(new IOException("on purpose"));
        send(2);
        String got = received(consumer, 2);
        boolean hasStalled = losses.get() > 1;
        if (hasStalled || isLast) {
            say(got + " " + hasStalled);
        }
        connection.close();
        return hasStalled;
    }

    /** Consumer of an application server, which runs sessions of a pool. */
    static final Case CONNECTION_CONSUMER = () -> {
        ActiveMQConnection connection = connect();
        BlockingQueue<String> got = new LinkedBlockingQueue<>();
        Session session = session(connection);
        session.setMessageListener(message -> {
            try {
                got.add(counted(message));
            } catch (JMSException error) {
                got.add(error.toString());
            }
        });
        ServerSession server = new ServerSession() {
            public Session getSession() { return session; }
            public void start() { session.run(); }
        };
        ConnectionConsumer consumer =
            connection.createConnectionConsumer(session(connection).createQueue(queue), null, () -> server, 10);
        send(5);
        StringBuilder all = new StringBuilder();
        for (int i = 0; i < 5; i++) {
            all.append(got.poll(PATIENCE_MS, TimeUnit.MILLISECONDS)).append(' ');
        }
        say(all.toString().trim());
        consumer.close();
        connection.close();
        connection = connect();
        Session other = session(connection);
        say(text(other.createConsumer(other.createQueue(queue)).receive(SILENCE_MS)));
        connection.close();
    };

    /** A message that always fails is tried again later, while others pass, and becomes a dead letter. */
    static final Case NON_BLOCKING = () -> {
        send(3);
        ActiveMQConnection connection = connect(url + "?jms.nonBlockingRedelivery=true");
        connection.getRedeliveryPolicy().setMaximumRedeliveries(2);
        connection.getRedeliveryPolicy().setInitialRedeliveryDelay(1000);
        Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
        BlockingQueue<String> got = new LinkedBlockingQueue<>();
        session.createConsumer(session.createQueue(queue)).setMessageListener(message -> {
            try {
                got.add(counted(message));
                if (text(message).equals("m0")) {
                    session.rollback();
                } else {
                    session.commit();
                }
            } catch (JMSException error) {
                got.add(error.toString());
            }
        });
        StringBuilder all = new StringBuilder();
        for (int i = 0; i < 5; i++) {
            all.append(got.poll(PATIENCE_MS, TimeUnit.MILLISECONDS)).append(' ');
        }
        say(all.toString().trim());
        Session other = session(connection);
        MessageConsumer dead = other.createConsumer(other.createQueue("DLQ." + queue));
        say(text(dead.receive(PATIENCE_MS)) + " " + text(dead.receive(SILENCE_MS)));
        connection.close();
    };

    /** A listener's Error ends its thread. Then the connection is closed, or lost; both count an attempt. */
    static final Case ERROR = () -> {
        send(2);
        for (boolean isClosed : new boolean[] {true, false}) {
            ActiveMQConnection connection = connect();
            Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
            BlockingQueue<String> got = new LinkedBlockingQueue<>();
            Thread.UncaughtExceptionHandler usual = Thread.getDefaultUncaughtExceptionHandler();
            Thread.setDefaultUncaughtExceptionHandler((thread, error) -> { });
            session.createConsumer(session.createQueue(queue)).setMessageListener(message -> {
                try {
                    got.add(counted(message));
                } catch (JMSException error) {
                    got.add(error.toString());
                }
                throw new Error("on purpose");
            });
            say(got.poll(PATIENCE_MS, TimeUnit.MILLISECONDS));
            if (isClosed) {
                connection.close();
            } else {
                connection.getTransport().stop();
            }
            Thread.setDefaultUncaughtExceptionHandler(usual);
        }
        ActiveMQConnection connection = connect();
        Session session = session(connection);
        say(received(session.createConsumer(session.createQueue(queue)), 2));
        connection.close();
    };

    /** A browser of more messages than its prefetch. */
    static final Case BROWSE_MANY = () -> {
        send(35);
        ActiveMQConnection connection = connect(url + "?jms.prefetchPolicy.queueBrowserPrefetch=10");
        QueueBrowser browser = session(connection).createBrowser(session(connection).createQueue(queue));
        int shown = 0;
        for (Enumeration<?> all = browser.getEnumeration(); all.hasMoreElements(); shown++) {
            if (!text((Message) all.nextElement()).equals("m" + shown)) {
                say("not in order");
            }
        }
        say(shown);
        connection.close();
    };
}
