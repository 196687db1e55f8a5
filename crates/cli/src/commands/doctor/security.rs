//! What of this host separates microVMs of several tenants.

use firn_memory::USERFAULTFD_DEVICE;
use firn_run::{Exposure, HostSecurity, Ksm, Smt, UserNamespaces, Vulnerability};

use super::{Finding, finding};

const SMT_REMEDY: &str = "switch it off with `echo off > /sys/devices/system/cpu/smt/control`, for \
                          good with `nosmt` on the kernel's command line, or keep the microVMs of \
                          each tenant on whole cores with cpuset(7)";
const UPDATE: &str = "update the kernel and the processor's microcode (Debian's packages \
                      intel-microcode and amd64-microcode), and boot without options that turn \
                      mitigations off";
const OF_HYPERVISOR: &str = "this depends on the machine below this one: ask its provider, or run \
                             microVMs of several tenants on hardware of your own";

/// What microVMs of several tenants need.
pub(super) fn findings(facts: &HostSecurity) -> Vec<Finding> {
    let mut findings = vec![smt(facts.smt), ksm(facts.ksm)];
    findings.extend(vulnerabilities(&facts.vulnerabilities));
    findings.extend([
        landlock(facts.landlock_abi),
        seccomp(facts.seccomp),
        user_namespaces(facts.user_namespaces),
        userfaultfd(facts.userfaultfd_device),
    ]);
    findings
}

fn smt(smt: Option<Smt>) -> Finding {
    let (text, remedy) = match smt {
        Some(Smt::Off) => ("off: microVMs of two tenants never share a core at one time", None),
        Some(Smt::Absent) => (
            "none is visible; on a virtual machine, ask its provider whether its processors are \
             threads of shared cores",
            None,
        ),
        Some(Smt::On) => (
            "on: a microVM can time what another one does on the second thread of its core",
            Some(SMT_REMEDY),
        ),
        None => ("the kernel does not report it", Some("mount /sys")),
    };
    of("SMT", text, remedy)
}

fn ksm(ksm: Ksm) -> Finding {
    let (text, remedy) = match ksm {
        Ksm::Absent | Ksm::Off => ("off: the kernel merges no pages of different microVMs", None),
        Ksm::OfOthers => ("on, for other programs: firn's memory is not merged", None),
        Ksm::OfThisProcess => (
            "on, for this process and its microVMs: the time of a write shows a guest which pages \
             another one has",
            Some(
                "write 2 to /sys/kernel/mm/ksm/run, which also separates what is merged, or start \
                 firn without PR_SET_MEMORY_MERGE (systemd: MemoryKSM=no)",
            ),
        ),
    };
    of("KSM", text, remedy)
}

/// A finding for each vulnerability that the processor has, and one for the others.
fn vulnerabilities(all: &[Vulnerability]) -> Vec<Finding> {
    let (absent, present): (Vec<_>, Vec<_>) =
        all.iter().partition(|one| one.exposure == Exposure::NotAffected);
    let mut findings: Vec<_> = present.into_iter().map(vulnerability).collect();
    let names: Vec<_> = absent.iter().map(|one| one.name.as_str()).collect();
    findings.push(if all.is_empty() {
        let text = "the kernel reports no vulnerabilities of the processor";
        of("other vulnerabilities", text, Some("mount /sys"))
    } else {
        of("other vulnerabilities", &format!("not affected by {}", names.join(", ")), None)
    });
    findings
}

fn vulnerability(one: &Vulnerability) -> Finding {
    let remedy = match one.exposure {
        Exposure::NotAffected | Exposure::Mitigated => None,
        Exposure::Vulnerable => Some(UPDATE),
        Exposure::VulnerableThreads => Some(SMT_REMEDY),
        Exposure::Unknown => Some(OF_HYPERVISOR),
    };
    of(&one.name, &one.text, remedy)
}

fn landlock(abi: Option<i32>) -> Finding {
    match abi {
        Some(abi) => {
            let missing = match abi {
                ..4 => "; TCP is denied from 4 on, signals and abstract sockets from 6 on",
                4..6 => "; signals and abstract sockets are denied from 6 on",
                _ => "",
            };
            let text = format!("ABI {abi}: a monitor reaches no file by its path{missing}");
            let newer = (!missing.is_empty()).then_some("use Linux 6.12 or newer");
            of("Landlock", &text, newer)
        }
        None => of(
            "Landlock",
            "not available: one wall less between a monitor and files, TCP and other processes",
            Some(
                "use a kernel with CONFIG_SECURITY_LANDLOCK, and add landlock to lsm= on its \
                 command line",
            ),
        ),
    }
}

fn seccomp(available: bool) -> Finding {
    if available {
        return of("seccomp", "filters can end a process", None);
    }
    let text = "no filters: the whole interface of the kernel is open to a monitor";
    of("seccomp", text, Some("mount /proc, and use a kernel with CONFIG_SECCOMP_FILTER"))
}

fn user_namespaces(which: UserNamespaces) -> Finding {
    match which {
        UserNamespaces::All => of("user namespaces", "available to all users", None),
        UserNamespaces::Root(switch) => of(
            "user namespaces",
            "limited to root: without root's rights, monitors are not jailed in full",
            Some(&format!("run as root, or change {switch}")),
        ),
        UserNamespaces::None => of(
            "user namespaces",
            "none: monitors have no user of their own",
            Some("raise the sysctl user.max_user_namespaces"),
        ),
    }
}

fn userfaultfd(exists: bool) -> Finding {
    if exists {
        return of(USERFAULTFD_DEVICE, "access to page faults can be given by file mode", None);
    }
    of(
        USERFAULTFD_DEVICE,
        "missing: pagers need root's rights or vm.unprivileged_userfaultfd, which serves all users",
        Some("use Linux 6.1 or newer with CONFIG_USERFAULTFD"),
    )
}

fn of(what: &str, found: &str, remedy: Option<&str>) -> Finding {
    finding(
        what,
        remedy.map_or(Ok(found.to_owned()), |way| Err((found.to_owned(), way.to_owned()))),
    )
}

#[cfg(test)]
#[path = "security_tests.rs"]
mod tests;
