//! Runs commands in the real lab. `make lab-tests` builds the lab and runs these tests.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

fn lab(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
    command
        .args(["lab", "run"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(arguments: &[&str]) -> Output {
    lab(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// firn's cache.
fn cache() -> PathBuf {
    let cache = std::env::var_os("FIRN_CACHE").map(PathBuf::from);
    cache.unwrap_or_else(|| Path::new(&std::env::var_os("HOME").unwrap()).join(".cache/firn"))
}

/// The files in the lab's folder, where a run also has its temporary files.
fn lab_files() -> BTreeSet<PathBuf> {
    fs::read_dir(cache().join("lab")).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// State and parent of a process, if it exists.
fn state(process: &Path) -> Option<(String, u32)> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

/// Starts an endless command, sends `signal` to firn, and returns firn's exit code and its
/// standard error. Fails if QEMU or a file remains.
fn stopped(signal: Signal) -> (Option<i32>, String) {
    let before = lab_files();
    let mut firn = lab(&["--", "sh", "-c", "echo up; sleep 1000"]).spawn().unwrap();
    let mut stdout = firn.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 3]).unwrap();
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let children: Vec<PathBuf> = processes
        .filter(|process| state(process).is_some_and(|(_, parent)| parent == firn.id()))
        .collect();
    assert_eq!(children.len(), 1, "QEMU is the only child of firn");
    kill_process(Pid::from_child(&firn), signal).unwrap();
    let mut error = String::new();
    firn.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    let code = firn.wait().unwrap().code();
    for child in children {
        // If firn is killed, init reaps QEMU after a moment.
        while state(&child).is_some_and(|(state, _)| state != "Z") {
            std::thread::yield_now();
        }
    }
    assert_eq!(lab_files(), before);
    (code, error)
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn a_lab_that_counts_instructions_sets_firn_lab_clock_and_has_one_processor() {
    // No instruction is executed in 1000 s of sleep.
    let script =
        "nproc; echo $FIRN_LAB_CLOCK; grep -o 'word=.*' /proc/cmdline; sleep 1000; ls /dev/kvm";
    let words = ["--cmdline", "word=1 other"];
    let ran = output(&[&["--icount"], &words[..], &["--", "sh", "-c", script]].concat());
    assert_eq!(text(&ran.stdout), "1\ninstructions\nword=1 other\n/dev/kvm\n");
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn files_output_results_and_exit_code_pass_unchanged() {
    let here = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..=255).cycle().take(16 << 20).collect();
    fs::write(here.path().join("bytes"), &bytes).unwrap();
    let folder = here.path().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(
        folder.join("script"),
        "cat /in/bytes; echo \"$WORD\" >&2; cp /in/bytes /out/copy; sleep 1000 & exit 7",
    )
    .unwrap();
    let results = here.path().join("results");
    let ran = output(&[
        "--in",
        here.path().join("bytes").to_str().unwrap(),
        "--in",
        folder.to_str().unwrap(),
        "--out",
        results.to_str().unwrap(),
        "--env",
        "WORD=snow ice",
        "--",
        "sh",
        "/in/folder/script",
    ]);
    assert_eq!(text(&ran.stderr), "snow ice\n");
    assert_eq!(ran.status.code(), Some(7));
    assert!(ran.stdout == bytes, "{} bytes arrived", ran.stdout.len());
    assert!(fs::read(results.join("copy")).unwrap() == bytes);
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn the_lab_provides_what_a_command_needs() {
    let script = "set -e
        test -c /dev/kvm; test -c /dev/dax0.0; cat /sys/bus/dax/devices/dax0.0/size; cat /sys/module/kvm_amd/parameters/npt
        ls /cache/guest; mount | grep -c -e ' /scratch type ext4' -e ' /run type tmpfs' -e ' /tmp type tmpfs' -e ' type tracefs'
        echo $TMPDIR $FIRN_CACHE; firn --version | cut -d' ' -f1; ping -c1 -q 127.0.0.1 >/dev/null";
    let ran = output(&["--pmem-size", "128M", "--json", "--", "sh", "-c", script]);
    let expected = "{\"exit_code\":0,\"stdout\":\"134217728\\nY\\nimages\\ninitramfs.cpio\\noverlay.ext4\\npackages\\nroot.erofs\\nvmlinux\\n\
        4\\n/scratch /cache\\nfirn\\n\",\"stderr\":\"\"}\n";
    assert_eq!(text(&ran.stdout), expected, "{}", text(&ran.stderr));
    assert_eq!(ran.status.code(), Some(0));
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn two_runs_at_once_are_separate() {
    let killed =
        lab(&["--", "sh", "-c", "echo one > /scratch/file; cat /scratch/file; kill -9 $$"])
            .spawn()
            .unwrap();
    let absent = lab(&["--", "no-such-command"]).spawn().unwrap();
    let killed = killed.wait_with_output().unwrap();
    let absent = absent.wait_with_output().unwrap();
    assert_eq!((text(&killed.stdout), killed.status.code()), ("one\n", Some(137)));
    assert_eq!(absent.status.code(), Some(127));
    assert!(
        text(&absent.stderr).contains("no-such-command cannot be run"),
        "{}",
        text(&absent.stderr)
    );
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn a_stopped_run_leaves_nothing() {
    let (code, error) = stopped(Signal::TERM);
    assert_eq!(
        (code, error.as_str()),
        (Some(143), "firn: error: the lab was stopped by signal 15\n")
    );
    let (code, error) = stopped(Signal::INT);
    assert_eq!(
        (code, error.as_str()),
        (Some(130), "firn: error: the lab was stopped by signal 2\n")
    );
    let (code, _) = stopped(Signal::KILL);
    assert_eq!(code, None);
    let late = output(&["--timeout", "5", "--", "sleep", "1000"]);
    assert_eq!(late.status.code(), Some(124));
    assert!(text(&late.stderr).contains("did not exit within 5 s"), "{}", text(&late.stderr));
}

/// A devdax supports only mappings, so the guest's Python runs `code` on `dax`, a mapping of its
/// first 2 MiB.
fn python_on_dax(pmem: &str, code: &str) -> Output {
    let script = format!(
        "mkdir /tmp/root && mount -t erofs -o ro,loop /cache/guest/root.erofs /tmp/root && mount -o bind /dev /tmp/root/dev &&
        chroot /tmp/root python3 -c \"
import mmap, os
dax = mmap.mmap(os.open('/dev/dax0.0', os.O_RDWR), 2 << 20)
{code}\""
    );
    output(&["--pmem", pmem, "--pmem-size", "64M", "--", "sh", "-c", &script])
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn persistent_memory_is_kept_after_the_machine_exits() {
    let here = tempfile::tempdir().unwrap();
    let pmem = here.path().join("pmem");
    let path = pmem.to_str().unwrap();
    let wrote = python_on_dax(path, "dax[:12] = b'lasting snow'");
    assert!(wrote.status.success(), "{}", text(&wrote.stderr));
    // The device's data starts 2 MiB into its file.
    let mut content = [0; 12];
    fs::File::open(&pmem).unwrap().read_exact_at(&mut content, 2 << 20).unwrap();
    assert_eq!(&content, b"lasting snow");
    let read = python_on_dax(path, "print(dax[:12].decode())");
    assert_eq!(text(&read.stdout), "lasting snow\n", "{}", text(&read.stderr));
}

#[test]
#[ignore = "needs the lab: make lab-tests"]
fn a_kernel_panic_is_reported_as_an_error_of_the_lab() {
    let died = output(&["--", "sh", "-c", "echo c > /proc/sysrq-trigger; sleep 1000"]);
    assert_eq!(died.status.code(), Some(125));
    let error = text(&died.stderr);
    assert!(error.contains("stopped before the command exited"), "{error}");
    assert!(error.contains("Kernel panic - not syncing: sysrq triggered crash"), "{error}");
}

/// The lab's QEMU with only a kernel. Its serial port is standard input and output.
fn bare_qemu(cpu: &str, kernel: &Path) -> Command {
    let root = cache().join("lab/qemu");
    let libraries =
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"].map(|folder| root.join(folder));
    let mut command = Command::new(libraries[0].join("ld-linux-x86-64.so.2"));
    command
        .env_clear()
        .env("QEMU_MODULE_DIR", libraries[1].join("qemu"))
        .arg("--library-path")
        .arg(libraries.each_ref().map(|folder| folder.display().to_string()).join(":"))
        .arg(root.join("usr/bin/qemu-system-x86_64"))
        .arg("-L")
        .arg(root.join("usr/share/qemu"))
        .arg("-L")
        .arg(root.join("usr/share/seabios"))
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-accel", "tcg", "-m", "64M", "-serial", "stdio", "-cpu", cpu, "-kernel"])
        .arg(kernel)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

/// QEMU enters the ELF through PVH, in 32-bit mode. In long mode, Intel processors support sysexit
/// and AMD processors do not.
#[test]
#[ignore = "needs the lab: make lab-tests"]
fn the_players_elf_starts_under_qemu() {
    let here = tempfile::tempdir().unwrap();
    let elf = here.path().join("player.elf");
    let made = Command::new(env!("CARGO_BIN_EXE_firn"))
        .args(["player", "--elf", "--trace", "sequential-write:16M", "--out"])
        .arg(&elf)
        .output()
        .unwrap();
    assert!(text(&made.stdout).contains("it needs 17 MiB of guest memory"), "{made:?}");
    for cpu in ["max", "Skylake-Client"] {
        let mut qemu = bare_qemu(cpu, &elf).spawn().unwrap();
        let mut lines = BufReader::new(qemu.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert_eq!(lines.next().unwrap(), "READY", "{cpu}");
        qemu.stdin.take().unwrap().write_all(b"g").unwrap();
        assert!(lines.next().unwrap().starts_with("DONE 4096 "), "{cpu}");
        assert_eq!(lines.next().unwrap(), "END 0", "{cpu}");
        qemu.kill().unwrap();
        qemu.wait().unwrap();
    }
}
