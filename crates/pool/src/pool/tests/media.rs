//! Pools on memfds and files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::support::options;
use crate::layout::GRANULE;
use crate::media::Medium;
use crate::{
    Access, CreateOptions, MappedMedium, MediumError, MediumFailure, MemfdOptions, OpenError, Pool,
    PoolReader, Window,
};

const SIZE: u64 = 16 * GRANULE;

fn freeze(pool: &Pool, name: &str, text: &[u8]) {
    let staging = pool.allocate(name, 3 * 4096, 5000).unwrap();
    let extent = staging.map().unwrap();
    extent.write_guest(0, &[0; 3 * 4096]).unwrap();
    let (window, file) = Window::create(8192).unwrap();
    File::from(file).write_all_at(text, 5000).unwrap();
    let len = u64::try_from(text.len()).unwrap();
    extent.write_guest_from(4096, &window, 5000, len).unwrap();
    if text == b"ice" {
        extent.write_tail_from(4900, &window, 5000, len).unwrap();
    } else {
        extent.write_tail(4900, text).unwrap();
    }
    extent.flush().unwrap();
    staging.publish().unwrap();
}

fn thaw(pool: &Pool, name: &str, len: usize) -> Vec<u8> {
    let extent = pool.pin(name).unwrap().map().unwrap();
    let (mut guest, mut tail) = (vec![0; len], vec![0; len]);
    extent.read_guest(4096, &mut guest);
    extent.read_tail(4900, &mut tail);
    assert_eq!(guest, tail);
    guest
}

#[test]
fn pool_on_a_memfd() {
    let medium = MappedMedium::memfd(MemfdOptions { size: SIZE, huge: None, node: None }).unwrap();
    let pool = Pool::create(Arc::new(medium), &CreateOptions::default()).unwrap();
    freeze(&pool, "hello", b"snow");
    freeze(&pool, "hello", b"ice");
    assert_eq!(thaw(&pool, "hello", 3), b"ice");
}

#[test]
fn pool_on_a_file_is_persistent_and_allows_readers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    let medium = Arc::new(MappedMedium::create_file(&path, SIZE).unwrap());
    let pool = Pool::create(medium, &options()).unwrap();
    freeze(&pool, "hello", b"snow");
    let reader =
        PoolReader::open(Arc::new(MappedMedium::open(&path, Access::Read).unwrap())).unwrap();
    assert_eq!(reader.lookup("hello").unwrap(), pool.lookup("hello").unwrap());
    freeze(&pool, "hello", b"ice");
    assert_eq!(reader.lookup("hello").unwrap(), pool.lookup("hello").unwrap());
    assert!(matches!(MappedMedium::open(&path, Access::Write).unwrap_err(), MediumError::InUse(_)));
    drop(pool);
    let medium = Arc::new(MappedMedium::open(&path, Access::Write).unwrap());
    let pool = Pool::open(medium).unwrap();
    assert_eq!(pool.recovery(), crate::Recovery::default());
    assert_eq!(thaw(&pool, "hello", 3), b"ice");
}

#[test]
fn resized_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    let medium = Arc::new(MappedMedium::create_file(&path, SIZE).unwrap());
    let pool = Pool::create(medium, &options()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(SIZE + GRANULE).unwrap();
    let error = pool.gc().unwrap_err();
    assert!(matches!(error, MediumFailure::Resized { was: SIZE, .. }), "{error}");
    drop(pool);
    let medium: Arc<dyn Medium> = Arc::new(MappedMedium::open(&path, Access::Write).unwrap());
    let error = Pool::open(medium).unwrap_err();
    assert!(matches!(error, OpenError::Size { pool: SIZE, .. }), "{error}");
}

#[test]
fn concurrent_readers_always_find_a_consistent_pool() {
    let medium = MappedMedium::memfd(MemfdOptions { size: SIZE, huge: None, node: None }).unwrap();
    let pool = Pool::create(Arc::new(medium), &options()).unwrap();
    let publish = |name| pool.allocate(name, 4096, 0).unwrap().publish().unwrap();
    publish("steady");
    publish("busy");
    let descriptor = pool.shared_medium().descriptor(Access::Read).unwrap();
    let medium = MappedMedium::from_descriptor(descriptor, pool.medium().clone()).unwrap();
    let reader = PoolReader::open(Arc::new(medium)).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for _ in 0..20_000 {
                publish("busy");
                publish("brief");
                pool.reclaim("brief").unwrap();
            }
        });
        let steady = pool.lookup("steady").unwrap();
        let mut newest = 0;
        while !writer.is_finished() {
            assert_eq!(reader.lookup("steady").unwrap(), steady);
            let busy = reader.lookup("busy").unwrap();
            assert!(busy.generation >= newest, "generations never decrease");
            newest = busy.generation;
            assert_eq!(reader.verify(&mut |_, _| Ok(())).problems, []);
        }
    });
}
