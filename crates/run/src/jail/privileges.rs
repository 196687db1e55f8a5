//! What a process may do: its namespaces and its capabilities.

use std::fs;
use std::io;
use std::os::fd::AsFd;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getegid, geteuid, set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, UnshareFlags, capabilities,
    clear_ambient_capability_set, move_into_link_name_space, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

/// What a monitor keeps, if it has it: its files may belong to other users than the supervisor's.
const KEPT: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// Enters new namespaces.
pub(super) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: callers pass flags of namespaces alone, which change no memory and no descriptor.
    Ok(unsafe { rustix::thread::unshare_unsafe(flags) }?)
}

/// Enters a user namespace, in which this process has the id that it has outside and all
/// capabilities, and with it `more` namespaces (user_namespaces(7)).
pub(super) fn enter_user_namespace(more: UnshareFlags) -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    unshare(UnshareFlags::NEWUSER | more)?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("{group} {group} 1"))
}

/// Enters the network namespace that is open as `namespace`.
pub(super) fn enter_network(namespace: impl AsFd) -> io::Result<()> {
    let kind = Some(LinkNameSpaceType::Network);
    Ok(move_into_link_name_space(namespace.as_fd(), kind)?)
}

/// Gives up, for good, all privileges but [`KEPT`].
pub(super) fn drop_all() -> io::Result<()> {
    let kept = capabilities(None)?.permitted & KEPT;
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match remove_capability_from_bounding_set(capability) {
            // The kernel knows no more of them, or this process had no right to any.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::PERM) => break,
            removed => removed?,
        }
    }
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: none })?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}
