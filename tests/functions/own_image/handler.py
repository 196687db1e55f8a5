"""Needs an image of its own: YAML from a Debian package, MessagePack from a wheel, both with parts that are not Python."""

import msgpack
import msgpack._cmsgpack
import yaml


def handler(event, context):
    packed = msgpack.packb(yaml.load(event["yaml"], yaml.CSafeLoader))
    return msgpack.unpackb(packed)
