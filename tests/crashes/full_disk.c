/* A disk that is full once `set_disk_budget` bytes were written to files below $CRASH_FOLDER. Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

static long budget = -1; /* -1: no limit */
static long written = 0;

void set_disk_budget(long bytes) {
    budget = bytes;
    written = 0;
}

long count_disk_bytes(void) { return written; }

static int is_counted(int handle) {
    const char *folder = getenv("CRASH_FOLDER");
    char link[64], path[4096];
    if (!folder) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* The number of bytes that fit; -1 with ENOSPC if none does. */
static ssize_t reserve(int handle, size_t count) {
    if (!count || !is_counted(handle)) return count;
    if (budget >= 0 && written + (long)count > budget) {
        count = budget > written ? budget - written : 0;
        if (!count) {
            errno = ENOSPC;
            return -1;
        }
    }
    written += count;
    return count;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int handle, const void *data, size_t count) {
    REAL(write);
    ssize_t allowed = reserve(handle, count);
    return allowed < 0 ? allowed : real(handle, data, allowed);
}

ssize_t pwrite(int handle, const void *data, size_t count, off_t offset) {
    REAL(pwrite);
    ssize_t allowed = reserve(handle, count);
    return allowed < 0 ? allowed : real(handle, data, allowed, offset);
}

ssize_t pwrite64(int handle, const void *data, size_t count, off64_t offset) {
    REAL(pwrite64);
    ssize_t allowed = reserve(handle, count);
    return allowed < 0 ? allowed : real(handle, data, allowed, offset);
}

ssize_t writev(int handle, const struct iovec *parts, int count) {
    if (is_counted(handle)) /* a writer may be given less than it asked for: the first part that is not empty */
        for (int n = 0; n < count; n++)
            if (parts[n].iov_len) return write(handle, parts[n].iov_base, parts[n].iov_len);
    REAL(writev);
    return real(handle, parts, count);
}

ssize_t sendfile(int target, int source, off_t *offset, size_t count) {
    REAL(sendfile);
    ssize_t allowed = reserve(target, count > (1 << 20) ? (1 << 20) : count);
    return allowed < 0 ? allowed : real(target, source, offset, allowed);
}

ssize_t sendfile64(int target, int source, off64_t *offset, size_t count) {
    REAL(sendfile64);
    ssize_t allowed = reserve(target, count > (1 << 20) ? (1 << 20) : count);
    return allowed < 0 ? allowed : real(target, source, offset, allowed);
}
