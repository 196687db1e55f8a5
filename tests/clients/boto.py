"""Uses a daemon with boto3: create, publish, invoke, change, delete. Prints the results as JSON."""

import base64
import concurrent.futures
import io
import json
import os
import sys
import time
import urllib.parse
import urllib.request
import zipfile

import boto3
from botocore.config import Config

SOURCE = """
import os, random, shutil, sys, time
import layered, packaged
from snapshot_restore_py import register_after_restore, register_before_snapshot

hooks = []
count = 0
attempts = []


@register_before_snapshot
def before():
    hooks.append("before")


@register_after_restore
def after():
    hooks.append("after")


def handler(event, context):
    global count
    count += 1
    print("asked for", event.get("name"))
    if "rawPath" in event:
        return {"statusCode": 201, "headers": {"x-count": str(count)}, "body": event["rawPath"]}
    if "attempts" in event:
        return attempts
    if "again" in event:
        attempts.append(len(attempts) + 1)
        raise RuntimeError(context.aws_request_id)
    if "sleep" in event:
        time.sleep(event["sleep"])
    if "raise" in event:
        raise KeyError(event["raise"])
    return {
        "greeting": "%s, %s!" % (os.environ.get("GREETING", "Hello"), event.get("name")),
        "hooks": hooks,
        "count": count,
        "random": random.random(),
        "arn": context.invoked_function_arn,
        "request": context.aws_request_id,
        "version": context.function_version,
        "stream": context.log_stream_name,
        "left": context.get_remaining_time_in_millis(),
        "tmp": shutil.disk_usage("/tmp").free,
        "layers": [layered.WORD, packaged.WORD, open("/opt/data").read()],
    }
"""

endpoint, count, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = Config(read_timeout=300, retries={"max_attempts": 0}, max_pool_connections=concurrency)
client = boto3.client("lambda", endpoint_url=endpoint, config=config)


def archive(source, **more):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in {"handler.py": source, **more}.items():
            file.writestr(name, content)
    return buffer.getvalue()


def layer(name, **files):
    return client.publish_layer_version(LayerName=name, Content={"ZipFile": archive("", **files)})["LayerVersionArn"]


def invoke(event, **options):
    answer = client.invoke(FunctionName="greeter", Payload=json.dumps(event), **options)
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    log = base64.b64decode(answer.get("LogResult", "")).decode()
    report = json.loads(headers.get("x-firn-report", "{}"))
    body = json.loads(answer["Payload"].read() or "null")
    error = answer.get("FunctionError")
    return {"body": body, "error": error, "status": answer["StatusCode"], "log": log, "report": report}


def code_of(call, **options):
    try:
        call(**options)
    except client.exceptions.ClientError as error:
        return error.response["Error"]["Code"]
    return None


def wait(version):
    waiter = client.get_waiter("published_version_active")
    waiter.wait(FunctionName="greeter", Qualifier=version, WaiterConfig={"Delay": 1, "MaxAttempts": 120})


def another(key, secret):
    """The error code of a client with other credentials."""
    other = boto3.client("lambda", endpoint_url=endpoint, config=config, aws_access_key_id=key, aws_secret_access_key=secret)
    return code_of(other.list_functions)


seen = {}
key = os.environ["AWS_ACCESS_KEY_ID"]
seen["wrong secret"] = another(key, "another")
seen["unknown key"] = another("AKIDOTHER", os.environ["AWS_SECRET_ACCESS_KEY"])
role = "arn:aws:iam::000000000000:role/any"
packages = "python/lib/python3.11/site-packages/"
layers = [
    layer("one", **{"python/layered.py": "WORD = 'first'", packages + "packaged.py": "WORD = 'packaged'", "data": "one"}),
    layer("two", **{"python/layered.py": "WORD = 'second'"}),
]
created = client.create_function(
    FunctionName="greeter",
    Layers=layers,
    Runtime="python3.11",
    Handler="handler.handler",
    Role=role,
    Timeout=10,
    EphemeralStorage={"Size": 1024},
    Code={"ZipFile": archive(SOURCE)},
    SnapStart={"ApplyOn": "PublishedVersions"},
)
seen["taken"] = code_of(client.create_function, FunctionName="greeter", Runtime="python3.11", Handler="h.h", Role=role, Code={"ZipFile": archive("")})
published = client.publish_version(FunctionName="greeter", CodeSha256=created["CodeSha256"])
seen["published"] = [published["Version"], published["State"]]
seen["early"] = code_of(client.invoke, FunctionName="greeter", Qualifier="1")
wait("1")
client.create_alias(FunctionName="greeter", Name="live", FunctionVersion="1")

seen["first"] = invoke({"name": "Ada"}, Qualifier="live", LogType="Tail")
seen["raised"] = invoke({"raise": "x"}, Qualifier="live")
# The function of the one microVM that runs exceeds its time limit.
seen["slow"] = invoke({"sleep": 60}, Qualifier="live", LogType="Tail")
seen["next"] = invoke({"name": "Bo"}, Qualifier="live")
seen["dry"] = invoke({}, Qualifier="live", InvocationType="DryRun")
seen["event"] = invoke({}, Qualifier="live", InvocationType="Event")
with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
    many = list(pool.map(lambda turn: invoke({"name": turn}, Qualifier="live"), range(count)))
seen["right"] = sum(one["body"]["greeting"] == "Hello, %d!" % turn for turn, one in enumerate(many))
seen["hooks"] = sorted({tuple(one["body"]["hooks"]) for one in many})
seen["starts"] = sorted({one["report"]["start"] for one in many})
seen["thaws"] = [one["body"] for one in many if one["report"]["start"] == "thawed"]
seen["randoms"] = len({one["body"]["random"] for one in many})
seen["requests"] = len({one["body"]["request"] for one in many})
seen["unknown"] = code_of(client.invoke, FunctionName="greeter", Qualifier="9")

updated = client.update_function_code(FunctionName="greeter", ZipFile=archive(SOURCE.replace("%s!", "%s?")))
seen["updated"] = updated["CodeSha256"] != created["CodeSha256"]
client.get_waiter("function_updated").wait(FunctionName="greeter")
# The function keeps a layer that is deleted.
client.delete_layer_version(LayerName="one", VersionNumber=1)
client.update_function_configuration(FunctionName="greeter", Environment={"Variables": {"GREETING": "Hi"}}, SnapStart={"ApplyOn": "None"})
second = client.publish_version(FunctionName="greeter")
client.update_alias(FunctionName="greeter", Name="live", FunctionVersion=second["Version"])
seen["second"] = invoke({"name": "Ada"}, Qualifier="live", LogType="Tail")
streamed = client.invoke_with_response_stream(FunctionName="greeter", Qualifier="live", LogType="Tail", Payload=json.dumps({"name": "Di"}))
chunk, complete = streamed["EventStream"]
complete = complete["InvokeComplete"]
seen["streamed"] = {"body": json.loads(chunk["PayloadChunk"]["Payload"]), "log": base64.b64decode(complete.pop("LogResult")).decode(), "complete": complete}
client.put_function_concurrency(FunctionName="greeter", ReservedConcurrentExecutions=1)
# The records of both events go to a function that keeps them in memory, in one microVM.
witness = """
import os

records = []


def handler(event, context):
    if 'requestContext' in event:
        records.append(event)
    return [os.environ["AWS_LAMBDA_INITIALIZATION_TYPE"], records]
"""
witness = client.create_function(FunctionName="witness", Runtime="python3.11", Handler="handler.handler", Role=role, Timeout=10, Code={"ZipFile": archive(witness)}, Publish=True)
client.put_function_concurrency(FunctionName="witness", ReservedConcurrentExecutions=1)
provisioned = {"FunctionName": "witness", "Qualifier": witness["Version"]}
client.put_provisioned_concurrency_config(**provisioned, ProvisionedConcurrentExecutions=1)
deadline = time.time() + 120
while seen.get("provisioned", {}).get("Status") != "READY" and time.time() < deadline:
    time.sleep(0.5)
    seen["provisioned"] = client.get_provisioned_concurrency_config(**provisioned)
    del seen["provisioned"]["ResponseMetadata"]
to = {"Destination": witness["FunctionArn"]}
client.put_function_event_invoke_config(FunctionName="greeter", Qualifier="live", DestinationConfig={"OnSuccess": to, "OnFailure": to})
invoke({"name": "Cy"}, Qualifier="live", InvocationType="Event")
invoke({"again": True}, Qualifier="live", InvocationType="Event")
deadline = time.time() + 60
while len(seen.get("attempts", [])) < 3 and time.time() < deadline:
    time.sleep(0.5)
    try:
        seen["attempts"] = invoke({"attempts": True}, Qualifier="live")["body"]
    except client.exceptions.TooManyRequestsException:
        pass  # The event is being retried, and one request is the limit.
deadline = time.time() + 120
while len(seen.get("records", [])) < 2 and time.time() < deadline:
    time.sleep(0.5)
    try:
        seen["initialised"], seen["records"] = json.loads(client.invoke(**provisioned, Payload="{}")["Payload"].read())
    except client.exceptions.TooManyRequestsException:
        pass  # A record is being delivered.
client.delete_function(FunctionName="witness")
# Without retries there is one attempt more.
client.put_function_event_invoke_config(FunctionName="greeter", Qualifier="live", MaximumRetryAttempts=0)
invoke({"again": True}, Qualifier="live", InvocationType="Event")
time.sleep(5)
seen["once"] = invoke({"attempts": True}, Qualifier="live")["body"]
url = client.create_function_url_config(FunctionName="greeter", Qualifier="live", AuthType="NONE")["FunctionUrl"]
client.add_permission(FunctionName="greeter", Qualifier="live", StatementId="all", Action="lambda:InvokeFunctionUrl", Principal="*", FunctionUrlAuthType="NONE")
# Not every resolver knows names of localhost.
host = urllib.parse.urlsplit(url).netloc
with urllib.request.urlopen(urllib.request.Request(endpoint + "/a/path", headers={"Host": host})) as answer:
    seen["url"] = [answer.status, int(answer.headers["x-count"]) > 1, answer.read().decode()]
client.put_function_concurrency(FunctionName="greeter", ReservedConcurrentExecutions=0)
seen["throttled"] = code_of(client.invoke, FunctionName="greeter", Qualifier="live")

listed = client.get_paginator("list_versions_by_function").paginate(FunctionName="greeter")
seen["versions"] = [version["Version"] for page in listed for version in page["Versions"]]
seen["functions"] = "greeter" in [function["FunctionName"] for function in client.list_functions()["Functions"]]
client.delete_function(FunctionName="greeter")
client.delete_layer_version(LayerName="two", VersionNumber=1)
seen["gone"] = code_of(client.get_function, FunctionName="greeter")
print(json.dumps(seen))
