import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.lang.reflect.Array;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.Enumeration;
import org.apache.activemq.command.ActiveMQBytesMessage;
import org.apache.activemq.command.ActiveMQMessage;
import org.apache.activemq.command.ActiveMQTextMessage;
import org.apache.activemq.command.DataStructure;
import org.apache.activemq.command.Message;
import org.apache.activemq.command.MessageDispatch;
import org.apache.activemq.command.WireFormatInfo;
import org.apache.activemq.openwire.OpenWireFormat;
import org.apache.activemq.openwire.OpenWireFormatFactory;
import org.apache.activemq.util.ByteSequence;
import org.fusesource.hawtbuf.UTF8Buffer;

/**
 * Reads frames from standard input with ActiveMQ's own marshaller, and writes what it has understood.
 *
 * Each request: an int of length and a frame; an int, and as many names of properties. Each answer: the frame as Java
 * marshals it, with an int of length; the value of each property as text. A frame without names is a MessageDispatch:
 * the answer has one text with all that a JMS program reads of the message, and a message of the same text and
 * properties that Java has made.
 */
public class OpenWireMirror {
    private static final OpenWireFormat FORMAT = new OpenWireFormat(12);

    public static void main(String[] arguments) throws Exception {
        FORMAT.setTightEncodingEnabled(false);
        FORMAT.setCacheEnabled(false);
        FORMAT.setStackTraceEnabled(false);
        DataInputStream in = new DataInputStream(System.in);
        DataOutputStream out = new DataOutputStream(new java.io.BufferedOutputStream(System.out));
        while (true) {
            int size;
            try {
                size = in.readInt();
            } catch (EOFException error) {
                break;
            }
            byte[] frame = new byte[size];
            in.readFully(frame);
            Object command = FORMAT.unmarshal(new ByteSequence(frame));
            int count = in.readInt();
            if (count == 0) {
                Message message = ((MessageDispatch) command).getMessage();
                write(out, read(message).getBytes(StandardCharsets.UTF_8));
                write(out, frame(copy(message)));
            } else {
                write(out, frame(command));
                for (int each = 0; each < count; each++) {
                    write(out, describe(value(command, in.readUTF())).getBytes(StandardCharsets.UTF_8));
                }
            }
        }
        out.flush();
    }

    private static byte[] frame(Object command) throws IOException {
        ByteSequence data = FORMAT.marshal(command);
        byte[] frame = new byte[data.getLength()];
        System.arraycopy(data.getData(), data.getOffset(), frame, 0, frame.length);
        return frame;
    }

    private static void write(DataOutputStream out, byte[] data) throws IOException {
        out.writeInt(data.length);
        out.write(data);
    }

    private static Object value(Object command, String name) throws Exception {
        if (name.equals("agreed")) {
            return agreed((WireFormatInfo) command);
        }
        for (String prefix : new String[] {"get", "is"}) {
            try {
                Method method = command.getClass().getMethod(prefix + name);
                return method.invoke(command);
            } catch (NoSuchMethodException error) {
                continue;
            }
        }
        return "no property " + name;
    }

    /** What a client with default options uses after this offer. */
    private static String agreed(WireFormatInfo offer) throws Exception {
        OpenWireFormat format = (OpenWireFormat) new OpenWireFormatFactory().createWireFormat();
        format.renegotiateWireFormat(offer);
        return "version=" + format.getVersion() + " cache=" + format.isCacheEnabled()
            + " tight=" + format.isTightEncodingEnabled() + " stack=" + format.isStackTraceEnabled()
            + " unsized=" + format.isSizePrefixDisabled() + " frame=" + format.getMaxFrameSize()
            + " inactivity=" + offer.getMaxInactivityDuration();
    }

    private static String describe(Object value) throws IOException {
        if (value == null) {
            return "null";
        }
        if (value instanceof String) {
            return "s:" + hex(((String) value).getBytes(StandardCharsets.UTF_16BE), (String) value);
        }
        if (value instanceof byte[]) {
            return "b:" + hex((byte[]) value);
        }
        if (value instanceof ByteSequence) {
            ByteSequence data = (ByteSequence) value;
            byte[] copy = new byte[data.getLength()];
            System.arraycopy(data.getData(), data.getOffset(), copy, 0, copy.length);
            return "b:" + hex(copy);
        }
        if (value instanceof Throwable) {
            return "t:" + value.getClass().getName() + ":" + describe(((Throwable) value).getMessage());
        }
        if (value instanceof DataStructure) {
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            FORMAT.looseMarshalNestedObject((DataStructure) value, new DataOutputStream(bytes));
            return "d:" + hex(bytes.toByteArray());
        }
        if (value.getClass().isArray()) {
            StringBuilder text = new StringBuilder("a:");
            for (int each = 0; each < Array.getLength(value); each++) {
                text.append(describe(Array.get(value, each))).append(",");
            }
            return text.toString();
        }
        return value.toString();
    }

    /** Surrogates without partners are lost by Java's own encoders, so the characters are written one by one. */
    private static String hex(byte[] ignored, String text) {
        StringBuilder digits = new StringBuilder();
        for (char each : text.toCharArray()) {
            digits.append(String.format("%04x", (int) each));
        }
        return digits.toString();
    }

    private static String hex(byte[] data) {
        StringBuilder digits = new StringBuilder();
        for (byte each : data) {
            digits.append(String.format("%02x", each));
        }
        return digits.toString();
    }

    private static String read(Message message) throws Exception {
        ActiveMQMessage jms = (ActiveMQMessage) message;
        jms.setReadOnlyBody(true);
        StringBuilder text = new StringBuilder();
        text.append("id=").append(jms.getJMSMessageID()).append("\n");
        text.append("destination=").append(jms.getJMSDestination()).append("\n");
        text.append("correlation=").append(describe(jms.getJMSCorrelationID())).append("\n");
        text.append("replyTo=").append(jms.getJMSReplyTo()).append("\n");
        text.append("type=").append(describe(jms.getJMSType())).append("\n");
        text.append("group=").append(describe(jms.getGroupID())).append("\n");
        text.append("priority=").append(jms.getJMSPriority()).append("\n");
        text.append("mode=").append(jms.getJMSDeliveryMode()).append("\n");
        text.append("expiration=").append(jms.getJMSExpiration()).append("\n");
        text.append("timestamp=").append(jms.getJMSTimestamp()).append("\n");
        text.append("redelivered=").append(jms.getJMSRedelivered()).append("\n");
        if (jms instanceof ActiveMQTextMessage) {
            text.append("text=").append(describe(((ActiveMQTextMessage) jms).getText())).append("\n");
        }
        if (jms instanceof ActiveMQBytesMessage) {
            byte[] data = new byte[(int) ((ActiveMQBytesMessage) jms).getBodyLength()];
            ((ActiveMQBytesMessage) jms).readBytes(data);
            text.append("bytes=").append(describe(data)).append("\n");
        }
        for (String name : jms.getProperties().keySet()) {
            Object value = jms.getProperties().get(name);
            if (value instanceof UTF8Buffer) {
                value = value.toString();
            }
            String kind = value == null ? "null" : value.getClass().getSimpleName();
            String shown = value == null ? "null" : value.toString();
            text.append("property=").append(describe(name)).append(" ").append(kind);
            text.append(" ").append(describe(shown)).append("\n");
        }
        return text.toString();
    }

    private static Message copy(Message message) throws Exception {
        ActiveMQMessage from = (ActiveMQMessage) message;
        ActiveMQTextMessage copy = new ActiveMQTextMessage();
        copy.setMessageId(message.getMessageId());
        copy.setProducerId(message.getProducerId());
        copy.setDestination(message.getDestination());
        copy.setProperties(from.getProperties());
        if (from instanceof ActiveMQTextMessage) {
            copy.setText(((ActiveMQTextMessage) from).getText());
        }
        return copy;
    }
}
