"""Calls a function without a microVM: python3 answers.py DIRECTORY [write]

With `write`, stores its answers as expected-a.json and expected-b.json. Without it, prints them
with their durations in seconds. Run it on the image that the function needs, for instance in a
chroot.
"""

import json
import pathlib
import sys
import time
import tomllib

folder = pathlib.Path(sys.argv[1]).resolve()
settings = folder / "function.toml"
others = tomllib.loads(settings.read_text()).get("files_of", []) if settings.exists() else []
sys.path[:0] = [str(folder), *(str(folder / other) for other in reversed(others))]
sys.dont_write_bytecode = True

begin = time.monotonic()
from handler import handler  # noqa: E402  (the import path is set above)

loaded = time.monotonic() - begin
for which in "ab":
    begin = time.monotonic()
    answer = json.dumps(handler(json.loads((folder / f"input-{which}.json").read_text()), None))
    if "write" in sys.argv[2:]:
        (folder / f"expected-{which}.json").write_text(answer + "\n")
    else:
        print("%-18s %s load %6.2f call %6.2f %s" % (folder.name, which, loaded, time.monotonic() - begin, answer))
