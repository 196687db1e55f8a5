"""Returns state that two clones of one snapshot must not share."""

import os
import random
import socket
import tempfile
import time
import uuid

# All of these have state before the freeze.
random.random()
uuid.uuid1()
tempfile.gettempdir()
next(tempfile._get_candidate_names())


def handler(event, context):
    return {
        "urandom": os.urandom(16).hex(),
        "random": random.random(),
        "uuid1": str(uuid.uuid1()),
        "uuid4": str(uuid.uuid4()),
        "temporary": next(tempfile._get_candidate_names()),
        "time": time.time(),
        "host_name": socket.gethostname(),
        "instance_id": os.environ["FIRN_INSTANCE_ID"],
        "log_stream_name": context.log_stream_name,
    }
