//! A metadata service before a backend.

use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;

use firn_base::num::u64_of;
use firn_net::NetworkState;
use rustix::event::epoll::EventFlags;

use super::HEADER_LEN;
use super::backend::{BackendCounters, NetworkBackend, Traffic};
use super::proxy::UserNetwork;

/// Where fields are in a frame: Ethernet's type, the address that ARP asks for, and the
/// destination of an IPv4 packet.
const ETHERTYPE: usize = 12;
const ARP_TARGET: usize = 38;
const IPV4_DESTINATION: usize = 30;

const ARP: [u8; 2] = [0x08, 0x06];
const IPV4: [u8; 2] = [0x08, 0x00];

/// Takes the frames for a metadata service, and leaves all others to the backend behind it.
#[derive(Debug)]
pub(super) struct Intercepted {
    address: Ipv4Addr,
    service: UserNetwork,
    /// Without one the guest reaches its metadata alone.
    backend: Option<Box<dyn NetworkBackend>>,
    /// Which of both has the packet that waits for the guest.
    waiting: Option<Source>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Service,
    Backend,
}

impl Intercepted {
    pub(super) fn new(
        address: Ipv4Addr,
        service: UserNetwork,
        backend: Option<Box<dyn NetworkBackend>>,
    ) -> Self {
        Self { address, service, backend, waiting: None }
    }

    /// Whether a frame asks for the service's address or goes to it.
    fn is_for_service(&self, frame: &[u8]) -> bool {
        let has = |at: usize, bytes: &[u8]| frame.get(at..at + bytes.len()) == Some(bytes);
        let address = self.address.octets();
        (has(ETHERTYPE, &IPV4) && has(IPV4_DESTINATION, &address))
            || (has(ETHERTYPE, &ARP) && has(ARP_TARGET, &address))
    }
}

impl NetworkBackend for Intercepted {
    fn start(&mut self, features: u64) -> std::io::Result<()> {
        self.waiting = None;
        self.service.start(features)?;
        self.backend.as_mut().map_or(Ok(()), |backend| backend.start(features))
    }

    fn event_sources(&self) -> Vec<(BorrowedFd<'_>, EventFlags)> {
        let backend = self.backend.iter().flat_map(|backend| backend.event_sources());
        self.service.event_sources().into_iter().chain(backend).collect()
    }

    fn poll(&mut self) {
        self.service.poll();
        self.backend.iter_mut().for_each(|backend| backend.poll());
    }

    fn packet(&mut self) -> Option<&mut [u8]> {
        let waiting = match self.waiting {
            Some(waiting) => waiting,
            None if self.service.packet().is_some() => Source::Service,
            None => Source::Backend,
        };
        let packet = match waiting {
            Source::Service => self.service.packet(),
            Source::Backend => self.backend.as_mut()?.packet(),
        };
        self.waiting = packet.is_some().then_some(waiting);
        packet
    }

    fn taken(&mut self) {
        match self.waiting.take() {
            Some(Source::Service) => self.service.taken(),
            Some(Source::Backend) => self.backend.iter_mut().for_each(|backend| backend.taken()),
            None => {}
        }
    }

    fn transmit(&mut self, packets: &[&[u8]]) -> Traffic {
        let is_for_service = |packet: &&[u8]| {
            packet.get(HEADER_LEN..).is_some_and(|frame| self.is_for_service(frame))
        };
        let (own, others): (Vec<&[u8]>, Vec<&[u8]>) =
            packets.iter().copied().partition(is_for_service);
        let mut traffic = self.service.transmit(&own);
        traffic += match &mut self.backend {
            Some(backend) => backend.transmit(&others),
            None => Traffic { dropped: u64_of(others.len()), ..Traffic::default() },
        };
        traffic
    }

    fn counters(&self) -> BackendCounters {
        let backend = self.backend.as_ref().map(|backend| backend.counters()).unwrap_or_default();
        BackendCounters { metadata: self.service.proxied(), ..backend }
    }

    fn save(&self) -> NetworkState {
        let backend = self.backend.as_ref().map(|backend| backend.save()).unwrap_or_default();
        backend.after(self.service.save())
    }

    fn restore(&mut self, state: &NetworkState) {
        let mut others = state.clone();
        self.service.restore(&others.split_off(self.address));
        self.backend.iter_mut().for_each(|backend| backend.restore(&others));
    }
}

#[cfg(test)]
#[path = "metadata_tests.rs"]
mod tests;
