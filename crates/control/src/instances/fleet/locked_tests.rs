use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use firn_run::Instances;
use firn_run::jail::{Jail, JailMode};
use tokio::runtime::Builder;

use super::*;
use crate::functions::Images;
use crate::instances::fleet::Limits;
use crate::instances::launcher::{BootFiles, Launcher};
use crate::instances::ready::ReadyClones;
use crate::instances::scratch::Scratch;
use crate::instances::standby::Standbys;

/// A fleet that starts no process.
fn fleet(folder: &std::path::Path) -> Arc<Fleet> {
    let none = || folder.join("none");
    let launcher = Launcher {
        program: none(),
        kvm: none(),
        software_kvm: false,
        boot_files: BootFiles { kernel: none(), initramfs: none(), root: none(), overlay: none() },
        images: Images(None),
        instances: Instances::in_directory(folder.join("run")),
        pool: None,
        snapshots: none(),
        keys: None,
        planners: Vec::new(),
        region: String::new(),
        roles: None,
        start_limit: Duration::from_secs(1),
        started: AtomicU64::new(0),
        standbys: Standbys::new(0),
        processes: Arc::default(),
        scratch: Scratch::open(folder.join("scratch"), &none(), u64::MAX, None).unwrap(),
        network: None,
        jail: Jail::new(JailMode::Off),
        cpus: None,
        ready: ReadyClones::new(0),
    };
    let limits = Limits {
        memory: 1 << 30,
        monitors: 1,
        measured: false,
        queue: 1,
        queue_wait: Duration::from_secs(1),
        keep_alive: Duration::from_secs(1),
        pause_idle: true,
    };
    Fleet::new(launcher, limits)
}

/// Records, where a reservation would lock the state, whether it is locked.
struct Reserved {
    fleet: Arc<Fleet>,
    free: Arc<AtomicU32>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let is_free = self.fleet.state.0.try_lock().is_some();
        self.free.fetch_add(u32::from(is_free), Ordering::SeqCst);
    }
}

/// The runtime drops a task that is spawned after its end, before `spawn` returns.
#[test]
fn tasks_begin_after_the_state_is_unlocked() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let fleet = runtime.block_on(async { fleet(folder.path()) });
    drop(runtime);
    let free = Arc::new(AtomicU32::new(0));
    let mut locked = fleet.lock();
    for _ in 0..3 {
        let reserved = Reserved { fleet: Arc::clone(&fleet), free: Arc::clone(&free) };
        locked.parts().1.run(async move { drop(reserved) });
    }
    assert!(!locked.closed && free.load(Ordering::SeqCst) == 0);
    drop(locked);
    assert_eq!(free.load(Ordering::SeqCst), 3);
}

#[test]
#[should_panic(expected = "while its thread has locked the state")]
fn no_task_begins_on_a_thread_that_has_locked_the_state() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let fleet = runtime.block_on(async { fleet(folder.path()) });
    let locked = fleet.lock();
    fleet.stand_by();
    drop(locked);
}
