"""Steps that every clone of a Python process performs. Precedes the agent's own runtime and the
bootstrap of AWS Lambda's runtime."""

import gc
import os
import sys


def reseed(instance_id, log_stream_name):
    """Replaces the random state that clones of this process would share. Other modules keep no
    random state, or get it from the kernel each time."""
    os.environ["FIRN_INSTANCE_ID"] = instance_id
    os.environ["AWS_LAMBDA_LOG_STREAM_NAME"] = log_stream_name
    loaded = sys.modules.get
    if module := loaded("random"):
        module.seed()
    if module := loaded("tempfile"):
        module._name_sequence = None
    if module := loaded("uuid"):
        # The node and clock sequence of libuuid cannot be reset; those of Python's own code can.
        module._generate_time_safe = None
        module._node = int.from_bytes(os.urandom(6), "big") | 1 << 40
        module._last_timestamp = None
    if module := loaded("ssl"):
        module.RAND_add(os.urandom(64), 64.0)
    if module := loaded("numpy.random"):
        module.seed()


def collect():
    """Minimises the garbage in a snapshot, and excludes existing objects from later collections:
    each write of the collector to them would copy a page in every clone."""
    gc.collect()
    gc.freeze()
