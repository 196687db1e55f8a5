"""Returns, or never returns, as the event requires."""

import os
import time

AGENT = os.getppid()


def handler(event, context):
    if event["return"]:
        return "returned"
    print("waiting")
    # The process exits with its agent, even if the test is killed.
    while os.getppid() == AGENT:
        time.sleep(0.1)
