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
#include <sys/uio.h>
#include <unistd.h>

static char *below, *failing;

/* Once: a thread may change the environment while another one writes a file. */
__attribute__((constructor)) static void read_environment(void) {
    if (getenv("CHAOS_BELOW")) below = strdup(getenv("CHAOS_BELOW"));
    if (getenv("CHAOS_FAILING")) failing = strdup(getenv("CHAOS_FAILING"));
}

/* Whether a change of this path is to fail; if so, errno says why. */
static int fails(const char *path) {
    if (!below || !failing || !path || strncmp(path, below, strlen(below))) return 0;
    int before = errno, file = (int)syscall(SYS_openat, AT_FDCWD, failing, O_RDONLY | O_CLOEXEC);
    char text[16] = {0};
    if (file >= 0) {
        syscall(SYS_read, file, text, sizeof text - 1);
        syscall(SYS_close, file);
    }
    errno = atoi(text) ? atoi(text) : before;
    return atoi(text);
}

static int fails_open(int file) {
    char name[64], path[4096] = {0};
    int before = errno;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    errno = before;
    return length > 0 && fails(path);
}

#define NEXT(name)                      \
    static __typeof__(name) *next;      \
    if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define CHANGES(type, name, failed, parameters, ...)  \
    type name parameters {                            \
        NEXT(name);                                   \
        return failed ? -1 : next(__VA_ARGS__);       \
    }

CHANGES(ssize_t, write, fails_open(file), (int file, const void *data, size_t size), file, data, size)
CHANGES(ssize_t, writev, fails_open(file), (int file, const struct iovec *parts, int count), file, parts, count)
CHANGES(ssize_t, pwrite64, fails_open(file), (int file, const void *data, size_t size, off64_t offset),
        file, data, size, offset)
CHANGES(int, fsync, fails_open(file), (int file), file)
CHANGES(int, mkdir, fails(path), (const char *path, mode_t mode), path, mode)
CHANGES(int, rename, fails(to), (const char *from, const char *to), from, to)

#define OPENS(name)                                                                          \
    int name(const char *path, int flags, ...) {                                             \
        NEXT(name);                                                                          \
        va_list rest;                                                                        \
        va_start(rest, flags);                                                               \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                            \
        va_end(rest);                                                                        \
        return (flags & (O_WRONLY | O_RDWR)) && fails(path) ? -1 : next(path, flags, mode);  \
    }

OPENS(open)
OPENS(open64)
