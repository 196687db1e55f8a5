"""Ends its process in the way that the event names."""

import os
import signal
import sys


def handler(event, context):
    print("last words")
    if event == "sys.exit":
        sys.exit(3)
    if event == "os._exit":
        os._exit(4)
    if event == "success":
        os._exit(0)
    if event == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if event == "closes":
        os.closerange(3, 100)
        signal.pause()
    return "still here"
