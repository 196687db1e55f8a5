"""Answers, or never returns, as the event says."""

import os
import time

AGENT = os.getppid()


def handler(event, context):
    if event["return"]:
        return "returned"
    print("waiting")
    # Not even a test that is killed leaves this process behind.
    while os.getppid() == AGENT:
        time.sleep(0.1)
