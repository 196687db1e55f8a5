//! What a process may do: its namespaces, its user and its capabilities.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    fsconfig_create, fsmount, fsopen, mount_change, move_mount,
};
use rustix::process::{
    DumpableBehavior, Gid, Resource, Rlimit, Uid, getegid, geteuid, getrlimit,
    set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, UnshareFlags, capabilities,
    clear_ambient_capability_set, move_into_link_name_space, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

/// The most descriptors of a monitor but those of its guest's network: one for each connection over
/// vsock, and its own.
const OWN_DESCRIPTORS: u64 = 2048;

/// What a small guest's monitor writes too: its other files of a snapshot, and a window of memory
/// for its supervisor, bytes.
const LEAST_FILE: u64 = 64 << 20;

/// The first of the user ids of monitors: no system gives those from 0x7000_0000 to 0x7fff_ffff to
/// anything else (systemd's UIDS-GIDS.md). A process id is below 2^22.
const FIRST_USER: u32 = 0x7000_0000;

/// Closes all descriptors but the standard ones.
///
/// # Safety
/// Nothing in this process owns any other.
pub(super) unsafe fn close_inherited() -> io::Result<()> {
    // SAFETY: the caller guarantees that no open descriptor has an owner.
    match unsafe { libc::close_range(3, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives all threads of a process that has one the same heap (mallopt(3)). For a thread's own heap
/// the C library reads /proc/sys/vm/overcommit_memory before it makes the heap smaller, and from
/// the ninth heap on /sys/devices/system/cpu/online: a jailed process can open neither.
pub(super) fn share_heap() -> io::Result<()> {
    // SAFETY: it changes a parameter of the allocator.
    let set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    if set == 1 { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// Limits the number of descriptors to those of a network of `sockets`, and the others.
pub(super) fn limit_descriptors(sockets: usize) -> io::Result<()> {
    let all = OWN_DESCRIPTORS.saturating_add(u64::try_from(sockets).unwrap_or(u64::MAX));
    let limit = |most| setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
    match limit(Some(all)) {
        // This user may have fewer, and only root can change that.
        Err(Errno::PERM) => Ok(limit(getrlimit(Resource::Nofile).maximum)?),
        set => Ok(set?),
    }
}

/// Limits the size of the files that are written: what is larger fails with `EFBIG`, because the
/// first process of a pid namespace ignores `SIGXFSZ`.
pub(super) fn limit_files(bytes: u64) -> io::Result<()> {
    let all = Some(bytes.max(LEAST_FILE));
    Ok(setrlimit(Resource::Fsize, Rlimit { current: all, maximum: all })?)
}

/// Enters new namespaces.
pub(super) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: callers pass flags of namespaces alone, which change no memory and no descriptor.
    Ok(unsafe { rustix::thread::unshare_unsafe(flags) }?)
}

/// Enters a user namespace, in which this process has the id that it has outside and all
/// capabilities (user_namespaces(7)).
pub(super) fn enter_user_namespace() -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    unshare(UnshareFlags::NEWUSER)?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("{group} {group} 1"))
}

/// Enters the namespace that is open as `namespace`.
pub(super) fn enter(namespace: impl AsFd, kind: LinkNameSpaceType) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace.as_fd(), Some(kind))?)
}

/// Makes a mount namespace whose root directory is empty and read-only, and returns it open. The
/// calling thread, which is in it afterwards, keeps its own root directory until it
/// [enters](enter) the namespace.
pub(super) fn make_empty_root() -> io::Result<File> {
    unshare(UnshareFlags::NEWNS)?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private)?;
    let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&tmpfs)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mount = fsmount(&tmpfs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    // Over the old root directory, to which no path leads from here on.
    move_mount(mount, "", CWD, "/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    File::open("/proc/thread-self/ns/mnt")
}

/// The id of this process outside of its pid namespace.
pub(super) fn outer_process() -> io::Result<u32> {
    let link = fs::read_link("/proc/self")?;
    let number = link.to_str().and_then(|number| number.parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Gets ids that no other process has, in a new user namespace, for a process of root. `process` is
/// its id outside: two processes of a host have different ids, and so have their users.
pub(super) fn become_unique(process: u32) -> io::Result<()> {
    if !geteuid().is_root() {
        let reason = "only root can give a process another user id";
        return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
    }
    let (user, group) = (Uid::from_raw(FIRST_USER + process), Gid::from_raw(FIRST_USER + process));
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    unshare(UnshareFlags::NEWUSER)
}

/// Gives up all privileges for good.
pub(super) fn drop_all() -> io::Result<()> {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match remove_capability_from_bounding_set(capability) {
            // The kernel knows no more of them, or this process had no right to any.
            Err(Errno::INVAL | Errno::PERM) => break,
            removed => removed?,
        }
    }
    drop_of_thread(CapabilitySet::empty())?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Takes from this thread all capabilities but `kept`, and those that it could get by executing a
/// file.
pub(super) fn drop_of_thread(kept: CapabilitySet) -> io::Result<()> {
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    let kept = kept & capabilities(None)?.permitted;
    let inheritable = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })?)
}
