//! The functions, as part of the test program, because it also runs without the repository.

use std::fs;
use std::path::{Path, PathBuf};

/// A function with two inputs and their answers.
#[derive(Debug)]
pub struct Function {
    /// Its name.
    pub name: &'static str,
    handler: &'static str,
    /// The event before the freeze.
    pub input_a: &'static str,
    /// The exact answer to it.
    pub expected_a: &'static str,
    /// The event after a thaw.
    pub input_b: &'static str,
    /// The exact answer to it.
    pub expected_b: &'static str,
}

macro_rules! function {
    ($name:literal) => {
        function!($name, $name)
    };
    ($name:literal, $code:literal) => {
        Function {
            name: $name,
            handler: include_str!(concat!("../../guest/functions/", $code, "/handler.py")),
            input_a: include_str!(concat!("../../guest/functions/", $name, "/input-a.json")),
            expected_a: include_str!(concat!("../../guest/functions/", $name, "/expected-a.json")),
            input_b: include_str!(concat!("../../guest/functions/", $name, "/input-b.json")),
            expected_b: include_str!(concat!("../../guest/functions/", $name, "/expected-b.json")),
        }
    };
}

/// The module that reads what an event brings; functions have it by `files_of`.
const GIVEN: &str = include_str!("../../guest/functions/compression/given.py");

/// The papers' functions that run on the base image in little time.
pub const LIGHT: [Function; 5] = [
    function!("chameleon"),
    function!("compression"),
    function!("html_serving"),
    function!("json_serdes", "json"),
    function!("pyaes"),
];

/// FaaSnap's hello-world.
pub const HELLO: Function = function!("hello");
/// FunctionBench's json.
pub const JSON: Function = function!("json");
/// FaaSnap's synthetic read-list.
pub const READ_LIST: Function = function!("read-list");
/// FaaSnap's synthetic mmap.
pub const MMAP: Function = function!("mmap");

macro_rules! test_functions {
    ($($name:literal),*) => { [$(($name, include_str!(concat!("../functions/", $name, "/handler.py")))),*] };
}

const TEST_FUNCTIONS: [(&str, &str); 7] = test_functions![
    "exits",
    "identity",
    "machine",
    "never_returns",
    "raises",
    "ten_megabytes",
    "unserialisable"
];

/// Calls the handler of the module that the event names. All modules are imported before the
/// freeze.
const WORKSHOP: &str = "\
import exits, identity, machine, never_returns, raises, ten_megabytes, unserialisable


def handler(event, context):
    return globals()[event['module']].handler(event['event'], context)
";

impl Function {
    /// Writes the function into the folder `parent`/NAME, and returns that folder.
    pub fn write(&self, parent: &Path) -> PathBuf {
        let made = folder(parent, self.name, self.handler);
        fs::write(made.join("given.py"), GIVEN).unwrap();
        made
    }
}

/// Writes one function that contains all of `functions`, because boots take long in the lab. Its
/// event is `{"function": name, "event": its event}`.
pub fn together(parent: &Path, functions: &[Function]) -> PathBuf {
    let module = |function: &Function| format!("its_{}", function.name.replace('-', "_"));
    let modules: Vec<String> = functions.iter().map(module).collect();
    let handler = format!(
        "import {}\n\n\ndef handler(event, context):\n    \
         name = 'its_' + event['function'].replace('-', '_')\n    \
         return globals()[name].handler(event['event'], context)\n",
        modules.join(", ")
    );
    let made = folder(parent, "together", &handler);
    fs::write(made.join("given.py"), GIVEN).unwrap();
    for (function, module) in functions.iter().zip(modules) {
        fs::write(made.join(module).with_extension("py"), function.handler).unwrap();
    }
    made
}

/// Writes a function of one file below `parent`, and returns its folder.
pub fn folder(parent: &Path, name: &str, handler: &str) -> PathBuf {
    let folder = parent.join(name);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("handler.py"), handler).unwrap();
    folder
}

/// Writes one function that contains the tests' own functions. Its event is
/// `{"module": name, "event": its event}`.
pub fn workshop_folder(parent: &Path) -> PathBuf {
    let made = folder(parent, "workshop", WORKSHOP);
    for (name, handler) in TEST_FUNCTIONS {
        fs::write(made.join(name).with_extension("py"), handler).unwrap();
    }
    made
}

/// Writes the function that uses clients, with the certificate authority that they trust.
pub(crate) fn client_folder(parent: &Path, authority: &Path) -> PathBuf {
    let made = folder(parent, "client", include_str!("../functions/client/handler.py"));
    fs::copy(authority, made.join("ca.pem")).unwrap();
    made
}
