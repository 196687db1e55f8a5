# Follows clone.py. Starts AWS Lambda's unmodified runtime interface client, as
# `python -m awslambdaric HANDLER` does.
import json


def before_snapshot():
    """Reports that the function is initialised, and returns in a clone that has its identity."""
    channel.send(DONE)
    while True:
        ((kind, message),) = json.loads(channel.receive()).items()
        if reply := clone_step(channel, kind, message):
            channel.send(reply)
        if kind == "identify":
            return


def start():
    paths = [os.environ["LAMBDA_TASK_ROOT"]]
    if os.environ["PYTHONPATH"] == os.environ["LAMBDA_RUNTIME_DIR"]:
        # The function has set no path of its own. As in AWS Lambda, its layers come next.
        packages = "/opt/python/lib/python%d.%d/site-packages" % sys.version_info[:2]
        paths += [packages, "/opt/python"]
    sys.path[:1] = paths
    if os.environ["AWS_LAMBDA_INITIALIZATION_TYPE"] == "snap-start":
        import snapshot_restore_py

        # The last before-snapshot hook, because those run in reverse. After-restore hooks follow.
        snapshot_restore_py.register_before_snapshot(before_snapshot)
    from awslambdaric.__main__ import main

    main(["awslambdaric", os.environ["_HANDLER"]])


channel = Channel.of_agent()
start()
