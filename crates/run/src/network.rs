//! The host's side of a guest's network.

use std::io;
use std::os::fd::OwnedFd;

use firn_agent::protocol::{Ipv6Addresses, NetworkAddresses};
use firn_base::ErrorChain;
use firn_net::{
    Broker, BrokerError, GuestNetwork, MetadataConfig, MetadataStore, PendingResets, Policy,
    PublishedPorts, host_resolvers,
};
use firn_vmm::{Metadata, Network, NetworkEnd, RateLimit, RateLimiter, open_tap};
use serde::{Deserialize, Serialize};

use crate::descriptors::{Descriptors, Slot};
use crate::error::StartError;

/// The file with the host's resolvers (resolv.conf(5)).
const RESOLVERS: &str = "/etc/resolv.conf";

/// Where a guest's frames go.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NetworkSpec {
    /// Its kind, and the descriptor of the other side; `None` for a guest that reaches its metadata
    /// alone.
    pub end: Option<NetworkEndSpec>,
    /// Its metadata, if it has some.
    pub metadata: Option<MetadataSpec>,
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

/// A guest's metadata service.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MetadataSpec {
    /// How the guest reaches it.
    pub config: MetadataConfig,
    /// The document, of at most [`MetadataStore::DEFAULT_LIMIT`] bytes.
    pub document: serde_json::Value,
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
        Ok(Self::of_tap(tap, descriptors))
    }

    /// The same for a device that [`open_tap`] has opened.
    pub fn of_tap(tap: OwnedFd, descriptors: &mut Descriptors) -> Self {
        Self::of(NetworkEndSpec::Tap(descriptors.add(tap)), None)
    }

    /// The user-mode network, without limits. A thread of this process, which begins when the
    /// descriptors have been sent, makes the sockets that the policy allows, and forwards DNS to
    /// this host's resolvers, if it has some. The report of the start has the policy's counters for
    /// this guest. `report` gets the error if the thread ends before the monitor.
    ///
    /// # Errors
    /// [`StartError::Session`]: a socket cannot be made.
    pub fn proxy(
        policy: &Policy,
        descriptors: &mut Descriptors,
        report: impl Fn(BrokerError) + Clone + Send + 'static,
    ) -> Result<Self, StartError> {
        Self::publishing(policy, &mut PublishedPorts::default(), descriptors, report)
    }

    /// The same with published ports: another thread of this process accepts their connections. The
    /// caller keeps `ports` until the microVM has ended.
    ///
    /// # Errors
    /// [`StartError::Session`]: a socket cannot be made.
    pub fn publishing(
        policy: &Policy,
        ports: &mut PublishedPorts,
        descriptors: &mut Descriptors,
        report: impl Fn(BrokerError) + Clone + Send + 'static,
    ) -> Result<Self, StartError> {
        let resolvers = || host_resolvers(RESOLVERS.as_ref()).unwrap_or_default();
        let policy = policy.for_guest();
        let broker = Broker::prepare(policy.clone(), resolvers, ports, report);
        let (broker, begin) =
            broker.map_err(|error| StartError::session("start a network", error))?;
        descriptors.after_sending(begin);
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
        Self { end: Some(end), addresses, ..Self::default() }
    }

    /// Takes the descriptors.
    pub(crate) fn take(&self, descriptors: &mut Descriptors) -> Result<Network, StartError> {
        let limiter = |limit: RateLimit| -> io::Result<Option<RateLimiter>> {
            (limit != RateLimit::default()).then(|| RateLimiter::new(limit)).transpose()
        };
        let failed = |error| StartError::session("make a timer", error);
        Ok(Network {
            end: match self.end {
                Some(NetworkEndSpec::Tap(slot)) => Some(NetworkEnd::Tap(descriptors.take(slot)?)),
                Some(NetworkEndSpec::Proxy(slot)) => {
                    Some(NetworkEnd::Proxy(descriptors.take(slot)?))
                }
                None => None,
            },
            metadata: self.metadata.clone().map(MetadataSpec::serve).transpose()?,
            to_guest: limiter(self.to_guest).map_err(failed)?,
            from_guest: limiter(self.from_guest).map_err(failed)?,
            resets: PendingResets::default(),
        })
    }
}

impl MetadataSpec {
    fn serve(self) -> Result<Metadata, StartError> {
        let store = MetadataStore::default();
        store.put(self.document).map_err(|error| StartError::Spec(error.to_string()))?;
        Ok(Metadata { config: self.config, store })
    }
}
