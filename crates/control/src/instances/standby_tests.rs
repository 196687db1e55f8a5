use std::cell::Cell;
use std::path::PathBuf;

use firn_base::ErrorChain;

use super::*;

/// Starts no process, and checks with every call that the state is not locked.
struct Unlocked<'a> {
    standbys: &'a Standbys,
    calls: Cell<u32>,
}

impl Unlocked<'_> {
    fn check(&self) {
        assert!(self.standbys.state.try_lock().is_some(), "a request would wait for a process");
        self.calls.set(self.calls.get() + 1);
        // What requests and the status do meanwhile.
        assert_eq!(self.standbys.len(), 0);
        assert!(self.standbys.take(&key("other")).is_none());
        // Another thread that fills returns at once.
        self.standbys.fill(self);
    }
}

impl Prepare for Unlocked<'_> {
    fn spawn(&self) -> Result<Monitor, StartError> {
        self.check();
        Err(StartError::Monitor(ErrorChain::new("no process in this test")))
    }

    fn shape(&self, _: &ThawKey) -> Option<Shape> {
        self.check();
        None
    }

    fn pool(&self) -> Option<PathBuf> {
        self.check();
        None
    }
}

fn key(planner: &str) -> ThawKey {
    let place = SnapshotPlace::Directory("a".to_owned());
    let planner = planner.to_owned();
    ThawKey { place, owner: None, planner, root: "/root".into(), disk: 1 << 20, network: false }
}

#[test]
fn processes_start_without_the_lock() {
    let standbys = Standbys::new(2);
    assert!(standbys.take(&key("firn")).is_none());
    let prepare = Unlocked { standbys: &standbys, calls: Cell::new(0) };
    standbys.fill(&prepare);
    assert_eq!(prepare.calls.get(), 3, "a shape, the pool's manager, a monitor");
    standbys.end();
    standbys.fill(&prepare);
    assert_eq!(prepare.calls.get(), 3 + 1, "after the end only a shape, of the other thaw");
}
