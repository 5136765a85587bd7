"""Calls and files that only some systems have, each with its substitute on the others, in one place.

Nodes are Linux machines, except those of ``Local()``; the client runs on macOS, too, and can be imported on Windows.
Modules that a client imports take these parts from here. Type checkers follow ``sys.platform``; a Python built for an
old kernel lacks some of the calls on Linux as well (docs/decisions/029).
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import math
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
    import pwd
    import resource

SHARED_MEMORY: Final = Path("/dev/shm")
"""Folder in memory. Elsewhere there is none, and a folder on disk takes its place."""

NOTSENT_LOWAT: Final = 25 if sys.platform == "linux" else 0x201
"""Option of TCP sockets that bounds unsent bytes, on Linux and on macOS; Python names it from 3.12 on."""

_PROC: Final = Path("/proc")
_EPOLLIN: Final = 1
_M_TRIM_THRESHOLD: Final = -1
_OLD_GLIBCS_BLOCK_BYTES: Final = 32 << 20
_M_MMAP_THRESHOLD: Final = -3
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_START_FIELD: Final = 19
"""Index, after the name in ``/proc/PID/stat``, of the clock ticks from boot to the process's start."""
_USUAL_EPHEMERAL: Final = (32_768, 65_535)
"""Ports of outgoing connections: Linux's by default, and above them macOS's, which begin at 49,152."""
_LONGEST_ADDRESS: Final = 100
"""Length of a Unix socket's address that every system takes: Linux takes 107 bytes, macOS 103."""


def _boot_clock() -> int | None:
    # Python's monotonic clock stops while a Mac sleeps. The system's clock of that name goes on, as Linux's boot time.
    name = "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    return getattr(time, name, None)


BOOT_CLOCK: Final[int | None] = _boot_clock()
"""Clock that goes on while the machine sleeps; where None, the wall clock does, which may be set."""


def elapsed_s() -> float:
    """Return the seconds since some fixed moment, asleep or awake."""
    if sys.platform == "win32" or BOOT_CLOCK is None:
        return time.time()
    return time.clock_gettime(BOOT_CLOCK)


def usable_cores() -> int:
    """Return the cores that this process may use; elsewhere than on Linux, those of the machine."""
    if sys.platform == "linux" and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def readable_path(text: str) -> Generator[str]:
    """Yield a path from which a short ASCII text can be read once; only on Windows, a crash can leave a file."""
    if sys.platform == "win32":
        with tempfile.TemporaryDirectory(prefix="sky-") as folder:  # in the user's own folder there
            path = Path(folder, "text")
            path.write_text(text, encoding="ascii")
            yield str(path)
        return
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        with open(os.memfd_create("text"), "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    read, write = os.pipe()  # it holds 16 KiB on macOS, more than any certificate or key
    try:
        with open(write, "w", encoding="ascii") as file:
            file.write(text)
        yield f"/dev/fd/{read}"
    finally:
        os.close(read)


@contextmanager
def socket_path(folder: Path, name: str) -> Generator[str]:
    """Yield an address of a Unix socket in the folder, short enough for the system however deep the folder lies."""
    path = folder / name
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
    elif sys.platform == "linux" and _PROC.is_dir():
        opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{opened}/{name}"
        finally:
            os.close(opened)
    else:
        with tempfile.TemporaryDirectory(prefix="sky-") as short:  # 58 bytes on macOS
            link = Path(short, "l")
            link.symlink_to(folder, target_is_directory=True)
            yield str(link / name)


def keep_freed_memory(block_bytes: int) -> None:
    """Have this process use freed memory again: blocks of up to ``block_bytes``, and twice that at the end of its heap.

    By default glibc returns such memory to the kernel, which clears every page of it again at its next use. Before
    version 2.35 it keeps blocks of up to 32 MiB. Other C libraries ignore this.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            set_option = ctypes.CDLL(None).mallopt
            if not set_option(_M_MMAP_THRESHOLD, block_bytes):
                set_option(_M_MMAP_THRESHOLD, _OLD_GLIBCS_BLOCK_BYTES)
            set_option(_M_TRIM_THRESHOLD, 2 * block_bytes)


def return_freed_memory() -> None:
    """Return freed memory to the kernel; does nothing where the C library is not glibc. Other threads go on."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


_LARGE_PAGE_BYTES = 2 << 20
"""Size of a large page. Smaller pieces that lie side by side would fill one before they are used."""


def allocate_memory(nbytes: int) -> mmap.mmap:
    """Return private memory, in large pages where one fits and the kernel has them: they take far fewer page faults."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= _LARGE_PAGE_BYTES:
        with suppress(OSError):  # this kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Epoll(Protocol):
    def fileno(self) -> int: ...
    def register(self, fd: int, eventmask: int, /) -> None: ...
    def modify(self, fd: int, eventmask: int, /) -> None: ...
    def close(self) -> None: ...


class MutableEvents:
    """Descriptor that is readable while another one is, and that any thread can mute for a while."""

    def __init__(self, descriptor: int, epoll: _Epoll) -> None:
        self._descriptor = descriptor
        self._epoll = epoll
        self._epoll.register(descriptor, _EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor for an event loop."""
        return self._epoll.fileno()

    def mute(self) -> None:
        """Report nothing until :meth:`unmute`."""
        self._epoll.modify(self._descriptor, 0)

    def unmute(self) -> None:
        """Report readiness again, that of the time in between included."""
        self._epoll.modify(self._descriptor, _EPOLLIN)

    def close(self) -> None:
        """Close the descriptor, not the other one."""
        self._epoll.close()


def mutable_events(descriptor: int) -> MutableEvents | None:
    """Return the events of a descriptor; None elsewhere than on Linux, where an event loop watches it itself."""
    if sys.platform == "linux" and hasattr(select, "epoll"):
        return MutableEvents(descriptor, select.epoll())
    return None


def wait_readable(*descriptors: int, within_s: float | None = None) -> int | None:
    """Wait until one of the descriptors can be read, and return it; None if the time passes first."""
    if sys.platform == "win32":
        readable = select.select(descriptors, (), (), within_s)[0]
        return readable[0] if readable else None
    poll = select.poll()  # select() fails with descriptors from 1,024 on
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = poll.poll(None if within_s is None else within_s * 1000)
    return ready[0][0] if ready else None


def is_writable(descriptor: int) -> bool:
    """Return True if a small write to the descriptor would not wait."""
    if sys.platform == "win32":
        return bool(select.select((), (descriptor,), (), 0)[1])
    poll = select.poll()  # as above
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def unix_socket() -> socket.socket:
    """Return a new Unix socket.

    Raises:
        OSError: this is Windows, where Python has none.
    """
    if sys.platform == "win32":
        raise OSError(errno.EAFNOSUPPORT, "Python has no Unix sockets on Windows")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def receive_socket(connection: socket.socket) -> socket.socket:
    """Return the socket that another process passes through a Unix socket.

    Raises:
        OSError: none is passed.
    """
    if sys.platform == "win32":
        raise OSError(errno.EAFNOSUPPORT, "Windows passes no sockets between processes")
    descriptors = socket.recv_fds(connection, 1, 1)[1]
    if not descriptors:
        raise OSError(errno.ENOTSOCK, "no socket was passed")
    return socket.socket(fileno=descriptors[0])


# --- files --------------------------------------------------------------------------------------------------------


def sync_folder(path: Path) -> None:
    """Return once names that were given in the folder are on disk, as far as the system has such a call."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def try_lock(descriptor: int) -> bool:
    """Lock a file against other processes until it is closed here; return False if one of them has locked it."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter on Windows
        return False
    return True


def descriptor_limits() -> tuple[float, float]:
    """Return the soft and the hard limit of open descriptors, infinite where there is none."""
    if sys.platform == "win32":
        return math.inf, math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _or_infinite(soft), _or_infinite(hard)


def set_descriptor_limit(soft: float) -> None:
    """Set the soft limit of open descriptors; does nothing on Windows.

    Raises:
        ValueError: the system does not allow it.
        OSError: the same.
    """
    if sys.platform != "win32":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.RLIM_INFINITY if soft == math.inf else int(soft), hard))


def _or_infinite(limit: int) -> float:
    return math.inf if sys.platform != "win32" and limit == resource.RLIM_INFINITY else limit


# --- the user -----------------------------------------------------------------------------------------------------


def user_id() -> int:
    """Return the number of this process's user; 0 on Windows, where users have none."""
    return 0 if sys.platform == "win32" else os.getuid()


def account_name() -> str:
    """Return the name of this user's account; empty where a container runs under a user id without one."""
    if sys.platform == "win32":
        return os.environ.get("USERNAME", "")
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""


def account_home() -> str:
    """Return the home folder of this user's account; empty if the user has no account."""
    if sys.platform == "win32":
        return os.environ.get("USERPROFILE", "")
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


# --- processes ----------------------------------------------------------------------------------------------------


def boot_id() -> str:
    """Return the id of the machine's boot; empty where it has none."""
    return _text_of(_PROC / "sys/kernel/random/boot_id")


def pid_namespace() -> str:
    """Return the namespace in which this process's number counts; empty where there are none."""
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""


def start_ticks(pid: int) -> str | None:
    """Return the clock ticks from boot to a process's start; None where only its time by the clock is known.

    Raises:
        ProcessLookupError: there is no such process.
    """
    if not boot_id():
        return None
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    return text.rpartition(")")[2].split()[_START_FIELD]


def waits_for_disk(thread: int | None) -> bool:
    """Return whether a thread of this process waits in the kernel for a disk or a file server; False if unknown."""
    fields = _text_of(_PROC / "self/task" / str(thread) / "stat").rpartition(")")[2].split()
    return fields[:1] == ["D"]


def is_caught(number: signal.Signals) -> bool:
    """Return whether this process handles a signal, in C code as well; False where only Python's handlers are known."""
    lines = _text_of(_PROC / "self/status").splitlines()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def open_descriptors() -> list[int]:
    """Return this process's open descriptors, and that of the listing, which is closed by then."""
    return [int(name) for name in os.listdir(_PROC / "self/fd" if (_PROC / "self/fd").is_dir() else "/dev/fd")]


def adopt_orphans() -> None:
    """Adopt the orphans of all descendants, in place of process 1. Does nothing except on Linux."""
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)


def name_thread(name: str) -> None:
    """Name this thread, and so a process with one thread, in lists of processes. Does nothing except on Linux."""
    _control_process(_PR_SET_NAME, name.encode())


def orphan_to_reap() -> int | None:
    """Return a dead child of this process, whose exit status is still there; None also where none is adopted.

    Raises:
        ChildProcessError: this process has no child.
    """
    if sys.platform == "linux":
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return dead.si_pid if dead else None
    return None


def wait_for_end(pid: int, *, within_s: float) -> bool:
    """Wait for the end of any process; return True if it ended, False also where the system cannot wait for it."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        # Linux 5.3. A closed connection would not do: a process closes them a moment before it has ended.
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        return wait_readable(process, within_s=within_s) is not None
    finally:
        os.close(process)


def run_in_forks(function: Callable[[], object]) -> None:
    """Have every child that is forked from now on call the function first; does nothing where processes do not fork."""
    if sys.platform != "win32" and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def run_around_forks(function: Callable[[], object]) -> None:
    """Have this process call the function before and after every fork from now on; does nothing as above."""
    if sys.platform != "win32" and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=function, after_in_parent=function)


def kill_process(pid: int) -> None:
    """SIGKILL a process, if there is one."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill a process that leads a session, with everything in it; on Windows, the process alone."""
    if sys.platform == "win32":
        os.kill(pid, signal.SIGTERM)
    else:
        os.killpg(pid, signal.SIGKILL)


ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGBREAK if sys.platform == "win32" else signal.SIGHUP)
"""Signals that end a process by default, and that unwind the main thread while a pool is open."""
WATCHED_SIGNALS: Final[tuple[signal.Signals, ...]] = (
    () if sys.platform == "win32" else (*ENDING_SIGNALS, signal.SIGQUIT)
)
"""Signals that :func:`write_on_signal` can watch."""


def write_on_signal(number: signal.Signals, descriptor: int) -> None:
    """Write to a descriptor on each such signal, whatever the main thread does. Allowed from any thread."""
    if sys.platform != "win32":
        faulthandler.register(number, file=descriptor, all_threads=False)


def stop_writing_on_signal(number: signal.Signals) -> None:
    """Undo :func:`write_on_signal`."""
    if sys.platform != "win32":
        faulthandler.unregister(number)


# --- the machine --------------------------------------------------------------------------------------------------


def ephemeral_ports() -> tuple[int, int]:
    """Return the first and the last port of the system's range for outgoing connections."""
    limits = _text_of(_PROC / "sys/net/ipv4/ip_local_port_range").split()
    return (int(limits[0]), int(limits[1])) if limits else _USUAL_EPHEMERAL


def process_limits() -> str:
    """Return this process's limits of descriptors, memory and the like, as Linux lists them; forks inherit them."""
    return Path("/proc/self/limits").read_text(encoding="utf-8", errors="replace")


def _control_process(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _text_of(path: Path) -> str:
    """Return a file's text; empty elsewhere than on Linux, which alone has it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
