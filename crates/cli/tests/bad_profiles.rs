//! Wrong, stale and damaged profiles and packed files, at the command line. Each case ends in a
//! clear error or in a correct replay: the player checks every byte of its memory.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use firn_base::PageRange;
use firn_snapshot::{Profile, Snapshot, set_profile};
use firn_vmm::{KVM_DEVICE, open_kvm};
use tempfile::TempDir;
use uuid::Uuid;

/// This trace lists no free pages, so a new player has no profile.
const TRACE: &str = "sequential-read:16M";
/// Every planner that requires a part of the profile, and that part.
const LEARNERS: [(&str, &str); 4] =
    [("reap", "faults"), ("faast", "free"), ("faasnap", "groups"), ("snapbpf", "cache")];

struct Player {
    folder: TempDir,
}

impl Player {
    fn new() -> Option<Self> {
        if !firn_required::has("kvm", open_kvm(KVM_DEVICE.as_ref()).is_ok()) {
            return None;
        }
        let player = Self { folder: TempDir::new().unwrap() };
        player.make("s");
        Some(player)
    }

    fn make(&self, name: &str) {
        self.good(&["player", "--dense", "--json", "--trace", TRACE, "--out", name]);
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firn"));
        let output = command.args(arguments).current_dir(self.folder.path()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    #[track_caller]
    fn good(&self, arguments: &[&str]) {
        let (code, error) = self.run(arguments);
        assert_eq!(code, 0, "{arguments:?}: {error}");
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str], words: &[&str]) {
        let (code, error) = self.run(arguments);
        assert_eq!(code, 1, "{arguments:?}: {error}");
        assert!(error.starts_with("firn: error: "), "{error}");
        for word in words {
            assert!(error.contains(word), "{arguments:?}: without {word:?}: {error}");
        }
    }

    fn profile(&self) -> Profile {
        Profile::of(Snapshot::open(self.path()).unwrap().manifest().description.id)
    }

    /// Sets working-set groups as a recording produces them.
    fn set_groups(&self) {
        let groups = Some(vec![vec![run(0, 300)], vec![run(400, 100)]]);
        set_profile(&self.path(), &Profile { groups, ..self.profile() }).unwrap();
    }
}

fn run(first: u64, pages: u64) -> PageRange {
    PageRange { first, pages }
}

/// Writes a profile into a container without validation, because firn refuses to write the profile
/// of another snapshot. The header has 32 bytes, an entry of 24 bytes for each of five sections,
/// and a CRC. The profile is the fourth section.
fn forge(snapshot: &Path, profile: &Profile) {
    let file = snapshot.join("snapshot.firn");
    let bytes = fs::read(&file).unwrap();
    let entry = |section: usize| 32 + section * 24;
    let len = |section: usize| {
        let at = entry(section) + 16;
        usize::try_from(u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())).unwrap()
    };
    let header = entry(5) + 4;
    let start = header + (0..3).map(len).sum::<usize>();
    let new = postcard::to_stdvec(profile).unwrap();
    let mut forged = bytes[..start].to_vec();
    forged.extend(&new);
    forged.extend(&bytes[start + len(3)..]);
    let at = entry(3) + 8;
    forged[at..at + 4].copy_from_slice(&3u32.to_le_bytes());
    forged[at + 4..at + 8].copy_from_slice(&crc32fast::hash(&new).to_le_bytes());
    forged[at + 8..at + 16].copy_from_slice(&(new.len() as u64).to_le_bytes());
    let crc = crc32fast::hash(&forged[..header - 4]);
    forged[header - 4..header].copy_from_slice(&crc.to_le_bytes());
    fs::write(file, forged).unwrap();
}

#[test]
fn a_profile_of_another_snapshot_is_refused_and_can_be_recorded_again() {
    let Some(player) = Player::new() else { return };
    let faults = || Some(vec![run(0, 4)]);
    let of_another = Profile { faults: faults(), ..Profile::of(Uuid::from_u128(7)) };
    let pages = Snapshot::open(player.path()).unwrap().manifest().layout.pages();
    let all = |runs: Vec<PageRange>| Profile {
        faults: Some(runs.clone()),
        groups: Some(vec![runs.clone()]),
        cached: Some(vec![firn_snapshot::CachedRun { run: runs[0], at_ns: 0 }]),
        free: Some(runs),
        ..player.profile()
    };
    let beyond = all(vec![run(pages - 1, 2)]);
    for (forged, word) in [(&of_another, "was recorded of snapshot"), (&beyond, "guest memory has")]
    {
        forge(&player.path(), forged);
        for (planner, _) in LEARNERS {
            player.refused(&["thaw", "--planner", planner, "s"], &["profile"]);
            if planner != "snapbpf" {
                player.refused(&["profile", "pack", "--planner", planner, "s"], &["profile"]);
            }
        }
        player.refused(&["profile", "show", "s"], &[word]);
        // A planner that does not use the profile is not affected.
        player.good(&["thaw", "--planner", "firecracker", "s"]);
    }
    let (code, error) = player.run(&["profile", "record", "--part", "faults", "s"]);
    assert!(code == 0 && error.contains("is given up"), "{error}");
    player.good(&["profile", "pack", "--planner", "reap", "s"]);
    player.good(&["thaw", "--planner", "reap", "s"]);
}

#[test]
fn a_page_beyond_memory_is_refused_in_every_part() {
    let Some(player) = Player::new() else { return };
    let pages = Snapshot::open(player.path()).unwrap().manifest().layout.pages();
    let (good, bad) = (run(0, 2), run(pages - 1, 2));
    let runs = || Some(vec![good, bad]);
    let cached = [good, bad].map(|run| firn_snapshot::CachedRun { run, at_ns: 0 });
    let own = || player.profile();
    for (part, forged) in [
        ("the fault order", Profile { faults: runs(), ..own() }),
        ("the write set", Profile { written: runs(), ..own() }),
        ("the free set", Profile { free: runs(), ..own() }),
        ("the reported set", Profile { reported: runs(), ..own() }),
        ("the set of small leaves", Profile { small_leaves: runs(), ..own() }),
        ("the working-set groups", Profile { groups: Some(vec![vec![good], vec![bad]]), ..own() }),
        ("the order of the page cache", Profile { cached: Some(cached.to_vec()), ..own() }),
    ] {
        forge(&player.path(), &forged);
        let message = format!(
            "{part} of the profile names page {pages:#x}, guest memory has {pages:#x} pages; record it again"
        );
        player.refused(&["profile", "show", "s"], &[&message]);
        for (planner, _) in LEARNERS {
            player.refused(&["plan", "--planner", planner, "s"], &[&message]);
            player.refused(&["thaw", "--planner", planner, "s"], &[&message]);
        }
        player.good(&["thaw", "--planner", "firecracker", "s"]);
    }
}

#[test]
fn recording_a_damaged_image_is_refused() {
    use std::os::unix::fs::FileExt;
    let Some(player) = Player::new() else { return };
    player.good(&["profile", "record", "--part", "faults,writes", "s"]);
    let before = fs::read(player.file("snapshot.firn")).unwrap();
    let image = fs::OpenOptions::new().write(true).open(player.file("memory.img")).unwrap();
    image.write_all_at(&[0xee], 77 * 4096 + 8).unwrap();
    for part in ["faults", "writes", "groups", "cache"] {
        let record: &[&str] = &["profile", "record", "--part", part, "s"];
        player.refused(record, &["page 77 of the image is damaged", "firn verify"]);
    }
    player.refused(&["profile", "record", "s"], &["page 77 of the image is damaged"]);
    assert!(fs::read(player.file("snapshot.firn")).unwrap() == before);
}

#[test]
fn a_recording_cannot_be_frozen_into_the_recorded_snapshot() {
    let Some(player) = Player::new() else { return };
    std::os::unix::fs::symlink("s", player.folder.path().join("link")).unwrap();
    let files = || {
        let mut files: Vec<_> = fs::read_dir(player.path())
            .unwrap()
            .map(|file| file.unwrap().path())
            .map(|path| (fs::metadata(&path).unwrap().modified().unwrap(), path))
            .collect();
        files.sort();
        files
    };
    let before = files();
    let whole = player.path();
    for second in ["s", "./s/", "link", "s/../s", whole.to_str().unwrap()] {
        let freeze: &[&str] = &["profile", "record", "--invoke", "{}", "--freeze", second, "s"];
        player.refused(freeze, &["--freeze names the snapshot that is recorded", second]);
    }
    assert_eq!(files(), before);
    player.good(&["thaw", "--planner", "firecracker", "s"]);
}

#[test]
fn an_empty_profile_is_refused_and_empty_parts_load_nothing() {
    let Some(player) = Player::new() else { return };
    let none = |words: &[&str]| {
        for (planner, part) in LEARNERS {
            let remedy = format!("firn profile record --part {part}");
            let words = [words, &[remedy.as_str()]].concat();
            player.refused(&["thaw", "--planner", planner, "s"], &words);
        }
    };
    none(&["needs"]);
    player.refused(&["profile", "show", "s"], &["firn profile record"]);
    set_profile(&player.path(), &player.profile()).unwrap();
    none(&["needs"]);
    player.refused(&["profile", "show", "s"], &["is empty", "firn profile record"]);

    let empty = Profile {
        faults: Some(vec![]),
        groups: Some(vec![]),
        cached: Some(vec![]),
        free: Some(vec![]),
        ..player.profile()
    };
    set_profile(&player.path(), &empty).unwrap();
    for (planner, _) in LEARNERS {
        if planner != "snapbpf" {
            player.good(&["profile", "pack", "--planner", planner, "s"]);
        }
        player.good(&["thaw", "--planner", planner, "s"]);
    }
}

#[test]
fn a_packed_file_of_another_snapshot_is_refused() {
    let Some(player) = Player::new() else { return };
    // A player of the same trace, with an equal profile.
    player.make("other");
    let learnt = |id| Profile {
        faults: Some(vec![run(0, 300)]),
        groups: Some(vec![vec![run(0, 300)]]),
        free: Some(vec![]),
        ..Profile::of(id)
    };
    for name in ["s", "other"] {
        let path = player.folder.path().join(name);
        let id = Snapshot::open(&path).unwrap().manifest().description.id;
        set_profile(&path, &learnt(id)).unwrap();
    }
    for (planner, file) in [
        ("reap", "working-set.img"),
        ("faast", "working-set-used.img"),
        ("faasnap", "loading-set.img"),
    ] {
        let pack: &[&str] = &["profile", "pack", "--planner", planner, "s"];
        let thaw: &[&str] = &["thaw", "--planner", planner, "s"];
        player.good(&["profile", "pack", "--planner", planner, "other"]);
        fs::copy(player.folder.path().join("other").join(file), player.file(file)).unwrap();
        let remedy = format!("firn profile pack --planner {planner}");
        player.refused(thaw, &[file, "was packed from snapshot", &remedy]);
        player.refused(&["verify", "s"], &[file, "was packed from snapshot"]);
        player.good(pack);
        player.good(thaw);
        player.good(&["verify", "s"]);
    }
}

#[test]
fn a_loading_set_that_does_not_match_is_refused() {
    let Some(player) = Player::new() else { return };
    let thaw: &[&str] = &["thaw", "--planner", "faasnap", "s"];
    let remedy = "firn profile pack --planner faasnap:merge=32";
    player.set_groups();
    player.refused(thaw, &["loading-set.img", remedy]);
    player.good(&["profile", "pack", "--planner", "faasnap:merge=0", "s"]);
    player.refused(thaw, &["loading-set.img", remedy]);
    player.good(&["profile", "pack", "--planner", "faasnap", "s"]);
    player.good(thaw);
    player.good(&["verify", "s"]);

    let (own, file) = (player.path(), player.file("loading-set.img"));
    let whole = fs::read(&file).unwrap();
    // A loading set that was packed with another profile.
    let other = Profile { groups: Some(vec![vec![run(7, 9)]]), ..player.profile() };
    set_profile(&own, &other).unwrap();
    player.refused(thaw, &["from another profile", remedy]);
    player.set_groups();
    player.good(thaw);

    // Truncated, extended, or with a damaged header or table.
    let refused = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        player.refused(thaw, &["loading-set.img", remedy]);
        player.refused(&["verify", "s"], &["loading-set.img"]);
    };
    refused(&whole[..whole.len() - 4096]);
    refused(&[whole.clone(), vec![0; 4096]].concat());
    refused(&[]);
    for at in [9, 30, 4096] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        refused(&bytes);
    }
    // The kernel maps the pages without a check, as the plan shows; `firn verify` detects the
    // damage.
    let mut bytes = whole.clone();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    player.refused(&["verify", "s"], &["loading-set.img: 1 damaged pages"]);
    player.good(&["thaw", "--planner", "firecracker", "s"]);
}

#[test]
fn a_verified_thaw_finds_damage_in_what_its_planner_maps_from_files() {
    let Some(player) = Player::new() else { return };
    player.set_groups();
    player.good(&["profile", "pack", "--planner", "faasnap", "s"]);
    let thaw = |planner| ["thaw", "--planner", planner, "--verify", "always", "s"];
    player.good(&thaw("faasnap"));
    player.good(&thaw("firecracker"));
    let plan = Command::new(env!("CARGO_BIN_EXE_firn"))
        .args(["plan", "--planner", "faasnap", "s"])
        .current_dir(player.folder.path())
        .output()
        .unwrap();
    assert!(String::from_utf8(plan.stdout).unwrap().contains("unchecked"));
    let file = player.file("loading-set.img");
    let whole = fs::read(&file).unwrap();
    // A header of one page, a table of one page, 400 pages.
    assert_eq!(whole.len(), 402 * 4096);
    for seed in 0..60 {
        let mut damaged = whole.clone();
        damaged[8192 + (seed * 27_191) % (400 * 4096)] ^= 1 << (seed % 8);
        fs::write(&file, &damaged).unwrap();
        player.refused(&thaw("faasnap"), &["loading-set.img is damaged", "digest"]);
        if seed < 3 {
            player.refused(&["verify", "s"], &["loading-set.img: 1 damaged pages"]);
            // By default nothing is verified, as in the paper: the player gets the wrong byte.
            let unverified = ["thaw", "--planner", "faasnap", "s"];
            player.refused(&unverified, &["restored wrong memory"]);
        }
    }
    fs::write(&file, whole).unwrap();
    player.good(&thaw("faasnap"));
    // The image, at a page that the loading set does not have.
    let image = player.file("memory.img");
    let mut damaged = fs::read(&image).unwrap();
    let page = (600..).find(|page| damaged[page * 4096..][..4096].iter().any(|&b| b != 0)).unwrap();
    damaged[page * 4096] ^= 1;
    fs::write(&image, damaged).unwrap();
    for planner in ["faasnap", "firecracker"] {
        player.refused(&thaw(planner), &["s is damaged", "digest"]);
    }
    player.refused(&["thaw", "--verify", "once", "s"], &["--verify always"]);
}
