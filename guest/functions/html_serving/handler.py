"""SeBS's dynamic-html, which FaaSMem calls html_serving: renders a page's template with Jinja."""

import datetime
import hashlib

from jinja2 import Template

PAGE = """\
<!DOCTYPE html>
<html>
  <head><title>Randomly generated data.</title></head>
  <body>
    <p>Welcome {{ username }}!</p>
    <p>Data generated at: {{ cur_time }}!</p>
    <p>Requested random numbers:</p>
    <ul>
      {% for number in random_numbers %}<li>{{ number }}</li>
      {% endfor %}
    </ul>
  </body>
</html>
"""


def numbers(seed, count):
    state = seed
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield (state >> 33) % 1000000


def handler(event, context):
    page = Template(PAGE).render(
        username=event["username"],
        cur_time=datetime.datetime.fromtimestamp(event["time"], datetime.timezone.utc),
        random_numbers=numbers(event["seed"], event["random_len"]),
    )
    return {"characters": len(page), "sha256": hashlib.sha256(page.encode()).hexdigest()}
