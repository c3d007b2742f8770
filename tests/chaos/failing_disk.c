/* Preloaded into the processes of a run: while the file $CHAOS_FAILING exists, what changes a file below
   $CHAOS_BELOW fails with the error whose number stands in it (EIO, EROFS), as on a disk that is broken. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(type, name, ...)                                   \
    static type (*next)(__VA_ARGS__);                           \
    if (!next) next = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* The error that a change of this path is to have; 0 for none. */
static int error_at(const char *path) {
    const char *below = getenv("CHAOS_BELOW"), *failing = getenv("CHAOS_FAILING");
    if (!below || !failing || !path || strncmp(path, below, strlen(below))) return 0;
    char text[16] = {0};
    int file = (int)syscall(SYS_openat, AT_FDCWD, failing, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    return length > 0 ? atoi(text) : 0;
}

static int fails(const char *path) {
    int before = errno, error = error_at(path);
    errno = error ? error : before;
    return error;
}

static int fails_open(int file) {
    char name[64], path[4096];
    int before = errno;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

ssize_t write(int file, const void *data, size_t size) {
    NEXT(ssize_t, "write", int, const void *, size_t);
    return fails_open(file) ? -1 : next(file, data, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    NEXT(ssize_t, "writev", int, const struct iovec *, int);
    return fails_open(file) ? -1 : next(file, parts, count);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return fails_open(file) ? -1 : next(file, data, size, offset);
}

int fsync(int file) {
    NEXT(int, "fsync", int);
    return fails_open(file) ? -1 : next(file);
}

int mkdir(const char *path, mode_t mode) {
    NEXT(int, "mkdir", const char *, mode_t);
    return fails(path) ? -1 : next(path, mode);
}

int rename(const char *from, const char *to) {
    NEXT(int, "rename", const char *, const char *);
    return fails(to) ? -1 : next(from, to);
}

#define OPENS(name)                                                                              \
    int name(const char *path, int flags, ...) {                                                 \
        NEXT(int, #name, const char *, int, ...);                                                \
        va_list rest;                                                                            \
        va_start(rest, flags);                                                                   \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                                \
        va_end(rest);                                                                            \
        return (flags & (O_WRONLY | O_RDWR)) && fails(path) ? -1 : next(path, flags, mode);      \
    }

OPENS(open)
OPENS(open64)
