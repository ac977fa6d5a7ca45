/* Lays an image's files out for one sandbox and becomes the container runtime that starts it.
 *
 *     launch BASE SIZE INODES LIMITS RUNTIME ARGUMENTS...      in the sandbox's directory
 *     launch DIRECTORY      in an empty one: says why layers in DIRECTORY could not be used, if so
 *
 * `lowers` there names the image's layers, the top one first. They are mounted with uid 0 moved to BASE (a range
 * of 65536 that no other sandbox has), under an in-memory layer of SIZE bytes and INODES files, on `root`. All
 * mounts are in a namespace of this process: they are gone when it is, however it ends. LIMITS, such as
 * "core=0,nofile=1024", are set here and inherited, because the runtime may not lower those of another user. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/mount.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { IDS = 65536, PAGE = 4096 };
/* <sys/mount.h> cannot be had beside <linux/mount.h> with every C library. */
enum { NO_SUID = 2, NO_DEV = 4, BIND = 4096, RECURSIVE = 16384, SLAVE = 1 << 19, DETACH = 2 };
int mount(const char *, const char *, const char *, unsigned long, const void *);
int umount2(const char *, int);

static void fail(const char *doing, const char *what) {
    fprintf(stderr, "cannot %s %s: %s\n", doing, what, strerror(errno));
    exit(125);
}

static void write_map(pid_t pid, const char *file, unsigned base) {
    char path[64], map[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    int fd = open(path, O_WRONLY | O_CLOEXEC), size = snprintf(map, sizeof map, "0 %u %d\n", base, IDS);
    if (fd < 0 || write(fd, map, size) != size) fail("write", path);
    close(fd);
}

/* A user namespace that maps 0 to `base`, as the file `user`. Its owner is `base`, so that what the kernel counts
 * for each user of a namespace's parent is counted for this sandbox; where only root may make one, it is root. */
static int user_namespace(unsigned base, int owned) {
    int ready[2], done[2];
    char byte, path[64];
    if (pipe2(ready, O_CLOEXEC) || pipe2(done, O_CLOEXEC)) fail("make", "a pipe");
    pid_t pid = fork();
    if (pid < 0) fail("fork", "");
    if (pid == 0) {
        close(ready[0]), close(done[1]);
        if (owned && (setgroups(0, NULL) || setresgid(base, base, base) || setresuid(base, base, base))) _exit(1);
        if (unshare(CLONE_NEWUSER)) {
            if (owned) _exit(1);
            fail("make", "a user namespace (is user.max_user_namespaces 0?)");
        }
        if (write(ready[1], "", 1) < 0) _exit(1);
        close(ready[1]);
        _exit(read(done[0], &byte, 1) < 0);
    }
    close(ready[1]), close(done[0]);
    if (read(ready[0], &byte, 1) != 1) {
        waitpid(pid, NULL, 0);
        if (!owned) exit(125);
        return user_namespace(base, 0);
    }
    write_map(pid, "uid_map", base), write_map(pid, "gid_map", base);
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("open", path);
    int file = open("user", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || mount(path, "user", NULL, BIND, NULL)) fail("keep", path);
    close(file), close(ready[0]), close(done[1]);
    waitpid(pid, NULL, 0);
    return fd;
}

/* A mount of a layer, its ids mapped, that is nowhere yet. */
static int mapped(const char *layer, int namespace) {
    struct mount_attr attributes = {
        .attr_set = MOUNT_ATTR_IDMAP | MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID,
        .userns_fd = namespace,
    };
    int tree = syscall(SYS_open_tree, AT_FDCWD, layer, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0) fail("open the layer", layer);
    if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes))
        fail("map the ids of", layer);
    return tree;
}

static void mount_lower(const char *from, const char *at, int namespace) {
    int tree = mapped(from, namespace);
    if (mkdir(at, 0711)) fail("make", at);
    if (syscall(SYS_move_mount, tree, "", AT_FDCWD, at, MOVE_MOUNT_F_EMPTY_PATH)) fail("mount", from);
    close(tree);
}

/* The kernel lets a process into a control group after a grace period (some 8 ms), unless another was let into one
 * just before. The runtime does so about 10 ms from now: have the wait meanwhile, in a child that comes to nothing. */
static void hasten_control_groups(void) {
    if (fork()) return;
    int fd = open("/sys/fs/cgroup/memory/cgroup.procs", O_WRONLY | O_CLOEXEC);
    if (fd < 0) fd = open("/sys/fs/cgroup/cgroup.procs", O_WRONLY | O_CLOEXEC);
    _exit(write(fd, "0", 1) < 0);
}

static void set_limits(char *list) {
    static const struct { const char *name; int resource; } known[] = {
        {"core", RLIMIT_CORE}, {"fsize", RLIMIT_FSIZE}, {"nofile", RLIMIT_NOFILE},
    };
    for (char *name = strtok(list, ","); name; name = strtok(NULL, ",")) {
        char *value = strchr(name, '=');
        size_t i = 0, count = sizeof known / sizeof *known;
        if (value) *value++ = 0;
        while (i < count && strcmp(known[i].name, name)) i++;
        struct rlimit limit;
        if (!value || i == count || getrlimit(known[i].resource, &limit)) errno = EINVAL, fail("limit", name);
        rlim_t wanted = strtoull(value, NULL, 10);
        if (wanted > limit.rlim_max) wanted = limit.rlim_max; /* only privilege raises it */
        if (setrlimit(known[i].resource, &(struct rlimit){wanted, wanted})) fail("limit", name);
    }
}

int main(int argc, char **argv) {
    char line[PAGE], options[PAGE] = "xino=on,upperdir=up/u,workdir=up/w,lowerdir=", at[16];
    if (argc != 2 && argc < 7) return 2;
    unsigned base = argc == 2 ? 1 << 28 : strtoul(argv[1], NULL, 10);
    if (argc > 2) hasten_control_groups();
    /* Slave and not private: what the machine unmounts must not live on in here and keep its disk busy. */
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, RECURSIVE | SLAVE, NULL)) fail("make", "a mount namespace");

    int namespace = user_namespace(base, 1), count = 0;
    if (argc == 2) return mapped(argv[1], namespace) < 0;
    FILE *lowers = fopen("lowers", "re");
    if (!lowers) fail("open", "lowers");
    if (mkdir("l", 0711)) fail("make", "l");
    for (; fgets(line, sizeof line, lowers); count++) {
        line[strcspn(line, "\n")] = 0;
        snprintf(at, sizeof at, "l/%d", count); /* short names: mount() takes one page of them */
        mount_lower(line, at, namespace);
        if (strlen(options) + strlen(at) + 2 > sizeof options) fail("mount", "so many layers");
        sprintf(options + strlen(options), "%s%s", count ? ":" : "", at);
    }
    close(namespace);

    snprintf(line, sizeof line, "size=%s,nr_inodes=%s,mode=755", argv[2], argv[3]);
    if (mkdir("up", 0711) || mount("tmpfs", "up", "tmpfs", NO_SUID | NO_DEV, line)) fail("mount", "the upper layer");
    if (mkdir("up/u", 0755) || mkdir("up/w", 0700) || chown("up/u", base, base)) fail("make", "the upper layer");
    if (mkdir("root", 0711) || mount("overlay", "root", "overlay", NO_SUID | NO_DEV, options))
        fail("mount", "the image's layers");
    /* Where both versions of control groups are mounted, ours are in the first; crun wants to see one. */
    umount2("/sys/fs/cgroup/unified", DETACH);
    set_limits(argv[4]);
    execvp(argv[5], argv + 5);
    fail("run", argv[5]);
}
