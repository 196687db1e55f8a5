//! What a network adds to a start, on both sides of the monitor's socket.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use event_manager::EventManager;
use firn_memory::GuestMemory;
use firn_net::{Broker, Policy, PublishedPorts, host_resolvers};
use firn_snapshot::MemoryLayout;

use super::frame::Frame;
use super::virtio_set::{Connected, VirtioSet};
use crate::bus::Bus;
use crate::config::{Devices, Drive, NETWORK, OverlayBase};
use crate::console::{Console, SerialRegisters};
use crate::kvm::{KVM_DEVICE, OpenKvm, Vm};
use crate::open_file::OpenFile;
use crate::subscriber::Subscriber;
use crate::virtio::{Network, NetworkConfig, NetworkEnd, VsockListener};

const RUNS: usize = 301;

/// Makes the devices of a guest in a new VM and restores their state. The time is that of the
/// broker's sockets, and that of sockets and devices. A start does not wait for its thread.
fn start(folder: &Path, kvm: &OpenKvm, has_network: bool) -> [Duration; 2] {
    let open = |name: &str| OpenFile::open(&folder.join(name)).unwrap();
    let base = OverlayBase::File(open("overlay"));
    let drives = Drive::of_firn(open("root"), base, 0, None);
    let memory = GuestMemory::anonymous(MemoryLayout::for_size(64 << 20).unwrap()).unwrap();
    // SAFETY: no vCPU runs.
    let frame = unsafe { Frame::create(kvm, memory.slots(), false, 1) }.unwrap();
    let Frame { vcpus: _vcpus, threads, vm, mut events, serial_irq, .. } = frame;
    let vm = Vm { fd: vm, memory: memory.into() };
    let port = SerialRegisters::default().into_port(serial_irq, Console::default(), None).unwrap();
    let mut bus = Bus::new(port, None);
    let path = folder.join("vsock.sock");
    let vsock = Some(VsockListener::bind(&path).unwrap());

    let begin = Instant::now();
    let networks = if has_network {
        let mut ports = PublishedPorts::default();
        let resolvers = || host_resolvers("/etc/resolv.conf".as_ref()).unwrap_or_default();
        let (broker, _begin) =
            Broker::prepare(Policy::default(), resolvers, &mut ports, drop).unwrap();
        let end = Some(NetworkEnd::Proxy(broker));
        vec![(NETWORK.to_owned(), Network { end, ..Network::default() })]
    } else {
        Vec::new()
    };
    let broker = begin.elapsed();
    let connected =
        Connected { drives, vsock, entropy_limiter: None, balloon_period: None, networks };
    let devices = Devices::of_firn(has_network.then(NetworkConfig::default));
    let events: &mut EventManager<Subscriber> = &mut events;
    let set = VirtioSet::wire(devices, connected, &[], &vm, &mut bus, events).unwrap();
    set.restore(&set.save()).unwrap();
    let time = begin.elapsed();
    drop(threads);
    [broker, time]
}

#[test]
#[ignore = "a measurement"]
fn what_a_network_adds_to_a_start() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["root", "overlay"] {
        File::create(folder.path().join(name)).unwrap().set_len(1 << 20).unwrap();
    }
    let kvm = OpenKvm::open(KVM_DEVICE.as_ref()).unwrap();
    let (mut brokers, mut times) = (Vec::new(), [Vec::new(), Vec::new()]);
    for run in 0..2 * RUNS {
        let has_network = run % 2 == 1;
        let [broker, time] = start(folder.path(), &kvm, has_network);
        times[run % 2].push(time);
        brokers.extend(has_network.then_some(broker));
    }
    brokers.sort_unstable();
    let [without, with] = times.map(|mut times| {
        times.sort_unstable();
        [times[RUNS / 10], times[RUNS / 4], times[RUNS / 2], times[RUNS * 3 / 4]]
    });
    println!("10th, 25th, 50th, 75th percentile of {RUNS}");
    println!("broker  {:?} in the median", brokers[RUNS / 2]);
    println!("without {without:?}");
    println!("with    {with:?}");
    for (with, without) in with.iter().zip(without) {
        println!("adds {:.1} us", with.saturating_sub(without).as_secs_f64() * 1e6);
    }
}
