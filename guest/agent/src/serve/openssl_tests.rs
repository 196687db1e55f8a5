//! On a Python process of the host, whose `ssl` has OpenSSL.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use super::*;

/// For each line of input, draws a value, and prints how often the generator has reseeded.
const PROGRAM: &str = "\
import ctypes, os, ssl, sys
class Param(ctypes.Structure):
    _fields_ = [('key', ctypes.c_char_p), ('type', ctypes.c_uint), ('data', ctypes.c_void_p),
                ('size', ctypes.c_size_t), ('returned', ctypes.c_size_t)]
crypto = ctypes.CDLL('libcrypto.so.3')
crypto.RAND_get0_public.restype = ctypes.c_void_p
count = ctypes.c_uint()
data = ctypes.cast(ctypes.pointer(count), ctypes.c_void_p)
params = (Param * 2)(Param(b'reseed_counter', 2, data, 4, 0), Param())
def draw():
    ssl.RAND_bytes(8)
    drbg = ctypes.c_void_p(crypto.RAND_get0_public(None))
    assert crypto.EVP_RAND_CTX_get_params(drbg, params)
    print(count.value, os.getpid(), flush=True)
draw()
for line in sys.stdin:
    draw()
";

#[test]
fn generators_reseed_once_for_each_number() {
    let mut python = Command::new("python3");
    python.args(["-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = python.spawn().unwrap();
    let process = child.id();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut read = || {
        let line = lines.next().unwrap().unwrap();
        let (count, pid) = line.split_once(' ').unwrap();
        assert_eq!(pid, process.to_string(), "other programs know their process id");
        count.parse::<u32>().unwrap()
    };
    let first = read();
    let mut draw = || {
        writeln!(input).unwrap();
        read() - first
    };
    assert_eq!([draw(), draw()], [0, 0]);
    let mut copies = Copies::take_over(&[process], &Copies::default()).unwrap();
    assert_eq!(copies.taken_over.len(), 1);
    assert_eq!([draw(), draw()], [1, 1]);
    copies.renew().unwrap();
    assert_eq!([draw(), draw()], [2, 2]);
    // As for the next freeze, of a clone that did not draw meanwhile.
    copies.renew().unwrap();
    let mut again = Copies::take_over(&[process], &copies).unwrap();
    assert_eq!(again.taken_over[0].1, copies.taken_over[0].1, "the same place");
    again.renew().unwrap();
    assert_eq!([draw(), draw()], [3, 3]);
    drop(input);
    child.wait().unwrap();
    // As in a clone whose process was killed since its own freeze.
    again.renew().unwrap();
}

#[test]
fn process_without_openssl_is_left_alone() {
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let copies = Copies::take_over(&[child.id()], &Copies::default()).unwrap();
    assert!(copies.taken_over.is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
}
