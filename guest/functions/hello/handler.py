"""FaaSnap's hello-world: the smallest function, with a name so that answers differ."""


def handler(event, context):
    return {"greeting": "Hello, %s!" % event["name"]}
