/* What does a process do to the files of one folder, LMDB included?

   Put in front of the system's library (LD_PRELOAD). Calls that change what is below the folder, or sync it, are written
   to a log in the order in which they happen, with the bytes they write; one of them can be made to fail.
   recorded_calls.py reads the log. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, WRITTEN, SYNC, SYNCED, SYNC_FAILED, CREATED, RENAMED, UNLINKED, MADE, MARK, NOT_MODELLED, LOST };

struct entry {
    uint32_t kind;
    uint32_t path_size;
    int64_t number;  /* of a write or sync, for what comes of it; the value of a mark */
    int64_t offset;
    uint64_t size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_size;
static int log_file = -1;
static int64_t last_number;

static long calls, failing_call, failing_calls;
static int failing_error;
static double failing_share;
static char failing_folder[NAME_MAX];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void put(const void *bytes, size_t size) {
    while (size) {
        ssize_t done = syscall(SYS_write, log_file, bytes, size);
        if (done <= 0) abort();
        bytes = (const char *)bytes + done;
        size -= (size_t)done;
    }
}

/* Held: the lock. */
static void note(uint32_t kind, const char *path, int64_t number, int64_t offset, const struct iovec *parts, int count,
                 size_t limit) {
    struct entry entry = {kind, (uint32_t)strlen(path), number, offset, 0};
    for (int n = 0; n < count; n++) entry.size += parts[n].iov_len;
    if (entry.size > limit) entry.size = limit;
    put(&entry, sizeof entry);
    put(path, entry.path_size);
    size_t left = entry.size;
    for (int n = 0; n < count && left; n++) {
        size_t size = parts[n].iov_len < left ? parts[n].iov_len : left;
        put(parts[n].iov_base, size);
        left -= size;
    }
}

/* Relative to the folder; NULL for what is not in it, or in no folder of it. */
static const char *within(const char *path) {
    if (log_file < 0 || strncmp(path, root, root_size)) return NULL;
    if (!path[root_size]) return "";
    if (path[root_size] != '/') return NULL;
    const char *name = path + root_size + 1;
    const char *end = strrchr(name, '/');
    if (!end) {
        struct stat found;
        return !stat(path, &found) && S_ISDIR(found.st_mode) ? name : NULL;
    }
    return strcmp(end, "/lock.mdb") ? name : NULL;
}

static const char *name_of(int file, char *buffer) {
    char link[64];
    if (log_file < 0) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, buffer, PATH_MAX - 1);
    if (size < 0) return NULL;
    buffer[size] = 0;
    return within(buffer);
}

/* Held: the lock. */
static int fails(const char *name) {
    size_t size = strlen(failing_folder);
    if (strncmp(name, failing_folder, size)) return 0;
    long call = calls++;
    return failing_call <= call && call < failing_call + failing_calls;
}

/* ---- For the process itself ---- */

void crash_begin(const char *folder, const char *log, const char *in_folder, long call, long lasts, int error,
                 double share) {
    pthread_mutex_lock(&lock);
    snprintf(root, sizeof root, "%s", folder);
    root_size = strlen(root);
    last_number = 0;
    calls = 0;
    failing_call = call;
    failing_calls = lasts;
    failing_error = error;
    failing_share = share;
    snprintf(failing_folder, sizeof failing_folder, "%s", in_folder);
    log_file = REAL(open)(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    pthread_mutex_unlock(&lock);
}

long crash_end(void) {
    pthread_mutex_lock(&lock);
    close(log_file);
    log_file = -1;
    pthread_mutex_unlock(&lock);
    return calls;
}

void crash_mark(int which, long value) {
    pthread_mutex_lock(&lock);
    note(MARK, "", value, which, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
}

/* ---- Writes ---- */

typedef ssize_t (*write_parts)(int, const struct iovec *, int, off_t);

static ssize_t at_offset(int file, const struct iovec *parts, int count, off_t offset) {
    return syscall(SYS_pwritev, file, parts, count, (long)offset, 0L);
}

static ssize_t at_position(int file, const struct iovec *parts, int count, off_t offset) {
    (void)offset;
    return syscall(SYS_writev, file, parts, count);
}

static ssize_t recorded(int file, const struct iovec *parts, int count, off_t offset, write_parts call) {
    char buffer[PATH_MAX];
    const char *name = name_of(file, buffer);
    if (!name) return call(file, parts, count, offset);
    off_t at = call == at_position ? lseek(file, 0, SEEK_CUR) : offset;
    pthread_mutex_lock(&lock);
    int64_t number = ++last_number;
    if (fails(name)) {
        size_t whole = 0, part;
        for (int n = 0; n < count; n++) whole += parts[n].iov_len;
        part = (size_t)((double)whole * failing_share);
        note(WRITE, name, number, at, parts, count, part);
        /* A full disk takes a part first, and says why it took no more when it is asked again. */
        int is_short = part && failing_error == ENOSPC;
        if (!is_short) note(LOST, name, number, 0, NULL, 0, 0);
        /* What it took it has: the caller may take that for all of it, and be right. */
        if (is_short && fcntl(file, F_GETFL) & O_DSYNC) note(WRITTEN, name, number, 0, NULL, 0, 0);
        size_t left = part;
        for (int n = 0; n < count && left; n++) {
            size_t size = parts[n].iov_len < left ? parts[n].iov_len : left;
            if (syscall(SYS_pwrite64, file, parts[n].iov_base, size, (long)at) < 0) abort();
            at += (off_t)size;
            left -= size;
        }
        pthread_mutex_unlock(&lock);
        errno = failing_error;
        return is_short ? (ssize_t)part : -1;
    }
    note(WRITE, name, number, at, parts, count, SIZE_MAX);
    pthread_mutex_unlock(&lock);
    ssize_t done = call(file, parts, count, offset);
    if (fcntl(file, F_GETFL) & O_DSYNC) {
        pthread_mutex_lock(&lock);
        note(WRITTEN, name, number, 0, NULL, 0, 0);
        pthread_mutex_unlock(&lock);
    }
    return done;
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t offset) {
    struct iovec part = {(void *)bytes, size};
    return recorded(file, &part, 1, offset, at_offset);
}
ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t offset) { return pwrite(file, bytes, size, offset); }
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset) {
    return recorded(file, parts, count, offset, at_offset);
}
ssize_t pwritev64(int file, const struct iovec *parts, int count, off64_t offset) {
    return recorded(file, parts, count, offset, at_offset);
}
ssize_t write(int file, const void *bytes, size_t size) {
    struct iovec part = {(void *)bytes, size};
    return recorded(file, &part, 1, 0, at_position);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    return recorded(file, parts, count, 0, at_position);
}

/* ---- Syncs ---- */

static int synced(int file, long call) {
    char buffer[PATH_MAX];
    const char *name = name_of(file, buffer);
    if (!name) return (int)syscall(call, file);
    pthread_mutex_lock(&lock);
    int64_t number = ++last_number;
    note(SYNC, name, number, 0, NULL, 0, 0);
    if (fails(name)) {
        note(SYNC_FAILED, name, number, 0, NULL, 0, 0);
        pthread_mutex_unlock(&lock);
        errno = failing_error;
        return -1;
    }
    pthread_mutex_unlock(&lock);
    int result = (int)syscall(call, file);
    pthread_mutex_lock(&lock);
    note(result ? SYNC_FAILED : SYNCED, name, number, 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

int fsync(int file) { return synced(file, SYS_fsync); }
int fdatasync(int file) { return synced(file, SYS_fdatasync); }

/* ---- Names ---- */

static int opened(int (*call)(const char *, int, ...), const char *path, int flags, mode_t mode) {
    const char *name = flags & (O_CREAT | O_TRUNC) ? within(path) : NULL;
    if (!name) return call(path, flags, mode);
    pthread_mutex_lock(&lock);
    struct stat found;
    int is_new = flags & O_TRUNC || stat(path, &found);
    int file = call(path, flags, mode);
    if (file >= 0 && is_new) note(CREATED, name, 0, 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
    return file;
}

#define MODE(flags)                     \
    mode_t mode = 0;                    \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list rest;                   \
        va_start(rest, flags);          \
        mode = va_arg(rest, mode_t);    \
        va_end(rest);                   \
    }

int open(const char *path, int flags, ...) {
    MODE(flags)
    return opened(REAL(open), path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    return opened(REAL(open64), path, flags, mode);
}

static int changed(uint32_t kind, const char *path, const char *second, int (*call)(const char *, const char *)) {
    const char *name = within(path);
    if (!name) return call(path, second);
    pthread_mutex_lock(&lock);
    int result = call(path, second);
    if (!result) {
        const char *to = second ? within(second) : NULL;
        struct iovec part = {(void *)to, to ? strlen(to) : 0};
        note(kind, name, 0, 0, &part, 1, SIZE_MAX);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static int really_rename(const char *old, const char *new) { return (int)syscall(SYS_rename, old, new); }
static int really_unlink(const char *path, const char *unused) {
    (void)unused;
    return (int)syscall(SYS_unlink, path);
}

int rename(const char *old, const char *new) { return changed(RENAMED, old, new, really_rename); }
int unlink(const char *path) { return changed(UNLINKED, path, NULL, really_unlink); }
int mkdir(const char *path, mode_t mode) {
    int result = (int)syscall(SYS_mkdir, path, mode);
    const char *name = result ? NULL : within(path);
    if (name) {
        pthread_mutex_lock(&lock);
        note(MADE, name, 0, 0, NULL, 0, 0);
        pthread_mutex_unlock(&lock);
    }
    return result;
}

/* ---- What nobody has thought of ---- */

static void not_modelled(int file, const char *call) {
    char buffer[PATH_MAX];
    if (!name_of(file, buffer)) return;
    pthread_mutex_lock(&lock);
    note(NOT_MODELLED, call, 0, 0, NULL, 0, 0);
    pthread_mutex_unlock(&lock);
}

int ftruncate(int file, off_t size) {
    not_modelled(file, "ftruncate");
    return (int)syscall(SYS_ftruncate, file, size);
}
int ftruncate64(int file, off64_t size) { return ftruncate(file, size); }
int fallocate(int file, int mode, off_t offset, off_t size) {
    not_modelled(file, "fallocate");
    return (int)syscall(SYS_fallocate, file, mode, offset, size);
}
int fallocate64(int file, int mode, off64_t offset, off64_t size) { return fallocate(file, mode, offset, size); }
int posix_fallocate(int file, off_t offset, off_t size) { return fallocate(file, 0, offset, size) ? errno : 0; }
int posix_fallocate64(int file, off64_t offset, off64_t size) { return posix_fallocate(file, offset, size); }
int msync(void *begin, size_t size, int flags) {
    /* Of any mapping: LMDB without WRITEMAP has none that is written to, but for its locks. */
    if (log_file >= 0) {
        pthread_mutex_lock(&lock);
        note(NOT_MODELLED, "msync", 0, 0, NULL, 0, 0);
        pthread_mutex_unlock(&lock);
    }
    return (int)syscall(SYS_msync, begin, size, flags);
}
