"""Sends a daemon what Terraform's and OpenTofu's aws provider sends for each of its resources.

The order is that of the provider's sources (internal/service/lambda): create, wait, read; update,
read; import, which reads by the id alone; destroy, and read until the resource is not found. A
read must have what was set. No request needs a microVM.
"""

import io
import json
import sys
import zipfile

import boto3
from botocore.config import Config

endpoint = sys.argv[1]
session = {"endpoint_url": endpoint, "config": Config(retries={"max_attempts": 0})}
client = boto3.client("lambda", **session)
ROLE = "arn:aws:iam::000000000000:role/any"


def archive(source):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        # The same bytes at each run, as Terraform's archive_file makes them.
        file.writestr(zipfile.ZipInfo("handler.py"), source)
    return buffer.getvalue()


def gone(call, **arguments):
    """A read of what does not exist."""
    try:
        call(**arguments)
    except client.exceptions.ResourceNotFoundException as error:
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 404, error
        return
    raise AssertionError(f"{call.__name__} {arguments} found what was deleted")


def has(found, expected):
    for name, value in expected.items():
        assert found.get(name) == value, (name, found.get(name), value)
    return found


def function(name, **settings):
    """aws_lambda_function: create."""
    client.create_function(
        FunctionName=name,
        Code={"ZipFile": archive("x = 1")},
        Handler="handler.handler",
        Runtime="python3.11",
        Role=ROLE,
        PackageType="Zip",
        **{"MemorySize": 128, "Timeout": 3, "Description": "", "Publish": False, **settings},
    )
    client.get_waiter("function_active_v2").wait(FunctionName=name)
    return read_function(name)


def read_function(name):
    """aws_lambda_function: read, and import."""
    found = client.get_function(FunctionName=name)
    pages = client.get_paginator("list_versions_by_function").paginate(FunctionName=name)
    versions = [version for page in pages for version in page["Versions"]]
    assert versions[0]["FunctionArn"].endswith(f":{name}:$LATEST"), versions
    assert client.get_function_code_signing_config(FunctionName=name).get("CodeSigningConfigArn") is None
    return found, versions


def functions():
    name = "terraform"
    environment = {"Variables": {"KEY": "value"}}
    found, versions = function(
        name,
        Tags={"env": "dev", "team": "a"},
        Environment=environment,
        EphemeralStorage={"Size": 1024},
        TracingConfig={"Mode": "PassThrough"},
        LoggingConfig={"LogFormat": "Text"},
        Architectures=["x86_64"],
        Publish=True,
    )
    client.put_function_concurrency(FunctionName=name, ReservedConcurrentExecutions=5)
    found, versions = read_function(name)
    configuration = has(
        found["Configuration"],
        {
            "FunctionName": name,
            "Handler": "handler.handler",
            "Runtime": "python3.11",
            "Role": ROLE,
            "MemorySize": 128,
            "Timeout": 3,
            "Environment": environment,
            "EphemeralStorage": {"Size": 1024},
            "TracingConfig": {"Mode": "PassThrough"},
            "LoggingConfig": {"LogFormat": "Text", "LogGroup": f"/aws/lambda/{name}"},
            "Architectures": ["x86_64"],
            "PackageType": "Zip",
            "LastUpdateStatus": "Successful",
        },
    )
    has(found, {"Tags": {"env": "dev", "team": "a"}, "Concurrency": {"ReservedConcurrentExecutions": 5}})
    assert [version["Version"] for version in versions] == ["$LATEST", "1"]
    arn = configuration["FunctionArn"]

    # Update: tags, configuration, code, a version.
    client.untag_resource(Resource=arn, TagKeys=["team"])
    client.tag_resource(Resource=arn, Tags={"env": "live"})
    client.update_function_configuration(
        FunctionName=name, Timeout=9, MemorySize=256, EphemeralStorage={"Size": 10240}, Description="d", Environment={"Variables": {}}, Handler="handler.handler", Role=ROLE, Runtime="python3.11"
    )
    client.get_waiter("function_updated_v2").wait(FunctionName=name)
    client.update_function_code(FunctionName=name, ZipFile=archive("x = 2"), Architectures=["x86_64"])
    client.get_waiter("function_updated_v2").wait(FunctionName=name)
    assert client.publish_version(FunctionName=name)["Version"] == "2"
    client.delete_function_concurrency(FunctionName=name)
    found, versions = read_function(name)
    has(found["Configuration"], {"Timeout": 9, "MemorySize": 256, "Description": "d", "EphemeralStorage": {"Size": 10240}})
    assert "Environment" not in found["Configuration"] and "Concurrency" not in found
    assert found["Tags"] == client.list_tags(Resource=arn)["Tags"] == {"env": "live"}
    assert versions[-1]["Version"] == "2"
    # A second read, as after an import, equals the first.
    again, _ = read_function(name)
    assert {**again, "ResponseMetadata": None} == {**found, "ResponseMetadata": None}, again
    client.delete_function(FunctionName=name)
    gone(client.get_function, FunctionName=name)


def aliases(name):
    client.publish_version(FunctionName=name)
    client.update_function_configuration(FunctionName=name, Timeout=4)
    client.publish_version(FunctionName=name)
    routing = {"AdditionalVersionWeights": {"2": 0.25}}
    client.create_alias(FunctionName=name, Name="live", FunctionVersion="1", Description="d", RoutingConfig=routing)
    read = lambda: client.get_alias(FunctionName=name, Name="live")
    has(read(), {"Name": "live", "FunctionVersion": "1", "Description": "d", "RoutingConfig": routing})
    client.update_alias(FunctionName=name, Name="live", FunctionVersion="2", Description="", RoutingConfig={"AdditionalVersionWeights": {}})
    found = has(read(), {"FunctionVersion": "2", "Description": ""})
    assert "RoutingConfig" not in found and found["AliasArn"].endswith(f":{name}:live")
    client.delete_alias(FunctionName=name, Name="live")
    gone(client.get_alias, FunctionName=name, Name="live")


def permissions(name):
    def statements(**qualifier):
        return json.loads(client.get_policy(FunctionName=name, **qualifier)["Policy"])["Statement"]

    arn = client.get_function_configuration(FunctionName=name)["FunctionArn"]
    client.add_permission(
        FunctionName=name,
        StatementId="AllowRule",
        Action="lambda:InvokeFunction",
        Principal="events.amazonaws.com",
        SourceArn="arn:aws:events:us-east-1:000000000000:rule/r",
        SourceAccount="000000000000",
    )
    expected = {
        "Sid": "AllowRule",
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "lambda:InvokeFunction",
        "Resource": arn,
        "Condition": {
            "StringEquals": {"AWS:SourceAccount": "000000000000"},
            "ArnLike": {"AWS:SourceArn": "arn:aws:events:us-east-1:000000000000:rule/r"},
        },
    }
    assert statements() == [expected], statements()
    client.add_permission(FunctionName=name, Qualifier="1", StatementId="account", Action="lambda:InvokeFunction", Principal="111122223333")
    [other] = statements(Qualifier="1")
    has(other, {"Resource": f"{arn}:1", "Principal": {"AWS": "arn:aws:iam::111122223333:root"}})
    client.remove_permission(FunctionName=name, Qualifier="1", StatementId="account")
    client.remove_permission(FunctionName=name, StatementId="AllowRule")
    gone(client.get_policy, FunctionName=name)
    gone(client.remove_permission, FunctionName=name, StatementId="AllowRule")


def event_invoke_configs(name):
    empty = {"OnFailure": {}, "OnSuccess": {}}
    read = lambda: client.get_function_event_invoke_config(FunctionName=name)
    client.put_function_event_invoke_config(FunctionName=name, MaximumRetryAttempts=0, MaximumEventAgeInSeconds=60, DestinationConfig=empty)
    has(read(), {"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": 60, "DestinationConfig": empty})
    function("to")
    to = {"Destination": client.get_function_configuration(FunctionName="to")["FunctionArn"]}
    destinations = {"OnFailure": to, "OnSuccess": {}}
    client.put_function_event_invoke_config(FunctionName=name, DestinationConfig=destinations)
    has(read(), {"DestinationConfig": destinations})
    client.delete_function(FunctionName="to")
    client.put_function_event_invoke_config(FunctionName=name, MaximumRetryAttempts=2, DestinationConfig=empty)
    found = has(read(), {"MaximumRetryAttempts": 2})
    assert "MaximumEventAgeInSeconds" not in found and found["LastModified"].year > 2000
    client.delete_function_event_invoke_config(FunctionName=name)
    gone(client.get_function_event_invoke_config, FunctionName=name)


def layers(name):
    settings = {"Description": "d", "CompatibleRuntimes": ["python3.11"], "CompatibleArchitectures": ["x86_64"], "LicenseInfo": "MIT"}
    published = client.publish_layer_version(LayerName="shared", Content={"ZipFile": archive("x = 1")}, **settings)
    arn, layer = published["LayerVersionArn"], published["LayerArn"]
    assert arn == f"{layer}:1" and layer.endswith(":layer:shared"), published
    # The provider reads by the ARN of the layer, and a data source by that of the version.
    read = lambda: client.get_layer_version(LayerName=layer, VersionNumber=1)
    content = {"LayerVersionArn": arn, "LayerArn": layer, "Version": 1, "CreatedDate": published["CreatedDate"], "Content": published["Content"]}
    found = has(read(), {**settings, **content})
    assert found["Content"]["CodeSize"] > 0 and len(found["Content"]["CodeSha256"]) == 44, found
    for again in read(), client.get_layer_version_by_arn(Arn=arn):
        assert {**again, "ResponseMetadata": None} == {**found, "ResponseMetadata": None}, again
    second = client.publish_layer_version(LayerName="shared", Content={"ZipFile": archive("x = 2")})
    assert second["Version"] == 2
    versions = client.get_paginator("list_layer_versions").paginate(LayerName="shared", PaginationConfig={"PageSize": 1})
    assert [version["Version"] for page in versions for version in page["LayerVersions"]] == [2, 1]
    [one] = client.list_layers(CompatibleRuntime="python3.11")["Layers"]
    assert (one["LayerName"], one["LatestMatchingVersion"]["Version"]) == ("shared", 1), one

    # aws_lambda_layer_version_permission
    where = {"LayerName": layer, "VersionNumber": 1}
    gone(client.get_layer_version_policy, **where)
    client.add_layer_version_permission(**where, StatementId="all", Action="lambda:GetLayerVersion", Principal="*", OrganizationId="o-1234567890")
    policy = client.get_layer_version_policy(**where)
    expected = {"Sid": "all", "Effect": "Allow", "Principal": "*", "Action": "lambda:GetLayerVersion", "Resource": arn, "Condition": {"StringEquals": {"aws:PrincipalOrgID": "o-1234567890"}}}
    assert json.loads(policy["Policy"])["Statement"] == [expected], policy
    client.remove_layer_version_permission(**where, StatementId="all", RevisionId=policy["RevisionId"])
    gone(client.get_layer_version_policy, **where)
    gone(client.remove_layer_version_permission, **where, StatementId="all")

    # aws_lambda_function: layers. A function keeps what is deleted.
    function = lambda: client.get_function_configuration(FunctionName=name).get("Layers")
    client.update_function_configuration(FunctionName=name, Layers=[arn])
    assert function() == [{"Arn": arn, "CodeSize": found["Content"]["CodeSize"]}], function()
    client.delete_layer_version(**where)
    client.delete_layer_version(**where)
    gone(client.get_layer_version, **where)
    assert len(function()) == 1
    client.update_function_configuration(FunctionName=name, Layers=[])
    assert function() is None
    client.delete_layer_version(LayerName="shared", VersionNumber=2)
    assert client.list_layers()["Layers"] == client.list_layer_versions(LayerName="shared")["LayerVersions"] == []


def urls(name):
    client.create_alias(FunctionName=name, Name="web", FunctionVersion="1")
    where = {"FunctionName": name, "Qualifier": "web"}
    cors = {"AllowCredentials": True, "AllowHeaders": ["date"], "AllowMethods": ["*"], "AllowOrigins": ["*"], "ExposeHeaders": ["date"], "MaxAge": 10}
    created = client.create_function_url_config(**where, AuthType="NONE", Cors=cors, InvokeMode="BUFFERED")
    public = {"StatementId": "FunctionURLAllowPublicAccess", "Action": "lambda:InvokeFunctionUrl", "Principal": "*", "FunctionUrlAuthType": "NONE"}
    client.add_permission(**where, **public)
    read = lambda: client.get_function_url_config(**where)
    found = has(read(), {"AuthType": "NONE", "Cors": cors, "InvokeMode": "BUFFERED", "FunctionUrl": created["FunctionUrl"]})
    # The provider takes the URL's id from it.
    assert len(found["FunctionUrl"].split("//")[1].split(".")[0]) == 32, found
    assert found["FunctionArn"].endswith(f":{name}:web"), found
    client.update_function_url_config(**where, AuthType="AWS_IAM", Cors={"AllowOrigins": ["https://example.org"]})
    has(read(), {"AuthType": "AWS_IAM", "Cors": {"AllowOrigins": ["https://example.org"]}})
    assert len(client.list_function_url_configs(FunctionName=name)["FunctionUrlConfigs"]) == 1
    client.remove_permission(**where, StatementId="FunctionURLAllowPublicAccess")
    client.delete_function_url_config(**where)
    gone(client.get_function_url_config, **where)


def provisioned(name):
    """aws_lambda_provisioned_concurrency_config: create, read, update, destroy.

    No microVM starts here, so the status, for which the provider waits, is not READY.
    """
    where = {"FunctionName": name, "Qualifier": client.publish_version(FunctionName=name)["Version"]}
    for count in (1, 2):
        client.put_provisioned_concurrency_config(**where, ProvisionedConcurrentExecutions=count)
        has(client.get_provisioned_concurrency_config(**where), {"RequestedProvisionedConcurrentExecutions": count})
    client.delete_provisioned_concurrency_config(**where)
    try:
        client.get_provisioned_concurrency_config(**where)
    except client.exceptions.ProvisionedConcurrencyConfigNotFoundException:
        return
    raise AssertionError("found the configuration that was deleted")


def refused(name):
    """What is not supported is named, and nothing is half done."""
    calls = {
        "CreateEventSourceMapping": lambda: client.create_event_source_mapping(FunctionName=name, EventSourceArn="arn:aws:sqs:us-east-1:000000000000:q"),
        "PutRuntimeManagementConfig": lambda: client.put_runtime_management_config(FunctionName=name, UpdateRuntimeOn="Auto"),
    }
    for operation, call in calls.items():
        try:
            call()
        except client.exceptions.ClientError as error:
            assert error.response["Error"]["Code"] == "UnknownOperationException", error
            assert operation in error.response["Error"]["Message"], error
        else:
            raise AssertionError(f"{operation} was accepted")


# The provider asks for its account before anything else.
assert boto3.client("sts", **session).get_caller_identity()["Account"] == "000000000000"
assert client.get_account_settings()["AccountUsage"]["FunctionCount"] == 0
functions()
function("f")
for resource in (aliases, permissions, event_invoke_configs, layers, urls, provisioned, refused):
    resource("f")
assert client.get_account_settings()["AccountUsage"]["FunctionCount"] == 1
client.delete_function(FunctionName="f")
gone(client.get_function, FunctionName="f")
assert client.list_functions()["Functions"] == []
print("done")
