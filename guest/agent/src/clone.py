"""What every clone of a Python process has to do for itself. In front of the agent's own runtime, and of the
bootstrap of AWS Lambda's runtime."""

import gc
import os
import sys


def reseed(instance_id, log_stream_name):
    """Throws away what two clones of this process would share. Other modules than those named keep
    no random state of their own, or take it from the kernel each time."""
    os.environ["FIRN_INSTANCE_ID"] = instance_id
    os.environ["AWS_LAMBDA_LOG_STREAM_NAME"] = log_stream_name
    loaded = sys.modules.get
    if module := loaded("random"):
        module.seed()
    if module := loaded("tempfile"):
        module._name_sequence = None
    if module := loaded("uuid"):
        # libuuid keeps a node and a clock sequence that cannot be reset; Python's own code can.
        module._generate_time_safe = None
        module._node = int.from_bytes(os.urandom(6), "big") | 1 << 40
        module._last_timestamp = None
    if module := loaded("ssl"):
        module.RAND_add(os.urandom(64), 64.0)
    if module := loaded("numpy.random"):
        module.seed()


def collect():
    """Leaves as little garbage in a snapshot as possible, and keeps the collector of every clone from
    writing to what is there now: each such write would copy a page."""
    gc.collect()
    gc.freeze()
