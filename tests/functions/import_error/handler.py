import no_such_module


def handler(event, context):
    return no_such_module
