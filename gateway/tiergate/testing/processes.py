"""What is done to processes under test, whatever they are."""

import os
import signal
import subprocess


def freeze_process(process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> None:
    """SIGSTOP to a child of this process; returns once it stands still, or has ended."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
