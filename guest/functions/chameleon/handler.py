"""FunctionBench's chameleon: renders a table of numbers as HTML."""

import hashlib

from chameleon import PageTemplate

TEMPLATE = """\
<table xmlns="http://www.w3.org/1999/xhtml" xmlns:tal="http://xml.zope.org/namespaces/tal">
<tr tal:repeat="row python: options['table']">
<td tal:repeat="c python: row.values()">
<span tal:define="d python: c + 1" tal:attributes="class python: 'column-' + str(d)" tal:content="python: d" />
</td>
</tr>
</table>"""


def handler(event, context):
    template = PageTemplate(TEMPLATE)
    row = {str(column): column for column in range(event["num_of_cols"])}
    page = template.render(options={"table": [row] * event["num_of_rows"]})
    return {"characters": len(page), "cells": page.count("<td>"), "sha256": hashlib.sha256(page.encode()).hexdigest()}
