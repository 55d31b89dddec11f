/* Speedups: the codec's inner loops, for frames that come once for each message.

   SendReader and AckReader read what SendShape and AckShape (request_shapes.py) read of frames without receipt,
   transaction and other headers that most frames do not have. MessageEncoder encodes usual dispatches as
   ReplyEncoder (replies.py) does. At a byte or field that is not plain they stop, and Python goes on: it alone reports
   errors of a client, and decides the order. Exceptions from here are a lack of memory, or a fault of the program.

   A bytes object has a NUL after its last byte, so a scan for plain bytes, of which NUL is none, ends by itself. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <string.h>

#ifdef Py_GIL_DISABLED
#error "Without the GIL the codec runs in Python."
#endif

#define SEQUENCE_DIGITS 19
#define DISPATCH_DIGITS 10
#define LENGTH_DIGITS 9

/* ---- Bytes of headers ---- */

/* What the value of a header line is. TEXT is any value, in an ACK a short one of ASCII. */
enum Value { TEXT, DESTINATION, LENGTH, PRIORITY, BOOLEAN, ACK_ID, STARTED_ID, VALUE_COUNT };

typedef struct {
    const char *prefix; /* Name and colon; the tuple of the reader keeps them. */
    Py_ssize_t size;
    enum Value value;
} Line;

typedef struct {
    PyObject *source; /* The tuple of (prefix, value) pairs. */
    Line *line;
    Py_ssize_t count;
    unsigned char is_plain[256];
} Lines;

/* Fill `lines` from a tuple of (bytes, int) pairs. Return -1 with an exception if it is anything else. */
static int
Lines_init(Lines *lines, PyObject *source, int allows_space)
{
    Py_ssize_t count = PyTuple_GET_SIZE(source);
    Line *line = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Line));
    if (line == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *pair = PyTuple_GET_ITEM(source, at);
        long value = -1;
        if (PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2 && PyBytes_Check(PyTuple_GET_ITEM(pair, 0))) {
            value = PyLong_AsLong(PyTuple_GET_ITEM(pair, 1));
        }
        if (value < 0 || value >= VALUE_COUNT) {
            PyMem_Free(line);
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_TypeError, "lines are pairs of a prefix and a kind of value");
            }
            return -1;
        }
        line[at].prefix = PyBytes_AS_STRING(PyTuple_GET_ITEM(pair, 0));
        line[at].size = PyBytes_GET_SIZE(PyTuple_GET_ITEM(pair, 0));
        line[at].value = (enum Value)value;
    }
    memset(lines->is_plain, 1, sizeof lines->is_plain);
    for (const char *other = ":\\\r\n"; *other; other++) {
        lines->is_plain[(unsigned char)*other] = 0;
    }
    lines->is_plain[0] = 0;
    lines->is_plain[' '] = (unsigned char)allows_space;
    lines->source = Py_NewRef(source);
    lines->line = line;
    lines->count = count;
    return 0;
}

static void
Lines_clear(Lines *lines)
{
    PyMem_Free(lines->line);
    Py_CLEAR(lines->source);
}

/* Return the first byte after bytes that may be between frames, and a command; NULL if this is another command. */
static const char *
skip_command(const char *p, const char *end, const char *command, Py_ssize_t size)
{
    while (p < end && (*p == '\n' || *p == '\r' || *p == '\0')) {
        p++;
    }
    return end - p >= size && memcmp(p, command, (size_t)size) == 0 ? p + size : NULL;
}

/* Return the first byte that is no plain one of ASCII; NULL if that is after more than `most`. */
static const char *
skip_ascii(const Lines *lines, const char *p, Py_ssize_t most)
{
    const char *start = p;
    while (lines->is_plain[(unsigned char)*p] && (unsigned char)*p < 0x80) {
        p++;
    }
    return p - start <= most ? p : NULL;
}

/* Read 1 to `most` digits, at most 19. Return the first byte after them; NULL if they are more or none. */
static const char *
read_digits(const char *p, int most, unsigned long long *number)
{
    const char *start = p;
    unsigned long long value = 0;
    while (*p >= '0' && *p <= '9' && p - start < most) {
        value = value * 10 + (unsigned long long)(*p++ - '0');
    }
    *number = value;
    return p == start || (*p >= '0' && *p <= '9') ? NULL : p;
}

/* Read arguments of `read`: data, start, into, body_bytes_max. Return -1 with an exception if they are wrong. */
static int
read_arguments(PyObject *const *args, Py_ssize_t count, Py_ssize_t *start, Py_ssize_t *body_bytes_max)
{
    if (count != 4 || !PyBytes_Check(args[0]) || !PyList_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "read takes data, start, into and body_bytes_max");
        return -1;
    }
    *start = PyLong_AsSsize_t(args[1]);
    *body_bytes_max = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (*start < 0 || *start > PyBytes_GET_SIZE(args[0])) {
        PyErr_SetString(PyExc_ValueError, "start is not in data");
        return -1;
    }
    return 0;
}

/* ---- Runs ---- */

/* Commands of one run: the first alone in `into`, until there is a second. */
typedef struct {
    PyObject *into;
    PyObject *make;  /* Class of a run: its key, a list. */
    PyObject *key;   /* Destination or subscription. */
    PyObject *first; /* NULL if no run has begun. */
    PyObject *items; /* The list; NULL before the second. */
} Run;

static void
Run_clear(Run *run)
{
    Py_CLEAR(run->key);
    Py_CLEAR(run->first);
    Py_CLEAR(run->items);
}

/* Begin a run with `command`; `item` is what a list of the run has of it. Return -1 with an exception. */
static int
Run_begin(Run *run, PyObject *key, PyObject *command, PyObject *item)
{
    Run_clear(run);
    if (PyList_Append(run->into, command) < 0) {
        return -1;
    }
    run->key = Py_NewRef(key);
    run->first = Py_NewRef(item);
    return 0;
}

/* Add an item to the run that has begun. Return -1 with an exception. */
static int
Run_add(Run *run, PyObject *item)
{
    if (run->items != NULL) {
        return PyList_Append(run->items, item);
    }
    PyObject *items = PyList_New(2);
    if (items == NULL) {
        return -1;
    }
    PyList_SET_ITEM(items, 0, Py_NewRef(run->first));
    PyList_SET_ITEM(items, 1, Py_NewRef(item));
    PyObject *args[] = {run->key, items};
    PyObject *command = PyObject_Vectorcall(run->make, args, 2, NULL);
    Py_ssize_t size = PyList_GET_SIZE(run->into);
    /* PyList_SetItem takes the reference, also when it fails. */
    if (command == NULL || PyList_SetItem(run->into, size - 1, command) < 0) {
        Py_DECREF(items);
        return -1;
    }
    run->items = items;
    return 0;
}

/* ---- SendReader ---- */

typedef struct {
    PyObject_HEAD
    Lines lines;
    PyObject *send, *send_run, *sent_message; /* Classes. */
    PyObject *find_destination;
    PyObject *priority_line; /* Line of the priority of a SEND that states none. */
    long priority;           /* That priority. */
    Py_ssize_t header_bytes_max;
} SendReader;

static PyObject *
SendReader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *lines, *send, *send_run, *sent_message, *find_destination, *priority_line;
    long priority;
    Py_ssize_t header_bytes_max;
    int allows_space;
    static char *names[] = {"lines", "allows_space", "send", "send_run", "sent_message", "find_destination",
                            "priority_line", "priority", "header_bytes_max", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!pOOOOSln", names, &PyTuple_Type, &lines, &allows_space, &send,
                                     &send_run, &sent_message, &find_destination, &priority_line, &priority,
                                     &header_bytes_max)) {
        return NULL;
    }
    SendReader *self = (SendReader *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (Lines_init(&self->lines, lines, allows_space) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->send = Py_NewRef(send);
    self->send_run = Py_NewRef(send_run);
    self->sent_message = Py_NewRef(sent_message);
    self->find_destination = Py_NewRef(find_destination);
    self->priority_line = Py_NewRef(priority_line);
    self->priority = priority;
    self->header_bytes_max = header_bytes_max;
    return (PyObject *)self;
}

static void
SendReader_dealloc(SendReader *self)
{
    Lines_clear(&self->lines);
    Py_XDECREF(self->send);
    Py_XDECREF(self->send_run);
    Py_XDECREF(self->sent_message);
    Py_XDECREF(self->find_destination);
    Py_XDECREF(self->priority_line);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Head of a SEND. */
typedef struct {
    const char *lines, *lines_end, *destination, *destination_end;
    Py_ssize_t length;
    long priority; /* -1 if it states none. */
    int is_persistent;
    int is_ascii;
} SendHead;

/* Read the lines of a head. Return the first byte of the body; NULL if the head is not plain. */
static const char *
read_send_lines(const Lines *lines, const char *p, const char *end, SendHead *head)
{
    unsigned long long number;
    unsigned char bits = 0;
    head->lines = p;
    head->destination = head->destination_end = NULL;
    head->length = 0;
    head->priority = -1;
    head->is_persistent = 0;
    for (Py_ssize_t at = 0; at < lines->count; at++) {
        const Line *line = &lines->line[at];
        if (end - p < line->size || memcmp(p, line->prefix, (size_t)line->size) != 0) {
            return NULL;
        }
        p += line->size;
        const char *value = p;
        switch (line->value) {
        case LENGTH:
            p = read_digits(p, LENGTH_DIGITS, &number);
            if (p == NULL) {
                return NULL;
            }
            head->length = (Py_ssize_t)number;
            break;
        case PRIORITY:
            if (*p < '0' || *p > '9') {
                return NULL;
            }
            head->priority = *p++ - '0';
            break;
        case BOOLEAN:
            if (end - p >= 4 && memcmp(p, "true", 4) == 0) {
                head->is_persistent = 1;
                p += 4;
            } else if (end - p >= 5 && memcmp(p, "false", 5) == 0) {
                p += 5;
            } else {
                return NULL;
            }
            break;
        default:
            while (lines->is_plain[(unsigned char)*p]) {
                bits |= (unsigned char)*p++;
            }
            if (line->value == DESTINATION) {
                head->destination = value;
                head->destination_end = p;
            }
        }
        if (*p != '\n') {
            return NULL;
        }
        p++;
    }
    head->lines_end = p;
    head->is_ascii = bits < 0x80;
    return *p == '\n' ? p + 1 : NULL;
}

/* Return 1 if bytes are UTF-8, 0 if not, -1 with an exception. */
static int
is_utf8(const char *data, Py_ssize_t size)
{
    PyObject *text = PyUnicode_DecodeUTF8(data, size, NULL);
    if (text == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(text);
    return 1;
}

/* Return the message of a SEND, NULL with an exception. */
static PyObject *
make_message(const SendReader *self, const SendHead *head, const char *body, PyObject *zero)
{
    Py_ssize_t size = head->lines_end - head->lines;
    Py_ssize_t added = head->priority < 0 ? PyBytes_GET_SIZE(self->priority_line) : 0;
    PyObject *message = NULL;
    PyObject *header = PyBytes_FromStringAndSize(NULL, added + size);
    PyObject *content = PyBytes_FromStringAndSize(body, head->length);
    PyObject *priority = PyLong_FromLong(head->priority < 0 ? self->priority : head->priority);
    if (header != NULL && content != NULL && priority != NULL) {
        memcpy(PyBytes_AS_STRING(header), PyBytes_AS_STRING(self->priority_line), (size_t)added);
        memcpy(PyBytes_AS_STRING(header) + added, head->lines, (size_t)size);
        PyObject *args[] = {priority, head->is_persistent ? Py_True : Py_False, zero, header, content};
        message = PyObject_Vectorcall(self->sent_message, args, 5, NULL);
    }
    Py_XDECREF(header);
    Py_XDECREF(content);
    Py_XDECREF(priority);
    return message;
}

static PyObject *
SendReader_read(SendReader *self, PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t start, body_bytes_max;
    if (read_arguments(args, count, &start, &body_bytes_max) < 0) {
        return NULL;
    }
    const char *data = PyBytes_AS_STRING(args[0]);
    const char *end = data + PyBytes_GET_SIZE(args[0]);
    const char *known = NULL; /* Address of `destination`, in `data`. */
    Py_ssize_t known_size = 0;
    PyObject *destination = NULL;
    int was_persistent = 0;
    Run run = {args[2], self->send_run, NULL, NULL, NULL};
    PyObject *zero = PyLong_FromLong(0);
    if (zero == NULL) {
        return NULL;
    }
    while (data + start < end) {
        SendHead head;
        const char *p = skip_command(data + start, end, "SEND\n", 5);
        const char *body = p == NULL ? NULL : read_send_lines(&self->lines, p, end, &head);
        if (body == NULL || head.destination == NULL || end - body <= head.length || body[head.length] != '\0' ||
            head.length > body_bytes_max || body - (data + start) > self->header_bytes_max) {
            break;
        }
        Py_ssize_t size = head.destination_end - head.destination;
        if (known == NULL || size != known_size || memcmp(known, head.destination, (size_t)size) != 0) {
            PyObject *address = PyBytes_FromStringAndSize(head.destination, size);
            if (address == NULL) {
                goto failed;
            }
            PyObject *found = PyObject_CallOneArg(self->find_destination, address);
            Py_DECREF(address);
            if (found == NULL) {
                goto failed;
            }
            if (found == Py_None) {
                Py_DECREF(found);
                break;
            }
            Py_XSETREF(destination, found);
            known = head.destination;
            known_size = size;
        }
        if (!head.is_ascii) {
            int is_valid = is_utf8(head.lines, head.lines_end - head.lines);
            if (is_valid < 0) {
                goto failed;
            }
            if (!is_valid) {
                break;
            }
        }
        PyObject *message = make_message(self, &head, body, zero);
        if (message == NULL) {
            goto failed;
        }
        int result = -1;
        if (run.first != NULL && run.key == destination && head.is_persistent == was_persistent) {
            result = Run_add(&run, message);
        } else {
            PyObject *fields[] = {destination, message};
            PyObject *send = PyObject_Vectorcall(self->send, fields, 2, NULL);
            if (send != NULL) {
                result = Run_begin(&run, destination, send, message);
                Py_DECREF(send);
            }
            was_persistent = head.is_persistent;
        }
        Py_DECREF(message);
        if (result < 0) {
            goto failed;
        }
        start = body + head.length + 1 - data;
    }
    Run_clear(&run);
    Py_XDECREF(destination);
    Py_DECREF(zero);
    return PyLong_FromSsize_t(start);

failed:
    Run_clear(&run);
    Py_XDECREF(destination);
    Py_DECREF(zero);
    return NULL;
}

/* ---- AckReader ---- */

typedef struct {
    PyObject_HEAD
    Lines lines;
    PyObject *ack, *ack_run, *started; /* Classes. */
    Py_ssize_t name_length_max, other_length_max;
} AckReader;

static PyObject *
AckReader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *lines, *ack, *ack_run, *started;
    Py_ssize_t name_length_max, other_length_max;
    static char *names[] = {"lines", "ack", "ack_run", "started", "name_length_max", "other_length_max", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOnn", names, &PyTuple_Type, &lines, &ack, &ack_run, &started,
                                     &name_length_max, &other_length_max)) {
        return NULL;
    }
    AckReader *self = (AckReader *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (Lines_init(&self->lines, lines, 1) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->ack = Py_NewRef(ack);
    self->ack_run = Py_NewRef(ack_run);
    self->started = Py_NewRef(started);
    self->name_length_max = name_length_max;
    self->other_length_max = other_length_max;
    return (PyObject *)self;
}

static void
AckReader_dealloc(AckReader *self)
{
    Lines_clear(&self->lines);
    Py_XDECREF(self->ack);
    Py_XDECREF(self->ack_run);
    Py_XDECREF(self->started);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Id of a dispatch: SEQUENCE.DISPATCH@SUBSCRIPTION. */
typedef struct {
    unsigned long long sequence, dispatch;
    const char *name, *name_end; /* `name` is NULL if there is no id. */
} AckId;

static const char *
read_ack_id(const AckReader *self, const char *p, AckId *id)
{
    p = read_digits(p, SEQUENCE_DIGITS, &id->sequence);
    if (p == NULL) {
        return NULL;
    }
    id->dispatch = 0;
    if (*p == '.') {
        p = read_digits(p + 1, DISPATCH_DIGITS, &id->dispatch);
        if (p == NULL) {
            return NULL;
        }
    }
    if (*p != '@') {
        return NULL;
    }
    id->name = p + 1;
    return id->name_end = skip_ascii(&self->lines, p + 1, self->name_length_max);
}

/* Read the lines of an ACK. Return the first byte after the frame; NULL if it is not plain. */
static const char *
read_ack_lines(const AckReader *self, const char *p, const char *end, AckId *id, AckId *started)
{
    id->name = started->name = NULL;
    for (Py_ssize_t at = 0; at < self->lines.count; at++) {
        const Line *line = &self->lines.line[at];
        if (end - p < line->size || memcmp(p, line->prefix, (size_t)line->size) != 0) {
            return NULL;
        }
        p += line->size;
        if (line->value == ACK_ID) {
            p = read_ack_id(self, p, id);
        } else if (line->value == STARTED_ID) {
            p = read_ack_id(self, p, started);
        } else {
            p = skip_ascii(&self->lines, p, self->other_length_max);
        }
        if (p == NULL || *p != '\n') {
            return NULL;
        }
        p++;
    }
    return end - p >= 2 && p[0] == '\n' && p[1] == '\0' ? p + 2 : NULL;
}

/* Whether both ids name one subscription. */
static int
is_same_name(const AckId *id, const AckId *other)
{
    Py_ssize_t size = id->name_end - id->name;
    return other->name_end - other->name == size && memcmp(id->name, other->name, (size_t)size) == 0;
}

/* Return a Started, NULL with an exception; `name` is the subscription's of `id`. */
static PyObject *
make_started(const AckReader *self, const AckId *started, const AckId *id, PyObject *name)
{
    PyObject *made = NULL;
    PyObject *other = is_same_name(id, started)
                          ? Py_NewRef(name)
                          : PyUnicode_DecodeASCII(started->name, started->name_end - started->name, NULL);
    PyObject *sequence = PyLong_FromUnsignedLongLong(started->sequence);
    PyObject *dispatch = PyLong_FromUnsignedLongLong(started->dispatch);
    if (other != NULL && sequence != NULL && dispatch != NULL) {
        PyObject *args[] = {other, sequence, dispatch};
        made = PyObject_Vectorcall(self->started, args, 3, NULL);
    }
    Py_XDECREF(other);
    Py_XDECREF(sequence);
    Py_XDECREF(dispatch);
    return made;
}

/* Return an Ack, NULL with an exception. */
static PyObject *
make_ack(const AckReader *self, const AckId *id, const AckId *started, PyObject *name)
{
    PyObject *made = NULL;
    PyObject *next = started->name == NULL ? Py_NewRef(Py_None) : make_started(self, started, id, name);
    PyObject *sequence = PyLong_FromUnsignedLongLong(id->sequence);
    PyObject *dispatch = PyLong_FromUnsignedLongLong(id->dispatch);
    if (next != NULL && sequence != NULL && dispatch != NULL) {
        PyObject *args[] = {name, sequence, Py_None, dispatch, next};
        made = PyObject_Vectorcall(self->ack, args, 5, NULL);
    }
    Py_XDECREF(next);
    Py_XDECREF(sequence);
    Py_XDECREF(dispatch);
    return made;
}

static PyObject *
AckReader_read(AckReader *self, PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t start, body_bytes_max;
    if (read_arguments(args, count, &start, &body_bytes_max) < 0) {
        return NULL;
    }
    const char *data = PyBytes_AS_STRING(args[0]);
    const char *end = data + PyBytes_GET_SIZE(args[0]);
    AckId known = {0, 0, NULL, NULL}; /* Id that `name` is of. */
    PyObject *name = NULL;
    Run run = {args[2], self->ack_run, NULL, NULL, NULL};
    while (data + start < end) {
        AckId id, started;
        const char *p = skip_command(data + start, end, "ACK\n", 4);
        p = p == NULL ? NULL : read_ack_lines(self, p, end, &id, &started);
        if (p == NULL || id.name == NULL) {
            break;
        }
        if (name == NULL || !is_same_name(&known, &id)) {
            Py_XSETREF(name, PyUnicode_DecodeASCII(id.name, id.name_end - id.name, NULL));
            if (name == NULL) {
                goto failed;
            }
            known = id;
        }
        PyObject *ack = make_ack(self, &id, &started, name);
        if (ack == NULL) {
            goto failed;
        }
        int is_next = run.first != NULL && run.key == name;
        int result = is_next ? Run_add(&run, ack) : Run_begin(&run, name, ack, ack);
        Py_DECREF(ack);
        if (result < 0) {
            goto failed;
        }
        start = p - data;
    }
    Run_clear(&run);
    Py_XDECREF(name);
    return PyLong_FromSsize_t(start);

failed:
    Run_clear(&run);
    Py_XDECREF(name);
    return NULL;
}

/* ---- MessageEncoder ---- */

enum { SEQUENCE, MESSAGE, DELIVERIES, ATTEMPTS, WAS_LOST, CAUSES, IS_FIRST_OF_GROUP, DELIVERY_FIELDS };
static const char *const delivery_fields[DELIVERY_FIELDS] = {
    "sequence", "message", "deliveries", "attempts", "was_lost", "causes", "is_first_of_group",
};
enum { HEADER, BODY, ARRIVED_MS, FORM, MESSAGE_FIELDS };
static const char *const message_fields[MESSAGE_FIELDS] = {"header", "body", "arrived_ms", "form"};

typedef struct {
    PyObject_HEAD
    PyTypeObject *message, *delivery; /* Classes; `delivery` is that of the last dispatch, or NULL. */
    PyObject *line_end, *frame_end;
    Py_ssize_t message_offsets[MESSAGE_FIELDS];
    Py_ssize_t delivery_offsets[DELIVERY_FIELDS];
} MessageEncoder;

/* Find where objects of a class have their fields. Return 1; 0 if a field is no object in a slot; -1 with an exception. */
static int
find_offsets(PyTypeObject *type, const char *const *names, int count, Py_ssize_t *offsets)
{
    for (int at = 0; at < count; at++) {
        PyObject *found = PyObject_GetAttrString((PyObject *)type, names[at]);
        if (found == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
                return -1;
            }
            PyErr_Clear();
            return 0;
        }
        int is_slot = 0;
        if (Py_IS_TYPE(found, &PyMemberDescr_Type)) {
            PyTypeObject *owner = ((PyDescrObject *)found)->d_type;
            PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
            offsets[at] = member->offset;
            is_slot = PyType_IsSubtype(type, owner) && (member->type == T_OBJECT_EX || member->type == T_OBJECT) &&
                      member->offset >= (Py_ssize_t)sizeof(PyObject) &&
                      member->offset + (Py_ssize_t)sizeof(PyObject *) <= type->tp_basicsize;
        }
        Py_DECREF(found);
        if (!is_slot) {
            return 0;
        }
    }
    return 1;
}

static PyObject *
MessageEncoder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyTypeObject *message;
    PyObject *line_end, *frame_end;
    static char *names[] = {"sent_message", "line_end", "frame_end", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!SS", names, &PyType_Type, &message, &line_end, &frame_end)) {
        return NULL;
    }
    MessageEncoder *self = (MessageEncoder *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->message = (PyTypeObject *)Py_NewRef(message);
    self->line_end = Py_NewRef(line_end);
    self->frame_end = Py_NewRef(frame_end);
    int found = find_offsets(message, message_fields, MESSAGE_FIELDS, self->message_offsets);
    if (found <= 0) {
        Py_DECREF(self);
        if (found == 0) {
            PyErr_SetString(PyExc_TypeError, "fields of the class are not where they can be read");
        }
        return NULL;
    }
    return (PyObject *)self;
}

static void
MessageEncoder_dealloc(MessageEncoder *self)
{
    Py_XDECREF(self->message);
    Py_XDECREF(self->delivery);
    Py_XDECREF(self->line_end);
    Py_XDECREF(self->frame_end);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Return a field, borrowed; NULL if it is not set. */
static PyObject *
field(PyObject *object, Py_ssize_t offset)
{
    return *(PyObject **)((char *)object + offset);
}

/* Read a number that is 0 or more. Return 0 if the field is anything else. */
static int
read_number(PyObject *value, unsigned long long *number)
{
    int overflow;
    if (value == NULL || !PyLong_CheckExact(value)) {
        return 0;
    }
    long long read = PyLong_AsLongLongAndOverflow(value, &overflow);
    *number = (unsigned long long)read;
    return !overflow && read >= 0;
}

/* Text that is being written, or, while `data` is NULL, measured. */
typedef struct {
    char *data;
    Py_ssize_t size;
} Text;

static void
write_bytes(Text *text, const char *data, Py_ssize_t size)
{
    if (text->data != NULL) {
        memcpy(text->data + text->size, data, (size_t)size);
    }
    text->size += size;
}

#define WRITE(text, literal) write_bytes(text, literal, (Py_ssize_t)sizeof(literal) - 1)

typedef struct {
    char digits[20];
    int start;
} Digits;

static void
set_digits(Digits *digits, unsigned long long number)
{
    int at = (int)sizeof digits->digits;
    do {
        digits->digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    digits->start = at;
}

static void
write_digits(Text *text, const Digits *digits)
{
    write_bytes(text, digits->digits + digits->start, (Py_ssize_t)sizeof digits->digits - digits->start);
}

/* Parts of a head that are the same for all messages of one call. */
typedef struct {
    const char *head, *middle, *flags;
    Py_ssize_t head_size, middle_size, flags_size;
    int states_dispatch;
} Shared;

/* What one message adds to them. */
typedef struct {
    Digits sequence, count, attempts, arrived_ms;
    PyObject *header, *body;
} Single;

static void
write_head(Text *text, const Shared *shared, const Single *single)
{
    write_bytes(text, shared->head, shared->head_size);
    write_digits(text, &single->sequence);
    if (shared->middle_size) {
        if (shared->states_dispatch) {
            WRITE(text, ".");
            write_digits(text, &single->count);
        }
        write_bytes(text, shared->middle, shared->middle_size);
        write_digits(text, &single->sequence);
    }
    WRITE(text, "\ntruenext-sequence:");
    write_digits(text, &single->sequence);
    WRITE(text, "\ntruenext-deliveries:");
    write_digits(text, &single->count);
    WRITE(text, "\ntruenext-attempts:");
    write_digits(text, &single->attempts);
    WRITE(text, "\n");
    write_bytes(text, shared->flags, shared->flags_size);
    WRITE(text, "timestamp:");
    write_digits(text, &single->arrived_ms);
    WRITE(text, "\n");
}

/* Read the fields of a dispatch. Return 1; 0 if one is not plain; -1 with an exception. */
static int
read_delivery(MessageEncoder *self, PyObject *delivery, unsigned long long first_count, Single *single)
{
    PyTypeObject *type = Py_TYPE(delivery);
    if (type != self->delivery) {
        Py_ssize_t offsets[DELIVERY_FIELDS];
        int found = find_offsets(type, delivery_fields, DELIVERY_FIELDS, offsets);
        if (found <= 0) {
            return found;
        }
        memcpy(self->delivery_offsets, offsets, sizeof offsets);
        Py_INCREF(type);
        Py_XSETREF(self->delivery, type);
    }
    const Py_ssize_t *offsets = self->delivery_offsets;
    unsigned long long sequence, count, attempts, arrived_ms, form;
    PyObject *message = field(delivery, offsets[MESSAGE]);
    if (!read_number(field(delivery, offsets[DELIVERIES]), &count) || count != first_count ||
        field(delivery, offsets[WAS_LOST]) != Py_False || field(delivery, offsets[CAUSES]) != Py_None ||
        field(delivery, offsets[IS_FIRST_OF_GROUP]) != Py_False || message == NULL ||
        !Py_IS_TYPE(message, self->message) || !read_number(field(delivery, offsets[SEQUENCE]), &sequence) ||
        !read_number(field(delivery, offsets[ATTEMPTS]), &attempts) ||
        !read_number(field(message, self->message_offsets[ARRIVED_MS]), &arrived_ms) ||
        !read_number(field(message, self->message_offsets[FORM]), &form) || form != 0) {
        return 0;
    }
    single->header = field(message, self->message_offsets[HEADER]);
    single->body = field(message, self->message_offsets[BODY]);
    if (single->header == NULL || !PyBytes_CheckExact(single->header) || single->body == NULL ||
        !PyBytes_CheckExact(single->body)) {
        return 0;
    }
    set_digits(&single->sequence, sequence);
    set_digits(&single->count, count);
    set_digits(&single->attempts, attempts);
    set_digits(&single->arrived_ms, arrived_ms);
    return 1;
}

/* Add the parts of a frame: all of them, or, with an exception and -1, none. */
static int
add_frame(const MessageEncoder *self, PyObject *parts, const Shared *shared, const Single *single)
{
    Text text = {NULL, 0};
    write_head(&text, shared, single);
    PyObject *head = PyBytes_FromStringAndSize(NULL, text.size);
    if (head == NULL) {
        return -1;
    }
    text = (Text){PyBytes_AS_STRING(head), 0};
    write_head(&text, shared, single);
    /* A new tuple may start the garbage collection, whose finalizers may drop the message. */
    Py_INCREF(single->header);
    Py_INCREF(single->body);
    PyObject *frame = PyTuple_Pack(5, head, single->header, self->line_end, single->body, self->frame_end);
    Py_DECREF(single->header);
    Py_DECREF(single->body);
    Py_DECREF(head);
    if (frame == NULL) {
        return -1;
    }
    Py_ssize_t size = PyList_GET_SIZE(parts);
    int result = PyList_SetSlice(parts, size, size, frame);
    Py_DECREF(frame);
    return result;
}

static PyObject *
MessageEncoder_encode(MessageEncoder *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7 || !PyList_Check(args[1]) || !PyUnicode_Check(args[2]) || !PyUnicode_Check(args[3]) ||
        !PyUnicode_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError,
                        "encode takes deliveries, parts, head, middle, flags, first_count and states_dispatch");
        return NULL;
    }
    if (!PyList_Check(args[0])) {
        return PyLong_FromLong(0);
    }
    Shared shared;
    Py_ssize_t at = 0;
    unsigned long long first_count = PyLong_AsUnsignedLongLong(args[5]);
    if (first_count == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    shared.states_dispatch = PyObject_IsTrue(args[6]);
    if (shared.states_dispatch < 0 || (shared.head = PyUnicode_AsUTF8AndSize(args[2], &shared.head_size)) == NULL ||
        (shared.middle = PyUnicode_AsUTF8AndSize(args[3], &shared.middle_size)) == NULL ||
        (shared.flags = PyUnicode_AsUTF8AndSize(args[4], &shared.flags_size)) == NULL) {
        return NULL;
    }
    for (; at < PyList_GET_SIZE(args[0]); at++) {
        Single single;
        int found = read_delivery(self, PyList_GET_ITEM(args[0], at), first_count, &single);
        if (found < 0) {
            return NULL;
        }
        if (!found) {
            break;
        }
        if (add_frame(self, args[1], &shared, &single) < 0) {
            return NULL;
        }
    }
    return PyLong_FromSsize_t(at);
}

/* ---- Module ---- */

static PyMethodDef send_reader_methods[] = {
    {"read", (PyCFunction)(void (*)(void))SendReader_read, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject send_reader_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "truenext.wire.stomp._speed.SendReader",
    .tp_basicsize = sizeof(SendReader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = SendReader_new,
    .tp_dealloc = (destructor)SendReader_dealloc,
    .tp_methods = send_reader_methods,
};

static PyMethodDef ack_reader_methods[] = {
    {"read", (PyCFunction)(void (*)(void))AckReader_read, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject ack_reader_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "truenext.wire.stomp._speed.AckReader",
    .tp_basicsize = sizeof(AckReader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = AckReader_new,
    .tp_dealloc = (destructor)AckReader_dealloc,
    .tp_methods = ack_reader_methods,
};

static PyMethodDef message_encoder_methods[] = {
    {"encode", (PyCFunction)(void (*)(void))MessageEncoder_encode, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject message_encoder_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "truenext.wire.stomp._speed.MessageEncoder",
    .tp_basicsize = sizeof(MessageEncoder),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = MessageEncoder_new,
    .tp_dealloc = (destructor)MessageEncoder_dealloc,
    .tp_methods = message_encoder_methods,
};

static struct PyModuleDef speed_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "truenext.wire.stomp._speed",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__speed(void)
{
    PyObject *module = PyModule_Create(&speed_module);
    if (module == NULL) {
        return NULL;
    }
    if (PyModule_AddType(module, &send_reader_type) < 0 || PyModule_AddType(module, &ack_reader_type) < 0 ||
        PyModule_AddType(module, &message_encoder_type) < 0 || PyModule_AddIntMacro(module, TEXT) < 0 ||
        PyModule_AddIntMacro(module, DESTINATION) < 0 || PyModule_AddIntMacro(module, LENGTH) < 0 ||
        PyModule_AddIntMacro(module, PRIORITY) < 0 || PyModule_AddIntMacro(module, BOOLEAN) < 0 ||
        PyModule_AddIntMacro(module, ACK_ID) < 0 || PyModule_AddIntMacro(module, STARTED_ID) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
