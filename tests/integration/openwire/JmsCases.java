import java.io.Serializable;
import java.util.ArrayList;
import java.util.Enumeration;
import java.util.List;
import javax.jms.*;
import org.apache.activemq.ActiveMQConnection;
import org.apache.activemq.ActiveMQConnectionFactory;
import org.apache.activemq.ActiveMQSession;

/**
 * Programs of an unmodified JMS client. Usage: JmsCases CASE URL QUEUE [ARGUMENT...]
 *
 * Each case prints what it has seen, one fact a line; the test compares.
 */
public class JmsCases {
    static final long PATIENCE_MS = 20_000;
    static final long SILENCE_MS = 300;
    /** Password of all users. Others could read it in a command line. */
    static final String PASSWORD = System.getenv("JMS_PASSWORD");

    static String url;
    static String queue;
    static String[] more;

    interface Case {
        void run() throws Exception;
    }

    public static void main(String[] args) throws Exception {
        url = args[1];
        queue = args[2];
        more = java.util.Arrays.copyOfRange(args, 3, args.length);
        Case chosen = (Case) JmsCases.class.getDeclaredField(args[0].toUpperCase()).get(null);
        try {
            chosen.run();
            System.out.println("done");
        } catch (Throwable error) {
            error.printStackTrace();
        }
        // Threads of a connection that is not closed would keep the program running.
        System.out.flush();
        System.exit(0);
    }

    static ActiveMQConnection connect() throws JMSException {
        return connect(url);
    }

    static ActiveMQConnection connect(String url) throws JMSException {
        ActiveMQConnectionFactory factory = new ActiveMQConnectionFactory(url);
        factory.setTrustAllPackages(true);
        ActiveMQConnection connection = (ActiveMQConnection) factory.createConnection();
        connection.getRedeliveryPolicy().setInitialRedeliveryDelay(10);
        connection.getRedeliveryPolicy().setRedeliveryDelay(10);
        connection.start();
        return connection;
    }

    static void say(Object fact) {
        System.out.println(fact);
    }

    static String text(Message message) throws JMSException {
        return message == null ? "nothing" : ((TextMessage) message).getText();
    }

    static String counted(Message message) throws JMSException {
        if (message == null) {
            return "nothing";
        }
        return text(message) + "/" + message.getIntProperty("JMSXDeliveryCount");
    }

    static void send(int count) throws JMSException {
        Connection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        for (int i = 0; i < count; i++) {
            producer.send(session.createTextMessage("m" + i));
        }
        connection.close();
    }

    static final Case ROUND_TRIP = () -> {
        Connection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        Queue destination = session.createQueue(queue);
        MessageProducer producer = session.createProducer(destination);
        MessageConsumer consumer = session.createConsumer(destination);
        for (int mode : new int[] {DeliveryMode.PERSISTENT, DeliveryMode.NON_PERSISTENT}) {
            TextMessage sent = session.createTextMessage("h\u00e9llo \ud83d\ude00 " + mode);
            sent.setStringProperty("colour", "red");
            sent.setIntProperty("size", 7);
            sent.setJMSCorrelationID("c1");
            sent.setJMSType("greeting");
            producer.send(sent, mode, 7, 0);
            TextMessage got = (TextMessage) consumer.receive(PATIENCE_MS);
            say(sent.getText().equals(got.getText()));
            say(sent.getJMSMessageID().equals(got.getJMSMessageID()));
            say(got.getStringProperty("colour") + " " + got.getIntProperty("size") + " " + got.getJMSCorrelationID());
            say(got.getJMSType() + " " + got.getJMSPriority() + " " + got.getJMSDeliveryMode());
            say(got.getJMSDestination().equals(destination) + " " + got.getJMSRedelivered());
            say(got.getJMSTimestamp() == sent.getJMSTimestamp());
        }
        say(text(consumer.receive(SILENCE_MS)));
        connection.close();
    };

    static final Case KINDS = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        Queue destination = session.createQueue(queue);
        MessageProducer producer = session.createProducer(destination);
        MessageConsumer consumer = session.createConsumer(destination);
        for (boolean compressed : new boolean[] {false, true}) {
            connection.setUseCompression(compressed);
            producer.send(session.createTextMessage("text".repeat(500)));
            producer.send(session.createTextMessage(null));
            BytesMessage bytes = session.createBytesMessage();
            bytes.writeInt(42);
            bytes.writeUTF("bytes");
            producer.send(bytes);
            MapMessage map = session.createMapMessage();
            map.setString("name", "map");
            map.setLong("number", 1L << 40);
            map.setBytes("raw", new byte[] {1, 2});
            producer.send(map);
            producer.send(session.createObjectMessage(new ArrayList<>(List.of("object", 1))));
            StreamMessage stream = session.createStreamMessage();
            stream.writeDouble(1.5);
            stream.writeString("stream");
            producer.send(stream);
            producer.send(session.createMessage());
            say(text(consumer.receive(PATIENCE_MS)).length());
            say(((TextMessage) consumer.receive(PATIENCE_MS)).getText());
            BytesMessage gotBytes = (BytesMessage) consumer.receive(PATIENCE_MS);
            say(gotBytes.readInt() + " " + gotBytes.readUTF());
            MapMessage gotMap = (MapMessage) consumer.receive(PATIENCE_MS);
            say(gotMap.getString("name") + " " + gotMap.getLong("number") + " " + gotMap.getBytes("raw").length);
            say(((ObjectMessage) consumer.receive(PATIENCE_MS)).getObject());
            StreamMessage gotStream = (StreamMessage) consumer.receive(PATIENCE_MS);
            say(gotStream.readDouble() + " " + gotStream.readString());
            Message plain = consumer.receive(PATIENCE_MS);
            say(plain.getClass().getSimpleName());
        }
        connection.close();
    };

    /** Consumes ten messages in a mode; a second consumer must find none. */
    static final Case CONSUME = () -> {
        send(10);
        boolean transacted = more[0].equals("transacted");
        int mode = transacted ? Session.SESSION_TRANSACTED
            : more[0].equals("client") ? Session.CLIENT_ACKNOWLEDGE
            : more[0].equals("dups_ok") ? Session.DUPS_OK_ACKNOWLEDGE
            : more[0].equals("individual") ? ActiveMQSession.INDIVIDUAL_ACKNOWLEDGE : Session.AUTO_ACKNOWLEDGE;
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(transacted, mode);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        StringBuilder got = new StringBuilder();
        for (int i = 0; i < 10; i++) {
            Message message = consumer.receive(PATIENCE_MS);
            got.append(counted(message)).append(' ');
            if (mode == Session.CLIENT_ACKNOWLEDGE ? i == 9 : mode == ActiveMQSession.INDIVIDUAL_ACKNOWLEDGE) {
                message.acknowledge();
            }
            if (transacted && i % 5 == 4) {
                session.commit();
            }
        }
        say(got.toString().trim());
        say(text(consumer.receive(SILENCE_MS)));
        connection.close();
        connection = connect();
        session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        say(text(session.createConsumer(session.createQueue(queue)).receive(SILENCE_MS)));
        connection.close();
    };

    /** Five messages, of which the third is rolled back once; what was sent with it appears once. */
    static final Case THIRD_OF_FIVE = () -> {
        send(5);
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        MessageProducer producer = session.createProducer(session.createQueue(queue + ".out"));
        StringBuilder got = new StringBuilder();
        for (int i = 0; i < 6; i++) {
            Message message = consumer.receive(PATIENCE_MS);
            got.append(counted(message)).append(' ');
            producer.send(session.createTextMessage("out" + i));
            if (i == 2) {
                session.rollback();
            } else {
                session.commit();
            }
        }
        say(got.toString().trim());
        say(counted(consumer.receive(SILENCE_MS)));
        session.rollback();
        connection.close();
        connection = connect();
        session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        consumer = session.createConsumer(session.createQueue(queue + ".out"));
        got = new StringBuilder();
        for (int i = 0; i < 6; i++) {
            got.append(text(consumer.receive(i < 5 ? PATIENCE_MS : SILENCE_MS))).append(' ');
        }
        say(got.toString().trim());
        connection.close();
    };

    /** Rolls back until the client gives up, then reads the dead letter. */
    static final Case DEAD_LETTER = () -> {
        send(2);
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        StringBuilder got = new StringBuilder();
        for (int i = 0; i < 8; i++) {
            got.append(counted(consumer.receive(PATIENCE_MS))).append(' ');
            if (i < 7) {
                session.rollback();
            } else {
                session.commit();
            }
        }
        say(got.toString().trim());
        MessageConsumer dead = session.createConsumer(session.createQueue("DLQ." + queue));
        Message letter = dead.receive(PATIENCE_MS);
        say(counted(letter));
        say(letter.getStringProperty("dlqDeliveryFailureCause").startsWith("java.lang.Throwable: Delivery["));
        session.commit();
        say(text(dead.receive(SILENCE_MS)));
        connection.close();
    };

    /** Consumers that end with messages delivered and not acknowledged: what counts an attempt, and what does not. */
    static final Case CLOSES = () -> {
        send(4);
        for (int round = 0; round < 3; round++) {
            ActiveMQConnection connection = connect();
            Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
            MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
            StringBuilder got = new StringBuilder();
            for (int i = 0; i < 2; i++) {
                got.append(counted(consumer.receive(PATIENCE_MS))).append(' ');
            }
            say(got.toString().trim());
            if (round == 0) {
                session.rollback();
            }
            connection.close();
        }
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        StringBuilder got = new StringBuilder();
        for (int i = 0; i < 4; i++) {
            got.append(counted(consumer.receive(PATIENCE_MS))).append(' ');
        }
        say(got.toString().trim());
        connection.close();
    };

    /** A listener that throws twice for the first message. */
    static final Case LISTENER = () -> {
        send(3);
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        StringBuffer got = new StringBuffer();
        java.util.concurrent.CountDownLatch all = new java.util.concurrent.CountDownLatch(5);
        consumer.setMessageListener(message -> {
            try {
                String counted = counted(message);
                got.append(counted).append(' ');
                all.countDown();
                if (counted.equals("m0/1") || counted.equals("m0/2")) {
                    throw new RuntimeException("on purpose");
                }
            } catch (JMSException error) {
                throw new RuntimeException(error);
            }
        });
        all.await(PATIENCE_MS, java.util.concurrent.TimeUnit.MILLISECONDS);
        say(got.toString().trim());
        connection.close();
    };

    /** Messages that recover() delivers again in a session of CLIENT_ACKNOWLEDGE. */
    static final Case RECOVER = () -> {
        send(3);
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.CLIENT_ACKNOWLEDGE);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        StringBuilder got = new StringBuilder();
        Message message = null;
        for (int i = 0; i < 7; i++) {
            message = consumer.receive(PATIENCE_MS);
            got.append(counted(message)).append(' ');
            if (i == 1 || i == 3) {
                session.recover();
            }
        }
        message.acknowledge();
        say(got.toString().trim());
        connection.close();
        connection = connect();
        session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        say(text(session.createConsumer(session.createQueue(queue)).receive(SILENCE_MS)));
        connection.close();
    };

    static final Case BROWSE = () -> {
        send(5);
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        int[] modes = {Session.AUTO_ACKNOWLEDGE, Session.CLIENT_ACKNOWLEDGE, Session.SESSION_TRANSACTED};
        for (int round = 0; round < 7; round++) {
            connection.getPrefetchPolicy().setQueueBrowserPrefetch(round < 3 ? 500 : round < 6 ? 2 : 0);
            int mode = modes[round % 3];
            session = connection.createSession(mode == Session.SESSION_TRANSACTED, mode);
            QueueBrowser browser = session.createBrowser(session.createQueue(queue));
            StringBuilder got = new StringBuilder();
            for (Enumeration<?> all = browser.getEnumeration(); all.hasMoreElements(); ) {
                got.append(text((Message) all.nextElement())).append(' ');
            }
            say(got.toString().trim());
            browser.close();
        }
        QueueBrowser empty = session.createBrowser(session.createQueue(queue + ".empty"));
        say(empty.getEnumeration().hasMoreElements());
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        say(counted(consumer.receive(PATIENCE_MS)));
        connection.close();
    };

    /** A consumer of prefetch 0, which gets a message only when it asks for one. */
    static final Case PULL = () -> {
        ActiveMQConnection connection = connect(url + "?jms.prefetchPolicy.all=0");
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        say(text(consumer.receiveNoWait()));
        long began = System.currentTimeMillis();
        say(text(consumer.receive(SILENCE_MS)));
        say(System.currentTimeMillis() - began >= SILENCE_MS);
        send(3);
        Session other = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageConsumer second = other.createConsumer(other.createQueue(queue));
        say(text(consumer.receiveNoWait()));
        say(text(second.receive(PATIENCE_MS)));
        say(text(consumer.receive()));
        say(text(consumer.receiveNoWait()));
        connection.close();
    };

    /** Request and reply with a temporary queue: by the same connection, by another one, by a third one that is not the
     * one that has got the request, or by one that is made for the reply. */
    static final Case REPLY = () -> {
        ActiveMQConnection asking = connect();
        ActiveMQConnection answering = more[0].equals("same") ? asking : connect();
        Session answers = answering.createSession(false, Session.AUTO_ACKNOWLEDGE);
        ActiveMQConnection third = more[0].equals("third") ? connect() : answering;
        Session replying = third.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer anonymous = replying.createProducer(null);
        answers.createConsumer(answers.createQueue(queue)).setMessageListener(message -> {
            try {
                TextMessage reply = answers.createTextMessage("re: " + text(message));
                reply.setJMSCorrelationID(message.getJMSMessageID());
                if (more[0].equals("later")) {
                    Connection later = connect();
                    later.createSession(false, Session.AUTO_ACKNOWLEDGE).createProducer(null)
                        .send(message.getJMSReplyTo(), reply);
                    later.close();
                } else {
                    anonymous.send(message.getJMSReplyTo(), reply);
                }
            } catch (JMSException error) {
                say(error);
            }
        });
        Session session = asking.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        int right = 0;
        for (int i = 0; i < 20; i++) {
            TemporaryQueue replies = session.createTemporaryQueue();
            MessageConsumer consumer = session.createConsumer(replies);
            TextMessage question = session.createTextMessage("q" + i);
            question.setJMSReplyTo(replies);
            producer.send(question);
            Message reply = consumer.receive(PATIENCE_MS);
            right += reply.getJMSCorrelationID().equals(question.getJMSMessageID()) && text(reply).equals("re: q" + i)
                ? 1 : 0;
            consumer.close();
            replies.delete();
        }
        say(right);
        answering.close();
        asking.close();
    };

    static final Case TOPIC = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        Topic topic = session.createTopic(queue);
        MessageConsumer all = session.createConsumer(topic);
        MessageConsumer some = session.createConsumer(topic, "size > 1 AND colour = 'red'");
        MessageProducer producer = session.createProducer(topic);
        for (int i = 0; i < 4; i++) {
            TextMessage message = session.createTextMessage("t" + i);
            message.setIntProperty("size", i);
            message.setStringProperty("colour", "red");
            producer.send(message);
        }
        StringBuilder got = new StringBuilder();
        for (int i = 0; i < 4; i++) {
            Message message = all.receive(PATIENCE_MS);
            got.append(text(message)).append(message.getJMSDestination().equals(topic) ? " " : "? ");
        }
        for (int i = 0; i < 3; i++) {
            got.append(text(some.receive(i < 2 ? PATIENCE_MS : SILENCE_MS))).append(' ');
        }
        say(got.toString().trim());
        all.close();
        connection.close();
    };

    static final Case SELECTORS = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        String second = "";
        for (int i = 0; i < 4; i++) {
            TextMessage message = session.createTextMessage("m" + i);
            message.setLongProperty("size", i);
            message.setBooleanProperty("even", i % 2 == 0);
            producer.send(message, DeliveryMode.PERSISTENT, i, 0);
            second = i == 1 ? message.getJMSMessageID() : second;
        }
        String[] selectors = {
            "size BETWEEN 2 AND 2", "NOT even AND JMSPriority > 2", "JMSMessageID = '" + second + "'",
            "JMSDestination = 'queue://" + queue + "'",
        };
        for (String selector : selectors) {
            MessageConsumer consumer = session.createConsumer(session.createQueue(queue), selector);
            say(text(consumer.receive(PATIENCE_MS)));
            consumer.close();
        }
        connection.close();
    };

    interface Attempt {
        void run(ActiveMQConnection connection, Session session) throws Exception;
    }

    static void refused(Attempt attempt) throws Exception {
        ActiveMQConnection connection = connect();
        try {
            attempt.run(connection, connection.createSession(false, Session.AUTO_ACKNOWLEDGE));
            say("accepted");
        } catch (JMSException error) {
            say(error.getClass().getSimpleName() + ": " + error.getMessage());
        }
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        session.createProducer(session.createQueue(queue)).send(session.createTextMessage("still there"));
        connection.close();
    }

    static final Case REFUSED = () -> {
        refused((connection, session) -> session.createConsumer(session.createQueue("a.>")));
        refused((connection, session) -> session.createConsumer(session.createQueue("a,b")));
        refused((connection, session) -> session.createConsumer(session.createTopic("ActiveMQ.Advisory.Queue")));
        refused((connection, session) -> {
            ActiveMQConnection named = (ActiveMQConnection) new ActiveMQConnectionFactory(url).createConnection();
            try {
                named.setClientID("client");
                Session durable = named.createSession(false, Session.AUTO_ACKNOWLEDGE);
                durable.createDurableSubscriber(durable.createTopic("t"), "name");
            } finally {
                named.close();
            }
        });
        refused((connection, session) -> session.createProducer(session.createTopic("ActiveMQ.Advisory.Queue")));
        refused((connection, session) -> session.createProducer(session.createQueue("ActiveMQ.Statistics.Broker")));
        refused((connection, session) -> connection.destroyDestination(
            (org.apache.activemq.command.ActiveMQDestination) session.createQueue("a")));
        refused((connection, session) -> session.createProducer(session.createQueue("a*")));
        refused((connection, session) -> {
            Message message = session.createMessage();
            message.setLongProperty("AMQ_SCHEDULED_DELAY", 1000);
            session.createProducer(session.createQueue(queue)).send(message);
        });
        refused((connection, session) -> {
            Session transacted = connection.createSession(true, Session.SESSION_TRANSACTED);
            Message message = transacted.createMessage();
            message.setLongProperty("AMQ_SCHEDULED_DELAY", 1000);
            transacted.createProducer(transacted.createQueue(queue)).send(message);
            transacted.commit();
        });
        refused((connection, session) -> {
            org.apache.activemq.ActiveMQXAConnectionFactory factory =
                new org.apache.activemq.ActiveMQXAConnectionFactory(url);
            XAConnection xa = factory.createXAConnection();
            try {
                javax.transaction.xa.XAResource resource = xa.createXASession().getXAResource();
                say(resource.recover(javax.transaction.xa.XAResource.TMSTARTRSCAN).length);
                resource.prepare(new javax.transaction.xa.Xid() {
                    public int getFormatId() { return 1; }
                    public byte[] getGlobalTransactionId() { return new byte[] {1}; }
                    public byte[] getBranchQualifier() { return new byte[] {2}; }
                });
            } catch (javax.transaction.xa.XAException error) {
                say("XAException " + error.errorCode);
            } finally {
                xa.close();
            }
        });
    };

    /** Sends a message of each kind, with properties, for a STOMP client. */
    static final Case SEND_TO_STOMP = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        TextMessage text = session.createTextMessage("h\u00e9llo");
        text.setStringProperty("colour", "red");
        text.setIntProperty("size", 7);
        text.setJMSCorrelationID("c1");
        producer.send(text);
        BytesMessage bytes = session.createBytesMessage();
        bytes.writeBytes(new byte[] {0, 1, 2});
        producer.send(bytes);
        connection.close();
    };

    static final Case RECEIVE_FROM_STOMP = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        TextMessage text = (TextMessage) consumer.receive(PATIENCE_MS);
        say(text.getText() + " " + text.getStringProperty("colour") + " " + text.getJMSCorrelationID());
        say(text.getJMSDestination() + " " + text.getJMSPriority());
        BytesMessage bytes = (BytesMessage) consumer.receive(PATIENCE_MS);
        say(bytes.getBodyLength());
        connection.close();
    };

    /** A producer with a window that asks for no answers. */
    static final Case WINDOW = () -> {
        ActiveMQConnection connection = connect(url + "?jms.producerWindowSize=5000&jms.useAsyncSend=true");
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        for (int i = 0; i < 50; i++) {
            producer.send(session.createTextMessage("x".repeat(1000)));
        }
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        int count = 0;
        while (count < 50 && consumer.receive(PATIENCE_MS) != null) {
            count++;
        }
        say(count);
        connection.close();
    };

    /** Sends one persistent message after the other through failures of the broker. */
    static final Case SEND_THROUGH_FAILURES = () -> {
        ActiveMQConnection connection = connect("failover:(" + url + ")?initialReconnectDelay=20&maxReconnectDelay=100");
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        int count = Integer.parseInt(more[0]);
        for (int i = 0; i < count; i++) {
            producer.send(session.createTextMessage("m" + i));
            if (i % 10 == 0) {
                say(i);
                System.out.flush();
            }
        }
        connection.close();
    };

    /** Sends, and repeats what the broker refuses for lack of space or in a drain. Says when that begins. */
    static final Case SEND_THROUGH_REFUSALS = () -> {
        ActiveMQConnection connection = connect("failover:(" + url + ")?initialReconnectDelay=20&maxReconnectDelay=100");
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        boolean wasRefused = false;
        for (int i = 0; i < Integer.parseInt(more[0]); ) {
            TextMessage next = session.createTextMessage("m" + i);
            boolean isRefused = isRefused((c, s) -> producer.send(next));
            if (!isRefused) {
                say(i++);
            } else if (!wasRefused) {
                say("refused");
            }
            System.out.flush();
            wasRefused = isRefused;
            Thread.sleep(isRefused ? 50 : 5);
        }
        connection.close();
    };

    /** Copies in transactions of several sessions through failures of the broker, until each session has got nothing for
     * some time, twice. Keep-alives come fast, so that consumers that stall are noticed within that time. */
    static final Case COPY_THROUGH_FAILURES = () -> {
        int sessions = Integer.parseInt(more[0]);
        String delay = more[1];
        int patienceMs = Integer.parseInt(more[2]);
        ActiveMQConnection connection = connect("failover:(" + url + "?wireFormat.maxInactivityDuration=6000"
            + "&wireFormat.maxInactivityDurationInitalDelay=1000)?initialReconnectDelay=" + delay
            + "&maxReconnectDelay=" + delay);
        java.util.concurrent.atomic.AtomicInteger copied = new java.util.concurrent.atomic.AtomicInteger();
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < sessions; number++) {
            Thread thread = new Thread(() -> {
                try {
                    Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
                    MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
                    MessageProducer producer = session.createProducer(session.createQueue(queue + ".out"));
                    for (int silences = 0; silences < 2; ) {
                        Message message = consumer.receive(patienceMs);
                        if (message == null) {
                            session.rollback();
                            // The client does not notice the loss of a connection that it was about to use until it
                            // sends something.
                            session.createProducer(session.createQueue(queue)).close();
                            silences++;
                            continue;
                        }
                        silences = 0;
                        try {
                            producer.send(session.createTextMessage(text(message)));
                            session.commit();
                            synchronized (System.out) {
                                say(copied.incrementAndGet());
                                System.out.flush();
                            }
                        } catch (TransactionRolledBackException error) {
                            // The client has rolled back itself.
                        } catch (javax.jms.IllegalStateException error) {
                            // The connection was lost in the transaction.
                            session.rollback();
                        }
                    }
                } catch (JMSException error) {
                    synchronized (System.out) {
                        say(error);
                    }
                }
            });
            thread.start();
            threads.add(thread);
        }
        for (Thread thread : threads) {
            thread.join();
        }
        connection.close();
    };

    static final Case SEND_MANY = () -> {
        send(Integer.parseInt(more[0]));
    };

    static ActiveMQConnection connectAs(String user, String password) throws JMSException {
        ActiveMQConnection connection =
            (ActiveMQConnection) new ActiveMQConnectionFactory(url).createConnection(user, password);
        try {
            connection.start();
        } catch (JMSException error) {
            connection.close();
            throw error;
        }
        return connection;
    }

    static void tried(String what, Attempt attempt, String user, String password) {
        try {
            ActiveMQConnection connection = connectAs(user, password);
            try {
                attempt.run(connection, connection.createSession(false, Session.AUTO_ACKNOWLEDGE));
                say(what + " " + user + ": allowed");
            } finally {
                connection.close();
            }
        } catch (Exception error) {
            say(what + " " + user + ": " + error.getClass().getSimpleName());
        }
    }

    /** What users may do: each tries each command. */
    static final Case USERS = () -> {
        String[] users = more[0].split(",");
        tried("login", (connection, session) -> { }, users[0], "wrong");
        for (String user : users) {
            tried("producer", (connection, session) -> session.createProducer(session.createQueue(queue)), user, PASSWORD);
            tried("send", (connection, session) ->
                session.createProducer(null).send(session.createQueue(queue), session.createMessage()), user, PASSWORD);
            tried("composite", (connection, session) -> session.createProducer(null)
                .send(session.createQueue(queue + "," + queue + ".b"), session.createMessage()), user, PASSWORD);
            tried("commit", (connection, session) -> {
                Session transacted = connection.createSession(true, Session.SESSION_TRANSACTED);
                transacted.createProducer(null).send(transacted.createQueue(queue), transacted.createMessage());
                transacted.commit();
            }, user, PASSWORD);
            tried("consumer", (connection, session) -> session.createConsumer(session.createQueue(queue)), user, PASSWORD);
            tried("browser", (connection, session) ->
                session.createBrowser(session.createQueue(queue)).getEnumeration(), user, PASSWORD);
            tried("temporary", (connection, session) ->
                session.createConsumer(session.createTemporaryQueue()), user, PASSWORD);
        }
    };

    /** Request and reply between two users; then a send by a third user, to which no request came. */
    static final Case REPLY_TO_USER = () -> {
        ActiveMQConnection asking = connectAs("asker", PASSWORD);
        ActiveMQConnection answering = connectAs("answerer", PASSWORD);
        Session session = asking.createSession(false, Session.AUTO_ACKNOWLEDGE);
        TemporaryQueue replies = session.createTemporaryQueue();
        MessageConsumer consumer = session.createConsumer(replies);
        TextMessage question = session.createTextMessage("question");
        question.setJMSReplyTo(replies);
        session.createProducer(session.createQueue(queue)).send(question);
        Session answers = answering.createSession(false, Session.AUTO_ACKNOWLEDGE);
        Message got = answers.createConsumer(answers.createQueue(queue)).receive(PATIENCE_MS);
        answers.createProducer(got.getJMSReplyTo()).send(answers.createTextMessage("answer"));
        say(text(consumer.receive(PATIENCE_MS)));
        for (String target : new String[] {"", queue + ".free,temp-queue://"}) {
            ActiveMQConnectionFactory factory = new ActiveMQConnectionFactory(url + "?jms.watchTopicAdvisories=false");
            Connection intruder = factory.createConnection("intruder", PASSWORD);
            Session intruding = intruder.createSession(false, Session.AUTO_ACKNOWLEDGE);
            String name = ((org.apache.activemq.command.ActiveMQDestination) replies).getPhysicalName();
            Destination destination = target.isEmpty() ? new org.apache.activemq.command.ActiveMQTempQueue(name)
                : intruding.createQueue(target + name);
            try {
                intruding.createProducer(null).send(destination, intruding.createTextMessage("forged"));
                say("allowed");
            } catch (JMSException error) {
                say(error.getClass().getSimpleName());
            }
            intruder.close();
        }
        say(text(consumer.receive(SILENCE_MS)));
        asking.close();
        answering.close();
    };

    /** Connects without a password, and says what became of that. */
    static final Case CONNECT = () -> {
        try {
            ActiveMQConnection connection = connect();
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            session.createProducer(session.createQueue(queue)).send(session.createTextMessage("sent"));
            say(text(session.createConsumer(session.createQueue(queue)).receive(PATIENCE_MS)));
            connection.close();
        } catch (JMSException error) {
            say(error.getClass().getSimpleName());
        }
    };

    /** A connection that says nothing for several times its inactivity limit. */
    static final Case IDLE = () -> {
        ActiveMQConnection connection = connect(url + "?wireFormat.maxInactivityDuration=3000");
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        Thread.sleep(14_000);
        session.createProducer(session.createQueue(queue)).send(session.createTextMessage("still there"));
        say(text(consumer.receive(PATIENCE_MS)));
        connection.close();
    };

    /** A message that expires in the client's buffer. */
    static final Case EXPIRE = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        producer.send(session.createTextMessage("short"), DeliveryMode.PERSISTENT, 4, 400);
        producer.send(session.createTextMessage("long"), DeliveryMode.PERSISTENT, 4, 60_000);
        Thread.sleep(1000);
        Message message = consumer.receive(PATIENCE_MS);
        say(text(message) + " " + (message.getJMSExpiration() - message.getJMSTimestamp()));
        say(text(consumer.receive(SILENCE_MS)));
        connection.close();
    };

    static final Case PRIORITIES = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        for (int priority : new int[] {1, 9, 4, 9, 0}) {
            producer.send(session.createTextMessage("p" + priority), DeliveryMode.PERSISTENT, priority, 0);
        }
        MessageConsumer consumer = session.createConsumer(session.createQueue(queue));
        StringBuilder got = new StringBuilder();
        for (int i = 0; i < 5; i++) {
            got.append(text(consumer.receive(PATIENCE_MS))).append(' ');
        }
        say(got.toString().trim());
        connection.close();
    };

    /** Answers requests until a message is none, each in another way: through the session that got it, another
     * connection of its factory, one of another factory, or a new one. A reply that its client refuses is sent again. */
    static final Case ANSWER = () -> {
        ActiveMQConnectionFactory factory = new ActiveMQConnectionFactory("answerer", PASSWORD, url);
        ActiveMQConnectionFactory other = new ActiveMQConnectionFactory("answerer", PASSWORD, url);
        Session[] ways = new Session[4];
        for (int way = 0; way < 3; way++) {
            Connection connection = (way == 2 ? other : factory).createConnection();
            connection.start();
            ways[way] = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        }
        MessageConsumer consumer = ways[0].createConsumer(ways[0].createQueue(queue));
        int[] refused = new int[4];
        say("ready");
        System.out.flush();
        for (int count = 0; ; count++) {
            Message request = consumer.receive(PATIENCE_MS);
            if (request == null || request.getJMSReplyTo() == null) {
                break;
            }
            int way = count % 4;
            Connection later = way == 3 ? factory.createConnection() : null;
            Session session = way == 3 ? later.createSession(false, Session.AUTO_ACKNOWLEDGE) : ways[way];
            TextMessage reply = session.createTextMessage("re: " + text(request));
            for (int tries = 0; tries < 100; tries++) {
                try {
                    session.createProducer(request.getJMSReplyTo()).send(reply);
                    break;
                } catch (InvalidDestinationException error) {
                    refused[way]++;
                    Thread.sleep(10);
                }
            }
            if (later != null) {
                later.close();
            }
        }
        say(refused[0] + " " + refused[1] + " " + refused[2] + " " + refused[3]);
    };

    /** Asks one request after the other, each with a temporary queue of its own. */
    static final Case ASK = () -> {
        Session session = connectAs("asker", PASSWORD).createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        int right = 0;
        for (int i = 0; i < Integer.parseInt(more[0]); i++) {
            TemporaryQueue replies = session.createTemporaryQueue();
            MessageConsumer consumer = session.createConsumer(replies);
            TextMessage question = session.createTextMessage("q" + i);
            question.setJMSReplyTo(replies);
            producer.send(question);
            right += ("re: q" + i).equals(text(consumer.receive(PATIENCE_MS))) ? 1 : 0;
            consumer.close();
            replies.delete();
        }
        producer.send(session.createTextMessage("end"));
        say(right);
    };

    /** Sends messages with properties to several queues, in transactions. */
    static final Case SEND_VARIED = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
        for (int q = 1; q < more.length; q++) {
            MessageProducer producer = session.createProducer(session.createQueue(more[q]));
            for (int i = 0; i < Integer.parseInt(more[0]); i++) {
                TextMessage message = session.createTextMessage("m" + i + "\u00e9".repeat(500));
                message.setStringProperty("colour", i % 2 == 0 ? "red" : "gr\u00fcn: a\nb");
                message.setIntProperty("size", i);
                message.setJMSCorrelationID("c" + i);
                producer.send(message, DeliveryMode.PERSISTENT, i % 10, 0);
                say(described(message));
                if (i % 50 == 49) {
                    session.commit();
                }
            }
            session.commit();
        }
        connection.close();
    };

    /** Receives all messages of several queues, in transactions. */
    static final Case RECEIVE_VARIED = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
        for (int q = 1; q < more.length; q++) {
            MessageConsumer consumer = session.createConsumer(session.createQueue(more[q]));
            for (int i = 0; i < Integer.parseInt(more[0]); i++) {
                say(described((TextMessage) consumer.receive(PATIENCE_MS)));
                if (i % 50 == 49) {
                    session.commit();
                }
            }
            session.commit();
            consumer.close();
        }
        connection.close();
    };

    static String described(TextMessage message) throws JMSException {
        return String.join("|", message.getJMSMessageID(), message.getJMSDestination().toString(),
            "" + message.getJMSPriority(), message.getJMSCorrelationID(), message.getStringProperty("size"),
            message.getStringProperty("colour").replace('\n', '/'), message.getText());
    }

    static boolean isRefused(Attempt attempt) throws Exception {
        try {
            attempt.run(null, null);
            return false;
        } catch (ResourceAllocationException error) {
            return true;
        }
    }

    /** Sends while the broker's disk gets full and has room again: with a consumer, in a transaction, and sending only. */
    static final Case FULL_DISK = () -> {
        ActiveMQConnection connection = connect();
        Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
        MessageProducer producer = session.createProducer(session.createQueue(queue));
        session.createConsumer(session.createQueue(queue + ".other"));
        Session transacted = connection.createSession(true, Session.SESSION_TRANSACTED);
        MessageProducer inside = transacted.createProducer(transacted.createQueue(queue));
        int[] sent = new int[1];
        Attempt next = (c, s) -> {
            producer.send(session.createTextMessage("m" + sent[0]));
            sent[0]++;
        };
        while (!isRefused(next)) {
            if (sent[0] == 1) {
                say("sent");
                System.out.flush();
            }
            Thread.sleep(10);
        }
        int accepted = sent[0];
        inside.send(transacted.createTextMessage("rolled back"));
        try {
            transacted.commit();
            say("committed");
        } catch (ResourceAllocationException error) {
            say(error.getMessage().contains("disk"));
        }
        Thread only = new Thread(() -> {
            try {
                ActiveMQConnection sending = connect();
                Session other = sending.createSession(false, Session.AUTO_ACKNOWLEDGE);
                MessageProducer waiting = other.createProducer(other.createQueue(queue + ".waiting"));
                waiting.send(other.createTextMessage("w0"));
                waiting.send(other.createTextMessage("w1"));
                sending.close();
            } catch (JMSException error) {
                say(error);
            }
        });
        only.start();
        say("refused");
        System.out.flush();
        while (isRefused(next)) {
            Thread.sleep(10);
        }
        inside.send(transacted.createTextMessage("m" + sent[0]++));
        transacted.commit();
        only.join(PATIENCE_MS);
        say(sent[0]);
        connection.close();
    };
}
