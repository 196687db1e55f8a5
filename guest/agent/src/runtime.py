"""The Python part of firn-agent: runs one function and handles one message at a time.

The agent passes this source, after clone.py, by `-c`. After `invoke`, a second frame contains only
the event, so that an unreadable event fails only its own request. Names and texts of errors are
those of AWS Lambda's Python runtime.
"""

import importlib
import itertools
import json
import os
import sys
import time
import traceback
from contextlib import suppress

MESSAGE_LIMIT = 16384  # maximum number of characters of an error's text
REHEARSALS = 40  # Python 3.11 has adapted after about 20
TRACE_LIMIT = 64  # maximum number of stack frames, innermost ones
FROZEN = "<frozen importlib._bootstrap%s>"
# NaN and the infinities have no JSON form. AWS Lambda returns invalid JSON for them.
ENCODER = json.JSONEncoder(allow_nan=False)
OWN_FILES = {"<string>", importlib.__file__, FROZEN % "", FROZEN % "_external"}


class Context:
    """The second argument of a handler, with the attributes that AWS Lambda defines."""

    function_version = "$LATEST"
    identity = None
    client_context = None

    def __init__(self, request_id, deadline):
        environment = os.environ.get
        self.aws_request_id = request_id
        self.function_name = environment("AWS_LAMBDA_FUNCTION_NAME")
        self.memory_limit_in_mb = environment("AWS_LAMBDA_FUNCTION_MEMORY_SIZE")
        self.log_group_name = environment("AWS_LAMBDA_LOG_GROUP_NAME")
        self.log_stream_name = environment("AWS_LAMBDA_LOG_STREAM_NAME")
        self.invoked_function_arn = "arn:aws:lambda:local:000000000000:function:%s" % self.function_name
        self._deadline = deadline

    def get_remaining_time_in_millis(self):
        return max(int((self._deadline - time.monotonic()) * 1000), 0)


class Fault(Exception):
    """An error that the runtime itself detects."""

    def __init__(self, kind, text, trace=()):
        super().__init__(text)
        self.kind, self.trace = kind, list(trace)


def printable(text):
    """Text without lone surrogates, which Python strings may contain but UTF-8 cannot encode."""
    return text[:MESSAGE_LIMIT].encode("utf-8", "replace").decode("utf-8")


def describe(error):
    """`error` in AWS Lambda's form, without the stack frames outside the function."""
    if isinstance(error, Fault):
        kind, trace = error.kind, error.trace
    else:
        kind = type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        frames = list(itertools.dropwhile(lambda frame: frame.filename in OWN_FILES, frames))
        trace = traceback.format_list(frames[-TRACE_LIMIT:])
    try:
        text = str(error)
    except Exception:
        text = "<the exception has no printable text>"
    return {
        "errorType": printable(kind),
        "errorMessage": printable(text),
        "stackTrace": [printable(line) for line in trace],
    }


def load(handler, task_dir):
    """Imports `module.function` and returns the function."""
    sys.path.insert(0, task_dir)
    module_name, dot, function_name = handler.rpartition(".")
    if not dot or not module_name or not function_name:
        raise Fault("Runtime.MalformedHandlerName", "Bad handler '%s': it has to be module.function" % handler)
    try:
        module = importlib.import_module(module_name.replace("/", "."))
    except ImportError as error:
        raise Fault("Runtime.ImportModuleError", "Unable to import module '%s': %s" % (module_name, error))
    except SyntaxError as error:
        line = '  File "%s" Line %s\n    %s' % (error.filename, error.lineno, error.text)
        text = "Syntax error in module '%s': %s" % (module_name, error)
        raise Fault("Runtime.UserCodeSyntaxError", text, [line])
    function = getattr(module, function_name, None)
    if not callable(function):
        text = "Handler '%s' missing on module '%s'" % (function_name, module_name)
        raise Fault("Runtime.HandlerNotFound", text)
    return function


def invoke(function, header, event, limit):
    """Calls the function and returns its answer as JSON text."""
    deadline = time.monotonic() + header["time_limit_ms"] / 1000
    try:
        event = json.loads(event)
    except (ValueError, RecursionError) as error:
        raise Fault("Runtime.UnmarshalError", "Unable to unmarshal input: %s" % error)
    answer = function(event, Context(header["request_id"], deadline))
    try:
        text = ENCODER.encode(answer)
    except Exception as error:
        raise Fault("Runtime.MarshalError", "Unable to marshal response: %s" % error)
    if len(text) > limit:
        text = "Response payload size (%d bytes) exceeded maximum allowed payload size (%d bytes)." % (len(text), limit)
        raise Fault("Function.ResponseSizeTooLarge", text)
    return text


def rehearse():
    """Runs what each clone runs, often enough for the interpreter to adapt its code. Otherwise each
    clone adapts it, and writes to its pages."""
    near, far = map(Channel, socket.socketpair())
    names = "FIRN_INSTANCE_ID", "AWS_LAMBDA_LOG_STREAM_NAME"
    identity = [os.environ.get(name, "") for name in names]
    for _ in range(REHEARSALS):
        near.send('{"invoke":{"request_id":"","time_limit_ms":1}}')
        near.send('{"text": ["t", 1, 1.5, true, null]}')
        ((_, header),) = json.loads(far.receive()).items()
        far.send('{"answer":%s}' % invoke(lambda event, context: event, header, far.receive(), 99))
        near.receive()
        identify(*identity, reseeded=True)


def main():
    channel = Channel.of_agent()
    function = limit = None
    while True:
        ((kind, message),) = json.loads(channel.receive()).items()
        try:
            if kind == "load":
                limit = message["answer_limit"]
                function = load(message["handler"], message["task_dir"])
                reply = DONE
            elif kind == "invoke":
                reply = '{"answer":%s}' % invoke(function, message, channel.receive(), limit)
            else:
                if kind == "collect":
                    # A function may have replaced what this uses, or have no descriptors left.
                    with suppress(Exception):
                        rehearse()
                reply = clone_step(channel, kind, message)
        except Exception as error:
            reply = '{"error":%s}' % json.dumps(describe(error))
        if reply:
            channel.send(reply)


main()
