//! The part `groups` of a profile: FaaSnap's working-set groups with host page recording (FaaSnap,
//! 4.2 and 4.3).
//!
//! The run uses `firecracker` with the kernel's read-ahead, on a cold page cache. Each time the
//! resident memory of the guest's process has grown by 1024 pages, mincore returns which pages of
//! the image are cached; the newly cached pages are the next group. So a group holds pages that the
//! guest touched and pages that the host read ahead, in the order of access at a resolution of 1024
//! pages. As in the paper, the resident memory is polled: a group can be larger than 1024 pages.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use firn_base::PageRange;
use firn_snapshot::{PageSet, Profile, Snapshot};

use super::profile::{check, evict_image, image_file};
use super::{PageCacheRecorder, Part, ProfileRecordError};
use crate::page_cache::cached;

/// Growth of resident memory after which the page cache is sampled, in pages (FaaSnap, 4.2).
const GROWTH: u64 = 1024;
/// How often resident memory is polled: a native guest touches 1024 pages in some milliseconds.
const POLL: Duration = Duration::from_micros(200);

/// Records the part `groups`.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    sampling: Option<Sampling>,
    sampled: Option<Result<Vec<Vec<PageRange>>, ProfileRecordError>>,
}

#[derive(Debug)]
struct Sampling {
    /// The sampler ends when it is dropped.
    alive: Sender<()>,
    thread: JoinHandle<Result<Vec<Vec<PageRange>>, ProfileRecordError>>,
}

impl PageCacheRecorder for Groups {
    fn part(&self) -> Part {
        Part::Groups
    }

    fn planner(&self) -> &'static str {
        "firecracker"
    }

    fn prepare(&mut self, snapshot: &Snapshot) -> Result<(), ProfileRecordError> {
        let image = image_file(snapshot, Part::Groups)?;
        check(snapshot)?;
        evict_image(snapshot, image)
    }

    fn begin(&mut self, snapshot: &Snapshot, process: u32) -> Result<(), ProfileRecordError> {
        let sampler = Sampler::new(snapshot, process)?;
        let (alive, ended) = channel();
        let thread = std::thread::Builder::new()
            .name("recorder".into())
            .spawn(move || sampler.run(&ended))
            .map_err(ProfileRecordError::Thread)?;
        self.sampling = Some(Sampling { alive, thread });
        Ok(())
    }

    fn end(&mut self) {
        let Some(Sampling { alive, thread }) = self.sampling.take() else { return };
        drop(alive);
        let sampled = thread.join();
        self.sampled = Some(sampled.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    }

    fn finish(mut self: Box<Self>, profile: &mut Profile) -> Result<(), ProfileRecordError> {
        self.end();
        if let Some(sampled) = self.sampled {
            profile.groups = Some(sampled?);
        }
        Ok(())
    }
}

struct Sampler {
    snapshot: PathBuf,
    image: File,
    statm: File,
    /// Resident pages of the process at the last sample.
    resident: u64,
    seen: PageSet,
    groups: Vec<Vec<PageRange>>,
}

impl Sampler {
    fn new(snapshot: &Snapshot, process: u32) -> Result<Self, ProfileRecordError> {
        let image = image_file(snapshot, Part::Groups)?;
        let image = image.try_clone().map_err(ProfileRecordError::Image)?;
        let statm = File::open(format!("/proc/{process}/statm"));
        let statm = statm.map_err(ProfileRecordError::Resident)?;
        Ok(Self {
            snapshot: snapshot.path().to_owned(),
            image,
            resident: resident(&statm).map_err(ProfileRecordError::Resident)?,
            statm,
            seen: PageSet::new(snapshot.manifest().layout.pages()),
            groups: Vec::new(),
        })
    }

    fn run(
        mut self,
        ended: &std::sync::mpsc::Receiver<()>,
    ) -> Result<Vec<Vec<PageRange>>, ProfileRecordError> {
        while ended.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
            self.poll()?;
        }
        self.sample()?;
        Ok(self.groups)
    }

    /// Ends a group where resident memory has grown by enough since the last one.
    fn poll(&mut self) -> Result<(), ProfileRecordError> {
        let now = resident(&self.statm).map_err(ProfileRecordError::Resident)?;
        if now >= self.resident + GROWTH {
            self.resident = now;
            self.sample()?;
        }
        Ok(())
    }

    fn sample(&mut self) -> Result<(), ProfileRecordError> {
        let pages = self.seen.pages();
        let cached = cached(&self.image, pages).map_err(|source| {
            ProfileRecordError::PageCache { snapshot: self.snapshot.clone(), source }
        })?;
        let mut group = PageSet::new(pages);
        for pages in cached.ranges() {
            self.seen.gaps_in(pages).for_each(|fresh| group.insert_range(fresh));
        }
        let runs = group.to_ranges();
        if !runs.is_empty() {
            self.groups.push(runs);
        }
        group.ranges().for_each(|pages| self.seen.insert_range(pages));
        Ok(())
    }
}

/// Resident pages of a process: the second field of statm (proc(5)).
fn resident(statm: &File) -> io::Result<u64> {
    let mut text = [0; 256];
    let read = statm.read_at(&mut text, 0)?;
    let text = String::from_utf8_lossy(&text[..read]).into_owned();
    let field = text.split(' ').nth(1).and_then(|field| field.parse().ok());
    field.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
#[path = "groups_tests.rs"]
mod tests;
