//! A player in place of a function's guest: the feature `player-agent`, for tests of the daemon on
//! hosts that run no Linux guest.
//!
//! A boot whose kernel is the file of a player's snapshot restores that snapshot and never runs it,
//! so a freeze is that of any microVM. A thaw replays, and checks all its memory. In place of
//! the guest's agent, which a player does not have, the monitor answers on the microVM's socket: a
//! request gets its event back, after a thaw once the replay has ended and every byte was right.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use firn_agent::protocol::{
    Answered, Loaded, MAX_REPLY_LENGTH, MAX_REQUEST_LENGTH, NEWEST_VERSION, Refusal, RefusalKind,
    Reply, Request, Status, receive, send,
};
use firn_memory::planners::parse;
use firn_snapshot::{OpenTwice, Snapshot, SnapshotFiles};
use firn_vmm::{HostConfig, Microvm};
use parking_lot::{Condvar, Mutex};

use super::{HANDLER, Player, host, traces_of};
use crate::descriptors::Descriptors;
use crate::error::StartError;
use crate::guest::{Ended, GuestKind, Listener};
use crate::life::{Clock, KvmDevice, Mapped, Running};
use crate::report::StartReport;
use crate::session::{self, After, Interruption};
use crate::source::Source;
use crate::spec::{BootSpec, HostSpec, SourceSpec};

/// How often a monitor whose player has ended looks for a signal.
const SIGNAL_PERIOD: Duration = Duration::from_millis(5);

/// What answers in place of the guest's agent.
struct Agent {
    /// The names of the player's traces.
    function: String,
    /// Whether a replay goes on, or ended with a wrong byte.
    replaying: Mutex<bool>,
    ended: Condvar,
}

/// The sockets of a microVM with a player.
struct Served {
    name: String,
    control: UnixListener,
    vsock: UnixListener,
}

/// A thawed player; its monitor answers requests if another process owns the microVM.
pub(crate) struct PlayerAgent {
    player: Player,
    asked: Option<(Served, Interruption)>,
}

impl Served {
    /// `None` for a player without an owner that asks it.
    fn take(spec: &HostSpec, descriptors: &mut Descriptors) -> Result<Option<Self>, StartError> {
        let Some(sockets) = spec.sockets.clone() else { return Ok(None) };
        Ok(Some(Self {
            name: sockets.name,
            control: descriptors.take(sockets.control)?.into(),
            vsock: descriptors.take(sockets.vsock)?.into(),
        }))
    }
}

impl Agent {
    /// Answers on `socket` until the process ends.
    fn start(
        function: String,
        socket: UnixListener,
        replaying: bool,
    ) -> Result<Arc<Self>, StartError> {
        let replaying = Mutex::new(replaying);
        let agent = Arc::new(Self { function, replaying, ended: Condvar::new() });
        let serving = agent.clone();
        let accept = move || {
            for stream in socket.incoming().flatten() {
                let agent = serving.clone();
                // The client sees that the connection is closed.
                let _ = thread::Builder::new().spawn(move || agent.serve(&stream));
            }
        };
        let spawned = thread::Builder::new().name("agent".into()).spawn(accept);
        spawned.map_err(|error| StartError::session("start a thread", error))?;
        Ok(agent)
    }

    /// One connection. An error means that the client has disconnected.
    fn serve(&self, stream: &UnixStream) -> io::Result<()> {
        let mut reader = BufReader::new(stream);
        reader.read_line(&mut String::new())?;
        let mut writer = stream;
        writer.write_all(b"OK 1\n")?;
        loop {
            let request = receive(&mut reader, MAX_REQUEST_LENGTH).map_err(io::Error::other)?;
            let last = matches!(request, Request::PrepareFreeze | Request::Shutdown);
            send(&mut writer, &self.answer(request), MAX_REPLY_LENGTH).map_err(io::Error::other)?;
            if last {
                return Ok(());
            }
        }
    }

    fn answer(&self, request: Request) -> Reply {
        match request {
            Request::Hello { .. } => Reply::Hello { version: NEWEST_VERSION },
            Request::Put(_) => Reply::Stored,
            Request::Load(_) => Reply::Loaded(Loaded { duration_ns: 0, logs: String::new() }),
            Request::Invoke(invoke) => {
                let mut replaying = self.replaying.lock();
                self.ended.wait_while(&mut replaying, |replaying| *replaying);
                drop(replaying);
                Reply::Answered(Answered {
                    request_id: invoke.request_id,
                    answer: invoke.event,
                    duration_ns: 0,
                    logs: String::new(),
                    max_memory_bytes: 0,
                })
            }
            Request::PrepareFreeze => Reply::ReadyToFreeze,
            Request::Identify(_) => Reply::Identified,
            Request::Status => Reply::Status(Status {
                agent: env!("CARGO_PKG_VERSION").to_owned(),
                // The freeze writes both into the manifest.
                function: Some(self.function.clone()),
                handler: Some(HANDLER.to_owned()),
                open: true,
                instance_id: None,
                invocations: 0,
            }),
            Request::Pages => Reply::Refused(Refusal {
                kind: RefusalKind::System,
                message: "a player has no kernel that knows what holds its pages".to_owned(),
            }),
            Request::Shutdown => Reply::ShuttingDown,
        }
    }
}

impl PlayerAgent {
    pub(crate) fn new(
        player: Player,
        spec: &HostSpec,
        descriptors: &mut Descriptors,
        caught: Option<Interruption>,
    ) -> Result<Self, StartError> {
        let asked = match Served::take(spec, descriptors)? {
            Some(served) => Some((served, caught.map_or_else(Interruption::catch, Ok)?)),
            None => None,
        };
        // The replay goes on, and what it wrote is given back.
        if let Some((_, interruption)) = &asked {
            interruption.note_only();
        }
        Ok(Self { player, asked })
    }
}

impl GuestKind for PlayerAgent {
    fn host(
        &mut self,
        snapshot: &Snapshot,
        descriptors: &mut Descriptors,
    ) -> Result<HostConfig, StartError> {
        self.player.host(snapshot, descriptors)
    }

    fn prepare(&mut self, mapped: &mut Mapped<'_>) {
        self.player.prepare(mapped);
    }

    fn restored(&mut self, microvm: &Microvm, listener: &Arc<dyn Listener>) {
        self.player.restored(microvm, listener);
    }

    fn follow(
        self,
        mut running: Running<'_>,
        listener: &Arc<dyn Listener>,
    ) -> Result<Ended, StartError> {
        let Self { player, asked } = self;
        let Some((served, interruption)) = asked else { return player.follow(running, listener) };
        let agent = Agent::start(player.trace.clone(), served.vsock, true)?;
        running.run.report.name = Some(served.name);
        running.run.ends_now();
        listener.started(&running.run.report);
        let ended = player.follow(running, listener)?;
        *agent.replaying.lock() = false;
        agent.ended.notify_all();
        // An idle instance: the requests that follow find everything touched.
        while interruption.signal().is_none() {
            thread::sleep(SIGNAL_PERIOD);
        }
        Ok(Ended { report: None, ..ended })
    }
}

/// Whether the kernel of a boot is the file of a snapshot in a directory.
pub(crate) fn is_player(boot: &BootSpec) -> bool {
    boot.kernel.path.ends_with("snapshot.firn")
}

/// Restores a player's snapshot, and serves it without running it. Its files come in the places of
/// a guest's files: `snapshot.firn` as the kernel, `memory.img` as initramfs and as root disk.
pub(crate) fn boot(
    spec: &HostSpec,
    boot: &BootSpec,
    (mut descriptors, kvm): (Descriptors, KvmDevice),
    clock: &Clock,
    listener: &Arc<dyn Listener>,
    caught: Option<Interruption>,
) -> Result<(), StartError> {
    let seed = boot.kernel.path.parent().unwrap_or(&boot.kernel.path);
    let planner = parse("dram_cached")?;
    let image = OpenTwice { file: boot.initramfs.slot, again: boot.root.slot };
    let files = SnapshotFiles {
        container: boot.kernel.slot,
        signature: None,
        image: Some(image),
        overlay: None,
        packed: Default::default(),
    };
    let (files, path) = (Box::new(files), seed.to_owned());
    let directory = SourceSpec::Directory { files, path, verify: false, verifier: None };
    let source = Source::open(&directory, &*planner, &mut descriptors)?;
    let traces = traces_of(source.snapshot().manifest()).ok_or(StartError::NotPlayer)?;
    let mapped = source.plan(&*planner, clock)?.map(kvm, false)?;
    let function = traces.join(",");
    let microvm = mapped.restore(host(Vec::new()))?.microvm;
    let Some(served) = Served::take(spec, &mut descriptors)? else {
        return Err(StartError::Spec("a player boots for the daemon only".to_owned()));
    };
    let interruption = caught.map_or_else(Interruption::catch, Ok)?;
    let mut report = StartReport::empty();
    (report.memory, report.name) = (boot.memory, Some(served.name));
    Agent::start(function, served.vsock, false)?;
    let lead = |_: &_, _: &_| {
        listener.started(&report);
        Ok::<_, StartError>(((), After::Serve))
    };
    let note = |text: &str| listener.note(text);
    session::run(microvm, &served.control, &interruption, lead, note)
}
