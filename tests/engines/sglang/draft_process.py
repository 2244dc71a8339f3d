"""A draft server that tests can disturb."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"


class DraftProcess:
    """`outrider draft-server`, which can be killed, stopped for a while, and started anew."""

    def __init__(self, socket):
        self.socket, self.trouble = socket, {"killed": 0, "stalled": 0}
        self.start()

    def start(self):
        command = [sys.executable, "-m", "outrider", "draft-server", str(TINY / "draft")]
        self.process = subprocess.Popen(
            [*command, "--socket", str(self.socket), "--threads", "1"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            assert "draft server:" in self.process.stdout.readline()
        except BaseException:
            self.stop()
            raise

    def stop(self):
        self.process.kill()
        self.process.wait(30)

    def restart(self, over):
        """Kill it and start it again, half a second later."""
        self.stop()
        self.trouble["killed"] += 1
        over.wait(0.5)
        self.start()

    def stall(self, over):
        """Stop it for a second."""
        self.process.send_signal(signal.SIGSTOP)
        over.wait(1)
        self.process.send_signal(signal.SIGCONT)
        self.trouble["stalled"] += 1

    def disturb(self, over):
        """Kill it, start it again, stop it for a while: until told to end."""
        while not over.wait(2):
            self.restart(over)
            if over.wait(2):
                break
            self.stall(over)
