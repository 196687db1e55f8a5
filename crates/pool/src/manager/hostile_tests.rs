//! Clients that keep what they gave back.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command};
use std::ptr::null_mut;
use std::thread::sleep;
use std::time::Duration;

use firn_base::num::usize_of;
use proptest::prelude::{Strategy, any, prop_assert, prop_oneof, proptest};
use proptest::test_runner::Config;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::tests::{GUEST, World, freeze, refusal};
use super::{Client, Refusal, ReplicaGrant};
use crate::{ExtentGrant, GRANULE, Huge, MappedMedium, MediumKind, MemfdOptions, Role};

/// A mapping of an extent, whose descriptor is closed.
struct Kept {
    start: *mut u8,
    len: usize,
}

impl Kept {
    fn of(grant: &ExtentGrant, protection: ProtFlags) -> Self {
        let len = usize_of(grant.extent().guest_bytes);
        // SAFETY: a new mapping.
        let start = unsafe {
            mmap(null_mut(), len, protection, MapFlags::SHARED, grant.descriptor(), grant.begin())
        };
        Self { start: start.unwrap().cast(), len }
    }

    fn writable(grant: &ExtentGrant) -> Self {
        Self::of(grant, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Keeps the last page.
    fn cut(&mut self) {
        let cut = self.len - 4096;
        // SAFETY: this value's own pages.
        unsafe { munmap(self.start.cast(), cut) }.unwrap();
        (self.start, self.len) = (self.start.wrapping_add(cut), 4096);
    }

    fn fill(&self, byte: u8) {
        // SAFETY: the range is mapped for writing, and no reference points to it.
        unsafe { std::ptr::write_bytes(self.start, byte, self.len) };
    }

    fn read(&self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: the byte is mapped.
        unsafe { self.start.wrapping_add(at).read_volatile() }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: this value's own pages.
        unsafe { munmap(self.start.cast(), self.len) }.unwrap();
    }
}

/// Another process with a descriptor.
struct Other(Child);

impl Other {
    fn with(grant: &ExtentGrant) -> Self {
        let descriptor = grant.descriptor().try_clone_to_owned().unwrap();
        Self(Command::new("sleep").arg("1000").stdin(descriptor).spawn().unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A pool with room for `granules` on one of the media; `None` if the host has not reserved the
/// huge pages for it.
fn world(medium: usize, granules: u64) -> Option<World> {
    let size = (granules + 2) * GRANULE;
    let folder = if medium == 0 { "/dev/shm".into() } else { std::env::temp_dir() };
    let folder = tempfile::tempdir_in(folder).unwrap();
    let memfd = |huge| MappedMedium::memfd(MemfdOptions { size, huge, node: None });
    let medium = match medium {
        0 | 1 => MappedMedium::create_file(&folder.path().join("pool"), size).unwrap(),
        2 => memfd(None).unwrap(),
        _ => memfd(Some(Huge::Size2M)).ok()?,
    };
    Some(World::on(medium, folder))
}

const MEDIA: usize = 4;

/// Pools on all media.
fn worlds(granules: u64) -> impl Iterator<Item = World> {
    (0..MEDIA).filter_map(move |medium| world(medium, granules))
}

fn kind(world: &World) -> MediumKind {
    world.server.pool().medium().kind
}

/// Whether a replica that was just granted equals the snapshot of its name.
fn equals(replica: &ReplicaGrant, client: &mut Client) -> bool {
    let snapshot = client.snapshot("hello").unwrap();
    assert_eq!(snapshot.extent(), replica.source);
    let (mut is, mut was) = (vec![1; usize_of(GUEST)], vec![2; usize_of(GUEST)]);
    replica.grant.map().unwrap().read_guest(0, &mut is);
    snapshot.map().unwrap().read_guest(0, &mut was);
    client.release(snapshot.extent().generation).unwrap();
    is == was
}

/// Takes the replica that was released, as soon as it is handed out again.
fn again(client: &mut Client, generation: u64) -> ReplicaGrant {
    loop {
        let replica = client.replica("hello").unwrap();
        if replica.grant.extent().generation == generation {
            return replica;
        }
        client.release(replica.grant.extent().generation).unwrap();
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_replica_that_is_still_mapped_is_not_handed_out_again() {
    for world in worlds(12) {
        let kind = kind(&world);
        let mut client = world.client();
        freeze(&mut client, "hello", b"snow");
        for (cut, elsewhere) in [(false, false), (true, false), (false, true)] {
            let mut hostile = world.client();
            let replica = hostile.replica("hello").unwrap();
            hostile.confine().unwrap();
            let generation = replica.grant.extent().generation;
            let mut kept = (!elsewhere).then(|| Kept::writable(&replica.grant));
            // A page of 2 MiB is not split.
            if let Some(kept) = kept.as_mut().filter(|_| cut && kind != MediumKind::Hugetlbfs) {
                kept.cut();
            }
            let other = elsewhere.then(|| Other::with(&replica.grant));
            drop(replica);
            hostile.release(generation).unwrap();
            client.settle().unwrap();
            for _ in 0..3 {
                let next = client.replica("hello").unwrap();
                assert_ne!(next.grant.extent().generation, generation, "{kind:?}");
                if let Some(kept) = &kept {
                    kept.fill(7);
                }
                assert!(equals(&next, &mut client), "{kind:?}");
                client.release(next.grant.extent().generation).unwrap();
            }
            drop((kept, other));
            let replica = again(&mut client, generation);
            assert!(equals(&replica, &mut client), "{kind:?}");
            client.release(generation).unwrap();
        }
    }
}

#[test]
fn space_that_is_still_mapped_is_not_used_for_another_snapshot() {
    for world in worlds(12) {
        let kind = kind(&world);
        let mut client = world.client();
        freeze(&mut client, "hello", b"snow");
        let mut hostile = world.client();
        let sealed = hostile.snapshot("hello").unwrap();
        let replica = hostile.replica("hello").unwrap();
        let own = [sealed.extent(), replica.grant.extent()];
        let kept = [Kept::of(&sealed, ProtFlags::READ), Kept::writable(&replica.grant)];
        drop((sealed, replica));
        hostile.confine().unwrap();
        // It runs on without its connection.
        drop(hostile);
        world.settle(1);
        client.reclaim("hello").unwrap();
        client.collect().unwrap();
        kept[1].fill(7);
        assert_eq!(world.count(Role::Superseded), 2, "{kind:?}");
        let mut secrets = Vec::new();
        while let Ok(staging) = client.begin(&format!("ice{}", secrets.len()), GUEST, 100) {
            let (is, extent) = (staging.extent(), staging.map().unwrap());
            let apart = |own: &crate::Extent| {
                is.offset + is.len <= own.offset || own.offset + own.len <= is.offset
            };
            assert!(own.iter().all(apart), "{kind:?}");
            extent.write_guest(0, &vec![9; usize_of(GUEST)]).unwrap();
            secrets.push((is.generation, extent));
        }
        assert!(!secrets.is_empty());
        assert_eq!((kept[0].read(8192), kept[0].read(8195)), (b's', b'w'), "{kind:?}");
        assert!((0..2 << 20).step_by(4096).all(|at| kept[0].read(at) != 9), "{kind:?}");
        let mut bytes = vec![0; usize_of(GUEST)];
        kept[1].fill(6);
        for (_, extent) in &secrets {
            extent.read_guest(0, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == 9), "{kind:?}");
        }
        // As soon as it lets go, the space is free.
        drop(kept);
        let names = ["ice-a", "ice-b"].map(|name| client.begin(name, GUEST, 0));
        assert!(names.iter().any(Result::is_ok), "{kind:?}: {names:?}");
        assert_eq!(world.count(Role::Superseded), 0, "{kind:?}");
    }
}

#[test]
fn a_descriptor_of_a_replica_in_memory_reaches_nothing_else() {
    for world in worlds(12) {
        let kind = kind(&world);
        let memory = matches!(kind, MediumKind::Memfd | MediumKind::Hugetlbfs);
        let mut client = world.client();
        freeze(&mut client, "hello", b"snow");
        let sealed = client.snapshot("hello").unwrap();
        let [first, second] = [(); 2].map(|()| client.replica("hello").unwrap());
        let file = |grant: &ExtentGrant| {
            File::from(grant.descriptor().as_fd().try_clone_to_owned().unwrap())
        };
        let [sealed, first, second] =
            [&sealed, &first.grant, &second.grant].map(|grant| (grant.begin(), file(grant)));
        let inode = |file: &File| file.metadata().unwrap().ino();
        assert_eq!(inode(&first.1) != inode(&second.1), memory, "{kind:?}");
        assert_eq!(inode(&first.1) != inode(&sealed.1), memory, "{kind:?}");
        if memory {
            assert_eq!((first.0, first.1.metadata().unwrap().len()), (0, GUEST));
            // It cannot grow either.
            assert!(first.1.write_all_at(b"mud!", GUEST).is_err());
            assert!(first.1.set_len(2 * GUEST).is_err());
        }
    }
}

#[test]
fn a_list_of_written_pages_is_not_accepted() {
    for world in worlds(8) {
        let mut client = world.client();
        freeze(&mut client, "hello", b"snow");
        let mut hostile = world.client();
        let replica = hostile.replica("hello").unwrap();
        let generation = replica.grant.extent().generation;
        // A page that a sample does not find.
        replica.grant.map().unwrap().write_guest(400 * 4096, b"mud!").unwrap();
        drop(replica);
        let list = format!("{{\"give_back\":{{\"generation\":{generation},\"written\":[]}}}}");
        let answer = hostile.send_raw(list.as_bytes());
        assert_eq!(refusal(&answer.unwrap_err()), Refusal::Invalid);
        drop(hostile);
        let replica = again(&mut client, generation);
        assert!(equals(&replica, &mut client));
    }
}

/// What a client does next.
#[derive(Clone, Debug)]
enum Deed {
    /// Takes a replica, and checks it.
    Take,
    /// Writes to a replica that it has.
    Write { page: u16 },
    /// Releases a replica. It may keep a mapping.
    Release { keeps: bool },
    /// Closes its connection. It may keep a mapping of each replica.
    Close { keeps: bool },
    /// Lets go of a mapping that it kept.
    Unmap,
    /// Another client replaces the snapshot.
    Freeze { text: [u8; 4] },
    /// Another client frees replicas that are ready.
    Collect,
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        4 => proptest::strategy::Just(Deed::Take),
        2 => (0..512_u16).prop_map(|page| Deed::Write { page }),
        3 => any::<bool>().prop_map(|keeps| Deed::Release { keeps }),
        1 => any::<bool>().prop_map(|keeps| Deed::Close { keeps }),
        2 => proptest::strategy::Just(Deed::Unmap),
        1 => any::<[u8; 4]>().prop_map(|text| Deed::Freeze { text }),
        1 => proptest::strategy::Just(Deed::Collect),
    ]
}

proptest! {
    #![proptest_config(Config::with_cases(24))]

    #[test]
    fn a_replica_equals_its_snapshot_whatever_clients_did(
        deeds in proptest::collection::vec(deed(), 1..40),
        medium in 0..MEDIA,
    ) {
        let Some(world) = world(medium, 16) else { return Ok(()) };
        let mut honest = world.client();
        freeze(&mut honest, "hello", b"snow");
        let mut hostile = world.client();
        let mut used: Vec<ReplicaGrant> = Vec::new();
        let mut kept: Vec<Kept> = Vec::new();
        for deed in deeds {
            kept.iter().for_each(|kept| kept.fill(7));
            match deed {
                Deed::Take => match hostile.replica("hello") {
                    Ok(replica) => {
                        kept.iter().for_each(|kept| kept.fill(6));
                        prop_assert!(equals(&replica, &mut honest));
                        used.push(replica);
                    }
                    Err(error) => assert_eq!(refusal(&error), Refusal::Full),
                },
                Deed::Write { page } => {
                    if let Some(replica) = used.last() {
                        let memory = replica.grant.map().unwrap();
                        memory.write_guest(u64::from(page) * 4096 + 1, &[5]).unwrap();
                    }
                }
                Deed::Release { keeps } => {
                    if let Some(replica) = used.pop() {
                        kept.extend(keeps.then(|| Kept::writable(&replica.grant)));
                        let generation = replica.grant.extent().generation;
                        drop(replica);
                        hostile.release(generation).unwrap();
                    }
                }
                Deed::Close { keeps } => {
                    for replica in used.drain(..) {
                        kept.extend(keeps.then(|| Kept::writable(&replica.grant)));
                    }
                    hostile = world.client();
                }
                Deed::Unmap => drop(kept.pop()),
                Deed::Freeze { text } => {
                    if let Ok(grant) = honest.begin("hello", GUEST, 100) {
                        grant.map().unwrap().write_guest(8192, &text).unwrap();
                        honest.commit(grant.extent().generation).unwrap();
                    }
                }
                Deed::Collect => drop(honest.collect().unwrap()),
            }
        }
    }
}
