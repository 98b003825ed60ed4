/* A process that shares another one's memory, sleeps, and outlives it by a moment.

   The kernel reports a death after it has freed the memory, if the dead process was the last to have it. The holder is
   the last one in its place. It runs nothing but the loop below, on a stack of its own, and has no open files. Of the
   signals that can be blocked it hears SIGCONT alone, by which the kernel tells it that its owner has ended, even if
   somebody has stopped it. One from elsewhere leaves EINTR in the owner's errno, where it means "try again". */

#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { STACK_BYTES = 32768, CHECK_NS = 2000000 };

static _Alignas(16) char stack[STACK_BYTES];
static pid_t owner;
static uint64_t max_checks;
static _Atomic int is_ready;

static void wake_up(int number) { (void)number; }

/* Until its parent has reaped the owner, some of its threads may still have the memory. A parent that never does keeps
   the memory for a moment only. */
static void await_reaping(void) {
    const struct timespec pause = {0, CHECK_NS};
    for (uint64_t checks = 0; checks < max_checks && kill(owner, 0) == 0; ++checks) nanosleep(&pause, NULL);
}

static int close_all_files(void) {
#ifdef SYS_close_range
    return syscall(SYS_close_range, 0, ~0u, 0) == 0;
#else
    return 0;
#endif
}

static int hold(void *unused) {
    (void)unused;
    if (!close_all_files()) return 1; /* before Linux 5.9 */
    const struct sigaction action = {.sa_handler = wake_up};
    const uint64_t all_others = ~(UINT64_C(1) << (SIGCONT - 1));
    prctl(PR_SET_NAME, "p3d-memory");
    sigaction(SIGCONT, &action, NULL);
    prctl(PR_SET_PDEATHSIG, SIGCONT);
    is_ready = 1;
    while (getppid() == owner) syscall(SYS_rt_sigsuspend, &all_others, sizeof all_others);
    await_reaping();
    syscall(SYS_exit_group, 0);
    return 0;
}

/* Starts the holder of the calling process, from the thread that ends last; returns its number once it is ready, or -1.
   longest_ns: how long it may outlive an owner that is not reaped. */
int start_holder(uint64_t longest_ns) {
    sigset_t all, before;
    sigfillset(&all);
    owner = getpid();
    is_ready = 0;
    max_checks = longest_ns / CHECK_NS;
    sigprocmask(SIG_SETMASK, &all, &before);
    const pid_t holder = clone(hold, stack + STACK_BYTES, CLONE_VM, NULL);
    while (holder > 0 && !is_ready && waitpid(holder, NULL, WNOHANG | __WCLONE) == 0) sched_yield();
    sigprocmask(SIG_SETMASK, &before, NULL);
    return is_ready ? holder : -1;
}
