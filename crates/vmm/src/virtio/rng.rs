//! Entropy device (virtio 1.2, 5.4).

use std::os::fd::{AsFd, BorrowedFd};

use firn_base::num::u64_of;
use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::device::{DeviceContext, VirtioDevice};
use super::error::{DeviceError, RestoreDeviceError};
use super::rate_limiter::{LimiterCounters, RateLimiter};
use super::state::DeviceState;

const QUEUE_SIZE: u16 = 64;
/// The most bytes for one request, to limit the monitor's work. A driver requests the rest again.
/// Linux requests 64 bytes at a time.
const MAX_BYTES: usize = 4096;

/// Random bytes of the host for the guest. They never come from a snapshot: a request that is
/// pending at a freeze gets new bytes after each thaw.
#[derive(Debug, Default)]
pub(crate) struct Rng {
    limiter: Option<RateLimiter>,
    counters: EntropyCounters,
}

/// The random bytes of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntropyCounters {
    /// Bytes that it got.
    pub bytes: u64,
    /// Requests for which the host had none.
    pub failures: u64,
    /// Its limiter, if it has one.
    pub limiter: LimiterCounters,
}

impl Rng {
    /// A device, whose requests and their bytes can be limited.
    #[must_use]
    pub(crate) fn new(limiter: Option<RateLimiter>) -> Self {
        Self { limiter, counters: EntropyCounters::default() }
    }

    /// What the guest got so far.
    pub(crate) fn counters(&self) -> EntropyCounters {
        let limiter = LimiterCounters::of(self.limiter.as_ref());
        EntropyCounters { limiter, ..self.counters }
    }
}

impl VirtioDevice for Rng {
    fn id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn process_queue(
        &mut self,
        index: usize,
        context: &mut DeviceContext<'_>,
    ) -> Result<(), DeviceError> {
        let Some(queue) = context.queues.get_mut(index) else { return Ok(()) };
        let mut random = [0; MAX_BYTES];
        while queue.is_allowed(context.mem, self.limiter.as_mut())?
            && let Some(chain) = queue.pop(context.mem)?
        {
            let wanted = chain.writable.len().min(MAX_BYTES);
            // A signal may shorten requests of more than 256 bytes.
            let got = getrandom(&mut random[..wanted], GetRandomFlags::empty());
            self.counters.failures += u64::from(got.is_err());
            let got = got.map_err(|errno| DeviceError::Entropy(errno.into()))?;
            self.counters.bytes += u64_of(got);
            chain
                .writable
                .write_at(context.mem, 0, &random[..got])
                .map_err(|fault| queue.chain_error(fault))?;
            self.limiter.iter_mut().for_each(|limiter| limiter.take(u64_of(got)));
            queue.push_used(context.mem, &chain, got)?;
        }
        Ok(())
    }

    fn event_source(&self) -> Option<BorrowedFd<'_>> {
        self.limiter.as_ref().map(AsFd::as_fd)
    }

    fn process_event(&mut self, context: &mut DeviceContext<'_>) -> Result<(), DeviceError> {
        self.limiter.iter_mut().for_each(RateLimiter::acknowledge);
        self.process_queue(0, context)
    }

    fn reset(&mut self) {}

    fn save(&self) -> DeviceState {
        DeviceState::Rng
    }

    fn restore(&mut self, state: &DeviceState, _running: bool) -> Result<(), RestoreDeviceError> {
        match state {
            DeviceState::Rng => Ok(()),
            _ => Err(RestoreDeviceError::OtherDevice { id: self.id() }),
        }
    }
}

#[cfg(test)]
#[path = "rng_tests.rs"]
mod tests;
