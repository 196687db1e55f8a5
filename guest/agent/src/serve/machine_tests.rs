use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

use super::*;

/// Also after a freeze that failed, and was repeated.
#[test]
fn each_generation_is_one_write_and_one_close_for_programs_that_watch_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let random = File::open("/dev/null").unwrap();
    let run = File::open(folder.path()).unwrap();
    let guest = Guest { random, run, generation: Mutex::new(None) };
    guest.publish_generation(Uuid::from_u128(1)).unwrap();
    let path = folder.path().join(GENERATION_NAME);
    let watcher = inotify::init(CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watcher, &path, WatchFlags::MODIFY | WatchFlags::CLOSE_WRITE).unwrap();
    for freezes in [1, 2] {
        (0..freezes).for_each(|_| guest.settle());
        guest.publish_generation(Uuid::from_u128(freezes)).unwrap();
        let mut buffer = [std::mem::MaybeUninit::uninit(); 512];
        let mut events = Reader::new(&watcher, &mut buffer);
        let mut next = || events.next().map(|event| event.events());
        assert_eq!(next(), Ok(ReadFlags::MODIFY), "{freezes}");
        assert_eq!(next(), Ok(ReadFlags::CLOSE_WRITE), "{freezes}");
        assert_eq!(next(), Err(rustix::io::Errno::AGAIN), "{freezes}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{freezes:032x}\n"));
    }
}
