"""Answers, or never returns, as the event says."""

import time


def handler(event, context):
    if event["return"]:
        return "returned"
    print("waiting")
    while True:
        time.sleep(3600)
