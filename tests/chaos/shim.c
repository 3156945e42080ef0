// Loaded before libc (LD_PRELOAD): a disk that is full or broken, as a mapped file says.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

// The layout of disk.py.
struct control {
  int write_errno;  // of pwrite64, which is how SQLite writes and hardly anybody else
  int sync_errno;   // of fsync and fdatasync
  int num_faults;   // how often something was done
};

static struct control nothing;
static volatile struct control *control = &nothing;

__attribute__((constructor)) static void map_control(void) {
  const char *path = getenv("CHAOS_SHIM");
  int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) control = mapped;
}

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
  REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
  if (control->write_errno) {
    control->num_faults++;
    errno = control->write_errno;
    return -1;
  }
  return real(file, data, size, offset);
}

static int before_sync(void) {
  if (!control->sync_errno) return 0;
  control->num_faults++;
  errno = control->sync_errno;
  return -1;
}

int fsync(int file) {
  REAL(int, "fsync", int);
  return before_sync() ? -1 : real(file);
}

int fdatasync(int file) {
  REAL(int, "fdatasync", int);
  return before_sync() ? -1 : real(file);
}
