//! Operations of the server on the machine.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, openat};
use rustix::system::RebootCommand;
use rustix::time::{ClockId, Timespec};
use uuid::Uuid;

use super::pages;
use crate::network;
use crate::protocol::{MAX_ENTROPY_BYTES, NetworkAddresses, Pages};

/// The file with the generation: 32 hexadecimal digits and a newline. Programs watch it by inotify.
pub(super) const GENERATION_FILE: &str = "/run/firn-generation";
const GENERATION_NAME: &str = "firn-generation";

/// The file with the name servers (resolv.conf(5)).
const NAME_SERVERS: &str = "/etc/resolv.conf";

/// The machine that the server runs on. Tests replace it.
pub trait Machine: Send + Sync {
    /// Adds `entropy` (at most [`MAX_ENTROPY_BYTES`]) to the kernel's random generator and reseeds
    /// it immediately, so that later random bytes do not depend on the previous state.
    ///
    /// # Errors
    /// The system call fails.
    fn reseed(&self, entropy: &[u8]) -> io::Result<()>;

    /// Sets the wall clock, in nanoseconds since 1970-01-01 UTC.
    ///
    /// # Errors
    /// The system call fails.
    fn set_clock(&self, wall_clock_ns: u64) -> io::Result<()>;

    /// Sets the host name.
    ///
    /// # Errors
    /// The system call fails.
    fn set_host_name(&self, name: &str) -> io::Result<()>;

    /// Sets the addresses of the network interface, and the name server.
    ///
    /// # Errors
    /// There is no interface, or it refuses an address.
    fn set_network(&self, addresses: &NetworkAddresses) -> io::Result<()>;

    /// Sets the route to a metadata service on the network interface, in place of an earlier one.
    ///
    /// # Errors
    /// The interface refuses it.
    fn set_metadata(&self, earlier: Option<Ipv4Addr>, address: Option<Ipv4Addr>) -> io::Result<()>;

    /// Publishes the generation of this clone to its programs, before those that were stopped run.
    ///
    /// # Errors
    /// The file cannot be written.
    fn publish_generation(&self, generation: Uuid) -> io::Result<()>;

    /// Reads what holds each page of the machine's memory.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn pages(&self) -> io::Result<Pages>;

    /// Writes cached file system data to the disks.
    fn sync(&self);

    /// Does what every clone would have to do otherwise, and waits until the kernel has done what
    /// it postpones.
    fn settle(&self);

    /// Powers the machine off. Returns only on failure.
    ///
    /// # Errors
    /// The system call fails.
    fn power_off(&self) -> io::Result<()>;
}

/// How long the kernel postpones its work, unless it is for seconds: the callbacks of RCU some
/// 20 ms, and what it learns about the disks after a write-back 200 ms.
const SETTLING: Duration = Duration::from_millis(250);

/// The microVM that this process runs in. Needs root.
///
/// What each clone uses is open already: the way to a path is dozens of pages of the kernel, which
/// each clone would have to get.
#[derive(Debug)]
pub struct Guest {
    random: File,
    run: File,
    /// The file for the next generation, from a freeze until the clone has written it.
    generation: Mutex<Option<File>>,
}

impl Guest {
    /// # Errors
    /// A device or a folder is missing.
    pub fn new() -> io::Result<Self> {
        let random = OpenOptions::new().write(true).open("/dev/urandom")?;
        Ok(Self { random, run: File::open("/run")?, generation: Mutex::new(None) })
    }

    /// Opens the file that programs watch, or map: it is not replaced by a new one.
    fn open_generation(&self) -> io::Result<File> {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o644);
        Ok(File::from(openat(&self.run, GENERATION_NAME, flags, mode)?))
    }
}

/// `struct rand_pool_info` of `<linux/random.h>` with room for [`MAX_ENTROPY_BYTES`].
#[repr(C)]
struct RandPoolInfo {
    entropy_bits: libc::c_int,
    length: libc::c_int,
    bytes: [u8; MAX_ENTROPY_BYTES],
}

/// `_IOW('R', 0x03, int [2])` of `<linux/random.h>`.
const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;

/// `_IO('R', 0x07)` of `<linux/random.h>`.
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

impl Machine for Guest {
    fn reseed(&self, entropy: &[u8]) -> io::Result<()> {
        let too_long = || io::Error::from(io::ErrorKind::InvalidInput);
        let length = libc::c_int::try_from(entropy.len()).map_err(|_| too_long())?;
        let mut pool =
            RandPoolInfo { entropy_bits: length * 8, length, bytes: [0; MAX_ENTROPY_BYTES] };
        pool.bytes.get_mut(..entropy.len()).ok_or_else(too_long)?.copy_from_slice(entropy);
        let device = self.random.as_raw_fd();
        // SAFETY: `pool` is laid out as the kernel's rand_pool_info and outlives the call, and
        // `length` bytes of its buffer are initialised.
        let added = unsafe { libc::ioctl(device, RNDADDENTROPY, std::ptr::from_ref(&pool)) };
        if added != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: this request takes no argument.
        let reseeded = unsafe { libc::ioctl(device, RNDRESEEDCRNG) };
        if reseeded != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    fn set_clock(&self, wall_clock_ns: u64) -> io::Result<()> {
        let seconds = i64::try_from(wall_clock_ns / 1_000_000_000).map_err(io::Error::other)?;
        let nanoseconds = i64::try_from(wall_clock_ns % 1_000_000_000).map_err(io::Error::other)?;
        let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
        Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
    }

    fn set_host_name(&self, name: &str) -> io::Result<()> {
        Ok(rustix::system::sethostname(name.as_bytes())?)
    }

    fn set_network(&self, addresses: &NetworkAddresses) -> io::Result<()> {
        network::set_addresses(network::INTERFACE, addresses)?;
        match addresses.dns {
            Some(dns) => {
                let text = format!("nameserver {dns}\n");
                // In a clone it is right already.
                let is_right = std::fs::read_to_string(NAME_SERVERS).is_ok_and(|now| now == text);
                if is_right {
                    return Ok(());
                }
                match std::fs::write(NAME_SERVERS, &text) {
                    // A link to a file that a service makes which does not run here.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        std::fs::remove_file(NAME_SERVERS)?;
                        std::fs::write(NAME_SERVERS, text)
                    }
                    written => written,
                }
            }
            None => Ok(()),
        }
    }

    fn set_metadata(&self, earlier: Option<Ipv4Addr>, address: Option<Ipv4Addr>) -> io::Result<()> {
        network::set_host_route(network::INTERFACE, earlier, address)
    }

    fn publish_generation(&self, generation: Uuid) -> io::Result<()> {
        let opened = self.generation.lock().take();
        let file = opened.map_or_else(|| self.open_generation(), Ok)?;
        // One write, and the file is closed: both are events for programs that watch it.
        file.write_all_at(format!("{}\n", generation.simple()).as_bytes(), 0)
    }

    fn pages(&self) -> io::Result<Pages> {
        pages::read(Path::new("/proc"))
    }

    fn sync(&self) {
        rustix::fs::sync();
    }

    fn settle(&self) {
        let mut generation = self.generation.lock();
        // One that is open stays so: to close it would be an event. Without it, the clone opens the
        // file, or reports why it cannot.
        if generation.is_none() {
            *generation = self.open_generation().ok();
        }
        drop(generation);
        thread::sleep(SETTLING);
    }

    fn power_off(&self) -> io::Result<()> {
        Ok(rustix::system::reboot(RebootCommand::PowerOff)?)
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
