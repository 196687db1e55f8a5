# Follows clone.py. Starts AWS Lambda's unmodified runtime interface client, as
# `python -m awslambdaric HANDLER` does.
import socket


def after_restore():
    instance_id = socket.gethostname()
    name, _, _ = os.environ["AWS_LAMBDA_LOG_STREAM_NAME"].partition("]")
    reseed(instance_id, "%s]%s" % (name, instance_id))


def start():
    sys.path[0] = os.environ["LAMBDA_TASK_ROOT"]
    if os.environ["AWS_LAMBDA_INITIALIZATION_TYPE"] == "snap-start":
        import snapshot_restore_py

        # The first after-restore hook, and the last before-snapshot hook, because those run in
        # reverse.
        snapshot_restore_py.register_before_snapshot(collect)
        snapshot_restore_py.register_after_restore(after_restore)
    from awslambdaric.__main__ import main

    main(["awslambdaric", os.environ["_HANDLER"]])


start()
