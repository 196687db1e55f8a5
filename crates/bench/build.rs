//! Builds the player, a guest that needs other compiler flags than a program of the host, and lists
//! the repository's traces. The `firn` binary contains both. Sets the commit that results name.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Flags for a flat image without the host's runtime.
const LINK: [&str; 5] = [
    "link-arg=-nostartfiles",
    "link-arg=-nostdlib",
    "link-arg=-static",
    "link-arg=-Wl,--build-id=none",
    "link-arg=-Wl,--oformat=binary",
];

fn main() -> io::Result<()> {
    // The current path: a target folder may be used by another checkout later.
    let here = env::var_os("CARGO_MANIFEST_DIR").ok_or(io::ErrorKind::NotFound)?;
    let root = Path::new(&here).join("../..").canonicalize()?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(io::ErrorKind::NotFound)?);
    name_commit(&root);
    build_player(&root.join("guest/player"), &out)?;
    list_traces(
        &["traces", "traces/sizes", "traces/paper"].map(|folder| root.join(folder)),
        &out.join("traces.rs"),
    )
}

/// Sets `FIRN_COMMIT`: the commit, with `+changes` if the sources differ from it; `unknown` outside
/// git.
fn name_commit(root: &Path) {
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).map_or("unknown".to_owned(), |commit| {
        let changed = git(&["status", "--porcelain"]).is_none_or(|changes| !changes.is_empty());
        if changed { format!("{commit}+changes") } else { commit }
    });
    println!("cargo::rustc-env=FIRN_COMMIT={commit}");
    // The commit and the sources decide the result.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    for sources in ["crates", "guest", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", root.join(sources).display());
    }
}

/// The output of git; `None` without git or outside a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn build_player(source: &Path, out: &Path) -> io::Result<()> {
    println!("cargo::rerun-if-changed={}", source.display());
    let rlib = out.join("libfirn_player.rlib");
    rustc("rlib", "firn_player", &source.join("src/lib.rs"), &rlib, &[])?;
    let mut library = OsString::from("firn_player=");
    library.push(&rlib);
    for (name, program, script) in
        [("player", "main.rs", "player.ld"), ("boot", "boot.rs", "boot.ld")]
    {
        let mut link = OsString::from("link-arg=-Wl,-T,");
        link.push(source.join(script));
        let mut arguments: Vec<&OsStr> = vec!["--extern".as_ref(), &library, "-C".as_ref(), &link];
        for argument in LINK {
            arguments.extend([OsStr::new("-C"), OsStr::new(argument)]);
        }
        let image = out.join(name).with_extension("bin");
        rustc("bin", name, &source.join("src").join(program), &image, &arguments)?;
    }
    Ok(())
}

fn rustc(kind: &str, name: &str, source: &Path, out: &Path, more: &[&OsStr]) -> io::Result<()> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command.args(["--edition", "2024", "--target", TARGET]);
    command.args(["--crate-type", kind, "--crate-name", name]);
    for option in [
        "panic=abort",
        "opt-level=3",
        "codegen-units=1",
        "relocation-model=static",
        "target-feature=+crt-static",
    ] {
        command.args(["-C", option]);
    }
    command.args(more).arg(source).arg("-o").arg(out);
    match command.status()? {
        status if status.success() => Ok(()),
        status => Err(io::Error::other(format!("{command:?}: {status}"))),
    }
}

/// Writes `&[("NAME", include_bytes!("…/NAME.trace")), …]`, in order of the paths.
fn list_traces(folders: &[PathBuf], list: &Path) -> io::Result<()> {
    let mut traces = Vec::new();
    for folder in folders {
        println!("cargo::rerun-if-changed={}", folder.display());
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension() == Some(OsStr::new("trace")) {
                traces.push(path);
            }
        }
    }
    traces.sort();
    let mut text = String::from("&[\n");
    for path in traces {
        let name = path.file_stem().map(OsStr::to_string_lossy).unwrap_or_default();
        writeln!(text, "({name:?}, include_bytes!({:?})),", path.display().to_string())
            .map_err(io::Error::other)?;
    }
    text.push(']');
    fs::write(list, text)
}
