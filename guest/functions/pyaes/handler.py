"""FunctionBench's pyaes: encrypts and decrypts a message with AES-CTR, in pure Python.

FunctionBench draws the message at random. This function takes the key, and the message or its seed,
from the event, so that the answer is known.
"""

import hashlib

import pyaes

from given import given


def message(seed, length):
    """`length` letters and digits, the same for the same seed on every machine."""
    letters = b"abcdefghijklmnopqrstuvwxyz0123456789"
    state = seed
    made = bytearray()
    while len(made) < length:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        made.append(letters[(state >> 32) % len(letters)])
    return bytes(made)


def handler(event, context):
    key = bytes.fromhex(event["key"])
    plain = given(event)
    if plain is None:
        plain = message(event["seed"], event["length_of_message"])
    if not plain:
        raise ValueError("the message is empty")
    for _ in range(event.get("num_of_iterations", 1)):
        encrypted = pyaes.AESModeOfOperationCTR(key).encrypt(plain)
        decrypted = pyaes.AESModeOfOperationCTR(key).decrypt(encrypted)
        if decrypted != plain:
            raise ValueError("the message does not survive encryption and decryption")
    return {
        "length": len(encrypted),
        "plain_sha256": hashlib.sha256(plain).hexdigest(),
        "encrypted_sha256": hashlib.sha256(encrypted).hexdigest(),
    }
