def inner(event):
    return event["missing"]


def handler(event, context):
    return inner({})
