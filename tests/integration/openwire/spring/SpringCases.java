import java.util.concurrent.atomic.AtomicInteger;
import javax.jms.*;
import org.apache.activemq.ActiveMQConnectionFactory;
import org.springframework.jms.connection.CachingConnectionFactory;
import org.springframework.jms.core.JmsTemplate;
import org.springframework.jms.listener.DefaultMessageListenerContainer;
import org.springframework.jms.listener.SessionAwareMessageListener;

/** Programs of Spring with the unmodified JMS client. Usage: SpringCases CASE URL QUEUE [ARGUMENT...] */
public final class SpringCases {
    static final long PATIENCE_MS = 20_000;
    static String url;
    static String queue;

    public static void main(String[] args) throws Exception {
        url = args[1];
        queue = args[2];
        try {
            if (args[0].equals("copy")) {
                copy(Integer.parseInt(args[3]));
            } else {
                reply(args[3], Integer.parseInt(args[4]));
            }
            System.out.println("done");
        } catch (Throwable error) {
            error.printStackTrace();
        }
        System.out.flush();
        System.exit(0);
    }

    static ConnectionFactory factory() {
        ActiveMQConnectionFactory factory = new ActiveMQConnectionFactory(url);
        factory.getRedeliveryPolicy().setInitialRedeliveryDelay(10);
        factory.getRedeliveryPolicy().setRedeliveryDelay(10);
        return factory;
    }

    static DefaultMessageListenerContainer container(
        ConnectionFactory factory, SessionAwareMessageListener<TextMessage> listener, int consumers
    ) {
        DefaultMessageListenerContainer container = new DefaultMessageListenerContainer();
        container.setConnectionFactory(factory);
        container.setDestinationName(queue);
        container.setSessionTransacted(true);
        container.setConcurrentConsumers(consumers);
        container.setMessageListener(listener);
        container.afterPropertiesSet();
        container.start();
        return container;
    }

    /** A container whose transacted listeners copy messages, and fail with each tenth one once. */
    static void copy(int count) throws Exception {
        CachingConnectionFactory cached = new CachingConnectionFactory(factory());
        JmsTemplate template = new JmsTemplate(cached);
        for (int i = 0; i < count; i++) {
            String text = "m" + i;
            template.send(queue, session -> session.createTextMessage(text));
        }
        AtomicInteger failures = new AtomicInteger();
        DefaultMessageListenerContainer container = container(factory(), (message, session) -> {
            MessageProducer producer = session.createProducer(session.createQueue(queue + ".out"));
            producer.send(session.createTextMessage(message.getText()));
            producer.close();
            if (message.getText().endsWith("0") && !message.getJMSRedelivered()) {
                failures.incrementAndGet();
                throw new RuntimeException("on purpose");
            }
        }, 3);
        template.setReceiveTimeout(PATIENCE_MS);
        java.util.Set<String> copied = new java.util.HashSet<>();
        int received = 0;
        while (received < count) {
            TextMessage message = (TextMessage) template.receive(queue + ".out");
            if (message == null) {
                break;
            }
            received++;
            copied.add(message.getText());
        }
        template.setReceiveTimeout(300);
        Message more = template.receive(queue + ".out");
        System.out.println(received + " " + copied.size() + " " + failures.get() + " " + (more == null));
        container.shutdown();
        cached.destroy();
    }

    /** Requests of a JmsTemplate; the answer goes through the listener's session, its factory, or another one. */
    static void reply(String way, int count) throws Exception {
        ConnectionFactory answering = factory();
        JmsTemplate same = new JmsTemplate(answering);
        JmsTemplate other = new JmsTemplate(factory());
        DefaultMessageListenerContainer container = container(answering, (message, session) -> {
            Destination replyTo = message.getJMSReplyTo();
            String text = "re: " + message.getText();
            if (way.equals("session")) {
                session.createProducer(replyTo).send(session.createTextMessage(text));
            } else {
                (way.equals("same") ? same : other).send(replyTo, each -> each.createTextMessage(text));
            }
        }, 1);
        JmsTemplate asking = new JmsTemplate(factory());
        asking.setReceiveTimeout(5000);
        int right = 0;
        for (int i = 0; i < count; i++) {
            String text = "q" + i;
            TextMessage reply =
                (TextMessage) asking.sendAndReceive(queue, session -> session.createTextMessage(text));
            right += reply != null && reply.getText().equals("re: " + text) ? 1 : 0;
        }
        System.out.println(right);
        container.shutdown();
    }
}
