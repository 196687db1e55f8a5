"""Deploys functions to a daemon with other people's tools, as in docs/reference/serve.md.

The arguments are the daemon's endpoint, the folder with the tools, and a folder to work in. Calls
of other services than AWS Lambda reach the daemon, too, which refuses them. No microVM starts.
"""

import base64
import io
import json
import os
import pathlib
import subprocess
import sys
import urllib.request
import zipfile

endpoint = sys.argv[1]
tools, work = (pathlib.Path(path).resolve() for path in sys.argv[2:])
ROLE = "arn:aws:iam::000000000000:role/any"
FUNCTIONS = endpoint + "/2015-03-31/functions"
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": str(work),
    "AWS_ENDPOINT_URL": endpoint,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_EC2_METADATA_DISABLED": "true",
    "SAM_CLI_TELEMETRY": "0",
    "CDK_DISABLE_CLI_TELEMETRY": "true",
    "SLS_TELEMETRY_DISABLED": "1",
    "SLS_NOTIFICATIONS_MODE": "off",
    "CI": "1",
}


def ask(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    head = {"content-type": "application/json"}
    request = urllib.request.Request(FUNCTIONS + path, data, head, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def archive(source):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("handler.py", source)
    return base64.b64encode(buffer.getvalue()).decode()


def create(name):
    settings = {"FunctionName": name, "Runtime": "python3.11", "Handler": "handler.handler"}
    return ask("POST", "", {**settings, "Role": ROLE, "Code": {"ZipFile": archive("x = 1\n")}})


def run(folder, *command, answer="", **environment):
    """The tool's exit code and output."""
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        input=answer,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    print(f"$ {' '.join(command)}\n{ran.stdout}exit code {ran.returncode}\n", file=sys.stderr)
    return ran.returncode, ran.stdout


def project(name, files):
    """A folder with these files."""
    for path, text in files.items():
        file = work / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return work / name


def osls():
    """`osls deploy function` deploys."""
    before = create("service-dev-hello")["CodeSha256"]
    settings = """service: service
frameworkVersion: "*"
provider:
  name: aws
  runtime: python3.11
functions:
  hello:
    handler: handler.handler
"""
    place = project("osls", {"handler.py": "x = 2\n", "serverless.yml": settings})
    program = str(tools / "node_modules/.bin/osls")
    code, output = run(place, program, "deploy", "function", "--function", "hello")
    assert code == 0 and "deployed" in output
    assert ask("GET", "/service-dev-hello")["Configuration"]["CodeSha256"] != before


def sam():
    """`sam sync --code` gets to its first call of CloudFormation."""
    template = """AWSTemplateFormatVersion: "2010-09-09"
Transform: AWS::Serverless-2016-10-31
Resources:
  Hello:
    Type: AWS::Serverless::Function
    Properties:
      CodeUri: code
      Handler: handler.handler
      Runtime: python3.11
"""
    place = project("sam", {"code/handler.py": "x = 3\n", "template.yaml": template})
    options = ["--stack-name", "hello", "--s3-bucket", "any", "--no-dependency-layer"]
    command = [sys.executable, "-m", "samcli", "sync", "--code", *options]
    code, output = run(place, *command, answer="y\n", PYTHONPATH=str(tools / "sam"))
    assert code != 0 and "ListStackResources" in output


def cdk():
    """`cdk deploy --hotswap` gets to its first call of CloudFormation."""
    function = {
        "Type": "AWS::Lambda::Function",
        "Properties": {
            "Code": {"ZipFile": "x = 4"},
            "Handler": "index.handler",
            "Role": ROLE,
            "Runtime": "python3.11",
        },
    }
    stack = {
        "type": "aws:cloudformation:stack",
        "environment": "aws://000000000000/us-east-1",
        "properties": {"templateFile": "hello.json", "validateOnSynth": False},
    }
    files = {
        "app/manifest.json": json.dumps({"version": "36.0.0", "artifacts": {"hello": stack}}),
        "app/hello.json": json.dumps({"Resources": {"Hello": function}}),
    }
    program = str(tools / "node_modules/.bin/cdk")
    code, output = run(project("cdk", files), program, "deploy", "--hotswap", "--app", "app")
    assert code != 0 and "DescribeStacks" in output


for tool in (osls, sam, cdk):
    tool()
print("done")
