//! The host's side of a guest's network.

use std::io;

use firn_agent::protocol::{Ipv6Addresses, NetworkAddresses};
use firn_base::ErrorChain;
use firn_net::{Broker, GuestNetwork, PendingResets, Policy, PublishedPorts, host_resolvers};
use firn_vmm::{Network, NetworkEnd, RateLimit, RateLimiter, open_tap};
use serde::{Deserialize, Serialize};

use crate::descriptors::{Descriptors, Slot};
use crate::error::StartError;

/// The file with the host's resolvers (resolv.conf(5)).
const RESOLVERS: &str = "/etc/resolv.conf";

/// Where a guest's frames go.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetworkSpec {
    /// Its kind, and the descriptor of the other side.
    pub end: NetworkEndSpec,
    /// Limits frames to the guest.
    pub to_guest: RateLimit,
    /// Limits frames from the guest.
    pub from_guest: RateLimit,
    /// What the guest's interface gets; `None` to leave that to the guest.
    pub addresses: Option<NetworkAddresses>,
    /// The rules of the user-mode network, with this guest's counters. They stay with the process
    /// that starts the monitor.
    #[serde(skip)]
    pub policy: Option<Policy>,
}

/// The other side of a guest's network.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkEndSpec {
    /// A tap device.
    Tap(Slot),
    /// The end of a [`Broker`] that makes sockets of this host.
    Proxy(Slot),
}

impl NetworkSpec {
    /// Opens an existing tap device, without limits and addresses.
    ///
    /// # Errors
    /// [`StartError::Host`]: the device cannot be used.
    pub fn tap(name: &str, descriptors: &mut Descriptors) -> Result<Self, StartError> {
        let tap = open_tap(name).map_err(|error| StartError::Host(ErrorChain::of(&error)))?;
        Ok(Self::of(NetworkEndSpec::Tap(descriptors.add(tap)), None))
    }

    /// The user-mode network, without limits. A thread of this process makes the sockets that the
    /// policy allows, and forwards DNS to this host's resolvers, if it has some. The report of the
    /// start has the policy's counters for this guest.
    ///
    /// # Errors
    /// [`StartError::Session`]: the thread cannot be started.
    pub fn proxy(policy: &Policy, descriptors: &mut Descriptors) -> Result<Self, StartError> {
        Self::publishing(policy, &mut PublishedPorts::default(), descriptors)
    }

    /// The same with published ports: another thread of this process accepts their connections. The
    /// caller keeps `ports` until the microVM has ended.
    ///
    /// # Errors
    /// [`StartError::Session`]: a thread cannot be started.
    pub fn publishing(
        policy: &Policy,
        ports: &mut PublishedPorts,
        descriptors: &mut Descriptors,
    ) -> Result<Self, StartError> {
        let resolvers = host_resolvers(RESOLVERS.as_ref()).unwrap_or_default();
        let policy = policy.for_guest();
        let broker = Broker::start_publishing(policy.clone(), resolvers, ports);
        let broker = broker.map_err(|error| StartError::session("start a network", error))?;
        let GuestNetwork { ipv4, ipv6, .. } = GuestNetwork::default();
        let addresses = NetworkAddresses {
            address: ipv4.address,
            prefix: ipv4.prefix,
            gateway: Some(ipv4.gateway),
            dns: Some(ipv4.gateway.into()),
            ipv6: Some(Ipv6Addresses {
                address: ipv6.address,
                prefix: ipv6.prefix,
                gateway: ipv6.gateway,
            }),
        };
        let spec = Self::of(NetworkEndSpec::Proxy(descriptors.add(broker)), Some(addresses));
        Ok(Self { policy: Some(policy), ..spec })
    }

    fn of(end: NetworkEndSpec, addresses: Option<NetworkAddresses>) -> Self {
        let (to_guest, from_guest) = (RateLimit::default(), RateLimit::default());
        Self { end, to_guest, from_guest, addresses, policy: None }
    }

    /// Takes the descriptors.
    pub(crate) fn take(&self, descriptors: &mut Descriptors) -> Result<Network, StartError> {
        let limiter = |limit: RateLimit| -> io::Result<Option<RateLimiter>> {
            (limit != RateLimit::default()).then(|| RateLimiter::new(limit)).transpose()
        };
        let failed = |error| StartError::session("make a timer", error);
        Ok(Network {
            end: Some(match self.end {
                NetworkEndSpec::Tap(slot) => NetworkEnd::Tap(descriptors.take(slot)?),
                NetworkEndSpec::Proxy(slot) => NetworkEnd::Proxy(descriptors.take(slot)?),
            }),
            to_guest: limiter(self.to_guest).map_err(failed)?,
            from_guest: limiter(self.from_guest).map_err(failed)?,
            resets: PendingResets::default(),
        })
    }
}
