/* The sandbox's PID 1: runs commands and moves files for the client at the other end of stdin and stdout, or of the
 * socket that is its argument.
 *
 * A tool call is one frame in and one frame out, so it costs a fork rather than a `docker exec`. Being
 * PID 1 it adopts every orphan, and kill(-1) reaches whatever a command did to escape (setsid, nohup,
 * double fork). Static, so that the image needs to bring nothing, not even a shell for file transfer.
 *
 * Whose word counts: lengths and numbers from the client are trusted, it is the harness. Nothing that
 * comes from a child is: the agent may have rewritten any program in the image. It lives inside the
 * sandbox's memory limit, so stdin and file contents are pumped through and never held.
 *
 * Not here: isolation (namespaces, cgroups, seccomp and capabilities are set up by the backend). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* ---- wire format: the mirror of wire.py; little-endian, as every machine this runs on ---------------- */

enum op { OP_RUN = 1, OP_READ = 2, OP_WRITE = 3, OP_KILL_ALL = 4, OP_STATE = 5 };
enum { REQUEST_SESSION = 1 };                    /* request.flags */
enum { RESULT_TIMED_OUT = 1, RESULT_NO_FORK = 2 }; /* result.flags */

struct request { /* followed by path, prelude, script, body */
    uint8_t op, flags;
    uint16_t mode;        /* of a file that WRITE creates */
    uint32_t timeout_ms;
    uint64_t limit;       /* most bytes of output or file content to send back */
    uint32_t path_len;    /* file, or directory to run in (0: the session's) or for the session to be in */
    uint32_t prelude_len; /* shell code that sets the client's variables */
    uint32_t script_len;
    uint32_t unused;
    uint64_t body_len;    /* stdin, file content, or the session's environment */
};

struct result { /* preceded by any number of (u32 length, bytes), then by a u32 0 */
    int32_t status; /* exit status of a command; errno of anything else */
    uint32_t flags;
    uint64_t head_len; /* how many of the bytes sent precede those dropped */
    uint64_t dropped;
    uint64_t nanoseconds;
};

_Static_assert(sizeof(struct request) == 40 && sizeof(struct result) == 32, "wire.py packs these by hand");

/* ---- state ------------------------------------------------------------------------------------------- */

enum { OWN_ID = 65533, BUFFER = 1 << 16, MAX_ORPHANS = 32, MAX_ENVIRONMENT = 1 << 20 };
/* Descriptors of a shell. High, so that scripts which number their own do not meet them; GO is closed before
 * the script runs, and has one digit because sh cannot name others. */
enum { FD_GO = 9, FD_VARIABLES = 58, FD_SCRIPT = 60, FD_SETUP = 61, FD_ENVIRONMENT = 62, FD_DIRECTORY = 63 };

struct job { /* the one child that the current request is about */
    pid_t pid;
    bool exited;
    int wait_status;
    int out, in;        /* our ends of its pipes; -1 when closed */
    uint64_t body_left; /* bytes of the request's body still in the client's stream */
    size_t chunk_at, chunk_end; /* what of `chunk` the child has not read yet */
};

struct shell { /* started, and waiting for a line on `go` */
    struct job job;
    int go, variables, script;  /* ours to write */
    int environment, directory; /* its to write at the end of a session command */
};

struct output { /* first and last bytes of what a command printed */
    char *head, *tail; /* tail is a ring */
    size_t head_cap, tail_cap;
    uint64_t total;
};

static int client_in, client_out, signals;
static bool separate;                  /* we run as OWN_ID, commands as uid 0 without capabilities */
static char workdir[PATH_MAX] = "/";
static char *session_environment;      /* shell code; NULL until a session command has ended */
static size_t session_environment_len;
static char session_directory[PATH_MAX];
static int orphans[MAX_ORPHANS];       /* pipes that background processes of earlier commands still hold */
static int orphan_count;
static char scratch[BUFFER];
static char chunk[BUFFER];             /* part of a body on its way to the child */
static struct shell spare;             /* for the next session command; job.pid is 0 when there is none */

static void become_supervisor(const char *client);
static void serve(struct request *request);
static int wait_for_events(struct job *job, int timeout_ms);
static void read_client(void *to, size_t size);
static void close_shell(struct shell *shell);

int main(int argc, char **argv) {
    if (getpid() != 1) { /* kill(-1) anywhere else would end the machine's processes */
        fputs("this is the PID 1 of a sandbox and does nothing elsewhere\n", stderr);
        return 2;
    }
    become_supervisor(argc > 1 ? argv[1] : NULL);
    for (;;) {
        struct request request;
        while (!(wait_for_events(NULL, -1) & 1)) {}
        read_client(&request, sizeof request);
        serve(&request);
    }
}

/* ---- talking to the client ---------------------------------------------------------------------------- */

/* When the client is gone nobody can want this sandbox: leaving ends every process in it. */
static void client_gone(void) { _exit(0); }

static void read_client(void *to, size_t size) {
    for (char *at = to; size;) {
        ssize_t got = read(client_in, at, size);
        if (got > 0) {
            at += got, size -= got;
        } else if (got < 0 && errno == EAGAIN) { /* a socket does not block in either direction */
            poll(&(struct pollfd){client_in, POLLIN, 0}, 1, -1);
        } else if (got == 0 || errno != EINTR) {
            client_gone();
        }
    }
}

static void write_client(const void *from, size_t size) {
    for (const char *at = from; size;) {
        ssize_t put = write(client_out, at, size);
        if (put > 0) {
            at += put, size -= put;
        } else if (errno == EAGAIN) { /* never block in write: the client's end must be noticed here as well */
            struct pollfd watch[2] = {{client_out, POLLOUT, 0}, {client_in, 0, 0}};
            poll(watch, 2, -1);
            if (watch[1].revents & (POLLHUP | POLLERR)) client_gone();
        } else if (errno != EINTR) {
            client_gone();
        }
    }
}

static char reply[BUFFER]; /* gathers a short reply into one write */
static size_t reply_len;

static void put(const void *from, size_t size) {
    for (const char *at = from; size;) {
        size_t part = size < sizeof reply - reply_len ? size : sizeof reply - reply_len;
        memcpy(reply + reply_len, at, part);
        reply_len += part, at += part, size -= part;
        if (reply_len == sizeof reply) write_client(reply, reply_len), reply_len = 0;
    }
}

static void put_chunk(const char *from, size_t size) {
    uint32_t length = size;
    if (!size) return; /* a length of 0 would end the reply */
    put(&length, sizeof length);
    put(from, size);
}

static void put_result(struct result result) {
    put(&(uint32_t){0}, sizeof(uint32_t));
    put(&result, sizeof result);
    write_client(reply, reply_len);
    reply_len = 0;
}

/* ---- children: reaping, ending, starting -------------------------------------------------------------- */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void take_signals(void) {
    while (read(signals, scratch, sizeof(struct signalfd_siginfo)) > 0) {}
}

/* Collect the dead. Returns whether anyone is left. */
static bool reap(struct job *job) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (job && pid == job->pid) job->exited = true, job->wait_status = status;
        else if (pid == spare.job.pid) close_shell(&spare);
    }
    return pid == 0;
}

/* End everything but us. One kill(-1) suffices (a fork under a pending SIGKILL fails), the loop waits. */
static void sweep(struct job *job) {
    for (;;) {
        kill(-1, SIGKILL);
        if (!reap(job)) break;
        struct pollfd watch[2] = {{client_in, 0, 0}, {signals, POLLIN, 0}};
        poll(watch, 2, 1);
        if (watch[0].revents & (POLLHUP | POLLERR)) client_gone();
        take_signals();
    }
    while (orphan_count) close(orphans[--orphan_count]);
}

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, text, strlen(text)) < 0) {} /* a kernel without it has nothing to protect */
    close(fd);
}

static void drop_capabilities(uint32_t keep) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{keep, keep, 0}, {0, 0, 0}};
    if (syscall(SYS_capset, &header, data)) _exit(126);
}

/* A connection to the socket at `path`; -1 where it cannot be had, which stdout is told with one byte. */
static int connect_client(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    if (fd >= 0 && !connect(fd, (struct sockaddr *)&address, sizeof address)) return fd;
    if (fd >= 0) close(fd);
    if (write(1, "", 1) < 0) client_gone();
    return -1;
}

static void become_supervisor(const char *client) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    const uint32_t needed = 1u << CAP_SETUID | 1u << CAP_SETGID | 1u << CAP_KILL;

    if (!getcwd(workdir, sizeof workdir)) strcpy(workdir, "/");
    /* Also what keeps a command at uid 0 from regaining the bounding set's capabilities in execve. */
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    memset(data, 0, sizeof data);
    syscall(SYS_capget, &header, data);
    /* A uid of our own, because a command that shares it may kill, trace or starve us (prlimit NOFILE 0). */
    if (getuid() == 0 && (data[0].permitted & needed) == needed) {
        /* Files in /dev are kernel memory that no kill frees: commands could fill the limit and have us killed. */
        if (chown("/dev", OWN_ID, OWN_ID)) {} /* without CAP_CHOWN, or read-only: the backend's to see to */
        prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0);
        if (setgroups(0, NULL) || setresgid(OWN_ID, OWN_ID, OWN_ID) || setresuid(OWN_ID, OWN_ID, OWN_ID)) _exit(125);
        drop_capabilities(needed);
        separate = true;
    }
    /* The files in /proc/1 of a process that is not dumpable belong to root, which is what commands run as:
     * with a uid of our own stay dumpable, so that they are ours. */
    prctl(PR_SET_DUMPABLE, separate, 0, 0, 0);

    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    signal(SIGPIPE, SIG_IGN);
    int connected = client ? connect_client(client) : -1;
    client_in = fcntl(connected < 0 ? 0 : connected, F_DUPFD_CLOEXEC, 100);
    client_out = fcntl(connected < 0 ? 1 : connected, F_DUPFD_CLOEXEC, 100);
    if (connected >= 0) close(connected);
    signals = fcntl(signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK), F_DUPFD_CLOEXEC, 100);
    fcntl(client_out, F_SETFL, fcntl(client_out, F_GETFL) | O_NONBLOCK);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (client_in < 0 || client_out < 0 || signals < 0 || null < 0) _exit(125);
    for (int fd = 0; fd < 3; fd++) dup2(null, fd);
    if (null > 2) close(null);
}

/* In the child: become what the agent is, uid 0 that may do nothing. */
static void become_command(int out, int in) {
    write_file("/proc/self/oom_score_adj", "500"); /* out of memory, the kernel takes this one and not PID 1 */
    close(client_in), close(client_out); /* before the uid is shared: nobody may find these in here */
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);  /* until execve nobody may look into this copy of PID 1 either */
    setsid();
    if (in < 0) in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(in, 0), dup2(out, 1), dup2(out, 2);
    signal(SIGPIPE, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (!separate) return;
    if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0)) _exit(126);
    drop_capabilities(0);
}

/* fork() with pipes. Returns 0 in the child, 1 in the parent, -1 (errno) when no process can be had. With
 * `insist`, what uses up the process limit is ended: it goes, the sandbox goes on. */
static int start(struct job *job, bool piped, bool insist) {
    int out[2], in[2] = {-1, -1};
    *job = (struct job){.out = -1, .in = -1};
    if (pipe2(out, O_CLOEXEC)) return -1;
    if (piped && pipe2(in, O_CLOEXEC)) return close(out[0]), close(out[1]), -1;
    for (int attempt = 0; (job->pid = fork()) < 0 && insist && attempt < 3; attempt++) sweep(NULL);
    if (job->pid == 0) { /* without our ends: it would wait for its own end of file */
        close(out[0]), close(in[1]);
        become_command(out[1], in[0]);
        return 0;
    }
    int reason = errno;
    close(out[1]), job->out = out[0], fcntl(job->out, F_SETFL, O_NONBLOCK);
    if (piped) close(in[0]), job->in = in[1], fcntl(job->in, F_SETFL, O_NONBLOCK);
    errno = reason;
    return job->pid < 0 ? -1 : 1;
}

/* ---- the loop ----------------------------------------------------------------------------------------- */

/* A background process may print for ever: its pipe is emptied into nothing, so that it neither blocks
 * nor dies of SIGPIPE when its command is over. */
static void drain_orphan(int index) {
    ssize_t got = read(orphans[index], scratch, sizeof scratch);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))) return;
    close(orphans[index]);
    orphans[index] = orphans[--orphan_count];
}

/* Sleep until something happens and do the housekeeping. Bits: 1 client sent, 2 output is there, 4 child reads. */
static int wait_for_events(struct job *job, int timeout_ms) {
    bool unread = job && job->chunk_at < job->chunk_end;
    struct pollfd watch[4 + MAX_ORPHANS] = {
        {client_in, !job || (job->body_left && !unread) ? POLLIN : 0, 0},
        {signals, POLLIN, 0},
        {job ? job->out : -1, POLLIN, 0},
        {job ? job->in : -1, unread ? POLLOUT : 0, 0},
    };
    int count = orphan_count;
    for (int i = 0; i < count; i++) watch[4 + i] = (struct pollfd){orphans[i], POLLIN, 0};
    if (poll(watch, 4 + count, timeout_ms) < 0) return 0;
    if (watch[0].revents & (POLLHUP | POLLERR | POLLNVAL)) client_gone();
    if (watch[1].revents) {
        take_signals();
        reap(job);
    }
    for (int i = count; i-- > 0;)
        if (watch[4 + i].revents) drain_orphan(i);
    return (watch[0].revents ? 1 : 0) | (watch[2].revents ? 2 : 0) | (watch[3].revents ? 4 : 0);
}

/* Next part of the request's body, from the client to the child (or to nowhere when it has stopped reading). */
static void move_body(struct job *job, int events) {
    if (events & 1 && job->body_left && job->chunk_at == job->chunk_end) {
        size_t want = job->body_left < sizeof chunk ? job->body_left : sizeof chunk;
        ssize_t got = read(client_in, chunk, want);
        if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) client_gone();
        if (got > 0) job->chunk_at = 0, job->chunk_end = got, job->body_left -= got;
    }
    if (job->chunk_at < job->chunk_end && job->in >= 0) {
        ssize_t put = write(job->in, chunk + job->chunk_at, job->chunk_end - job->chunk_at);
        if (put > 0) job->chunk_at += put;
        else if (errno != EAGAIN && errno != EINTR) close(job->in), job->in = -1;
    } else if (events & 4 && job->in >= 0) { /* watched only for its hang-up: nobody reads any more */
        close(job->in), job->in = -1;
    }
    if (job->in < 0) job->chunk_at = job->chunk_end = 0;
    if (job->in >= 0 && !job->body_left && job->chunk_at == job->chunk_end) close(job->in), job->in = -1;
}

/* Pass the child's input and output along until it ends or `deadline` passes. Returns whether it ended.
 * Its end counts, not that of its pipe, which a background process may keep open. */
static bool pump(struct job *job, uint64_t deadline, void (*take)(void *, const char *, size_t), void *to) {
    if (job->in >= 0 && !job->body_left) close(job->in), job->in = -1;
    while (!job->exited) {
        uint64_t now = now_ns();
        if (now >= deadline) break;
        uint64_t left_ms = (deadline - now) / 1000000 + 1;
        int events = wait_for_events(job, left_ms < INT_MAX ? left_ms : INT_MAX);
        if (events & 2) {
            ssize_t got = read(job->out, scratch, sizeof scratch);
            if (got > 0) take(to, scratch, got);
            else if (got == 0) close(job->out), job->out = -1;
        }
        move_body(job, events);
    }
    return job->exited;
}

/* After the child's end: take what it left in its pipe, and what the client has not sent yet. */
static void finish(struct job *job, void (*take)(void *, const char *, size_t), void *to) {
    int waiting = 0;
    if (job->in >= 0) close(job->in);
    if (job->out >= 0) {
        ioctl(job->out, FIONREAD, &waiting); /* only this much: others may go on writing */
        while (waiting > 0) {
            ssize_t got = read(job->out, scratch, (size_t)waiting < sizeof scratch ? (size_t)waiting : sizeof scratch);
            if (got <= 0) break;
            take(to, scratch, got), waiting -= got;
        }
        if (orphan_count == MAX_ORPHANS) close(orphans[0]), orphans[0] = orphans[--orphan_count];
        orphans[orphan_count++] = job->out;
        drain_orphan(orphan_count - 1); /* nearly always this closes it at once */
    }
    while (job->body_left) {
        size_t part = job->body_left < sizeof scratch ? job->body_left : sizeof scratch;
        read_client(scratch, part), job->body_left -= part;
    }
}

/* ---- the operations ------------------------------------------------------------------------------------ */

static void take_output(void *to, const char *from, size_t size) {
    struct output *output = to;
    if (output->total < output->head_cap) {
        size_t part = output->head_cap - output->total < size ? output->head_cap - output->total : size;
        memcpy(output->head + output->total, from, part);
        output->total += part, from += part, size -= part;
    }
    if (size > output->tail_cap) { /* all but its end would be overwritten at once */
        size_t skip = size - output->tail_cap;
        output->total += skip, from += skip, size = output->tail_cap;
    }
    while (size) {
        size_t at = (output->total - output->head_cap) % output->tail_cap;
        size_t part = output->tail_cap - at < size ? output->tail_cap - at : size;
        memcpy(output->tail + at, from, part);
        output->total += part, from += part, size -= part;
    }
}

static void put_output(const struct output *output, struct result *result) {
    uint64_t head = output->total < output->head_cap ? output->total : output->head_cap;
    uint64_t rest = output->total - head, tail = rest < output->tail_cap ? rest : output->tail_cap;
    size_t from = output->tail_cap ? rest % output->tail_cap : 0; /* where the ring's oldest byte is */
    result->head_len = head;
    result->dropped = rest - tail;
    put_chunk(output->head, head);
    if (tail == rest) {
        put_chunk(output->tail, tail);
    } else {
        put_chunk(output->tail + from, output->tail_cap - from);
        put_chunk(output->tail, from);
    }
}

static void write_all(int fd, const char *from, size_t size) {
    while (size) {
        ssize_t put = write(fd, from, size);
        if (put <= 0) _exit(errno < 125 ? errno : EIO);
        from += put, size -= put;
    }
}

/* How a shell comes to its script. It starts before the script is known (see prepare_spare), so it sources
 * SETUP: the session's variables, then a pause until we say go, then the client's variables, if it has any.
 * The script is in a memfd: no limit on its size, and `pkill -f` does not find it in this process's arguments.
 * bash evals it, so that messages say "bash: line N" and N is the script's own.
 * At the end it saves its state, once, even if the script replaced the EXIT trap: hence the second call. The
 * directory is written last: it says that the environment is whole. */
#define SAVE                                                                                            \
    "\n__swe_env_save() { __swe_env_save() { return $1; }; { command export -p >|/proc/self/fd/62 && "  \
    "command pwd >|/proc/self/fd/63; } 2>/dev/null; return $1; }\ntrap '__swe_env_save $?' EXIT"
#define GO "\nread -r REPLY <&9 || exit; exec 9<&-\n[ -z \"$REPLY\" ] || . /proc/self/fd/58\n"
#define TAKE "IFS= read -r -d '' REPLY </proc/self/fd/60; exec 58<&- 60<&- 61<&-\n"
#define BASH ". /proc/self/fd/61 2>/dev/null; eval \"$REPLY\""
#define SH ". /proc/self/fd/61 2>/dev/null; . /proc/self/fd/60"
#define SAVE_AGAIN "\n__swe_env_save $?"

static void exec_shell(bool session) {
    static const char *const bash[] = {"/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"};
    static const char *const sh[] = {"/bin/sh", "/usr/bin/sh", "/bin/busybox"};
    char *with_bash = session ? BASH SAVE_AGAIN : BASH, *with_sh = session ? SH SAVE_AGAIN : SH;
    const char *setup = session ? SAVE GO : GO;
    if (dup2(memfd_create("setup", 0), FD_SETUP) < 0) _exit(126);
    if (session && session_environment) write_all(FD_SETUP, session_environment, session_environment_len);
    write_all(FD_SETUP, setup, strlen(setup));
    off_t end = lseek(FD_SETUP, 0, SEEK_CUR);
    write_all(FD_SETUP, TAKE, strlen(TAKE));
    for (int i = 0; i < 3; i++) execv(bash[i], (char *[]){"bash", "-c", with_bash, NULL});
    if (ftruncate(FD_SETUP, end)) _exit(126);
    for (int i = 0; i < 3; i++) execv(sh[i], (char *[]){"sh", "-c", with_sh, NULL});
    dprintf(2, "no shell in this image (%s): it needs /bin/sh or bash\n", strerror(errno));
    _exit(127);
}

/* In the child: directory and environment, then the shell. */
static void become_shell(bool session, const char *directory) {
    const char *at = session && *session_directory ? session_directory : workdir;
    if (chdir(at) && chdir(at = workdir) && chdir(at = "/")) _exit(126); /* it may have been deleted */
    if (*directory && chdir(directory)) {
        dprintf(2, "cd: %s: %s\n", directory, strerror(errno));
        _exit(1);
    }
    if (session && session_environment) { /* what the last one unset must not come back from the image */
        char *startup = getenv("BASH_ENV");
        startup = startup ? strdup(startup) : NULL;
        clearenv();
        if (startup) setenv("BASH_ENV", startup, 1);
    }
    /* The way the directory was reached (symbolic links); the shell checks that it is the same one. */
    if (!*directory || *directory == '/') setenv("PWD", *directory ? directory : at, 1);
    else unsetenv("PWD");
    exec_shell(session);
}

/* A descriptor beyond those that a shell is given, so that giving one never overwrites another. */
static int beyond(int fd) {
    int moved = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 200);
    if (moved < 0) _exit(125);
    close(fd);
    return moved;
}

/* As start(). */
static int start_shell(struct shell *shell, bool session, const char *directory, bool piped, bool insist) {
    int go[2];
    if (pipe2(go, O_CLOEXEC)) _exit(125);
    int wait = beyond(go[0]);
    shell->go = beyond(go[1]);
    shell->script = beyond(memfd_create("script", MFD_CLOEXEC));
    shell->variables = beyond(memfd_create("variables", MFD_CLOEXEC));
    shell->environment = session ? beyond(memfd_create("environment", MFD_CLOEXEC)) : -1;
    shell->directory = session ? beyond(memfd_create("directory", MFD_CLOEXEC)) : -1;
    int started = start(&shell->job, piped, insist), reason = errno;
    if (started == 0) {
        dup2(wait, FD_GO), dup2(shell->script, FD_SCRIPT), dup2(shell->variables, FD_VARIABLES);
        if (session) dup2(shell->environment, FD_ENVIRONMENT), dup2(shell->directory, FD_DIRECTORY);
        become_shell(session, directory);
    }
    close(wait);
    errno = reason;
    return started;
}

/* Everything but its output, which finish() deals with. */
static void close_shell_files(struct shell *shell) {
    close(shell->go), close(shell->script), close(shell->variables);
    close(shell->environment), close(shell->directory);
}

static void close_shell(struct shell *shell) {
    close_shell_files(shell);
    close(shell->job.out);
    shell->job.pid = 0;
}

/* Starting bash is most of what a short command costs: do it while the model thinks about the next one. */
static void prepare_spare(void) {
    if (start_shell(&spare, true, "", false, false) < 0) close_shell(&spare);
}

static void discard_spare(void) {
    if (!spare.job.pid) return;
    kill(spare.job.pid, SIGKILL);
    close_shell(&spare);
}

/* Keeps `environment`, which is shell code. */
static void become_session(const char *directory, char *environment, size_t environment_len) {
    free(session_environment);
    session_environment = environment, session_environment_len = environment_len;
    snprintf(session_directory, sizeof session_directory, "%s", directory);
}

/* Keep what a session command left, if it left all of it. */
static void keep_session(int environment, int directory) {
    struct stat status;
    char path[PATH_MAX];
    ssize_t path_len = pread(directory, path, sizeof path, 0);
    if (path_len < 2 || path[0] != '/' || path[path_len - 1] != '\n') return;
    if (fstat(environment, &status) || status.st_size > MAX_ENVIRONMENT) return;
    char *text = malloc(status.st_size + 1);
    ssize_t text_len = text ? pread(environment, text, status.st_size, 0) : -1;
    if (text_len < 0) {
        free(text);
        return;
    }
    path[path_len - 1] = 0;
    become_session(path, text, text_len);
}

static void client_to_file(int fd, uint64_t size) {
    while (size) {
        size_t part = size < sizeof scratch ? size : sizeof scratch;
        read_client(scratch, part);
        write_all(fd, scratch, part), size -= part;
    }
}

static void serve_run(struct request *request, const char *directory) {
    struct shell shell;
    struct output output = {.head_cap = request->limit / 2, .tail_cap = request->limit - request->limit / 2};
    output.head = malloc(output.head_cap + 1), output.tail = malloc(output.tail_cap + 1);
    if (!output.head || !output.tail) _exit(125);

    bool session = request->flags & REQUEST_SESSION;
    struct result result = {0};
    int started = 1;
    reap(NULL); /* the spare may have been killed */
    /* A spare reads nothing from stdin: a pipe there would mislead programs that look (ripgrep). */
    if (session && spare.job.pid && !*directory && !request->body_len) {
        shell = spare, spare.job.pid = 0;
    } else {
        if (session) discard_spare();
        started = start_shell(&shell, session, directory, request->body_len, true);
        result.status = errno;
    }
    shell.job.body_left = request->body_len;
    client_to_file(shell.variables, request->prelude_len);
    client_to_file(shell.script, request->script_len);
    uint64_t begin = now_ns();
    const char *go = request->prelude_len ? "v\n" : "\n";
    if (write(shell.go, go, strlen(go)) < 0) {} /* it died: its status says how */
    if (started < 0) {
        result.flags = RESULT_NO_FORK;
    } else if (pump(&shell.job, begin + request->timeout_ms * 1000000ull, take_output, &output)) {
        int status = shell.job.wait_status;
        result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (session) keep_session(shell.environment, shell.directory);
    } else {
        sweep(&shell.job);
        result.status = 128 + SIGKILL, result.flags = RESULT_TIMED_OUT;
    }
    result.nanoseconds = now_ns() - begin;
    finish(&shell.job, take_output, &output);
    put_output(&output, &result);
    put_result(result);
    sched_yield(); /* whom the reply woke often waits for this CPU: what follows can wait */
    free(output.head), free(output.tail);
    close_shell_files(&shell);
    if (session && started > 0) prepare_spare();
}

/* In the child: the file's content to fd 1. Ends with errno. */
static void read_file(const char *path, uint64_t limit) {
    struct stat status;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a FIFO must not hold us up */
    if (fd < 0 || fstat(fd, &status)) _exit(errno);
    if (!S_ISREG(status.st_mode)) _exit(S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
    if ((uint64_t)status.st_size > limit) _exit(EFBIG);
    for (uint64_t total = 0;;) {
        ssize_t got = read(fd, scratch, sizeof scratch);
        if (got < 0) _exit(errno);
        if (got == 0) _exit(0);
        if ((total += got) > limit) _exit(EFBIG);
        write_all(1, scratch, got);
    }
}

/* In the child: fd 0 to the file. Ends with errno. */
static void write_file_from_stdin(char *path, mode_t mode) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(path, 0755) && errno != EEXIST && errno != EROFS && errno != EACCES) _exit(errno);
        *slash = '/';
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_CLOEXEC, mode);
    if (fd < 0) _exit(errno);
    for (ssize_t got; (got = read(0, scratch, sizeof scratch)) != 0;) {
        if (got < 0) _exit(errno);
        for (ssize_t at = 0, put; at < got; at += put)
            if ((put = write(fd, scratch + at, got - at)) < 0) _exit(errno);
    }
    fchmod(fd, mode); /* not subject to the umask; fails on a file that belongs to another, which keeps its own */
    _exit(close(fd) ? errno : 0);
}

struct content { uint64_t left; };

static void take_content(void *to, const char *from, size_t size) {
    struct content *content = to; /* the child is not to be trusted with the limit */
    if (size > content->left) size = content->left;
    content->left -= size;
    put_chunk(from, size);
}

static void serve_file(struct request *request, char *path) {
    struct job job;
    struct content content = {request->limit};
    struct result result = {0};
    uint64_t begin = now_ns();
    int started = start(&job, request->op == OP_WRITE, true);
    job.body_left = request->body_len;
    if (started == 0) {
        if (chdir(workdir) && *path != '/') _exit(errno);
        if (request->op == OP_READ) read_file(path, request->limit);
        write_file_from_stdin(path, request->mode);
    }
    if (started < 0) {
        result.status = errno, result.flags = RESULT_NO_FORK;
    } else if (pump(&job, begin + request->timeout_ms * 1000000ull, take_content, &content)) {
        result.status = WIFEXITED(job.wait_status) ? WEXITSTATUS(job.wait_status) : EIO;
    } else {
        kill(job.pid, SIGKILL);
        result.status = ETIMEDOUT;
    }
    finish(&job, take_content, &content);
    result.nanoseconds = now_ns() - begin;
    put_result(result);
}

/* With a directory: let the session go on from there, and from the environment in the body, as another sandbox's
 * does. Without: send this one's, which begins with the directory; nothing if no command has ended yet. */
static void serve_state(struct request *request, const char *directory) {
    struct result result = {0};
    if (*directory) {
        char *environment = malloc(request->body_len + 1);
        if (!environment) _exit(125);
        read_client(environment, request->body_len);
        become_session(directory, environment, request->body_len);
        discard_spare();
        prepare_spare();
    } else if (session_environment) {
        result.head_len = strlen(session_directory);
        put_chunk(session_directory, result.head_len);
        put_chunk(session_environment, session_environment_len);
    }
    put_result(result);
}

static void serve(struct request *request) {
    char *path = malloc(request->path_len + 1);
    if (!path) _exit(125);
    read_client(path, request->path_len);
    path[request->path_len] = 0;
    switch (request->op) {
    case OP_RUN: serve_run(request, path); break;
    case OP_READ:
    case OP_WRITE: serve_file(request, path); break;
    case OP_STATE: serve_state(request, path); break;
    case OP_KILL_ALL: sweep(NULL), put_result((struct result){0}); break;
    default: _exit(125);
    }
    free(path);
}
