"""What an event brings instead of a seed: a file in the guest, or bytes in base64."""

import base64
import binascii


def given(event):
    """The bytes, or None if the event has a seed."""
    kind = of_event(event)
    if kind == "file":
        try:
            with open(event["file"], "rb") as file:
                return file.read()
        except OSError as error:
            raise ValueError("the guest cannot read the file of the event: %s" % error) from None
    if kind == "base64":
        try:
            return base64.b64decode(event["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError("base64 of the event is not valid: %s" % error) from None
    return None


def of_event(event):
    """The key that the event has, exactly one of the three."""
    kinds = [kind for kind in ("seed", "file", "base64") if kind in event]
    if len(kinds) != 1:
        raise ValueError("the event needs one of seed, file and base64, and has %s" % (" and ".join(kinds) or "none"))
    return kinds[0]
