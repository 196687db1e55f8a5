//! A `provided` runtime that draws from `rand`'s generator of a thread: in a thread, which reseeds
//! when the generation changes, and in requests, after the main thread has reseeded.
#![allow(clippy::unwrap_used, reason = "a runtime that cannot go on exits")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::time::Duration;
use std::{env, fs, thread};

use rand::RngExt;
use serde_json::{Value, json};

/// What the thread drew since the restore.
static DRAWN: Mutex<Vec<Value>> = Mutex::new(Vec::new());

fn main() {
    draw();
    let (begun, begins) = std::sync::mpsc::channel();
    thread::spawn(move || {
        draw();
        begun.send(()).unwrap();
        draw_forever();
    });
    begins.recv().unwrap();
    call("GET", "restore/next", "");
    rand::rng().reseed().unwrap();
    loop {
        let request = call("GET", "invocation/next", "");
        let id = header(&request, "lambda-runtime-aws-request-id: ");
        let first = draw();
        while DRAWN.lock().unwrap().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        let thread: Vec<Value> = DRAWN.lock().unwrap().clone();
        let answer = json!({ "thread": thread, "request": [first, draw()] });
        call("POST", &format!("invocation/{id}/response"), &answer.to_string());
    }
}

fn draw() -> Value {
    json!({ "rng": format!("{:032x}", rand::rng().random::<u128>()) })
}

/// Draws and keeps at most 100 of the values since the restore: those from before are in every
/// clone.
fn draw_forever() {
    let first = generation();
    let mut seeded = first.clone();
    loop {
        let before = generation();
        if before != seeded {
            rand::rng().reseed().unwrap();
            seeded.clone_from(&before);
        }
        let value = draw();
        // The value of a draw during a restore may have been computed before it.
        if first != before && before == generation() {
            let mut drawn = DRAWN.lock().unwrap();
            if drawn.len() < 100 {
                drawn.push(value);
            }
        }
    }
}

fn generation() -> String {
    fs::read_to_string(env::var("FIRN_GENERATION_FILE").unwrap()).unwrap()
}

/// A call of the Runtime API. Returns the reply's head and body.
fn call(method: &str, path: &str, body: &str) -> String {
    let mut api = TcpStream::connect(env::var("AWS_LAMBDA_RUNTIME_API").unwrap()).unwrap();
    let length = body.len();
    let head = format!("{method} /2018-06-01/runtime/{path} HTTP/1.0\r\nContent-Length: {length}");
    write!(api, "{head}\r\n\r\n{body}").unwrap();
    let mut reply = String::new();
    api.read_to_string(&mut reply).unwrap();
    reply
}

fn header(reply: &str, name: &str) -> String {
    let value =
        reply.lines().find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned));
    value.unwrap()
}
