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
public final class JmsCases {
    static final long PATIENCE_MS = 20_000;
    static final long SILENCE_MS = 300;

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
        chosen.run();
        System.out.println("done");
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
}
