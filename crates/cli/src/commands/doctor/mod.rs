//! `firn doctor`: what this host can do, what is missing, how to get it.

mod security;

use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use firn_base::{error_chain, format_bytes};
use serde::Serialize;

use firn_memory::HostFacts;
use firn_run::HostSecurity;
use firn_vmm::{KVM_DEVICE, Virtualization, open_kvm};

use crate::output;

/// Arguments of `firn doctor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firn doctor
  firn doctor --json
  firn lab run -- firn doctor

The second part of the list matters where microVMs of several tenants run: docs/concepts/security.md explains it.
Exit code 0 where microVMs with Linux can run here or in the lab, 1 otherwise.")]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One property of the host.
#[derive(Debug, Serialize)]
struct Finding {
    /// The property.
    what: String,
    /// Whether it is as required.
    good: bool,
    /// The state found.
    found: String,
    /// How to get what is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

#[derive(Debug, Serialize)]
struct Diagnosis {
    /// Where microVMs with Linux can run: `host`, `lab` or `nowhere`.
    linux_guests: &'static str,
    findings: Vec<Finding>,
    /// What separates microVMs of several tenants, where `good` is false for a warning.
    security: Vec<Finding>,
}

pub(crate) fn run(arguments: &DoctorArgs) -> ExitCode {
    let diagnosis = diagnose();
    if arguments.json {
        output::json(&diagnosis);
    } else {
        print(&diagnosis);
    }
    if diagnosis.linux_guests == "nowhere" { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn diagnose() -> Diagnosis {
    let kvm = kvm();
    let hardware = hardware();
    let guest = guest_files();
    let lab = lab_built();
    let linux_guests = match (kvm.good && hardware.good && guest.good, lab.good) {
        (true, _) => "host",
        (false, true) => "lab",
        (false, false) => "nowhere",
    };
    let mut findings = vec![kvm, hardware, guest, lab];
    findings.extend(host_facts());
    findings.push(devdax());
    let security = security::findings(&HostSecurity::read());
    Diagnosis { linux_guests, findings, security }
}

fn finding(what: &str, result: Result<String, (String, String)>) -> Finding {
    let what = what.to_owned();
    match result {
        Ok(found) => Finding { what, good: true, found, remedy: None },
        Err((found, remedy)) => Finding { what, good: false, found, remedy: Some(remedy) },
    }
}

fn kvm() -> Finding {
    let result = match open_kvm(Path::new(KVM_DEVICE)) {
        Ok(kvm) => Ok(format!("{KVM_DEVICE}, API version {}", kvm.get_api_version())),
        // The error's text contains the remedy.
        Err(error) => Err((error_chain(&error), "see the error above".to_owned())),
    };
    finding("KVM", result)
}

fn hardware() -> Finding {
    let result = match Virtualization::of_host() {
        Virtualization::Hardware => Ok("VT-x or SVM: Linux guests run natively".to_owned()),
        Virtualization::Software => Err((
            "neither VT-x nor SVM: KVM has software page tables".to_owned(),
            "Linux guests run in the lab (`firn lab run -- firn ...`); for native ones use a \
             machine with hardware virtualisation"
                .to_owned(),
        )),
    };
    finding("hardware virtualisation", result)
}

fn guest_files() -> Finding {
    let missing: Vec<String> = ["vmlinux", "initramfs.cpio", "root.erofs", "overlay.ext4"]
        .map(firn_lab::guest_file)
        .into_iter()
        .filter(|path| !path.is_file())
        .map(|path| path.display().to_string())
        .collect();
    let result = if missing.is_empty() {
        Ok("kernel, initramfs, root file system and writable disk are built".to_owned())
    } else {
        Err((format!("missing: {}", missing.join(", ")), "run `firn lab build`".to_owned()))
    };
    finding("guest files", result)
}

fn lab_built() -> Finding {
    let result = if firn_lab::is_built() {
        Ok("built".to_owned())
    } else {
        Err(("not built".to_owned(), "run `firn lab build` (needs a Debian mirror)".to_owned()))
    };
    finding("lab", result)
}

fn host_facts() -> Vec<Finding> {
    let facts = match HostFacts::read() {
        Ok(facts) => facts,
        Err(error) => {
            let result = Err((error_chain(&error), "mount /proc and /sys".to_owned()));
            return vec![finding("host", result)];
        }
    };
    let uffd = if facts.userfaultfd {
        Ok("available".to_owned())
    } else {
        Err((
            "not available to this user".to_owned(),
            "run as root, give this user access to /dev/userfaultfd, or set the sysctl \
             vm.unprivileged_userfaultfd to 1"
                .to_owned(),
        ))
    };
    vec![
        finding("kernel", Ok(facts.kernel.clone())),
        finding(
            "memory",
            Ok(format!(
                "{}, {} available",
                format_bytes(facts.memory_total),
                format_bytes(facts.memory_available)
            )),
        ),
        finding("userfaultfd", uffd),
    ]
}

/// Byte-addressable memory as a device. It is optional.
fn devdax() -> Finding {
    let mut names: Vec<String> = std::fs::read_dir("/dev")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("dax"))
        .collect();
    names.sort();
    finding("devdax", Ok(if names.is_empty() { "none".to_owned() } else { names.join(", ") }))
}

fn print(diagnosis: &Diagnosis) {
    print_findings(&diagnosis.findings, "missing");
    output::line("microVMs of several tenants:");
    print_findings(&diagnosis.security, "warning");
    output::line(match diagnosis.linux_guests {
        "host" => "microVMs with Linux run on this host",
        "lab" => "microVMs with Linux run in the lab, where times are not meaningful",
        _ => "microVMs with Linux cannot run yet; see the missing items above",
    });
}

/// Prints findings; `bad`, which has seven letters, marks those that are not as required.
fn print_findings(findings: &[Finding], bad: &str) {
    for Finding { what, good, found, remedy } in findings {
        let mark = if *good { "ok     " } else { bad };
        output::line(&format!("{mark} {what}: {found}"));
        if let Some(remedy) = remedy {
            output::line(&format!("        {remedy}"));
        }
    }
}
