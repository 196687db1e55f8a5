"""FunctionBench's pyaes: encrypts and decrypts a message with AES-CTR, in pure Python.

FunctionBench draws the message at random. This function takes key and message from the event, so
that the answer is known.
"""

import hashlib

import pyaes


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
    plain = message(event["seed"], event["length_of_message"])
    for _ in range(event["num_of_iterations"]):
        encrypted = pyaes.AESModeOfOperationCTR(key).encrypt(plain)
        decrypted = pyaes.AESModeOfOperationCTR(key).decrypt(encrypted)
        if decrypted != plain:
            raise ValueError("the message does not survive encryption and decryption")
    return {
        "length": len(encrypted),
        "plain_sha256": hashlib.sha256(plain).hexdigest(),
        "encrypted_sha256": hashlib.sha256(encrypted).hexdigest(),
    }
