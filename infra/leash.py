"""Become another program that ends when the supervisor ends, even by kill -9.

Run by path: `python -I -S leash.py PARENT_PID PROGRAM ARGUMENT...`. It asks the kernel for a SIGKILL at the death of
its parent (PR_SET_PDEATHSIG), makes sure that the parent is still there, and becomes the program: the pid stays, no
process is added, a start costs about 20 ms. The signal is SIGKILL because nothing else is certain: every service
here has to survive it anyway.

A shim rather than `preexec_fn`: that would run Python between fork and exec, which can deadlock in a process with
threads. Not `python -m`: importing the package costs more than everything else here. The kernel ties the leash to the
*thread* that started the child, so the supervisor starts children from the thread of its event loop. Outside Linux
there is no leash; there the next supervisor on the directory ends what a killed one left (`runfile.py`).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
NOT_STARTED = 127
"""Exit code when the program cannot be started, as shells have it."""


def main() -> int:
    """Put this process on the leash and become the program; return only when that is impossible."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            sys.stderr.write(f"cannot tie this process to its supervisor: {os.strerror(ctypes.get_errno())}\n")
            return NOT_STARTED
        # The parent may have died before the request was made; then no signal will ever come.
        if os.getppid() != parent:
            return NOT_STARTED
    try:
        os.execvp(program[0], program)  # noqa: S606 - becoming the program is what this file is for
    except OSError as error:
        sys.stderr.write(f"cannot start {program[0]}: {error.strerror}\n")
    return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main())
