//! Refused commands report the reason and the remedy.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use firn_tests::{Firn, HELLO, World, cache, folder, frozen};

/// A boot of hello with options that must be refused.
#[track_caller]
fn boot(world: &World, options: &[&str]) -> Firn {
    world.firn(["boot"]).args(options).arg(HELLO.write(&world.work()))
}

#[test]
fn missing_files_and_invalid_kernels_are_refused() {
    let world = World::default();
    let root = cache().join("root.erofs");
    boot(&world, &["--kernel", root.to_str().unwrap()]).run().refused(&[
        "root.erofs is not a bootable kernel",
        "not an ELF file",
        "vmlinux",
    ]);
    // The start of a bzImage: a boot sector, and "HdrS" at 0x202.
    let mut packed = vec![0; 1 << 20];
    packed[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    packed[0x202..0x206].copy_from_slice(b"HdrS");
    fs::write(world.file("bzImage"), packed).unwrap();
    boot(&world, &["--kernel", "bzImage"])
        .run()
        .refused(&["bzImage is not a bootable kernel", "uncompressed"]);
    let kernel = fs::read(cache().join("vmlinux")).unwrap();
    fs::write(world.file("half"), &kernel[..kernel.len() / 2]).unwrap();
    boot(&world, &["--kernel", "half"])
        .run()
        .refused(&["half is not a bootable kernel", "truncated"]);
    for file in ["--kernel", "--initramfs", "--root", "--overlay"] {
        let ran = boot(&world, &[file, "missing"]).run();
        ran.refused(&["cannot read missing", "No such file", "make guest", file]);
    }
}

#[test]
fn truncated_disks_are_refused() {
    let world = World::default();
    let root = fs::read(cache().join("root.erofs")).unwrap();
    fs::write(world.file("odd"), &root[..100_000]).unwrap();
    boot(&world, &["--root", "odd"]).run().refused(&["odd", "multiple of 512", "truncated"]);
    fs::write(world.file("empty"), "").unwrap();
    boot(&world, &["--root", "empty"]).run().refused(&["empty", "0 bytes"]);
    // A whole number of sectors: only the guest detects the truncation.
    fs::write(world.file("half"), &root[..root.len() / 2 / 4096 * 4096]).unwrap();
    let ran = boot(&world, &["--root", "half"]).run();
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{ran:#?}");
    for words in ["firn: error: the guest", "end of its console", "root"] {
        assert!(ran.stderr.contains(words), "without {words:?}: {ran:#?}");
    }
}

#[test]
fn invalid_sizes_are_refused() {
    let world = World::default();
    let host = rustix::system::sysinfo();
    let host = host.totalram * u64::from(host.mem_unit);
    let more = (host / 4096 * 4096 + 4096).to_string();
    let memory = |size: &str| boot(&world, &[&format!("--memory={size}")]).run();
    memory("0").refused(&["guest memory of 0 bytes", "128 MiB"]);
    memory("4097").refused(&["4097 bytes", "multiple of the page size"]);
    memory(&more).refused(&[&more, "exceeds the host's", &host.to_string()]);
    for small in ["4096", "16M", "64M"] {
        memory(small).refused(&["too small", "128 MiB"]);
    }
    for wrong in ["", "-1", "lots", "1X", "99999999999G"] {
        memory(wrong).wrong_arguments(&["--memory"]);
    }
    for vcpus in ["0", "33"] {
        let ran = boot(&world, &["--vcpus", vcpus]).run();
        ran.refused(&[&format!("{vcpus} vCPUs"), "1 to 32"]);
    }
    boot(&world, &["--vcpus", "many"]).run().wrong_arguments(&["--vcpus"]);
    let long = "word ".repeat(1000);
    boot(&world, &["--cmdline", &long]).run().refused(&["command line", "bytes"]);
}

#[test]
fn invalid_functions_are_refused() {
    let world = World::default();
    let boot = |path: &str| world.firn(["boot", path]).run();
    boot("missing").refused(&["missing does not exist", "a function's folder"]);
    fs::write(world.file("text.txt"), "text").unwrap();
    boot("text.txt").refused(&["text.txt is not Python"]);
    fs::create_dir(world.file("empty")).unwrap();
    boot("empty").refused(&["empty holds no handler.py"]);
    folder(&world.work(), "bad name", "def handler(event, context): pass");
    boot("bad name").refused(&["bad name", "cannot name a function"]);
    let large = folder(&world.work(), "large", "def handler(event, context): pass");
    fs::File::create(large.join("weights")).unwrap().set_len(17 << 20).unwrap();
    boot("large").refused(&["large", "over the limit"]);
}

#[test]
fn names_in_use_and_invalid_names_are_refused() {
    let world = World::default();
    let _monitor = world.firn(["thaw", "--name", "taken"]).arg(frozen(&HELLO)).start().ready();
    let taken = ["a microVM named taken is already running", "another name"];
    boot(&world, &["--name", "taken"]).run().refused(&taken);
    world.firn(["thaw", "--name", "taken"]).arg(frozen(&HELLO)).run().refused(&taken);
    for name in ["", "../up", "Large", "a b", "-a", &"a".repeat(64)] {
        let named = format!("--name={name}");
        boot(&world, &[&named]).run().refused(&["is no name for a microVM", "a-z"]);
    }
    world.firn(["invoke", "other", "{}"]).run().refused(&["no microVM named other", "taken"]);
    let answer = world.firn(["invoke", "taken", HELLO.input_b]).run();
    assert_eq!(answer.ok(), HELLO.expected_b);
}

#[test]
fn missing_and_invalid_kvm_devices_are_refused() {
    let world = World::default();
    let missing = ["/dev/nonesuch does not exist", "kvm_intel or kvm_amd"];
    boot(&world, &["--kvm", "/dev/nonesuch"]).run().refused(&missing);
    boot(&world, &["--kvm", "/dev/nonesuch", "--detach"]).run().refused(&missing);
    let thaw = world.firn(["thaw", "--kvm", "/dev/nonesuch"]).arg(frozen(&HELLO));
    thaw.run().refused(&missing);
    boot(&world, &["--kvm", "/dev/null"]).run().refused(&["/dev/null cannot be used as KVM"]);
}

/// The user `nobody`.
const USER: u32 = 65534;

/// As a user that may read all files but not use KVM.
#[test]
fn kvm_without_permission_is_refused() {
    if !firn_required::has("root", rustix::process::geteuid().is_root()) {
        // Only root can become another user.
        return;
    }
    let world = World::default();
    let (run, tmp) = (world.run_directory(), world.file("../tmp"));
    fs::set_permissions(run.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    for folder in [run, tmp] {
        std::os::unix::fs::chown(folder, Some(USER), Some(USER)).unwrap();
    }
    // Files that this user may read. The boot fails before it reads them.
    fs::write(world.file("zeros"), [0; 4096]).unwrap();
    // A device like /dev/kvm, for root only: this machine's may be open to all users.
    let device = world.file("kvm");
    let kvm = fs::metadata("/dev/kvm").unwrap();
    let number = std::os::unix::fs::MetadataExt::rdev(&kvm);
    let kind = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(rustix::fs::CWD, &device, kind, 0o600.into(), number).unwrap();
    // This user cannot build all walls.
    let run = world.firn(["boot", "--jail", "auto", "--kvm", device.to_str().unwrap()]);
    let run = run.arg(HELLO.write(&world.work()));
    let run = run.args(["--kernel", "zeros", "--initramfs", "zeros", "--root", "zeros"]);
    let run = run.args(["--overlay", "zeros"]).with(|command| command.uid(USER).gid(USER));
    run.run().refused(&["no permission to open", "group"]);
}

#[test]
fn wrong_arguments_are_reported_with_the_usage() {
    let world = World::default();
    world.firn(["freeze"]).run().wrong_arguments(&["SNAPSHOT", "Usage"]);
    world.firn(["thaw", "--keep", "snapshot"]).run().wrong_arguments(&["--invoke"]);
    world.firn(["nonesuch"]).run().wrong_arguments(&["nonesuch"]);
    world.firn(["thaw", "--time-limit", "soon", "snapshot"]).run().wrong_arguments(&["time-limit"]);
    for command in ["boot", "freeze", "thaw", "invoke", "plan", "verify", "doctor", "lab"] {
        let help = world.firn([command, "--help"]).run();
        assert!(help.ok().contains("Usage: firn"), "{help:#?}");
    }
    let report = world.firn(["doctor", "--json"]).run();
    assert!(report.code <= 1, "{report:#?}");
    serde_json::from_str::<serde_json::Value>(&report.stdout).unwrap();
}
